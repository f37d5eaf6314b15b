//! TLS: what must be encrypted is encrypted, negotiations before TLS are void, and real clients
//! work.
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

mod support;

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use forebay_frontend_nbd::{Limits, Tls, TlsConfig, TlsError};
use forebay_nbd_wire::{
    ClientFlags, Command as C, Info, NbdError, OptionCode as O, OptionReplyKind as Kind, Request,
    TransmissionFlags as T,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use support::daemon::{Daemon, TempDir, fail, have, make_certificates, succeed};
use support::{Peer, answers, go, option, option_replies, request, server, set_context};

/// Certificates, if the tool to create them is installed.
fn certificates() -> Option<TempDir> {
    have(&["openssl"]).then(|| {
        let directory = TempDir::new();
        make_certificates(&directory.0);
        directory
    })
}

fn file(directory: &Path, name: &str) -> Vec<u8> {
    std::fs::read(directory.join(name)).unwrap()
}

fn config(directory: &Path, client_ca: Option<&str>) -> TlsConfig {
    let ca = client_ca.map(|name| file(directory, name));
    let (cert, key) = (file(directory, "server-cert.pem"), file(directory, "server-key.pem"));
    TlsConfig::from_pem(&cert, &key, ca.as_deref()).unwrap()
}

/// A client's TLS around a peer.
struct Wrapped {
    peer: Peer,
    client: ClientConnection,
    /// Number of bytes to transfer at a time.
    piece: usize,
    /// The server's output inside TLS.
    said: Vec<u8>,
    /// Whether the server closed TLS in order.
    closed: bool,
}

impl Wrapped {
    /// A client after `STARTTLS` and the TLS handshake, or the error of that handshake.
    fn start(
        mut peer: Peer,
        directory: &Path,
        certified: bool,
        piece: usize,
    ) -> Result<Self, String> {
        peer.send(&option(O::STARTTLS, b""));
        let replies = option_replies(&peer.take());
        assert_eq!(replies, [(O::STARTTLS, Kind::ACK, Vec::new())]);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(&file(directory, "ca-cert.pem")).unwrap())
            .unwrap();
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = if certified {
            let cert = CertificateDer::from_pem_slice(&file(directory, "client-cert.pem")).unwrap();
            let key = PrivateKeyDer::from_pem_slice(&file(directory, "client-key.pem")).unwrap();
            builder.with_client_auth_cert(vec![cert], key).unwrap()
        } else {
            builder.with_no_client_auth()
        };
        let name = ServerName::try_from("localhost").unwrap();
        let client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut wrapped = Self { peer, client, piece, said: Vec::new(), closed: false };
        wrapped.exchange()?;
        Ok(wrapped)
    }

    /// Transfers bytes both ways until neither side has more to send.
    fn exchange(&mut self) -> Result<(), String> {
        loop {
            let mut bytes = Vec::new();
            while self.client.wants_write() {
                self.client.write_tls(&mut bytes).unwrap();
            }
            for piece in bytes.chunks(self.piece) {
                self.peer.send(piece);
            }
            let said = self.peer.take();
            let mut rest = &said[..];
            while !rest.is_empty() {
                self.client.read_tls(&mut rest).unwrap();
                let state = self.client.process_new_packets().map_err(|e| e.to_string())?;
                self.closed |= state.peer_has_closed();
                let before = self.said.len();
                self.said.resize(before + state.plaintext_bytes_to_read(), 0);
                self.client.reader().read_exact(&mut self.said[before..]).unwrap();
            }
            if bytes.is_empty() && said.is_empty() {
                return Ok(());
            }
        }
    }

    /// Sends plain text through TLS and returns the answer.
    fn ask(&mut self, bytes: &[u8]) -> Vec<u8> {
        for part in bytes.chunks(32 << 10) {
            self.client.writer().write_all(part).unwrap();
            self.exchange().unwrap();
        }
        self.exchange().unwrap();
        std::mem::take(&mut self.said)
    }
}

/// A peer that has sent its flags to a server with these TLS rules.
fn haggling(tls: Tls) -> Peer {
    let mut peer = Peer::new(&server(Limits::default(), tls));
    peer.take();
    peer.send(&ClientFlags(3).encode());
    peer
}

/// The attack of CVE-2021-3716, on nbdkit: an attacker on the wire requests structured replies in
/// plain text, which confuse a client that continues in TLS and never requested them.
#[test]
fn what_was_agreed_in_plain_text_is_forgotten() {
    let Some(directory) = certificates() else { return };
    let directory = &directory.0;
    for piece in [usize::MAX, 1] {
        let mut peer = haggling(Tls::Allowed(config(directory, None)));
        peer.send(&option(O::STRUCTURED_REPLY, b""));
        peer.send(&set_context("plain", &["base:allocation"]));
        peer.take();
        let mut tls = Wrapped::start(peer, directory, false, piece).unwrap();
        assert!(tls.peer.session.is_negotiating());
        let refused = option_replies(&tls.ask(&set_context("plain", &["base:allocation"])));
        assert_eq!(refused[0].1, Kind::ERR_INVALID, "structured replies are to be asked for again");
        let again = option_replies(&tls.ask(&option(O::STARTTLS, b"")));
        assert_eq!(again[0].1, Kind::ERR_INVALID);
        let replies = option_replies(&tls.ask(&go("plain")));
        let Info::Export { flags, .. } = Info::decode(&replies[0].2).unwrap() else {
            panic!("an export");
        };
        assert!(!flags.has(T::SEND_DF));
        let status = request(C::BLOCK_STATUS, 1, 0, 512);
        let said = answers(&tls.ask(&status.encode()), &[status]);
        assert_eq!((said[0].error, said[0].structured), (NbdError::EINVAL, false));
    }
}

#[test]
fn data_crosses_tls_in_any_pieces() {
    let Some(directory) = certificates() else { return };
    for piece in [usize::MAX, 1000, 7] {
        let peer = haggling(Tls::Required(config(&directory.0, None)));
        let mut tls = Wrapped::start(peer, &directory.0, false, piece).unwrap();
        tls.ask(&go("plain"));
        let data: Vec<u8> = (0..100_000u32).map(|i| (i % 253) as u8).collect();
        let write = request(C::WRITE, 1, 5, data.len() as u32);
        let said = tls.ask(&[&write.encode()[..], &data].concat());
        assert_eq!(answers(&said, &[write])[0].error, NbdError::OK);
        let reads: Vec<Request> =
            (0..40).map(|i| request(C::READ, i, 5 + i * 2000, 2000)).collect();
        let said = tls.ask(&reads.iter().flat_map(Request::encode).collect::<Vec<_>>());
        for (answer, part) in answers(&said, &reads).iter().zip(data.chunks(2000)) {
            assert_eq!(answer.data, part);
        }
        tls.ask(&request(C::DISC, 0, 0, 0).encode());
        assert!(tls.peer.out.close && tls.closed);
    }
}

#[test]
fn plain_text_while_requests_wait_is_taken_up_again() {
    let Some(directory) = certificates() else { return };
    let limits = Limits { requests: 2, ..Limits::default() };
    let tls = Tls::Required(config(&directory.0, None));
    let mut peer = Peer::new(&server(limits, tls));
    peer.take();
    peer.send(&ClientFlags(3).encode());
    let mut tls = Wrapped::start(peer, &directory.0, false, usize::MAX).unwrap();
    tls.ask(&go("plain"));
    tls.peer.hold = true;
    let reads: Vec<Request> = (0..9).map(|i| request(C::READ, i, 0, 512)).collect();
    let mut said = tls.ask(&reads.iter().flat_map(Request::encode).collect::<Vec<_>>());
    assert!(said.is_empty() && !tls.peer.session.wants_input());
    for _ in 0..9 {
        tls.peer.release();
        tls.peer.held.append(&mut tls.peer.out.ios);
        said.extend(tls.ask(&[]));
    }
    let cookies: Vec<u64> = answers(&said, &reads).iter().map(|a| a.cookie).collect();
    assert_eq!(cookies, (0..9).collect::<Vec<_>>());
}

/// Once a single byte behind the alert kept the thread busy without end.
#[test]
fn what_comes_after_the_closure_alert_is_ignored() {
    let Some(directory) = certificates() else { return };
    let peer = haggling(Tls::Required(config(&directory.0, None)));
    let mut tls = Wrapped::start(peer, &directory.0, false, usize::MAX).unwrap();
    tls.ask(&go("plain"));
    let read = request(C::READ, 7, 0, 512);
    tls.client.writer().write_all(&read.encode()).unwrap();
    tls.client.send_close_notify();
    tls.exchange().unwrap();
    assert_eq!(answers(&tls.said, &[read])[0].error, NbdError::OK, "it came before the alert");
    for bytes in [&[0][..], &[0x17; 5000], &request(C::READ, 8, 0, 512).encode()] {
        tls.peer.send(bytes);
        assert!(tls.peer.take().is_empty(), "nothing of this is answered");
    }
}

#[test]
fn without_tls_nothing_is_told_when_it_is_required() {
    let Some(directory) = certificates() else { return };
    let tls = Tls::Required(config(&directory.0, None));
    for code in [O::LIST, O::STRUCTURED_REPLY, O::INFO, O::GO, O::SET_META_CONTEXT, O(99)] {
        let mut peer = haggling(tls.clone());
        peer.send(&option(code, b"\0\0\0\0\0\0"));
        let replies = option_replies(&peer.take());
        assert_eq!(replies.len(), 1);
        assert_eq!(replies[0].1, Kind::ERR_TLS_REQD, "{code}");
    }
    let mut peer = haggling(tls.clone());
    peer.send(&option(O::EXPORT_NAME, b"plain"));
    assert!(peer.out.close && peer.take().is_empty());
    let mut peer = haggling(tls);
    peer.send(&option(O::ABORT, b""));
    assert_eq!(option_replies(&peer.take())[0].1, Kind::ACK);
}

/// The attack: plain text sent together with `STARTTLS`, to be mistaken for the client's own input
/// once the connection is encrypted.
#[test]
fn plain_text_behind_starttls_ends_the_connection() {
    let Some(directory) = certificates() else { return };
    for injected in [go("plain"), option(O::LIST, b""), b"x".to_vec()] {
        let mut peer = haggling(Tls::Allowed(config(&directory.0, None)));
        peer.send(&[option(O::STARTTLS, b""), injected.clone()].concat());
        assert!(peer.out.close && !peer.session.wants_input());
        let replies = option_replies(&peer.take());
        assert!(replies.iter().all(|(code, ..)| *code == O::STARTTLS), "nothing else is answered");

        // The same bytes a moment later are not valid TLS.
        let mut peer = haggling(Tls::Allowed(config(&directory.0, None)));
        peer.send(&option(O::STARTTLS, b""));
        peer.take();
        peer.send(&injected);
        peer.send(&[0; 64]);
        assert!(peer.out.close);
        let said = peer.take();
        assert!(said.is_empty() || said[0] == 21, "at most an alert: {said:?}");
    }
}

#[test]
fn clients_must_show_a_certificate_when_an_authority_is_named() {
    let Some(directory) = certificates() else { return };
    let directory = &directory.0;
    let start = |ca: &str, certified: bool| {
        let peer = haggling(Tls::Required(config(directory, Some(ca))));
        Wrapped::start(peer, directory, certified, usize::MAX)
            .map(|mut tls| option_replies(&tls.ask(&option(O::LIST, b""))).len())
    };
    assert_eq!(start("ca-cert.pem", true), Ok(5));
    assert!(start("ca-cert.pem", false).unwrap_err().contains("CertificateRequired"));
    assert!(start("other-ca-cert.pem", true).is_err());
}

#[test]
fn a_client_is_known_by_the_names_in_its_certificate() {
    let Some(directory) = certificates() else { return };
    let directory = &directory.0;
    let names = |ca: Option<&str>, certified: bool| {
        let peer = haggling(Tls::Required(config(directory, ca)));
        let tls = Wrapped::start(peer, directory, certified, usize::MAX).unwrap();
        tls.peer.session.certificate_names()
    };
    assert_eq!(names(Some("ca-cert.pem"), true), ["client", "localhost"]);
    assert!(names(None, false).is_empty());
}

#[test]
fn wrong_files_are_told_apart() {
    let Some(directory) = certificates() else { return };
    let read = |name: &str| file(&directory.0, name);
    let (cert, key) = (read("server-cert.pem"), read("server-key.pem"));
    let make = |cert: &[u8], key: &[u8], ca: Option<&[u8]>| {
        TlsConfig::from_pem(cert, key, ca).unwrap_err()
    };
    assert!(matches!(make(b"", &key, None), TlsError::NoCertificate { what: "certificate file" }));
    assert!(matches!(make(&key, &key, None), TlsError::NoCertificate { .. }));
    assert!(matches!(make(&cert, &cert, None), TlsError::Pem { what: "key file", .. }));
    let broken = b"-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n";
    assert!(matches!(make(broken, &key, None), TlsError::Pem { what: "certificate file", .. }));
    assert!(matches!(make(&cert, &read("client-key.pem"), None), TlsError::Unusable(_)));
    let none = make(&cert, &key, Some(b""));
    assert_eq!(none.to_string(), "there is no certificate in the client authority file");
}

#[test]
fn libnbd_and_qemu_come_in_over_tls() {
    if !have(&["nbdinfo", "nbdcopy", "qemu-img", "openssl"]) {
        return;
    }
    let Some(directory) = certificates() else { return };
    let tls = Tls::Required(config(&directory.0, Some("ca-cert.pem")));
    let daemon = Daemon::start(&server(Limits::default(), tls));
    let certificates = directory.0.display();
    let uri = format!("nbds://localhost:{}/plain?tls-certificates={certificates}", daemon.port);
    let json = succeed("nbdinfo", &["--json", &uri]);
    assert!(json.contains("\"TLS\": true"), "{json}");
    assert!(json.contains("\"export-size\": 1048576"), "{json}");

    let image = daemon.path("image");
    std::fs::write(&image, vec![0x3c; 1 << 20]).unwrap();
    let image = image.to_str().unwrap();
    succeed("nbdcopy", &["--connections=4", image, &uri]);
    assert!(daemon.devices[0].lock().unwrap().bytes.iter().all(|&b| b == 0x3c));

    let object = format!("tls-creds-x509,id=t,endpoint=client,dir={certificates}");
    let options =
        format!("driver=nbd,host=localhost,port={},export=plain,tls-creds=t", daemon.port);
    let compare = ["compare", "--object", &object, "--image-opts", &options];
    let image = format!("driver=raw,file.driver=file,file.filename={image}");
    succeed("qemu-img", &[&compare[..], &[&image]].concat());

    let plain = format!("nbd://localhost:{}/plain", daemon.port);
    let complaint = fail("nbdinfo", &[&plain]);
    assert!(complaint.contains("Operation not supported"), "{complaint}");
    let complaint = fail("nbdinfo", &[&format!("nbds://localhost:{}/plain", daemon.port)]);
    assert!(!complaint.is_empty());
}

#[test]
fn a_client_may_stay_in_plain_text_when_that_is_allowed() {
    if !have(&["nbdinfo", "openssl"]) {
        return;
    }
    let Some(directory) = certificates() else { return };
    let daemon =
        Daemon::start(&server(Limits::default(), Tls::Allowed(config(&directory.0, None))));
    assert!(succeed("nbdinfo", &["--json", &daemon.uri("plain")]).contains("\"TLS\": false"));
    let certificates = directory.0.display();
    let uri = format!("nbds://localhost:{}/?tls-certificates={certificates}", daemon.port);
    assert!(succeed("nbdinfo", &["--json", &uri]).contains("\"TLS\": true"));
}
