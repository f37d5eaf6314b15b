//! A session over a device in memory, and a client that writes and reads the protocol's bytes.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod daemon;

use forebay_block::{
    BufPool, Completion, DeviceInfo, Endpoint, ErrorKind, Export, Io, IoOp, Outbox, Session,
};
use forebay_frontend_nbd::{Limits, NbdServer, Tls};
use forebay_nbd_wire::{
    ClientFlags, Command, CommandFlags, InfoKind, InfoRequest, MetaRequest, NbdError, OptionCode,
    OptionHeader, OptionReplyHeader, OptionReplyKind, ReplyHead, Request,
};

/// Exports with different capabilities.
pub fn exports() -> Vec<Export> {
    let mut plain = export("plain", 1 << 20);
    plain.info.fast_zero = true;
    let mut archive = export("archive", 4096 + 512);
    archive.info.read_only = true;
    archive.info.rotational = true;
    let mut tape = export("tape", 8192);
    tape.info.discard = false;
    vec![plain, archive, tape, export("long", (4 << 20) + 512)]
}

pub fn export(name: &str, size: u64) -> Export {
    Export {
        name: name.into(),
        description: format!("the {name} volume"),
        info: DeviceInfo::plain(size, name),
        preferred_block: 4096,
    }
}

pub fn server(limits: Limits, tls: Tls) -> NbdServer {
    NbdServer::new(exports(), tls, limits, BufPool::default()).expect("the exports are good")
}

/// A device that carries out each request at once.
pub struct Memory {
    pub bytes: Vec<u8>,
    pub log: Vec<(IoOp, u64, u64, bool)>,
    /// The error that every request fails with, if set.
    pub fails: Option<ErrorKind>,
}

impl Memory {
    pub fn new(size: u64) -> Self {
        // A larger device gets requests that are refused, and never carries any out.
        Self { bytes: vec![0; size.min(64 << 20) as usize], log: Vec::new(), fails: None }
    }

    pub fn run(&mut self, mut io: Io) -> Completion {
        self.log.push((io.op, io.range.offset, io.range.len, io.flags.fua));
        if let Some(kind) = self.fails {
            return io.complete(Err(kind.into()));
        }
        let range = io.range.offset as usize..io.range.end() as usize;
        match io.op {
            IoOp::Read => io.buf.copy_from_slice(&self.bytes[range]),
            IoOp::Write => self.bytes[range].copy_from_slice(&io.buf),
            IoOp::Discard | IoOp::WriteZeroes => self.bytes[range].fill(0),
            IoOp::Flush => assert_eq!(io.range.len, 0),
            IoOp::Prefetch => panic!("no client asks for it"),
        }
        io.complete(Ok(()))
    }
}

/// A connection: the session, its devices, and output that the client has not read yet.
pub struct Peer {
    pub session: Box<dyn Session>,
    pub devices: Vec<Memory>,
    pub out: Outbox,
    /// Bytes offered but not consumed.
    pub unused: Vec<u8>,
    /// Requests held back by `hold`.
    pub held: Vec<(Endpoint, Io)>,
    pub hold: bool,
    /// Output of the server that the client has taken.
    taken: Vec<u8>,
}

impl Peer {
    pub fn new(server: &NbdServer) -> Self {
        Self::over(server, server.session())
    }

    /// A peer over an existing session.
    pub fn over(server: &NbdServer, session: Box<dyn Session>) -> Self {
        let devices = server.exports().iter().map(|e| Memory::new(e.info.size)).collect();
        let mut peer = Self {
            session,
            devices,
            out: Outbox::default(),
            unused: Vec::new(),
            held: Vec::new(),
            hold: false,
            taken: Vec::new(),
        };
        peer.session.start(&mut peer.out);
        peer
    }

    pub fn plain() -> Self {
        Self::new(&server(Limits::default(), Tls::Off))
    }

    /// A peer after the handshake on `export`, with the answers discarded.
    pub fn transmitting(export: &str, structured: bool) -> Self {
        let mut peer = Self::plain();
        peer.send(&ClientFlags(3).encode());
        if structured {
            peer.send(&option(OptionCode::STRUCTURED_REPLY, b""));
            peer.send(&set_context(export, &["base:allocation"]));
        }
        peer.send(&go(export));
        assert!(!peer.session.is_negotiating());
        peer.take();
        peer
    }

    /// Sends bytes and carries out the resulting requests, as an event loop does.
    pub fn send(&mut self, bytes: &[u8]) {
        self.unused.extend_from_slice(bytes);
        loop {
            let wanted = self.session.wants_input() && !self.out.close;
            let used = if wanted { self.session.receive(&self.unused, &mut self.out) } else { 0 };
            self.unused.drain(..used);
            let ios = std::mem::take(&mut self.out.ios);
            let idle = ios.is_empty();
            self.held.extend(ios);
            if !self.hold {
                self.release();
            }
            self.listen();
            if used == 0 && (idle || self.hold) && !self.session.next_turn() {
                assert!(self.unused.len() <= 64 << 10 || !self.session.wants_input());
                break;
            }
        }
    }

    /// Carries out the requests held back.
    pub fn release(&mut self) {
        for (endpoint, io) in std::mem::take(&mut self.held) {
            let done = self.devices[endpoint.0].run(io);
            self.session.complete(done, &mut self.out);
        }
        self.listen();
    }

    /// Takes the output that the server sends in slices.
    pub fn listen(&mut self) {
        while self.session.has_more_to_say() {
            self.taken.append(&mut self.out.bytes);
            self.session.speak(&mut self.out);
        }
    }

    /// The server's output since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        self.taken.append(&mut self.out.bytes);
        std::mem::take(&mut self.taken)
    }

    /// Sends one request and returns its reply.
    pub fn ask(&mut self, request: Request, payload: &[u8]) -> Answer {
        self.send(&request.encode());
        self.send(payload);
        let mut answers = answers(&self.take(), &[request]);
        assert_eq!(answers.len(), 1, "one reply to {request:?}");
        answers.remove(0)
    }
}

pub fn option(code: OptionCode, data: &[u8]) -> Vec<u8> {
    let mut bytes = OptionHeader { code, len: data.len() as u32 }.encode().to_vec();
    bytes.extend_from_slice(data);
    bytes
}

pub fn info(code: OptionCode, export: &str, kinds: &[InfoKind]) -> Vec<u8> {
    let mut data = Vec::new();
    InfoRequest::encode(export, kinds, &mut data);
    option(code, &data)
}

pub fn go(export: &str) -> Vec<u8> {
    info(OptionCode::GO, export, &[])
}

pub fn set_context(export: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = Vec::new();
    MetaRequest::encode(export, queries, &mut data);
    option(OptionCode::SET_META_CONTEXT, &data)
}

pub fn request(command: Command, cookie: u64, offset: u64, len: u32) -> Request {
    Request { flags: CommandFlags::NONE, command, cookie, offset, len }
}

/// Option replies in order, with their data.
pub fn option_replies(mut bytes: &[u8]) -> Vec<(OptionCode, OptionReplyKind, Vec<u8>)> {
    let mut replies = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk() {
        let header = OptionReplyHeader::decode(head).expect("an option reply");
        let (data, rest) = rest.split_at(header.len as usize);
        replies.push((header.option, header.kind, data.to_vec()));
        bytes = rest;
    }
    assert!(bytes.is_empty(), "half a reply: {bytes:?}");
    replies
}

/// A reply in the transmission phase.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    pub cookie: u64,
    pub error: NbdError,
    /// Data of a read or the payload of a chunk.
    pub data: Vec<u8>,
    pub structured: bool,
}

/// The replies in order. The requests determine which simple replies carry data.
pub fn answers(mut bytes: &[u8], requests: &[Request]) -> Vec<Answer> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let (head, len) = ReplyHead::decode(bytes).expect("a reply").expect("a whole head");
        bytes = &bytes[len..];
        let (cookie, error, len, structured) = match head {
            ReplyHead::Simple(reply) => {
                let request = requests.iter().find(|r| r.cookie == reply.cookie);
                let is_read = request.is_some_and(|r| r.command == Command::READ);
                let has_data = is_read && reply.error == NbdError::OK;
                let len = if has_data { request.expect("the request").len } else { 0 };
                (reply.cookie, reply.error, len as usize, false)
            }
            ReplyHead::Chunk(chunk) => {
                assert!(chunk.flags.has(forebay_nbd_wire::ReplyFlags::DONE));
                let payload = &bytes[..chunk.len as usize];
                let error = if chunk.kind.is_error() {
                    forebay_nbd_wire::ErrorChunk::decode(chunk.kind, payload).expect("ok").error
                } else {
                    NbdError::OK
                };
                (chunk.cookie, error, payload.len(), true)
            }
        };
        let (data, rest) = bytes.split_at(len);
        all.push(Answer { cookie, error, data: data.to_vec(), structured });
        bytes = rest;
    }
    all
}
