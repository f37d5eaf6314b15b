//! The path of a client's request to the shards and back.
//!
//! A request within one stripe passes uncut; its buffer moves. Others are cut at stripe boundaries,
//! with at most [`WAVE`] pieces of a request in flight, and joined: the first error wins and stops
//! the pieces not yet sent. A flush goes to every shard and is complete when all have answered.
//!
//! Invariants: every request taken ends in exactly one [`Done`]; requests reach a shard in the
//! order in which they were submitted; waiting requests and pieces are bounded by [`REQUESTS_MAX`]
//! and [`PIECES_MAX`]. The shard orders overlapping requests, since all requests for a block meet
//! there.
//!
//! A write that went directly to the primary is acknowledged only if no flush has failed since the
//! primary completed it. A failed flush may lose writes completed before it; the shards report that
//! once, to the clients that flush, and forget it. If the write is answered after that report, for
//! instance because other pieces were still in flight, a success would promise data whose loss has
//! already been reported and forgotten. So each shard reports the number of failures that it had
//! been told of when the write completed ([`Reply::direct`]), and the router compares it with the
//! count of all threads ([`FailedFlushes`]):
//!
//! - Equal: any failure that lost the write will be reported after this answer, since failures are
//!   counted before any shard is told.
//! - Lower: the write may be lost, and fails. This is always detected, since a shard processes
//!   writes completed before a failure before it is told of the failure.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_block::{
    BufPool, ByteRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, IoFlags, IoOp, IoTag,
    REQUEST_MAX, SHARDS_MAX, Slab, VolumeId,
};
use forebay_engine::{Bypass, Reply, Request, RequestId, Tier};
use forebay_policy::{Direction, RequestRules, RuleCount, RuleSet, SequentialDetector, Treatment};

use crate::flush_gate::FailedFlushes;
use crate::port::ShardPort;
use crate::record::Recorded;
use crate::registry::Registry;
use crate::stripes::shard_of;

/// Most client requests in flight in one router.
pub const REQUESTS_MAX: usize = 1 << 16;
/// Most pieces of split requests in flight in one router.
pub const PIECES_MAX: usize = 4096;
/// Most pieces of one request in flight.
pub const WAVE: u32 = 64;
/// Longest discard or write-zeroes request, in bytes.
pub const DISCARD_MAX: u64 = 4 << 30;
/// Sequential streams tracked per volume.
const STREAMS_MAX: usize = 64;
/// Low bits of a request's id, its number within its router; the high bits name the router.
const NUMBER_BITS: u32 = 48;

const _: () = assert!(SHARDS_MAX <= WAVE as usize, "a flush is one wave");
const _: () = assert!(PIECES_MAX >= WAVE as usize);

/// The caller's key for the client that sent a request; handed back with the answer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ClientKey(pub u64);

/// Who sends a request, and when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Source {
    /// The caller's key for the client.
    pub client: ClientKey,
    /// The rules that may match its requests: [`RequestRules::of`].
    pub rules: RuleSet,
    /// When the request arrived; its latency counts from here.
    pub arrived: Instant,
}

/// The end of a client's request, with the values that statistics need.
#[derive(Debug)]
pub struct Done {
    /// The client that sent it.
    pub client: ClientKey,
    /// The volume that it was sent to.
    pub volume: VolumeId,
    /// The operation.
    pub op: IoOp,
    /// When it arrived.
    pub started: Instant,
    /// Length of its buffer, in bytes.
    pub bytes: usize,
    /// For a read or a write that succeeded: the slowest tier that it had to wait for.
    pub tier: Option<Tier>,
    /// The answer for the client.
    pub completion: Completion,
}

/// The parts from which a router is created.
#[derive(Debug)]
pub struct RouterConfig<'a> {
    /// Number of this router: the high bits of every [`RequestId`] it makes.
    pub origin: u16,
    /// Number of shards.
    pub shards: usize,
    /// The volumes.
    pub registry: &'a Registry,
    /// Allocates the buffers of pieces.
    pub buffers: BufPool,
}

/// The router that made a request.
#[must_use]
pub fn origin_of(id: RequestId) -> usize {
    (id.0 >> NUMBER_BITS) as usize
}

/// One thread's connection to the shards. Deterministic, without I/O.
pub struct Router {
    origin: u64,
    shards: usize,
    buffers: BufPool,
    /// By volume id.
    volumes: Vec<Option<VolumeState>>,
    sent: Slab<Sent>,
    joins: Slab<Join>,
    /// Number of pieces in flight.
    pieces: usize,
    /// Requests with pieces still to be made, and room in their wave.
    ready: VecDeque<u32>,
    /// For each shard, the requests that it had no room for.
    backlog: Vec<VecDeque<Request>>,
    rules: Arc<RequestRules>,
    /// For each rule, the requests that it decided on.
    counts: Vec<RuleCount>,
}

struct VolumeState {
    size: u64,
    read_only: bool,
    detector: SequentialDetector,
    recorded: Option<Recorded>,
    failed: FailedFlushes,
}

/// The fields of a client's request that its answer needs.
#[derive(Clone, Copy)]
struct Origin {
    client: ClientKey,
    tag: IoTag,
    volume: VolumeId,
    op: IoOp,
    /// Length of its buffer; at most [`REQUEST_MAX`].
    bytes: u32,
    started: Instant,
}

impl Origin {
    fn done(self, result: Result<(), IoError>, buf: IoBuf, tier: Option<Tier>) -> Done {
        let Self { client, tag, volume, op, bytes, started } = self;
        let tier = tier.filter(|_| result.is_ok());
        let completion = Completion { tag, result, buf };
        Done { client, volume, op, started, bytes: bytes as usize, tier, completion }
    }
}

/// A request as sent to a shard.
enum Sent {
    Whole(Origin),
    /// A piece of a join, at byte `at` of the join's buffer.
    Piece {
        join: u32,
        at: u64,
    },
}

/// A request in several pieces.
struct Join {
    origin: Origin,
    flags: IoFlags,
    bypass: Option<Bypass>,
    buf: IoBuf,
    start: u64,
    /// The part that no piece was made for yet; for a flush, shards counted as bytes.
    rest: ByteRange,
    in_flight: u32,
    error: Option<IoError>,
    /// The lowest count of failed flushes that its pieces reported.
    direct: Option<u64>,
    /// The slowest tier that its pieces reported.
    tier: Option<Tier>,
    /// Whether it is in `ready`.
    ready: bool,
}

impl Router {
    /// Creates a router without requests.
    ///
    /// # Panics
    /// If the number of shards is not 1 to [`SHARDS_MAX`].
    #[must_use]
    pub fn new(config: RouterConfig<'_>) -> Self {
        assert!((1..=SHARDS_MAX).contains(&config.shards), "1 to {SHARDS_MAX} shards");
        let mut volumes = Vec::new();
        for volume in config.registry.volumes() {
            let at = usize::from(volume.id.0);
            volumes.resize_with(volumes.len().max(at + 1), || None);
            volumes[at] = Some(VolumeState {
                size: volume.info.size,
                read_only: volume.read_only,
                detector: SequentialDetector::new(volume.sequential_threshold, STREAMS_MAX),
                recorded: None,
                failed: FailedFlushes::default(),
            });
        }
        Self {
            origin: u64::from(config.origin) << NUMBER_BITS,
            shards: config.shards,
            buffers: config.buffers,
            volumes,
            sent: Slab::new((REQUESTS_MAX + PIECES_MAX) as u32),
            joins: Slab::new(REQUESTS_MAX as u32),
            pieces: 0,
            ready: VecDeque::new(),
            backlog: (0..config.shards).map(|_| VecDeque::new()).collect(),
            rules: Arc::default(),
            counts: Vec::new(),
        }
    }

    /// Client requests in flight, and flushes answered before all shards were done.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.sent.len() - self.pieces + self.joins.len()
    }

    /// Client requests without an answer. Unlike [`Router::in_flight`], without flushes that failed
    /// at one shard, and so were answered, while the others are at work on them.
    #[must_use]
    pub fn unanswered(&self) -> usize {
        let answered = self.joins.iter().filter(|(_, join)| join.is_answered()).count();
        self.in_flight() - answered
    }

    /// Takes a client's request. A request that needs no shard is answered at once, in `done`.
    ///
    /// # Errors
    /// Gives the request back when [`REQUESTS_MAX`] are in flight; try again after an answer.
    ///
    /// # Panics
    /// If the volume is not in the registry, or the buffer does not fit the request.
    pub fn submit(
        &mut self,
        now: Instant,
        (from, volume): (Source, VolumeId),
        io: Io,
        port: &mut dyn ShardPort,
        done: &mut Vec<Done>,
    ) -> Result<(), Io> {
        if self.in_flight() >= REQUESTS_MAX {
            return Err(io);
        }
        let state = self.state(volume);
        if let Some(recorded) = &mut state.recorded
            && io.op != IoOp::Prefetch
        {
            recorded.note(now, &io);
        }
        let bytes = u32::try_from(io.buf.len()).expect("frontends take no longer requests");
        let Source { client, rules, arrived } = from;
        let origin = Origin { client, tag: io.tag, volume, op: io.op, bytes, started: arrived };
        if let Some(result) = self.answer_at_once(volume, &io) {
            done.push(origin.done(result, io.buf, None));
            return Ok(());
        }
        let bypass = self.bypass(rules, volume, &io);
        if self.fits_one_shard(&io) {
            self.send_whole(origin, io, bypass, port);
        } else {
            self.start_join(origin, io, bypass);
            self.make_pieces(port);
        }
        Ok(())
    }

    /// Sets the counter of failed flushes of a volume's primary. Call it before the first request.
    ///
    /// # Panics
    /// If the volume is not in the registry.
    pub fn watch_flushes(&mut self, volume: VolumeId, failed: FailedFlushes) {
        self.state(volume).failed = failed;
    }

    /// Changes the length, in bytes, from which a sequential stream bypasses the cache; 0 is never.
    ///
    /// # Panics
    /// If the volume is not in the registry.
    pub fn set_sequential_threshold(&mut self, volume: VolumeId, bytes: u64) {
        self.state(volume).detector.set_threshold(bytes);
    }

    /// Changes the rules for requests. A [`Source`] of before must be determined again. A rule that
    /// was there before goes on counting.
    pub fn set_rules(&mut self, rules: Arc<RequestRules>) {
        let before = self.rules.rules().iter().zip(&self.counts);
        let count =
            |rule| before.clone().find(|(known, _)| *known == rule).map(|(_, &count)| count);
        self.counts = rules.rules().iter().map(|rule| count(rule).unwrap_or_default()).collect();
        self.rules = rules;
    }

    /// The rules for requests.
    #[must_use]
    pub fn rules(&self) -> &Arc<RequestRules> {
        &self.rules
    }

    /// For each rule, the requests that it decided on.
    #[must_use]
    pub fn rule_counts(&self) -> &[RuleCount] {
        &self.counts
    }

    /// Starts a new recording of a volume's requests; or ends it and forgets the requests left.
    ///
    /// # Panics
    /// If the volume is not in the registry.
    pub fn record(&mut self, volume: VolumeId, on: bool) {
        self.state(volume).recorded = on.then(Recorded::default);
    }

    /// The recorded requests of a volume not yet taken away; `None` if it is not being recorded.
    #[must_use]
    pub fn recorded(&mut self, volume: VolumeId) -> Option<&mut Recorded> {
        let state = self.volumes.get_mut(usize::from(volume.0)).and_then(Option::as_mut);
        state.and_then(|state| state.recorded.as_mut())
    }

    /// Takes a shard's answer. Call [`Router::pump`] afterwards: the answer may have made room.
    ///
    /// # Panics
    /// If the request is not of this router.
    pub fn reply(&mut self, reply: Reply, done: &mut Vec<Done>) {
        let number = reply.id.0 ^ self.origin;
        let at = u32::try_from(number).expect("the request is of this router");
        let sent = self.sent.remove(at).expect("a request is answered once");
        match sent {
            Sent::Whole(origin) => {
                let kept = || self.check_kept(origin.volume, reply.direct);
                let result = reply.result.and_then(|()| kept());
                done.push(origin.done(result, reply.buf, reply.tier));
            }
            Sent::Piece { join, at } => self.join_piece(join, at, reply, done),
        }
    }

    /// Sends waiting requests as far as there is room: call it once a turn, after the answers.
    pub fn pump(&mut self, port: &mut dyn ShardPort) {
        for (shard, waiting) in self.backlog.iter_mut().enumerate() {
            while let Some(request) = waiting.pop_front() {
                if let Err(request) = port.submit(shard, request) {
                    waiting.push_front(request);
                    break;
                }
            }
        }
        self.make_pieces(port);
    }

    fn state(&mut self, volume: VolumeId) -> &mut VolumeState {
        let state = self.volumes.get_mut(usize::from(volume.0)).and_then(Option::as_mut);
        state.expect("the registry knows the volume")
    }

    /// The answer to a request that needs no shard.
    fn answer_at_once(&self, volume: VolumeId, io: &Io) -> Option<Result<(), IoError>> {
        let state = self.volumes.get(usize::from(volume.0)).and_then(Option::as_ref);
        let state = state.expect("the registry knows the volume");
        let longest = match io.op {
            IoOp::Flush => return None,
            IoOp::Read | IoOp::Write => {
                assert_eq!(io.buf.len() as u64, io.range.len, "the buffer fits the range");
                REQUEST_MAX
            }
            IoOp::Discard | IoOp::WriteZeroes | IoOp::Prefetch => DISCARD_MAX,
        };
        if io.op.changes_data() && state.read_only {
            return Some(Err(ErrorKind::ReadOnly.into()));
        }
        let end = io.range.offset.checked_add(io.range.len);
        if io.range.len > longest || end.is_none_or(|end| end > state.size) {
            return Some(Err(ErrorKind::OutOfRange.into()));
        }
        io.range.is_empty().then_some(Ok(()))
    }

    /// The reason to bypass the cache, if a rule says so, or if no rule says otherwise and the
    /// request belongs to a sequential stream.
    fn bypass(&mut self, rules: RuleSet, volume: VolumeId, io: &Io) -> Option<Bypass> {
        let direction = match io.op {
            IoOp::Read => Direction::Read,
            IoOp::Write => Direction::Write,
            IoOp::Flush | IoOp::Discard | IoOp::WriteZeroes | IoOp::Prefetch => return None,
        };
        if let Some((at, treatment)) = self.rules.decide(rules, volume, direction, io.range) {
            let count = &mut self.counts[at];
            count.requests += 1;
            count.bytes += io.range.len;
            return (treatment == Treatment::Bypass).then_some(Bypass::Rule);
        }
        let is_write = direction == Direction::Write;
        let streams = self.state(volume).detector.observe(io.range, is_write);
        streams.then_some(Bypass::Sequential)
    }

    fn fits_one_shard(&self, io: &Io) -> bool {
        match io.op {
            IoOp::Flush => self.shards == 1,
            _ => io.range.is_in_one_stripe(),
        }
    }

    fn send_whole(
        &mut self,
        origin: Origin,
        io: Io,
        bypass: Option<Bypass>,
        port: &mut dyn ShardPort,
    ) {
        let shard = shard_of(origin.volume, io.range.stripe(), self.shards);
        let request = Request {
            id: self.name(Sent::Whole(origin)),
            volume: origin.volume,
            op: io.op,
            range: if io.op == IoOp::Flush { ByteRange::default() } else { io.range },
            flags: io.flags,
            buf: io.buf,
            bypass,
        };
        self.send(shard, request, port);
    }

    fn name(&mut self, sent: Sent) -> RequestId {
        RequestId(self.origin | u64::from(self.sent.insert(sent)))
    }

    fn send(&mut self, shard: usize, request: Request, port: &mut dyn ShardPort) {
        let waiting = &mut self.backlog[shard];
        if !waiting.is_empty() {
            waiting.push_back(request);
        } else if let Err(request) = port.submit(shard, request) {
            waiting.push_back(request);
        }
    }

    fn start_join(&mut self, origin: Origin, io: Io, bypass: Option<Bypass>) {
        let rest = match io.op {
            IoOp::Flush => ByteRange { offset: 0, len: self.shards as u64 },
            _ => io.range,
        };
        let join = Join {
            origin,
            flags: io.flags,
            bypass,
            buf: io.buf,
            start: rest.offset,
            rest,
            in_flight: 0,
            error: None,
            direct: None,
            tier: None,
            ready: true,
        };
        let at = self.joins.insert(join);
        self.ready.push_back(at);
    }

    fn make_pieces(&mut self, port: &mut dyn ShardPort) {
        while self.pieces < PIECES_MAX {
            let Some(&at) = self.ready.front() else { return };
            let join = self.joins.get_mut(at).expect("a ready request is in flight");
            if join.rest.is_empty() || join.in_flight == WAVE {
                join.ready = false;
                self.ready.pop_front();
                continue;
            }
            let (shard, piece) = join.next(self.shards);
            let buf = join.piece_buffer(piece, &self.buffers);
            let mut request = Request {
                id: RequestId(0),
                volume: join.origin.volume,
                op: join.origin.op,
                range: piece,
                flags: join.flags,
                buf,
                bypass: join.bypass,
            };
            let from = piece.offset.saturating_sub(join.start);
            request.id = self.name(Sent::Piece { join: at, at: from });
            self.pieces += 1;
            self.send(shard, request, port);
        }
    }

    /// Fails if a flush has failed since the primary completed a write: the write may be lost.
    fn check_kept(&self, volume: VolumeId, direct: Option<u64>) -> Result<(), IoError> {
        let Some(known) = direct else { return Ok(()) };
        let state = self.volumes[usize::from(volume.0)].as_ref().expect("checked before");
        if known == state.failed.count() { Ok(()) } else { Err(ErrorKind::Media.into()) }
    }

    fn join_piece(&mut self, at: u32, from: u64, reply: Reply, done: &mut Vec<Done>) {
        self.pieces -= 1;
        let join = self.joins.get_mut(at).expect("a request lives as long as its pieces");
        join.in_flight -= 1;
        join.direct = join.direct.into_iter().chain(reply.direct).min();
        join.tier = join.tier.max(reply.tier);
        match reply.result {
            Ok(()) if join.origin.op == IoOp::Read && join.error.is_none() => {
                let from = usize::try_from(from).expect("within a buffer");
                join.buf[from..from + reply.buf.len()].copy_from_slice(&reply.buf);
            }
            Ok(()) => {}
            Err(error) => {
                join.rest.len = 0;
                if join.origin.op == IoOp::Flush && !join.is_answered() {
                    // The shard reports the loss only once: the client must know before another
                    // flush, which the same shard lets pass, has succeeded.
                    done.push(join.origin.done(Err(error.clone()), IoBuf::empty(), None));
                }
                join.error.get_or_insert(error);
            }
        }
        if join.rest.is_empty() && join.in_flight == 0 {
            let join = self.joins.remove(at).expect("seen just now");
            if join.ready {
                self.ready.retain(|&other| other != at);
            }
            if !join.is_answered() {
                let kept = || self.check_kept(join.origin.volume, join.direct);
                let result = join.error.map_or_else(kept, Err);
                done.push(join.origin.done(result, join.buf, join.tier));
            }
        } else if !join.rest.is_empty() && !join.ready {
            join.ready = true;
            self.ready.push_back(at);
        }
    }
}

impl Join {
    /// Whether it is a flush that failed: the client has its answer.
    fn is_answered(&self) -> bool {
        self.origin.op == IoOp::Flush && self.error.is_some()
    }

    /// Takes the next piece off the rest: its shard and its range.
    fn next(&mut self, shards: usize) -> (usize, ByteRange) {
        self.in_flight += 1;
        if self.origin.op == IoOp::Flush {
            let shard = usize::try_from(self.rest.offset).expect("below the number of shards");
            self.rest = ByteRange { offset: self.rest.offset + 1, len: self.rest.len - 1 };
            return (shard, ByteRange::default());
        }
        let piece;
        (piece, self.rest) = self.rest.split_at_stripe();
        (shard_of(self.origin.volume, piece.stripe(), shards), piece)
    }

    fn piece_buffer(&self, piece: ByteRange, buffers: &BufPool) -> IoBuf {
        if !matches!(self.origin.op, IoOp::Read | IoOp::Write) {
            return IoBuf::empty();
        }
        let from = usize::try_from(piece.offset - self.start).expect("within a buffer");
        let len = usize::try_from(piece.len).expect("at most a stripe");
        let mut buf = buffers.get(len);
        if self.origin.op == IoOp::Write {
            buf.copy_from_slice(&self.buf[from..from + len]);
        }
        buf
    }
}
