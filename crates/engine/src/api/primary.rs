//! The state of a volume in this shard: its primary as the shard sees it, its statistics, its dirty
//! and lost blocks.

use forebay_block::{ByteRange, ErrorKind, Instant, IoOp, VolumeId};

use crate::api::stats::Stats;

/// Limit on the ranges of lost blocks that are listed per volume and shard.
pub const LOST_RANGES_MAX: usize = 1000;

/// Failed requests to a primary, by operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrimaryErrors {
    /// Reads that failed.
    pub reads: u64,
    /// Writes, zeroes and discards that failed.
    pub writes: u64,
    /// Flushes that failed.
    pub flushes: u64,
}

impl PrimaryErrors {
    /// The sum over all operations.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.reads + self.writes + self.flushes
    }

    /// Counts a failed request.
    pub(crate) fn count(&mut self, op: IoOp) {
        match op {
            IoOp::Read | IoOp::Prefetch => self.reads += 1,
            IoOp::Flush => self.flushes += 1,
            IoOp::Write | IoOp::WriteZeroes | IoOp::Discard => self.writes += 1,
        }
    }
}

/// The state of a volume's primary.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Primary {
    /// Requests that failed.
    pub errors: PrimaryErrors,
    /// Time and kind of the last error.
    pub last_error: Option<(Instant, ErrorKind)>,
    /// When a request last succeeded.
    pub last_success: Option<Instant>,
    /// When the primary stopped answering; `None` if the last request was answered.
    pub away_since: Option<Instant>,
}

impl Primary {
    /// Adds what another shard saw. The primary is away only if no shard has had an answer since.
    pub fn merge(&mut self, other: &Self) {
        self.errors.reads += other.errors.reads;
        self.errors.writes += other.errors.writes;
        self.errors.flushes += other.errors.flushes;
        let errors = [self.last_error, other.last_error].into_iter().flatten();
        self.last_error = errors.max_by_key(|&(at, _)| at);
        self.last_success = self.last_success.max(other.last_success);
        let away = [self.away_since, other.away_since].into_iter().flatten().min();
        let answered = self.last_success >= self.last_error.map(|(at, _)| at);
        self.away_since = away.filter(|_| !answered);
    }
}

/// Whether an error means that the device does not answer.
pub(crate) fn is_away(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::DeviceGone | ErrorKind::Timeout)
}

/// The result of a read's cache lookup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lookup {
    Hit,
    Partial,
    Miss,
    Bypass,
}

/// The state of a volume in one shard.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VolumeState {
    /// The volume.
    pub id: VolumeId,
    /// Its statistics: the rows that are kept by volume.
    pub stats: Stats,
    /// Its primary.
    pub primary: Primary,
    /// Number of blocks that are newer in the cache than on the primary.
    pub dirty_blocks: u64,
    /// Number of these blocks that cannot be read back.
    pub lost_blocks: u64,
    /// Ranges of the lost blocks in address order; at most [`LOST_RANGES_MAX`].
    pub lost: Vec<ByteRange>,
    /// Number of dirty blocks at which writes of the volume wait.
    pub dirty_limit_blocks: u64,
    /// Number of blocks down to which other volumes displace none of this one.
    pub cache_guarantee_blocks: u64,
    /// Number of blocks at which its new blocks displace its own; `None` if there is no limit.
    pub cache_limit_blocks: Option<u64>,
    /// Number of writes held back near the dirty limit.
    pub held_writes: u64,
    /// The primary was found to have been changed without the cache.
    pub changed: bool,
    /// Requests that the primary has not answered for longer than the configured patience.
    pub slow_ios: u64,
    /// Send time of the oldest request that the primary has not answered, as of the last check.
    pub oldest_io: Option<Instant>,
}

impl VolumeState {
    /// Adds another shard's state of the volume.
    pub fn merge(&mut self, other: &Self) {
        self.stats.merge(&other.stats);
        self.primary.merge(&other.primary);
        self.dirty_blocks += other.dirty_blocks;
        self.lost_blocks += other.lost_blocks;
        self.dirty_limit_blocks += other.dirty_limit_blocks;
        self.cache_guarantee_blocks += other.cache_guarantee_blocks;
        let limits = [self.cache_limit_blocks, other.cache_limit_blocks];
        self.cache_limit_blocks = limits.into_iter().flatten().reduce(|one, two| one + two);
        self.held_writes += other.held_writes;
        self.changed |= other.changed;
        self.slow_ios += other.slow_ios;
        self.oldest_io = [self.oldest_io, other.oldest_io].into_iter().flatten().min();
        self.lost.extend_from_slice(&other.lost);
        self.lost.sort_unstable_by_key(|range| range.offset);
        self.lost.dedup_by(|next, range| {
            let follows = range.end() == next.offset;
            range.len += if follows { next.len } else { 0 };
            follows
        });
        self.lost.truncate(LOST_RANGES_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away(since: u64) -> Primary {
        let at = Instant(since);
        Primary {
            last_error: Some((at, ErrorKind::DeviceGone)),
            away_since: Some(at),
            ..Primary::default()
        }
    }

    #[test]
    fn a_primary_is_away_only_if_no_shard_had_an_answer_since() {
        let mut both = away(5);
        both.merge(&away(3));
        assert_eq!(both.away_since, Some(Instant(3)));
        let answered = Primary { last_success: Some(Instant(9)), ..Primary::default() };
        both.merge(&answered);
        assert_eq!(both.away_since, None);
        let mut before = Primary { last_success: Some(Instant(2)), ..Primary::default() };
        before.merge(&away(3));
        assert_eq!(before.away_since, Some(Instant(3)));
    }

    #[test]
    fn limits_of_shards_add_up_and_none_stays_none() {
        let limit = |blocks| VolumeState { cache_limit_blocks: blocks, ..VolumeState::default() };
        let mut all = VolumeState::default();
        all.merge(&limit(None));
        assert_eq!(all.cache_limit_blocks, None);
        [3, 4].into_iter().for_each(|blocks| all.merge(&limit(Some(blocks))));
        assert_eq!(all.cache_limit_blocks, Some(7));
    }

    #[test]
    fn lost_ranges_of_shards_are_joined_in_address_order() {
        let lost = |ranges: &[(u64, u64)]| VolumeState {
            lost: ranges.iter().map(|&(offset, len)| ByteRange { offset, len }).collect(),
            ..VolumeState::default()
        };
        let mut all = lost(&[(0, 4096), (1 << 20, 8192)]);
        all.merge(&lost(&[(4096, 4096), (3 << 20, 4096)]));
        assert_eq!(all.lost, lost(&[(0, 8192), (1 << 20, 8192), (3 << 20, 4096)]).lost);
    }
}
