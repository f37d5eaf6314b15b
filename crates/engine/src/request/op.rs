//! Client operations in flight, and what each device I/O in flight belongs to.

use forebay_block::{BlockRange, ByteRange, IoBuf, IoError, IoFlags, IoOp, VolumeId};
use forebay_format::Lsn;

use crate::api::{Bypass, RequestId};
use crate::key::Key;
use crate::losses::Known;
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

/// Who is told when a read is done.
#[derive(Clone, Copy, Debug)]
pub enum ReadOwner {
    /// The client.
    Client(RequestId),
    /// A partial write that needs the old content of a block: the write, and whether the block
    /// is the first (else the last) of its range.
    Merge(Id, bool),
}

/// A read being put together from RAM, cache device and primary.
#[derive(Debug)]
pub struct ReadOp {
    /// Who wants it.
    pub owner: ReadOwner,
    /// Where, in bytes.
    pub range: ByteRange,
    /// The answer so far.
    pub buf: IoBuf,
    /// Parts that have not arrived; one more while the read is being taken apart.
    pub parts: u32,
    /// The first error.
    pub error: Option<IoError>,
    /// Whether what is missed may enter the cache.
    pub admit: bool,
}

/// How far a write has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Held back on the way to the dirty limit.
    Throttled,
    /// Taking the locks of its blocks.
    Locking,
    /// Reading the rest of blocks that it covers in part.
    Merging,
    /// In line for the log, or partly in it.
    Logging,
    /// All in the log; waits for its records to be written.
    Logged,
    /// Waits for its records to be durable.
    Durable,
    /// Waits for the primary.
    Primary,
    /// All in the log of a device that has failed; waits until its stripe is detached.
    Leaving,
    /// Waits until its stripe is detached, then starts over.
    Anew,
}

/// Which way a write goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// Into the log.
    Cached,
    /// To the primary, past the cache.
    Direct,
}

/// A write, write-zeroes or discard.
#[derive(Debug)]
pub struct WriteOp {
    /// The client's name for it.
    pub id: RequestId,
    /// Which volume.
    pub volume: VolumeId,
    /// What it is.
    pub op: IoOp,
    /// The client's flags.
    pub flags: IoFlags,
    /// Where, in bytes, as the client said.
    pub range: ByteRange,
    /// The client's data.
    pub buf: IoBuf,
    /// The old content of the first and of the last block, where covered in part, with the
    /// client's bytes merged in later.
    pub edges: [Option<IoBuf>; 2],
    /// Why it should go past the cache.
    pub bypass: Option<Bypass>,
    /// The blocks it touches.
    pub blocks: BlockRange,
    /// How many of them are locked.
    pub locked: u64,
    /// How many of them are in the log.
    pub logged: u64,
    /// Records and reads of edges that are outstanding.
    pub outstanding: u32,
    /// The last record with a part of it.
    pub lsn: Lsn,
    /// How far it has come.
    pub stage: Stage,
    /// Which way it goes.
    pub path: Path,
    /// Acknowledged only when the primary has it.
    pub through: bool,
    /// See [`crate::Reply::direct`].
    pub direct: Option<u64>,
    /// The first error.
    pub error: Option<IoError>,
}

impl WriteOp {
    /// The blocks it touches.
    pub fn keys(&self) -> impl Iterator<Item = Key> + Clone + use<> {
        let volume = self.volume;
        self.blocks.iter().map(move |block| Key::new(volume, block))
    }
}

/// A flush.
#[derive(Debug)]
pub struct FlushOp {
    /// The client's name for it.
    pub id: RequestId,
    /// Which volume.
    pub volume: VolumeId,
    /// What it still waits for: log, primary.
    pub outstanding: u32,
    /// The client has its answer.
    pub answered: bool,
    /// Losses of its volume when it began.
    pub known: Known,
}
