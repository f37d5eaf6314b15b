//! Duplicates: a block that equals a block written shortly before has no payload of its own. Its
//! entry names the other block's payload, which lies in the same segment or an older one.
//!
//! Databases write most pages twice: InnoDB to its doublewrite buffer and then in place, PostgreSQL
//! to its log and then in place. A small table holds fingerprints of the blocks that clients wrote
//! last. A block with a known fingerprint is compared byte by byte with the bytes in the RAM tier.
//!
//! In the index both blocks have the same place, and each counts as live there ([`crate::contents`]
//! lists them). An entry is void if the segment of its payload has left the log: the block was
//! copied, which a later entry records, or evicted.

use forebay_codec::crc32c;

use crate::contents::Place;
use crate::form::{Context, Forms};
use crate::key::Key;
use crate::limits::BASES_SHARE;
use crate::log::builder::{Expect, Form, Payload, Shared};

/// Slots for the fingerprints of the last blocks written; a newer block replaces an older one in
/// its slot.
const PRINTS: usize = 4096;

/// The fingerprints for finding duplicates.
#[derive(Debug)]
pub struct Duplicates {
    /// Fingerprint and block, at the index that the fingerprint determines.
    prints: Vec<(u32, Key)>,
}

/// A number that equal blocks share, and that differs for almost all others.
pub fn fingerprint(block: &[u8]) -> u32 {
    crc32c(block)
}

impl Duplicates {
    /// Starts with no fingerprint known.
    pub fn new() -> Self {
        let nothing = (0, Key(u64::MAX));
        Self { prints: vec![nothing; PRINTS] }
    }

    /// Notes that a block with this fingerprint is written whole.
    pub fn note(&mut self, print: u32, key: Key) {
        self.prints[print as usize % PRINTS] = (print, key);
    }

    /// The last block that was written with this fingerprint, if it is known.
    fn find(&self, print: u32) -> Option<Key> {
        let (known, key) = self.prints[print as usize % PRINTS];
        (known == print && key != Key(u64::MAX)).then_some(key)
    }
}

impl Forms {
    /// The place of another block with the same bytes, if its payload can be shared.
    pub(super) fn duplicate_of(
        &self,
        cx: &Context<'_>,
        key: Key,
        block: &[u8],
        print: u32,
    ) -> Option<Place> {
        let other = self.duplicates.find(print).filter(|&other| other != key)?;
        let place = cx.contents.get(other)?;
        let seq = cx.log.seq_of(&place);
        let near = cx.is_near(seq) && cx.is_young(seq);
        let sharers_max = cx.contents.index().capacity() / BASES_SHARE;
        let room = cx.contents.sharers() < sharers_max && cx.takes_sharer(place.segment);
        let same = || cx.peek(other, |bytes| bytes == block) == Some(true);
        (place.kind.is_whole() && near && room && same()).then_some(place)
    }

    /// Adds a block that shares the payload at `place`.
    pub(super) fn store_duplicate(
        &self,
        cx: &mut Context<'_>,
        key: Key,
        place: &Place,
        dirty: bool,
        expect: Expect,
    ) {
        let Place { segment, offset, kind, len, crc, .. } = *place;
        let seq = cx.log.segment(segment as usize).seq;
        let payload = Payload::Shared(Shared { seq, segment, offset });
        let form = Form { kind, payload, len, crc, against: None };
        cx.log.builder().push_form(key, form, dirty, expect);
        cx.stats.duplicate_blocks += 1;
    }
}
