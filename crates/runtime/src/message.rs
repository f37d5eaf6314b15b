//! Messages between threads.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use forebay_block::{
    BlockRange, ByteRange, Endpoint, IoBuf, IoError, IoOp, IoResult, IoTag, VolumeId,
};
use forebay_engine::{
    CutOrder, DetachedStripe, Health, Listing, Lsn, Reply, Request, Setting, State, Stats, Target,
    Tier, Trust, VolumeState,
};

use forebay_policy::{RequestRules, RuleCount};

use crate::channel::{Ask, Disk, Mount, PrefetchProgress, Ranges};
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
    /// An order of the gate of a volume's cuts.
    Cut(VolumeId, CutOrder),
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
    /// Bring ranges of a volume into the cache, at most this many bytes per second.
    Prefetch(Endpoint, Ranges, Option<u64>, Arc<PrefetchProgress>),
    /// Replace the blocks of a volume that stay in the cache.
    Pin(VolumeId, Arc<[BlockRange]>),
    /// Report the blocks that the thread's shard has cached, from a point of its list on.
    List(u64, Sender<Listing>),
    /// Report the thread's state.
    Snapshot(Sender<Snapshot>),
    /// Report what the thread's clients have done.
    Clients(Sender<Vec<ClientStats>>),
    /// Begin or end destaging all dirty blocks at full speed.
    Drain(bool),
    /// As `Drain`, for one volume.
    DrainVolume(VolumeId, bool),
    /// Give up the cache device.
    Retire,
    /// Change a setting of the shard.
    Set(Setting),
    /// Change the length, in bytes, from which a sequential stream of a volume bypasses the cache.
    SetSequentialThreshold(VolumeId, u64),
    /// Change how long clients may take; the time for their handshake stays.
    SetPatience {
        /// To take a byte of an answer, or to send a byte of a write.
        stall: Duration,
        /// To send a request; unlimited when `None`.
        idle: Option<Duration>,
    },
    /// Change the rules for requests.
    SetRules(Arc<RequestRules>),
    /// Begin or end sending the client requests of a volume to this sink.
    Record(VolumeId, Option<Sink>),
    /// Take no more requests; answered when none is in flight.
    Quiesce(End, Sender<Vec<LeftClient>>),
    /// Go on with connections that another server has left.
    Adopt(Vec<LeftClient>, Arc<dyn SessionFactory>),
    /// Close the remaining connections.
    CutOff,
    /// Stop the shard; answered when it has stopped, with its last state. The thread then ends.
    Stop(Sender<Snapshot>),
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
    /// The last record of a log that was ended; zero as long as it is not.
    pub log_end: Lsn,
    /// Blocks that are newer in the cache than on their primary.
    pub dirty_blocks: u64,
    /// The state of each volume, as far as the shard knows it.
    pub volumes: Vec<VolumeState>,
    /// Latencies of client requests taken by this thread, by volume in the registry's order and by
    /// operation.
    pub latencies: Vec<Latencies>,
    /// Latencies of the same requests by operation and tier, by volume in the same order.
    pub tier_latencies: Vec<TierLatencies>,
    /// Latencies of the primaries' own requests that this thread has sent, in the same order.
    pub primary_latencies: Vec<Latencies>,
    /// Number of connections of this thread.
    pub connections: usize,
    /// The rules for requests that this thread has.
    pub rules: Arc<RequestRules>,
    /// For each of them, the requests of this thread that it decided on.
    pub rule_counts: Vec<RuleCount>,
}

/// A client of a socket at one moment, and what it has done so far.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientStats {
    /// Who it is, as in the log.
    pub peer: String,
    /// The volume of its last answered request.
    pub volume: Option<VolumeId>,
    /// Time since it connected; since the last upgrade, if it came along.
    pub connected: Duration,
    /// Time since bytes were last received from it or sent to it.
    pub silent: Duration,
    /// Requests that are not yet answered.
    pub in_flight: usize,
    /// Bytes of memory that its requests and answers take.
    pub memory: u64,
    /// Its answered requests.
    pub served: Served,
}

/// Answered requests of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Served {
    /// Their number, by operation in the order of [`OPERATIONS`].
    pub requests: [u64; OPERATIONS.len()],
    /// The sum of their latencies, in the same order.
    pub times: [Duration; OPERATIONS.len()],
    /// The number of those that failed.
    pub errors: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written, not counting zeroes and discards.
    pub write_bytes: u64,
}

impl Served {
    /// Counts a request whose buffer has `bytes` bytes.
    pub(crate) fn count(&mut self, op: IoOp, took: Duration, bytes: usize, failed: bool) {
        let place = place_of(op);
        self.requests[place] += 1;
        self.times[place] += took;
        self.errors += u64::from(failed);
        match op {
            IoOp::Read if !failed => self.read_bytes += bytes as u64,
            IoOp::Write if !failed => self.write_bytes += bytes as u64,
            _ => {}
        }
    }
}

/// Latencies of one volume by operation, in the order of [`OPERATIONS`].
pub type Latencies = [Histogram; OPERATIONS.len()];

/// Latencies of one volume by operation and tier, in the order of [`TIERS`].
pub type TierLatencies = [Histogram; TIERS.len()];

/// The operations and tiers for which latencies are kept, with the names of the tiers.
pub const TIERS: [(IoOp, Tier, &str); 5] = [
    (IoOp::Read, Tier::Ram, "ram"),
    (IoOp::Read, Tier::Cache, "cache"),
    (IoOp::Read, Tier::Primary, "primary"),
    (IoOp::Write, Tier::Cache, "cache"),
    (IoOp::Write, Tier::Primary, "primary"),
];

/// Counts a latency of an operation that a tier has served.
pub(crate) fn count_tier(latencies: &mut TierLatencies, op: IoOp, tier: Tier, took: Duration) {
    let place = TIERS.iter().position(|&(known, of, _)| (known, of) == (op, tier));
    latencies[place.expect("every tier is listed")].record(took);
}

/// Counts a latency of an operation.
pub(crate) fn count_latency(latencies: &mut Latencies, op: IoOp, took: Duration) {
    latencies[place_of(op)].record(took);
}

/// The place of an operation in [`OPERATIONS`].
fn place_of(op: IoOp) -> usize {
    let place = OPERATIONS.iter().position(|(known, _)| *known == op);
    place.expect("every operation is listed")
}

/// The operations for which latencies are kept, with their names in metrics.
pub const OPERATIONS: [(IoOp, &str); 6] = [
    (IoOp::Read, "read"),
    (IoOp::Write, "write"),
    (IoOp::Flush, "flush"),
    (IoOp::Discard, "discard"),
    (IoOp::WriteZeroes, "write-zeroes"),
    (IoOp::Prefetch, "prefetch"),
];
