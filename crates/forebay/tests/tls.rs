//! TLS per endpoint: the network requires it, and the Unix socket works without it.

mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::process::Command;

use support::{Place, client};
use tools::have;

/// The configuration from the manual, with files of this place.
fn manual(place: &Place) -> String {
    let manual = include_str!("../../../docs/user/first-use.md");
    let (_, shown) = manual.split_once("```toml\n").expect("it shows a configuration");
    let (shown, _) = shown.split_once("```").expect("it ends");
    let (cert, key) = place.certificate();
    let state = format!("{}\"\nstate_dir = \"{}", place.text("cache.img"), place.text("state"));
    let changes = [
        ("/dev/nvme0n1", state),
        ("4GiB", "4MiB".to_owned()),
        ("/run/forebay/nbd.sock", place.text("nbd.sock")),
        ("tcp:0.0.0.0:10809", "tcp:127.0.0.1:0".to_owned()),
        ("/etc/forebay/cert.pem", cert),
        ("/etc/forebay/key.pem", key),
        ("/dev/sdb", place.text("db.img")),
        ("nbd://san.example:10809/vm", place.text("vm.img")),
    ];
    changes.into_iter().fold(shown.to_owned(), |text, (old, new)| {
        assert!(text.contains(old), "the manual shows {old:?}");
        text.replace(old, &new)
    })
}

#[test]
fn the_configuration_of_the_manual_serves_the_unix_socket_without_tls_and_the_port_with_it() {
    if !have(&["nbdinfo", "openssl"]) {
        return;
    }
    let place = Place::new();
    for (name, size) in [("db.img", 16 << 20), ("vm.img", 16 << 20), ("cache.img", 64 << 20)] {
        place.make(name, size);
    }
    let config = format!("--config={}", place.text("forebay.toml"));
    let control = format!("[control]\nsocket = \"{}\"\n", place.text("control.sock"));
    fs::write(place.path("forebay.toml"), manual(&place) + &control).expect("it can be written");
    let server = place.start(&["serve".to_owned(), config]);

    let unix = format!("nbd+unix:///db?socket={}", place.text("nbd.sock"));
    assert_eq!(client("nbdinfo", &["--size", &unix]).trim(), (16 << 20).to_string());
    let port = server.port();
    let directory = place.text("");
    let tls = format!("nbds://localhost:{port}/vm?tls-certificates={directory}");
    assert_eq!(client("nbdinfo", &["--size", &tls]).trim(), (16 << 20).to_string());
    let plain = Command::new("nbdinfo").arg(format!("nbd://localhost:{port}/db")).output();
    assert!(!plain.expect("it runs").status.success(), "the port says nothing without TLS");
}

#[test]
fn an_endpoint_may_say_otherwise() {
    if !have(&["nbdinfo", "openssl"]) {
        return;
    }
    let place = Place::new();
    place.make("disk.img", 16 << 20);
    let mut arguments = place.serve("disk.img", "cache.img,size=32MiB");
    arguments.retain(|argument| !argument.starts_with("--nbd"));
    arguments.push(format!("--nbd=unix:{},tls=required", place.text("nbd.sock")));
    arguments.push("--nbd=tcp:127.0.0.1:0,tls=off".to_owned());
    let (cert, key) = place.certificate();
    arguments.extend([format!("--tls-cert={cert}"), format!("--tls-key={key}")]);
    let server = place.start(&arguments);
    let plain = Command::new("nbdinfo").arg(place.uri()).output().expect("it runs");
    assert!(!plain.status.success(), "this Unix socket says nothing without TLS");
    client("nbdinfo", &[&format!("nbd://localhost:{}/disk", server.port())]);
}
