//! A FLUSH must be one: the primary is on an NBD server with a volatile cache, whose power fails
//! while two shards have their own connections to it.

mod support;

use std::time::{Duration, Instant};

use forebay_bench::rig::san::San;
use forebay_block::VolumeId;
use forebay_volume::shard_of;
use support::nbd::Nbd;
use support::{Place, Server, noise};

const EIO: i32 = 5;
const BLOCK: u64 = 4096;
const STRIPE: u64 = 1 << 20;
const SIZE: usize = 32 << 20;
const SHARDS: usize = 2;
/// How late a request lands that outlives a server: after the next one has started.
const LATE: Duration = Duration::from_secs(3);

fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < limit, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The arguments of a server whose primary is the server at `san.sock`.
fn over_san(place: &Place, mode: &str) -> Vec<String> {
    let mut arguments = place.serve("unused", "cache.img,size=32MiB");
    arguments[1] = format!("--primary=nbd+unix:///?socket={}", place.text("san.sock"));
    arguments.push(format!("--mode={mode}"));
    arguments
}

/// A server in write-back that destages at once, and its primary.
fn write_back() -> (Place, San, Vec<String>) {
    let place = Place::new();
    let san = San::start(&place.path("san.sock"), SIZE);
    let mut arguments = over_san(&place, "write-back");
    arguments.push("--write-cache-depth=10ms".to_owned());
    (place, san, arguments)
}

/// The start of the first stripe from the `nth` on that belongs to a shard.
fn stripe_of(shard: usize, nth: u64) -> u64 {
    let mut stripes = (nth..).filter(|&stripe| shard_of(VolumeId(0), stripe, SHARDS) == shard);
    stripes.next().expect("each shard has stripes") * STRIPE
}

/// A write of one shard has completed, unflushed, when the power fails. Both shards reconnect, and
/// the other one writes. The next FLUSH must fail, whichever client sends it, and only that one.
#[test]
fn what_a_broken_connection_lost_is_an_error_of_the_next_flush_of_every_shard() {
    let place = Place::new();
    let san = San::start(&place.path("san.sock"), SIZE);
    let server = place.start(&over_san(&place, "write-around"));
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let bytes = |seed| noise(seed, BLOCK as usize);
    let mut losses = 0;
    for round in 0..12u64 {
        let unlucky = round as usize % SHARDS;
        let (lost, other) = (stripe_of(unlucky, 0), stripe_of(1 - unlucky, 0));
        for at in [lost, other] {
            nbd.write(at, &bytes(round), false).expect("the primary takes it");
        }
        nbd.flush().expect("the primary takes it");
        let at = lost + (1 + round) * BLOCK;
        nbd.write(at, &bytes(round + 100), false).expect("the primary takes it");
        san.cut_power();
        // The server may have been slow, and have flushed on its own.
        let gone = san.durable(at, BLOCK as usize) != bytes(round + 100);
        let mut found = vec![0; BLOCK as usize];
        let far = 100 * BLOCK + round * BLOCK;
        until("one is connected again", || nbd.read(lost + far, &mut found).is_ok());
        until("so is the other", || nbd.write(other + far, &bytes(round), false).is_ok());
        let flushed = nbd.flush();
        if gone {
            losses += 1;
            let error = flushed.expect_err("a completed write is gone");
            assert_eq!(error.raw_os_error(), Some(EIO), "round {round}");
        }
        nbd.flush().expect("it was said once");
        nbd.write(at, &bytes(round + 100), false).expect("the primary takes it");
        nbd.flush().expect("the primary takes it");
        assert!(san.durable(at, BLOCK as usize) == bytes(round + 100), "round {round}");
    }
    assert!(losses > 2, "the power never failed in time");
    server.stop(&[]);
}

/// The power fails repeatedly, each time right after a destage was answered. A block is clean only
/// when it is durable on the primary.
#[test]
fn no_dirty_block_is_clean_by_a_flush_over_another_connection() {
    let place = Place::new();
    let san = San::start(&place.path("san.sock"), SIZE);
    let server = place.start(&over_san(&place, "write-back"));
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mut written = Vec::new();
    for round in 0..4u64 {
        san.cut_after(Some(3 + round));
        for i in 0..16 {
            let at = stripe_of(i as usize % SHARDS, i) + (round * 7 + i) % 200 * BLOCK;
            let bytes = noise(round * 100 + i, BLOCK as usize);
            nbd.write(at, &bytes, false).expect("the cache takes it");
            written.retain(|(other, _)| *other != at);
            written.push((at, bytes));
        }
        nbd.flush().expect("the cache takes it");
        server.ask(&["drain", "disk"]);
        san.cut_power();
        for (at, bytes) in &written {
            assert!(san.durable(*at, BLOCK as usize) == *bytes, "{at} in round {round}");
        }
    }
    assert!(san.cuts() > 4, "the power fails by itself, too");
    server.stop(&[]);
}

/// A destage's connection breaks, and the destage lands late, after a newer write of its block. The
/// client waits for it before it writes again, so that the newer content stays.
#[test]
fn a_request_of_a_broken_connection_does_not_land_on_what_was_written_after_it() {
    let place = Place::new();
    let san = San::start(&place.path("san.sock"), SIZE);
    let server = place.start(&over_san(&place, "write-around"));
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let (old, new) = (noise(1, BLOCK as usize), noise(2, BLOCK as usize));
    san.hold(STRIPE, Duration::from_millis(500));
    nbd.write(STRIPE, &old, false).expect_err("its connection breaks");
    until("it is written", || nbd.write(STRIPE, &new, false).is_ok());
    std::thread::sleep(Duration::from_secs(1));
    assert!(san.shown(STRIPE, BLOCK as usize) == new, "the old write came late");
    drop(server);
}

/// Starts the next server, and checks that what it writes where a request of before is under way
/// stays there when that has had this time to land.
fn newer_stays(place: &Place, san: &San, arguments: &[String], late: Duration) -> Server {
    let server = place.start(arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let new = noise(2, BLOCK as usize);
    nbd.write(STRIPE, &new, true).expect("the cache takes it");
    server.ask(&["drain"]);
    assert!(san.durable(STRIPE, BLOCK as usize) == new, "the drain was none");
    std::thread::sleep(late);
    assert!(san.shown(STRIPE, BLOCK as usize) == new, "the old write came late");
    server
}

/// A server is killed while a destage is under way, which lands after the next server has started.
/// That server waits for it before it writes, so that newer content stays.
#[test]
fn a_request_of_a_killed_server_does_not_land_on_what_the_next_one_has_written() {
    let (place, san, arguments) = write_back();
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let old = noise(1, BLOCK as usize);
    san.outlive(STRIPE, Duration::from_millis(800));
    nbd.write(STRIPE, &old, true).expect("the cache takes it");
    until("it is destaged", || san.holds());
    server.kill();
    let server = newer_stays(&place, &san, &arguments, Duration::from_secs(1));
    server.stop(&["--drain"]);
}

/// Regression: a salvage is killed while one of its writes is under way, which lands after a server
/// has started.
#[test]
fn a_request_of_a_killed_salvage_does_not_land_on_what_the_next_server_has_written() {
    let place = Place::new();
    let san = San::start(&place.path("san.sock"), SIZE);
    let arguments = over_san(&place, "write-back");
    let server = place.start(&[&arguments[..], &["--idle-destage=0s".to_owned()]].concat());
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let old = noise(1, BLOCK as usize);
    nbd.write(STRIPE, &old, true).expect("the cache takes it");
    server.stop(&[]);
    assert!(san.shown(STRIPE, BLOCK as usize) != old, "or this shows nothing");
    san.outlive(STRIPE, LATE);
    let mut salvage = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["salvage", &place.text("cache.img"), "--state", &place.text("state"), "--to"])
        .arg(&arguments[1]["--primary=".len()..])
        .spawn()
        .expect("it runs");
    until("it is written", || san.holds());
    salvage.kill().expect("it runs");
    salvage.wait().expect("it has ended");
    let server = newer_stays(&place, &san, &arguments, LATE);
    server.stop(&["--drain"]);
}

/// A destage's connection breaks, and the server stops in order before the destage lands. The next
/// server waits for it before it writes, so that newer content stays.
#[test]
fn a_request_of_a_stopped_server_does_not_land_on_what_the_next_one_has_written() {
    let (place, san, arguments) = write_back();
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let old = noise(1, BLOCK as usize);
    san.hold(STRIPE, LATE);
    nbd.write(STRIPE, &old, true).expect("the cache takes it");
    until("it is destaged", || san.holds());
    server.stop(&[]);
    let server = newer_stays(&place, &san, &arguments, LATE);
    // The wait is not repeated.
    server.stop(&[]);
    let lists = std::fs::read_dir(place.path("state")).expect("it is there").flatten();
    assert!(lists.into_iter().all(|one| !one.file_name().to_string_lossy().ends_with(".uses")));
}

/// The destage lands after the stop, in a place that is sampled. The next start does not take it
/// for somebody else's.
#[test]
fn a_request_that_lands_after_a_stop_is_no_foreign_change() {
    let (place, san, arguments) = write_back();
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let old = noise(1, BLOCK as usize);
    san.hold(STRIPE, LATE);
    nbd.write(STRIPE, &old, true).expect("the cache takes it");
    until("it is destaged", || san.holds());
    server.stop(&[]);
    until("it lands", || san.shown(STRIPE, BLOCK as usize) == old);
    place.start(&arguments).stop(&["--drain"]);
}

/// A server is killed while a destage to a sampled place is under way, which lands after the next
/// server has started. When that one is killed, too, the change is not taken for somebody else's.
#[test]
fn a_request_that_lands_after_two_kills_is_no_foreign_change() {
    let (place, san, arguments) = write_back();
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let old = noise(1, BLOCK as usize);
    san.outlive(STRIPE, LATE);
    nbd.write(STRIPE, &old, true).expect("the cache takes it");
    until("it is destaged", || san.holds());
    server.kill();
    let server = place.start(&arguments);
    until("it lands", || san.shown(STRIPE, BLOCK as usize) == old);
    server.kill();
    place.start(&arguments).stop(&["--drain"]);
}
