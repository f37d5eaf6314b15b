//! Discards of the cache device: a loop device, whose file shrinks.

mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use support::nbd::Nbd;
use support::{Place, client, noise};
use tools::{have, skip, succeeds};

const MIB: u64 = 1 << 20;
const CACHE: u64 = 64 * MIB;
const BLOCK: u64 = 4096;

/// A loop device, removed when dropped.
struct Loop(String);

impl Loop {
    /// A loop device over a file of `CACHE` bytes of which all but the superblocks hold something.
    /// `None` where this machine has none.
    fn over(place: &Place) -> Option<Self> {
        let root = client("id", &["-u"]).trim() == "0";
        let control = Path::new("/dev/loop-control").exists();
        if !have(&["losetup"]) || !(root && control || skip("loop devices need root")) {
            return None;
        }
        let mut bytes = vec![0x5a; CACHE as usize];
        bytes[..MIB as usize].fill(0);
        fs::write(place.path("ssd"), bytes).expect("a file can be written");
        fs::File::open(place.path("ssd")).and_then(|file| file.sync_all()).expect("it is written");
        Some(Self(client("losetup", &["--find", "--show", &place.text("ssd")]).trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        succeeds("losetup", &["--detach", &self.0]);
    }
}

/// Bytes that the file of the loop device takes.
fn taken(place: &Place) -> u64 {
    fs::metadata(place.path("ssd")).expect("it is there").blocks() * 512
}

/// The arguments of a server whose cache is the loop device.
fn arguments(place: &Place, device: &Loop, more: &[&str]) -> Vec<String> {
    place.make("disk.img", 64 * MIB);
    let mut arguments = place.serve("disk.img", "unused");
    arguments.retain(|argument| !argument.starts_with("--cache=") && argument != "--shards=2");
    arguments.push(format!("--cache={}", device.0));
    arguments.extend(more.iter().map(|&more| more.to_owned()));
    arguments.push("--shards=1".to_owned());
    arguments
}

#[test]
fn a_new_cache_on_a_disk_is_discarded() {
    let place = Place::new();
    let Some(device) = Loop::over(&place) else { return };
    assert!(taken(&place) > 60 * MIB);
    let server = place.start(&arguments(&place, &device, &[]));
    assert!(taken(&place) < 4 * MIB, "{} bytes are left", taken(&place));
    server.stop(&[]);
    // A later start keeps what the cache holds.
    place.start(&arguments(&place, &device, &[])).stop(&[]);
}

#[test]
fn a_cache_is_not_discarded_if_that_is_turned_off() {
    let place = Place::new();
    let Some(device) = Loop::over(&place) else { return };
    let server = place.start(&arguments(&place, &device, &["--no-discard"]));
    assert!(taken(&place) > 60 * MIB, "{} bytes are left", taken(&place));
    server.stop(&[]);
}

#[test]
fn parts_of_the_store_that_become_free_are_discarded() {
    let place = Place::new();
    let Some(device) = Loop::over(&place) else { return };
    let more = ["--no-compression", "--sequential-threshold=0"];
    let server = place.start(&arguments(&place, &device, &more));
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let count = 40 * MIB / BLOCK;
    for block in 0..count {
        // Blocks that leave the log for the store must have been requested twice.
        let bytes = noise(block, BLOCK as usize);
        nbd.write(block * 7919 % count * BLOCK, &bytes, false).expect("it is written");
        let mut read = vec![0; BLOCK as usize];
        nbd.read(block * 7919 % count * BLOCK, &mut read).expect("it is read");
        assert!(read == bytes);
    }
    nbd.flush().expect("it is flushed");
    server.ask(&["drain", "disk"]);
    let full = taken(&place);
    let status = server.status();
    let used = number(&status, "store_used_bytes");
    assert!(used > 8 * MIB, "{used} bytes of the store are in use");
    nbd.trim(0, (64 * MIB) as u32).expect("it is discarded");
    nbd.flush().expect("it is flushed");
    let limit = Instant::now() + Duration::from_secs(30);
    while number(&server.status(), "discarded_bytes") < used / 2 {
        assert!(Instant::now() < limit, "{}", server.status());
        // Pages are free after the next record.
        nbd.write(0, &noise(1, BLOCK as usize), true).expect("it is written");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(taken(&place) + used / 3 < full, "{full} bytes became {}", taken(&place));
    let mut read = vec![0; BLOCK as usize];
    nbd.read(0, &mut read).expect("it is read");
    assert!(read == noise(1, BLOCK as usize));
    server.stop(&["--drain"]);
}

/// A statistic of the server.
fn number(status: &serde_json::Value, name: &str) -> u64 {
    status["counters"][name].as_u64().expect("a statistic")
}
