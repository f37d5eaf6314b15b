//! Every command, in valid and invalid requests, and the server's answers.
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

mod support;

use forebay_block::{ErrorKind, IoOp};
use forebay_frontend_nbd::{Limits, Tls};
use forebay_nbd_wire::{
    BlockStatus, ClientFlags, Command as C, CommandFlags as F, ErrorChunk, NbdError as E, Request,
};
use support::{Peer, answers, go, request, server};

const MIB32: u32 = 32 << 20;

fn flagged(flags: F, request: Request) -> Request {
    Request { flags, ..request }
}

/// A payload for writes; empty for others.
fn payload_of(request: &Request) -> Vec<u8> {
    if request.command == C::WRITE { vec![0x5a; request.len as usize] } else { Vec::new() }
}

#[test]
fn what_is_written_is_read_at_any_alignment() {
    for structured in [false, true] {
        let mut peer = Peer::transmitting("plain", structured);
        let data: Vec<u8> = (0..10_000u32).map(|i| (i % 251) as u8).collect();
        let wrote = peer.ask(request(C::WRITE, 1, 333, 10_000), &data);
        assert_eq!((wrote.cookie, wrote.error, wrote.data.len()), (1, E::OK, 0));
        let read = peer.ask(request(C::READ, u64::MAX, 334, 9_998), &[]);
        assert_eq!((read.cookie, read.error), (u64::MAX, E::OK));
        if structured {
            let (offset, data_read) = read.data.split_first_chunk().unwrap();
            assert_eq!(u64::from_be_bytes(*offset), 334);
            assert_eq!(data_read, &data[1..9_999]);
        } else {
            assert_eq!(read.data, &data[1..9_999]);
        }
        assert_eq!(
            peer.devices[0].log,
            [(IoOp::Write, 333, 10_000, false), (IoOp::Read, 334, 9_998, false)]
        );
    }
}

#[test]
fn commands_become_requests_of_the_device() {
    let cases = [
        (request(C::FLUSH, 0, 0, 0), F::NONE, (IoOp::Flush, 0, 0, false)),
        (request(C::FLUSH, 0, 0, 0), F::FUA, (IoOp::Flush, 0, 0, false)),
        (request(C::WRITE, 0, 1, 2), F::FUA, (IoOp::Write, 1, 2, true)),
        (request(C::TRIM, 0, 512, 1), F::NONE, (IoOp::Discard, 512, 1, false)),
        (request(C::TRIM, 0, 0, 1 << 20), F::FUA, (IoOp::Discard, 0, 1 << 20, true)),
        (request(C::WRITE_ZEROES, 0, 5, 9), F::FUA, (IoOp::WriteZeroes, 5, 9, true)),
        (request(C::CACHE, 0, 5, 9), F::NONE, (IoOp::Read, 5, 9, false)),
        (request(C::READ, 0, 5, 9), F::FUA, (IoOp::Read, 5, 9, false)),
        (request(C::READ, 0, (1 << 20) - 1, 1), F::NONE, (IoOp::Read, (1 << 20) - 1, 1, false)),
    ];
    for structured in [false, true] {
        for (request, flags, logged) in cases {
            let mut peer = Peer::transmitting("plain", structured);
            let request = flagged(flags, request);
            let answer = peer.ask(request, &payload_of(&request));
            assert_eq!(answer.error, E::OK, "{request:?}");
            assert_eq!(peer.devices[0].log, [logged], "{request:?}");
            let returns = if request.command == C::READ { request.len as usize } else { 0 };
            let head = if structured && returns > 0 { 8 } else { 0 };
            assert_eq!(answer.data.len(), head + returns, "{request:?}");
        }
    }
}

#[test]
fn zeroes_carry_their_flags() {
    let mut peer = Peer::transmitting("plain", false);
    peer.hold = true;
    let flags = F::NO_HOLE | F::FAST_ZERO;
    peer.send(&flagged(flags, request(C::WRITE_ZEROES, 1, 0, 4096)).encode());
    let flags = peer.held[0].1.flags;
    assert!(flags.no_hole && flags.fast_only && !flags.fua);
    peer.send(&request(C::WRITE_ZEROES, 2, 0, 4096).encode());
    let flags = peer.held[1].1.flags;
    assert!(!flags.no_hole && !flags.fast_only);
}

/// Invalid requests: description, export, request, and the errors with simple and with structured
/// replies.
fn wrong_requests() -> Vec<(&'static str, &'static str, Request, E, E)> {
    let both = |what, export, request, error| (what, export, request, error, error);
    let end = 1 << 20;
    vec![
        both("read of nothing", "plain", request(C::READ, 1, 0, 0), E::EINVAL),
        both("write of nothing", "plain", request(C::WRITE, 1, 0, 0), E::EINVAL),
        both("trim of nothing", "plain", request(C::TRIM, 1, 0, 0), E::EINVAL),
        both("zeroes of nothing", "plain", request(C::WRITE_ZEROES, 1, 0, 0), E::EINVAL),
        both("cache of nothing", "plain", request(C::CACHE, 1, 0, 0), E::EINVAL),
        both("read across the end", "plain", request(C::READ, 1, end - 1, 2), E::EINVAL),
        both("read beyond the end", "plain", request(C::READ, 1, end, 1), E::EINVAL),
        both("read past 64 bits", "plain", request(C::READ, 1, u64::MAX, 512), E::EINVAL),
        both("write across the end", "plain", request(C::WRITE, 1, end - 1, 2), E::ENOSPC),
        both("write past 64 bits", "plain", request(C::WRITE, 1, u64::MAX - 1, 9), E::ENOSPC),
        both("trim across the end", "plain", request(C::TRIM, 1, end - 1, 2), E::EINVAL),
        both("zeroes across the end", "plain", request(C::WRITE_ZEROES, 1, end, 1), E::ENOSPC),
        both("cache across the end", "plain", request(C::CACHE, 1, end, 1), E::EINVAL),
        both("odd size, last sector", "archive", request(C::READ, 1, 4608, 1), E::EINVAL),
        both("write to an archive", "archive", request(C::WRITE, 1, 0, 512), E::EPERM),
        both("trim of an archive", "archive", request(C::TRIM, 1, 0, 512), E::EPERM),
        both("zeroes to an archive", "archive", request(C::WRITE_ZEROES, 1, 0, 9), E::EPERM),
        both("trim not offered", "tape", request(C::TRIM, 1, 0, 512), E::EINVAL),
        both("flush with offset", "plain", request(C::FLUSH, 1, 512, 0), E::EINVAL),
        both("flush with length", "plain", request(C::FLUSH, 1, 0, 512), E::EINVAL),
        both("long write", "plain", request(C::WRITE, 1, 0, MIB32 + 1), E::EINVAL),
        both("resize", "plain", request(C::RESIZE, 1, 0, 512), E::EINVAL),
        both("unknown command", "plain", request(C(0xbeef), 1, 0, 512), E::EINVAL),
        both("context not chosen", "plain", request(C::BLOCK_STATUS, 1, end, 1), E::EINVAL),
        (
            "slow zeroes asked to be fast",
            "tape",
            flagged(F::FAST_ZERO, request(C::WRITE_ZEROES, 1, 0, 512)),
            E::ENOTSUP,
            E::ENOTSUP,
        ),
        both("foreign flag", "plain", flagged(F::DF, request(C::WRITE, 1, 0, 512)), E::EINVAL),
        both("foreign flag", "plain", flagged(F::NO_HOLE, request(C::READ, 1, 0, 9)), E::EINVAL),
        both("foreign flag", "plain", flagged(F::REQ_ONE, request(C::TRIM, 1, 0, 9)), E::EINVAL),
        both("unknown flag", "plain", flagged(F(1 << 15), request(C::FLUSH, 1, 0, 0)), E::EINVAL),
        both("payload flag", "plain", flagged(F(1 << 5), request(C::WRITE, 1, 0, 8)), E::EINVAL),
    ]
}

#[test]
fn a_request_waits_for_memory_and_goes_on_when_there_is_enough() {
    let mut peer = Peer::transmitting("plain", false);
    peer.hold = true;
    peer.session.allow_memory(8192, &mut peer.out);
    peer.send(&request(C::READ, 1, 0, 8192).encode());
    assert_eq!((peer.session.memory(), peer.session.wants_memory()), (8192, None));
    peer.send(&request(C::FLUSH, 2, 0, 0).encode());
    assert_eq!(peer.held.len(), 2, "a request without data waits for none");
    peer.send(&request(C::READ, 3, 0, 4096).encode());
    assert_eq!(peer.session.wants_memory(), Some(12_288));
    assert!(!peer.session.wants_input());
    peer.session.allow_memory(12_287, &mut peer.out);
    assert!(!peer.session.wants_input(), "that is not enough");
    peer.session.allow_memory(12_288, &mut peer.out);
    assert!(peer.session.wants_input() && peer.session.wants_memory().is_none());
    peer.send(&[]);
    assert_eq!((peer.held.len(), peer.session.memory()), (3, 12_288));
    peer.send(&request(C::WRITE, 4, 0, 4096).encode());
    assert!(peer.session.wants_memory().is_some() && !peer.session.is_owed());
    peer.session.allow_memory(1 << 20, &mut peer.out);
    peer.send(&[7; 100]);
    assert!(peer.session.is_owed(), "its data has not all come");
    peer.release();
    peer.send(&[7; 3996]);
    peer.release();
    assert_eq!((peer.session.memory(), peer.session.is_owed()), (0, false));
}

#[test]
fn wrong_requests_get_the_error_of_the_specification() {
    for (what, export, wrong, simple, chunked) in wrong_requests() {
        for (structured, error) in [(false, simple), (true, chunked)] {
            let mut peer = Peer::transmitting(export, structured);
            let answer = peer.ask(wrong, &payload_of(&wrong));
            assert_eq!(answer.error, error, "{what}, structured: {structured}");
            assert_eq!(answer.structured, structured, "{what}");
            assert!(peer.devices.iter().all(|device| device.log.is_empty()), "{what}");
            // The stream is still in sync.
            let answer = peer.ask(request(C::READ, 7, 0, 512), &[]);
            assert_eq!((answer.cookie, answer.error), (7, E::OK), "after {what}");
        }
    }
}

#[test]
fn long_requests_without_payload_depend_on_what_was_agreed() {
    use forebay_block::BufPool;
    use forebay_frontend_nbd::NbdServer;
    let exports = vec![support::export("huge", 1 << 40)];
    let server = NbdServer::new(exports, Tls::Off, Limits::default(), BufPool::default()).unwrap();
    for (structured, read) in [(false, E::EINVAL), (true, E::EOVERFLOW)] {
        let mut peer = Peer::new(&server);
        peer.hold = true;
        peer.send(&ClientFlags(3).encode());
        if structured {
            let code = forebay_nbd_wire::OptionCode::STRUCTURED_REPLY;
            peer.send(&support::option(code, b""));
        }
        peer.send(&go(""));
        peer.take();
        assert_eq!(peer.ask(request(C::READ, 1, 0, MIB32 + 1), &[]).error, read);
        assert_eq!(peer.ask(request(C::CACHE, 1, 0, MIB32 + 1), &[]).error, E::EOVERFLOW);
        peer.send(&request(C::TRIM, 1, 0, u32::MAX).encode());
        peer.send(&request(C::WRITE_ZEROES, 2, 0, u32::MAX).encode());
        peer.send(&request(C::READ, 3, 0, MIB32).encode());
        let lens: Vec<u64> = peer.held.iter().map(|(_, io)| io.range.len).collect();
        assert_eq!(lens[..2], [u64::from(u32::MAX); 2]);
        assert_eq!(lens[2..], [1 << 20; 32]);
    }
}

#[test]
fn long_requests_are_carried_out_in_pieces_of_a_stripe_and_answered_as_one() {
    for structured in [false, true] {
        let mut peer = Peer::transmitting("long", structured);
        let data: Vec<u8> = (0..3_000_000u32).map(|i| (i % 249) as u8).collect();
        let write = flagged(F::FUA, request(C::WRITE, 1, 700_000, 3_000_000));
        assert_eq!(peer.ask(write, &data).error, E::OK);
        let read = request(C::READ, 2, 700_001, 2_999_998);
        let answer = peer.ask(read, &[]);
        let head = if structured { 8 } else { 0 };
        assert!(answer.data[head..] == data[1..2_999_999]);
        let long = peer.devices.pop().unwrap();
        let writes: Vec<_> = long.log.iter().filter(|l| l.0 == IoOp::Write).collect();
        let lens: Vec<u64> = writes.iter().map(|l| l.2).collect();
        assert_eq!(lens, [348_576, 1_048_576, 1_048_576, 554_272]);
        assert!(writes.iter().all(|l| l.3), "each piece is durable");
    }
}

#[test]
fn one_failed_piece_fails_the_request_once() {
    for structured in [false, true] {
        for failing in 0..3 {
            let mut peer = Peer::transmitting("long", structured);
            peer.hold = true;
            let read = request(C::READ, 1, 0, 3 << 20);
            peer.send(&read.encode());
            assert_eq!((peer.session.in_flight(), peer.held.len()), (3, 3));
            // Complete them in reverse order.
            for (i, (_, io)) in std::mem::take(&mut peer.held).into_iter().enumerate().rev() {
                assert!(peer.out.bytes.is_empty());
                let result = if i == failing { Err(ErrorKind::Media.into()) } else { Ok(()) };
                peer.session.complete(io.complete(result), &mut peer.out);
            }
            let answers = answers(&peer.take(), &[read]);
            assert_eq!((answers.len(), answers[0].error), (1, E::EIO));
            assert_eq!(peer.session.in_flight(), 0);
        }
    }
}

#[test]
fn a_long_write_that_does_not_come_in_full_changes_nothing() {
    let mut peer = Peer::transmitting("long", false);
    let write = request(C::WRITE, 1, 0, 3 << 20);
    peer.send(&write.encode());
    peer.send(&vec![1; (3 << 20) - 1]);
    assert!(peer.session.wants_input() && peer.session.in_flight() == 0);
    assert!(peer.devices.last().unwrap().log.is_empty());
    peer.send(&[1]);
    assert_eq!(peer.devices.last().unwrap().log.len(), 3);
}

#[test]
fn errors_of_the_device_reach_the_client() {
    let cases = [
        (ErrorKind::Media, E::EIO),
        (ErrorKind::Corrupt, E::EIO),
        (ErrorKind::DeviceGone, E::EIO),
        (ErrorKind::Timeout, E::EIO),
        (ErrorKind::NoSpace, E::ENOSPC),
        (ErrorKind::OutOfRange, E::EINVAL),
        (ErrorKind::Unsupported, E::EINVAL),
        (ErrorKind::ReadOnly, E::EPERM),
        (ErrorKind::ShuttingDown, E::ESHUTDOWN),
    ];
    for structured in [false, true] {
        let mut peer = Peer::transmitting("plain", structured);
        for (kind, error) in cases {
            peer.devices[0].fails = Some(kind);
            for command in [C::READ, C::WRITE, C::TRIM, C::WRITE_ZEROES, C::CACHE] {
                let request = request(command, 5, 0, 512);
                let answer = peer.ask(request, &payload_of(&request));
                assert_eq!((answer.error, answer.structured), (error, structured), "{command}");
                let message = if structured {
                    ErrorChunk::decode(forebay_nbd_wire::ChunkKind::ERROR, &answer.data)
                        .unwrap()
                        .message
                } else {
                    assert!(answer.data.is_empty(), "no data follows a failed read");
                    continue;
                };
                assert!(!message.is_empty());
            }
        }
        peer.devices[0].fails = Some(ErrorKind::Unsupported);
        let fast = flagged(F::FAST_ZERO, request(C::WRITE_ZEROES, 5, 0, 512));
        assert_eq!(peer.ask(fast, &[]).error, E::ENOTSUP);
    }
}

#[test]
fn block_status_says_data() {
    let mut peer = Peer::transmitting("plain", true);
    for flags in [F::NONE, F::REQ_ONE, F::FUA] {
        let asked = flagged(flags, request(C::BLOCK_STATUS, 3, 100, 70_000));
        let answer = peer.ask(asked, &[]);
        let status = BlockStatus::decode(&answer.data).unwrap();
        assert_eq!(status.context, 1);
        let extents: Vec<_> = status.extents().map(|e| (e.len, e.status)).collect();
        assert_eq!(extents, [(70_000, 0)]);
    }
    let beyond = request(C::BLOCK_STATUS, 3, 1 << 20, 1);
    assert_eq!(peer.ask(beyond, &[]).error, E::EINVAL);
    assert_eq!(peer.ask(request(C::BLOCK_STATUS, 3, 0, 0), &[]).error, E::EINVAL);
}

#[test]
fn a_context_of_another_export_does_not_count() {
    let mut peer = Peer::plain();
    peer.send(&ClientFlags(3).encode());
    peer.send(&support::option(forebay_nbd_wire::OptionCode::STRUCTURED_REPLY, b""));
    peer.send(&support::set_context("tape", &["base:allocation"]));
    peer.send(&go("plain"));
    peer.take();
    assert_eq!(peer.ask(request(C::BLOCK_STATUS, 1, 0, 512), &[]).error, E::EINVAL);
}

#[test]
fn a_context_is_lost_when_contexts_are_chosen_again() {
    let again = [
        ("nothing chosen", support::set_context("plain", &[])),
        ("an unknown export", support::set_context("nothing", &["base:allocation"])),
        ("garbage", support::option(forebay_nbd_wire::OptionCode::SET_META_CONTEXT, b"?")),
    ];
    for (what, bytes) in again {
        let mut peer = Peer::plain();
        peer.send(&ClientFlags(3).encode());
        peer.send(&support::option(forebay_nbd_wire::OptionCode::STRUCTURED_REPLY, b""));
        peer.send(&support::set_context("plain", &["base:allocation"]));
        peer.send(&bytes);
        peer.send(&go("plain"));
        peer.take();
        let status = peer.ask(request(C::BLOCK_STATUS, 1, 0, 512), &[]);
        assert_eq!(status.error, E::EINVAL, "{what}");
    }
}

#[test]
fn requests_in_flight_are_bounded_in_number() {
    let limits = Limits { requests: 3, ..Limits::default() };
    let mut peer = Peer::new(&server(limits, Tls::Off));
    peer.send(&ClientFlags(3).encode());
    peer.send(&go("plain"));
    peer.take();
    peer.hold = true;
    let requests: Vec<_> = (0..10).map(|i| request(C::READ, i, i * 512, 512)).collect();
    peer.send(&requests.iter().flat_map(Request::encode).collect::<Vec<_>>());
    assert_eq!((peer.session.in_flight(), peer.held.len()), (3, 3));
    assert!(!peer.session.wants_input());
    peer.hold = false;
    peer.release();
    assert!(peer.session.wants_input());
    peer.send(&[]);
    let answers = answers(&peer.take(), &requests);
    assert_eq!(answers.iter().map(|a| a.cookie).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
    assert_eq!(peer.session.in_flight(), 0);
}

#[test]
fn requests_in_flight_are_bounded_in_bytes_but_one_always_passes() {
    let limits = Limits { bytes: 10_000, ..Limits::default() };
    let mut peer = Peer::new(&server(limits, Tls::Off));
    peer.send(&ClientFlags(3).encode());
    peer.send(&go("plain"));
    peer.take();
    peer.hold = true;
    for cookie in 0..3 {
        peer.send(&request(C::READ, cookie, 0, 4096).encode());
    }
    assert_eq!(peer.held.len(), 2);
    peer.release();
    peer.send(&[]);
    assert_eq!(peer.held.len(), 1);
    peer.release();
    let write = request(C::WRITE, 9, 0, 20_000);
    peer.send(&write.encode());
    peer.send(&payload_of(&write));
    assert_eq!(peer.held.len(), 1, "larger than the limit, and alone");
    peer.send(&request(C::READ, 3, 0, 1).encode());
    assert_eq!(peer.held.len(), 1);
    peer.release();
    peer.send(&[]);
    assert_eq!(peer.held.len(), 1);
}

/// 100 clients with 256 reads of 64 KiB each made one turn of seconds for everybody.
#[test]
fn small_reads_beyond_a_slice_wait_for_the_next_turn() {
    for len in [4096, 65_536] {
        let mut peer = Peer::transmitting("plain", false);
        let requests: Vec<_> = (0..200).map(|i| request(C::READ, i, 0, len)).collect();
        let bytes: Vec<u8> = requests.iter().flat_map(Request::encode).collect();
        let (mut used, mut turns, mut count) = (0, 0, 0);
        while used < bytes.len() {
            used += peer.session.receive(&bytes[used..], &mut peer.out);
            let begun: usize = peer.out.ios.iter().map(|(_, io)| io.buf.len()).sum();
            assert!(begun < 320 << 10, "{begun} bytes in a turn");
            count += peer.out.ios.len();
            peer.held.append(&mut peer.out.ios);
            peer.release();
            let waits = used < bytes.len();
            assert!(peer.session.wants_memory().is_none());
            assert_eq!(peer.session.next_turn(), waits);
            assert!(peer.session.wants_input());
            turns += 1;
        }
        assert_eq!((turns, count), ((200 * len).div_ceil(256 << 10), 200));
        assert_eq!(answers(&peer.take(), &requests).len(), 200);
    }
}

#[test]
fn a_goodbye_waits_for_what_is_in_flight() {
    let mut peer = Peer::transmitting("plain", false);
    peer.hold = true;
    let read = request(C::READ, 1, 0, 512);
    peer.send(&read.encode());
    peer.send(&request(C::DISC, 2, 0, 0).encode());
    peer.send(&request(C::READ, 3, 0, 512).encode());
    assert!(!peer.out.close && !peer.session.wants_input());
    assert_eq!(peer.held.len(), 1, "nothing is taken after a goodbye");
    peer.release();
    assert!(peer.out.close);
    assert_eq!(answers(&peer.take(), &[read]).len(), 1);

    let mut peer = Peer::transmitting("plain", false);
    peer.send(&request(C::DISC, 2, 0, 0).encode());
    assert!(peer.out.close && peer.take().is_empty());
}

#[test]
fn a_stopping_server_finishes_and_refuses() {
    let mut peer = Peer::transmitting("plain", true);
    peer.hold = true;
    let first = request(C::READ, 1, 0, 512);
    peer.send(&first.encode());
    peer.session.shutdown(&mut peer.out);
    assert!(!peer.out.close);
    let (read, write) = (request(C::READ, 2, 0, 512), request(C::WRITE, 3, 0, 512));
    peer.send(&read.encode());
    peer.send(&write.encode());
    peer.send(&payload_of(&write));
    peer.send(&request(C::FLUSH, 4, 0, 0).encode());
    let refused = answers(&peer.take(), &[]);
    assert!(refused.iter().all(|a| a.error == E::ESHUTDOWN));
    assert_eq!(refused.iter().map(|a| a.cookie).collect::<Vec<_>>(), [2, 3, 4]);
    peer.release();
    assert!(peer.out.close);
    let last = answers(&peer.take(), &[first]);
    assert_eq!((last[0].cookie, last[0].error), (1, E::OK));

    let mut idle = Peer::transmitting("plain", true);
    idle.session.shutdown(&mut idle.out);
    assert!(idle.out.close);
}

#[test]
fn garbage_ends_the_connection_and_completions_still_come() {
    let mut peer = Peer::transmitting("plain", false);
    peer.hold = true;
    peer.send(&request(C::READ, 1, 0, 512).encode());
    peer.send(&[0; 28]);
    assert!(peer.out.close && !peer.session.wants_input());
    assert_eq!(peer.session.in_flight(), 1);
    peer.release();
    assert_eq!(peer.session.in_flight(), 0);
    assert!(peer.take().is_empty(), "nothing is said after the end");
}

/// Found by fuzzing: a server that stopped an idle connection refused a late request with
/// `ESHUTDOWN` after its own goodbye, where TLS would already have closed.
#[test]
fn nothing_is_said_after_a_stop_that_found_nothing_in_flight() {
    let mut peer = Peer::transmitting("plain", false);
    peer.session.shutdown(&mut peer.out);
    assert!(peer.out.close && !peer.session.wants_input());
    let late = request(C::READ, 1, 0, 512).encode();
    assert_eq!(peer.session.receive(&late, &mut peer.out), late.len());
    assert!(peer.take().is_empty());
}
