//! An NBD server that is away for a time while its volume is served, and what may come back.

#[path = "support/nbdkit.rs"]
mod nbdkit;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::thread;
use std::time::Duration;

use nbdkit::Nbdkit;
use support::nbd::Nbd;
use support::{Place, noise, until};
use tools::have;

const MIB: u64 = 1 << 20;

/// Regression: another disk behind the address of the one that is cached was read and written as if
/// it were that one, until the next start.
#[test]
fn another_disk_behind_the_same_address_is_neither_read_nor_written() {
    if !have(&["nbdkit"]) {
        return;
    }
    let place = Place::new();
    let disks = [noise(1, 16 << 20), noise(2, 16 << 20)];
    for (name, disk) in ["right.img", "wrong.img"].iter().zip(&disks) {
        fs::write(place.path(name), disk).expect("it can be written");
    }
    let san = |name: &str| Nbdkit::start(&place.path("san.sock"), &["file", &place.text(name)]);
    let right = san("right.img");
    let mut arguments = place.serve("", "cache.img,size=32MiB");
    arguments[1] = format!("--primary=nbd+unix:///?socket={}", place.text("san.sock"));
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mine = noise(3, 64 << 10);
    nbd.write(MIB, &mine, true).expect("it is written");

    drop(right);
    let wrong = san("wrong.img");
    server.log("is not what it was");
    let mut found = vec![0; 64 << 10];
    nbd.read(8 * MIB, &mut found).expect_err("only the primary has it");
    nbd.read(MIB, &mut found).expect("it is cached");
    assert!(found == mine);
    // Time for idle destaging, which must not go there.
    thread::sleep(Duration::from_secs(7));
    drop(wrong);
    assert!(fs::read(place.path("wrong.img")).expect("it is a file") == disks[1]);

    let _right = san("right.img");
    until("the right one is used", || nbd.read(8 * MIB, &mut found).is_ok());
    assert!(found == disks[0][8 << 20..][..64 << 10]);
    server.stop(&["--drain"]);
    let left = fs::read(place.path("right.img")).expect("it is a file");
    assert!(left[MIB as usize..][..mine.len()] == mine);
}
