//! Counters of one run, or of many.

use forebay_engine::Stats;

/// Counters of a run.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    /// Number of events.
    pub events: u64,
    /// Crashes, including those during recovery.
    pub crashes: u64,
    /// Crashes during recovery.
    pub recovery_crashes: u64,
    /// Requests of clients that were answered.
    pub requests: u64,
    /// Requests that reached a shard before it had loaded all clean blocks.
    pub while_loading: u64,
    /// Requests of clients that failed.
    pub failed: u64,
    /// Requests that a server took over from one that died.
    pub taken_over: u64,
    /// Starts that were refused.
    pub refusals: u64,
    /// Records of stripes that a failed cache left.
    pub detached: u64,
    /// Disk requests that a fault struck.
    pub struck: u64,
    /// Bytes compared with the model.
    pub checked: u64,
    /// Blocks written as deltas, by servers that did not stop in order. So are the counters up to
    /// `unpacked`.
    pub deltas: u64,
    /// Blocks written whole again at reclaim.
    pub rebased: u64,
    /// Blocks written that share the payload of another.
    pub duplicates: u64,
    /// Blocks moved from a log to a store.
    pub stored: u64,
    /// Blocks that reclaim rewrote in a denser form.
    pub dense: u64,
    /// Blocks written against similar ones.
    pub similar: u64,
    /// Blocks read together with missed ones.
    pub around: u64,
    /// Clean blocks made dirty to fill stripes of a primary.
    pub filling: u64,
    /// Blocks compressed in RAM.
    pub packed: u64,
    /// Hits on blocks compressed in RAM.
    pub unpacked: u64,
    /// Longest time of a client's write, in nanoseconds.
    pub slowest_write: u64,
    /// Number of writes that were uncertain at the first crash.
    pub uncertain: Option<usize>,
    /// Longest time of a request of a volume while another volume's primary was away, in
    /// nanoseconds.
    pub slowest: u64,
    /// Changes of volumes and of the cache that came into force.
    pub changes: u64,
    /// Starts of the shards.
    pub starts: u64,
    /// Losses of the cache device after which the primaries of ordered volumes were judged, the
    /// volumes among them that were older than the last durable write, and those for which nothing
    /// was promised yet.
    pub ends: [u64; 3],
    /// The greatest age of a primary at the loss of its cache, in nanoseconds.
    pub oldest: u64,
    /// Whether the last crash came after the whole script.
    pub crashed_at_end: bool,
}

impl Tally {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.crashes += other.crashes;
        self.recovery_crashes += other.recovery_crashes;
        self.taken_over += other.taken_over;
        self.requests += other.requests;
        self.while_loading += other.while_loading;
        self.failed += other.failed;
        self.refusals += other.refusals;
        self.detached += other.detached;
        self.struck += other.struck;
        self.checked += other.checked;
        self.deltas += other.deltas;
        self.duplicates += other.duplicates;
        self.stored += other.stored;
        self.dense += other.dense;
        self.filling += other.filling;
        self.similar += other.similar;
        self.rebased += other.rebased;
        self.around += other.around;
        self.packed += other.packed;
        self.unpacked += other.unpacked;
        self.slowest_write = self.slowest_write.max(other.slowest_write);
        self.changes += other.changes;
        self.starts += other.starts;
        for (sum, more) in self.ends.iter_mut().zip(other.ends) {
            *sum += more;
        }
        self.oldest = self.oldest.max(other.oldest);
    }

    /// Adds the counters of an engine.
    pub(crate) fn count(&mut self, stats: &Stats) {
        self.deltas += stats.delta_blocks;
        self.duplicates += stats.duplicate_blocks;
        self.stored += stats.stored_blocks;
        self.dense += stats.dense_blocks;
        self.filling += stats.stripe_filled_blocks;
        self.similar += stats.similar_written;
        self.rebased += stats.rebased_blocks;
        self.around += stats.read_around_blocks;
        self.packed += stats.ram_compression_tries;
        self.unpacked += stats.ram_compressed_hit_blocks;
    }
}
