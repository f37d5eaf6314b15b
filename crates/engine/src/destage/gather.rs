//! Gathering the bytes of a destage from RAM, from records that could not be written, and from the
//! cache device.

use forebay_block::{BLOCK_SIZE, Completion, IoError};
use forebay_format::EntryKind;

use crate::api::Effects;
use crate::cache::Cache;
use crate::contents::Stored;
use crate::destage::Destaging;
use crate::form::{AssociateOwner, decode};
use crate::key::Key;
use crate::limits::SEGMENT_READ_MAX;
use crate::log::read::{Near, Reader, SegmentRead};
use crate::slab::Id;

impl Destaging {
    /// Gathers the bytes of a destage's blocks and starts the reads that this needs.
    pub(super) fn gather(&mut self, cache: &mut Cache, id: Id, fx: &mut Effects) {
        let destage = self.destages.get_mut(id);
        let volume = destage.volume;
        let mut buf = std::mem::take(&mut destage.buf);
        let mut from_device = Vec::new();
        let mut deltas = Vec::new();
        for (i, block) in destage.blocks.iter().enumerate() {
            let key = Key::new(volume, block);
            let place = destage.versions[i].place;
            let room: &mut [u8; BLOCK_SIZE] = (&mut buf[i * BLOCK_SIZE..(i + 1) * BLOCK_SIZE])
                .try_into()
                .expect("a block's length");
            // Since a cut was taken, blocks of it may have been written again.
            let in_ram = !destage.in_cut || Self::is_newest(cache, key, &destage.versions[i]);
            let (ram, locks) = (&cache.ram, &cache.locks);
            if in_ram && ram.peek_applied(locks, key, |bytes| room.copy_from_slice(bytes)).is_some()
            {
                continue;
            }
            if place.kind == EntryKind::Zero {
                room.fill(0);
            } else if let Some(base) = destage.versions[i].base {
                deltas.push((i, Stored { key, place }, base));
            } else if let Some(payload) =
                cache.log.failed_payload(place.segment, place.offset, place.len)
            {
                let mut spare = [0; BLOCK_SIZE];
                match decode(&place, payload, &mut spare) {
                    Some(bytes) => room.copy_from_slice(bytes),
                    None => destage.bad.push(i),
                }
            } else {
                from_device.push(Stored { key, place });
            }
        }
        destage.buf = buf;
        destage.reads += deltas.len() as u32;
        for (block, item, base) in deltas {
            cache.read_associate(AssociateOwner::Destage(id, block), item, base, fx);
        }
        // Blocks that were written together lie together: one read fetches them all.
        let near = Near::Pages(0, SEGMENT_READ_MAX as u32);
        for read in SegmentRead::all(Reader::Destage(id), near, from_device) {
            self.destages.get_mut(id).reads += 1;
            cache.read_payloads(read, fx);
        }
        self.gathered(cache, id, fx);
    }

    /// Takes blocks that were read back from the cache device.
    pub fn read_back(
        &mut self,
        cache: &mut Cache,
        id: Id,
        read: &SegmentRead,
        done: &Completion,
        fx: &mut Effects,
    ) {
        let destage = self.destages.get_mut(id);
        let error = done.result.as_ref().err();
        for item in &read.items {
            let mut spare = [0; BLOCK_SIZE];
            let payload = read.payload(done, item);
            let bytes = payload.and_then(|payload| decode(&item.place, payload, &mut spare));
            let block = (item.key.block() - destage.blocks.first) as usize;
            destage.take(block, bytes, error.cloned());
        }
        self.gathered(cache, id, fx);
    }

    /// Takes a block that is stored as a delta: `bytes` is its content, or `None` if it could not
    /// be read (`error`) or is corrupt.
    pub fn put_together(
        &mut self,
        cache: &mut Cache,
        id: Id,
        block: usize,
        bytes: Option<&[u8]>,
        error: Option<IoError>,
        fx: &mut Effects,
    ) {
        self.destages.get_mut(id).take(block, bytes, error);
        self.gathered(cache, id, fx);
    }
}
