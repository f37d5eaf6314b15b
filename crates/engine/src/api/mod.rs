//! The engine's interface: requests and settings that go in, effects that come out.
//!
//! The engine of a shard does no I/O, reads no clock, starts no thread and draws no randomness.
//! Requests, completions and the time are passed in; everything it wants done is in [`Effects`].

pub mod cut;
pub mod event;
pub mod listing;
pub mod primary;
pub mod stats;

use std::sync::Arc;
use std::time::Duration;

use forebay_block::{
    BufPool, ByteRange, Instant, Io, IoBuf, IoError, IoFlags, IoOp, STRIPE_BLOCKS, VolumeId,
};
use forebay_format::Lsn;
pub use forebay_policy::{CacheShare, DirtyShare, Eviction, Foreground, Part};

use crate::api::cut::CutReport;
use crate::api::event::Event;

/// Identifies a request to its submitter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId(pub u64);

/// Why a request bypasses the cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Bypass {
    /// It belongs to a sequential stream that has passed the threshold.
    Sequential,
    /// The volume's mode does not cache it.
    Mode,
    /// The cache has failed or is being detached, or has no room since a primary takes no blocks.
    Degraded,
    /// A rule of the administrator says so.
    Rule,
}

impl Bypass {
    /// Number of reasons, for tables indexed by them.
    pub const COUNT: usize = 4;
}

/// Why missed blocks do not enter the cache device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Refusal {
    /// They are requested less frequently than the blocks that they would displace.
    Frequency,
    /// Their volume is at its limit, and its own blocks are worth more.
    Limit,
    /// As many bytes have entered as may in this time.
    Rate,
    /// The budget of wear is used up so far that only more frequent blocks enter, or none.
    Wear,
    /// The volume's mode does not cache reads, its primary was changed, or the device failed.
    Mode,
    /// A part of the log has not been loaded yet: they may be in the cache.
    Loading,
}

impl Refusal {
    /// Number of reasons, for tables indexed by them.
    pub const COUNT: usize = 6;
}

/// Why dirty blocks go to a primary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum DestageReason {
    /// They have been dirty for nearly as long as they may be.
    Age,
    /// There are many.
    Level,
    /// No client waits for anything.
    Idle,
    /// A drain was requested.
    Drain,
    /// The log needs the segment that they are in.
    Room,
    /// The volume's mode was changed.
    Mode,
    /// The cache device has failed and is being emptied.
    Fault,
    /// A write in write-through waits for them.
    Through,
}

impl DestageReason {
    /// Number of reasons, for tables indexed by them.
    pub const COUNT: usize = 8;
}

/// A request for one shard: every block of `range` belongs to that shard and to one stripe. Its
/// buffer follows the rules of [`Io`].
#[derive(Debug)]
pub struct Request {
    /// The submitter's ID for the request.
    pub id: RequestId,
    /// The volume.
    pub volume: VolumeId,
    /// The operation.
    pub op: IoOp,
    /// The byte range on the volume, with any alignment; empty for a flush.
    pub range: ByteRange,
    /// Flags of the operation, such as FUA.
    pub flags: IoFlags,
    /// The data of a write, or the space for a read.
    pub buf: IoBuf,
    /// Set when the volume layer decided that the request should bypass the cache.
    pub bypass: Option<Bypass>,
}

impl Request {
    /// A flush of a volume.
    #[must_use]
    pub fn flush(id: RequestId, volume: VolumeId) -> Self {
        let (range, flags, buf) = (ByteRange::default(), IoFlags::default(), IoBuf::empty());
        Self { id, volume, op: IoOp::Flush, range, flags, buf, bypass: None }
    }
}

/// The reply to a request; there is exactly one for each.
#[derive(Debug)]
pub struct Reply {
    /// The submitter's ID for the request.
    pub id: RequestId,
    /// Whether the request succeeded.
    pub result: Result<(), IoError>,
    /// The request's buffer.
    pub buf: IoBuf,
    /// For a write that the primary completed but has not flushed: the number of failed flushes
    /// that had been reported to the shard by then. Any later failure may have lost the write.
    pub direct: Option<u64>,
    /// For a read or a write: the slowest tier that it had to wait for.
    pub tier: Option<Tier>,
}

/// The tiers that serve reads and writes, from the fastest to the slowest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Tier {
    /// Blocks in RAM.
    Ram,
    /// The cache device.
    Cache,
    /// The primary.
    Primary,
}

/// The device for an effect's I/O.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Target {
    /// The primary of a volume; offsets are relative to the volume.
    Primary(VolumeId),
    /// The cache device; offsets are relative to the device, and within this shard's area.
    Cache,
}

/// Everything an engine wants done. The caller carries it out and empties it. The order of the I/Os
/// has no meaning.
#[derive(Debug, Default)]
pub struct Effects {
    /// I/O to submit; its completion goes to [`crate::Shard::complete`].
    pub ios: Vec<(Target, Io)>,
    /// Requests that are finished.
    pub replies: Vec<Reply>,
    /// How far the cache device may still be trusted after a restart. The owner persists this
    /// outside the cache for the whole pool (trust only ever decreases) and then calls
    /// [`crate::Shard::trust_recorded`] on every shard.
    pub record_trust: Option<Trust>,
    /// Stripes that a failed cache has left, to be recorded durably outside the cache, in this
    /// order. The owner then calls [`crate::Shard::detached`] with the recorded stripes. Writes
    /// wait for that call, and fail if it does not come within [`ShardConfig::patience`].
    pub detach: Vec<DetachedStripe>,
    /// Volumes whose primary was found to have been changed without the cache. The owner must tell
    /// every other shard with [`crate::Shard::distrust`].
    pub changed: Vec<VolumeId>,
    /// Progress with the cuts of ordered volumes. The owner passes each to the gate of its volume,
    /// and the orders that result to [`crate::Shard::cut`] of every shard.
    pub cuts: Vec<CutReport>,
    /// Events for the administrator; handed out by [`crate::Shard::poll`].
    pub events: Vec<Event>,
    /// When [`crate::Shard::poll`] must be called even if nothing has happened.
    pub deadline: Option<Instant>,
}

/// How far the content of a cache device may be trusted at the next start. Kept outside the device
/// (in the witness), because it matters when the device can no longer be written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Trust {
    /// All of its content.
    #[default]
    Full,
    /// Only its dirty blocks: writes to the device failed, and its clean blocks may be stale.
    DirtyOnly,
    /// Nothing: the primaries were written without the cache.
    Nothing,
}

/// How blocks that resemble other blocks are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ContentLocality {
    /// Each block by itself.
    Independent,
    /// A rewritten block is stored as a delta against its older version, while that version is in
    /// RAM. A block that equals one written just before shares the payload of that one.
    #[default]
    Rewrite,
    /// As `Rewrite`; in addition, blocks copied forward and blocks read from a primary are stored
    /// against similar blocks.
    Similar,
}

impl ContentLocality {
    /// Every setting with its name in commands, configuration and metrics.
    pub const NAMES: [(&'static str, Self); 3] = [
        ("independent", Self::Independent),
        ("rewrite", Self::Rewrite),
        ("similar", Self::Similar),
    ];

    /// The setting's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

/// How the cache handles reads and writes of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u8)]
pub enum Mode {
    /// Writes are acknowledged from the cache device and destaged later.
    #[default]
    WriteBack,
    /// Writes are acknowledged when both the cache and the primary have them.
    WriteThrough,
    /// Writes go to the primary; cached copies are invalidated first; reads are admitted.
    WriteAround,
    /// As write-back, but reads are not admitted.
    WriteOnly,
    /// The cache is not used, except for blocks still dirty in it.
    PassThrough,
}

impl Mode {
    /// Every mode with its name in commands, configuration and metrics.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("write-back", Self::WriteBack),
        ("write-through", Self::WriteThrough),
        ("write-around", Self::WriteAround),
        ("write-only", Self::WriteOnly),
        ("pass-through", Self::PassThrough),
    ];

    /// The mode's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    /// Whether the primary alone must be complete: it has the data of a write when the write is
    /// answered, and has it durably after a flush.
    #[must_use]
    pub fn is_complete(self) -> bool {
        matches!(self, Self::WriteThrough | Self::WriteAround | Self::PassThrough)
    }

    /// Whether blocks enter the cache that are read.
    #[must_use]
    pub fn admits_reads(self) -> bool {
        !matches!(self, Self::WriteOnly | Self::PassThrough)
    }

    /// The mode with this name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, mode)| mode)
    }
}

/// A setting that can be changed while serving, with its new value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Setting {
    /// The cache mode of a volume.
    Mode(VolumeId, Mode),
    /// Which blocks enter the cache, and which clean blocks leave it.
    Eviction(Eviction),
    /// How blocks that resemble other blocks are stored.
    Content(ContentLocality),
    /// Part of the cache that may be dirty.
    DirtyLimit(Part),
    /// A volume's share of the dirty limit.
    DirtyShare(VolumeId, DirtyShare),
    /// A volume's share of the cache.
    CacheShare(VolumeId, CacheShare),
    /// The longest a dirty block may wait before it is on the primary.
    WriteCacheDepth(Duration),
    /// Part of the dirty limit above which blocks are destaged.
    DirtyTarget(Part),
    /// The time without client requests from which everything is destaged; never when `None`.
    IdleDestage(Option<Duration>),
    /// How destaging treats a volume's primary.
    Pace(VolumeId, Pace),
    /// The most bytes per second of clean blocks that all shards together bring into the cache
    /// device; unlimited when `None`.
    FillRate(Option<u64>),
    /// Bytes per day that all shards together write to the cache device, above which they write
    /// only what clients write; no budget when `None`.
    WearBudget(Option<u64>),
    /// How long a write at the dirty limit waits for a primary that is away, and how long a request
    /// of a device may take before it is reported as slow.
    Patience(Duration),
}

/// The most of a cache that may be dirty, in percent: clean blocks and reclaim need space too.
pub const DIRTY_MAX_PERCENT: u8 = 90;

/// How destaging treats a primary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Pace {
    /// The latency of client requests to aim at; `None` is that of the kind of primary.
    pub latency: Option<Duration>,
    /// The most bytes per second that all shards together destage; unlimited when `None`.
    pub rate: Option<u64>,
    /// Bytes of a full stripe of the primary; 0 if it has none, what the primary says when `None`.
    pub stripe: Option<u64>,
}

/// A volume as a shard sees it.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// The volume's index in the superblock's table.
    pub id: VolumeId,
    /// Size in bytes, a multiple of 512.
    pub size: u64,
    /// The cache mode.
    pub mode: Mode,
    /// Whether the primary accepts `Discard`.
    pub discard: bool,
    /// Whether seeks on the primary are expensive: sets the latency target of destaging.
    pub rotational: bool,
    /// The requests at the primary that destages make way for; all shards share it.
    pub foreground: Arc<Foreground>,
    /// The primary's preferred unit of I/O in bytes; of an array its stripe.
    pub optimal_io: u32,
    /// The volume's share of the dirty limit.
    pub share: DirtyShare,
    /// The volume's share of the cache.
    pub cache_share: CacheShare,
    /// How destaging treats its primary.
    pub pace: Pace,
    /// For an ordered volume, the most dirty blocks that it may have in this shard: a cut of all of
    /// them is staged in memory.
    pub ordered: Option<u64>,
    /// Whether the primary may have been changed without the cache: if so, its clean blocks are
    /// compared with it.
    pub suspect: bool,
    /// Whether completed writes were lost before this start, which no client has been told: the
    /// next flush fails.
    pub lost: bool,
}

/// What an orderly stop has made durable in a shard's log, as recorded elsewhere: it stays true,
/// whatever comes later.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LastStop {
    /// The last record. A log that ends before it has lost records that were durable, or is an
    /// older copy. Zero if no stop is known.
    pub end: Lsn,
    /// For each volume of which nothing was dirty at a stop, the last record then: all its entries
    /// up to there are clean. The log alone names an entry dirty until the oldest dirty block of
    /// any volume is newer.
    pub clean: Vec<(VolumeId, Lsn)>,
}

impl LastStop {
    /// The record of a stop with the last record `end`, and nothing dirty of the `drained` volumes,
    /// after this one.
    #[must_use]
    pub fn then(&self, end: Lsn, drained: &[VolumeId]) -> Self {
        let before = self.clean.iter().filter(|(volume, _)| !drained.contains(volume));
        let now = drained.iter().map(|&volume| (volume, end));
        Self { end, clean: before.copied().chain(now).collect() }
    }
}

/// Settings of one shard. Sizes are the shard's share, not the pool's.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// The number of the shard.
    pub shard: u16,
    /// The number of shards of the pool.
    pub shards: u16,
    /// The pool's ID, which every record carries.
    pub pool: u64,
    /// The shard's area on the cache device; its length is a multiple of `segment_size`.
    pub area: ByteRange,
    /// Size of a segment in bytes: a multiple of 4096, at most 4 MiB.
    pub segment_size: u32,
    /// Number of the area's segments that are the log, if the others are the store; `None` if all
    /// of them are the log.
    pub log_segments: Option<u32>,
    /// Whether what is written to the log may have [unit entries](forebay_format::cells_of).
    pub unit_entries: bool,
    /// The volumes.
    pub volumes: Vec<VolumeConfig>,
    /// Size of the RAM tier, in bytes.
    pub ram_bytes: u64,
    /// Number of blocks for which the index has room.
    pub index_blocks: u64,
    /// Number of stripes with dirty blocks for which there is memory. Near that many, writes wait
    /// as near the dirty limit.
    pub dirty_stripes: u64,
    /// The policy that chooses which clean blocks to evict.
    pub eviction: Eviction,
    /// The longest a dirty block may wait before it is on the primary.
    pub write_cache_depth: Duration,
    /// Part of the cache that may be dirty, of which [`DIRTY_MAX_PERCENT`] are the most; at the
    /// limit writes wait for destaging.
    pub dirty_limit: Part,
    /// Part of the dirty limit above which blocks are destaged.
    pub dirty_target: Part,
    /// The time without client requests from which everything is destaged; never when `None`.
    pub idle_destage: Option<Duration>,
    /// The most bytes per second of clean blocks that all shards together bring into the cache
    /// device; unlimited when `None`.
    pub fill_rate: Option<u64>,
    /// Bytes per day that all shards together write to the cache device, above which they write
    /// only what clients write; no budget when `None`.
    pub wear_budget: Option<u64>,
    /// How long a device may leave a request unanswered before that is reported, and how long a
    /// write at the dirty limit waits for a primary that is away before it fails.
    pub patience: Duration,
    /// Limit on the destage writes in flight.
    pub destage_depth: u32,
    /// Whether payloads are compressed.
    pub compress: bool,
    /// Whether the RAM tier keeps less recent blocks in compressed form.
    pub compress_ram: bool,
    /// How rewritten and similar blocks are stored.
    pub content: ContentLocality,
    /// Whether the device's writes are durable only after a flush.
    pub cache_volatile: bool,
    /// Whether the cache device is told what is free.
    pub discard: bool,
    /// Whether the area of a fresh pool was discarded. Otherwise its extents are discarded while it
    /// serves, as after any other start.
    pub discarded: bool,
    /// The pool from which buffers are allocated.
    pub buffers: BufPool,
    /// Whether the pool has just been created, so that there is nothing to recover.
    pub fresh: bool,
    /// How far the content of the log may be trusted. With [`Trust::Nothing`] the pool is created
    /// again instead.
    pub trust: Trust,
    /// The recorded stripes of this shard that a failed cache had left ([`Effects::detach`]), in
    /// the order in which they were recorded.
    pub detached: Vec<DetachedStripe>,
    /// Whether to serve although records of the log are lost that may have held dirty blocks. Which
    /// blocks they held is unknown.
    pub accept_loss: bool,
    /// The pool's start count, which every record carries.
    pub epoch: u32,
    /// What is known of the last orderly stop.
    pub last_stop: LastStop,
}

/// The stage of an engine's life.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// Reading its log; accepts no requests.
    Recovering,
    /// Serving.
    Serving,
    /// The log cannot be trusted, for this reason. Accepts no requests, and has changed nothing.
    Refused(String),
    /// Stopping: answers the requests it has, accepts no new ones.
    Stopping,
    /// Stopped: the log is complete and durable.
    Stopped,
}

/// The health of the cache device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Health {
    /// Reads and writes work.
    #[default]
    Good,
    /// A write or a flush of the cache device failed. Nothing more is written to it; dirty blocks
    /// are destaged until none is left, and then the cache is detached. Writes go to the primary.
    Draining,
    /// The cache is out of use; the primary is used directly.
    Detached,
}

/// A stripe of a volume for which the log of a failed cache device no longer counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct DetachedStripe {
    /// The volume.
    pub volume: VolumeId,
    /// Number of the stripe on the volume.
    pub stripe: u64,
    /// Blocks of the stripe for which the log still counts, as a bitmap. A later record of the
    /// stripe replaces an earlier one.
    pub kept: [u64; (STRIPE_BLOCKS / 64) as usize],
}
