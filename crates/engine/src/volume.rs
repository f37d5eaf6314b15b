//! The state of a volume in one shard.

use std::time::Duration;

use forebay_block::{BLOCK_SIZE, ErrorKind, Instant, IoError};
use forebay_policy::ReadAround;

use crate::api::VolumeConfig;
use crate::api::primary::{Primary, is_away};
use crate::api::stats::Stats;
use crate::flow::Flow;
use crate::losses::Losses;
use crate::order::Order;
use crate::slab::Id;

/// All blocks that have been dirty since a time, or longer. A block that was written again since
/// then counts, too, until a destage that set out later is on the primary: an earlier one may have
/// carried an older version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leftover {
    /// The time.
    pub until: Instant,
    /// Where the search for one continues, by age and stripe: before this there are only blocks
    /// that cannot be read back, for which nobody waits.
    pub from: (Instant, u64),
}

impl Leftover {
    /// All blocks that are dirty at a time.
    pub fn at(until: Instant) -> Self {
        Self { until, from: (Instant(0), 0) }
    }
}

/// A volume's part in one shard.
#[derive(Debug)]
pub(crate) struct Volume {
    pub config: VolumeConfig,
    /// Direct changes that the primary completed, and the number of them that a flush made durable.
    pub direct: u64,
    pub direct_durable: u64,
    /// Destages written to the primary and waiting for its flush.
    pub written: Vec<Id>,
    /// Client flushes, and writes with FUA, that wait for the primary's next flush.
    pub flush_waiters: Vec<Id>,
    pub fua_waiters: Vec<Id>,
    pub flushing: bool,
    /// The blocks that were dirty when the volume entered a mode in which the primary alone must be
    /// complete, if some still are; and the flushes that wait until none of them is.
    pub leftover: Option<Leftover>,
    pub leftover_waiters: Vec<Id>,
    /// Some of its stripes are being detached. Of those that no write waits for, no block sets out
    /// while this many destages are in flight: a disk that chooses the nearest of its requests
    /// would serve those of the others last.
    pub is_leaving: bool,
    pub unwanted_depth: u32,
    /// When the primary last took dirty blocks, or a record of a stripe being detached came.
    pub progress: Instant,
    /// Losses of completed writes, until flushes have reported them to the clients.
    pub losses: Losses,
    /// A flush after direct changes failed: blocks read from the primary are not admitted any more.
    pub flush_failed: bool,
    /// The primary was away for the first flush, so nothing that is read there is admitted until
    /// another one has succeeded.
    pub unsettled: bool,
    /// Flushes of the primary that failed: those of any shard, each once or twice.
    pub failed_flushes: u64,
    /// Failed flushes of the primary that have been reported to the shard.
    pub flush_failures: u64,
    /// `distrusted`: the primary was changed without the cache, so the clean blocks are not used
    /// while they are being dropped. `changed`: this was found at some time.
    pub distrusted: bool,
    pub changed: bool,
    /// When the primary's last flush ended.
    pub direct_since: Instant,
    /// When the first entry of `written` was added.
    pub written_since: Instant,
    /// Destaging pauses until this time after an error.
    pub retry_at: Instant,
    pub failures: u32,
    /// The volume is destaged as fast as its primary allows.
    pub draining: bool,
    /// The order of its destages, if it is ordered.
    pub order: Order,
    pub around: ReadAround,
    pub primary: Primary,
    /// When to find out again whether a primary that is away answers; never while a request that
    /// finds it out is in flight.
    pub probe_at: Instant,
    /// The statistics that are kept by volume. The shard's own do not include them.
    pub stats: Stats,
    pub flow: Flow,
}

impl Volume {
    pub fn new(config: VolumeConfig, depth: u32, shards: u16, now: Instant) -> Self {
        let mut flow = Flow::new(depth, &config);
        flow.set_pace(config.pace, shards);
        let order = Order::new(config.ordered, now);
        let mut losses = Losses::default();
        if config.lost {
            losses.note(ErrorKind::Media.into());
        }
        Self {
            config,
            flow,
            order,
            // Writes from before this start may not be durable on the primary, so the first flush
            // counts.
            direct: 1,
            direct_durable: 0,
            written: Vec::new(),
            flush_waiters: Vec::new(),
            fua_waiters: Vec::new(),
            flushing: false,
            losses,
            flush_failed: false,
            unsettled: false,
            failed_flushes: 0,
            flush_failures: 0,
            distrusted: false,
            changed: false,
            direct_since: Instant::default(),
            leftover: None,
            leftover_waiters: Vec::new(),
            is_leaving: false,
            unwanted_depth: depth,
            progress: Instant::default(),
            written_since: Instant::default(),
            retry_at: Instant::default(),
            failures: 0,
            draining: false,
            around: ReadAround::default(),
            primary: Primary::default(),
            probe_at: Instant::default(),
            stats: Stats::default(),
        }
    }
}

/// Age of the oldest unanswered request at which the log stops waiting for the primary.
const HANGS_AFTER: Duration = Duration::from_secs(5);

impl Volume {
    /// The number of its blocks, the last of which may be short.
    pub fn blocks(&self) -> u64 {
        self.config.size.div_ceil(BLOCK_SIZE as u64)
    }

    /// Takes the write that has been held back longest, and counts the time.
    pub fn take_held(&mut self, now: Instant) -> Option<Id> {
        let held = self.flow.pop_held()?;
        self.stats.throttled_nanos += now.since(held.since).as_nanos() as u64;
        Some(held.write)
    }

    /// Returns whether the primary takes no blocks: it fails requests, or does not answer.
    pub fn is_stuck(&self, now: Instant) -> bool {
        let hangs = self.flow.oldest_io.is_some_and(|at| now.since(at) >= HANGS_AFTER);
        hangs || self.failures > 0 || self.primary.away_since.is_some()
    }

    /// Whether the primary is away, and no probe is in flight.
    pub fn is_probed(&self) -> bool {
        self.primary.away_since.is_some() && self.probe_at != Instant::NEVER
    }
}

impl Volume {
    /// Whether direct changes wait for a flush of the primary.
    pub fn has_unflushed(&self) -> bool {
        self.direct > self.direct_durable
    }

    /// Gives up direct changes after a failed flush. The loss is reported once, because the lost
    /// changes cannot be flushed again: to the next flush, unless `told` says that a client has
    /// already been told.
    pub fn give_up_direct(&mut self, error: &IoError, told: bool) {
        if !self.has_unflushed() {
            return;
        }
        if !told {
            self.losses.note(error.clone());
        }
        let is_first = (self.direct_durable, self.direct) == (0, 1);
        match is_first && is_away(error.kind()) {
            true => self.unsettled = true,
            false => self.flush_failed = true,
        }
        self.direct_durable = self.direct;
    }
}
