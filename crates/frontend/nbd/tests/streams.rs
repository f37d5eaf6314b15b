//! Input streams: cut anywhere, random, hostile.
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

mod support;

use forebay_frontend_nbd::{Limits, Tls};
use forebay_nbd_wire::{ClientFlags, Command as C, CommandFlags, NbdError, OptionCode, Request};
use proptest::prelude::*;
use support::{Answer, Peer, answers, go, option, request, server, set_context};

/// The size of the export `long`.
const SIZE: u64 = (4 << 20) + 512;

/// A request that a client might send, mostly valid.
fn any_request() -> impl Strategy<Value = Request> {
    let command = prop_oneof![
        8 => Just(C::READ),
        8 => Just(C::WRITE),
        2 => Just(C::TRIM),
        2 => Just(C::WRITE_ZEROES),
        1 => Just(C::CACHE),
        1 => Just(C::BLOCK_STATUS),
        1 => any::<u16>().prop_filter("not a goodbye", |c| *c != C::DISC.0).prop_map(C),
    ];
    // Stripes end at each MiB, where requests are split.
    let near_cut = (1..4u64, 0..3000u64).prop_map(|(mib, before)| (mib << 20) - before);
    let offset = prop_oneof![5 => 0..SIZE, 4 => near_cut, 1 => any::<u64>()];
    let len = prop_oneof![20 => 0..5000u32, 2 => 0..200_000u32, 1 => 0..3_000_000u32];
    let flags = prop_oneof![5 => Just(0), 1 => Just(1), 1 => any::<u16>()];
    (command, offset, len, flags).prop_map(|(command, offset, len, flags)| {
        let flags = CommandFlags(flags);
        // A client that announces a payload and does not send it is out of sync by its own fault.
        Request { flags, command, cookie: 0, offset, len }
    })
}

fn stream_of(requests: &[Request]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for request in requests {
        bytes.extend_from_slice(&request.encode());
        if request.command == C::WRITE {
            bytes.extend((0..request.len).map(|i| (i as u64 + request.cookie) as u8));
        }
    }
    bytes
}

/// Sends `bytes` in pieces with these lengths, repeated as needed, and returns the answers.
fn feed(peer: &mut Peer, mut bytes: &[u8], pieces: &[usize]) -> Vec<u8> {
    let mut sizes = pieces.iter().cycle();
    while !bytes.is_empty() {
        let len = (*sizes.next().unwrap()).clamp(1, bytes.len());
        let (piece, rest) = bytes.split_at(len);
        peer.send(piece);
        bytes = rest;
    }
    peer.take()
}

fn by_cookie(mut answers: Vec<Answer>) -> Vec<Answer> {
    answers.sort_by_key(|answer| answer.cookie);
    answers
}

fn numbered(mut requests: Vec<Request>) -> Vec<Request> {
    for (cookie, request) in requests.iter_mut().enumerate() {
        request.cookie = cookie as u64;
    }
    requests
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn requests_cut_anywhere_give_the_same(
        requests in prop::collection::vec(any_request(), 1..40).prop_map(numbered),
        pieces in prop::collection::vec(1..4000usize, 1..5),
        structured: bool,
    ) {
        let bytes = stream_of(&requests);
        let mut whole = Peer::transmitting("long", structured);
        let expected = by_cookie(answers(&feed(&mut whole, &bytes, &[usize::MAX]), &requests));
        prop_assert_eq!(expected.len(), requests.len(), "one answer each");
        // One byte at a time would take too long for large inputs.
        let one = if bytes.len() < 300_000 { 1 } else { 1009 };
        for pieces in [&pieces[..], &[one]] {
            let mut cut = Peer::transmitting("long", structured);
            let got = by_cookie(answers(&feed(&mut cut, &bytes, pieces), &requests));
            prop_assert_eq!(&got, &expected);
            prop_assert!(cut.devices[3].bytes == whole.devices[3].bytes);
        }
    }

    #[test]
    fn random_requests_agree_with_a_model(
        requests in prop::collection::vec(any_request(), 1..60).prop_map(numbered),
    ) {
        let mut peer = Peer::transmitting("long", false);
        let mut model = vec![0u8; SIZE as usize];
        for request in &requests {
            let stream = stream_of(std::slice::from_ref(request));
            let answer = peer.ask(*request, &stream[Request::BYTES..]);
            if answer.error != NbdError::OK {
                continue;
            }
            let range = request.offset as usize..(request.offset + u64::from(request.len)) as usize;
            match request.command {
                C::READ => prop_assert!(answer.data == model[range]),
                C::WRITE => model[range].copy_from_slice(&stream[Request::BYTES..]),
                C::TRIM | C::WRITE_ZEROES => model[range].fill(0),
                _ => {}
            }
        }
        prop_assert!(peer.devices[3].bytes == model);
    }

    #[test]
    fn handshakes_cut_anywhere_give_the_same(
        options in prop::collection::vec(
            (prop_oneof![0..12u32, any::<u32>()], prop::collection::vec(any::<u8>(), 0..80)),
            0..20,
        ),
        piece in 1..50usize,
    ) {
        let mut bytes = ClientFlags(3).encode().to_vec();
        for (code, data) in &options {
            bytes.extend(option(OptionCode(*code), data));
        }
        bytes.extend(option(OptionCode(0xffff), &[7; 33_000]));
        bytes.extend(option(OptionCode::STRUCTURED_REPLY, b""));
        bytes.extend(set_context("tape", &["base:allocation"]));
        bytes.extend(go("tape"));
        let ends = |pieces: &[usize]| {
            let mut peer = Peer::plain();
            let said = feed(&mut peer, &bytes, pieces);
            (said, peer.out.close, peer.session.is_negotiating())
        };
        let whole = ends(&[usize::MAX]);
        prop_assert_eq!(&ends(&[piece]), &whole);
        prop_assert_eq!(&ends(&[1]), &whole);
    }

    #[test]
    fn noise_never_panics_and_never_grows(
        flags in prop_oneof![Just(3u32), any::<u32>()],
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..30),
        transmitting: bool,
    ) {
        let mut peer = if transmitting {
            Peer::transmitting("plain", true)
        } else {
            let mut peer = Peer::plain();
            peer.send(&flags.to_be_bytes());
            peer
        };
        for chunk in &chunks {
            peer.send(chunk);
            if peer.out.close {
                break;
            }
        }
        prop_assert!(peer.take().len() < 100_000);
    }
}

#[test]
fn a_promised_payload_that_never_comes_holds_one_buffer() {
    let mut peer = Peer::transmitting("plain", false);
    peer.send(&request(C::WRITE, 1, 0, 1 << 20).encode());
    peer.send(&[1; 1000]);
    assert!(peer.session.wants_input() && peer.session.in_flight() == 0);
    peer.session.shutdown(&mut peer.out);
    assert!(peer.out.close);
    assert!(peer.devices[0].bytes.iter().all(|&b| b == 0), "half a write is no write");
}

#[test]
fn a_refused_payload_of_four_gigabytes_is_skipped_without_being_stored() {
    let mut peer = Peer::transmitting("plain", false);
    let write = request(C::WRITE, 1, 0, u32::MAX);
    peer.send(&write.encode());
    assert_eq!(answers(&peer.take(), &[write])[0].error, NbdError::EINVAL);
    let mut left = u32::MAX as usize;
    let noise = vec![0x25; 64 << 20];
    while left > 0 {
        let len = left.min(noise.len());
        assert_eq!(peer.session.receive(&noise[..len], &mut peer.out), len);
        left -= len;
    }
    assert!(peer.take().is_empty());
    assert_eq!(peer.ask(request(C::READ, 2, 0, 512), &[]).data.len(), 512);
}

#[test]
fn bytes_are_not_kept_while_too_much_is_in_flight() {
    let limits = Limits { requests: 1, ..Limits::default() };
    let mut peer = Peer::new(&server(limits, Tls::Off));
    peer.send(&ClientFlags(3).encode());
    peer.send(&go("plain"));
    peer.hold = true;
    peer.send(&request(C::READ, 1, 0, 512).encode());
    let more = request(C::READ, 2, 0, 512).encode();
    assert_eq!(peer.session.receive(&more, &mut peer.out), 0);
    assert!(!peer.session.wants_input());
}
