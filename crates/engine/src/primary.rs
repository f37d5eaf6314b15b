//! How the primary of a volume is doing, as this shard sees it; and what reads of the volume found.

use forebay_block::{
    BLOCK_SIZE, BlockRange, ByteRange, Completion, ErrorKind, Instant, IoOp, VolumeId,
};

use crate::Engine;
use crate::api::Target;
use crate::event::Event;
use crate::key::Key;
use crate::op::InFlight;

/// Ranges of lost blocks that are listed for a volume and a shard at most.
pub const LOST_RANGES_MAX: usize = 1000;

/// What became of a request to a primary.
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
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.reads + self.writes + self.flushes
    }

    fn count(&mut self, op: IoOp) {
        match op {
            IoOp::Read => self.reads += 1,
            IoOp::Flush => self.flushes += 1,
            IoOp::Write | IoOp::WriteZeroes | IoOp::Discard => self.writes += 1,
        }
    }
}

/// How the primary of a volume is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Primary {
    /// Requests that failed.
    pub errors: PrimaryErrors,
    /// The last one: when and how.
    pub last_error: Option<(Instant, ErrorKind)>,
    /// When a request last succeeded.
    pub last_success: Option<Instant>,
    /// Since when it does not answer: none when the last request was answered.
    pub away_since: Option<Instant>,
}

impl Primary {
    /// Adds what another shard saw. It is away only if no shard had an answer since.
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

/// Reads of a volume by what the cache had of them. They add up to the lookups.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lookups {
    /// All blocks.
    pub hits: u64,
    /// Some blocks.
    pub partial_hits: u64,
    /// None.
    pub misses: u64,
    /// It was not asked: the read went past the cache.
    pub bypasses: u64,
}

impl Lookups {
    /// Adds another shard's.
    pub fn merge(&mut self, other: &Self) {
        self.hits += other.hits;
        self.partial_hits += other.partial_hits;
        self.misses += other.misses;
        self.bypasses += other.bypasses;
    }
}

/// Whether an error says that a device does not answer.
pub(crate) fn is_away(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::DeviceGone | ErrorKind::Timeout)
}

/// What the cache had of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lookup {
    Hit,
    Partial,
    Miss,
    Bypass,
}

/// How a volume stands in one shard.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VolumeState {
    /// Which.
    pub id: VolumeId,
    /// Its reads.
    pub lookups: Lookups,
    /// Its primary.
    pub primary: Primary,
    /// Blocks that only the cache has in their newest form.
    pub dirty_blocks: u64,
    /// Of these, how many cannot be read back.
    pub lost_blocks: u64,
    /// Where those are, in address order; at most [`LOST_RANGES_MAX`].
    pub lost: Vec<ByteRange>,
    /// Dirty blocks at which its writes wait.
    pub dirty_limit_blocks: u64,
    /// Writes that are held back on the way there.
    pub held_writes: u64,
    /// The primary was found to have been changed without the cache.
    pub changed: bool,
    /// Requests that the primary has not answered for longer than the configured patience.
    pub slow_ios: u64,
    /// When the oldest request was sent that it has not answered, as of the last look.
    pub oldest_io: Option<Instant>,
}

impl VolumeState {
    /// Adds what another shard has of the volume.
    pub fn merge(&mut self, other: &Self) {
        self.lookups.merge(&other.lookups);
        self.primary.merge(&other.primary);
        self.dirty_blocks += other.dirty_blocks;
        self.lost_blocks += other.lost_blocks;
        self.dirty_limit_blocks += other.dirty_limit_blocks;
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

impl Engine {
    /// Counts how a device's request ended, and says what ought to be known of it.
    pub(crate) fn note_ended(&mut self, target: Target, sent: &InFlight, done: &Completion) {
        let Target::Primary(volume) = target else {
            if let Err(error) = &done.result {
                self.stats.cache_errors += 1;
                let (op, range, kind) = (sent.op, sent.range, error.kind());
                self.tell(Event::DeviceFailed { target, op, range, kind });
            }
            return;
        };
        let now = self.now;
        let primary = &mut self.volume_mut(volume).primary;
        let Err(error) = &done.result else {
            primary.last_success = Some(now);
            if let Some(since) = primary.away_since.take() {
                self.tell(Event::PrimaryBack { volume, away: now.since(since) });
            }
            return;
        };
        let (op, range, kind) = (sent.op, sent.range, error.kind());
        primary.errors.count(op);
        primary.last_error = Some((now, kind));
        let is_news = is_away(kind) && primary.away_since.is_none();
        if is_news {
            primary.away_since = Some(now);
        }
        self.stats.primary_errors += 1;
        if is_news {
            self.tell(Event::PrimaryAway { volume, kind });
        }
        self.tell(Event::DeviceFailed { target, op, range, kind });
    }

    /// Counts a client's read.
    pub(crate) fn note_lookup(&mut self, volume: VolumeId, found: Lookup) {
        self.stats.lookups += 1;
        let of_all = match found {
            Lookup::Hit => &mut self.stats.hits,
            Lookup::Partial => &mut self.stats.partial_hits,
            Lookup::Miss => &mut self.stats.misses,
            Lookup::Bypass => &mut self.stats.bypasses,
        };
        *of_all += 1;
        let lookups = &mut self.volume_mut(volume).lookups;
        let of_volume = match found {
            Lookup::Hit => &mut lookups.hits,
            Lookup::Partial => &mut lookups.partial_hits,
            Lookup::Miss => &mut lookups.misses,
            Lookup::Bypass => &mut lookups.bypasses,
        };
        *of_volume += 1;
    }

    /// How each volume stands.
    #[must_use]
    pub fn volumes(&self) -> Vec<VolumeState> {
        let state = |volume: &crate::volume::Volume| {
            let id = volume.config.id;
            let (lost_blocks, lost) = self.lost_of(id);
            VolumeState {
                id,
                lookups: volume.lookups,
                primary: volume.primary,
                dirty_blocks: self.contents.dirty().blocks_of(id),
                lost_blocks,
                lost,
                dirty_limit_blocks: self.limit_of(id),
                changed: volume.changed,
                held_writes: volume.flow.held_writes(),
                slow_ios: volume.flow.slow_ios,
                oldest_io: volume.flow.oldest_io,
            }
        };
        self.volumes.iter().flatten().map(state).collect()
    }

    /// Blocks of a volume that cannot be read back: how many, and where the first ranges are.
    fn lost_of(&self, volume: VolumeId) -> (u64, Vec<ByteRange>) {
        let mut ranges: Vec<ByteRange> = Vec::new();
        let mut count = 0;
        for key in self.contents.fenced().range(Key::range(volume)) {
            count += 1;
            let block = BlockRange { first: key.block(), count: 1 }.bytes();
            let last = ranges.last_mut().filter(|last| last.end() == block.offset);
            if let Some(last) = last {
                last.len += BLOCK_SIZE as u64;
            } else if ranges.len() < LOST_RANGES_MAX {
                ranges.push(block);
            }
        }
        (count, ranges)
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
