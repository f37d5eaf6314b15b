//! Recovery: from the bytes on the cache device to the state at some record, at least the last
//! durable one.
//!
//! | found in a segment's place | is |
//! |---|---|
//! | footer, and no newer first record | sealed: its records were durable |
//! | first record newer than the footer, or no footer | unsealed: read record by record |
//! | neither | free |
//! | sealed or unsealed, up to the newest footer, not linked to the next | damaged: if everything before the next is clean, it and all before it are dropped; else it is read over its gaps ([`crate::recovery::salvage`]) |
//! | unsealed after the newest footer, linked | accepted up to where its chain breaks |
//! | unsealed, not linked | an orphan: never durable, erased |
//! | a record that knows of a durable record which is missing | damaged: read over its gaps |
//! | a gap that may have held dirty blocks | refused, unless the loss is accepted |
//!
//! Before it serves, orphans are erased and accepted segments get their footer, so that a second
//! crash finds the same. Where segments are few, the last one gets none: the log goes on in it
//! ([`crate::recovery::resume`]). `docs/internals/recovery.md` says why each row is right.

use std::collections::VecDeque;

use forebay_block::{Completion, Io, IoBuf};
use forebay_format::{
    Entry, EntryKind, Footer, Lsn, PAGE, SegmentSeq, encode_footer, footer_bytes,
};

use crate::api::{Effects, Health, State, Target, Trust};
use crate::cache::Cache;
use crate::contents::Place;
use crate::key::Key;
use crate::life::compare::Compare;
use crate::life::detach::Detach;
use crate::limits::RECOVERY_READS;
use crate::log::Loaded;
use crate::log::builder::Expect;
use crate::recovery::salvage::is_placeholder;
use crate::recovery::scan::Owner;
use crate::recovery::survey::Survey;
use crate::ticket::{Step, Ticket};

pub(crate) mod resume;
pub mod salvage;
pub(crate) mod scan;
pub(crate) mod survey;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Probing,
    Scanning,
    Loading,
    Erasing,
    FlushingErased,
    Sealing,
    Flushing,
}

/// What the start has to do, and what it found lost.
#[derive(Debug, Default)]
pub struct Start {
    /// The log, while it is being read.
    log: Option<Box<Recovery>>,
    /// Blocks that cannot be read back, of which the log does not say so yet.
    to_fence: VecDeque<Key>,
    /// Records that are gone, and that may have held dirty blocks.
    lost_records: Vec<salvage::Hole>,
}

/// A log being recovered.
#[derive(Debug)]
struct Recovery {
    phase: Phase,
    pub(crate) survey: Survey,
    /// The segment that the log goes on in, instead of a new one.
    pub(crate) resumed: Option<usize>,
    /// Positions to do in this phase, in order.
    queue: Vec<usize>,
    next: usize,
    in_flight: usize,
    /// The next segment whose entries are applied.
    apply: SegmentSeq,
    /// The last segment with a hole, and whether dirty blocks may have been in one.
    hole: Option<SegmentSeq>,
    lossy: bool,
}

/// Entries whose places in the index are fetched from memory together.
const WARM_AHEAD: usize = 16;

impl Start {
    /// Records that were found to be gone: any block may have been in them.
    pub fn lost_records(&self) -> &[salvage::Hole] {
        &self.lost_records
    }

    /// Begins to read the log.
    pub fn begin(
        &mut self,
        cache: &mut Cache,
        detach: &mut Detach,
        compare: &mut Compare,
        fx: &mut Effects,
    ) {
        let owner = Owner { pool: cache.config.pool, shard: cache.config.shard };
        let segments = cache.log.len() as usize;
        self.log = Some(Box::new(Recovery {
            phase: Phase::Probing,
            survey: Survey::new(owner, segments, cache.config.segment_size),
            resumed: None,
            queue: (0..segments).collect(),
            next: 0,
            in_flight: 0,
            apply: SegmentSeq(0),
            hole: None,
            lossy: false,
        }));
        self.pump_recovery(cache, detach, compare, fx);
    }

    /// Starts what the phase still has to do, and the next phase when nothing is left.
    fn pump_recovery(
        &mut self,
        cache: &mut Cache,
        detach: &mut Detach,
        compare: &mut Compare,
        fx: &mut Effects,
    ) {
        loop {
            let Some(r) = self.log.as_mut() else { return };
            if r.in_flight < RECOVERY_READS && r.next < r.queue.len() {
                let position = r.queue[r.next];
                r.next += 1;
                let phase = r.phase;
                self.start_steps(cache, detach, phase, position, fx);
                continue;
            }
            if r.in_flight > 0 {
                return;
            }
            match r.phase {
                Phase::Probing => self.plan_scans(),
                Phase::Scanning => self.plan_log(cache),
                Phase::Loading => self.plan_erasing(cache, detach),
                Phase::Erasing => self.plan_flush(cache, Phase::FlushingErased, fx),
                Phase::FlushingErased => self.plan_sealing(cache),
                Phase::Sealing => self.plan_flush(cache, Phase::Flushing, fx),
                Phase::Flushing => return self.serve(cache, detach, compare),
            }
        }
    }

    fn start_steps(
        &mut self,
        cache: &mut Cache,
        detach: &mut Detach,
        phase: Phase,
        position: usize,
        fx: &mut Effects,
    ) {
        match phase {
            Phase::Probing => {
                self.start_step(cache, Step::Head(position, 1), fx);
                self.start_step(cache, Step::Tail(position, 1), fx);
            }
            Phase::Scanning => self.start_step(cache, Step::Scan(position, 1), fx),
            Phase::Loading => {
                let found = &self.log.as_ref().expect("recovering").survey.found[position];
                if found.scanned.is_some() {
                    self.apply_loaded(cache, detach);
                } else {
                    self.start_step(cache, Step::Footer(position, 1), fx);
                }
            }
            Phase::Erasing => self.start_step(cache, Step::Erase(position, 1), fx),
            Phase::Sealing => self.start_step(cache, Step::Seal(position, 1), fx),
            Phase::FlushingErased | Phase::Flushing => self.start_step(cache, Step::Flush, fx),
        }
    }

    fn start_step(&mut self, cache: &mut Cache, step: Step, fx: &mut Effects) {
        let segment = cache.config.segment_size;
        let page = PAGE as u32;
        self.log.as_mut().expect("recovering").in_flight += 1;
        let ticket = Ticket::Recovery(step);
        match step {
            Step::Head(i, _) => cache.read_segment(fx, i, 0, PAGE, ticket),
            Step::Tail(i, _) => cache.read_segment(fx, i, segment - page, PAGE, ticket),
            Step::Scan(i, _) => cache.read_segment(fx, i, 0, segment as usize, ticket),
            Step::Footer(i, _) => {
                let found = &self.log.as_ref().expect("recovering").survey.found[i];
                let bytes = found.tail.as_ref().map_or(PAGE, |tail| tail.bytes);
                cache.read_segment(fx, i, segment - bytes as u32, bytes, ticket);
            }
            Step::Erase(i, _) => {
                let erased = self.erased(cache, i);
                let offset = cache.segment_offset(i) + u64::from(erased.start);
                let zeros = IoBuf::zeroed(erased.len());
                cache.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, zeros));
            }
            Step::Seal(i, _) => {
                let buf = self.footer_of(cache, i);
                let end = cache.segment_offset(i) + u64::from(segment);
                let offset = end - buf.len() as u64;
                cache.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, buf));
            }
            Step::Flush => cache.send(fx, Target::Cache, ticket, Io::flush),
        }
    }

    /// A read or write of recovery ended.
    pub fn step_done(
        &mut self,
        cache: &mut Cache,
        detach: &mut Detach,
        compare: &mut Compare,
        step: Step,
        done: Completion,
        fx: &mut Effects,
    ) {
        let Some(r) = self.log.as_mut() else { return };
        r.in_flight -= 1;
        if let Err(error) = &done.result {
            match step.again() {
                Some(again) => self.start_step(cache, again, fx),
                None if step.is_read() => self.take_bytes(cache, detach, step, &[]),
                None => {
                    return self
                        .refuse(cache, format!("the cache device cannot be written: {error}"));
                }
            }
        } else {
            self.take_bytes(cache, detach, step, &done.buf);
        }
        self.read_instead_of_footer(cache, step, fx);
        self.pump_recovery(cache, detach, compare, fx);
    }

    fn is_loading(&self) -> bool {
        self.log.as_ref().is_some_and(|r| r.phase == Phase::Loading)
    }

    /// A segment whose footer turned out bad is read record by record.
    fn read_instead_of_footer(&mut self, cache: &mut Cache, step: Step, fx: &mut Effects) {
        let Step::Footer(i, _) = step else { return };
        let bad = |r: &Recovery| r.survey.found[i].unreadable_footer;
        if self.is_loading() && self.log.as_deref().is_some_and(bad) {
            self.start_step(cache, Step::Scan(i, 1), fx);
        }
    }

    /// Takes what was read; nothing where it could not be read.
    fn take_bytes(&mut self, cache: &mut Cache, detach: &mut Detach, step: Step, bytes: &[u8]) {
        let survey = &mut self.log.as_mut().expect("recovering").survey;
        match step {
            Step::Head(i, _) => survey.take_head(i, bytes),
            Step::Tail(i, _) => survey.take_tail(i, bytes),
            Step::Scan(i, _) => {
                survey.take_segment(i, bytes);
                if self.is_loading() {
                    self.apply_loaded(cache, detach);
                }
            }
            Step::Footer(i, _) => {
                survey.take_footer(i, bytes);
                self.apply_loaded(cache, detach);
            }
            Step::Erase(..) | Step::Seal(..) | Step::Flush => {}
        }
    }

    /// After probing: which segments must be read record by record.
    fn plan_scans(&mut self) {
        let r = self.log.as_mut().expect("recovering");
        r.survey.classify();
        r.enter(Phase::Scanning, r.survey.to_scan());
    }

    /// After scanning: which segments make up the log.
    fn plan_log(&mut self, cache: &mut Cache) {
        let r = self.log.as_mut().expect("recovering");
        if let Err(damage) = r.survey.assemble() {
            return self.refuse(cache, damage);
        }
        if self.accepts_loss(cache) {
            self.load_log(cache);
        }
    }

    /// Refuses a log of which records are lost that may have held dirty blocks: which blocks is not
    /// known, so that any block of any volume may be older than it ought to be.
    fn accepts_loss(&mut self, cache: &mut Cache) -> bool {
        let survey = &self.log.as_ref().expect("recovering").survey;
        let Some(loss) = survey.loss() else { return true };
        self.lost_records = survey.lost().copied().collect();
        if !cache.config.accept_loss {
            self.refuse(
                cache,
                format!(
                    "{loss}, perhaps with the newest version of blocks; which blocks is not \
                 known, so any block could be read as it was before; `forebay salvage` writes what \
                 can be read to a primary or a copy of it; to serve what can be read, start once \
                 with --accept-data-loss and then check the content of every volume"
                ),
            );
        }
        cache.config.accept_loss
    }

    /// Reads and applies the entries of every segment of the log, oldest first.
    fn load_log(&mut self, cache: &mut Cache) {
        self.clear_for_loading(cache);
        let r = self.log.as_mut().expect("recovering");
        r.apply = r.survey.start;
        (r.hole, r.lossy) = (None, false);
        let queue = r.survey.log.range(r.survey.start..).map(|(_, &i)| i).collect();
        r.enter(Phase::Loading, queue);
    }

    fn clear_for_loading(&mut self, cache: &mut Cache) {
        cache.contents.clear(cache.config.index_blocks);
        self.to_fence.clear();
        cache.log.clear_segments();
    }

    /// Applies the segments whose turn it is and whose entries are there.
    fn apply_loaded(&mut self, cache: &mut Cache, detach: &mut Detach) {
        loop {
            let r = self.log.as_mut().expect("recovering");
            let seq = r.apply;
            let Some(&i) = r.survey.log.get(&seq) else { return };
            let found = &mut r.survey.found[i];
            if found.damaged {
                if !r.survey.drop_damaged(seq) {
                    return self
                        .refuse(cache, format!("{seq} is damaged, and may hold dirty blocks"));
                }
                return self.load_log(cache);
            }
            if !self.accepts_loss(cache) {
                return;
            }
            let r = self.log.as_mut().expect("recovering");
            let found = &mut r.survey.found[i];
            let entries = match (&mut found.scanned, &mut found.entries) {
                (Some(scanned), _) => std::mem::take(&mut scanned.entries),
                (None, Some(entries)) => std::mem::take(entries),
                (None, None) => return,
            };
            r.apply = seq.next();
            self.apply_segment(cache, detach, seq, i, entries);
        }
    }

    fn apply_segment(
        &mut self,
        cache: &mut Cache,
        detach: &mut Detach,
        seq: SegmentSeq,
        i: usize,
        entries: Vec<Entry>,
    ) {
        let r = self.log.as_ref().expect("recovering");
        let (found, clean) = (&r.survey.found[i], r.survey.clean);
        let (first, last) = (
            found.first().map_or(Lsn(1), |l| l.lsn.next()),
            found.last().map_or(Lsn(0), |l| l.lsn),
        );
        let used = found.scanned.as_ref().map_or(0, |s| s.used);
        let seal = found.scanned.is_some();
        cache.contents.begin_segment(i, seq);
        let loaded = Loaded {
            used,
            durable: cache.config.segment_size,
            entries: entries.len() as u32,
            first_lsn: first,
            last_lsn: last,
        };
        cache.log.load(i, seq, &loaded);
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
                let r = self.log.as_mut().expect("recovering");
                r.hole = Some(seq);
                r.lossy |= lsn >= clean;
            }
            self.apply_entry(cache, detach, i, ordinal, entry, entry.dirty && lsn >= clean);
        }
        if seal {
            let r = self.log.as_mut().expect("recovering");
            r.survey.found[i].entries = Some(entries);
        }
    }

    fn apply_entry(
        &mut self,
        cache: &mut Cache,
        detach: &mut Detach,
        index: usize,
        ordinal: usize,
        entry: &Entry,
        dirty: bool,
    ) {
        let known = cache.known_volume(entry.volume).is_some();
        if !known || entry.kind == EntryKind::Checkpoint {
            return;
        }
        let seq = cache.log.segment(index).seq;
        let back = entry.base.map(|base| base.back).or(entry.shared);
        let from = SegmentSeq(seq.0.saturating_sub(u64::from(back.unwrap_or(0))));
        let position = cache.log.position(from);
        let gone = cache.log.segment(position).seq != from;
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
            segment: if entry.shared.is_some() { position } else { index } as u32,
            offset: if entry.kind.has_payload() { entry.offset } else { ordinal as u32 * 8 },
            len: entry.len,
            kind: entry.kind,
            crc: entry.crc,
            dirty,
            meta: cache.policy.inserted(),
        };
        let doubted = dirty && cache.config.trust != Trust::Full && self.is_scanned(index);
        for block in entry.block..entry.block + u64::from(entry.count) {
            let key = Key::new(entry.volume, block);
            if doubted {
                detach.doubt(key);
            }
            // Its base, or the payload that it shares, has left the log: so it was evicted, or a
            // later record has the block.
            let orphan = entry.kind == EntryKind::Delta && cache.contents.base_of(key).is_none();
            if orphan && dirty && self.log.as_ref().is_some_and(|r| r.lossy) {
                // Its base may have been in a record that is gone, or is lost itself.
                let place = Place { kind: EntryKind::Lost, offset: ordinal as u32 * 8, ..place };
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
            if entry.kind == EntryKind::Invalidate || orphan || gone {
                cache.contents.forget(key, &mut cache.ram);
                continue;
            }
            cache.contents.place(cache.now, key, place, against, false, &mut cache.ram);
            if back.is_some() {
                cache.contents.note_sharer(key, position, from, seq);
            }
        }
    }

    /// Whether a segment has no footer, which would show that its records were durable.
    fn is_scanned(&self, index: usize) -> bool {
        let found = self.log.as_ref().map(|r| &r.survey.found[index]);
        found.is_some_and(|found| found.scanned.is_some() && !found.sealed)
    }

    /// Where clean blocks are not to be trusted, they were needed as bases at most.
    fn forget_clean(cache: &mut Cache) {
        for key in cache.contents.clean() {
            cache.contents.forget(key, &mut cache.ram);
        }
    }

    /// Where records are gone, a block that is clean in older ones may have been written, and
    /// destaged, since: the primary has it.
    fn forget_clean_before(cache: &mut Cache, hole: SegmentSeq) {
        for key in cache.contents.clean() {
            let place = cache.contents.get(key).expect("it was listed just now");
            if cache.log.seq_of(&place) <= hole {
                cache.contents.forget(key, &mut cache.ram);
            }
        }
    }

    /// After loading: erase what was never durable, before anything else is written.
    fn plan_erasing(&mut self, cache: &mut Cache, _detach: &mut Detach) {
        if cache.config.trust == Trust::DirtyOnly {
            Self::forget_clean(cache);
            Detach::forget_recorded(cache);
        }
        if let Some(hole) = self.log.as_ref().and_then(|r| r.hole) {
            Self::forget_clean_before(cache, hole);
        }
        let resumed = self.find_resumed(cache);
        let r = self.log.as_mut().expect("recovering");
        r.resumed = resumed;
        let queue = match cache.config.trust {
            Trust::Full => r.survey.orphans.iter().copied().chain(resumed).collect(),
            _ => Vec::new(),
        };
        r.enter(Phase::Erasing, queue);
    }

    /// After erasing and its flush: footers for the accepted segments that have none. The flush
    /// also made their records durable, if only the process died and the device still held them
    /// in its cache.
    fn plan_sealing(&mut self, cache: &Cache) {
        let r = self.log.as_mut().expect("recovering");
        let accepted = r.survey.log.range(r.survey.start..).map(|(_, &i)| i);
        let unsealed = accepted.filter(|&i| r.survey.found[i].scanned.is_some());
        let unsealed = unsealed.filter(|&i| r.resumed != Some(i)).collect();
        let unsealed = if cache.config.trust == Trust::Full { unsealed } else { Vec::new() };
        r.enter(Phase::Sealing, unsealed);
    }

    /// A flush of the cache device, unless it is not to be written any more.
    fn plan_flush(&mut self, cache: &mut Cache, phase: Phase, fx: &mut Effects) {
        self.log.as_mut().expect("recovering").enter(phase, Vec::new());
        if cache.config.trust == Trust::Full {
            self.start_step(cache, Step::Flush, fx);
        }
    }

    fn footer_of(&self, cache: &Cache, i: usize) -> IoBuf {
        let r = self.log.as_ref().expect("recovering");
        let found = &r.survey.found[i];
        let entries = found.entries.as_deref().expect("kept for its footer");
        let (before, last) = (found.first(), found.last());
        let (before, last) = before.zip(last).expect("an accepted segment has records");
        let seq = cache.log.segment(i).seq;
        let footer = Footer {
            pool: cache.config.pool,
            shard: cache.config.shard,
            seq,
            first_lsn: before.lsn.next(),
            last_lsn: last.lsn,
            last_crc: last.crc,
            first_prev_crc: before.crc,
            start: r.survey.start.min(seq),
            clean: r.survey.clean,
            entries: entries.len() as u32,
        };
        let mut buf = IoBuf::zeroed(footer_bytes(entries.len()));
        encode_footer(&mut buf, &footer, entries);
        buf
    }

    /// The log is as it was: serve.
    fn serve(&mut self, cache: &mut Cache, detach: &mut Detach, compare: &mut Compare) {
        let mut r = self.log.take().expect("recovering");
        let head = r.survey.log.keys().next_back().map_or(SegmentSeq(1), |seq| seq.next());
        let start = r.survey.start.max(SegmentSeq(1));
        let last = r.survey.last;
        cache.log.begin(start, head, (last.lsn, last.crc), r.survey.clean);
        cache.contents.set_dirty_floor(start);
        Self::resume(cache, &mut r);
        cache.standing.state = State::Serving;
        cache.tell_recovered(r.survey.summary());
        for id in cache.config.volumes.iter().map(|volume| volume.id).collect::<Vec<_>>() {
            cache.note_leftover(id);
        }
        if cache.config.trust != Trust::Full {
            cache.set_health(Health::Draining);
            detach.note_undurable(cache);
        }
        compare.begin(cache);
    }

    /// Lets the log say of blocks that recovery found lost that they are.
    pub fn pump_fences(&mut self, cache: &mut Cache, fx: &mut Effects) {
        while cache.health() == Health::Good
            && let Some(&key) = self.to_fence.front()
        {
            let now =
                cache.contents.get(key).filter(|now| now.kind == EntryKind::Lost && now.dirty);
            if let Some(now) = now
                && !cache.push_bare(fx, key, 1, EntryKind::Lost, true, Expect::At(now))
            {
                return;
            }
            self.to_fence.pop_front();
        }
    }

    fn refuse(&mut self, cache: &mut Cache, why: String) {
        self.log = None;
        cache.standing.state = State::Refused(why);
    }
}

impl Recovery {
    fn enter(&mut self, phase: Phase, queue: Vec<usize>) {
        self.phase = phase;
        self.queue = queue;
        self.next = 0;
    }
}

#[cfg(test)]
mod tests;
