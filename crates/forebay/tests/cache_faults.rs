//! A cache device that cannot be written: from the start, or while it serves. The device is a file
//! in memory that is sealed against writing, which no permission of the server can undo.

mod support;

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use support::nbd::Nbd;
use support::{Place, Server, noise};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// A device that can be sealed.
struct Sealable(OwnedFd);

impl Sealable {
    fn new(mib: u64) -> Self {
        let file = memfd_create("cache", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC);
        let file = file.expect("memory can be had");
        ftruncate(&file, mib * MIB).expect("it can be so long");
        Self(file)
    }

    /// Its path for other processes.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Makes every write fail from now on.
    fn seal(&self) {
        fcntl_add_seals(&self.0, SealFlags::FUTURE_WRITE).expect("it can be sealed");
    }
}

fn serve_on(place: &Place, cache: &Sealable) -> Vec<String> {
    let mut arguments = place.serve("disk.img", "unused");
    arguments[2] = format!("--cache={}", cache.path());
    arguments
}

fn block(at: u64) -> (u64, Vec<u8>) {
    (at * 17 % 1000 * BLOCK, noise(at + 1, BLOCK as usize))
}

fn check_blocks(nbd: &mut Nbd, count: u64) {
    let mut found = vec![0; BLOCK as usize];
    for (offset, bytes) in (0..count).map(block) {
        nbd.read(offset, &mut found).expect("it can be read");
        assert!(found == bytes, "the block at {offset} is wrong");
    }
}

fn until_detached(server: &Server) {
    let limit = Instant::now() + Duration::from_secs(30);
    while server.status()["health"] != "detached" {
        assert!(Instant::now() < limit, "the cache must be detached: {}", server.status());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_cache_that_cannot_be_written_is_refused_at_the_start() {
    let place = Place::new();
    place.make("disk.img", 16 * MIB);
    let cache = Sealable::new(32);
    cache.seal();
    let said = place.refuse(&serve_on(&place, &cache));
    assert!(said.contains("cannot be written"), "{said}");
}

#[test]
fn a_cache_that_fails_while_serving_is_emptied_and_left() {
    let place = Place::new();
    place.make("disk.img", 16 * MIB);
    let cache = Sealable::new(32);
    let arguments = serve_on(&place, &cache);
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    for (offset, bytes) in (0..100).map(block) {
        nbd.write(offset, &bytes, false).expect("the cache takes it");
    }
    nbd.flush().expect("the cache takes it");
    cache.seal();
    for (offset, bytes) in (100..200).map(block) {
        nbd.write(offset, &bytes, false).expect("the primary takes it");
    }
    until_detached(&server);
    assert!(server.ask(&["status"]).contains("WRONG    the cache device failed"));
    assert_eq!(server.status()["cache"]["dirty_bytes"], 0, "it was emptied first");
    nbd.flush().expect("the primary takes it");
    check_blocks(&mut nbd, 200);

    // The host remembers that nothing on the device may be used any more.
    server.kill();
    let said = place.refuse(&arguments);
    assert!(said.contains("cannot be written"), "{said}");
    let primary = fs::read(place.path("disk.img")).expect("it is there");
    for (offset, bytes) in (0..200).map(block) {
        let at = offset as usize;
        assert!(primary[at..at + bytes.len()] == bytes, "the primary alone has {offset}");
    }
    let server = place.start(&place.serve("disk.img", "cache.img,size=32MiB"));
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    check_blocks(&mut nbd, 200);
    assert_eq!(server.status()["health"], "good", "with another device");
}

/// While a failed cache is emptied, writes continue on the primary. A server that is then killed
/// leaves older versions in the log: a salvage must not overwrite the newer ones with them.
#[test]
fn a_salvage_leaves_out_what_was_written_past_a_failed_cache() {
    const COUNT: u64 = 10_000;
    let place = Place::new();
    place.make("disk.img", COUNT * MIB);
    // Each in its own stripe, so that the disk takes its time.
    let block = |at: u64| (at * 1709 % COUNT * MIB, noise(at + 1, BLOCK as usize));
    let newer = |at: u64| (block(at).0, noise(at + 1_000_000, BLOCK as usize));
    let newest = |at: u64| if (100..102).contains(&at) { newer(at) } else { block(at) };
    let cache = Sealable::new(64);
    let mut slow = serve_on(&place, &cache);
    slow[1] += "?emulate=hdd";
    slow.push("--dirty-limit=90%".to_owned());
    // A small log would press for destaging, and most blocks would be clean when the cache fails.
    slow.push("--log-share=100%".to_owned());
    let server = place.start(&slow);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    for (offset, bytes) in (0..COUNT).map(block) {
        nbd.write(offset, &bytes, false).expect("the cache takes it");
    }
    nbd.flush().expect("the cache takes it");
    cache.seal();
    for (offset, bytes) in (100..102).map(newer) {
        nbd.write(offset, &bytes, false).expect("the primary takes it");
    }
    nbd.flush().expect("the primary has it");
    let mut found = vec![0; BLOCK as usize];
    for at in 98..108 {
        let (offset, bytes) = newest(at);
        nbd.read(offset, &mut found).expect("it can be read");
        assert!(found == bytes, "block {at} is wrong");
    }
    assert_eq!(server.status()["health"], "draining", "or this shows nothing");
    server.kill();

    let salvage = |state: &str| {
        let (state, to) = (format!("--state={}", place.text(state)), place.text("disk.img"));
        let output = support::forebay(&["salvage", &cache.path(), "--to", &to, &state]);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = salvage("state");
    assert!(code == Some(0) && !said.contains("no record"), "{said}");
    let primary = fs::File::open(place.path("disk.img")).expect("it is there");
    for at in 0..COUNT {
        let (offset, bytes) = newest(at);
        primary.read_exact_at(&mut found, offset).expect("it can be read");
        assert!(found == bytes, "block {at} is wrong on the primary");
    }
    let (code, said) = salvage("elsewhere");
    assert!(code == Some(0) && said.contains("has no record of this cache"), "{said}");
}
