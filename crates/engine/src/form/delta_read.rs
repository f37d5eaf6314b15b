//! Reading a block that is stored as a delta or against a similar one: reads its base and its
//! payload in parallel, then combines them.

use std::ops::Range;

use forebay_block::{BLOCK_SIZE, Completion, IoBuf, IoError};
use forebay_codec::{apply_delta, apply_similar, crc32c};
use forebay_format::EntryKind;

use crate::contents::{Place, Stored};
use crate::form::Forms;
use crate::form::payload::{decode, decode_unchecked};
use crate::log::Log;
use crate::log::read::{Reader, SegmentRead};
use crate::slab::Id;

/// The recipient of a combined block.
#[derive(Clone, Copy, Debug)]
pub enum AssociateOwner {
    /// A client's read or a merge.
    Read(Id),
    /// A destage, and the position of the block in it.
    Destage(Id, usize),
    /// Reclaim, which writes it whole again.
    Rebase,
    /// The comparison with the primary, and the position of the block in it.
    Compare(usize),
}

/// A block whose parts are being read.
#[derive(Debug)]
pub struct Associate {
    /// The recipient.
    pub owner: AssociateOwner,
    /// The block.
    pub item: Stored,
    /// Places of base and delta, and their payloads as far as they have been read.
    places: [Place; 2],
    payloads: [Option<Payload>; 2],
    outstanding: u32,
    /// The error, if a part could not be read.
    pub error: Option<IoError>,
}

/// A payload within the bytes that were read with it.
#[derive(Debug)]
struct Payload {
    buf: IoBuf,
    at: Range<usize>,
}

impl Payload {
    fn copy_of(bytes: &[u8]) -> Self {
        Self { buf: IoBuf::copy_of(bytes), at: 0..bytes.len() }
    }

    fn bytes(&self) -> &[u8] {
        &self.buf[self.at.clone()]
    }
}

impl Forms {
    /// Begins to read a block from its base and its delta, both of which have been written. Returns
    /// the reads that this needs, and the block if it needs none.
    pub fn begin_associate(
        &mut self,
        log: &Log,
        owner: AssociateOwner,
        item: Stored,
        base: Place,
    ) -> (impl Iterator<Item = SegmentRead> + use<>, Option<Associate>) {
        let places = [base, item.place];
        let in_memory = |place: Place| log.failed_payload(place.segment, place.offset, place.len);
        let payloads = places.map(|place| in_memory(place).map(Payload::copy_of));
        let missing = payloads.each_ref().map(Option::is_none);
        let outstanding = missing.iter().filter(|missing| **missing).count() as u32;
        let associate = Associate { owner, item, places, payloads, outstanding, error: None };
        let id = self.associates.insert(associate);
        let parts = places.into_iter().enumerate().filter(move |(part, _)| missing[*part]);
        let reads = parts.map(move |(part, place)| {
            SegmentRead::one(Reader::Associate(id, part), Stored { key: item.key, place })
        });
        (reads, (outstanding == 0).then(|| self.associates.remove(id)))
    }

    /// Takes the base or the delta that has been read; returns the block after the last part.
    pub fn associate_read(
        &mut self,
        id: Id,
        part: usize,
        read: &SegmentRead,
        done: &mut Completion,
    ) -> Option<Associate> {
        let associate = self.associates.get_mut(id);
        if let Err(error) = &done.result {
            associate.error = Some(error.clone());
        }
        let at = read.payload_range(done, &read.items[0]);
        let payload = at.map(|at| Payload { buf: std::mem::take(&mut done.buf), at });
        associate.payloads[part] = payload;
        associate.outstanding -= 1;
        (associate.outstanding == 0).then(|| self.associates.remove(id))
    }
}

impl Associate {
    /// Verifies both parts and combines them in `room`. Returns `None` if a part could not be read
    /// or is corrupt.
    pub fn block<'a>(&self, room: &'a mut [u8; BLOCK_SIZE]) -> Option<&'a [u8]> {
        let [Some(base), Some(delta)] = &self.payloads else { return None };
        let (base, delta) = (base.bytes(), delta.bytes());
        let mut base_room = [0; BLOCK_SIZE];
        if crc32c(delta) != self.item.place.crc {
            return None;
        }
        let made = match self.item.place.kind {
            // The payload itself tells whether the base is the right one: an entry has no room for
            // the base's CRC.
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
