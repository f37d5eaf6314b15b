//! The files of `serve --fuse`, over both transports: contents, odd sizes, flushes, holes, refused
//! operations, the texts under `.forebay`, stopping, and the remains of a killed server.

#[path = "support/disk.rs"]
mod disk;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;
use std::thread;

use forebay_block::testing::Numbers;

use disk::{Cleanup, O_DIRECT, O_DSYNC, can_mount, file, open, serve, transports};
use support::{Place, noise};
use tools::{have, succeeds};

const MIB: u64 = 1 << 20;
/// Not a multiple of a block or of a stripe.
const SIZE: u64 = 24 * MIB + 512;

/// A primary, and the arguments to serve it over a transport of FUSE.
fn over(transport: &str) -> (Place, Cleanup, Vec<String>) {
    let place = Place::new();
    let cleanup = Cleanup::of(&place, &[]);
    place.make("primary", SIZE);
    let arguments = serve(&place, "primary", &[&format!("--fuse-transport={transport}")]);
    (place, cleanup, arguments)
}

#[test]
fn contents_are_those_written_at_any_offset_and_length() {
    for transport in if can_mount() { transports() } else { Vec::new() } {
        let (place, _cleanup, arguments) = over(transport);
        let server = place.start(&arguments);
        assert!(server.ready.contains("fuse:/"), "{}", server.ready);
        let path = file(&place);
        assert_eq!(fs::metadata(&path).expect("it is there").len(), SIZE);
        let volume = open(&path, 0);
        let mut expected = vec![0; SIZE as usize];
        // Lengths and offsets around sectors, blocks, requests and stripes.
        let edges = [1u64, 511, 512, 4095, 4096, 65_537, 262_144, 262_145, MIB - 1, 3 * MIB + 7];
        for (seed, (&length, &offset)) in
            edges.iter().flat_map(|length| edges.iter().map(move |at| (length, at))).enumerate()
        {
            let bytes = noise(seed as u64, length as usize);
            volume.write_all_at(&bytes, offset).expect("it is written");
            expected[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        volume.sync_all().expect("it is flushed");
        // At the end: the part that fits is written, and the rest is refused.
        assert_eq!(volume.write_at(&[7; 1024], SIZE - 100).expect("in part"), 100);
        expected[SIZE as usize - 100..].fill(7);
        let refused = volume.write_at(&[7; 16], SIZE).expect_err("there is no room");
        assert_eq!(refused.kind(), ErrorKind::StorageFull);
        assert_eq!(volume.read_at(&mut [0; 16], SIZE).expect("the end"), 0);
        assert!(fs::read(&path).expect("it can be read") == expected, "{transport}");
        let direct = open(&path, O_DIRECT);
        assert_eq!(direct.metadata().expect("it is open").len(), SIZE);
        drop((volume, direct));
        server.stop(&["--drain"]);
        assert!(fs::read(place.path("primary")).expect("it is there") == expected, "{transport}");
        assert!(fs::read_dir(place.path("volumes")).expect("unmounted").next().is_none());
    }
}

#[test]
fn holes_read_as_zeros_and_durable_writes_survive_a_kill() {
    if !can_mount() || !have(&["fallocate"]) {
        return;
    }
    for transport in transports() {
        let (place, _cleanup, arguments) = over(transport);
        let server = place.start(&arguments);
        let path = file(&place);
        let text = path.to_string_lossy().into_owned();
        let mut expected = noise(1, SIZE as usize);
        open(&path, O_DSYNC).write_all_at(&expected, 0).expect("it is written");
        for (kind, from, length) in
            [("-p", 4096, 8192), ("-p", 1000, 700), ("-p", 5 * MIB, 9 * MIB), ("-z", 777, 70_000)]
        {
            let (at, bytes) = (from.to_string(), length.to_string());
            support::client("fallocate", &[kind, "-o", &at, "-l", &bytes, &text]);
            expected[from as usize..][..length as usize].fill(0);
        }
        assert!(fs::read(&path).expect("it can be read") == expected, "{transport}");
        // Holes are not writes, but are flushed like them.
        open(&path, 0).sync_data().expect("it is flushed");
        let last = noise(2, 100_000);
        open(&path, O_DSYNC).write_all_at(&last, 3 * MIB + 5).expect("it is durable");
        expected[3 * MIB as usize + 5..][..last.len()].copy_from_slice(&last);
        server.kill();
        let dead = fs::read(&path).expect_err("nobody serves it");
        // ECONNABORTED for requests in flight, or ECANCELED over io_uring; ENOTCONN for later ones.
        assert!(matches!(dead.raw_os_error(), Some(103 | 107 | 125)), "{dead}");
        // The mount that it left is removed.
        let server = place.start(&arguments);
        assert!(fs::read(&path).expect("it can be read") == expected, "{transport}");
        server.signal("TERM");
        assert_eq!(server.wait(), Some(0));
    }
}

#[test]
fn what_a_disk_cannot_do_is_refused() {
    if !can_mount() || !have(&["fallocate", "truncate"]) {
        return;
    }
    let place = Place::new();
    let _cleanup = Cleanup::of(&place, &[]);
    place.make("primary", SIZE);
    let server = place.start(&serve(&place, "primary", &[]));
    let (directory, path) = (place.path("volumes"), file(&place));
    let text = path.to_string_lossy().into_owned();
    assert!(fs::File::create(directory.join("new")).is_err());
    assert!(fs::remove_file(&path).is_err());
    assert!(fs::rename(&path, directory.join("other")).is_err());
    assert!(fs::create_dir(directory.join("new")).is_err());
    assert!(open(&path, 0).set_len(SIZE / 2).is_err());
    assert!(open(&path, 0).set_len(SIZE).is_ok(), "its size is no change");
    assert!(!succeeds("fallocate", &["-c", "-o", "0", "-l", "4096", &text]));
    assert!(!succeeds("fallocate", &["-l", &(2 * SIZE).to_string(), &text]));
    assert!(!succeeds("chmod", &["666", &text]));
    assert_eq!(fs::metadata(&path).expect("it is there").mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(&path).expect("it is there").len(), SIZE);
    // `forebay stop` is refused while a file is in use; a signal is not.
    let held = open(&path, 0);
    let said = disk::refused(&server, &["stop"]);
    assert!(said.contains("open"), "{said}");
    held.write_all_at(b"still served", 0).expect("it still serves");
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    assert!(held.read_at(&mut [0; 16], 0).is_err(), "nobody serves it");
}

#[test]
fn texts_show_what_the_control_socket_shows() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let _cleanup = Cleanup::of(&place, &[]);
    place.make("a.img", 8 * MIB);
    place.make("b.img", 4 * MIB);
    fs::create_dir_all(place.path("volumes")).expect("a directory can be made");
    let config = format!(
        "[cache]\npath = \"{cache}\"\nstate_dir = \"{state}\"\nsize = \"64MiB\"\n\
         [control]\nsocket = \"{control}\"\n[server]\nfuse = \"{volumes}\"\n\
         [[volume]]\nname = \"a\"\nprimary = \"{a}\"\n\
         [[volume]]\nname = \"status\"\nprimary = \"{b}\"\nread_only = true\n",
        cache = place.text("cache"),
        state = place.text("state"),
        control = place.text("control.sock"),
        volumes = place.text("volumes"),
        a = place.text("a.img"),
        b = place.text("b.img"),
    );
    fs::write(place.path("config.toml"), config).expect("it is written");
    let server =
        place.start(&["serve".to_owned(), format!("--config={}", place.text("config.toml"))]);
    let directory = place.path("volumes");
    let names = |path: &str| {
        let entries = fs::read_dir(directory.join(path)).expect("a directory").flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(""), [".forebay", "a", "status"]);
    assert_eq!(names(".forebay"), ["metrics", "status", "status.json", "volumes"]);
    assert_eq!(names(".forebay/volumes"), ["a", "status"]);
    assert_eq!(fs::metadata(directory.join("status")).expect("there").len(), 4 * MIB);
    // Two volumes do not affect each other; one of them is read-only.
    let a = open(&directory.join("a"), 0);
    a.write_all_at(&noise(3, 8192), 4096).expect("it is written");
    let other = fs::read(directory.join("status")).expect("it can be read");
    assert!(other.iter().all(|&byte| byte == 0));
    let refused = fs::OpenOptions::new().write(true).open(directory.join("status"));
    assert!(refused.is_err(), "it is read-only");
    drop(a);
    let text = |name: &str| fs::read_to_string(directory.join(".forebay").join(name)).expect(name);
    let json: serde_json::Value = serde_json::from_str(&text("status.json")).expect("it is JSON");
    let asked = server.status();
    assert_eq!(json["counters"]["writes"], asked["counters"]["writes"]);
    assert_eq!(json["counters"]["write_bytes"], 8192);
    assert_eq!(json["volumes"][0]["file"], directory.join("a").to_string_lossy().as_ref());
    assert!(text("status").contains("write-back"), "{}", text("status"));
    let metrics = text("metrics");
    let writes = metrics.lines().filter(|line| line.starts_with("forebay_writes_total{"));
    let writes = writes.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    assert_eq!(writes.sum::<u64>(), 1, "{metrics}");
    let volume = text("volumes/a");
    assert!(volume.contains("write") && volume.contains("a.img"), "{volume}");
    assert!(!text("volumes/status").contains("a.img"));
    let asked = server.ask(&["status", "a"]);
    let words = |text: &str| -> Vec<String> {
        text.lines().filter_map(|line| Some(line.split(' ').next()?.to_owned())).collect()
    };
    assert_eq!(words(&asked), words(&volume), "the command shows the same: {asked}");
    server.stop(&[]);
}

/// Four threads write, read back and punch holes, each in its own quarter, with requests in any
/// order.
#[test]
fn threads_do_not_see_each_other() {
    for transport in if can_mount() { transports() } else { Vec::new() } {
        let (place, _cleanup, arguments) = over(transport);
        let server = place.start(&arguments);
        let path = file(&place);
        let workers: Vec<_> = (0..4u64)
            .map(|worker| {
                let path = path.clone();
                thread::spawn(move || work(worker, &open(&path, 0)))
            })
            .collect();
        let parts: Vec<Vec<u8>> =
            workers.into_iter().map(|worker| worker.join().expect("no content is wrong")).collect();
        let whole = fs::read(&path).expect("it can be read");
        assert!(whole[..parts.concat().len()] == parts.concat(), "{transport}");
        server.stop(&[]);
    }
}

fn work(worker: u64, volume: &fs::File) -> Vec<u8> {
    const PART: usize = 4 << 20;
    let base = worker * PART as u64;
    let mut expected = vec![0; PART];
    let mut numbers = Numbers::new(worker);
    for round in 0..400u64 {
        let mut next = |limit: usize| numbers.below(limit as u64) as usize;
        let from = next(PART - 1);
        let length = (1 + next(100_000)).min(PART - from);
        let at = base + from as u64;
        if round % 3 == 0 {
            let bytes = noise(worker << 32 | round, length);
            volume.write_all_at(&bytes, at).expect("it is written");
            expected[from..from + length].copy_from_slice(&bytes);
        } else {
            let mut bytes = vec![0; length];
            volume.read_exact_at(&mut bytes, at).expect("it is read");
            assert!(bytes == expected[from..from + length], "{length} bytes at {at}");
        }
        if round % 50 == 0 {
            volume.sync_data().expect("it is flushed");
        }
    }
    expected
}

#[test]
fn a_bad_directory_is_refused_by_reason() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    place.make("primary", SIZE);
    let mut arguments = serve(&place, "primary", &[]);
    fs::write(place.path("volumes").join("precious"), "x").expect("it is written");
    let said = place.refuse(&arguments);
    assert!(said.contains("not empty"), "{said}");
    fs::remove_file(place.path("volumes").join("precious")).expect("it is there");
    let server = place.start(&arguments);
    let control = arguments.iter_mut().find(|argument| argument.starts_with("--control"));
    *control.expect("it is there") = format!("--control={}", place.text("other.sock"));
    let said = place.refuse(&arguments);
    assert!(said.contains("another server"), "{said}");
    server.stop(&[]);
    arguments.retain(|argument| !argument.starts_with("--fuse"));
    arguments.push(format!("--fuse={}", place.text("nowhere")));
    let said = place.refuse(&arguments);
    assert!(said.contains("mkdir -p"), "{said}");
}

/// The pool's threads and the keeper had a part in the mount, so that it stayed, dead.
#[test]
fn a_start_that_fails_leaves_no_mount() {
    for transport in if can_mount() { transports() } else { Vec::new() } {
        let (place, _cleanup, arguments) = over(transport);
        // A name that a start removes when it serves, and cannot.
        fs::create_dir_all(place.path("state/applying")).expect("it is made");
        let said = place.refuse(&arguments);
        assert!(said.contains("applying"), "{said}");
        let mounts = fs::read_to_string("/proc/self/mounts").expect("a list");
        assert!(!mounts.contains(&place.text("volumes")), "{mounts}");
        fs::remove_dir(place.path("state/applying")).expect("it is empty");
        place.start(&arguments).stop(&[]);
    }
}

#[test]
fn without_root_the_reason_is_told() {
    if !can_mount() || !have(&["setpriv"]) {
        return;
    }
    let place = Place::new();
    place.make("primary", SIZE);
    let arguments = serve(&place, "primary", &[]);
    let mut command = Command::new("setpriv");
    command.args(["--inh-caps=-sys_admin", "--bounding-set=-sys_admin", "timeout", "60"]);
    let output = command.arg(env!("CARGO_BIN_EXE_forebay")).args(&arguments).output();
    let output = output.expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.lines().last().is_some_and(|last| last.contains("needs root")), "{said}");
}
