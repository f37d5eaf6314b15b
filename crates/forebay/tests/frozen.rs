//! An NBD server that is stopped (SIGSTOP) holds its connections and answers nothing. Its volume
//! waits; the others do not notice, at a start and at a hand-over.

#[path = "support/nbdkit.rs"]
mod nbdkit;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use nbdkit::Nbdkit;
use support::nbd::Nbd;
use support::{Place, Server, noise, until};
use tools::have;

const MIB: u64 = 1 << 20;

/// The SAN: a disk in memory.
fn start_san(place: &Place) -> Nbdkit {
    Nbdkit::start(&place.path("san.sock"), &["memory", "16M"])
}

/// The arguments to serve `a`, behind an NBD server, and `b`, a file, with a device that is silent
/// for so long called silent.
fn serve(place: &Place, patience: &str) -> Vec<String> {
    place.make("b.img", 16 * MIB);
    let text = format!(
        "[cache]\npath = {:?}\nsize = \"32MiB\"\nstate_dir = {:?}\nwrite_cache_depth = \"1h\"\n\
         [memory]\nram = \"4MiB\"\n\
         [server]\nnbd = [\"unix:{}\"]\nshards = 2\npatience = {patience:?}\n\
         [control]\nsocket = {:?}\n\
         [[volume]]\nname = \"a\"\nprimary = \"nbd+unix:///?socket={}\"\n\
         [[volume]]\nname = \"b\"\nprimary = {:?}\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("nbd.sock"),
        place.text("control.sock"),
        place.text("san.sock"),
        place.text("b.img"),
    );
    fs::write(place.path("forebay.toml"), text).expect("it can be written");
    vec!["serve".to_owned(), format!("--config={}", place.text("forebay.toml"))]
}

fn connect(place: &Place, volume: &str) -> Nbd {
    Nbd::connect(&place.path("nbd.sock"), volume).expect("it serves")
}

fn check(nbd: &mut Nbd, expected: &[u8]) {
    let mut found = vec![0; expected.len()];
    nbd.read(MIB, &mut found).expect("it is read");
    assert!(found == expected);
}

/// Serves both volumes, writes to each, and stops. The bytes written to `a` and to `b`.
fn write_both(place: &Place, arguments: &[String]) -> [Vec<u8>; 2] {
    let server = place.start(arguments);
    let written = [noise(1, 64 << 10), noise(2, 64 << 10)];
    for (volume, bytes) in ["a", "b"].into_iter().zip(&written) {
        connect(place, volume).write(MIB, bytes, true).expect("it is written");
    }
    server.stop(&[]);
    written
}

/// Starts soon although the primary of `a` does not answer, and serves what was written: `a` from
/// the cache alone. The server, and a client of `a`.
fn start_without_a(place: &Place, arguments: &[String], written: &[Vec<u8>; 2]) -> (Server, Nbd) {
    let before = Instant::now();
    let server = place.start(arguments);
    let took = before.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}");
    check(&mut connect(place, "b"), &written[1]);
    let mut client = connect(place, "a");
    check(&mut client, &written[0]);
    client.read(8 * MIB, &mut [0; 4096]).expect_err("only the primary has it");
    assert_eq!(server.status()["volumes"][0]["primary_health"]["state"], "away");
    (server, client)
}

/// Regression: a start waited ten seconds for such a server before it served anybody.
#[test]
fn a_server_that_is_stopped_delays_the_start_of_no_other_volume() {
    if !have(&["nbdkit"]) {
        return;
    }
    let place = Place::new();
    let san = start_san(&place);
    let arguments = serve(&place, "30s");
    let written = write_both(&place, &arguments);

    san.signal("STOP");
    let (server, mut frozen) = start_without_a(&place, &arguments, &written);

    san.signal("CONT");
    server.log("volume a: its primary is back");
    until("it is used", || frozen.read(8 * MIB, &mut [0; 4096]).is_ok());
    server.stop(&["--drain"]);
}

/// The SAN: a disk in a file. Its reads take as long as given.
fn start_san_with(place: &Place, delay: &[&str]) -> Nbdkit {
    let disk = place.text("a.img");
    let plugin = [&["--filter=delay", "file", &disk][..], delay].concat();
    Nbdkit::start(&place.path("san.sock"), &plugin)
}

/// Regression: a server that greets clients, and then answers none of their reads, let a start wait
/// for a minute, and refused it then for all volumes.
#[test]
fn a_server_that_answers_no_read_delays_the_start_of_no_other_volume() {
    if !have(&["nbdkit"]) {
        return;
    }
    let place = Place::new();
    place.make("a.img", 16 * MIB);
    let san = start_san_with(&place, &[]);
    let arguments = serve(&place, "30s");
    let written = write_both(&place, &arguments);

    drop(san);
    let san = start_san_with(&place, &["rdelay=3600"]);
    let (server, mut silent) = start_without_a(&place, &arguments, &written);

    drop(san);
    let _san = start_san_with(&place, &[]);
    server.log("volume a: its primary is back");
    until("it is used", || silent.read(8 * MIB, &mut [0; 4096]).is_ok());
    server.stop(&["--drain"]);
    let disk = fs::read(place.path("a.img")).expect("it is a file");
    assert!(disk[MIB as usize..][..written[0].len()] == written[0]);
}

/// Regression: the server was killed after twenty seconds, as its shards waited for the primary,
/// and the connections of all clients broke.
#[test]
fn a_hand_over_keeps_the_clients_of_the_other_volumes() {
    if !have(&["nbdkit"]) {
        return;
    }
    let place = Place::new();
    let san = start_san(&place);
    let server = place.start_kept(&serve(&place, "30s"));
    let others = noise(2, 64 << 10);
    // On both shards, and not only on that which waits.
    let mut healthy: Vec<Nbd> = (0..4).map(|_| connect(&place, "b")).collect();
    healthy[0].write(MIB, &others, true).expect("it is written");
    let upgrade = |healthy: &mut Vec<Nbd>| {
        let before = Instant::now();
        server.ask(&["upgrade", env!("CARGO_BIN_EXE_forebay")]);
        let took = before.elapsed();
        assert!(took < Duration::from_secs(19), "{took:?}");
        healthy.iter_mut().for_each(|nbd| check(nbd, &others));
    };
    let mut frozen = connect(&place, "a");
    san.signal("STOP");
    let waiter = thread::spawn(move || frozen.read(8 * MIB, &mut [0; 4096]));
    thread::sleep(Duration::from_millis(300));

    upgrade(&mut healthy);
    waiter.join().expect("it ends").expect_err("it is cut off");

    // Idle, and nothing known of the server's stop: nobody asks it for long.
    san.signal("CONT");
    server.log("volume a: its primary is back");
    san.signal("STOP");
    upgrade(&mut healthy);
    san.signal("CONT");
    server.log("volume a: its primary is back");
    server.stop(&[]);
}

/// Regression: the status called the primary good while all requests waited for it.
#[test]
fn a_primary_that_leaves_requests_unanswered_is_a_problem() {
    if !have(&["nbdkit"]) {
        return;
    }
    let place = Place::new();
    let san = start_san(&place);
    let server = place.start(&serve(&place, "1s"));
    let mut frozen = connect(&place, "a");
    san.signal("STOP");
    let waiter = thread::spawn(move || frozen.read(8 * MIB, &mut [0; 4096]));
    let health = || server.status()["volumes"][0]["primary_health"].clone();
    until("it is silent", || health()["state"] == "silent");
    assert!(health()["silent_seconds"].as_f64().is_some_and(|seconds| seconds >= 1.0));
    let shown = server.ask(&["status"]);
    assert!(shown.contains("has not answered for"), "{shown}");

    san.signal("CONT");
    waiter.join().expect("it ends").expect("it is answered");
    until("it is good", || health()["state"] == "good");
    server.stop(&[]);
}
