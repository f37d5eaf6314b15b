//! What goes into an engine and what comes out of it.
//!
//! The engine of a shard does no I/O, reads no clock, starts no thread and draws no randomness.
//! Requests and completions are handed to it with the time; everything it wants done is in
//! [`Effects`].

pub mod event;
pub mod primary;
pub mod stats;

use std::time::Duration;

use forebay_block::{
    BufPool, ByteRange, Instant, Io, IoBuf, IoError, IoFlags, IoOp, STRIPE_BLOCKS, VolumeId,
};
pub use forebay_policy::{DirtyShare, Eviction};

use crate::api::event::Event;

/// Names a request to whoever submitted it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId(pub u64);

/// Why a request goes past the cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Bypass {
    /// It belongs to a sequential stream that has passed the threshold.
    Sequential,
    /// The volume's mode does not cache it.
    Mode,
    /// The cache is failed or being detached.
    Degraded,
}

impl Bypass {
    /// Number of reasons, for tables indexed by them.
    pub const COUNT: usize = 3;
}

/// A request for one shard: every block of `range` belongs to it and to one stripe. Its buffer
/// is as for [`Io`].
#[derive(Debug)]
pub struct Request {
    /// The submitter's name for it.
    pub id: RequestId,
    /// Which volume.
    pub volume: VolumeId,
    /// What to do.
    pub op: IoOp,
    /// Where on the volume, any byte alignment. Empty for a flush.
    pub range: ByteRange,
    /// How.
    pub flags: IoFlags,
    /// Data of a write, room for a read.
    pub buf: IoBuf,
    /// Set when the volume decided that the request should go past the cache.
    pub bypass: Option<Bypass>,
}

/// The end of a request; exactly one for each.
#[derive(Debug)]
pub struct Reply {
    /// The submitter's name for the request.
    pub id: RequestId,
    /// Whether it was done.
    pub result: Result<(), IoError>,
    /// The request's buffer.
    pub buf: IoBuf,
    /// Of a write that the primary completed and has not flushed for it: how many failed flushes
    /// the shard had been told of by then. Any later one may have given the write up.
    pub direct: Option<u64>,
}

/// Which device an effect's I/O is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Target {
    /// The primary of a volume; offsets are the volume's.
    Primary(VolumeId),
    /// The cache device; offsets are the device's, within this shard's area.
    Cache,
}

/// Everything an engine wants done. The caller carries it out and empties it; order among the
/// I/Os means nothing.
#[derive(Debug, Default)]
pub struct Effects {
    /// I/O to submit; its completion goes to [`crate::Engine::complete`].
    pub ios: Vec<(Target, Io)>,
    /// Requests that are finished.
    pub replies: Vec<Reply>,
    /// How far the cache device may still be trusted after a restart, to be recorded outside of
    /// it: the owner persists this for the whole pool (it only ever gets worse) and then calls
    /// [`crate::Engine::trust_recorded`] on every shard.
    pub record_trust: Option<Trust>,
    /// Stripes that a failed cache has left, to be recorded outside of it in this order, durably;
    /// [`crate::Engine::detached`] is called with those that are. Writes wait for it, and fail if
    /// it does not come within [`ShardConfig::patience`].
    pub detach: Vec<DetachedStripe>,
    /// Volumes whose primary was found to have been changed without the cache: every other shard is
    /// to be told by [`crate::Engine::distrust`].
    pub changed: Vec<VolumeId>,
    /// What an administrator should know of; handed out by [`crate::Engine::poll`].
    pub events: Vec<Event>,
    /// When [`crate::Engine::poll`] must be called although nothing happened.
    pub deadline: Option<Instant>,
}

/// How far the content of a cache device may be trusted at the next start. Kept outside of the
/// device (the witness), because it matters when the device cannot be written any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Trust {
    /// Everything in it.
    #[default]
    Full,
    /// Its dirty blocks only: writes to it failed, and its clean blocks may be out of date.
    DirtyOnly,
    /// Nothing: the primaries were written without it.
    Nothing,
}

/// How blocks are stored that are like others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ContentLocality {
    /// Each by itself.
    Independent,
    /// A rewritten block as a delta against its older version, while that is in RAM; a block that
    /// equals one written just before, by that one's payload.
    #[default]
    Rewrite,
    /// That, and what is copied forward or comes from a primary against other blocks like it.
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

/// What the cache does with reads and writes of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u8)]
pub enum Mode {
    /// Writes are acknowledged from the cache device and destaged later.
    #[default]
    WriteBack,
    /// Writes are acknowledged when cache and primary have them.
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

    /// Whether the primary alone is complete: it has what a write wrote when the write is answered,
    /// and durably after a flush.
    #[must_use]
    pub fn is_complete(self) -> bool {
        matches!(self, Self::WriteThrough | Self::WriteAround | Self::PassThrough)
    }

    /// The mode of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, mode)| mode)
    }
}

/// A setting that can be changed while serving, with its new value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Setting {
    /// What the cache does with reads and writes of a volume.
    Mode(VolumeId, Mode),
    /// Which blocks enter the cache, and which clean blocks leave it.
    Eviction(Eviction),
    /// How blocks are stored that are like others.
    Content(ContentLocality),
}

/// A volume as a shard sees it.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// Its place in the superblock's table.
    pub id: VolumeId,
    /// Bytes, a multiple of 512.
    pub size: u64,
    /// What the cache does for it.
    pub mode: Mode,
    /// Whether the primary accepts `Discard`.
    pub discard: bool,
    /// Whether the primary's seeks cost: sets the latency target of destaging.
    pub rotational: bool,
    /// Its part of the dirty limit.
    pub share: DirtyShare,
    /// Whether the primary may have been changed without the cache: its clean blocks are compared.
    pub suspect: bool,
}

/// Settings of one shard. Sizes are the shard's share, not the pool's.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Which shard this is.
    pub shard: u16,
    /// The pool's own name, in every record.
    pub pool: u64,
    /// The shard's area on the cache device; a multiple of `segment_size` long.
    pub area: ByteRange,
    /// Bytes in a segment, a multiple of 4096 up to 4 MiB.
    pub segment_size: u32,
    /// The volumes.
    pub volumes: Vec<VolumeConfig>,
    /// Bytes of RAM for recent blocks.
    pub ram_bytes: u64,
    /// How many blocks the index has room for.
    pub index_blocks: u64,
    /// How clean blocks are chosen to leave.
    pub eviction: Eviction,
    /// The longest a dirty block may wait before it is on the primary.
    pub write_cache_depth: Duration,
    /// Share of the area, in percent, above which writes wait for destaging.
    pub dirty_limit_percent: u8,
    /// How long a device may leave a request unanswered before that is reported, and a write at
    /// the dirty limit waits for a primary that is away before it gets an error.
    pub patience: Duration,
    /// Most destage writes in flight.
    pub destage_depth: u32,
    /// Whether payloads are compressed.
    pub compress: bool,
    /// Whether the RAM tier keeps what is less recent in compressed form.
    pub compress_ram: bool,
    /// How rewritten blocks are stored.
    pub content: ContentLocality,
    /// Whether the device keeps its writes only after a flush.
    pub cache_volatile: bool,
    /// Where buffers come from.
    pub buffers: BufPool,
    /// True when the pool was made just now: there is nothing to recover.
    pub fresh: bool,
    /// How far the log's content is to be trusted. With [`Trust::Nothing`] the pool is made again
    /// instead.
    pub trust: Trust,
    /// What was recorded of the shard's stripes that a failed cache had left ([`Effects::detach`]),
    /// in that order.
    pub detached: Vec<DetachedStripe>,
    /// Serve although records of the log are gone that may have held dirty blocks: which blocks
    /// they held is not known.
    pub accept_loss: bool,
    /// The pool's start count, in every record.
    pub epoch: u32,
}

/// Where an engine is in its life.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// Reading its log; takes no requests.
    Recovering,
    /// Serving.
    Serving,
    /// The log cannot be trusted; why. Takes no requests, and has changed nothing.
    Refused(String),
    /// Stopping: answers what it has, takes nothing new.
    Stopping,
    /// Stopped: the log is complete and durable.
    Stopped,
}

/// How the cache device is doing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Health {
    /// Reads and writes work.
    #[default]
    Good,
    /// A write or a flush of the cache device failed: nothing more is written to it; dirty
    /// blocks are destaged until none is left, then the cache is detached. Writes go to the
    /// primary.
    Draining,
    /// The cache is out of use; the primary is used directly.
    Detached,
}

/// A stripe of a volume of which the log of a failed cache device has nothing to say any more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct DetachedStripe {
    /// The volume.
    pub volume: VolumeId,
    /// Number of the stripe on the volume.
    pub stripe: u64,
    /// Blocks of it for which the log counts all the same, a bit each. A later record of the stripe
    /// replaces an earlier one.
    pub kept: [u64; (STRIPE_BLOCKS / 64) as usize],
}
