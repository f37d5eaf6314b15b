//! Client operations in flight.

use forebay_block::{BlockRange, ByteRange, IoBuf, IoError, IoFlags, IoOp, VolumeId};
use forebay_format::Lsn;

use crate::api::{Bypass, RequestId, Tier};
use crate::key::Key;
use crate::losses::Known;
use crate::request::fetch::Admit;
use crate::slab::Id;

/// A client's operation, or the engine's own read on behalf of one.
#[derive(Debug)]
pub enum Op {
    /// A read.
    Read(ReadOp),
    /// A write, write-zeroes or discard.
    Write(WriteOp),
    /// A flush.
    Flush(FlushOp),
}

/// The recipient of a read's result.
#[derive(Clone, Copy, Debug)]
pub enum ReadOwner {
    /// The client.
    Client(RequestId),
    /// A partial write that needs the old content of a block: the write, and whether the block
    /// is the first (else the last) of its range.
    Merge(Id, bool),
    /// Nobody: the blocks are only brought into the cache, for this request.
    Prefetch(RequestId),
}

/// A read being put together from RAM, cache device and primary.
#[derive(Debug)]
pub struct ReadOp {
    /// The recipient of the result.
    pub owner: ReadOwner,
    /// The range to read, in bytes.
    pub range: ByteRange,
    /// The answer so far.
    pub buf: IoBuf,
    /// Number of parts outstanding, plus one while the read is being split into parts.
    pub parts: u32,
    /// The first error.
    pub error: Option<IoError>,
    /// Whether missed blocks may enter the cache.
    pub admit: Admit,
    /// Whether it leaves no traces in the cache: what it finds there counts as requested neither by
    /// the policy nor by RAM.
    pub quiet: bool,
    /// The slowest tier that it waits for.
    pub tier: Tier,
}

/// The stage that a write has reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Held back near the dirty limit.
    Throttled,
    /// Locking its blocks.
    Locking,
    /// Reading the old content of blocks that it covers in part.
    Merging,
    /// Queued for the log, or partly in it.
    Logging,
    /// All in the log; waits until its records have been written.
    Logged,
    /// Waits until its records are durable.
    Durable,
    /// Waits for the primary.
    Primary,
    /// All in the log of a failed device; waits until its stripe is detached.
    Leaving,
    /// Waits until its stripe is detached, then starts over.
    Anew,
}

/// The path that a write takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// Into the log.
    Cached,
    /// To the primary, bypassing the log.
    Direct,
}

/// A write, write-zeroes or discard.
#[derive(Debug)]
pub struct WriteOp {
    /// The client's ID for the request.
    pub id: RequestId,
    /// The volume.
    pub volume: VolumeId,
    /// The operation: write, write-zeroes or discard.
    pub op: IoOp,
    /// The client's flags.
    pub flags: IoFlags,
    /// The byte range that the client requested.
    pub range: ByteRange,
    /// The client's data.
    pub buf: IoBuf,
    /// The old content of the first and of the last block, where the write covers them in part; the
    /// client's bytes are merged in later.
    pub edges: [Option<IoBuf>; 2],
    /// Why the write should bypass the cache, if it should.
    pub bypass: Option<Bypass>,
    /// The blocks it touches.
    pub blocks: BlockRange,
    /// Number of these blocks that are locked.
    pub locked: u64,
    /// Number of these blocks that are in the log.
    pub logged: u64,
    /// Number of outstanding records and reads of edges.
    pub outstanding: u32,
    /// The last record that holds a part of the write.
    pub lsn: Lsn,
    /// The stage that the write has reached.
    pub stage: Stage,
    /// The path that the write takes.
    pub path: Path,
    /// Whether the write is acknowledged only when the primary has it.
    pub through: bool,
    /// See [`crate::Reply::direct`].
    pub direct: Option<u64>,
    /// The flushes of the primary that had failed when the write began to wait for the primary.
    pub failed_flushes: u64,
    /// The first error.
    pub error: Option<IoError>,
    /// The slowest tier that it waits for, unless it goes to the primary itself.
    pub tier: Tier,
}

impl WriteOp {
    /// Whether the old content of its edges was read. That lasts while its blocks are locked.
    pub fn is_merged(&self) -> bool {
        self.edges.iter().any(Option::is_some)
    }

    /// Notes that the write waits for a tier.
    pub fn wait_for(&mut self, tier: Tier) {
        self.tier = self.tier.max(tier);
    }

    /// The blocks it touches.
    pub fn keys(&self) -> impl Iterator<Item = Key> + Clone + use<> {
        let volume = self.volume;
        self.blocks.iter().map(move |block| Key::new(volume, block))
    }
}

/// A flush.
#[derive(Debug)]
pub struct FlushOp {
    /// The client's ID for the request.
    pub id: RequestId,
    /// The volume.
    pub volume: VolumeId,
    /// Number of parts outstanding: log, primary.
    pub outstanding: u32,
    /// Whether the client has been answered.
    pub answered: bool,
    /// Losses of the volume that were known when the flush began.
    pub known: Known,
}
