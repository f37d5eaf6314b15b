//! Recovery: restores the state at some record, at least the last durable one, from the bytes on
//! the cache device.
//!
//! | found in a segment's place | is |
//! |---|---|
//! | footer, and no newer first record | sealed: its records were durable |
//! | first record newer than the footer, or no footer | unsealed: read record by record |
//! | neither | free |
//! | sealed or unsealed, up to the newest footer, not linked to the next | damaged: if everything before the next is clean, it and all before it are dropped; else it is read across its gaps ([`crate::recovery::salvage`]) |
//! | unsealed after the newest footer, linked | accepted up to where its chain breaks |
//! | unsealed, not linked | an orphan: never durable, erased |
//! | a record knows of a durable record that is missing | damaged: read across its gaps |
//! | a gap that may have held dirty blocks | refused, unless the loss is accepted |
//!
//! Unless anything is damaged, only the entries of blocks that may be dirty are applied before the
//! shard serves ([`crate::recovery::first`]), and the rest while it serves
//! ([`crate::recovery::late`]).
//!
//! Before the shard serves, orphans are erased and accepted segments get their footer, so that a
//! second crash finds the same log. If segments are few, the last one gets none: the log continues
//! in it ([`crate::recovery::resume`]). `docs/internals/recovery.md` says why each row is right.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use forebay_block::{Completion, Instant, Io, IoBuf, VolumeId};
use forebay_format::{
    Entry, EntryKind, EntryTable, Footer, Lsn, PAGE, SegmentSeq, encode_footer, footer_bytes,
};

use crate::api::{Effects, Health, State, Target, Trust};
use crate::cache::Cache;
use crate::key::Key;
use crate::life::compare::Compare;
use crate::life::detach::Detach;
use crate::limits::RECOVERY_READS;
use crate::log::builder::Expect;
use crate::recovery::first::{Needed, Pass, Sifted};
use crate::recovery::late::Late;
use crate::recovery::scan::Owner;
use crate::recovery::survey::{SegmentForm, Survey};
use crate::ticket::{Step, StepKind, Ticket};

mod first;
mod late;
mod load;
pub(crate) mod resume;
pub mod salvage;
pub(crate) mod scan;
pub mod survey;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Probing,
    Scanning,
    Gathering,
    Loading,
    Erasing,
    FlushingErased,
    Sealing,
    Flushing,
}

/// The work of a start, and the losses that it found.
#[derive(Debug, Default)]
pub struct Start {
    /// The log, while it is being read.
    log: Option<Box<Recovery>>,
    /// The rest of the log, while it is being loaded.
    late: Option<Box<Late>>,
    /// Blocks that cannot be read back, for which the log has no entry yet that says so.
    to_fence: VecDeque<Key>,
    /// Records that are lost and may have held dirty blocks.
    lost_records: Vec<salvage::Hole>,
}

/// A log being recovered.
#[derive(Debug)]
struct Recovery {
    phase: Phase,
    pub(crate) survey: Survey,
    /// The segment in which the log continues, instead of in a new one.
    pub(crate) resumed: Option<usize>,
    /// Positions of the segments to process in this phase, in order.
    queue: Vec<usize>,
    next: usize,
    in_flight: usize,
    /// When the first read or write failed.
    failing_since: Option<Instant>,
    /// Failed ones that are tried again, and when. They count as in flight.
    paused: Vec<(Instant, Step)>,
    pass: Pass,
    needed: Needed,
    /// Entries of needed blocks that wait to be applied, by position of the segment.
    sifted: BTreeMap<usize, Vec<Sifted>>,
    /// Whether something was found because of which all of the log must be loaded at once.
    is_unfit: bool,
    /// The next segment whose entries must be applied.
    apply: SegmentSeq,
    /// The last segment with a hole, and whether a hole may have held dirty blocks.
    hole: Option<SegmentSeq>,
    lossy: bool,
    /// The last record up to which all entries of a volume are clean, if a stop has recorded it.
    stops: BTreeMap<VolumeId, Lsn>,
}

/// How long a start waits for a device that fails requests, in all: a path may change, or a bus be
/// reset. Then a few tries at once must do.
const ERROR_PATIENCE: Duration = Duration::from_secs(3);
/// Pause before such a request is tried again.
const ERROR_PAUSE: Duration = Duration::from_millis(50);

impl Recovery {
    /// Whether an entry of the record `lsn` may be dirty.
    fn is_dirty(&self, entry: &Entry, lsn: Lsn) -> bool {
        let is_past = |stop: &Lsn| lsn > *stop;
        entry.dirty && lsn >= self.survey.clean && self.stops.get(&entry.volume).is_none_or(is_past)
    }

    /// The last segment up to which records are lost.
    fn last_hole(&self) -> Option<SegmentSeq> {
        let end = self.survey.log.last_key_value().filter(|_| self.survey.cut_off > 0);
        end.map(|(seq, _)| *seq).or(self.hole)
    }

    /// Whether a read or write that failed now is tried again after a pause.
    fn is_patient(&mut self, now: Instant, step: Step) -> bool {
        let since = *self.failing_since.get_or_insert(now);
        step.kind != StepKind::Flush && now.since(since) < ERROR_PATIENCE
    }
}

impl Start {
    /// Records that are lost: any block may have been in them.
    pub fn lost_records(&self) -> &[salvage::Hole] {
        &self.lost_records
    }

    /// The log being recovered.
    fn log(&self) -> &Recovery {
        self.log.as_ref().expect("recovering")
    }

    fn log_mut(&mut self) -> &mut Recovery {
        self.log.as_mut().expect("recovering")
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
        let (size, unit_entries) = (cache.config.segment_size, cache.config.unit_entries);
        let form = SegmentForm { size, unit_entries };
        self.log = Some(Box::new(Recovery {
            phase: Phase::Probing,
            survey: Survey::new(owner, segments, form),
            resumed: None,
            queue: (0..segments).collect(),
            next: 0,
            in_flight: 0,
            failing_since: None,
            paused: Vec::new(),
            pass: Pass::Full,
            needed: Needed::default(),
            sifted: BTreeMap::new(),
            is_unfit: false,
            apply: SegmentSeq(0),
            hole: None,
            lossy: false,
            stops: BTreeMap::new(),
        }));
        self.pump_recovery(cache, detach, compare, fx);
    }

    /// Starts the remaining steps of the phase, and the next phase when none is left.
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
                Phase::Gathering | Phase::Loading if r.is_unfit => {
                    self.load_log(cache, Pass::Full);
                }
                Phase::Gathering => self.load_log(cache, Pass::First),
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
                self.start_step(cache, Step::new(StepKind::Head, position), fx);
                self.start_step(cache, Step::new(StepKind::Tail, position), fx);
            }
            Phase::Scanning => self.start_step(cache, Step::new(StepKind::Scan, position), fx),
            Phase::Gathering => self.start_step(cache, Step::new(StepKind::Footer, position), fx),
            Phase::Loading => {
                let found = &self.log().survey.found[position];
                if found.scanned.is_some() {
                    self.apply_loaded(cache, detach);
                } else {
                    self.start_step(cache, Step::new(StepKind::Footer, position), fx);
                }
            }
            Phase::Erasing => self.start_step(cache, Step::new(StepKind::Erase, position), fx),
            Phase::Sealing => self.start_step(cache, Step::new(StepKind::Seal, position), fx),
            Phase::FlushingErased | Phase::Flushing => {
                self.start_step(cache, Step::new(StepKind::Flush, 0), fx)
            }
        }
    }

    fn start_step(&mut self, cache: &mut Cache, step: Step, fx: &mut Effects) {
        let segment = cache.config.segment_size;
        let page = PAGE as u32;
        self.log_mut().in_flight += 1;
        let ticket = Ticket::Recovery(step);
        let i = step.at;
        match step.kind {
            StepKind::Head => cache.read_segment(fx, i, 0, PAGE, ticket),
            StepKind::Tail => cache.read_segment(fx, i, segment - page, PAGE, ticket),
            StepKind::Scan => cache.read_segment(fx, i, 0, segment as usize, ticket),
            StepKind::Footer => {
                let found = &self.log().survey.found[i];
                let bytes = found.tail.as_ref().map_or(PAGE, |tail| tail.bytes);
                cache.read_segment(fx, i, segment - bytes as u32, bytes, ticket);
            }
            StepKind::Erase => {
                let erased = self.erased(cache, i);
                let offset = cache.segment_offset(i) + u64::from(erased.start);
                let zeros = IoBuf::zeroed(erased.len());
                cache.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, zeros));
            }
            StepKind::Seal => {
                let buf = self.footer_of(cache, i);
                let end = cache.segment_offset(i) + u64::from(segment);
                let offset = end - buf.len() as u64;
                cache.send(fx, Target::Cache, ticket, |tag| Io::write(tag, offset, buf));
            }
            StepKind::Flush => cache.send(fx, Target::Cache, ticket, Io::flush),
        }
    }

    /// Handles the end of a read or write of recovery.
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
        if done.result.is_err() && r.is_patient(cache.now, step) {
            return r.paused.push((cache.now + ERROR_PAUSE, step));
        }
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

    /// Tries the reads and writes again whose pause is over.
    pub fn retry(&mut self, cache: &mut Cache, fx: &mut Effects) {
        let Some(r) = self.log.as_mut() else { return };
        let due: Vec<_> = r.paused.extract_if(.., |&mut (at, _)| at <= cache.now).collect();
        r.in_flight -= due.len();
        due.into_iter().for_each(|(_, step)| self.start_step(cache, step, fx));
    }

    /// When the next one is tried again.
    pub fn retry_at(&self) -> Option<Instant> {
        self.log.as_ref()?.paused.iter().map(|&(at, _)| at).min()
    }

    fn is_loading(&self) -> bool {
        self.log.as_ref().is_some_and(|r| r.phase == Phase::Loading)
    }

    /// Starts to read a segment record by record if its footer turned out to be corrupt.
    fn read_instead_of_footer(&mut self, cache: &mut Cache, step: Step, fx: &mut Effects) {
        let Step { kind: StepKind::Footer, at: i, .. } = step else { return };
        let bad = |r: &Recovery| r.survey.found[i].unreadable_footer;
        if self.is_loading() && self.log.as_deref().is_some_and(bad) {
            self.start_step(cache, Step::new(StepKind::Scan, i), fx);
        }
    }

    /// Takes the bytes that were read; they are empty if the read failed.
    fn take_bytes(&mut self, cache: &mut Cache, detach: &mut Detach, step: Step, bytes: &[u8]) {
        let survey = &mut self.log_mut().survey;
        let i = step.at;
        match step.kind {
            StepKind::Head => survey.take_head(i, bytes),
            StepKind::Tail => survey.take_tail(i, bytes),
            StepKind::Scan => {
                survey.take_segment(i, bytes);
                if self.is_loading() {
                    self.apply_loaded(cache, detach);
                }
            }
            StepKind::Footer => match (self.log().phase, self.log().pass) {
                (Phase::Gathering, _) => self.gather_footer(cache, i, bytes),
                (_, Pass::First) => {
                    self.sift_footer(cache, i, bytes);
                    self.apply_loaded(cache, detach);
                }
                (_, Pass::Full) => {
                    self.log_mut().survey.take_footer(i, bytes);
                    self.apply_loaded(cache, detach);
                }
            },
            StepKind::Erase | StepKind::Seal | StepKind::Flush => {}
        }
    }

    /// After probing: decides which segments must be read record by record.
    fn plan_scans(&mut self) {
        let r = self.log_mut();
        r.survey.classify();
        r.enter(Phase::Scanning, r.survey.to_scan());
    }

    /// After scanning: decides which segments make up the log.
    fn plan_log(&mut self, cache: &mut Cache) {
        let r = self.log_mut();
        if let Err(damage) = r.survey.assemble() {
            return self.refuse(cache, damage);
        }
        let stop = &cache.config.last_stop;
        r.survey.expect_end(stop.end);
        if r.survey.cut_off == 0 {
            r.stops.extend(stop.clean.iter().copied());
        }
        if self.accepts_loss(cache) {
            match self.is_sound(cache) {
                true => self.gather(cache),
                false => self.load_log(cache, Pass::Full),
            }
        }
    }

    /// Refuses a log whose lost records may have held dirty blocks, unless the loss is accepted.
    /// Which blocks they held is unknown, so any block of any volume could be stale.
    fn accepts_loss(&mut self, cache: &mut Cache) -> bool {
        let survey = &self.log().survey;
        let Some(loss) = survey.loss() else { return true };
        self.lost_records = survey.lost().copied().collect();
        if !cache.config.accept_loss {
            self.refuse(
                cache,
                format!(
                    "{loss}, perhaps with the newest version of blocks; which blocks is not \
                 known, so any block could be an older version; `forebay salvage` writes what \
                 can be read to a primary or a copy of it; to serve what can be read, start once \
                 with --accept-data-loss and then check the content of every volume"
                ),
            );
        }
        cache.config.accept_loss
    }

    /// Drops clean blocks when they must not be trusted: they were only needed as bases.
    fn forget_clean(cache: &mut Cache) {
        for key in cache.contents.clean() {
            cache.contents.forget(key, &mut cache.ram);
        }
    }

    /// Drops the clean blocks of segments up to `hole`: a lost record may have held a newer version
    /// that has been destaged since, so the primary has it.
    fn forget_clean_before(cache: &mut Cache, hole: SegmentSeq) {
        for key in cache.contents.clean() {
            let place = cache.contents.get(key).expect("it was listed just now");
            // The entry of a block in the store may be anywhere.
            if cache.log.seq_of(&place) <= hole || cache.contents.is_in_store(&place) {
                cache.contents.drop(key, &mut cache.ram);
            }
        }
    }

    /// After loading: erases segments that were never durable, before anything else is written.
    fn plan_erasing(&mut self, cache: &mut Cache, _detach: &mut Detach) {
        // All that the log says is durable when the shard serves.
        for page in cache.contents.pages().take_freed() {
            cache.contents.pages().end_freed(page);
        }
        if cache.config.trust == Trust::DirtyOnly {
            Self::forget_clean(cache);
            Detach::forget_recorded(cache);
        }
        if let Some(hole) = self.log().last_hole() {
            Self::forget_clean_before(cache, hole);
        }
        let resumed = self.find_resumed(cache);
        let r = self.log_mut();
        r.resumed = resumed;
        let queue = match cache.config.trust {
            Trust::Full => r.survey.orphans.iter().copied().chain(resumed).collect(),
            _ => Vec::new(),
        };
        r.enter(Phase::Erasing, queue);
    }

    /// After erasing and its flush: writes footers for the accepted segments that have none. The
    /// flush also made their records durable, in case only the process died and the device still
    /// held them in its volatile cache.
    fn plan_sealing(&mut self, cache: &Cache) {
        let r = self.log_mut();
        let accepted = r.survey.log.range(r.survey.start..).map(|(_, &i)| i);
        let unsealed = accepted.filter(|&i| r.survey.found[i].scanned.is_some());
        let unsealed = unsealed.filter(|&i| r.resumed != Some(i)).collect();
        let unsealed = if cache.config.trust == Trust::Full { unsealed } else { Vec::new() };
        r.enter(Phase::Sealing, unsealed);
    }

    /// Flushes the cache device, unless it must not be written any more.
    fn plan_flush(&mut self, cache: &mut Cache, phase: Phase, fx: &mut Effects) {
        self.log_mut().enter(phase, Vec::new());
        if cache.config.trust == Trust::Full {
            self.start_step(cache, Step::new(StepKind::Flush, 0), fx);
        }
    }

    fn footer_of(&self, cache: &Cache, i: usize) -> IoBuf {
        let r = self.log();
        let found = &r.survey.found[i];
        let entries = found.entries.as_deref().expect("kept for its footer");
        let entries = EntryTable::of(cache.config.unit_entries, entries);
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
            unit_entries: cache.config.unit_entries,
        };
        let mut buf = IoBuf::zeroed(footer_bytes(entries.cells()));
        encode_footer(&mut buf, &footer, &entries);
        buf
    }

    /// The log is restored: starts to serve.
    fn serve(&mut self, cache: &mut Cache, detach: &mut Detach, compare: &mut Compare) {
        let mut r = self.log.take().expect("recovering");
        let head = r.survey.log.keys().next_back().map_or(SegmentSeq(1), |seq| seq.next());
        let start = r.survey.start.max(SegmentSeq(1));
        let last = r.survey.last;
        cache.log.begin(start, head, (last.lsn, last.crc), r.survey.clean);
        cache.contents.set_dirty_floor(start);
        Self::resume(cache, &mut r);
        self.begin_late(cache, &r);
        cache.standing.state = State::Serving;
        cache.tell_recovered(r.survey.summary());
        for id in cache.config.volumes.iter().map(|volume| volume.id).collect::<Vec<_>>() {
            cache.note_leftover(id);
            cache.note_behind(id);
        }
        if cache.config.trust != Trust::Full {
            cache.set_health(Health::Draining);
            detach.note_undurable(cache);
        }
        compare.begin(cache);
    }

    /// Logs the blocks that recovery found lost.
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
