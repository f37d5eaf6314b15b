//! The first pass over a log: before the shard serves, only the entries of *needed* blocks are
//! applied. Those are the blocks that may be dirty, and those that a segment without a footer
//! names. All other blocks are clean, and are loaded while the shard serves
//! ([`crate::recovery::late`]).
//!
//! A dirty delta rests on an older entry of its block, so the needed blocks must be known before
//! any entry is applied. They are collected first, from the footers of the segments that may have
//! dirty entries; then the footers of all segments are read, oldest first.
//!
//! Every footer is verified before the shard serves. If any is not as it should be, all of the log
//! is loaded before the shard serves.

use forebay_format::{Entry, FooterTrailer, Lsn, SegmentSeq, footer_entries};

use crate::api::Trust;
use crate::cache::Cache;
use crate::contents::Contents;
use crate::key::{Key, LargeMap};
use crate::recovery::load::keys_of;
use crate::recovery::salvage::is_placeholder;
use crate::recovery::{Phase, Start};

/// Bits of the filter for each needed block.
const FILTER_BITS: usize = 8;

/// The part of the log that is applied before the shard serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pass {
    /// All entries.
    Full,
    /// Those of the needed blocks.
    First,
}

/// The needed blocks.
#[derive(Debug, Default)]
pub(super) struct Needed {
    keys: LargeMap<()>,
    /// One bit for each hash of a needed block: most other blocks are told apart without a lookup.
    filter: Vec<u64>,
}

/// An entry of a needed block.
#[derive(Debug)]
pub(super) struct Sifted {
    /// Its number in its segment, from 0.
    pub ordinal: usize,
    pub entry: Entry,
    pub is_dirty: bool,
}

impl Needed {
    fn add(&mut self, cache: &Cache, entry: &Entry) {
        if Start::counts(cache, entry) {
            keys_of(entry).for_each(|key| {
                self.keys.insert(key, ());
            });
        }
    }

    /// Takes the blocks, and keeps the filter for them.
    pub fn take_keys(&mut self) -> LargeMap<()> {
        let bits = (self.keys.len() * FILTER_BITS).next_power_of_two().max(u64::BITS as usize);
        self.filter = vec![0; bits / u64::BITS as usize];
        for (key, ()) in self.keys.iter() {
            let (word, bit) = self.bit_of(*key);
            self.filter[word] |= bit;
        }
        std::mem::take(&mut self.keys)
    }

    fn bit_of(&self, key: Key) -> (usize, u64) {
        let bits = self.filter.len() as u64 * u64::from(u64::BITS);
        // The upper bits of a product depend on all bits of the key.
        let hash = key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let bit = hash & (bits - 1);
        ((bit / u64::from(u64::BITS)) as usize, 1 << (bit % u64::from(u64::BITS)))
    }

    /// Whether an entry names a needed block; `contents` have the blocks taken.
    fn has_any(&self, contents: &Contents, entry: &Entry) -> bool {
        keys_of(entry).any(|key| {
            let (word, bit) = self.bit_of(key);
            self.filter[word] & bit != 0 && contents.is_settled(key)
        })
    }
}

/// Passes each entry of a footer to `each`, with its number and its LSN. Returns `None` if the
/// footer is not that of segment `seq`, or not as it should be.
fn sift(
    bytes: &[u8],
    seq: Option<SegmentSeq>,
    mut each: impl FnMut(usize, Lsn, &Entry),
) -> Option<()> {
    let (FooterTrailer { footer, .. }, entries) = footer_entries(bytes).ok()?;
    let mut lsn = Lsn(footer.first_lsn.0 - 1);
    let mut count = 0;
    for (ordinal, entry) in entries.enumerate() {
        let entry = entry.ok()?;
        if entry.first {
            lsn = lsn.next();
        }
        if is_placeholder(&entry) || ordinal == 0 && !entry.first {
            return None;
        }
        each(ordinal, lsn, &entry);
        count += 1;
    }
    let is_whole = count == footer.entries && lsn == footer.last_lsn;
    (Some(footer.seq) == seq && is_whole).then_some(())
}

impl Start {
    /// Whether the log is as a crash or a stop leaves it, so that a part of it is enough to serve.
    pub(super) fn is_sound(&self, cache: &Cache) -> bool {
        let survey = &self.log().survey;
        let is_good = |(_, &i): (&SegmentSeq, &usize)| {
            let found = &survey.found[i];
            let is_read = found.scanned.as_ref().is_none_or(|scanned| {
                let entries = &scanned.entries;
                scanned.is_whole && !found.sealed && !entries.iter().any(is_placeholder)
            });
            is_read && !found.damaged && !found.unreadable_footer
        };
        cache.config.trust == Trust::Full
            && !cache.config.accept_loss
            && survey.holes.is_empty()
            && survey.log.range(survey.start..).all(is_good)
    }

    /// Collects the needed blocks.
    pub(super) fn gather(&mut self, cache: &Cache) {
        let r = self.log_mut();
        r.needed = Needed::default();
        let mut queue = Vec::new();
        for (_, &i) in r.survey.log.range(r.survey.start..) {
            let found = &r.survey.found[i];
            match &found.scanned {
                Some(scanned) => {
                    scanned.entries.iter().for_each(|entry| r.needed.add(cache, entry));
                }
                None if found.last().is_some_and(|last| last.lsn >= r.survey.clean) => {
                    queue.push(i);
                }
                None => {}
            }
        }
        r.enter(Phase::Gathering, queue);
    }

    /// Takes a footer that may have dirty entries.
    pub(super) fn gather_footer(&mut self, cache: &Cache, i: usize, bytes: &[u8]) {
        let r = self.log_mut();
        let mut needed = std::mem::take(&mut r.needed);
        let found = sift(bytes, r.survey.found[i].seq(), |_, lsn, entry| {
            if r.is_dirty(entry, lsn) {
                needed.add(cache, entry);
            }
        });
        r.needed = needed;
        r.is_unfit |= found.is_none();
    }

    /// Takes a footer, and keeps its entries of needed blocks.
    pub(super) fn sift_footer(&mut self, cache: &Cache, i: usize, bytes: &[u8]) {
        let r = self.log_mut();
        let mut sifted = Vec::new();
        let found = sift(bytes, r.survey.found[i].seq(), |ordinal, lsn, entry| {
            if r.needed.has_any(&cache.contents, entry) {
                let is_dirty = r.is_dirty(entry, lsn);
                sifted.push(Sifted { ordinal, entry: *entry, is_dirty });
            }
        });
        r.is_unfit |= found.is_none();
        r.sifted.insert(i, sifted);
    }

    /// Applies the entries of needed blocks in the segments that are next in order and have been
    /// read.
    pub(super) fn apply_sifted(&mut self, cache: &mut Cache) {
        loop {
            let r = self.log_mut();
            let seq = r.apply;
            let Some(&i) = r.survey.log.get(&seq).filter(|_| !r.is_unfit) else { return };
            if let Some(scanned) = &mut r.survey.found[i].scanned {
                let entries = std::mem::take(&mut scanned.entries);
                r.apply = seq.next();
                self.apply_segment(cache, None, seq, i, entries);
                continue;
            }
            let Some(sifted) = r.sifted.remove(&i) else { return };
            r.apply = seq.next();
            let found = &r.survey.found[i];
            // Its footer tells both, since it was not read record by record.
            let lens = (found.entries() as usize, found.cells(&[], cache.config.unit_entries));
            self.load_segment(cache, seq, i, lens);
            for Sifted { ordinal, entry, is_dirty } in sifted {
                self.apply_entry(cache, i, ordinal, &entry, is_dirty);
            }
        }
    }
}
