//! Translates requests of the kernel to block I/O, and results back to answers.

use std::sync::Arc;

use forebay_block::{
    Answer, Body, BufPool, ByteRange, Endpoint, ErrorKind, Io, IoBuf, IoError, IoFlags, IoOp,
    IoResult, IoTag, Parts, Responder, Step, Ticket,
};
use forebay_fuse_wire::{
    Allocate, Header, Message, Mode, Open, OutHeader, Request, Transfer, attr_out, dirent,
    entry_out, open_out, statfs_out, write_out,
};

use crate::handshake::REQUEST_BYTES;
use crate::in_flight::Waiting;
use crate::server::FuseServer;
use crate::tree::{Node, Topic};

/// How long names and attributes stay valid: only contents ever change, and [`crate::notices()`]
/// tells the kernel if another server of the mount has other files.
const VALID_SECONDS: u64 = 86_400;
/// Maximum length of a zeroing request to a volume, in bytes.
const ZEROES_BYTES_MAX: u64 = 1 << 30;
/// Where making holes costs as much as writing zeros, larger holes are refused; in bytes.
const COSTLY_HOLE: u64 = 256 << 10;
/// `O_DSYNC`, which `O_SYNC` includes; and the bits of open(2) for the access mode.
const O_DSYNC: u32 = 0o10_000;
const O_ACCMODE: u32 = 0o3;

const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EIO: i32 = 5;
const EBADF: i32 = 9;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;
const EINVAL: i32 = 22;
const ENFILE: i32 = 23;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const ENOSYS: i32 = 38;
const EOPNOTSUPP: i32 = 95;
const ESHUTDOWN: i32 = 108;

/// The payload of an answer, or an error number.
type Outcome = Result<Body, i32>;

/// One request being handled.
struct Asked<'a> {
    server: &'a FuseServer,
    header: Header,
    pool: &'a BufPool,
}

impl Responder for FuseServer {
    fn request(&self, parts: Parts<'_>, pool: &BufPool) -> Step {
        let Ok(header) = Header::decode(parts.header) else {
            // Without the header there is no request to answer.
            tracing::warn!("a message of the kernel is shorter than its header");
            return Step::Silent;
        };
        let Parts { header: head, argument, data } = parts;
        let message = Message { header: head, argument, data };
        let op = header.op();
        match Request::decode(op, &message) {
            Ok(request) => Asked { server: self, header, pool }.step(request),
            Err(error) => {
                tracing::warn!(%error, "a message of the kernel cannot be read");
                if op.is_silent() { Step::Silent } else { answer(header.unique, Err(EIO)) }
            }
        }
    }

    fn finish(&self, ticket: Ticket, result: IoResult<()>) -> Step {
        let unique = ticket.unique;
        if let Err(error) = result {
            return answer(unique, Err(errno(&error)));
        }
        answer(
            unique,
            match Waiting::of(&ticket) {
                Waiting::Read(bytes) => Ok(Body::Filled(bytes as usize)),
                Waiting::Write(bytes) => Ok(Body::short(&write_out(bytes))),
                Waiting::Zeroes { volume, from, end, keep } if from < end => {
                    return zeroes(unique, volume, from..end, keep);
                }
                Waiting::Sync | Waiting::Zeroes { .. } => Ok(Body::EMPTY),
                Waiting::Text(_) | Waiting::TextAgain { .. } => Err(EIO),
            },
        )
    }

    fn told(&self, ticket: Ticket, text: Vec<u8>) -> Answer {
        let outcome = match Waiting::of(&ticket) {
            Waiting::TextAgain { handle, offset, bytes } => {
                let text: Arc<[u8]> = text.into();
                let kept = self.keep_as(handle, Arc::clone(&text)).map_err(|_| ENFILE);
                kept.map(|()| part_of(&text, offset.into(), bytes))
            }
            _ => self
                .keep(text)
                .map(|handle| Body::short(&open_out(handle, Open::DIRECT_IO)))
                .map_err(|_| ENFILE),
        };
        reply(ticket.unique, outcome)
    }

    fn refuse(&self, parts: Parts<'_>) -> Step {
        match Header::decode(parts.header) {
            Ok(header) if !header.op().is_silent() => answer(header.unique, Err(ESHUTDOWN)),
            _ => Step::Silent,
        }
    }
}

impl Asked<'_> {
    fn step(&self, request: Request<'_>) -> Step {
        let outcome = match request {
            Request::Read(read) => return self.read(read),
            Request::Write(write, data) => return self.write(write, data),
            Request::Sync => return self.sync(),
            Request::Allocate(range) => return self.allocate(range),
            Request::Open(flags) => return self.open(flags),
            Request::Forget => return Step::Silent,
            Request::Lookup(name) => self.lookup(name),
            Request::GetAttributes => self.attributes(),
            Request::SetAttributes(set) if set.changes_rights() => Err(EPERM),
            Request::SetAttributes(set) => match (set.size(), self.node()) {
                // The size is the volume's, and times are not stored.
                (Some(size), Some(Node::Volume(at))) if size != self.server.files[at].size => {
                    Err(EPERM)
                }
                _ => self.attributes(),
            },
            Request::Statfs => Ok(self.statfs()),
            Request::Release(handle) => {
                self.server.forget(handle);
                Ok(Body::EMPTY)
            }
            Request::OpenDirectory => self.open_directory(),
            Request::ReadDirectory(place) => self.read_directory(place),
            Request::ReleaseDirectory | Request::SyncDirectory | Request::Destroy => {
                Ok(Body::EMPTY)
            }
            // Only the first init request is valid. An unknown operation is refused once; the
            // kernel does not send it again.
            Request::Init(_) => Err(EIO),
            Request::Interrupt | Request::Other(_) => Err(ENOSYS),
        };
        answer(self.header.unique, outcome)
    }

    fn node(&self) -> Option<Node> {
        Node::of(self.header.node, &self.server.files)
    }

    /// Index of the volume that the request is for.
    fn volume(&self) -> Result<usize, i32> {
        match self.node() {
            Some(Node::Volume(at)) => Ok(at),
            Some(node) if node.is_directory() => Err(EISDIR),
            Some(_) => Err(EBADF),
            None => Err(ENOENT),
        }
    }

    fn fail(&self, errno: i32) -> Step {
        answer(self.header.unique, Err(errno))
    }

    fn pass(&self, waiting: Waiting, volume: usize, io: Io) -> Step {
        Step::Pass(waiting.ticket(self.header.unique), Endpoint(volume), io)
    }

    fn read(&self, read: Transfer) -> Step {
        match self.node() {
            Some(Node::Text(topic)) => self.read_text(topic, read),
            Some(Node::Volume(at)) => {
                let size = self.server.files[at].size;
                let left = size.saturating_sub(read.offset);
                let bytes = u64::from(read.size.min(REQUEST_BYTES)).min(left) as u32;
                if bytes == 0 {
                    return answer(self.header.unique, Ok(Body::EMPTY));
                }
                let range = ByteRange::new(read.offset, bytes.into());
                let (flags, buf) = (IoFlags::default(), IoBuf::empty());
                let io = Io { tag: IoTag(0), op: IoOp::Read, range, flags, buf };
                self.pass(Waiting::Read(bytes), at, io)
            }
            Some(_) => self.fail(EISDIR),
            None => self.fail(ENOENT),
        }
    }

    fn read_text(&self, topic: Topic, read: Transfer) -> Step {
        let unique = self.header.unique;
        let bytes = read.size.min(REQUEST_BYTES);
        if let Some(text) = self.server.text(read.handle) {
            return answer(unique, Ok(part_of(&text, read.offset, bytes)));
        }
        // An earlier server of the mount has opened it.
        let offset = u32::try_from(read.offset).unwrap_or(u32::MAX);
        let waiting = Waiting::TextAgain { handle: read.handle, offset, bytes };
        Step::Ask(waiting.ticket(unique), topic.number())
    }

    fn write(&self, write: Transfer, data: &[u8]) -> Step {
        let at = match self.volume() {
            Ok(at) if self.server.files[at].read_only => return self.fail(EROFS),
            Ok(at) => at,
            Err(errno) => return self.fail(errno),
        };
        let left = self.server.files[at].size.saturating_sub(write.offset);
        let fits = data.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let bytes = fits.min(REQUEST_BYTES as usize);
        if bytes == 0 {
            // Like a block device: no writes beyond the end.
            let end = if data.is_empty() { Ok(Body::short(&write_out(0))) } else { Err(ENOSPC) };
            return answer(self.header.unique, end);
        }
        let mut buf = self.pool.get(bytes);
        buf.copy_from_slice(&data[..bytes]);
        let durable = write.flags & O_DSYNC != 0;
        let io = Io::write(IoTag(0), write.offset, buf).with_fua(durable);
        self.pass(Waiting::Write(bytes as u32), at, io)
    }

    fn sync(&self) -> Step {
        match self.volume() {
            Ok(at) => self.pass(Waiting::Sync, at, Io::flush(IoTag(0))),
            // A text has nothing to make durable.
            Err(EBADF) => answer(self.header.unique, Ok(Body::EMPTY)),
            Err(errno) => self.fail(errno),
        }
    }

    fn allocate(&self, asked: Allocate) -> Step {
        let at = match self.volume() {
            Ok(at) if self.server.files[at].read_only => return self.fail(EROFS),
            Ok(at) => at,
            Err(errno) => return self.fail(errno),
        };
        let file = &self.server.files[at];
        let Some(end) = asked.offset.checked_add(asked.length) else { return self.fail(EINVAL) };
        if end > file.size && asked.mode & Mode::KEEP_SIZE == 0 {
            return self.fail(ENOSPC);
        }
        let (from, end) = (asked.offset.min(file.size), end.min(file.size));
        let kind = asked.mode & !Mode::KEEP_SIZE;
        let keep = kind == Mode::ZERO_RANGE;
        match kind {
            // The space is already allocated.
            0 => answer(self.header.unique, Ok(Body::EMPTY)),
            // Behind the end, too: this is how `attach` asks whether the disk takes discards.
            Mode::ZERO_RANGE | Mode::PUNCH_HOLE if !file.holes && asked.length > COSTLY_HOLE => {
                self.fail(EOPNOTSUPP)
            }
            Mode::ZERO_RANGE | Mode::PUNCH_HOLE if from == end => {
                answer(self.header.unique, Ok(Body::EMPTY))
            }
            Mode::ZERO_RANGE | Mode::PUNCH_HOLE => zeroes(self.header.unique, at, from..end, keep),
            _ => self.fail(EOPNOTSUPP),
        }
    }

    fn open(&self, flags: u32) -> Step {
        let flags_for_volume = Open::DIRECT_IO | Open::NOFLUSH | Open::PARALLEL_DIRECT_WRITES;
        let writes = flags & O_ACCMODE != 0;
        match self.node() {
            Some(Node::Volume(at)) if writes && self.server.files[at].read_only => self.fail(EROFS),
            Some(Node::Volume(_)) => {
                answer(self.header.unique, Ok(Body::short(&open_out(0, flags_for_volume))))
            }
            Some(Node::Text(_)) if writes => self.fail(EPERM),
            Some(Node::Text(topic)) => {
                let ticket = Waiting::Text(topic).ticket(self.header.unique);
                Step::Ask(ticket, Topic::number(topic))
            }
            Some(_) => self.fail(EISDIR),
            None => self.fail(ENOENT),
        }
    }

    fn lookup(&self, name: &[u8]) -> Outcome {
        let directory = self.node().filter(|node| node.is_directory()).ok_or(ENOTDIR)?;
        let found = directory.child(name, &self.server.files).ok_or(ENOENT)?;
        let attributes = found.attributes(&self.server.files, self.server.owner);
        Ok(Body::short(&entry_out(&attributes, VALID_SECONDS)))
    }

    fn attributes(&self) -> Outcome {
        let node = self.node().ok_or(ENOENT)?;
        let attributes = node.attributes(&self.server.files, self.server.owner);
        Ok(Body::short(&attr_out(&attributes, VALID_SECONDS)))
    }

    fn statfs(&self) -> Body {
        let files = &self.server.files;
        let bytes = files.iter().map(|file| file.size).fold(0, u64::saturating_add);
        Body::short(&statfs_out(bytes, files.len() as u64, 255))
    }

    fn open_directory(&self) -> Outcome {
        self.node().filter(|node| node.is_directory()).ok_or(ENOTDIR)?;
        Ok(Body::short(&open_out(0, Open::KEEP_CACHE | Open::CACHE_DIR)))
    }

    fn read_directory(&self, place: Transfer) -> Outcome {
        let directory = self.node().filter(|node| node.is_directory()).ok_or(ENOTDIR)?;
        let room = place.size.min(REQUEST_BYTES) as usize;
        let mut out = Vec::new();
        let from = usize::try_from(place.offset).unwrap_or(usize::MAX);
        let entries = directory.entries(&self.server.files);
        for (at, (node, name)) in entries.into_iter().enumerate().skip(from) {
            let mode = node.attributes(&self.server.files, self.server.owner).mode;
            if !dirent(&mut out, room, node.number(&self.server.files), at as u64 + 1, mode, name) {
                break;
            }
        }
        Ok(Body::Bytes(out))
    }
}

/// The part of a text that a read asks for.
fn part_of(text: &[u8], offset: u64, bytes: u32) -> Body {
    let from = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
    let end = from.saturating_add(bytes as usize).min(text.len());
    Body::Bytes(text[from..end].to_vec())
}

/// Zeroes the first part of a range; the ticket holds the rest.
fn zeroes(unique: u64, volume: usize, range: std::ops::Range<u64>, keep: bool) -> Step {
    let length = (range.end - range.start).min(ZEROES_BYTES_MAX);
    let from = range.start + length;
    let ticket = Waiting::Zeroes { volume, from, end: range.end, keep }.ticket(unique);
    let part = ByteRange::new(range.start, length);
    let mut io = Io::bare(IoTag(0), IoOp::WriteZeroes, part);
    io.flags = IoFlags { no_hole: keep, ..IoFlags::default() };
    Step::Pass(ticket, Endpoint(volume), io)
}

/// The error number for a failed request. Unsupported operations get `EOPNOTSUPP`, as on any file.
fn errno(error: &IoError) -> i32 {
    match error.kind() {
        ErrorKind::ReadOnly => EROFS,
        kind => kind.errno(),
    }
}

fn answer(unique: u64, outcome: Outcome) -> Step {
    Step::Answer(reply(unique, outcome))
}

fn reply(unique: u64, outcome: Outcome) -> Answer {
    let (errno, body) = match outcome {
        Ok(body) => (0, body),
        Err(errno) => (errno, Body::EMPTY),
    };
    let header = OutHeader::new(unique, errno, body.length()).encode();
    Answer { header, body }
}
