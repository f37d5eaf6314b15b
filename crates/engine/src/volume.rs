//! What a shard knows of a volume.

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_block::{Instant, IoError};
use forebay_policy::ReadAround;

use crate::api::VolumeConfig;
use crate::api::primary::{Lookups, Primary};
use crate::flow::Flow;
use crate::key::Key;
use crate::losses::Losses;
use crate::slab::Id;

/// A volume's part in one shard.
#[derive(Debug)]
pub(crate) struct Volume {
    pub config: VolumeConfig,
    /// Direct changes of the primary completed, and those that a flush has made durable.
    pub direct: u64,
    pub direct_durable: u64,
    /// Destages written and waiting for a flush.
    pub written: Vec<Id>,
    /// Flush operations and writes waiting for the next flush.
    pub flush_waiters: Vec<Id>,
    pub fua_waiters: Vec<Id>,
    pub flushing: bool,
    /// Blocks that were dirty when the volume came into a mode in which the primary alone must
    /// be complete, in address order; and flushes that wait until none of them is.
    pub leftover: BTreeSet<Key>,
    pub leftover_waiters: Vec<Id>,
    /// Stripes of it are on their way to be detached.
    pub is_leaving: bool,
    /// How often `leftover` was taken: a destage from before may have an older version.
    pub switches: u64,
    /// What was written and is lost, until clients that flush have been told.
    pub losses: Losses,
    /// A flush after direct changes failed: what is read from the primary is not admitted again.
    pub flush_failed: bool,
    /// Failed flushes of the primary that the shard was told of.
    pub flush_failures: u64,
    /// Its primary was changed without the cache: its clean blocks are not used while they are
    /// being dropped; and that it was found to be so.
    pub distrusted: bool,
    pub changed: bool,
    /// When direct changes were last made durable.
    pub direct_since: Instant,
    /// When `written` got its first.
    pub written_since: Instant,
    /// Destaging rests until then after an error.
    pub retry_at: Instant,
    pub failures: u32,
    /// It is destaged as fast as its primary takes it.
    pub draining: bool,
    pub around: ReadAround,
    pub primary: Primary,
    pub lookups: Lookups,
    pub flow: Flow,
}

impl Volume {
    pub fn new(config: VolumeConfig, depth: u32) -> Self {
        let flow = Flow::new(depth, config.rotational, Key::new(config.id, 0));
        Self {
            config,
            flow,
            // What was written before this start may not be durable there: the first flush counts.
            direct: 1,
            direct_durable: 0,
            written: Vec::new(),
            flush_waiters: Vec::new(),
            fua_waiters: Vec::new(),
            flushing: false,
            losses: Losses::default(),
            flush_failed: false,
            flush_failures: 0,
            distrusted: false,
            changed: false,
            direct_since: Instant::default(),
            leftover: BTreeSet::new(),
            switches: 0,
            leftover_waiters: Vec::new(),
            is_leaving: false,
            written_since: Instant::default(),
            retry_at: Instant::default(),
            failures: 0,
            draining: false,
            around: ReadAround::default(),
            primary: Primary::default(),
            lookups: Lookups::default(),
        }
    }
}

/// How long the oldest request of a primary may take before the log no longer waits for it.
const HANGS_AFTER: Duration = Duration::from_secs(5);

impl Volume {
    /// Whether the primary takes no blocks: it fails them, or does not answer.
    pub fn is_stuck(&self, now: Instant) -> bool {
        let hangs = self.flow.oldest_io.is_some_and(|at| now.since(at) >= HANGS_AFTER);
        hangs || self.failures > 0 || self.primary.away_since.is_some()
    }
}

impl Volume {
    /// A flush failed after direct changes: reported once, since what it lost cannot be flushed
    /// again; to the next who flushes, if nobody was `told`.
    pub fn give_up_direct(&mut self, error: &IoError, told: bool) {
        if self.direct == self.direct_durable {
            return;
        }
        if !told {
            self.losses.note(error.clone());
        }
        self.flush_failed = true;
        self.direct_durable = self.direct;
    }
}
