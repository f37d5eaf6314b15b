//! What threads tell each other.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use forebay_block::{IoError, IoResult, IoTag, VolumeId};
use forebay_engine::{
    DetachedStripe, Health, Reply, Request, Setting, State, Stats, Target, Trust, VolumeState,
};

use crate::channel::{Ask, Mount};
use crate::clients::{Arrival, SessionFactory};
use crate::histogram::Histogram;
use crate::listen::Listener;
use crate::memory::Grant;
use crate::record::Sink;

/// A message to a shard thread.
pub enum Message {
    /// A request for the thread's shard.
    Request(Request),
    /// A shard's answer to a request of the thread's router.
    Reply {
        /// The shard that answers.
        shard: usize,
        /// The answer.
        reply: Reply,
    },
    /// A connection to serve.
    Arrival(Arrival),
    /// Memory that a client of the thread waited for.
    Memory(Grant),
    /// A text that a request of the thread's mount asked for.
    Told {
        /// The request.
        key: u64,
        /// The text.
        text: Vec<u8>,
    },
    /// So much trust in the cache device is recorded for the whole pool.
    TrustRecorded(Trust),
    /// Stripes are recorded that the cache of the thread's shard has left.
    Detached(Vec<DetachedStripe>),
    /// Another shard found that a volume's primary was changed without the cache.
    Changed(VolumeId),
    /// A flush of the thread's shard has ended, sent to the device by another thread.
    Flushed(Target, IoTag, IoResult<()>),
    /// The thread is to send a flush to its queue of a device.
    SendFlush(Target),
    /// A flush of a device failed.
    FlushFailed(Target, IoError),
    /// Something from the pool's owner.
    Command(Command),
}

/// What the pool's owner wants of a thread.
pub enum Command {
    /// Accept connections; answered when it does, or why not.
    Listen(Vec<Listener>, Arc<dyn SessionFactory>, Sender<std::io::Result<()>>),
    /// Serve a mount; answered when its slots are with the kernel, or why not.
    Mount(Mount, Sender<Ask>, Sender<std::io::Result<()>>),
    /// Tell how it stands.
    Snapshot(Sender<Snapshot>),
    /// Destage everything, or not any more.
    Drain(bool),
    /// The same of one volume.
    DrainVolume(VolumeId, bool),
    /// Change a setting.
    Set(Setting),
    /// Hand what is asked of a volume to this sink, or not any more.
    Record(VolumeId, Option<Sink>),
    /// Take no more requests; answered when none is in flight.
    Quiesce(Sender<usize>),
    /// Close the connections that are left.
    CutOff,
    /// Stop the shard; answered when it has stopped. The thread ends then.
    Stop(Sender<usize>),
}

/// How a thread stands.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Which shard.
    pub shard: usize,
    /// Where it is in its life.
    pub state: State,
    /// How its cache device is doing.
    pub health: Health,
    /// Its counters and levels.
    pub stats: Stats,
    /// Blocks newer in the cache than on their primary.
    pub dirty_blocks: u64,
    /// How each volume stands in it, if it knows.
    pub volumes: Vec<VolumeState>,
    /// Latencies of the clients' requests taken by this thread, by volume in the registry's order
    /// and by operation.
    pub latencies: Vec<Latencies>,
    /// Connections of this thread.
    pub connections: usize,
}

/// Latencies of one volume by operation, in the order of [`OPERATIONS`].
pub type Latencies = [Histogram; OPERATIONS.len()];

/// The operations whose latencies are kept, with their names in metrics.
pub const OPERATIONS: [(forebay_block::IoOp, &str); 5] = [
    (forebay_block::IoOp::Read, "read"),
    (forebay_block::IoOp::Write, "write"),
    (forebay_block::IoOp::Flush, "flush"),
    (forebay_block::IoOp::Discard, "discard"),
    (forebay_block::IoOp::WriteZeroes, "write-zeroes"),
];
