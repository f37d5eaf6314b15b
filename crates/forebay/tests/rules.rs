//! Rules for requests with real clients: by process, user, address, certificate, place and length.

#[path = "support/disk.rs"]
mod disk;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::process::Command;

use disk::{can_mount, disk_of, file, serve, transports};
use support::nbd::Nbd;
use support::{Place, Server, client, forebay};
use tools::{have, skip};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A counter of the whole cache.
fn counter(server: &Server, name: &str) -> u64 {
    server.status()["counters"][name].as_u64().unwrap_or_else(|| panic!("{name} is counted"))
}

/// For each rule the requests that it decided on.
fn decided(server: &Server) -> Vec<u64> {
    let rules: serde_json::Value =
        serde_json::from_str(&server.ask(&["rules", "--json"])).expect("JSON");
    let rules = rules.as_array().expect("a list").iter();
    rules.map(|rule| rule["requests"].as_u64().expect("a number")).collect()
}

/// How many of the reads that `act` makes have bypassed the cache by a rule.
fn bypassed(server: &Server, act: impl FnOnce()) -> u64 {
    let before = counter(server, "bypassed_rule");
    act();
    counter(server, "bypassed_rule") - before
}

fn set(server: &Server, rules: &str) {
    server.ask(&["set", &format!("rules={rules}")]);
}

#[test]
fn the_first_rule_that_matches_decides_until_it_is_removed() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it connects");
    let mut read = |offset: u64, len: u64| {
        nbd.read(offset, &mut vec![0; len as usize]).expect("it reads");
    };
    assert!(server.ask(&["rules"]).contains("no rules"));
    set(&server, "cache range=..1MiB; bypass size=64KiB..; bypass range=8MiB..9MiB operation=read");
    assert_eq!(bypassed(&server, || read(0, 64 * KIB)), 0, "the first rule");
    assert_eq!(bypassed(&server, || read(2 * MIB, 64 * KIB)), 1, "the second");
    assert_eq!(bypassed(&server, || read(8 * MIB, 4 * KIB)), 1, "the third");
    assert_eq!(bypassed(&server, || read(9 * MIB, 4 * KIB)), 0, "none");
    assert_eq!(decided(&server), [1, 1, 1]);
    // What bypassed is not in the cache, and what is there is used all the same.
    let misses = counter(&server, "primary_read_blocks");
    read(2 * MIB, 4 * KIB);
    assert_eq!(counter(&server, "primary_read_blocks"), misses + 1);
    read(2 * MIB, 4 * KIB);
    assert_eq!(bypassed(&server, || read(0, 64 * KIB)), 0);
    assert_eq!(counter(&server, "primary_read_blocks"), misses + 1);
    let shown = server.ask(&["rules"]);
    assert!(shown.contains("cache range=..1MiB\n"), "{shown}");
    set(&server, "");
    assert_eq!(bypassed(&server, || read(3 * MIB, 64 * KIB)), 0);
    assert!(server.ask(&["rules"]).contains("no rules"));
    server.stop(&[]);
}

#[test]
fn rules_are_kept_and_wrong_ones_refused() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    set(&server, "bypass process=\"my backup\"; cache volume=disk");
    for (wrong, says) in [
        ("bypass proc=x", "there is no condition"),
        ("deny user=root", "begins with cache or bypass"),
        ("bypass volume=other", "use one of: disk"),
        ("bypass user=no-such-user", "no-such-user"),
    ] {
        let control = server.control_argument();
        let refused = forebay(&["set", &format!("rules={wrong}"), &control]);
        assert!(matches!(refused.status.code(), Some(1 | 2)), "{wrong}");
        let refused = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.contains(says), "{wrong}: {refused}");
    }
    server.stop(&[]);
    let server = place.start(&arguments);
    let shown = server.ask(&["rules"]);
    assert!(shown.contains("bypass process=\"my backup\"\n"), "{shown}");
    assert!(shown.contains("cache volume=disk\n"), "{shown}");
    server.ask(&["set", "rules=default"]);
    assert!(server.ask(&["rules"]).contains("no rules"));
    server.stop(&[]);
}

#[test]
fn clients_of_sockets_are_known_by_their_process_and_address() {
    if !have(&["qemu-img", "nbdcopy"]) {
        return;
    }
    let (place, mut arguments) = Place::with_disk();
    arguments.extend(["--nbd".to_owned(), "tcp:127.0.0.1:0".to_owned()]);
    let server = place.start(&arguments);
    let copy = || {
        client("nbdcopy", &[&place.uri(), "null:"]);
    };
    let convert = |uri: &str| {
        let to = place.text("copy.img");
        client("qemu-img", &["convert", "-n", "-W", "-O", "raw", "--target-is-zero", uri, &to]);
    };
    place.make("copy.img", fs::metadata(place.path("disk.img")).expect("a disk").len());
    set(&server, "bypass process=nbdcopy");
    assert!(bypassed(&server, copy) > 0);
    assert_eq!(bypassed(&server, || convert(&place.uri())), 0);
    set(&server, "bypass executable=/usr/bin/qemu*");
    assert_eq!(bypassed(&server, copy), 0);
    assert!(bypassed(&server, || convert(&place.uri())) > 0);
    set(&server, "bypass user=root");
    assert_eq!(bypassed(&server, copy) > 0, rustix::process::geteuid().is_root());
    let tcp = format!("nbd://127.0.0.1:{}/disk", server.port());
    assert_eq!(bypassed(&server, || convert(&tcp)), 0, "over TCP the user is unknown");
    set(&server, "bypass client=127.0.0.0/8");
    assert!(bypassed(&server, || convert(&tcp)) > 0);
    assert_eq!(bypassed(&server, copy), 0);
    // A client that is there already is subject to the new rules at once.
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it connects");
    let mut read = || nbd.read(0, &mut [0; 4096]).expect("it reads");
    assert_eq!(bypassed(&server, &mut read), 0);
    set(&server, "bypass process=*");
    assert_eq!(bypassed(&server, &mut read), 1);
    server.stop(&[]);
}

#[test]
fn clients_are_known_by_their_certificate() {
    if !have(&["openssl", "nbdinfo"]) {
        return;
    }
    let (place, mut arguments) = Place::with_disk();
    let directory = place.path("");
    let script = include_str!("../../frontend/nbd/tests/support/certificates.sh");
    let made = Command::new("sh").args(["-c", script]).current_dir(&directory).output();
    assert!(made.expect("a shell").status.success());
    let text = |name: &str| place.text(name);
    for (flag, value) in [
        ("--nbd", "tcp:127.0.0.1:0".to_owned()),
        ("--tls", "required".to_owned()),
        ("--tls-cert", text("server-cert.pem")),
        ("--tls-key", text("server-key.pem")),
        ("--tls-ca", text("ca-cert.pem")),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    let server = place.start(&arguments);
    let uri =
        format!("nbds://localhost:{}/disk?tls-certificates={}", server.port(), directory.display());
    let copy = || {
        client("nbdcopy", &[&uri, "null:"]);
    };
    set(&server, "bypass certificate=client");
    assert!(bypassed(&server, copy) > 0);
    set(&server, "bypass certificate=other");
    assert_eq!(bypassed(&server, copy), 0);
    server.stop(&[]);
}

#[test]
fn users_of_a_file_are_known_by_their_process() {
    if !can_mount() {
        return;
    }
    let (place, _cleanup, _) = disk_of(64 * MIB);
    for transport in transports() {
        let more = ["--fuse-transport", transport];
        let server = place.start(&serve(&place, "primary", &more));
        let from = format!("if={}", file(&place).display());
        let dd = || {
            client("dd", &[&from, "of=/dev/null", "bs=64k", "count=16", "iflag=direct"]);
        };
        let cat = || {
            let read = format!("head -c 65536 {} > /dev/null", file(&place).display());
            client("sh", &["-c", &read]);
        };
        set(&server, "bypass process=dd");
        assert_eq!(bypassed(&server, dd), 16, "{transport}");
        assert_eq!(bypassed(&server, cat), 0, "{transport}");
        set(&server, "bypass user=12345; bypass executable=/usr/bin/head");
        assert_eq!(bypassed(&server, dd), 0, "{transport}");
        assert!(bypassed(&server, cat) > 0, "{transport}");
        let group = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        if let Some((_, group)) = group.lines().find_map(|line| line.split_once("0::")) {
            set(&server, &format!("bypass cgroup=\"{group}\""));
            assert_eq!(bypassed(&server, dd), 16, "{transport}");
        } else {
            skip("this process has no control group of version 2");
        }
        server.stop(&[]);
    }
}
