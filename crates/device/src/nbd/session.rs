//! The client's side of the transmission phase as a state machine without I/O: requests become
//! bytes for the server, bytes from the server become completions.
//!
//! A request is sent in pieces that the server accepts. Operations that a server does not support
//! are emulated: force unit access by a flush after the write, write-zeroes by writing zeros. A
//! protocol violation is [`Broken`]: the connection is dropped, since nothing after it can be
//! trusted.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use forebay_block::{Completion, ErrorKind, Instant, Io, IoError, IoOp, Slab};
use forebay_nbd_wire::{
    ChunkHeader, ChunkKind, Command, CommandFlags, ErrorChunk, Hole, NbdError, ReplyFlags,
    ReplyHead, Request, SimpleReply, TransmissionFlags, WireError,
};

use super::covered::Covered;
use super::terms::Terms;

/// Maximum number of pieces that the server has at a time.
const PIECES_MAX: usize = 256;
/// Maximum length of a read or write sent as one piece, in bytes.
const TRANSFER_MAX: u64 = 2 << 20;
/// Maximum length of a trim or write-zeroes sent as one piece, in bytes.
const RANGE_MAX: u64 = 1 << 30;
/// No piece is added while this many bytes wait to be sent.
const OUT_MAX: usize = 4 << 20;
/// Maximum length of a chunk without read data, in bytes: an error with its message.
const CHUNK_MAX: u32 = 8192;
/// How much later a request may begin and still be answered while a read gets no data. A server
/// whose reads wait this long for others is taken for one that has lost them.
const OVERTAKEN_MAX: Duration = Duration::from_secs(60);
/// The same for a change or a flush, which a slow disk may take minutes for.
const CHANGE_OVERTAKEN_MAX: Duration = Duration::from_secs(300);
/// Bits of a cookie that hold the piece's index; the others distinguish it from earlier pieces with
/// that index.
const PLACE_BITS: u32 = 16;

const _: () = assert!(PIECES_MAX <= 1 << PLACE_BITS);

/// A violation of the protocol by the server.
#[derive(Debug)]
pub(super) enum Broken {
    Wire(WireError),
    Rule(&'static str),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wire(error) => write!(f, "the server broke the protocol: {error}"),
            Self::Rule(rule) => write!(f, "the server broke the protocol: {rule}"),
        }
    }
}

impl std::error::Error for Broken {}

impl From<WireError> for Broken {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// One connection.
#[derive(Debug)]
pub(super) struct Session {
    terms: Terms,
    jobs: Slab<Job>,
    /// Jobs with pieces not yet sent.
    queued: VecDeque<u32>,
    pieces: Vec<Option<Piece>>,
    free_pieces: Vec<usize>,
    serial: u64,
    expect: Expect,
    /// When the latest of the answered requests began.
    answered: Instant,
    /// No request in progress was at work before.
    oldest: Instant,
}

#[derive(Debug)]
struct Job {
    io: Io,
    /// When it began; later, when the latest request began that was answered before a part of it.
    at_work: Instant,
    /// Bytes of the range that are covered by pieces so far.
    sent: u64,
    /// Number of pieces without a reply.
    open: u32,
    /// Whether more pieces will be added.
    more: bool,
    /// Whether a flush follows to emulate force unit access.
    flush_follows: bool,
    error: Option<NbdError>,
}

#[derive(Debug)]
struct Piece {
    job: u32,
    cookie: u64,
    command: Command,
    offset: u64,
    len: u32,
    /// The parts of a read received so far.
    covered: Covered,
    error: Option<NbdError>,
}

/// The expected meaning of the next byte from the server.
#[derive(Clone, Copy, Debug)]
enum Expect {
    Head,
    /// Data of a read: its piece, its position in the job's buffer, the number of bytes missing,
    /// and whether the reply ends with them.
    Data {
        place: usize,
        at: usize,
        left: usize,
        last: bool,
    },
}

impl Session {
    pub(super) fn new(terms: Terms) -> Self {
        Self {
            terms,
            // The line bounds them.
            jobs: Slab::new(u32::MAX),
            queued: VecDeque::new(),
            pieces: (0..PIECES_MAX).map(|_| None).collect(),
            free_pieces: (0..PIECES_MAX).rev().collect(),
            serial: 0,
            expect: Expect::Head,
            answered: Instant(0),
            oldest: Instant(0),
        }
    }

    /// Number of requests in progress.
    pub(super) fn in_flight(&self) -> usize {
        self.jobs.len()
    }

    /// Whether the server has answered requests that began long after its last answer to another.
    pub(super) fn is_overtaken(&mut self) -> bool {
        let answered = self.answered;
        if answered.since(self.oldest) < OVERTAKEN_MAX {
            return false;
        }
        let jobs = || self.jobs.iter().map(|(_, job)| job);
        self.oldest = jobs().map(|job| job.at_work).min().unwrap_or(answered);
        jobs().any(|job| {
            let reads = job.io.op == IoOp::Read;
            let most = if reads { OVERTAKEN_MAX } else { CHANGE_OVERTAKEN_MAX };
            answered.since(job.at_work) >= most
        })
    }

    /// Whether the server may have changes that it has not answered.
    pub(super) fn has_changes(&self) -> bool {
        self.jobs.iter().any(|(_, job)| job.io.op.changes_data() && job.open > 0)
    }

    /// Accepts a request within the device's bounds; appends it to `done` if nothing needs to be
    /// sent.
    pub(super) fn submit(&mut self, now: Instant, io: Io, done: &mut Vec<Completion>) {
        let can = |flag| self.terms.flags.has(flag);
        let nothing_to_do = match io.op {
            IoOp::Flush => !can(TransmissionFlags::SEND_FLUSH),
            _ => io.range.is_empty(),
        };
        let fast = io.op == IoOp::WriteZeroes && io.flags.fast_only;
        let unsupported = (fast && !can(TransmissionFlags::SEND_FAST_ZERO))
            || (io.op == IoOp::Discard && !can(TransmissionFlags::SEND_TRIM));
        if unsupported {
            return done.push(io.complete(Err(ErrorKind::Unsupported.into())));
        }
        if nothing_to_do {
            return done.push(io.complete(Ok(())));
        }
        let flush_follows = io.flags.fua
            && io.op.changes_data()
            && !can(TransmissionFlags::SEND_FUA)
            && can(TransmissionFlags::SEND_FLUSH);
        let (at_work, error) = (now, None);
        let job = Job { io, at_work, sent: 0, open: 0, more: true, flush_follows, error };
        let index = self.jobs.insert(job);
        self.queued.push_back(index);
    }

    /// Appends requests to `out`, as far as the limits allow.
    pub(super) fn send(&mut self, out: &mut Vec<u8>) {
        while out.len() < OUT_MAX {
            let Some(&index) = self.queued.front() else { return };
            let Some(place) = self.free_pieces.pop() else { return };
            self.send_piece(index, place, out);
            if !self.job(index).more {
                self.queued.pop_front();
            }
        }
    }

    fn job(&mut self, index: u32) -> &mut Job {
        self.jobs.get_mut(index).expect("a job lives until its last reply")
    }

    /// The job, which the server is at work on.
    fn progress(&mut self, index: u32) -> &mut Job {
        let answered = self.answered;
        let job = self.job(index);
        job.at_work = job.at_work.max(answered);
        job
    }

    fn send_piece(&mut self, index: u32, place: usize, out: &mut Vec<u8>) {
        let flags = self.terms.flags;
        let transfer_max = u64::from(self.terms.maximum).min(TRANSFER_MAX);
        self.serial += 1;
        let cookie = self.serial << PLACE_BITS | place as u64;
        let job = self.job(index);
        let (command, most) = match job.io.op {
            IoOp::Read => (Command::READ, transfer_max),
            IoOp::Write => (Command::WRITE, transfer_max),
            IoOp::Flush => (Command::FLUSH, 0),
            IoOp::Discard => (Command::TRIM, RANGE_MAX),
            IoOp::WriteZeroes if flags.has(TransmissionFlags::SEND_WRITE_ZEROES) => {
                (Command::WRITE_ZEROES, RANGE_MAX)
            }
            IoOp::WriteZeroes => (Command::WRITE, transfer_max),
            IoOp::Prefetch => unreachable!("no device supports it"),
        };
        let flushes = job.io.op == IoOp::Flush || job.sent == job.io.range.len;
        let (command, offset, len) = if flushes {
            (Command::FLUSH, 0, 0)
        } else {
            let left = job.io.range.len - job.sent;
            (command, job.io.range.offset + job.sent, left.min(most) as u32)
        };
        let request =
            Request { flags: piece_flags(&job.io, command, flags), command, cookie, offset, len };
        out.extend_from_slice(&request.encode());
        if command == Command::WRITE {
            let (at, end) = (job.sent as usize, job.sent as usize + len as usize);
            match job.io.op {
                IoOp::Write => out.extend_from_slice(&job.io.buf[at..end]),
                _ => out.resize(out.len() + len as usize, 0),
            }
        }
        job.sent += u64::from(len);
        job.open += 1;
        job.more = job.sent < job.io.range.len;
        let (covered, error) = (Covered::default(), None);
        let piece = Piece { job: index, cookie, command, offset, len, covered, error };
        self.pieces[place] = Some(piece);
    }

    /// Takes bytes from the server and returns the number consumed. Unconsumed bytes are offered
    /// again with more appended.
    pub(super) fn receive(
        &mut self,
        bytes: &[u8],
        done: &mut Vec<Completion>,
    ) -> Result<usize, Broken> {
        let mut used = 0;
        loop {
            let rest = &bytes[used..];
            let step = match self.expect {
                Expect::Data { place, at, left, last } => {
                    self.take_data(place, at, left, last, rest, done)
                }
                Expect::Head => match ReplyHead::decode(rest)? {
                    None => 0,
                    Some((ReplyHead::Simple(reply), len)) => {
                        self.simple(reply, done)?;
                        len
                    }
                    Some((ReplyHead::Chunk(chunk), len)) => {
                        let payload = &rest[len..];
                        self.chunk(chunk, payload, done)?.map_or(0, |used| len + used)
                    }
                },
            };
            if step == 0 {
                return Ok(used);
            }
            used += step;
        }
    }

    fn take_data(
        &mut self,
        place: usize,
        at: usize,
        left: usize,
        last: bool,
        bytes: &[u8],
        done: &mut Vec<Completion>,
    ) -> usize {
        let count = left.min(bytes.len());
        let job = self.pieces[place].as_ref().expect("data is of a piece that is open").job;
        self.progress(job).io.buf[at..at + count].copy_from_slice(&bytes[..count]);
        self.expect = Expect::Data { place, at: at + count, left: left - count, last };
        if count == left {
            self.expect = Expect::Head;
            if last {
                self.finish_piece(place, done);
            }
        }
        count
    }

    /// Index of the piece that a reply is for.
    fn place_of(&self, cookie: u64) -> Result<usize, Broken> {
        let place = (cookie & ((1 << PLACE_BITS) - 1)) as usize;
        match self.pieces.get(place) {
            Some(Some(piece)) if piece.cookie == cookie => Ok(place),
            _ => Err(Broken::Rule("a reply to a request that was not made")),
        }
    }

    fn piece(&mut self, place: usize) -> &mut Piece {
        self.pieces[place].as_mut().expect("a piece lives until its last reply")
    }

    fn simple(&mut self, reply: SimpleReply, done: &mut Vec<Completion>) -> Result<(), Broken> {
        let place = self.place_of(reply.cookie)?;
        let structured = self.terms.structured;
        let piece = self.piece(place);
        let reads = piece.command == Command::READ;
        if reply.error != NbdError::OK {
            piece.error = Some(reply.error);
        } else if reads && structured {
            return Err(Broken::Rule("a simple reply to a read when chunks were agreed"));
        } else if reads {
            let left = piece.len as usize;
            let at = self.buffer_place(place);
            self.expect = Expect::Data { place, at, left, last: true };
            return Ok(());
        }
        self.finish_piece(place, done);
        Ok(())
    }

    /// Start of a piece's data in its job's buffer.
    fn buffer_place(&mut self, place: usize) -> usize {
        let piece = self.piece(place);
        let (job, offset) = (piece.job, piece.offset);
        (offset - self.job(job).io.range.offset) as usize
    }

    /// Handles a chunk whose header was parsed. Returns the number of bytes of `payload` consumed,
    /// or `None` if more are needed first.
    fn chunk(
        &mut self,
        chunk: ChunkHeader,
        payload: &[u8],
        done: &mut Vec<Completion>,
    ) -> Result<Option<usize>, Broken> {
        if !self.terms.structured {
            return Err(Broken::Rule("a chunk when none were agreed"));
        }
        let place = self.place_of(chunk.cookie)?;
        let last = chunk.flags.has(ReplyFlags::DONE);
        if chunk.kind == ChunkKind::OFFSET_DATA {
            return self.data_chunk(chunk, place, payload);
        }
        if chunk.len > CHUNK_MAX {
            return Err(Broken::Rule("a chunk that is too long"));
        }
        let Some(payload) = payload.get(..chunk.len as usize) else { return Ok(None) };
        match chunk.kind {
            ChunkKind::NONE if chunk.len == 0 && last => {}
            ChunkKind::OFFSET_HOLE => {
                let Hole { offset, len } = Hole::decode(payload)?;
                let at = self.cover(place, offset, len)?;
                let job = self.piece(place).job;
                self.job(job).io.buf[at..at + len as usize].fill(0);
            }
            kind if kind.is_error() => {
                let error = ErrorChunk::decode(kind, payload)?.error;
                self.piece(place).error.get_or_insert(error);
            }
            _ => return Err(Broken::Rule("a chunk of a kind that was not asked for")),
        }
        if last {
            self.close_structured(place, done)?;
        }
        Ok(Some(payload.len()))
    }

    fn data_chunk(
        &mut self,
        chunk: ChunkHeader,
        place: usize,
        payload: &[u8],
    ) -> Result<Option<usize>, Broken> {
        const OFFSET_BYTES: usize = 8;
        let Some(len) = chunk.len.checked_sub(OFFSET_BYTES as u32).filter(|len| *len > 0) else {
            return Err(Broken::Rule("a chunk of data without data"));
        };
        let Some(offset) = payload.first_chunk::<OFFSET_BYTES>() else { return Ok(None) };
        let at = self.cover(place, u64::from_be_bytes(*offset), len)?;
        let last = chunk.flags.has(ReplyFlags::DONE);
        let piece = self.piece(place);
        if last && piece.error.is_none() && !piece.covered.is_all(piece.len) {
            return Err(Broken::Rule("a read was answered in part"));
        }
        self.expect = Expect::Data { place, at, left: len as usize, last };
        Ok(Some(OFFSET_BYTES))
    }

    /// Records the receipt of a part of a read. Returns its position in the job's buffer.
    fn cover(&mut self, place: usize, offset: u64, len: u32) -> Result<usize, Broken> {
        let piece = self.piece(place);
        let end = offset.checked_add(u64::from(len));
        let piece_end = piece.offset + u64::from(piece.len);
        let fits = offset >= piece.offset && end.is_some_and(|end| end <= piece_end);
        if piece.command != Command::READ || !fits {
            return Err(Broken::Rule("data that was not asked for"));
        }
        let within = (offset - piece.offset) as u32;
        if !piece.covered.add(within..within + len) {
            return Err(Broken::Rule("data twice, or in too many parts"));
        }
        Ok(self.buffer_place(place) + within as usize)
    }

    fn close_structured(&mut self, place: usize, done: &mut Vec<Completion>) -> Result<(), Broken> {
        let piece = self.piece(place);
        let whole = piece.command != Command::READ || piece.covered.is_all(piece.len);
        if piece.error.is_none() && !whole {
            return Err(Broken::Rule("a read was answered in part"));
        }
        self.finish_piece(place, done);
        Ok(())
    }

    fn finish_piece(&mut self, place: usize, done: &mut Vec<Completion>) {
        let piece = self.pieces[place].take().expect("a piece is finished once");
        self.free_pieces.push(place);
        let index = piece.job;
        let job = self.progress(index);
        job.open -= 1;
        if let Some(error) = piece.error {
            job.error.get_or_insert(error);
            job.flush_follows = false;
            if std::mem::take(&mut job.more) {
                self.queued.retain(|queued| *queued != index);
            }
        }
        let job = self.job(index);
        if job.open > 0 || job.more {
            return;
        }
        if std::mem::take(&mut job.flush_follows) {
            job.more = true;
            return self.queued.push_front(index);
        }
        let job = self.jobs.remove(index).expect("a job is finished once");
        self.answered = self.answered.max(job.at_work);
        let result = match job.error {
            None => Ok(()),
            // It is the server that goes away, not this one.
            Some(NbdError::ESHUTDOWN) => Err(ErrorKind::DeviceGone.into()),
            Some(error) => Err(IoError::from_errno(error.0 as i32)),
        };
        done.push(job.io.complete(result));
    }

    /// Fails every request, after the connection is gone.
    pub(super) fn fail_all(&mut self, error: &IoError, done: &mut Vec<Completion>) {
        for job in self.jobs.drain() {
            done.push(job.io.complete(Err(error.clone())));
        }
        self.queued.clear();
    }
}

fn piece_flags(io: &Io, command: Command, can: TransmissionFlags) -> CommandFlags {
    let zeroes = command == Command::WRITE_ZEROES;
    let fua = io.flags.fua && io.op.changes_data() && command != Command::FLUSH;
    CommandFlags::NONE
        .with_if(fua && can.has(TransmissionFlags::SEND_FUA), CommandFlags::FUA)
        .with_if(zeroes && io.flags.no_hole, CommandFlags::NO_HOLE)
        .with_if(zeroes && io.flags.fast_only, CommandFlags::FAST_ZERO)
}

#[cfg(test)]
mod tests;
