//! Hostile and unusual servers, byte by byte.

use forebay_block::{ByteRange, IoBuf, IoTag};
use forebay_nbd_wire::{encode_data_header, encode_error_chunk};

use super::*;

fn session(structured: bool) -> Session {
    let flags = TransmissionFlags::SEND_FLUSH;
    let (minimum, preferred, maximum) = (1, 4096, 1 << 20);
    Session::new(Terms { size: 1 << 30, flags, structured, minimum, preferred, maximum })
}

fn read(session: &mut Session, offset: u64, len: usize) -> Request {
    let io = Io::read(IoTag(7), ByteRange::new(offset, len as u64), IoBuf::zeroed(len));
    request(session, io)
}

/// Submits a request and returns the first piece sent for it.
fn request(session: &mut Session, io: Io) -> Request {
    let (mut out, mut done) = (Vec::new(), Vec::new());
    session.submit(Instant(0), io, &mut done);
    session.send(&mut out);
    Request::decode(out.first_chunk().unwrap()).unwrap()
}

fn data(request: &Request, offset: u64, bytes: &[u8], last: bool) -> Vec<u8> {
    let mut chunk = encode_data_header(request.cookie, offset, bytes.len() as u32).to_vec();
    if !last {
        chunk[5] = 0;
    }
    chunk.extend_from_slice(bytes);
    chunk
}

fn feed(session: &mut Session, bytes: &[u8]) -> Result<Vec<Completion>, Broken> {
    let mut done = Vec::new();
    let used = session.receive(bytes, &mut done)?;
    assert!(used == bytes.len() || done.is_empty(), "{used} of {} used", bytes.len());
    Ok(done)
}

#[test]
fn a_read_in_chunks_is_put_together_however_it_is_cut() {
    for cut in 1..200 {
        let mut session = session(true);
        let request = read(&mut session, 4096, 1024);
        let mut bytes = data(&request, 4096 + 512, &[2; 512], false);
        bytes.extend(data(&request, 4096, &[1; 256], false));
        let hole = Hole { offset: 4096 + 256, len: 256 }.encode();
        let (flags, kind) = (ReplyFlags::DONE, ChunkKind::OFFSET_HOLE);
        let len = hole.len() as u32;
        let head = ChunkHeader { flags, kind, cookie: request.cookie, len };
        bytes.extend(head.encode());
        bytes.extend(hole);
        let (mut done, mut kept) = (Vec::new(), Vec::new());
        for part in bytes.chunks(cut) {
            kept.extend_from_slice(part);
            let used = session.receive(&kept, &mut done).unwrap();
            kept.drain(..used);
        }
        assert!(kept.is_empty() && done.len() == 1);
        let expected = [vec![1; 256], vec![0; 256], vec![2; 512]].concat();
        assert_eq!(&done[0].buf[..], expected);
        assert_eq!(session.in_flight(), 0);
    }
}

#[test]
fn what_was_not_asked_for_breaks_the_connection() {
    let other = |cookie| SimpleReply { error: NbdError::OK, cookie }.encode().to_vec();
    let chunk = |request: &Request, kind, len| {
        let flags = ReplyFlags::DONE;
        ChunkHeader { flags, kind, cookie: request.cookie, len }.encode().to_vec()
    };
    type Answer<'a> = Box<dyn Fn(&Request) -> Vec<u8> + 'a>;
    let answers: Vec<(&str, Answer<'_>)> = vec![
        ("no magic", Box::new(|_| vec![0; 20])),
        ("another's cookie", Box::new(|r| other(r.cookie ^ 1))),
        ("an old cookie", Box::new(|r| other(r.cookie - (1 << PLACE_BITS)))),
        ("a place beyond", Box::new(|r| other(r.cookie | 0xffff))),
        ("a simple reply to a read", Box::new(|r| other(r.cookie))),
        ("data before", Box::new(|r| data(r, r.offset - 1, &[0; 4], true))),
        ("data beyond", Box::new(|r| data(r, r.offset + 1022, &[0; 4], true))),
        ("data at the end of numbers", Box::new(|r| data(r, u64::MAX, &[0; 4], true))),
        ("half the data", Box::new(|r| data(r, r.offset, &[0; 512], true))),
        (
            "data twice",
            Box::new(|r| {
                let once = data(r, r.offset, &[0; 1024], false);
                [once.clone(), once].concat()
            }),
        ),
        (
            "the first half twice",
            Box::new(|r| {
                let half = |last| data(r, r.offset, &[0; 512], last);
                [half(false), half(true)].concat()
            }),
        ),
        (
            "parts that overlap, of the right length together",
            Box::new(|r| {
                let (first, second) = (r.offset, r.offset + 511);
                [data(r, first, &[0; 512], false), data(r, second, &[0; 512], true)].concat()
            }),
        ),
        ("no data", Box::new(|r| data(r, r.offset, &[], true))),
        ("an end without data", Box::new(|r| chunk(r, ChunkKind::NONE, 0))),
        ("a long end", Box::new(|r| chunk(r, ChunkKind::NONE, 1 << 31))),
        ("a status", Box::new(|r| [chunk(r, ChunkKind::BLOCK_STATUS, 4), vec![0; 4]].concat())),
    ];
    for (what, answer) in answers {
        let mut session = session(true);
        let request = read(&mut session, 1 << 20, 1024);
        assert!(feed(&mut session, &answer(&request)).is_err(), "{what}");
    }
    let mut plain = session(false);
    let request = read(&mut plain, 0, 512);
    assert!(feed(&mut plain, &data(&request, 0, &[0; 512], true)).is_err(), "no chunks agreed");
}

#[test]
fn errors_end_the_request_alone() {
    let mut session = session(true);
    let first = read(&mut session, 0, 1024);
    let second = read(&mut session, 4096, 512);
    let mut bytes = data(&first, 0, &[9; 100], false);
    encode_error_chunk(&mut bytes, first.cookie, NbdError::ENOSPC, "full");
    bytes.extend(data(&second, 4096, &[3; 512], true));
    let done = feed(&mut session, &bytes).unwrap();
    assert_eq!(done[0].result.as_ref().unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(done[1].result.is_ok());
}

#[test]
fn force_unit_access_is_a_flush_behind_where_the_server_has_none() {
    let mut session = session(false);
    let io = Io::write(IoTag(1), 512, IoBuf::zeroed(512)).with_fua(true);
    let write = request(&mut session, io);
    assert_eq!((write.command, write.flags), (Command::WRITE, CommandFlags::NONE));
    let ok = |cookie| SimpleReply { error: NbdError::OK, cookie }.encode();
    assert!(feed(&mut session, &ok(write.cookie)).unwrap().is_empty());
    let mut out = Vec::new();
    session.send(&mut out);
    let flush = Request::decode(out.first_chunk().unwrap()).unwrap();
    assert_eq!(flush.command, Command::FLUSH);
    assert_eq!(feed(&mut session, &ok(flush.cookie)).unwrap().len(), 1);
}

#[test]
fn a_failed_piece_ends_a_request_once_its_others_are_answered() {
    let mut session = session(false);
    let (mut out, mut done) = (Vec::new(), Vec::new());
    session.submit(Instant(0), Io::write(IoTag(1), 0, IoBuf::zeroed(16 << 20)), &mut done);
    session.send(&mut out);
    let len = Request::BYTES + (1 << 20);
    let cookies: Vec<u64> = out
        .chunks(len)
        .map(|piece| Request::decode(piece.first_chunk().unwrap()).unwrap().cookie)
        .collect();
    assert!(cookies.len() > 2 && cookies.len() < 16, "bounded by what waits to be sent");
    for (i, &cookie) in cookies.iter().enumerate() {
        let error = if i == 1 { NbdError::EIO } else { NbdError::OK };
        let reply = SimpleReply { error, cookie }.encode();
        session.receive(&reply, &mut done).unwrap();
        assert_eq!(done.len(), usize::from(i + 1 == cookies.len()));
    }
    assert_eq!(done[0].result.as_ref().unwrap_err().kind(), ErrorKind::Media);
    out.clear();
    session.send(&mut out);
    assert!(out.is_empty(), "no more pieces of a request that has failed");
}

/// A server that lost one read and answered all others used to keep its client waiting for ever.
#[test]
fn a_request_that_others_overtake_for_long_is_noticed() {
    let write = Io::write(IoTag(1), 0, IoBuf::zeroed(512));
    let read = Io::read(IoTag(1), ByteRange::new(0, 512), IoBuf::zeroed(512));
    for (lost, most) in [(read, OVERTAKEN_MAX), (write, CHANGE_OVERTAKEN_MAX)] {
        let mut session = session(false);
        let begin = Instant(7);
        session.submit(begin, lost, &mut Vec::new());
        session.send(&mut Vec::new());
        for (late, is_overtaken) in [(most - Duration::from_secs(1), false), (most, true)] {
            let (mut out, mut done) = (Vec::new(), Vec::new());
            session.submit(begin + late, Io::flush(IoTag(2)), &mut done);
            session.send(&mut out);
            assert!(!session.is_overtaken(), "silence is no answer");
            let cookie = Request::decode(out.first_chunk().unwrap()).unwrap().cookie;
            let reply = SimpleReply { error: NbdError::OK, cookie }.encode();
            session.receive(&reply, &mut done).unwrap();
            assert_eq!((done.len(), session.is_overtaken()), (1, is_overtaken));
        }
    }
}

/// A slow server that sends a part of a long read now and then, and answers short ones in between.
#[test]
fn a_request_that_goes_on_is_not_overtaken() {
    let mut session = session(true);
    let long = read(&mut session, 0, 8 << 10);
    for minute in 0..8 {
        let (mut out, mut done) = (Vec::new(), Vec::new());
        let part = data(&long, minute << 10, &[1; 1 << 10], minute == 7);
        session.receive(&part, &mut done).unwrap();
        let now = Instant(0) + (OVERTAKEN_MAX - Duration::from_secs(1)) * minute as u32;
        session.submit(now, Io::flush(IoTag(2)), &mut done);
        session.send(&mut out);
        let cookie = Request::decode(out.first_chunk().unwrap()).unwrap().cookie;
        let reply = SimpleReply { error: NbdError::OK, cookie }.encode();
        session.receive(&reply, &mut done).unwrap();
        assert!(!session.is_overtaken(), "minute {minute}");
    }
}

/// Correct answers with bytes changed, cut or repeated: a session may report a protocol violation,
/// but must not panic, lose a request, or complete one twice.
#[test]
fn changed_answers_never_do_more_than_break_the_connection() {
    let mut numbers = crate::random::Numbers::new(71);
    let (mut broken, mut whole) = (0, 0);
    for round in 0..20_000u64 {
        let mut session = session(round % 2 == 0);
        let first = read(&mut session, 4096, 1024);
        let second = read(&mut session, 0, 512);
        let mut bytes = Vec::new();
        if session.terms.structured {
            bytes.extend(data(&second, 0, &[3; 512], true));
            bytes.extend(data(&first, 4096, &[9; 1000], false));
            bytes.extend(data(&first, 5096, &[9; 24], true));
        } else {
            for (request, len) in [(first, 1024), (second, 512)] {
                let reply = SimpleReply { error: NbdError::OK, cookie: request.cookie };
                bytes.extend(reply.encode());
                bytes.resize(bytes.len() + len, 5);
            }
        }
        for _ in 0..numbers.below(3) {
            let at = numbers.below(bytes.len() as u64) as usize;
            match numbers.below(3) {
                0 => bytes[at] ^= 1 << numbers.below(8),
                1 => bytes.truncate(at),
                _ => bytes.extend_from_within(at..),
            }
            if bytes.is_empty() {
                break;
            }
        }
        let mut done = Vec::new();
        match session.receive(&bytes, &mut done) {
            Ok(used) => {
                assert!(used <= bytes.len());
                whole += 1;
            }
            Err(_) => broken += 1,
        }
        assert_eq!(done.len() + session.in_flight(), 2);
        session.fail_all(&ErrorKind::DeviceGone.into(), &mut done);
        assert_eq!((done.len(), session.in_flight()), (2, 0));
    }
    assert!(broken > 1000 && whole > 1000, "{broken} broken, {whole} whole");
}
