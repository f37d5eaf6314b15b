//! Messages between threads.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use forebay_block::{ByteRange, Endpoint, IoBuf, IoError, IoResult, IoTag, VolumeId};
use forebay_engine::{
    DetachedStripe, Health, Reply, Request, Setting, State, Stats, Target, Trust, VolumeState,
};

use crate::channel::{Ask, Disk, Mount};
use crate::clients::{Arrival, SessionFactory};
use crate::connection::LeftClient;
use crate::histogram::Histogram;
use crate::listen::Listener;
use crate::memory::Grant;
use crate::record::Sink;

/// A message to a shard thread.
pub enum Message {
    /// A request for the receiving thread's shard.
    Request(Request),
    /// A shard's answer to a request of the receiving thread's router.
    Reply {
        /// The shard that answers.
        shard: usize,
        /// The answer.
        reply: Reply,
    },
    /// A connection for the receiving thread to serve.
    Arrival(Arrival),
    /// Memory that a client of the receiving thread waited for.
    Memory(Grant),
    /// A text that a request of the receiving thread's mount needs.
    Told {
        /// Place of the channel that asked for it.
        place: usize,
        /// Key of the request.
        key: u64,
        /// The text.
        text: Vec<u8>,
    },
    /// This level of trust in the cache device is now recorded for the whole pool.
    TrustRecorded(Trust),
    /// Stripes, now recorded, that the cache of the receiving thread's shard has left.
    Detached(Vec<DetachedStripe>),
    /// Another shard found that a volume's primary was changed behind the cache's back.
    Changed(VolumeId),
    /// Another thread flushed a device on behalf of the receiving thread's shard; its result.
    Flushed(Target, IoTag, IoResult<()>),
    /// Send a flush to this thread's queue of a device.
    SendFlush(Target),
    /// A flush of a device has failed.
    FlushFailed(Target, IoError),
    /// A command of the pool's owner.
    Command(Command),
}

/// The end of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Requests that come too late are refused.
    Stop,
    /// They wait for the next server. The files of sockets stay.
    HandOver,
}

/// A command from the pool's owner to a thread.
pub enum Command {
    /// Accept connections; answered when accepting has begun, or failed.
    Listen(Vec<Listener>, Arc<dyn SessionFactory>, Sender<std::io::Result<()>>),
    /// Serve a mount; answered when the kernel has its slots, or with the error.
    Mount(Mount, Sender<Ask>, Sender<std::io::Result<()>>),
    /// Serve a disk; answered as `Mount` is.
    Disk(Disk, Sender<std::io::Result<()>>),
    /// Read from a volume; answered with the data.
    Read(Endpoint, ByteRange, Sender<IoResult<IoBuf>>),
    /// Report the thread's state.
    Snapshot(Sender<Snapshot>),
    /// Begin or end destaging all dirty blocks at full speed.
    Drain(bool),
    /// As `Drain`, for one volume.
    DrainVolume(VolumeId, bool),
    /// Change a setting.
    Set(Setting),
    /// Begin or end sending the client requests of a volume to this sink.
    Record(VolumeId, Option<Sink>),
    /// Take no more requests; answered when none is in flight.
    Quiesce(End, Sender<Vec<LeftClient>>),
    /// Go on with connections that another server has left.
    Adopt(Vec<LeftClient>, Arc<dyn SessionFactory>),
    /// Close the remaining connections.
    CutOff,
    /// Stop the shard; answered when it has stopped. The thread then ends.
    Stop(Sender<usize>),
}

/// The state of a thread.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Index of the shard.
    pub shard: usize,
    /// Stage of the shard's life.
    pub state: State,
    /// Health of its cache device.
    pub health: Health,
    /// Its counters and levels.
    pub stats: Stats,
    /// Blocks that are newer in the cache than on their primary.
    pub dirty_blocks: u64,
    /// The state of each volume, as far as the shard knows it.
    pub volumes: Vec<VolumeState>,
    /// Latencies of client requests taken by this thread, by volume in the registry's order and by
    /// operation.
    pub latencies: Vec<Latencies>,
    /// Latencies of the primaries' own requests that this thread has sent, in the same order.
    pub primary_latencies: Vec<Latencies>,
    /// Number of connections of this thread.
    pub connections: usize,
}

/// Latencies of one volume by operation, in the order of [`OPERATIONS`].
pub type Latencies = [Histogram; OPERATIONS.len()];

/// Counts a latency of an operation.
pub(crate) fn count_latency(latencies: &mut Latencies, op: forebay_block::IoOp, took: Duration) {
    let kind = OPERATIONS.iter().position(|(known, _)| *known == op);
    latencies[kind.expect("every operation is listed")].record(took);
}

/// The operations for which latencies are kept, with their names in metrics.
pub const OPERATIONS: [(forebay_block::IoOp, &str); 5] = [
    (forebay_block::IoOp::Read, "read"),
    (forebay_block::IoOp::Write, "write"),
    (forebay_block::IoOp::Flush, "flush"),
    (forebay_block::IoOp::Discard, "discard"),
    (forebay_block::IoOp::WriteZeroes, "write-zeroes"),
];
