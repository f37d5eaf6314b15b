//! Completed writes that a primary has lost, as a failed flush says: the next flush of a client
//! fails, once, whatever server it meets.

#[path = "support/disk.rs"]
mod disk;
#[path = "support/nbdkit.rs"]
mod nbdkit;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};

use disk::{O_DIRECT, can_mount, open};
use nbdkit::Nbdkit;
use support::nbd::Nbd;
use support::{Place, Server, until};

const EIO: i32 = 5;
const BLOCK: usize = 4096;

/// A primary whose flushes fail while the file `fails` exists.
fn san(place: &Place) -> Nbdkit {
    place.make("san.img", 16 << 20);
    let (file, fails) = (place.text("san.img"), place.text("fails"));
    let read = format!("dd if={file} skip=$4 count=$3 iflag=skip_bytes,count_bytes status=none");
    let write = format!("dd of={file} seek=$4 oflag=seek_bytes conv=notrunc status=none");
    let flush = format!("if test -e {fails}; then echo EIO the cache is lost >&2; exit 1; fi");
    let does = [("pread", read), ("pwrite", write), ("flush", flush)].map(|(call, script)| {
        // The last bytes may come in pieces.
        format!("{call}={}", script.replace("dd ", "dd bs=4M iflag=fullblock "))
    });
    let size = "get_size=echo 16M".to_owned();
    let shared = "can_multi_conn=exit 0";
    let arguments: Vec<&str> =
        ["eval", &size, shared].into_iter().chain(does.iter().map(String::as_str)).collect();
    Nbdkit::start(&place.path("san.sock"), &arguments)
}

/// The arguments of a server of such a primary, past which nothing is cached.
fn past(place: &Place) -> Vec<String> {
    let mut arguments = place.serve("unused", "cache.img,size=32MiB");
    arguments[1] = format!("--primary=nbd+unix:///?socket={}", place.text("san.sock"));
    arguments.push("--mode=pass-through".to_owned());
    arguments
}

/// Waits until a flush has failed that no client asked for; the next one succeeds.
fn lose(place: &Place, server: &Server, write: impl FnOnce()) {
    fs::write(place.path("fails"), "").expect("a file can be written");
    write();
    let errors = || server.status()["counters"]["primary_errors"].as_u64();
    until("the primary's flush fails", || errors() > Some(0));
    fs::remove_file(place.path("fails")).expect("it is there");
}

fn upgrade(place: &Place, server: &Server, name: &str) {
    let next = place.path(name);
    fs::copy(env!("CARGO_BIN_EXE_forebay"), &next).expect("it is copied");
    fs::set_permissions(&next, fs::Permissions::from_mode(0o755)).expect("it is ours");
    server.ask(&["upgrade", &next.to_string_lossy()]);
}

#[test]
fn the_first_flush_after_a_hand_over_fails_if_the_server_before_knew_of_a_loss() {
    let place = Place::new();
    let _san = san(&place);
    let server = place.start_kept(&past(&place));
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    lose(&place, &server, || nbd.write(0, &[7; BLOCK], false).expect("it is written"));
    upgrade(&place, &server, "next");
    let lost = nbd.flush().expect_err("the write was lost");
    assert_eq!(lost.raw_os_error(), Some(EIO));
    nbd.flush().expect("it was told once");
    upgrade(&place, &server, "one-more");
    nbd.flush().expect("that outlasts no server");
    server.stop(&[]);
}

#[test]
fn the_first_flush_after_the_death_of_a_server_fails_if_it_knew_of_a_loss() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let _cleanup = disk::Cleanup::of(&place, &[]);
    let _san = san(&place);
    fs::create_dir_all(place.path("volumes")).expect("a directory can be made");
    let mut arguments = past(&place);
    arguments.push(format!("--fuse={}", place.text("volumes")));
    let server = place.start_kept(&arguments);
    let file = open(&disk::file(&place), O_DIRECT);
    let page = vec![7; 2 * BLOCK];
    let from = page.as_ptr().align_offset(BLOCK);
    lose(&place, &server, || {
        file.write_all_at(&page[from..from + BLOCK], 0).expect("it is written");
    });
    server.kill_kept();
    assert_eq!(file.sync_all().expect_err("it was lost").raw_os_error(), Some(EIO));
    file.sync_all().expect("it was told once");
    drop(file);
    server.stop(&[]);
}
