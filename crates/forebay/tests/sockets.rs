//! A server's sockets: their permissions, as given by its endpoints and its configuration, and what
//! the log says of clients that do not speak the protocol.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;

use support::nbd::Nbd;
use support::{Place, forebay};

#[test]
fn sockets_have_the_mode_the_owner_and_the_group_that_they_are_given() {
    let place = Place::new();
    place.make("disk.img", 16 << 20);
    place.make("cache.img", 64 << 20);
    let me = fs::metadata(place.path("")).expect("it is there");
    // Only root may change the owner of a file.
    let (owner, group) = if me.uid() == 0 { (65534, 65533) } else { (me.uid(), me.gid()) };
    let text = format!(
        "[cache]\npath = \"{}\"\nstate_dir = \"{}\"\n[memory]\nram = \"4MiB\"\n\
         [control]\nsocket = \"{}\"\nmode = \"0640\"\ngroup = \"{group}\"\n\
         [server]\nnbd = [\"unix:{},mode=0606,owner={owner},group={group}\", \"unix:{}\"]\n\
         [[volume]]\nname = \"disk\"\nprimary = \"{}\"\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("control.sock"),
        place.text("nbd.sock"),
        place.text("own.sock"),
        place.text("disk.img"),
    );
    fs::write(place.path("forebay.toml"), text).expect("it can be written");
    let config = format!("--config={}", place.text("forebay.toml"));
    let server = place.start(&["serve".to_owned(), config]);
    let found = |name: &str| {
        let found = fs::metadata(place.path(name)).expect("it is there");
        (found.permissions().mode() & 0o777, found.uid(), found.gid())
    };
    assert_eq!(found("nbd.sock"), (0o606, owner, group));
    assert_eq!(found("own.sock"), (0o660, me.uid(), me.gid()), "unless it is said");
    assert_eq!(found("control.sock"), (0o640, me.uid(), group));
    Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    server.ask(&["stop"]);
}

#[test]
fn a_group_that_is_not_there_is_refused() {
    let place = Place::new();
    place.make("disk.img", 16 << 20);
    let mut arguments = place.serve("disk.img", "cache.img,size=32MiB");
    arguments.push(format!("--nbd=unix:{},group=no-such", place.text("other.sock")));
    let output = forebay(&arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("other.sock: there is no group \"no-such\" in /etc/group"), "{said}");
    assert!(!place.path("cache.img").exists(), "nothing was made");
}

/// Each client that did not speak NBD had a line of its own, so that a scanner filled the log.
#[test]
fn clients_that_break_the_handshake_do_not_fill_the_log() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    for _ in 0..100 {
        let mut client = UnixStream::connect(place.path("nbd.sock")).expect("it connects");
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it is sent");
        // The server may close before it has read all of it.
        let _ = client.read_to_end(&mut Vec::new());
    }
    server.ask(&["stop"]);
    let log = server.log("stopped");
    let lines: Vec<_> = log.lines().filter(|line| line.contains("handshake flags")).collect();
    // A client has two lines, and a thread writes 20 in ten seconds.
    assert!((5..50).contains(&lines.len()), "{log}");
    assert!(
        lines.iter().all(|line| line.contains("client gone") && line.contains("peer")),
        "{log}"
    );
}
