//! A state directory that is full, that becomes read-only, or in which something is missing: what
//! is only an aid keeps no server from serving, and what protects data is never done without.

#[path = "support/disk.rs"]
mod disk;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;

use disk::refused;
use support::nbd::Nbd;
use support::{Place, Server, noise, until};
use tools::Tmpfs;

const MIB: u64 = 1 << 20;
/// A place of the primary that is sampled, and changes in each test.
const OURS: u64 = 64 * MIB - 4096;
/// One that is sampled, and that the server does not write to.
const THEIRS: u64 = 8192;

/// A small file system in memory, for the state directory; unmounted when dropped.
struct Small {
    mounted: Tmpfs,
    path: PathBuf,
}

impl Small {
    /// `None` if this machine does not let a test mount.
    fn for_state_of(place: &Place) -> Option<Self> {
        let path = place.path("state");
        Some(Self { mounted: Tmpfs::mount(&path, "64k")?, path })
    }

    fn set_read_only(&self, is: bool) {
        self.mounted.remount(is);
    }

    /// Takes all the space there is.
    fn fill(&self) {
        let mut file = fs::File::create(self.path.join("filler")).expect("it can be made");
        while file.write_all(&[7; 512]).is_ok() {}
    }

    fn free(&self) {
        fs::remove_file(self.path.join("filler")).expect("it is ours");
    }

    /// The path of the cache's file of this kind, if it is there.
    fn file(&self, kind: &str) -> Option<PathBuf> {
        let all =
            fs::read_dir(&self.path).expect("it is there").flatten().map(|entry| entry.path());
        all.into_iter().find(|path| path.extension().is_some_and(|end| end == kind))
    }
}

fn problems(server: &Server) -> String {
    server.status()["problems"].to_string()
}

fn write(place: &Place, offset: u64, seed: u64) {
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    nbd.write(offset, &noise(seed, 4096), true).expect("it is written");
}

fn check(place: &Place, offset: u64, seed: u64) {
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mut found = vec![0; 4096];
    nbd.read(offset, &mut found).expect("it can be read");
    assert!(found == noise(seed, 4096), "the block at {offset}");
}

/// Changes the primary without the cache; its time stays.
fn change(place: &Place, offset: u64) {
    let path = place.path("disk.img");
    let file = fs::File::options().write(true).open(&path).expect("it is there");
    let before = file.metadata().and_then(|found| found.modified()).expect("it has a time");
    file.write_all_at(&noise(99, 512), offset).expect("it can be written");
    file.set_modified(before).expect("it is ours");
}

fn stop(server: Server) {
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn an_upgrade_without_room_for_records_is_refused_and_the_server_serves_on() {
    let (place, arguments) = Place::with_disk();
    let Some(small) = Small::for_state_of(&place) else { return };
    let server = place.start_kept(&arguments);
    write(&place, OURS, 1);
    small.fill();
    let next = place.path("next");
    fs::copy(env!("CARGO_BIN_EXE_forebay"), &next).expect("it is there");
    fs::set_permissions(&next, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let next = next.to_string_lossy().into_owned();
    let said = refused(&server, &["upgrade", &next]);
    for word in ["state directory", "free some space", "serves on"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    check(&place, OURS, 1);
    until("it is told", || problems(&server).contains("the state directory cannot be written"));
    small.free();
    until("it is told no more", || problems(&server) == "[]");
    small.set_read_only(true);
    let said = refused(&server, &["upgrade", &next]);
    assert!(said.contains("make its file system writable"), "{said}");
    check(&place, OURS, 1);
    small.set_read_only(false);
    server.ask(&["upgrade", &next]);
    check(&place, OURS, 1);
    stop(server);
}

/// The samples make room for the witness, so that an old copy of the cache is told from the last
/// one; they are kept again once there is space, and tell a change of the primary.
#[test]
fn a_start_on_a_full_state_directory_serves_and_keeps_what_protects() {
    let (place, mut arguments) = Place::with_disk();
    let Some(small) = Small::for_state_of(&place) else { return };
    arguments.push("--mode=write-around".to_owned());
    let server = place.start(&arguments);
    write(&place, OURS, 1);
    stop(server);
    fs::copy(place.path("cache.img"), place.path("old.img")).expect("it is there");
    small.fill();
    for ends_by_kill in [true, false] {
        let server = place.start(&arguments);
        write(&place, OURS, 2);
        check(&place, OURS, 2);
        if ends_by_kill { server.kill() } else { stop(server) }
    }
    let mut old = arguments.clone();
    old[2] = format!("--cache={}", place.text("old.img"));
    let said = place.refuse(&old);
    assert!(said.contains("older copy"), "{said}");
    let server = place.start(&arguments);
    small.free();
    until("the samples are kept again", || small.file("samples").is_some());
    until("nothing is wrong", || problems(&server) == "[]");
    server.kill();
    change(&place, THEIRS);
    let said = place.refuse(&arguments);
    assert!(said.contains("was changed since") && said.contains("8192"), "{said}");
}

#[test]
fn a_start_without_room_for_the_witness_is_refused_and_harms_nothing() {
    let (place, arguments) = Place::with_disk();
    let Some(small) = Small::for_state_of(&place) else { return };
    let server = place.start(&arguments);
    write(&place, OURS, 1);
    server.kill();
    // Otherwise they make room.
    for kind in ["samples", "uses"] {
        fs::remove_file(small.file(kind).expect("it is kept")).expect("it is ours");
    }
    let witness = small.file("witness").expect("it is kept");
    let before = fs::read(&witness).expect("it is there");
    small.fill();
    for _ in 0..2 {
        let said = place.refuse(&arguments);
        for word in ["witness", "free some space", "state directory"] {
            assert!(said.contains(word), "{word}: {said}");
        }
        assert_eq!(fs::read(&witness).expect("it is there"), before);
    }
    small.free();
    let server = place.start(&arguments);
    check(&place, OURS, 1);
    stop(server);
}

/// Before, the samples on record were out of date after that: the next start said that somebody
/// had changed the primary. A change that somebody makes later is seen.
#[test]
fn nobody_is_blamed_for_what_was_written_while_the_state_directory_was_read_only() {
    for ends_by_kill in [true, false] {
        let (place, mut arguments) = Place::with_disk();
        let Some(small) = Small::for_state_of(&place) else { return };
        arguments.push("--mode=write-around".to_owned());
        let server = place.start(&arguments);
        small.set_read_only(true);
        until("it is told", || problems(&server).contains("Read-only file system"));
        for seed in 1..4 {
            write(&place, OURS, seed);
        }
        assert_eq!(server.status()["state"], "serving");
        if ends_by_kill {
            server.kill()
        } else {
            stop(server)
        }
        small.set_read_only(false);
        let server = place.start(&arguments);
        let events = server.ask(&["events"]);
        assert!(events.contains("primary-not-compared"), "{events}");
        assert_eq!(problems(&server), "[]");
        check(&place, OURS, 3);
        server.kill();
        let server = place.start(&arguments);
        server.kill();
        change(&place, THEIRS);
        let said = place.refuse(&arguments);
        assert!(said.contains("was changed since"), "{said}");
    }
}

/// While it lasts, nothing is on record; then the samples are, and count.
#[test]
fn a_state_directory_that_is_writable_again_has_the_samples_again() {
    let (place, mut arguments) = Place::with_disk();
    let Some(small) = Small::for_state_of(&place) else { return };
    arguments.push("--mode=write-around".to_owned());
    let server = place.start(&arguments);
    let samples = || fs::read(small.file("samples").expect("it is kept")).expect("it is there");
    let before = samples();
    for seed in 1..3 {
        small.set_read_only(true);
        write(&place, 4096 * seed, seed);
        small.set_read_only(false);
        let last = samples();
        until("they are stored again", || samples() != last);
        // Others are on record still.
        write(&place, OURS - 4096 * seed, seed);
    }
    assert_ne!(samples(), before);
    assert_eq!(problems(&server), "[]");
    server.kill();
    let server = place.start(&arguments);
    assert!(!server.ask(&["events"]).contains("primary-not-compared"));
    check(&place, OURS - 8192, 2);
    server.kill();
    change(&place, 7 * 4096);
    let said = place.refuse(&arguments);
    assert!(said.contains("was changed since"), "{said}");
}

#[test]
fn a_state_directory_without_the_cache_is_told_and_a_damaged_witness_has_a_remedy() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    write(&place, OURS, 1);
    stop(server);
    let mut elsewhere = arguments.clone();
    elsewhere.retain(|argument| !argument.starts_with("--state"));
    elsewhere.push(format!("--state={}", place.text("elsewhere")));
    let server = place.start(&elsewhere);
    let events = server.ask(&["events"]);
    assert!(events.contains("state-lost") && events.contains("not mounted"), "{events}");
    stop(server);
    let server = place.start(&elsewhere);
    assert!(!server.ask(&["events", "--json"]).contains("\"count\":2,\"kind\":\"state-lost\""));
    stop(server);
    let state = place.path("elsewhere");
    let all = || fs::read_dir(&state).expect("it is there").flatten().map(|entry| entry.path());
    let is_witness = |path: &PathBuf| path.extension().is_some_and(|end| end == "witness");
    let witness = all().find(is_witness).expect("it is kept");
    // Left by a crash while it was replaced.
    let left = witness.with_extension("witness.new");
    fs::write(&left, "forebay wit").expect("it can be written");
    let good = fs::read(&witness).expect("it is there");
    fs::write(&witness, &good[..good.len() / 2]).expect("it can be cut");
    let said = place.refuse(&elsewhere);
    let name = witness.file_name().expect("it has one").to_string_lossy().into_owned();
    for word in [name.as_str(), "damaged", "move it away", "docs/user/refused-start.md"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    fs::write(&witness, good).expect("it can be written");
    let server = place.start(&elsewhere);
    assert!(!left.exists(), "it is swept");
    stop(server);
}

#[test]
fn a_cache_that_was_truncated_says_both_sizes() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    write(&place, OURS, 1);
    stop(server);
    for left in [16 * MIB, MIB, 40_000] {
        let file = fs::File::options().write(true).open(place.path("cache.img")).expect("ours");
        file.set_len(left).expect("it can be cut");
        let said = place.refuse(&arguments);
        let both = format!("the cache was made for 33554432 bytes, the file has {left}");
        assert!(said.contains(&both) && said.contains("--reset-cache"), "{said}");
    }
}
