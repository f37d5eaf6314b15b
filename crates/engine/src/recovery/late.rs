//! Late loading: the shard serves, and the entries of all blocks that the first pass left out
//! ([`crate::recovery::first`]) are applied in small steps, oldest first.
//!
//! - All of these blocks are clean. Until the last entry is applied they count as not cached, since
//!   the index may have an old version of one.
//! - The entries of a block that a client has changed in the meantime are skipped: the log has a
//!   newer entry. While that is not durable, the pages of the store that they name are not free.
//! - Nothing is removed from the log or the store until the end, and nothing is moved: which pages
//!   of the store are free is not known before.
//! - The absence of a block from the index does not mean that the log has no entry of it. So a
//!   write that goes past the log logs an invalidation first (`request/past.rs`).
//!
//! Nothing is written. A crash or a stop leaves the same log as without late loading.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::{Completion, Instant, IoBuf};
use forebay_format::{FooterTrailer, TablePosition, footer_entries};

use crate::api::Effects;
use crate::api::event::Event;
use crate::cache::Cache;
use crate::key::{Key, LargeMap};
use crate::limits::{
    EXTENTS_FOUND, FREED_ROOM, LATE_FOOTERS, LOAD_READS_MAX, LOADED_HURRY, LOADED_MAX,
    LOADED_ONE_IN,
};
use crate::note::Note;
use crate::recovery::first::Pass;
use crate::recovery::load::WARM_AHEAD;
use crate::recovery::{Recovery, Start};
use crate::ticket::Ticket;

/// Pause between two steps while requests are in flight.
const PAUSE: Duration = Duration::from_micros(500);
/// Half of the first pause after a failed read; pauses double.
const READ_PAUSE: Duration = Duration::from_millis(10);

/// The part of the log that has not been applied.
#[derive(Debug)]
pub(super) struct Late {
    /// Its segments, oldest first.
    segments: VecDeque<Segment>,
    /// The entries of the first segment before it have been applied.
    applied: TablePosition,
    /// When the next step is due, unless no request is in flight.
    next_at: Instant,
    /// Failed reads in a row; nothing is read before `retry_at`.
    failures: u32,
    retry_at: Instant,
    /// After the last step: the settled blocks, to be freed.
    over: Option<LargeMap<()>>,
}

#[derive(Debug)]
struct Segment {
    index: usize,
    trailer: FooterTrailer,
    footer: Footer,
}

#[derive(Debug)]
enum Footer {
    Unread,
    Reading,
    Read(IoBuf),
}

impl Late {
    /// The segments of a recovered log of which only needed blocks were loaded.
    pub fn of(r: &Recovery, now: Instant) -> Self {
        let log = r.survey.log.range(r.survey.start..);
        let segments = log.filter_map(|(_, &index)| {
            let found = &r.survey.found[index];
            let trailer = found.tail.filter(|_| found.scanned.is_none())?;
            Some(Segment { index, trailer, footer: Footer::Unread })
        });
        let segments = segments.collect();
        Self {
            segments,
            applied: TablePosition::default(),
            next_at: now,
            failures: 0,
            retry_at: now,
            over: None,
        }
    }

    /// Reads the next footers.
    fn read_ahead(&mut self, cache: &mut Cache, fx: &mut Effects) {
        if self.retry_at > cache.now {
            return;
        }
        let size = cache.config.segment_size;
        for segment in self.segments.iter_mut().take(LATE_FOOTERS) {
            if matches!(segment.footer, Footer::Unread) {
                segment.footer = Footer::Reading;
                let bytes = segment.trailer.bytes;
                let at = size - bytes as u32;
                let ticket = Ticket::LateFooter(segment.index);
                cache.read_segment(fx, segment.index, at, bytes, ticket);
            }
        }
    }

    /// Takes a footer that has been read. Every footer was good when the shard began to serve, so
    /// if it is not now, the device cannot be relied on to keep the log.
    fn take(&mut self, cache: &mut Cache, index: usize, done: Completion) {
        let Some(segment) = self.segments.iter_mut().find(|segment| segment.index == index) else {
            return;
        };
        if done.result.is_err() {
            segment.footer = Footer::Unread;
            self.failures += 1;
            self.retry_at = cache.now + READ_PAUSE * (1 << self.failures);
            if self.failures > LOAD_READS_MAX {
                cache.out.note(Note::CacheFailed);
            }
            return;
        }
        self.failures = 0;
        match footer_entries(&done.buf) {
            Ok((trailer, _)) if trailer == segment.trailer => {
                segment.footer = Footer::Read(done.buf);
            }
            _ => cache.out.note(Note::CacheFailed),
        }
    }
}

impl Start {
    /// The number of segments that have entries to apply.
    pub fn unloaded_segments(&self) -> u64 {
        self.late.as_ref().map_or(0, |late| late.segments.len() as u64)
    }

    /// Begins late loading, or finds the free slots of the store if everything is loaded.
    pub(super) fn begin_late(&mut self, cache: &mut Cache, r: &Recovery) {
        cache.store.begin_rebuild();
        let late = Late::of(r, cache.now);
        if r.pass == Pass::First && !late.segments.is_empty() {
            self.late = Some(Box::new(late));
            return;
        }
        cache.contents.end_loading();
        cache.store.rebuild(cache.contents.pages(), u32::MAX);
    }

    /// Handles the end of the read of a footer.
    pub fn late_footer_read(&mut self, cache: &mut Cache, index: usize, done: Completion) {
        if let Some(late) = &mut self.late {
            late.take(cache, index, done);
        }
    }

    /// When [`Start::pump_late`] has more to do; `is_idle` says that no request is in flight.
    pub fn late_at(&self, cache: &Cache, is_idle: bool) -> Option<Instant> {
        let late = self.late.as_ref()?;
        if late.over.is_none() && !cache.makes_room() {
            return None;
        }
        let is_now = is_idle || Self::is_hurried(cache);
        let due = if is_now { cache.now } else { late.next_at.max(cache.now) };
        match late.segments.front().map(|first| &first.footer) {
            Some(Footer::Reading) => None,
            Some(Footer::Unread) => Some(late.retry_at.max(due)),
            Some(Footer::Read(_)) | None => Some(due),
        }
    }

    /// Whether writes wait for room in the log, which reclaim cannot make before the end.
    fn is_hurried(cache: &Cache) -> bool {
        cache.log.queued() > 0 && !cache.has_client_space()
    }

    /// Applies the next entries.
    pub fn pump_late(&mut self, cache: &mut Cache, is_idle: bool, fx: &mut Effects) {
        let is_due = |late: &Late| is_idle || Self::is_hurried(cache) || late.next_at <= cache.now;
        if !self.late.as_deref().is_some_and(is_due) {
            return;
        }
        let Some(mut late) = self.late.take() else { return };
        late.next_at = cache.now + PAUSE;
        if late.over.is_none() && cache.makes_room() {
            self.load_some(cache, &mut late, fx);
        }
        if let Some(settled) = &mut late.over {
            settled.drop_parts(FREED_ROOM);
        }
        self.late = Some(late).filter(|late| late.over.as_ref().is_none_or(LargeMap::has_parts));
    }

    fn load_some(&mut self, cache: &mut Cache, late: &mut Late, fx: &mut Effects) {
        late.read_ahead(cache, fx);
        if !late.segments.is_empty() {
            self.apply_late(cache, late);
        } else if cache.store.rebuild(cache.contents.pages(), EXTENTS_FOUND) {
            late.over = Some(cache.contents.end_loading());
            let blocks = cache.contents.index().len();
            cache.tell(Event::Loaded { blocks });
        }
    }

    fn apply_late(&mut self, cache: &mut Cache, late: &mut Late) {
        let per_turn = (cache.config.segment_size / LOADED_ONE_IN).clamp(1, LOADED_MAX);
        let hurry = if Self::is_hurried(cache) { LOADED_HURRY } else { 1 };
        let mut left = u64::from(per_turn * hurry);
        cache.contents.set_applying(true);
        while left > 0
            && let Some(first) = late.segments.front()
            && let Footer::Read(bytes) = &first.footer
        {
            let few = WARM_AHEAD.min(left as usize);
            let Some((blocks, to)) = self.apply_some(cache, first, bytes, late.applied, few) else {
                cache.out.note(Note::CacheFailed);
                break;
            };
            left = left.saturating_sub(blocks);
            late.applied = to;
            if to.entries() == first.trailer.footer.entries {
                late.segments.pop_front();
                late.applied = TablePosition::default();
            }
        }
        cache.contents.set_applying(false);
    }

    /// Applies up to `few` entries of a segment from a position on. Returns the number of their
    /// blocks and the position after them, unless an entry cannot be decoded.
    fn apply_some(
        &mut self,
        cache: &mut Cache,
        segment: &Segment,
        footer: &[u8],
        from: TablePosition,
        few: usize,
    ) -> Option<(u64, TablePosition)> {
        let (entries, past) = segment.trailer.some_entries(footer, from, few).ok()?;
        for entry in &entries {
            cache.contents.index().warm(Key::new(entry.volume, entry.block));
        }
        for (entry, ordinal) in entries.iter().zip(from.entries() as usize..) {
            self.apply_entry(cache, segment.index, ordinal, entry, false);
        }
        let blocks = entries.iter().map(|entry| u64::from(entry.count)).sum();
        (!entries.is_empty()).then_some((blocks, past))
    }
}
