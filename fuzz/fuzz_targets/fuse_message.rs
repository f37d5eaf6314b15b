//! FUSE messages as they come over the device or in a slot of a ring, valid, changed and invented:
//! nothing panics, no request goes beyond a file's end, and every answer names its request and has
//! the length that it claims.
#![no_main]

use forebay_block::{Answer, BufPool, Endpoint, ErrorKind, IoOp, Parts, Responder, Step, VolumeId};
use forebay_frontend_fuse::{FuseServer, Owner, REQUEST_BYTES, SharedFile, negotiate};
use forebay_fuse_wire::{Entry, HEAD_BYTES, Message, split};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

/// Not a multiple of a block.
const SIZE: u64 = (5 << 30) + 512;
const HEADER: usize = 40;
/// Maximum number of successive I/Os for one range, which is never longer than the file.
const STEPS_MAX: usize = 8;

#[derive(Arbitrary, Debug)]
enum Input {
    /// Arbitrary bytes from the device.
    Device(Vec<u8>),
    /// Arbitrary bytes in a slot.
    Slot(Vec<u8>, Vec<u8>),
    /// A message of the right length.
    Whole { op: u8, node: u16, argument: Vec<u8>, fails: bool },
    /// A range of a file, near its bounds.
    Range { op: u8, offset: u64, length: u32, mode: u8, data: Vec<u8> },
}

fn server() -> FuseServer {
    let file = |id, name: &str, read_only, holes| SharedFile {
        volume: VolumeId(id),
        name: name.into(),
        size: SIZE,
        read_only,
        holes,
    };
    let (a, b) = (file(0, "a", false, true), file(1, "b", true, false));
    let files = vec![a, b, file(2, "c", false, false)];
    FuseServer::new(files, Owner { uid: 0, gid: 0, seconds: 0 }).expect("the names are good")
}

fn message(op: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes[..4].copy_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
    bytes[4..8].copy_from_slice(&op.to_ne_bytes());
    bytes[8..16].copy_from_slice(&77u64.to_ne_bytes());
    bytes[16..24].copy_from_slice(&node.to_ne_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn serve(server: &FuseServer, message: Message<'_>, fails: bool) {
    let Message { header, argument, data } = message;
    let unique = header.get(8..16).map(|bytes| bytes.to_vec());
    let mut step = server.request(Parts { header, argument, data }, &BufPool::default());
    for _ in 0..STEPS_MAX {
        step = match step {
            Step::Silent => return,
            Step::Answer(answer) => return check(&answer, unique),
            Step::Ask(ticket, _) => return check(&server.told(ticket, vec![1; 100]), unique),
            Step::Pass(ticket, Endpoint(at), io) => {
                assert!(at < 3 && io.range.end() <= SIZE, "{at}: {:?}", io.range);
                assert!(at != 1 || !io.op.changes_data(), "it is read-only");
                // A read gets its buffer from the event loop.
                let carries = io.op == IoOp::Write;
                assert_eq!(io.buf.len() as u64, if carries { io.range.len } else { 0 });
                assert!(io.op != IoOp::Read || io.range.len <= REQUEST_BYTES.into());
                server.finish(ticket, if fails { Err(ErrorKind::Media.into()) } else { Ok(()) })
            }
        };
    }
    panic!("a request of {STEPS_MAX} parts has no end");
}

fn check(answer: &Answer, unique: Option<Vec<u8>>) {
    let body = answer.body.length();
    assert!(body <= REQUEST_BYTES as usize, "it does not fit a slot");
    assert_eq!(answer.header[..4], ((16 + body) as u32).to_ne_bytes());
    assert_eq!(Some(&answer.header[8..]), unique.as_deref());
    let failed = answer.header[4..8] != [0; 4];
    assert!(!failed || body == 0, "an error returns nothing");
}

fn serve_bytes(bytes: &[u8], fails: bool) {
    let _ = negotiate(bytes, true);
    let server = server();
    match split(bytes) {
        Ok(parts) => serve(&server, parts, fails),
        Err(_) => {
            let header = &bytes[..bytes.len().min(HEADER)];
            server.refuse(Parts { header, argument: &[], data: &[] });
        }
    }
}

fuzz_target!(|input: Input| match input {
    Input::Device(bytes) => serve_bytes(&bytes, false),
    Input::Slot(bytes, payload) => {
        let mut head = [0; HEAD_BYTES];
        let length = bytes.len().min(HEAD_BYTES);
        head[..length].copy_from_slice(&bytes[..length]);
        serve(&server(), Entry::new(&head, &payload).message(), false);
    }
    Input::Whole { op, node, argument, fails } => {
        serve_bytes(&message(op.into(), node.into(), &argument), fails);
    }
    Input::Range { op, offset, length, mode, data } => {
        let (op, body) = if op.is_multiple_of(3) {
            let mut body = vec![0; 32];
            body[8..16].copy_from_slice(&(offset % (2 * SIZE)).to_ne_bytes());
            body[16..24].copy_from_slice(&(u64::from(length) * 7).to_ne_bytes());
            body[24..28].copy_from_slice(&u32::from(mode % 32).to_ne_bytes());
            (43, body)
        } else {
            let writes = op.is_multiple_of(2);
            let size = if writes { data.len() as u32 } else { length };
            let mut body = vec![0; 40];
            body[8..16].copy_from_slice(&(offset % (SIZE + 9)).to_ne_bytes());
            body[16..20].copy_from_slice(&size.to_ne_bytes());
            body.extend_from_slice(if writes { &data } else { &[] });
            (if writes { 16 } else { 15 }, body)
        };
        serve_bytes(&message(op, 0x1000 + u64::from(mode % 3), &body), mode > 200);
    }
});
