//! A cache device that fails while a server uses it, in each way and mode: clients read correct
//! data or get an error, no flushed data is lost, and in the end the primary has all of it.

#[path = "support/sick.rs"]
mod sick;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;
use sick::{Failure, Sick};
use support::nbd::Nbd;
use support::{Place, Server, noise};
use tools::{Tmpfs, have};

const BLOCK: u64 = 4096;
const CACHE: u64 = 32 << 20;
const DISK: u64 = 64 << 20;
/// Blocks written before the failure: more than the RAM tier of 4 MiB holds.
const BLOCKS: u64 = 1500;

/// Offset of block `number`: blocks are apart, so that they do not form a sequential stream.
fn place_of(number: u64) -> u64 {
    number * 7919 % (DISK / BLOCK) * BLOCK
}

fn content(number: u64, version: u64) -> Vec<u8> {
    noise(number * 1000 + version, BLOCK as usize)
}

fn connect(place: &Place) -> Nbd {
    Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves")
}

fn write(nbd: &mut Nbd, numbers: std::ops::Range<u64>, version: u64) {
    for number in numbers {
        nbd.write(place_of(number), &content(number, version), false).expect("it is written");
    }
    nbd.flush().expect("it is flushed");
}

/// Reads the blocks, which must be correct; returns the number of blocks that cannot be read.
fn read(nbd: &mut Nbd, numbers: std::ops::Range<u64>, version: u64) -> u64 {
    let mut bytes = vec![0; BLOCK as usize];
    let mut errors = 0;
    for number in numbers {
        match nbd.read(place_of(number), &mut bytes) {
            Ok(()) => assert!(bytes == content(number, version), "block {number} is wrong"),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(5), "block {number}: {error}");
                errors += 1;
            }
        }
    }
    errors
}

/// Checks that the primary alone holds the blocks.
fn check_primary(place: &Place, numbers: std::ops::Range<u64>, version: u64) {
    let disk = fs::read(place.path("disk.img")).expect("it is there");
    for number in numbers {
        let at = place_of(number) as usize;
        let found = &disk[at..at + BLOCK as usize];
        assert!(found == content(number, version), "block {number} is wrong on the primary");
    }
}

/// Waits until the status satisfies `is_so`.
fn until(server: &Server, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let limit = Instant::now() + Duration::from_secs(30);
    loop {
        let status = server.status();
        if is_so(&status) {
            return status;
        }
        assert!(Instant::now() < limit, "{what}: not in time: {status}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn healthy(health: &'static str) -> impl Fn(&Value) -> bool {
    move |status| status["health"] == health
}

fn stop(server: Server) {
    server.stop(&[]);
}

/// A server in `mode` on a cache device that can be made to fail.
fn with_sick_cache(mode: &str) -> Option<(Place, Sick, Vec<String>)> {
    if !have(&["nbdkit", "nbdfuse", "fusermount3"]) {
        return None;
    }
    let place = Place::new();
    place.make("disk.img", DISK);
    let sick = Sick::mount(&place, CACHE)?;
    let mut arguments = place.serve("disk.img", "cache.img");
    arguments.push(format!("--mode={mode}"));
    Some((place, sick, arguments))
}

/// The cache fails in a way that loses nothing; in the end the primary is used directly.
fn is_done_without(mode: &str, failure: Failure) {
    let Some((place, sick, arguments)) = with_sick_cache(mode) else { return };
    let server = place.start(&arguments);
    let mut nbd = connect(&place);
    write(&mut nbd, 0..BLOCKS, 1);
    assert_eq!(read(&mut nbd, 0..BLOCKS, 1), 0);
    sick.fail(failure);
    // No client gets an error: the primary takes all writes that the cache cannot.
    write(&mut nbd, BLOCKS..BLOCKS + 100, 1);
    assert_eq!(read(&mut nbd, 0..BLOCKS, 1), 0, "nothing was lost");
    if mode != "pass-through" {
        let status = until(&server, "without the cache", healthy("detached"));
        assert_eq!(status["cache"]["dirty_bytes"], 0);
        assert!(server.ask(&["status"]).contains("used without it"));
    }
    write(&mut nbd, 0..100, 2);
    assert_eq!(read(&mut nbd, 0..100, 2) + read(&mut nbd, 100..BLOCKS + 100, 1), 0);
    check_primary(&place, 0..100, 2);
    check_primary(&place, 100..BLOCKS + 100, 1);
    drop(nbd);
    stop(server);

    // The device works again. Its content is out of date and must not be used.
    sick.heal();
    let server = place.start(&arguments);
    let mut nbd = connect(&place);
    assert_eq!(server.status()["health"], "good");
    assert_eq!(read(&mut nbd, 0..100, 2) + read(&mut nbd, 100..BLOCKS + 100, 1), 0);
    write(&mut nbd, 50..150, 3);
    drop(nbd);
    server.stop(&["--drain"]);
    check_primary(&place, 0..50, 2);
    check_primary(&place, 50..150, 3);
    check_primary(&place, 150..BLOCKS + 100, 1);
}

#[test]
fn a_cache_that_cannot_be_written_is_emptied_and_done_without_in_write_back() {
    is_done_without("write-back", Failure::Writes);
}

#[test]
fn a_cache_that_cannot_be_written_is_emptied_and_done_without_in_write_only() {
    is_done_without("write-only", Failure::Writes);
}

#[test]
fn a_cache_that_vanishes_is_done_without_in_write_through() {
    is_done_without("write-through", Failure::Vanished);
}

#[test]
fn a_cache_that_vanishes_is_done_without_in_write_around() {
    is_done_without("write-around", Failure::Vanished);
}

#[test]
fn a_cache_that_vanishes_does_not_matter_in_pass_through() {
    is_done_without("pass-through", Failure::Vanished);
}

/// Dirty blocks are out of reach while the device is gone: clients get errors, never the primary's
/// older data. When the device returns, so do the blocks, and only then may the server detach it.
#[test]
fn a_cache_that_vanishes_with_dirty_blocks_says_so_and_keeps_them() {
    let Some((place, sick, arguments)) = with_sick_cache("write-back") else { return };
    // Until the failure the primary is slow, so that there are dirty blocks.
    let mut slow = arguments.clone();
    slow[1] += "?emulate=hdd";
    let server = place.start(&slow);
    let mut nbd = connect(&place);
    write(&mut nbd, 0..BLOCKS, 2);
    sick.fail(Failure::Vanished);
    // Writes from now on go to the primary.
    nbd.write(place_of(BLOCKS), &content(BLOCKS, 1), false).expect("the primary takes it");
    let errors = read(&mut nbd, 0..BLOCKS, 2);
    assert!(errors > 0, "blocks that are on the cache alone cannot be read");
    let status = until(&server, "the failure is seen", healthy("draining"));
    let at_risk = status["cache"]["dirty_bytes"].as_u64().unwrap_or_default()
        + status["cache"]["fenced_bytes"].as_u64().unwrap_or_default();
    assert!(at_risk > 0, "{status}");
    assert!(server.ask(&["status"]).contains("WRONG    the cache device failed"));
    let mut bytes = vec![1; BLOCK as usize];
    nbd.read(place_of(BLOCKS + 1), &mut bytes).expect("the primary has what was never written");
    assert_eq!(bytes, [0; BLOCK as usize]);
    // Over a block that cannot be read: it is no longer lost.
    let unread = (0..BLOCKS).rev().find(|&number| nbd.read(place_of(number), &mut bytes).is_err());
    let unread = unread.expect("some cannot be read");
    nbd.write(place_of(unread), &content(unread, 3), true).expect("the primary takes it");
    assert_eq!(read(&mut nbd, unread..unread + 1, 3), 0);
    drop(nbd);
    server.kill();

    sick.heal();
    let server = place.start(&arguments);
    let mut nbd = connect(&place);
    let mut all = || {
        let rest = read(&mut nbd, 0..unread, 2) + read(&mut nbd, unread + 1..BLOCKS, 2);
        rest + read(&mut nbd, unread..unread + 1, 3) + read(&mut nbd, BLOCKS..BLOCKS + 1, 1)
    };
    assert_eq!(
        all(),
        0,
        "nothing was lost, and the log does not count for what was written past it"
    );
    let status = until(&server, "it is emptied", healthy("detached"));
    assert_eq!(status["cache"]["dirty_bytes"], 0);
    assert_eq!(all(), 0);
    drop(nbd);
    stop(server);
    check_primary(&place, 0..unread, 2);
    check_primary(&place, unread..unread + 1, 3);
    check_primary(&place, unread + 1..BLOCKS, 2);
    check_primary(&place, BLOCKS..BLOCKS + 1, 1);
    let server = place.start(&arguments);
    assert_eq!(server.status()["health"], "good", "it is made anew");
}

/// The cache's file is truncated by another process. Clean blocks come from the primary; dirty ones
/// come from RAM, or give errors.
#[test]
fn a_cache_file_that_is_cut_gives_errors_and_never_other_data() {
    let place = Place::new();
    place.make("disk.img", DISK);
    let arguments = place.serve("disk.img", "cache.img,size=32MiB");
    let server = place.start(&arguments);
    let mut nbd = connect(&place);
    write(&mut nbd, 0..BLOCKS, 1);
    server.ask(&["drain", "disk"]);
    write(&mut nbd, 0..100, 2);
    let file = fs::File::options().write(true).open(place.path("cache.img"));
    file.and_then(|file| file.set_len(0)).expect("it can be cut");
    read(&mut nbd, 0..100, 2);
    assert_eq!(read(&mut nbd, 100..BLOCKS, 1), 0, "the primary has them");
}

/// A sparse cache file on a file system that other data fills.
#[test]
fn a_file_system_that_fills_up_is_as_a_device_that_cannot_be_written() {
    let place = Place::new();
    let Some(_mounted) = Tmpfs::mount(&place.path("small"), "24m") else { return };
    place.make("disk.img", DISK);
    let said = place.refuse(&place.serve("disk.img", "small/new,size=32MiB"));
    assert!(said.contains("No space left") || said.contains("no space left"), "{said}");
    let left = fs::metadata(place.path("small/new")).map_or(0, |file| file.len());
    assert_eq!(left, 0, "nothing half made stays");
    let _ = fs::remove_file(place.path("small/new"));

    place.make("small/cache.img", CACHE);
    fs::write(place.path("small/other"), noise(1, 16 << 20)).expect("there is room");
    let arguments = place.serve("disk.img", "small/cache.img");
    let server = place.start(&arguments);
    let mut nbd = connect(&place);
    // No client notices where the space ends.
    write(&mut nbd, 0..BLOCKS * 2, 1);
    assert_eq!(read(&mut nbd, 0..BLOCKS * 2, 1), 0);
    let status = until(&server, "without the cache", healthy("detached"));
    assert_eq!(status["cache"]["dirty_bytes"], 0);
    nbd.flush().expect("the primary has it");
    drop(nbd);
    stop(server);
    check_primary(&place, 0..BLOCKS * 2, 1);
}

#[test]
fn a_read_only_cache_is_refused_and_left_alone() {
    let place = Place::new();
    let Some(mounted) = Tmpfs::mount(&place.path("small"), "40m") else { return };
    place.make("disk.img", DISK);
    let arguments = place.serve("disk.img", "small/cache.img,size=32MiB");
    let server = place.start(&arguments);
    let mut nbd = connect(&place);
    write(&mut nbd, 0..100, 1);
    drop(nbd);
    server.kill();
    mounted.remount(true);
    let said = place.refuse(&arguments);
    assert!(said.contains("cache") && said.to_lowercase().contains("read-only"), "{said}");
    mounted.remount(false);
    let server = place.start(&arguments);
    assert_eq!(read(&mut connect(&place), 0..100, 1), 0);
    drop(server);
}
