//! Loading the log: the entries of its segments are applied to the contents, oldest first.

use forebay_format::{Entry, EntryKind, Lsn, SegmentSeq};
use forebay_policy::Touch;

use crate::api::Trust;
use crate::cache::Cache;
use crate::contents::Place;
use crate::key::Key;
use crate::life::detach::Detach;
use crate::log::Loaded;
use crate::recovery::first::Pass;
use crate::recovery::salvage::is_placeholder;
use crate::recovery::{Phase, Start};

/// Number of entries whose index buckets are prefetched together.
pub(super) const WARM_AHEAD: usize = 16;

/// The blocks that an entry names.
pub(super) fn keys_of(entry: &Entry) -> impl Iterator<Item = Key> + use<> {
    let volume = entry.volume;
    let blocks = entry.block..entry.block + u64::from(entry.count);
    blocks.map(move |block| Key::new(volume, block))
}

impl Start {
    /// Reads and applies the entries of every segment of the log, oldest first: all entries, or
    /// those of the needed blocks.
    pub(super) fn load_log(&mut self, cache: &mut Cache, pass: Pass) {
        self.clear_for_loading(cache);
        let r = self.log_mut();
        (r.pass, r.is_unfit) = (pass, false);
        r.sifted.clear();
        r.apply = r.survey.start;
        (r.hole, r.lossy) = (None, false);
        let queue: Vec<usize> = r.survey.log.range(r.survey.start..).map(|(_, &i)| i).collect();
        for &i in &queue {
            r.survey.found[i].restore_entries();
        }
        cache.contents.reserve(queue.iter().map(|&i| r.survey.found[i].entries()).sum());
        if pass == Pass::First {
            cache.contents.begin_loading(r.needed.take_keys());
        }
        r.enter(Phase::Loading, queue);
    }

    fn clear_for_loading(&mut self, cache: &mut Cache) {
        cache.contents.clear(cache.config.index_blocks);
        self.to_fence.clear();
        cache.log.clear_segments();
    }

    /// Applies the segments that are next in order and whose entries have been read.
    pub(super) fn apply_loaded(&mut self, cache: &mut Cache, detach: &mut Detach) {
        if self.log().pass == Pass::First {
            return self.apply_sifted(cache);
        }
        loop {
            let r = self.log_mut();
            let seq = r.apply;
            let Some(&i) = r.survey.log.get(&seq) else { return };
            let found = &mut r.survey.found[i];
            if found.damaged {
                if !r.survey.drop_damaged(seq) {
                    return self
                        .refuse(cache, format!("{seq} is damaged, and may hold dirty blocks"));
                }
                return self.load_log(cache, Pass::Full);
            }
            if !self.accepts_loss(cache) {
                return;
            }
            let r = self.log_mut();
            let found = &mut r.survey.found[i];
            let entries = match (&mut found.scanned, &mut found.entries) {
                (Some(scanned), _) => std::mem::take(&mut scanned.entries),
                (None, Some(entries)) => std::mem::take(entries),
                (None, None) => return,
            };
            r.apply = seq.next();
            self.apply_segment(cache, Some(detach), seq, i, entries);
        }
    }

    /// Makes a segment part of the log; its footer has `entries` entries in `cells` cells.
    pub(super) fn load_segment(
        &mut self,
        cache: &mut Cache,
        seq: SegmentSeq,
        i: usize,
        (entries, cells): (usize, usize),
    ) {
        let (entries, cells) = (entries as u32, cells as u32);
        let found = &self.log().survey.found[i];
        let used = found.scanned.as_ref().map_or(0, |s| s.used);
        let first_lsn = found.first().map_or(Lsn(1), |l| l.lsn.next());
        let last_lsn = found.last().map_or(Lsn(0), |l| l.lsn);
        let durable = cache.config.segment_size;
        cache.contents.begin_segment(i, seq);
        cache.log.load(i, seq, &Loaded { used, durable, entries, cells, first_lsn, last_lsn });
    }

    /// Applies all entries of a segment. Those of a device that had failed may be `doubt`ed.
    pub(super) fn apply_segment(
        &mut self,
        cache: &mut Cache,
        mut doubt: Option<&mut Detach>,
        seq: SegmentSeq,
        i: usize,
        entries: Vec<Entry>,
    ) {
        let found = &self.log().survey.found[i];
        let lens = (entries.len(), found.cells(&entries, cache.config.unit_entries));
        self.load_segment(cache, seq, i, lens);
        let r = self.log();
        let found = &r.survey.found[i];
        let first = found.first().map_or(Lsn(1), |l| l.lsn.next());
        let seal = found.scanned.is_some();
        let is_doubted = cache.config.trust != Trust::Full && self.is_scanned(i);
        let mut lsn = Lsn(first.0 - 1);
        for (ordinal, entry) in entries.iter().enumerate() {
            if ordinal % WARM_AHEAD == 0 {
                let ahead = entries.iter().skip(ordinal).take(WARM_AHEAD);
                ahead.for_each(|entry| {
                    cache.contents.index().warm(Key::new(entry.volume, entry.block))
                });
            }
            if entry.first {
                lsn = lsn.next();
            }
            if is_placeholder(entry) {
                let r = self.log_mut();
                r.hole = Some(seq);
                r.lossy |= lsn >= r.survey.clean;
            }
            let is_dirty = self.log().is_dirty(entry, lsn);
            if let Some(detach) = doubt.as_mut().filter(|_| is_dirty && is_doubted)
                && Self::counts(cache, entry)
            {
                keys_of(entry).for_each(|key| detach.doubt(key));
            }
            self.apply_entry(cache, i, ordinal, entry, is_dirty);
        }
        if seal {
            let r = self.log_mut();
            r.survey.found[i].entries = Some(entries);
        }
    }

    /// Whether an entry says something about blocks that are served. One of blocks past the end of
    /// their volume was forged.
    pub(super) fn counts(cache: &Cache, entry: &Entry) -> bool {
        let end = entry.block + u64::from(entry.count);
        let volume = cache.known_volume(entry.volume);
        let is_within = volume.is_some_and(|volume| end <= volume.blocks());
        is_within && entry.kind != EntryKind::Checkpoint
    }

    /// Applies an entry of the segment at position `index` to those of its blocks that this pass is
    /// for.
    pub(super) fn apply_entry(
        &mut self,
        cache: &mut Cache,
        index: usize,
        ordinal: usize,
        entry: &Entry,
        dirty: bool,
    ) {
        if !Self::counts(cache, entry) {
            return;
        }
        let seq = cache.log.segment(index).seq;
        let back = entry.base.map(|base| base.back).or(entry.shared);
        let from = SegmentSeq(seq.0.saturating_sub(u64::from(back.unwrap_or(0))));
        let position = cache.log.position(from);
        // A position without a segment has the number 0, which no segment has.
        let gone = from.0 == 0 || cache.log.segment(position).seq != from;
        let is_outside = !Self::is_in_area(cache, entry);
        let own = match (entry.stored, entry.shared) {
            (Some(unit), _) => cache.log.len() as usize + unit.extent as usize,
            (None, Some(_)) => position,
            (None, None) => index,
        };
        if let Some(unit) = entry.stored.filter(|_| !is_outside) {
            let pages = cache.contents.pages();
            let page = pages.covered(own as u32, entry.offset..entry.offset).start;
            pages.recover_unit(page, u32::from(unit.page) - 1);
        }
        let against = entry.base.map(|base| Place {
            segment: position as u32,
            offset: base.offset,
            len: base.len,
            kind: base.kind,
            crc: 0,
            dirty: false,
            meta: 0,
        });
        let place = Place {
            segment: own as u32,
            offset: if entry.kind.has_payload() { entry.offset } else { ordinal as u32 * 8 },
            len: entry.len,
            kind: entry.kind,
            crc: entry.crc,
            dirty,
            meta: cache.policy.inserted(Touch::Read),
        };
        let pass = self.log.as_ref().map(|r| r.pass);
        for key in keys_of(entry) {
            let is_skipped = match pass {
                Some(Pass::Full) => false,
                Some(Pass::First) => !cache.contents.is_settled(key),
                None => cache.contents.is_settled(key),
            };
            if is_skipped {
                // The newer version may not be durable: until it is, a crash brings this one back.
                if pass.is_none() && !is_outside {
                    cache.contents.pages().free_later(&place);
                }
                continue;
            }
            // The block's base, or the payload that it shares, has left the log. So the block was
            // evicted, or a later record has it.
            let orphan = entry.kind == EntryKind::Delta && cache.contents.base_of(key).is_none();
            let lossy = self.log.as_ref().is_some_and(|r| r.lossy);
            if dirty && (orphan && lossy || is_outside) {
                // The base may have been in a lost record, or may itself be lost.
                let offset = ordinal as u32 * 8;
                let place = Place { kind: EntryKind::Lost, segment: index as u32, offset, ..place };
                cache.contents.place(
                    cache.now,
                    key,
                    Place { len: 0, crc: 0, ..place },
                    None,
                    false,
                    &mut cache.ram,
                );
                self.to_fence.push_back(key);
                continue;
            }
            // A lost block that is not dirty was written again, and the primary has that.
            let is_over = entry.kind == EntryKind::Lost && !dirty;
            if entry.kind == EntryKind::Invalidate || is_over || orphan || gone || is_outside {
                cache.contents.forget(key, &mut cache.ram);
                continue;
            }
            cache.contents.place(cache.now, key, place, against, false, &mut cache.ram);
            if back.is_some() {
                cache.contents.note_sharer(key, position, from, seq);
            }
        }
    }

    /// Whether the payload of an entry is within the area, if it is in the store.
    fn is_in_area(cache: &Cache, entry: &Entry) -> bool {
        entry.stored.is_none_or(|unit| {
            unit.extent < cache.store.extents()
                && entry.payload_end() <= u64::from(cache.config.segment_size)
        })
    }

    /// Whether a segment has no footer, which would prove that its records were durable.
    fn is_scanned(&self, index: usize) -> bool {
        let found = self.log.as_ref().map(|r| &r.survey.found[index]);
        found.is_some_and(|found| found.scanned.is_some() && !found.sealed)
    }
}
