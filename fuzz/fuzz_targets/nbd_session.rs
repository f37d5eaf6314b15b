//! A whole NBD connection over a device in memory, fed arbitrary bytes in arbitrary pieces: it
//! never panics, keeps its limits, sends no request beyond the device's end, and sends nothing
//! after the end.
#![no_main]

use forebay_block::{
    BufPool, DeviceInfo, Endpoint, Export, Io, IoOp, Outbox, STRIPE_SIZE, Session,
};
use forebay_frontend_nbd::{Limits, NbdServer, Tls};
use forebay_nbd_wire::{ClientFlags, InfoRequest, MetaRequest, OptionCode, OptionHeader};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

/// Two stripes and a bit: no request has more than three pieces.
const SIZE: u64 = (2 << 20) + 512;
const PIECES: usize = 3;
/// Bytes that a session may leave unconsumed and still want more, by `Session`'s contract.
const LEFT_MAX: usize = 64 << 10;
const LIMITS: Limits = Limits { requests: 4, bytes: 128 << 10, options: 16 };

#[derive(Arbitrary, Debug)]
struct Input {
    /// Whether a valid handshake comes first, with structured replies.
    negotiated: bool,
    structured: bool,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Receive(Vec<u8>),
    /// A well-formed request.
    Request {
        flags: u16,
        command: u16,
        offset: u32,
        len: u16,
        long: bool,
    },
    /// The oldest request in flight completes, or fails.
    Complete {
        fails: bool,
    },
    Shutdown,
}

struct Connection {
    session: Box<dyn Session>,
    out: Outbox,
    unused: Vec<u8>,
    in_flight: Vec<(Endpoint, Io)>,
    closed: bool,
    memory: Vec<u8>,
}

impl Connection {
    fn new() -> Self {
        let info = DeviceInfo::plain(SIZE, "memory");
        let export =
            Export { name: "a".into(), description: String::new(), info, preferred_block: 4096 };
        let server = NbdServer::new(vec![export], Tls::Off, LIMITS, BufPool::default());
        let mut connection = Self {
            session: server.expect("the export is good").session(),
            out: Outbox::default(),
            unused: Vec::new(),
            in_flight: Vec::new(),
            closed: false,
            memory: vec![0; SIZE as usize],
        };
        connection.session.start(&mut connection.out);
        connection
    }

    fn option(&mut self, code: OptionCode, data: &[u8]) {
        let header = OptionHeader { code, len: data.len() as u32 };
        self.receive(&header.encode());
        self.receive(data);
    }

    fn negotiate(&mut self, structured: bool) {
        self.receive(&ClientFlags(3).encode());
        let mut data = Vec::new();
        if structured {
            self.option(OptionCode::STRUCTURED_REPLY, &[]);
            MetaRequest::encode("a", &["base:allocation"], &mut data);
            self.option(OptionCode::SET_META_CONTEXT, &data);
            data.clear();
        }
        InfoRequest::encode("a", &[], &mut data);
        self.option(OptionCode::GO, &data);
        assert!(!self.session.is_negotiating());
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.unused.extend_from_slice(bytes);
        self.session.next_turn();
        while self.session.wants_input() {
            let used = self.session.receive(&self.unused, &mut self.out);
            self.unused.drain(..used);
            self.check();
            if used == 0 {
                assert!(!self.session.wants_input() || self.unused.len() <= LEFT_MAX);
                break;
            }
        }
    }

    fn complete(&mut self, fails: bool) {
        if self.in_flight.is_empty() {
            return;
        }
        let (_, mut io) = self.in_flight.remove(0);
        let range = io.range.offset as usize..io.range.end() as usize;
        match io.op {
            IoOp::Read => io.buf.copy_from_slice(&self.memory[range]),
            IoOp::Write => self.memory[range].copy_from_slice(&io.buf),
            _ => {}
        }
        let result = if fails { Err(forebay_block::ErrorKind::Media.into()) } else { Ok(()) };
        self.session.complete(io.complete(result), &mut self.out);
        self.check();
        self.receive(&[]);
    }

    fn check(&mut self) {
        for (endpoint, io) in &self.out.ios {
            assert_eq!(*endpoint, Endpoint(0));
            assert!(io.range.end() <= SIZE);
            let carries = matches!(io.op, IoOp::Read | IoOp::Write);
            assert!(!carries || io.range.len <= STRIPE_SIZE);
            assert_eq!(io.buf.len() as u64, if carries { io.range.len } else { 0 });
        }
        assert!(!self.closed || self.out.ios.is_empty(), "no request after the end");
        assert!(!self.closed || self.out.bytes.is_empty(), "no word after the end");
        self.in_flight.append(&mut self.out.ios);
        self.out.bytes.clear();
        self.closed |= self.out.close;
        assert_eq!(self.session.in_flight(), self.in_flight.len());
        assert!(self.in_flight.len() <= LIMITS.requests * PIECES);
    }
}

fuzz_target!(|input: Input| {
    let mut connection = Connection::new();
    if input.negotiated {
        connection.negotiate(input.structured);
    }
    for step in input.steps {
        match step {
            Step::Receive(bytes) => connection.receive(&bytes),
            Step::Request { flags, command, offset, len, long } => {
                let request = forebay_nbd_wire::Request {
                    flags: forebay_nbd_wire::CommandFlags(flags),
                    command: forebay_nbd_wire::Command(command % 9),
                    cookie: 1,
                    offset: u64::from(offset) % (SIZE + 2),
                    len: u32::from(len) << if long { 5 } else { 0 },
                };
                connection.receive(&request.encode());
            }
            Step::Complete { fails } => connection.complete(fails),
            Step::Shutdown => {
                connection.session.shutdown(&mut connection.out);
                connection.check();
            }
        }
    }
    while !connection.in_flight.is_empty() {
        connection.complete(false);
    }
});
