//! The transmission phase: requests in, `Io` down, completions up, replies out.
//!
//! Invariants: each request is answered exactly once (`DISC` excepted); requests in flight and
//! their bytes are within the limits; a write is passed on only after all its data has arrived, and
//! memory is allocated only as it arrives; the payload of a refused write is skipped, never stored;
//! large replies are copied in slices, as the client takes them.

use forebay_block::{
    BufPool, ByteRange, Completion, DeviceInfo, Endpoint, Io, IoBuf, IoFlags, IoOp, Outbox,
};
use forebay_nbd_wire::{
    Command, CommandFlags as Flags, Extent, NbdError, PAYLOAD_MAX, Request, WireResult,
};

use crate::Limits;
use crate::errors::{Refusal, number};
use crate::handshake::{ALLOCATION_CONTEXT, Agreement};
use crate::in_flight::{Asked, InFlight, tag};
use crate::reply::Replies;
use crate::saying::{LARGE, SMALL_TURN, Saying};

pub(crate) struct Transmission {
    agreement: Agreement,
    info: DeviceInfo,
    limits: Limits,
    pool: BufPool,
    in_flight: InFlight,
    saying: Saying,
    /// Bytes of the requests in flight, including a write being received and unsent replies.
    bytes: u64,
    payload: Option<Payload>,
    phase: Phase,
    /// Whether a request waits in the input for others to finish, or for memory.
    stalled: bool,
    /// Bytes of the small reads begun in this turn, and whether the next one waits for another.
    begun: usize,
    paused: bool,
    /// Bytes that may be held; set by the event loop, which knows the other clients.
    allowed: u64,
    /// Bytes that would be held with the request that waits for memory.
    wanted: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Serving,
    /// New requests are left in the input, for another server.
    Holding,
    /// New requests are refused.
    Stopping,
    /// The client said goodbye; input is ignored.
    Leaving,
}

/// The payload of a `WRITE` in the input.
enum Payload {
    Store(Incoming),
    Skip { left: usize },
}

/// A write whose data is being received.
struct Incoming {
    request: Request,
    flags: IoFlags,
    /// The buffers of the complete pieces.
    full: Vec<IoBuf>,
    /// The buffer of the current piece, and the number of bytes received.
    buf: IoBuf,
    filled: usize,
    /// The range after the current piece.
    behind: ByteRange,
}

/// The decision about a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Pass { op: IoOp, flags: IoFlags },
    Status,
    Disconnect,
}

impl Transmission {
    pub fn new(agreement: Agreement, info: DeviceInfo, limits: Limits, pool: BufPool) -> Self {
        Self {
            agreement,
            info,
            limits,
            pool,
            in_flight: InFlight::default(),
            saying: Saying::default(),
            bytes: 0,
            payload: None,
            phase: Phase::Serving,
            stalled: false,
            begun: 0,
            paused: false,
            allowed: u64::MAX,
            wanted: None,
        }
    }

    /// Bytes of the requests in flight, including a write being received and unsent replies.
    pub fn memory(&self) -> u64 {
        self.bytes
    }

    /// Bytes that would be held with the request that waits for memory, if there is one.
    pub fn wants_memory(&self) -> Option<u64> {
        self.wanted.filter(|_| self.stalled)
    }

    pub fn allow_memory(&mut self, bytes: u64) {
        self.allowed = bytes;
        self.stalled &= self.wants_memory().is_none_or(|wanted| wanted > bytes);
    }

    /// Begins a turn of the event loop. Returns whether a request has waited for it.
    pub fn next_turn(&mut self) -> bool {
        self.begun = 0;
        self.stalled &= !self.paused;
        std::mem::take(&mut self.paused)
    }

    /// Whether the data of a request that has begun is still incomplete.
    pub fn is_owed(&self) -> bool {
        self.payload.is_some()
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.pieces()
    }

    pub fn wants_input(&self) -> bool {
        match self.phase {
            Phase::Holding => self.is_owed(),
            Phase::Leaving => false,
            Phase::Serving | Phase::Stopping => !self.stalled && !self.saying.is_full(),
        }
    }

    /// Takes no more requests. Returns false if the client or the server ends the connection.
    pub fn hold(&mut self) -> bool {
        if self.phase == Phase::Serving {
            self.phase = Phase::Holding;
        }
        self.phase == Phase::Holding
    }

    /// The agreement of a connection that is held, unless the data of a request is incomplete.
    pub fn held(&self) -> Option<Agreement> {
        (self.phase == Phase::Holding && !self.is_owed()).then_some(self.agreement)
    }

    /// Whether [`Transmission::speak`] has more to send.
    pub fn has_more_to_say(&self) -> bool {
        !self.saying.is_empty()
    }

    /// Continues the replies that are sent in slices.
    pub fn speak(&mut self, out: &mut Outbox) {
        let freed = self.saying.speak(&mut out.bytes, self.agreement.structured);
        self.bytes -= freed;
        self.stalled &= freed == 0;
        self.close_if_idle(out);
    }

    /// Discards all pending output.
    pub fn fall_silent(&mut self) {
        self.saying.clear();
    }

    /// Accepts no new requests; closes as soon as none is in flight.
    pub fn stop(&mut self, out: &mut Outbox) {
        if matches!(self.phase, Phase::Serving | Phase::Holding) {
            self.phase = Phase::Stopping;
        }
        self.close_if_idle(out);
    }

    /// Consumes bytes of `bytes`; returns the number consumed.
    ///
    /// # Errors
    /// When the stream is out of sync; the connection must be closed.
    pub fn receive(&mut self, bytes: &[u8], out: &mut Outbox) -> WireResult<usize> {
        let mut rest = bytes;
        loop {
            if self.phase == Phase::Leaving {
                return Ok(bytes.len());
            }
            if let Some(payload) = self.payload.take() {
                let used = self.receive_payload(payload, rest, out);
                rest = &rest[used..];
                if self.payload.is_some() && rest.is_empty() {
                    break;
                }
                continue;
            }
            if self.phase == Phase::Holding {
                break;
            }
            let Some((head, tail)) = rest.split_first_chunk() else { break };
            if !self.request(Request::decode(head)?, out) {
                self.stalled = true;
                break;
            }
            rest = tail;
        }
        Ok(bytes.len() - rest.len())
    }

    fn receive_payload(&mut self, payload: Payload, bytes: &[u8], out: &mut Outbox) -> usize {
        match payload {
            Payload::Skip { left } => {
                let used = left.min(bytes.len());
                self.payload = (used < left).then_some(Payload::Skip { left: left - used });
                used
            }
            Payload::Store(incoming) => self.store(incoming, bytes, out),
        }
    }

    /// Stores data of a write, at most to the end of a piece. Passes the write on after its last
    /// byte.
    fn store(&mut self, mut write: Incoming, bytes: &[u8], out: &mut Outbox) -> usize {
        let used = (write.buf.len() - write.filled).min(bytes.len());
        write.buf[write.filled..write.filled + used].copy_from_slice(&bytes[..used]);
        write.filled += used;
        if write.filled < write.buf.len() {
            self.payload = Some(Payload::Store(write));
        } else if !write.behind.is_empty() {
            let (next, behind) = write.behind.split_at_stripe();
            let buf = self.pool.get(next.len as usize);
            write.full.push(std::mem::replace(&mut write.buf, buf));
            self.payload = Some(Payload::Store(Incoming { filled: 0, behind, ..write }));
        } else {
            let Incoming { request, flags, full, buf, .. } = write;
            let place = self.begin(&request, request.len, flags, full.len() + 1);
            let bufs = full.into_iter().chain([buf]);
            for (piece, (range, buf)) in range_of(&request).stripes().zip(bufs).enumerate() {
                let (tag, op) = (tag(place, piece), IoOp::Write);
                self.push(out, Io { tag, op, range, flags, buf });
            }
        }
        used
    }

    /// Handles a request. Returns false if it must wait because too much is in flight.
    fn request(&mut self, request: Request, out: &mut Outbox) -> bool {
        match self.judge(&request) {
            Ok(Verdict::Pass { op, flags }) => return self.pass(request, op, flags, out),
            Ok(Verdict::Status) => {
                // The primary's allocation is unknown; reporting it as data is always correct.
                let extent = Extent { len: request.len, status: 0 };
                self.replies(out).status(request.cookie, ALLOCATION_CONTEXT, extent);
            }
            Ok(Verdict::Disconnect) => {
                self.phase = Phase::Leaving;
                self.close_if_idle(out);
            }
            Err(Refusal { error, message }) => {
                self.replies(out).failed(request.cookie, error, message);
                if request.command == Command::WRITE {
                    self.payload = Some(Payload::Skip { left: request.len as usize });
                }
            }
        }
        true
    }

    fn pass(&mut self, request: Request, op: IoOp, flags: IoFlags, out: &mut Outbox) -> bool {
        let carries = matches!(op, IoOp::Read | IoOp::Write);
        let bytes = if carries { request.len } else { 0 };
        let full = self.in_flight.requests() >= self.limits.requests;
        let sum = self.bytes + u64::from(bytes);
        let heavy = self.bytes > 0 && sum > self.limits.bytes;
        let small = op == IoOp::Read && bytes as usize <= LARGE;
        let waits = bytes > 0 && sum > self.allowed;
        self.paused = small && self.begun >= SMALL_TURN && !full && !heavy;
        self.wanted = Some(sum).filter(|_| waits && !full && !heavy && !self.paused);
        if full || heavy || waits || self.paused {
            return false;
        }
        self.bytes = sum;
        self.begun += if small { bytes as usize } else { 0 };
        let range = range_of(&request);
        match op {
            IoOp::Write => {
                let (first, behind) = range.split_at_stripe();
                let (full, buf) = (Vec::new(), self.pool.get(first.len as usize));
                let write = Incoming { request, flags, full, buf, filled: 0, behind };
                self.payload = Some(Payload::Store(write));
            }
            IoOp::Read => {
                let place = self.begin(&request, bytes, flags, range.stripes().count());
                for (piece, range) in range.stripes().enumerate() {
                    let buf = self.pool.get(range.len as usize);
                    let tag = tag(place, piece);
                    self.push(out, Io { tag, op, range, flags, buf });
                }
            }
            IoOp::Flush | IoOp::Discard | IoOp::WriteZeroes | IoOp::Prefetch => {
                let place = self.begin(&request, bytes, flags, 1);
                let (tag, buf) = (tag(place, 0), IoBuf::empty());
                self.push(out, Io { tag, op, range, flags, buf });
            }
        }
        true
    }

    fn begin(&mut self, request: &Request, bytes: u32, flags: IoFlags, pieces: usize) -> usize {
        let asked = Asked {
            cookie: request.cookie,
            offset: request.offset,
            bytes,
            returns_data: request.command == Command::READ,
            fast_only: flags.fast_only,
        };
        self.in_flight.insert(asked, pieces)
    }

    fn push(&self, out: &mut Outbox, io: Io) {
        out.ios.push((Endpoint(self.agreement.export), io));
    }

    /// Decides about a request by its header alone.
    fn judge(&self, request: &Request) -> Result<Verdict, Refusal> {
        if request.command == Command::DISC {
            return Ok(Verdict::Disconnect);
        }
        if self.phase != Phase::Serving {
            return Err(Refusal::STOPPING);
        }
        self.check_flags(request)?;
        let set = |flag| request.flags.has(flag);
        let pass = |op, flags| Ok(Verdict::Pass { op, flags });
        let fua = IoFlags { fua: set(Flags::FUA), ..IoFlags::default() };
        match request.command {
            Command::READ | Command::CACHE => {
                self.check_range(request, NbdError::EINVAL)?;
                self.check_payload(request)?;
                pass(IoOp::Read, IoFlags::default())
            }
            Command::WRITE => {
                self.check_writable()?;
                self.check_payload(request)?;
                self.check_range(request, NbdError::ENOSPC)?;
                pass(IoOp::Write, fua)
            }
            Command::FLUSH => {
                if request.offset != 0 || request.len != 0 {
                    return Err(EINVAL_FLUSH);
                }
                pass(IoOp::Flush, IoFlags::default())
            }
            Command::TRIM => {
                self.check_writable()?;
                if !self.info.discard {
                    return Err(EINVAL_TRIM);
                }
                self.check_range(request, NbdError::EINVAL)?;
                pass(IoOp::Discard, fua)
            }
            Command::WRITE_ZEROES => {
                self.check_writable()?;
                self.check_range(request, NbdError::ENOSPC)?;
                let fast_only = set(Flags::FAST_ZERO);
                if fast_only && !self.info.fast_zero {
                    return Err(ENOTSUP_FAST);
                }
                pass(IoOp::WriteZeroes, IoFlags { no_hole: set(Flags::NO_HOLE), fast_only, ..fua })
            }
            Command::BLOCK_STATUS if !self.agreement.allocation => Err(EINVAL_CONTEXT),
            Command::BLOCK_STATUS => {
                self.check_range(request, NbdError::EINVAL)?;
                Ok(Verdict::Status)
            }
            _ => Err(EINVAL_COMMAND),
        }
    }

    fn check_flags(&self, request: &Request) -> Result<(), Refusal> {
        let also = match request.command {
            Command::READ if self.agreement.structured => Flags::DF,
            Command::WRITE_ZEROES => Flags::NO_HOLE | Flags::FAST_ZERO,
            Command::BLOCK_STATUS => Flags::REQ_ONE,
            _ => Flags::NONE,
        };
        let unknown = request.flags.without(Flags::FUA | also);
        if unknown == Flags::NONE { Ok(()) } else { Err(EINVAL_FLAGS) }
    }

    fn check_writable(&self) -> Result<(), Refusal> {
        if self.info.read_only { Err(EPERM) } else { Ok(()) }
    }

    fn check_payload(&self, request: &Request) -> Result<(), Refusal> {
        if request.len <= PAYLOAD_MAX {
            return Ok(());
        }
        let message = "the request is longer than 32 MiB";
        let is_plain_read = request.command == Command::READ && !self.agreement.structured;
        let is_einval = is_plain_read || request.command == Command::WRITE;
        let error = if is_einval { NbdError::EINVAL } else { NbdError::EOVERFLOW };
        Err(Refusal::new(error, message))
    }

    fn check_range(&self, request: &Request, beyond: NbdError) -> Result<(), Refusal> {
        if request.len == 0 {
            return Err(EINVAL_EMPTY);
        }
        let range = ByteRange::checked(request.offset, request.len.into());
        if range.is_some_and(|range| range.end() <= self.info.size) {
            return Ok(());
        }
        Err(Refusal::new(beyond, "the range reaches beyond the end of the export"))
    }

    /// Records the completion of a piece. Replies if it was the last, unless the connection is
    /// `dead`.
    pub fn complete(&mut self, done: Completion, dead: bool, out: &mut Outbox) {
        let Some(finished) = self.in_flight.complete(done) else { return };
        let request = finished.asked;
        self.stalled = false;
        let large = request.returns_data && request.bytes as usize > LARGE;
        if large && finished.error.is_none() && !dead {
            return self.saying.push(request, finished.into_buffers());
        }
        self.bytes -= u64::from(request.bytes);
        if dead {
            return;
        }
        let mut replies = self.replies(out);
        match &finished.error {
            None if request.returns_data => {
                let buffers = finished.buffers();
                replies.data(request.cookie, request.offset, request.bytes, buffers);
            }
            None => replies.done(request.cookie),
            Some(error) => {
                let number = number(error.kind(), request.fast_only);
                replies.failed(request.cookie, number, &error.to_string());
            }
        }
        self.close_if_idle(out);
    }

    /// Ends a stopping connection if nothing is in flight; further input from the client is ignored
    /// from then on.
    fn close_if_idle(&mut self, out: &mut Outbox) {
        let quiet = self.in_flight.pieces() == 0 && self.saying.is_empty();
        if matches!(self.phase, Phase::Stopping | Phase::Leaving) && quiet {
            self.phase = Phase::Leaving;
            out.close = true;
        }
    }

    fn replies<'a>(&'a mut self, out: &'a mut Outbox) -> Replies<'a> {
        let structured = self.agreement.structured;
        Replies { out: self.saying.place(&mut out.bytes), structured }
    }
}

/// The range of a request that was checked to lie in the export.
fn range_of(request: &Request) -> ByteRange {
    ByteRange::new(request.offset, request.len.into())
}

const EPERM: Refusal = Refusal::new(NbdError::EPERM, "the export is read-only");
const EINVAL_FLUSH: Refusal = Refusal::new(NbdError::EINVAL, "a flush has no offset and no length");
const EINVAL_TRIM: Refusal = Refusal::new(NbdError::EINVAL, "the export does not support trimming");
const EINVAL_EMPTY: Refusal = Refusal::new(NbdError::EINVAL, "the request has no length");
const EINVAL_FLAGS: Refusal =
    Refusal::new(NbdError::EINVAL, "a flag does not belong to this command");
const EINVAL_COMMAND: Refusal = Refusal::new(NbdError::EINVAL, "the command is not known");
const EINVAL_CONTEXT: Refusal =
    Refusal::new(NbdError::EINVAL, "no metadata context was negotiated for this export");
const ENOTSUP_FAST: Refusal =
    Refusal::new(NbdError::ENOTSUP, "writing zeros is no faster than writing data here");
