//! Counts of what happened, for one run and for many.

use forebay_engine::Stats;

/// What happened in a run.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    /// Events.
    pub events: u64,
    /// Crashes, those during recovery among them.
    pub crashes: u64,
    /// Crashes during recovery.
    pub recovery_crashes: u64,
    /// Requests of clients that were answered.
    pub requests: u64,
    /// Requests of clients that failed.
    pub failed: u64,
    /// Starts that were refused.
    pub refusals: u64,
    /// Records of stripes that a failed cache left.
    pub detached: u64,
    /// Disk requests that a fault struck.
    pub struck: u64,
    /// Bytes compared with the model.
    pub checked: u64,
    /// Blocks written as deltas, and written whole again at reclaim, by servers that did not stop
    /// in order.
    pub deltas: u64,
    /// See `deltas`.
    pub rebased: u64,
    /// Blocks written that share the payload of another, by the same servers.
    pub duplicates: u64,
    /// Blocks that reclaim wrote again in a denser form, by the same servers.
    pub dense: u64,
    /// Blocks written against similar ones, by the same servers.
    pub similar: u64,
    /// Blocks read together with missed ones, by the same servers.
    pub around: u64,
    /// Blocks compressed in RAM, and found there, by the same servers.
    pub packed: u64,
    /// See `packed`.
    pub unpacked: u64,
    /// The longest that a client's write took, in nanoseconds.
    pub slowest_write: u64,
    /// Writes that were uncertain at the first crash.
    pub uncertain: Option<usize>,
    /// Nanoseconds that a request took at most of a volume beside one whose primary was away.
    pub slowest: u64,
    /// The last crash came after the whole script.
    pub crashed_at_end: bool,
}

impl Tally {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.crashes += other.crashes;
        self.recovery_crashes += other.recovery_crashes;
        self.requests += other.requests;
        self.failed += other.failed;
        self.refusals += other.refusals;
        self.detached += other.detached;
        self.struck += other.struck;
        self.checked += other.checked;
        self.deltas += other.deltas;
        self.duplicates += other.duplicates;
        self.dense += other.dense;
        self.similar += other.similar;
        self.rebased += other.rebased;
        self.around += other.around;
        self.packed += other.packed;
        self.unpacked += other.unpacked;
        self.slowest_write = self.slowest_write.max(other.slowest_write);
    }
    /// Adds what an engine counted.
    pub(crate) fn count(&mut self, stats: &Stats) {
        self.deltas += stats.delta_blocks;
        self.duplicates += stats.duplicate_blocks;
        self.dense += stats.dense_blocks;
        self.similar += stats.similar_written;
        self.rebased += stats.rebased_blocks;
        self.around += stats.read_around_blocks;
        self.packed += stats.ram_compression_tries;
        self.unpacked += stats.ram_compressed_hit_blocks;
    }
}
