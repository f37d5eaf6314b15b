//! Reading a block that is stored as a delta, or against a similar one: its base and the payload,
//! at the same time, then the block made of both.

use forebay_block::{BLOCK_SIZE, Completion, IoError};
use forebay_codec::{apply_delta, apply_similar, crc32c};
use forebay_format::EntryKind;

use crate::Engine;
use crate::api::Effects;
use crate::contents::Place;
use crate::form::payload::{decode, decode_unchecked};
use crate::log::read::{Reader, SegmentRead};
use crate::op::SsdItem;
use crate::slab::Id;

/// Who is told when a block has been put together.
#[derive(Clone, Copy, Debug)]
pub enum AssociateOwner {
    /// A read.
    Read(Id),
    /// A destage, and the position of the block in it.
    Destage(Id, usize),
    /// Reclaim, which writes it whole again.
    Rebase,
    /// The comparison with the primary, and the position of the block in it.
    Compare(usize),
}

/// A block being put together.
#[derive(Debug)]
pub struct Associate {
    owner: AssociateOwner,
    item: SsdItem,
    /// Where base and delta lie, and what has been read of them.
    places: [Place; 2],
    payloads: [Option<Vec<u8>>; 2],
    outstanding: u32,
    error: Option<IoError>,
}

impl Engine {
    /// Whether a delta and its base have been written.
    pub(crate) fn is_associate_written(&self, base: &Place, place: &Place) -> bool {
        [base, place].iter().all(|place| self.log.is_written(place.segment, place.offset))
    }

    /// Reads a block's base and delta, both of which have been written.
    pub(crate) fn read_associate(
        &mut self,
        owner: AssociateOwner,
        item: SsdItem,
        base: Place,
        fx: &mut Effects,
    ) {
        let places = [base, item.place];
        let in_memory =
            |place: Place| self.log.failed_payload(place.segment, place.offset, place.len);
        let payloads = places.map(|place| in_memory(place).map(<[u8]>::to_vec));
        let missing = payloads.each_ref().map(Option::is_none);
        let outstanding = missing.iter().filter(|missing| **missing).count() as u32;
        let associate = Associate { owner, item, places, payloads, outstanding, error: None };
        let id = self.form.associates.insert(associate);
        for (part, place) in places.into_iter().enumerate().filter(|(part, _)| missing[*part]) {
            let item = SsdItem { key: item.key, place };
            self.read_payloads(SegmentRead::one(Reader::Associate(id, part), item), fx);
        }
        if outstanding == 0 {
            self.associate_complete(id, fx);
        }
    }

    /// Base or delta have been read.
    pub(crate) fn associate_read(
        &mut self,
        id: Id,
        part: usize,
        read: &SegmentRead,
        done: &Completion,
        fx: &mut Effects,
    ) {
        let associate = self.form.associates.get_mut(id);
        match &done.result {
            Ok(()) => {
                let payload = read.payload(done, &read.items[0]);
                associate.payloads[part] = payload.map(<[u8]>::to_vec);
            }
            Err(error) => associate.error = Some(error.clone()),
        }
        associate.outstanding -= 1;
        if associate.outstanding == 0 {
            self.associate_complete(id, fx);
        }
    }

    fn associate_complete(&mut self, id: Id, fx: &mut Effects) {
        let associate = self.form.associates.remove(id);
        let Associate { owner, item, error, .. } = &associate;
        let mut room = [0; BLOCK_SIZE];
        let block = associate.block(&mut room).filter(|_| error.is_none());
        match *owner {
            AssociateOwner::Read(op) => self.block_read(op, item, block, error.as_ref(), fx),
            AssociateOwner::Destage(destage, at) => {
                self.destage_block_read(destage, at, block, error.clone(), fx);
            }
            AssociateOwner::Compare(at) => self.compare_block(at, block, fx),
            AssociateOwner::Rebase => self.rebase_read(item, block, error.as_ref(), fx),
        }
    }
}

impl Associate {
    /// Checks both parts and puts the block together in `room`.
    fn block<'a>(&self, room: &'a mut [u8; BLOCK_SIZE]) -> Option<&'a [u8]> {
        let [Some(base), Some(delta)] = &self.payloads else { return None };
        let mut base_room = [0; BLOCK_SIZE];
        if crc32c(delta) != self.item.place.crc {
            return None;
        }
        let made = match self.item.place.kind {
            // The payload says whether the base is the right one: an entry has no room for its CRC.
            EntryKind::Similar => {
                let base = decode_unchecked(&self.places[0], base, &mut base_room)?;
                apply_similar(base, delta, &mut room[..])
            }
            _ => {
                let base = decode(&self.places[0], base, &mut base_room)?;
                apply_delta(base, delta, &mut room[..]).is_ok()
            }
        };
        made.then_some(&room[..])
    }
}
