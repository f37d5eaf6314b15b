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

use crate::Engine;
use crate::api::{Effects, Health, State, Target, Trust};
use crate::contents::Place;
use crate::key::Key;
use crate::limits::RECOVERY_READS;
use crate::log::Loaded;
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

impl Engine {
    /// Begins to read the log.
    pub(crate) fn start_recovery(&mut self, fx: &mut Effects) {
        let owner = Owner { pool: self.cache.config.pool, shard: self.cache.config.shard };
        let segments = self.cache.log.len() as usize;
        self.recovery.log = Some(Box::new(Recovery {
            phase: Phase::Probing,
            survey: Survey::new(owner, segments, self.cache.config.segment_size),
            resumed: None,
            queue: (0..segments).collect(),
            next: 0,
            in_flight: 0,
            apply: SegmentSeq(0),
            hole: None,
            lossy: false,
        }));
        self.pump_recovery(fx);
    }

    /// Starts what the phase still has to do, and the next phase when nothing is left.
    fn pump_recovery(&mut self, fx: &mut Effects) {
        loop {
            let Some(r) = self.recovery.log.as_mut() else { return };
            if r.in_flight < RECOVERY_READS && r.next < r.queue.len() {
                let position = r.queue[r.next];
                r.next += 1;
                let phase = r.phase;
                self.start_steps(phase, position, fx);
                continue;
            }
            if r.in_flight > 0 {
                return;
            }
            match r.phase {
                Phase::Probing => self.plan_scans(),
                Phase::Scanning => self.plan_log(),
                Phase::Loading => self.plan_erasing(),
                Phase::Erasing => self.plan_flush(Phase::FlushingErased, fx),
                Phase::FlushingErased => self.plan_sealing(),
                Phase::Sealing => self.plan_flush(Phase::Flushing, fx),
                Phase::Flushing => return self.serve(),
            }
        }
    }

    fn start_steps(&mut self, phase: Phase, position: usize, fx: &mut Effects) {
        match phase {
            Phase::Probing => {
                self.start_step(Step::Head(position, 1), fx);
                self.start_step(Step::Tail(position, 1), fx);
            }
            Phase::Scanning => self.start_step(Step::Scan(position, 1), fx),
            Phase::Loading => {
                let found = &self.recovery.log.as_ref().expect("recovering").survey.found[position];
                if found.scanned.is_some() {
                    self.apply_loaded();
                } else {
                    self.start_step(Step::Footer(position, 1), fx);
                }
            }
            Phase::Erasing => self.start_step(Step::Erase(position, 1), fx),
            Phase::Sealing => self.start_step(Step::Seal(position, 1), fx),
            Phase::FlushingErased | Phase::Flushing => self.start_step(Step::Flush, fx),
        }
    }

    fn start_step(&mut self, step: Step, fx: &mut Effects) {
        let segment = self.cache.config.segment_size;
        let page = PAGE as u32;
        self.recovery.log.as_mut().expect("recovering").in_flight += 1;
        let ticket = Ticket::Recovery(step);
        match step {
            Step::Head(i, _) => self.cache.read_segment(fx, i, 0, PAGE, ticket),
            Step::Tail(i, _) => self.cache.read_segment(fx, i, segment - page, PAGE, ticket),
            Step::Scan(i, _) => self.cache.read_segment(fx, i, 0, segment as usize, ticket),
            Step::Footer(i, _) => {
                let found = &self.recovery.log.as_ref().expect("recovering").survey.found[i];
                let bytes = found.tail.as_ref().map_or(PAGE, |tail| tail.bytes);
                self.cache.read_segment(fx, i, segment - bytes as u32, bytes, ticket);
            }
            Step::Erase(i, _) => {
                let erased = self.erased(i);
                let offset = self.cache.segment_offset(i) + u64::from(erased.start);
                let zeros = IoBuf::zeroed(erased.len());
                self.cache.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, zeros));
            }
            Step::Seal(i, _) => {
                let buf = self.footer_of(i);
                let end = self.cache.segment_offset(i) + u64::from(segment);
                let offset = end - buf.len() as u64;
                self.cache.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, buf));
            }
            Step::Flush => self.cache.send(fx, Target::Cache, ticket, Io::flush),
        }
    }

    /// A read or write of recovery ended.
    pub(crate) fn recovery_step(&mut self, step: Step, done: Completion, fx: &mut Effects) {
        let Some(r) = self.recovery.log.as_mut() else { return };
        r.in_flight -= 1;
        if let Err(error) = &done.result {
            match step.again() {
                Some(again) => self.start_step(again, fx),
                None if step.is_read() => self.take_bytes(step, &[]),
                None => return self.refuse(format!("the cache device cannot be written: {error}")),
            }
        } else {
            self.take_bytes(step, &done.buf);
        }
        self.read_instead_of_footer(step, fx);
        self.pump_recovery(fx);
    }

    fn is_loading(&self) -> bool {
        self.recovery.log.as_ref().is_some_and(|r| r.phase == Phase::Loading)
    }

    /// A segment whose footer turned out bad is read record by record.
    fn read_instead_of_footer(&mut self, step: Step, fx: &mut Effects) {
        let Step::Footer(i, _) = step else { return };
        let bad = |r: &Recovery| r.survey.found[i].unreadable_footer;
        if self.is_loading() && self.recovery.log.as_deref().is_some_and(bad) {
            self.start_step(Step::Scan(i, 1), fx);
        }
    }

    /// Takes what was read; nothing where it could not be read.
    fn take_bytes(&mut self, step: Step, bytes: &[u8]) {
        let survey = &mut self.recovery.log.as_mut().expect("recovering").survey;
        match step {
            Step::Head(i, _) => survey.take_head(i, bytes),
            Step::Tail(i, _) => survey.take_tail(i, bytes),
            Step::Scan(i, _) => {
                survey.take_segment(i, bytes);
                if self.is_loading() {
                    self.apply_loaded();
                }
            }
            Step::Footer(i, _) => {
                survey.take_footer(i, bytes);
                self.apply_loaded();
            }
            Step::Erase(..) | Step::Seal(..) | Step::Flush => {}
        }
    }

    /// After probing: which segments must be read record by record.
    fn plan_scans(&mut self) {
        let r = self.recovery.log.as_mut().expect("recovering");
        r.survey.classify();
        r.enter(Phase::Scanning, r.survey.to_scan());
    }

    /// After scanning: which segments make up the log.
    fn plan_log(&mut self) {
        let r = self.recovery.log.as_mut().expect("recovering");
        if let Err(damage) = r.survey.assemble() {
            return self.refuse(damage);
        }
        if self.accepts_loss() {
            self.load_log();
        }
    }

    /// Refuses a log of which records are lost that may have held dirty blocks: which blocks is not
    /// known, so that any block of any volume may be older than it ought to be.
    fn accepts_loss(&mut self) -> bool {
        let survey = &self.recovery.log.as_ref().expect("recovering").survey;
        let Some(loss) = survey.loss() else { return true };
        self.recovery.lost_records = survey.lost().copied().collect();
        if !self.cache.config.accept_loss {
            self.refuse(format!(
                "{loss}, perhaps with the newest version of blocks; which blocks is not \
                 known, so any block could be read as it was before; `forebay salvage` writes what \
                 can be read to a primary or a copy of it; to serve what can be read, start once \
                 with --accept-data-loss and then check the content of every volume"
            ));
        }
        self.cache.config.accept_loss
    }

    /// Reads and applies the entries of every segment of the log, oldest first.
    fn load_log(&mut self) {
        self.clear_for_loading();
        let r = self.recovery.log.as_mut().expect("recovering");
        r.apply = r.survey.start;
        (r.hole, r.lossy) = (None, false);
        let queue = r.survey.log.range(r.survey.start..).map(|(_, &i)| i).collect();
        r.enter(Phase::Loading, queue);
    }

    fn clear_for_loading(&mut self) {
        self.cache.contents.clear(self.cache.config.index_blocks);
        self.recovery.to_fence.clear();
        self.cache.log.clear_segments();
    }

    /// Applies the segments whose turn it is and whose entries are there.
    fn apply_loaded(&mut self) {
        loop {
            let r = self.recovery.log.as_mut().expect("recovering");
            let seq = r.apply;
            let Some(&i) = r.survey.log.get(&seq) else { return };
            let found = &mut r.survey.found[i];
            if found.damaged {
                if !r.survey.drop_damaged(seq) {
                    return self.refuse(format!("{seq} is damaged, and may hold dirty blocks"));
                }
                return self.load_log();
            }
            if !self.accepts_loss() {
                return;
            }
            let r = self.recovery.log.as_mut().expect("recovering");
            let found = &mut r.survey.found[i];
            let entries = match (&mut found.scanned, &mut found.entries) {
                (Some(scanned), _) => std::mem::take(&mut scanned.entries),
                (None, Some(entries)) => std::mem::take(entries),
                (None, None) => return,
            };
            r.apply = seq.next();
            self.apply_segment(seq, i, entries);
        }
    }

    fn apply_segment(&mut self, seq: SegmentSeq, i: usize, entries: Vec<Entry>) {
        let r = self.recovery.log.as_ref().expect("recovering");
        let (found, clean) = (&r.survey.found[i], r.survey.clean);
        let (first, last) = (
            found.first().map_or(Lsn(1), |l| l.lsn.next()),
            found.last().map_or(Lsn(0), |l| l.lsn),
        );
        let used = found.scanned.as_ref().map_or(0, |s| s.used);
        let seal = found.scanned.is_some();
        self.cache.contents.begin_segment(i, seq);
        let loaded = Loaded {
            used,
            durable: self.cache.config.segment_size,
            entries: entries.len() as u32,
            first_lsn: first,
            last_lsn: last,
        };
        self.cache.log.load(i, seq, &loaded);
        let mut lsn = Lsn(first.0 - 1);
        for (ordinal, entry) in entries.iter().enumerate() {
            if ordinal % WARM_AHEAD == 0 {
                let ahead = entries.iter().skip(ordinal).take(WARM_AHEAD);
                ahead.for_each(|entry| {
                    self.cache.contents.index().warm(Key::new(entry.volume, entry.block))
                });
            }
            if entry.first {
                lsn = lsn.next();
            }
            if is_placeholder(entry) {
                let r = self.recovery.log.as_mut().expect("recovering");
                r.hole = Some(seq);
                r.lossy |= lsn >= clean;
            }
            self.apply_entry(i, ordinal, entry, entry.dirty && lsn >= clean);
        }
        if seal {
            let r = self.recovery.log.as_mut().expect("recovering");
            r.survey.found[i].entries = Some(entries);
        }
    }

    fn apply_entry(&mut self, index: usize, ordinal: usize, entry: &Entry, dirty: bool) {
        let known = self.cache.known_volume(entry.volume).is_some();
        if !known || entry.kind == EntryKind::Checkpoint {
            return;
        }
        let seq = self.cache.log.segment(index).seq;
        let back = entry.base.map(|base| base.back).or(entry.shared);
        let from = SegmentSeq(seq.0.saturating_sub(u64::from(back.unwrap_or(0))));
        let position = self.cache.log.position(from);
        let gone = self.cache.log.segment(position).seq != from;
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
            meta: self.cache.policy.inserted(),
        };
        let doubted = dirty && self.cache.config.trust != Trust::Full && self.is_scanned(index);
        for block in entry.block..entry.block + u64::from(entry.count) {
            let key = Key::new(entry.volume, block);
            if doubted {
                self.doubt(key);
            }
            // Its base, or the payload that it shares, has left the log: so it was evicted, or a
            // later record has the block.
            let orphan =
                entry.kind == EntryKind::Delta && self.cache.contents.base_of(key).is_none();
            if orphan && dirty && self.recovery.log.as_ref().is_some_and(|r| r.lossy) {
                // Its base may have been in a record that is gone, or is lost itself.
                let place = Place { kind: EntryKind::Lost, offset: ordinal as u32 * 8, ..place };
                self.cache.contents.place(
                    self.cache.now,
                    key,
                    Place { len: 0, crc: 0, ..place },
                    None,
                    false,
                    &mut self.cache.ram,
                );
                self.recovery.to_fence.push_back(key);
                continue;
            }
            if entry.kind == EntryKind::Invalidate || orphan || gone {
                self.cache.contents.forget(key, &mut self.cache.ram);
                continue;
            }
            self.cache.contents.place(
                self.cache.now,
                key,
                place,
                against,
                false,
                &mut self.cache.ram,
            );
            if back.is_some() {
                self.cache.contents.note_sharer(key, position, from, seq);
            }
        }
    }

    /// Whether a segment has no footer, which would show that its records were durable.
    fn is_scanned(&self, index: usize) -> bool {
        let found = self.recovery.log.as_ref().map(|r| &r.survey.found[index]);
        found.is_some_and(|found| found.scanned.is_some() && !found.sealed)
    }

    /// Where clean blocks are not to be trusted, they were needed as bases at most.
    fn forget_clean(&mut self) {
        for key in self.cache.contents.clean() {
            self.cache.contents.forget(key, &mut self.cache.ram);
        }
    }

    /// Where records are gone, a block that is clean in older ones may have been written, and
    /// destaged, since: the primary has it.
    fn forget_clean_before(&mut self, hole: SegmentSeq) {
        for key in self.cache.contents.clean() {
            let place = self.cache.contents.get(key).expect("it was listed just now");
            if self.cache.log.seq_of(&place) <= hole {
                self.cache.contents.forget(key, &mut self.cache.ram);
            }
        }
    }

    /// After loading: erase what was never durable, before anything else is written.
    fn plan_erasing(&mut self) {
        if self.cache.config.trust == Trust::DirtyOnly {
            self.forget_clean();
            self.forget_detached();
        }
        if let Some(hole) = self.recovery.log.as_ref().and_then(|r| r.hole) {
            self.forget_clean_before(hole);
        }
        let resumed = self.find_resumed();
        let r = self.recovery.log.as_mut().expect("recovering");
        r.resumed = resumed;
        let queue = match self.cache.config.trust {
            Trust::Full => r.survey.orphans.iter().copied().chain(resumed).collect(),
            _ => Vec::new(),
        };
        r.enter(Phase::Erasing, queue);
    }

    /// After erasing and its flush: footers for the accepted segments that have none. The flush
    /// also made their records durable, if only the process died and the device still held them
    /// in its cache.
    fn plan_sealing(&mut self) {
        let r = self.recovery.log.as_mut().expect("recovering");
        let accepted = r.survey.log.range(r.survey.start..).map(|(_, &i)| i);
        let unsealed = accepted.filter(|&i| r.survey.found[i].scanned.is_some());
        let unsealed = unsealed.filter(|&i| r.resumed != Some(i)).collect();
        let unsealed = if self.cache.config.trust == Trust::Full { unsealed } else { Vec::new() };
        r.enter(Phase::Sealing, unsealed);
    }

    /// A flush of the cache device, unless it is not to be written any more.
    fn plan_flush(&mut self, phase: Phase, fx: &mut Effects) {
        self.recovery.log.as_mut().expect("recovering").enter(phase, Vec::new());
        if self.cache.config.trust == Trust::Full {
            self.start_step(Step::Flush, fx);
        }
    }

    fn footer_of(&self, i: usize) -> IoBuf {
        let r = self.recovery.log.as_ref().expect("recovering");
        let found = &r.survey.found[i];
        let entries = found.entries.as_deref().expect("kept for its footer");
        let (before, last) = (found.first(), found.last());
        let (before, last) = before.zip(last).expect("an accepted segment has records");
        let seq = self.cache.log.segment(i).seq;
        let footer = Footer {
            pool: self.cache.config.pool,
            shard: self.cache.config.shard,
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
    fn serve(&mut self) {
        let mut r = self.recovery.log.take().expect("recovering");
        let head = r.survey.log.keys().next_back().map_or(SegmentSeq(1), |seq| seq.next());
        let start = r.survey.start.max(SegmentSeq(1));
        let last = r.survey.last;
        self.cache.log.begin(start, head, (last.lsn, last.crc), r.survey.clean);
        self.cache.contents.set_dirty_floor(start);
        self.resume(&mut r);
        self.cache.standing.state = State::Serving;
        self.cache.tell_recovered(r.survey.summary());
        for id in self.cache.config.volumes.iter().map(|volume| volume.id).collect::<Vec<_>>() {
            self.cache.note_leftover(id);
        }
        if self.cache.config.trust != Trust::Full {
            self.cache.set_health(Health::Draining);
            self.note_undurable();
        }
        self.begin_comparing();
    }

    fn refuse(&mut self, why: String) {
        self.recovery.log = None;
        self.cache.standing.state = State::Refused(why);
    }
}

impl Recovery {
    fn enter(&mut self, phase: Phase, queue: Vec<usize>) {
        self.phase = phase;
        self.queue = queue;
        self.next = 0;
    }
}
