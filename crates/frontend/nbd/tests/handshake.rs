//! Every option, in valid and invalid requests, and the server's answers.
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

mod support;

use forebay_block::{BufPool, Export};
use forebay_frontend_nbd::{Limits, NbdServer, ServerError, Tls};
use forebay_nbd_wire::{
    ClientFlags, ExportReply, Greeting, Info, InfoKind, MetaContext, MetaRequest, OptionCode,
    OptionHeader, OptionReplyKind as Kind, ServerEntry, TransmissionFlags as T,
};
use support::{Peer, export, exports, go, info, option, option_replies, server, set_context};

/// A peer that has sent its flags; the greeting is checked and removed.
fn haggling() -> Peer {
    let mut peer = Peer::plain();
    let greeting = peer.take();
    let greeting = Greeting::decode(greeting.as_slice().try_into().unwrap()).unwrap();
    assert_eq!(greeting.flags.0, 3);
    assert!(peer.session.is_negotiating());
    peer.send(&ClientFlags(3).encode());
    assert!(peer.take().is_empty());
    peer
}

/// The kinds of the answers to one option.
fn kinds(peer: &mut Peer, bytes: &[u8]) -> Vec<Kind> {
    peer.send(bytes);
    option_replies(&peer.take()).into_iter().map(|(_, kind, _)| kind).collect()
}

fn information(peer: &mut Peer, bytes: &[u8]) -> Vec<Vec<u8>> {
    peer.send(bytes);
    let mut replies = option_replies(&peer.take());
    assert_eq!(replies.pop().unwrap().1, Kind::ACK);
    replies
        .into_iter()
        .map(|(_, kind, data)| (kind == Kind::INFO).then_some(data).unwrap())
        .collect()
}

#[test]
fn list_names_every_export() {
    let mut peer = haggling();
    peer.send(&option(OptionCode::LIST, b""));
    let replies = option_replies(&peer.take());
    let (ack, entries) = replies.split_last().unwrap();
    assert_eq!((ack.0, ack.1), (OptionCode::LIST, Kind::ACK));
    for ((_, kind, data), export) in entries.iter().zip(exports()) {
        assert_eq!(*kind, Kind::SERVER);
        let entry = ServerEntry::decode(data).unwrap();
        assert_eq!((entry.name, entry.description), (&*export.name, &*export.description));
    }
    assert_eq!(entries.len(), 4);
}

#[test]
fn info_tells_what_was_asked() {
    let mut peer = haggling();
    let all = [InfoKind::NAME, InfoKind::DESCRIPTION, InfoKind::BLOCK_SIZE, InfoKind(77)];
    let replies = information(&mut peer, &info(OptionCode::INFO, "", &all));
    let infos: Vec<_> = replies.iter().map(|data| Info::decode(data).unwrap()).collect();
    let flags = T::HAS_FLAGS | T::SEND_FLUSH | T::SEND_FUA | T::SEND_TRIM | T::SEND_WRITE_ZEROES;
    let flags = flags | T::SEND_FAST_ZERO | T::SEND_CACHE | T::CAN_MULTI_CONN;
    assert_eq!(
        infos,
        [
            Info::Export { size: 1 << 20, flags },
            Info::Name("plain"),
            Info::Description("the plain volume"),
            Info::BlockSize { minimum: 1, preferred: 4096, maximum: 32 << 20 },
        ]
    );
    assert!(peer.session.is_negotiating());
    assert_eq!(information(&mut peer, &info(OptionCode::INFO, "plain", &[])).len(), 1);
}

#[test]
fn flags_are_those_of_the_device() {
    let flags = |name: &str, structured: bool| {
        let mut peer = haggling();
        if structured {
            assert_eq!(kinds(&mut peer, &option(OptionCode::STRUCTURED_REPLY, b"")), [Kind::ACK]);
        }
        let replies = information(&mut peer, &info(OptionCode::INFO, name, &[]));
        match Info::decode(&replies[0]).unwrap() {
            Info::Export { flags, .. } => flags,
            other => panic!("{other:?}"),
        }
    };
    let always = T::HAS_FLAGS | T::SEND_FLUSH | T::SEND_FUA | T::SEND_CACHE | T::CAN_MULTI_CONN;
    assert_eq!(flags("archive", false), always | T::READ_ONLY | T::ROTATIONAL);
    assert_eq!(flags("archive", true), always | T::READ_ONLY | T::ROTATIONAL | T::SEND_DF);
    assert_eq!(flags("tape", false), always | T::SEND_WRITE_ZEROES | T::SEND_FAST_ZERO);
}

#[test]
fn preferred_block_is_a_power_of_two_in_bounds() {
    for (asked, told) in [(0, 512), (4096, 4096), (65535, 32768), (1 << 31, 32 << 20)] {
        let export = Export { preferred_block: asked, ..export("a", 512) };
        let server =
            NbdServer::new(vec![export], Tls::Off, Limits::default(), BufPool::default()).unwrap();
        let mut peer = Peer::new(&server);
        peer.take();
        peer.send(&ClientFlags(3).encode());
        let bytes = info(OptionCode::INFO, "a", &[InfoKind::BLOCK_SIZE]);
        let replies = information(&mut peer, &bytes);
        let Info::BlockSize { preferred, .. } = Info::decode(&replies[1]).unwrap() else {
            panic!("block size");
        };
        assert_eq!(preferred, told);
    }
}

#[test]
fn go_enters_transmission_and_unknown_exports_do_not() {
    let mut peer = haggling();
    assert_eq!(kinds(&mut peer, &go("nothing")), [Kind::ERR_UNKNOWN]);
    assert_eq!(kinds(&mut peer, &info(OptionCode::INFO, "pla", &[])), [Kind::ERR_UNKNOWN]);
    assert!(peer.session.is_negotiating());
    assert_eq!(kinds(&mut peer, &go("tape")), [Kind::INFO, Kind::ACK]);
    assert!(!peer.session.is_negotiating());
}

#[test]
fn export_name_answers_with_zeros_only_when_wanted() {
    for (flags, zeroes) in [(1u32, 124), (3, 0), (0, 124), (2, 0)] {
        let mut peer = Peer::plain();
        peer.take();
        peer.send(&flags.to_be_bytes());
        peer.send(&option(OptionCode::EXPORT_NAME, b"archive"));
        let bytes = peer.take();
        assert_eq!(bytes.len(), ExportReply::BYTES + zeroes);
        let reply = ExportReply::decode(bytes[..10].try_into().unwrap());
        assert_eq!(reply.size, 4608);
        assert!(reply.flags.has(T::READ_ONLY));
        assert!(bytes[10..].iter().all(|&b| b == 0));
        assert!(!peer.session.is_negotiating());
    }
}

#[test]
fn what_cannot_be_answered_is_hung_up_on() {
    let long = vec![b'a'; 5000];
    let header = OptionHeader { code: OptionCode::EXPORT_NAME, len: u32::MAX }.encode();
    // The reasons are for the log of the event loop: a session that logged itself let a scanner of
    // ports fill it.
    let cases: [(&str, u32, Vec<u8>); 7] = [
        ("unknown export", 3, option(OptionCode::EXPORT_NAME, b"nothing")),
        ("unknown export", 3, option(OptionCode::EXPORT_NAME, b"\xff")),
        ("unknown export", 3, option(OptionCode::EXPORT_NAME, &long)),
        ("longer than 32 KiB", 3, header.to_vec()),
        ("without fixed newstyle", 2, option(OptionCode::LIST, b"")),
        ("unknown handshake flags 0x4", 4, Vec::new()),
        ("no option", 3, b"GET / HTTP/1.1\r\n\r\n".to_vec()),
    ];
    for (what, flags, bytes) in cases {
        let mut peer = Peer::plain();
        peer.take();
        peer.send(&flags.to_be_bytes());
        peer.send(&bytes);
        assert!(peer.out.close, "{what}");
        assert!(peer.out.why.as_ref().is_some_and(|why| why.contains(what)), "{:?}", peer.out.why);
        assert!(peer.take().is_empty(), "{what}");
        assert!(!peer.session.wants_input(), "{what}");
    }
}

#[test]
fn abort_is_acknowledged_whatever_it_carries() {
    for data in [&b""[..], b"goodbye"] {
        let mut peer = haggling();
        assert_eq!(kinds(&mut peer, &option(OptionCode::ABORT, data)), [Kind::ACK]);
        assert!(peer.out.close && peer.out.why.is_none());
    }
}

#[test]
fn wrong_options_are_refused_and_the_next_is_heard() {
    use OptionCode as O;
    let meta = |n: u32| [&b"\0\0\0\0"[..], &n.to_be_bytes()].concat();
    let cases: [(&str, Vec<u8>, Kind); 14] = [
        ("list with data", option(O::LIST, b"x"), Kind::ERR_INVALID),
        ("structured with data", option(O::STRUCTURED_REPLY, b"x"), Kind::ERR_INVALID),
        ("TLS with data", option(O::STARTTLS, b"x"), Kind::ERR_INVALID),
        ("TLS without certificate", option(O::STARTTLS, b""), Kind::ERR_POLICY),
        ("info without data", option(O::INFO, b""), Kind::ERR_INVALID),
        ("info with wrong length", option(O::INFO, b"\0\0\0\x09abc\0\0"), Kind::ERR_INVALID),
        ("go with bytes left", option(O::GO, b"\0\0\0\0\0\0x"), Kind::ERR_INVALID),
        ("context before structured", set_context("", &["base:allocation"]), Kind::ERR_INVALID),
        ("list contexts so", option(O::LIST_META_CONTEXT, &meta(0)), Kind::ERR_INVALID),
        ("extended headers", option(O::EXTENDED_HEADERS, b""), Kind::ERR_UNSUP),
        ("withdrawn option", option(OptionCode(4), b""), Kind::ERR_UNSUP),
        ("unknown option", option(OptionCode(0xabcd_ef01), b"data"), Kind::ERR_UNSUP),
        ("long option", option(OptionCode(99), &[0; 40_000]), Kind::ERR_TOO_BIG),
        ("long go", option(O::GO, &[0; 40_000]), Kind::ERR_TOO_BIG),
    ];
    let mut peer = haggling();
    for (what, bytes, kind) in cases {
        peer.send(&bytes);
        let replies = option_replies(&peer.take());
        assert_eq!(replies.len(), 1, "{what}");
        assert_eq!(replies[0].1, kind, "{what}");
        let text = std::str::from_utf8(&replies[0].2).unwrap();
        assert!(!text.is_empty(), "{what} is explained");
    }
    assert_eq!(kinds(&mut peer, &go("")), [Kind::INFO, Kind::ACK]);
}

#[test]
fn contexts_are_listed_and_chosen() {
    let mut peer = haggling();
    kinds(&mut peer, &option(OptionCode::STRUCTURED_REPLY, b""));
    let list = |queries: &[&str]| {
        let mut data = Vec::new();
        MetaRequest::encode("plain", queries, &mut data);
        option(OptionCode::LIST_META_CONTEXT, &data)
    };
    let found = [Kind::META_CONTEXT, Kind::ACK];
    for queries in [&[][..], &["base:"], &["base:allocation"], &["qemu:x", "base:allocation"]] {
        assert_eq!(kinds(&mut peer, &list(queries)), found, "{queries:?}");
    }
    for queries in [&["qemu:"][..], &["base:other"], &["nonsense"], &[""]] {
        assert_eq!(kinds(&mut peer, &list(queries)), [Kind::ACK], "{queries:?}");
    }
    for queries in [&[][..], &["base:"], &["base:dirty"]] {
        assert_eq!(kinds(&mut peer, &set_context("plain", queries)), [Kind::ACK], "{queries:?}");
    }
    peer.send(&set_context("plain", &["base:allocation", "base:allocation"]));
    let replies = option_replies(&peer.take());
    assert_eq!(replies.len(), 2);
    let context = MetaContext::decode(&replies[0].2).unwrap();
    assert_eq!((context.id, context.name), (1, "base:allocation"));
    assert_eq!(kinds(&mut peer, &set_context("nothing", &["x:"])), [Kind::ERR_UNKNOWN]);
}

#[test]
fn a_handshake_has_so_many_options() {
    let limits = Limits { options: 5, ..Limits::default() };
    let mut peer = Peer::new(&server(limits, Tls::Off));
    peer.send(&ClientFlags(3).encode());
    for _ in 0..5 {
        peer.send(&option(OptionCode(99), b""));
        assert!(!peer.out.close);
    }
    peer.send(&option(OptionCode(99), b""));
    assert!(peer.out.close);
}

#[test]
fn a_client_without_a_place_is_told_why_by_every_option() {
    let server = server(Limits::default(), Tls::Off);
    let mut peer = Peer::over(&server, server.refusal("no place"));
    assert_eq!(peer.take().len(), Greeting::BYTES, "it is greeted");
    peer.send(&ClientFlags(3).encode());
    for code in [OptionCode::STARTTLS, OptionCode::STRUCTURED_REPLY, OptionCode::LIST] {
        peer.send(&option(code, b""));
        let refusal = (code, Kind::ERR_POLICY, b"no place".to_vec());
        assert_eq!(option_replies(&peer.take()), [refusal]);
    }
    assert_eq!(kinds(&mut peer, &go("")), [Kind::ERR_POLICY]);
    assert!(peer.session.is_negotiating() && !peer.out.close);
    peer.send(&option(OptionCode::EXPORT_NAME, b""));
    assert!(peer.out.close && peer.take().is_empty(), "this option can have no reason");
}

#[test]
fn stopping_ends_a_handshake() {
    let mut peer = haggling();
    peer.session.shutdown(&mut peer.out);
    assert!(peer.out.close && !peer.session.wants_input());
}

#[test]
fn a_server_checks_what_it_is_to_serve() {
    let make = |exports| {
        NbdServer::new(exports, Tls::Off, Limits::default(), BufPool::default()).unwrap_err()
    };
    assert_eq!(make(Vec::new()), ServerError::NoExport);
    assert_eq!(make(vec![export("a", 1), export("a", 2)]), ServerError::SameName("a".into()));
    assert_eq!(make(vec![export("a\0", 1)]), ServerError::BadName("a\0".into()));
    assert!(matches!(make(vec![export(&"a".repeat(4097), 1)]), ServerError::BadName(_)));
}

#[test]
fn an_export_may_itself_have_the_empty_name() {
    let exports = vec![export("a", 512), export("", 1024)];
    let server = NbdServer::new(exports, Tls::Off, Limits::default(), BufPool::default()).unwrap();
    let mut peer = Peer::new(&server);
    peer.take();
    peer.send(&ClientFlags(3).encode());
    let replies = information(&mut peer, &info(OptionCode::INFO, "", &[]));
    assert!(matches!(Info::decode(&replies[0]), Ok(Info::Export { size: 1024, .. })));
}
