//! `forebay apply` where the shards cannot take up what differs: volumes come, go, grow and get
//! other names, and a new cache replaces the old one, while clients of the others see a pause and
//! no error.

#[path = "support/disk.rs"]
mod disk;
#[path = "reconfigure/interrupted.rs"]
mod interrupted;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs::{self, OpenOptions};
use std::ops::RangeInclusive;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use disk::{Cleanup, attach, can_attach, mount_point, open, run, write_files};
use support::nbd::Nbd;
use support::{Place, Server, client, forebay, noise, until};
use tools::have;

const MIB: u64 = 1 << 20;

/// One test at a time makes disks.
static DISKS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    DISKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A configuration file, and the lines that tests change.
struct Plan {
    place: Place,
    /// Lines of the section `[cache]`, without the state directory.
    cache: String,
    /// Lines of other sections.
    more: String,
    /// Name, file or URI of the primary, and further lines of each volume.
    volumes: Vec<(&'static str, &'static str, &'static str)>,
}

impl Plan {
    /// Of these volumes, each with a primary of 16 MiB under its own name.
    fn new(names: &[&'static str]) -> Self {
        let place = Place::new();
        for name in names {
            place.make(name, 16 * MIB);
        }
        let cache = format!("path = {:?}\nsize = \"64MiB\"", place.text("cache.img"));
        let volumes = names.iter().map(|&name| (name, name, "")).collect();
        Self { place, cache, more: String::new(), volumes }
    }

    fn file(&self) -> String {
        self.place.text("forebay.toml")
    }

    /// Writes the file; returns its path.
    fn write(&self) -> String {
        let (state, socket) = (self.place.text("state"), self.place.text("control.sock"));
        let nbd = self.place.text("nbd.sock");
        let mut text = format!(
            "[cache]\n{}\nstate_dir = {state:?}\n[control]\nsocket = {socket:?}\n\
             [server]\nnbd = [\"unix:{nbd}\"]\n{}\n",
            self.cache, self.more
        );
        for (name, primary, lines) in &self.volumes {
            let is_path = !primary.contains("://");
            let primary = if is_path { self.place.text(primary) } else { (*primary).to_owned() };
            text += &format!(
                "[[volume]]\nname = {name:?}\nprimary = {primary:?}\n\
                 sequential_threshold = \"0\"\n{lines}\n"
            );
        }
        fs::write(self.file(), text).expect("it can be written");
        self.file()
    }

    fn start(&self) -> Server {
        self.place.start_kept(&["serve".to_owned(), format!("--config={}", self.write())])
    }

    fn connect(&self, volume: &str) -> Nbd {
        Nbd::connect(&self.place.path("nbd.sock"), volume).expect("it is served")
    }

    /// Applies the plan as it is now, which must succeed by a hand-over; returns what was printed.
    fn apply(&self, server: &Server) -> String {
        let pid = server.status()["pid"].clone();
        let said = server.ask(&["apply", &self.write()]);
        assert!(said.contains("in force: clients waited "), "{said}");
        assert_ne!(server.status()["pid"], pid, "another process serves");
        self.is_over();
        said
    }

    /// Applies the plan, which must fail; returns the error. The same volumes are served as before.
    fn refused(&self, server: &Server) -> String {
        let before = volumes(server);
        let output = forebay(&["apply", &self.write(), &server.control_argument()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(volumes(server), before, "{said}");
        until("the end of the attempt", || self.on_record(".applying").is_none());
        self.is_over();
        said
    }

    /// Checks that nothing is on record that only a hand-over needs.
    fn is_over(&self) {
        for kind in [".applying", ".warm-up"] {
            assert_eq!(self.on_record(kind), None);
        }
    }

    /// The file of this kind in the state directory.
    fn on_record(&self, kind: &str) -> Option<PathBuf> {
        let all = fs::read_dir(self.place.path("state")).expect("it is there");
        let mut all = all.map(|entry| entry.expect("it can be read").path());
        all.find(|path| path.to_string_lossy().ends_with(kind))
    }

    fn primary(&self, name: &str) -> Vec<u8> {
        fs::read(self.place.path(name)).expect("it is there")
    }
}

/// Names and sizes of the volumes, and the modes that they are in.
fn volumes(server: &Server) -> Vec<(String, u64, String)> {
    let status = server.status();
    let all = status["volumes"].as_array().expect("a list").iter();
    let text = |one: &serde_json::Value| one.as_str().expect("a text").to_owned();
    all.map(|one| (text(&one["name"]), one["size"].as_u64().expect("a number"), text(&one["mode"])))
        .collect()
}

fn read(nbd: &mut Nbd, offset: u64, len: u64) -> Vec<u8> {
    let mut found = vec![0; len as usize];
    nbd.read(offset, &mut found).expect("it is read");
    found
}

#[test]
fn settings_that_only_a_start_changes_come_into_force() {
    let mut plan = Plan::new(&["a", "b"]);
    plan.cache += "\nwrite_cache_depth = \"1h\"";
    let server = plan.start();
    let mut a = plan.connect("a");
    a.write(0, &noise(1, MIB as usize), false).expect("it is written");
    server.ask(&["set", "eviction=lru"]);
    plan.more = "max_clients = 7\n[memory]\nram = \"8MiB\"".to_owned();
    let said = plan.apply(&server);
    assert!(said.contains("ram: 256MiB -> 8MiB\n"), "{said}");
    // Both are kept.
    let kept = fs::read_dir(plan.place.path("state")).expect("it is there");
    let kept = kept.map(|entry| entry.expect("an entry").path());
    let is = |path: &std::path::PathBuf| path.display().to_string().contains("configuration-20");
    let mut kept: Vec<_> = kept.filter(is).collect();
    kept.sort();
    let last = kept.last().expect("the configurations are kept");
    assert_eq!(fs::read(last).expect("ours"), fs::read(plan.file()).expect("ours"));
    assert!(said.contains("max_clients: 128 -> 7\n"), "{said}");
    assert!(said.contains("eviction: lru -> frequency\n"), "{said}");
    let config = server.ask(&["config"]);
    assert!(config.contains("ram = 8MiB") && config.contains("max_clients = 7"), "{config}");
    assert!(config.contains("eviction = frequency") && !config.contains("lru"), "{config}");
    // The same connection, and what was dirty.
    assert!(read(&mut a, 0, MIB) == noise(1, MIB as usize));
    assert_eq!(server.ask(&["apply", &plan.file()]), "nothing differs\n");
    // The next start has nothing to take back.
    server.kill_kept();
    until("another server", || forebay(&["status", &server.control_argument()]).status.success());
    assert!(server.ask(&["config"]).contains("eviction = frequency"));
    server.stop(&[]);
}

#[test]
fn volumes_come_go_and_get_other_names_without_the_others_noticing() {
    let mut plan = Plan::new(&["a", "b", "c"]);
    plan.cache += "\nwrite_cache_depth = \"1h\"";
    let server = plan.start();
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|name| plan.connect(name));
    for (seed, nbd) in [(1, &mut a), (2, &mut b), (3, &mut c)] {
        nbd.write(MIB, &noise(seed, 4 << 20), false).expect("it is written");
    }
    plan.place.make("d", 32 * MIB);
    plan.volumes = vec![("d", "d", ""), ("other", "b", ""), ("c", "c", "")];
    let dry = server.ask(&["apply", &plan.write(), "--dry-run"]);
    assert!(dry.contains("d: added\nother: renamed from b\na: removed\n"), "{dry}");
    let said = plan.apply(&server);
    assert!(said.starts_with(&dry), "{said}");
    let names: Vec<_> = volumes(&server).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["d", "other", "c"]);
    // The one that is gone is whole on its primary; the others' blocks are still in the cache.
    let on = plan.primary("a");
    assert!(on[1 << 20..5 << 20] == noise(1, 4 << 20));
    server.wait_until_loaded();
    let cached = server.status()["counters"]["cached_blocks"].as_u64();
    assert!(cached > Some(1900), "{cached:?} of 2048 blocks");
    a.read(0, &mut [0; 512]).expect_err("its volume is gone");
    assert!(read(&mut plan.connect("other"), MIB, 4 * MIB) == noise(2, 4 << 20));
    assert!(read(&mut c, MIB, 4 * MIB) == noise(3, 4 << 20));
    plan.connect("d").write(20 * MIB, &noise(4, 8192), true).expect("it is written");

    // The bare primary is used meanwhile, and comes back.
    let bare = OpenOptions::new().write(true).open(plan.place.path("a")).expect("it is there");
    bare.write_all_at(&noise(5, 1 << 20), 2 << 20).expect("it is written");
    plan.volumes.push(("a", "a", ""));
    plan.apply(&server);
    let found = read(&mut plan.connect("a"), MIB, 4 * MIB);
    let mut wanted = noise(1, 4 << 20);
    wanted[1 << 20..2 << 20].copy_from_slice(&noise(5, 1 << 20));
    assert!(found == wanted);
    server.kill_kept();
    until("another server", || forebay(&["status", &server.control_argument()]).status.success());
    assert!(read(&mut plan.connect("other"), MIB, 4 * MIB) == noise(2, 4 << 20));
    assert!(read(&mut plan.connect("d"), 20 * MIB, 8192) == noise(4, 8192));
    server.stop(&["--drain"]);
    assert!(plan.primary("b")[1 << 20..5 << 20] == noise(2, 4 << 20));
}

/// Two volumes of one size swapped their names, and the connections of `a` went on as connections
/// of the other volume: what their clients wrote overwrote its data.
#[test]
fn clients_of_volumes_that_swap_their_names_are_disconnected() {
    let mut plan = Plan::new(&["a", "b"]);
    plan.cache += "\nwrite_cache_depth = \"1h\"";
    let server = plan.start();
    let [mut a, mut b] = ["a", "b"].map(|name| plan.connect(name));
    a.write(0, &noise(1, MIB as usize), false).expect("it is written");
    b.write(0, &noise(2, MIB as usize), false).expect("it is written");
    plan.volumes = vec![("a", "b", ""), ("b", "a", "")];
    let said = plan.apply(&server);
    assert!(said.starts_with("a: renamed from b\nb: renamed from a\n"), "{said}");
    a.write(0, &noise(3, 4096), true).expect_err("its volume has another name");
    b.read(0, &mut [0; 512]).expect_err("its volume has another name");
    assert!(read(&mut plan.connect("a"), 0, MIB) == noise(2, 1 << 20));
    assert!(read(&mut plan.connect("b"), 0, MIB) == noise(1, 1 << 20));

    // A name that goes to a new volume, while the one of before gets another name.
    plan.place.make("c", 16 * MIB);
    let [mut a, mut b] = ["a", "b"].map(|name| plan.connect(name));
    plan.volumes = vec![("a", "c", ""), ("b", "a", ""), ("c", "b", "")];
    let said = plan.apply(&server);
    assert!(said.starts_with("a: added\nc: renamed from a\n"), "{said}");
    a.write(0, &noise(3, 4096), true).expect_err("its volume has another name");
    assert!(read(&mut b, 0, MIB) == noise(1, 1 << 20), "it is the same volume");
    assert!(read(&mut plan.connect("a"), 0, MIB) == vec![0; 1 << 20]);
    assert!(read(&mut plan.connect("c"), 0, MIB) == noise(2, 1 << 20));
    server.stop(&["--drain"]);
    assert!(plan.primary("a")[..1 << 20] == noise(1, 1 << 20));
    assert!(plan.primary("b")[..1 << 20] == noise(2, 1 << 20));
    assert!(plan.primary("c") == vec![0; 16 << 20]);
}

/// Two volumes of different sizes that swap their names have not grown.
#[test]
fn volumes_that_swap_their_names_keep_their_sizes() {
    let mut plan = Plan::new(&["a", "b"]);
    plan.place.make("b", 32 * MIB);
    let server = plan.start();
    plan.volumes = vec![("a", "b", ""), ("b", "a", "")];
    let said = plan.apply(&server);
    assert!(!said.contains("grown"), "{said}");
    let sizes: Vec<_> = volumes(&server).into_iter().map(|(name, size, _)| (name, size)).collect();
    assert_eq!(sizes, [("a".to_owned(), 32 * MIB), ("b".to_owned(), 16 * MIB)]);
    let file = OpenOptions::new().write(true).open(plan.place.path("a")).expect("it is there");
    file.set_len(24 * MIB).expect("it grows");
    plan.volumes = vec![("a", "a", ""), ("b", "b", "")];
    let said = plan.apply(&server);
    assert!(said.contains("a: grown from 16 MiB to 24 MiB"), "{said}");
    server.stop(&[]);
}

#[test]
fn a_grown_primary_is_served_whole() {
    let plan = Plan::new(&["a", "b"]);
    let server = plan.start();
    let mut a = plan.connect("a");
    a.write(15 * MIB, &noise(1, MIB as usize), true).expect("it is written");
    let file = OpenOptions::new().write(true).open(plan.place.path("a")).expect("it is there");
    file.set_len(40 * MIB).expect("it grows");
    let said = plan.apply(&server);
    assert!(said.starts_with("a: grown from 16 MiB to 40 MiB\n"), "{said}");
    assert_eq!(volumes(&server)[0].1, 40 * MIB);
    // The connection of before knows the size of before.
    assert!(read(&mut a, 15 * MIB, MIB) == noise(1, MIB as usize));
    let mut larger = plan.connect("a");
    larger.write(39 * MIB, &noise(2, MIB as usize), true).expect("it is written");
    assert!(read(&mut larger, 39 * MIB, MIB) == noise(2, MIB as usize));
    server.stop(&["--drain"]);
    assert!(plan.primary("a")[39 << 20..] == noise(2, MIB as usize));
}

/// A cache keeps its division when a start wants another one. It shows the one that it has, and is
/// made anew only when the other one is applied.
#[test]
fn a_cache_without_a_store_gets_one_while_it_serves() {
    let mut plan = Plan::new(&["a"]);
    let usual = format!("{}\nwrite_cache_depth = \"1h\"", plan.cache);
    plan.cache = format!("{usual}\nlog_share = \"100%\"\nspare = \"30%\"");
    let server = plan.start();
    let mut a = plan.connect("a");
    let first = noise(1, 6 << 20);
    a.write(0, &first, false).expect("it is written");
    drop(a);
    server.stop(&[]);
    plan.cache.clone_from(&usual);
    let server = plan.start();
    server.log("30% of the device spare and a log of 100% of the rest, and keeps them");
    let in_force = |server: &Server, key| server.shown(None, key).0;
    assert_eq!(in_force(&server, "log_share"), "100%");
    assert_eq!(in_force(&server, "spare"), "30%");
    let mut a = plan.connect("a");
    assert!(read(&mut a, 0, 6 * MIB) == first, "the dirty data of before");
    let dry = server.ask(&["apply", &plan.write(), "--dry-run"]);
    assert!(dry.contains("log_share") && dry.contains("spare") && dry.contains("a new cache"));
    plan.apply(&server);
    assert!(plan.primary("a")[..6 << 20] == first, "it was drained");
    assert!(read(&mut a, 0, 6 * MIB) == first);
    assert_eq!(in_force(&server, "log_share"), "8%");
    assert_eq!(in_force(&server, "spare"), "10%");
    let again = server.ask(&["apply", &plan.write(), "--dry-run"]);
    assert!(!again.contains("a new cache"), "{again}");
    server.stop(&[]);
}

/// The blocks come back from the primaries in the background, those of the volumes that stay and
/// admit reads; into a smaller cache not all of them.
#[test]
fn a_new_cache_begins_with_the_blocks_of_the_one_before() {
    let mut plan = Plan::new(&["a", "b", "c", "d"]);
    let path = plan.place.text("cache.img");
    let cache = |size: u32, more: &str| format!("path = {path:?}\nsize = \"{size}MiB\"\n{more}");
    plan.cache = cache(64, "log_share = \"100%\"");
    let server = plan.start();
    let mut nbd = ["a", "b", "c", "d"].map(|name| plan.connect(name));
    for (seed, nbd) in (1..).zip(&mut nbd) {
        nbd.write(0, &noise(seed, 1 << 20), false).expect("it is written");
        nbd.write(9 * MIB, &noise(10 + seed, 1 << 20), false).expect("it is written");
    }
    // Read, not written.
    read(&mut nbd[0], 4 * MIB, MIB);
    let [mut a, ..] = nbd;
    plan.cache = cache(128, "");
    plan.volumes[1].0 = "bb";
    plan.volumes[2].2 = "mode = \"write-only\"";
    plan.volumes.pop();
    plan.apply(&server);
    let shown = |name: &str| -> Value {
        let said = server.ask(&["prefetch", name, "--show", "--json"]);
        serde_json::from_str(&said).expect("it prints JSON")
    };
    let come = |name: &str, bytes: RangeInclusive<u64>| {
        until("the blocks are back", || shown(name)["state"] != "running");
        let said = shown(name);
        assert!(bytes.contains(&said["bytes"].as_u64().expect("a number")), "{said}");
        assert_eq!(
            (&said["bytes"], &said["state"]),
            (&said["total_bytes"], &"done".into()),
            "{said}"
        );
    };
    // A miss may bring in more than was read.
    come("a", 3 * MIB..=5 * MIB);
    come("bb", 2 * MIB..=2 * MIB);
    let output = forebay(&["prefetch", "c", "--show", &server.control_argument()]);
    assert_eq!(output.status.code(), Some(1), "a volume that only takes writes");
    let missed = || server.status()["counters"]["primary_read_blocks"].clone();
    let before = missed();
    assert!(read(&mut a, 0, MIB) == noise(1, 1 << 20));
    assert!(read(&mut a, 9 * MIB, MIB) == noise(11, 1 << 20));
    read(&mut a, 4 * MIB, MIB);
    assert!(read(&mut plan.connect("bb"), 9 * MIB, MIB) == noise(12, 1 << 20));
    assert_eq!(missed(), before);
    read(&mut a, 6 * MIB, MIB);
    assert_ne!(missed(), before);
    // Half of the size: half of the blocks, of whichever volume.
    plan.cache = cache(64, "");
    plan.apply(&server);
    until("the blocks are back", || {
        ["a", "bb"].iter().all(|name| {
            let output = forebay(&["prefetch", name, "--show", &server.control_argument()]);
            !output.status.success() || shown(name)["state"] != "running"
        })
    });
    let held = server.status()["counters"]["prefetched_blocks"].as_u64().expect("a number");
    assert!((3 * 256 - 64..=3 * 256).contains(&held), "{held}");
    server.stop(&[]);
}

/// Each of these takes a new cache: nothing that was dirty is lost, and clients go on.
#[test]
fn a_new_cache_replaces_the_old_one_while_it_serves() {
    let mut plan = Plan::new(&["a", "b"]);
    let cache = |plan: &Plan, name: &str, size: &str, more: &str| {
        let path = plan.place.text(name);
        // Blocks stay dirty until they are drained.
        let never = "write_cache_depth = \"1h\"\nidle_destage = \"0s\"";
        format!("path = {path:?}\nsize = \"{size}\"\n{never}\n{more}")
    };
    plan.cache = cache(&plan, "cache.img", "64MiB", "");
    let server = plan.start();
    let mut a = plan.connect("a");
    let pattern = |round: u64| noise(10 + round, 6 << 20);
    a.write(0, &pattern(0), false).expect("it is written");
    let sizes = [
        ("cache.img", "256MiB", "", "shards = 1"),
        ("cache.img", "128MiB", "log_share = \"20%\"", "shards = 2"),
        ("second.img", "96MiB", "spare = \"0%\"", "shards = 2"),
        ("cache.img", "32MiB", "", ""),
    ];
    for (round, (name, size, more, server_lines)) in (1..).zip(sizes) {
        // The number of the shards is that of the cache.
        server_lines.clone_into(&mut plan.more);
        if round == 4 {
            fs::remove_file(plan.place.path("cache.img")).expect("it is not in use");
        }
        plan.cache = cache(&plan, name, size, more);
        let dry = server.ask(&["apply", &plan.write(), "--dry-run"]);
        assert!(dry.contains("a new cache"), "{dry}");
        plan.apply(&server);
        // All was written to the primary before; what the new cache gets comes from there.
        assert!(plan.primary("a")[..6 << 20] == pattern(round - 1), "round {round}");
        let status = server.status();
        let file = fs::metadata(plan.place.path(name)).expect("it is there");
        let wanted: u64 = size.trim_end_matches("MiB").parse().expect("a number");
        assert_eq!(status["cache"]["device_size"], wanted * MIB, "round {round}");
        assert!(file.len() >= wanted * MIB);
        assert!(read(&mut a, 0, 6 * MIB) == pattern(round - 1), "round {round}");
        a.write(0, &pattern(round), false).expect("it is written");
        assert!(server.status()["dirty_bytes"] != 0);
    }
    // Once it serves, a death leads to the same configuration: the one before could not use this
    // cache. A restart takes the size that it finds.
    let file = plan.place.path("cache.img");
    let file = OpenOptions::new().write(true).open(file).expect("it is there");
    file.set_len(33 * MIB).expect("it grows");
    server.kill_kept();
    until("another server", || forebay(&["status", &server.control_argument()]).status.success());
    assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == pattern(4));
    server.log("is used so");
    plan.connect("b").write(0, &noise(5, 64 << 10), false).expect("it is written");
    assert!(server.status()["dirty_bytes"] != 0);
    server.stop(&[]);
    file.set_len(32 * MIB).expect("it is as it was");
    // An old cache is never used again.
    plan.cache = cache(&plan, "second.img", "96MiB", "");
    let said = plan.place.refuse(&["serve".to_owned(), format!("--config={}", plan.write())]);
    assert!(said.contains("may have the newest version"), "{said}");
    plan.cache = cache(&plan, "cache.img", "32MiB", "");
    let server = plan.start();
    assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == pattern(4));
    server.stop(&[]);
}

#[test]
fn clients_that_write_all_the_time_do_not_hinder_a_volume_from_leaving() {
    let mut plan = Plan::new(&["a", "b"]);
    let server = plan.start();
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (mut nbd, stop) = (plan.connect("b"), Arc::clone(&stop));
        thread::spawn(move || {
            let mut last = 0;
            for number in 1..u64::MAX {
                let wrote = nbd.write(number % 16 * MIB, &noise(number, 65536), false);
                if stop.load(Ordering::Relaxed) || wrote.is_err() {
                    break;
                }
                last = number;
            }
            last
        })
    };
    thread::sleep(Duration::from_millis(500));
    plan.volumes.pop();
    plan.apply(&server);
    stop.store(true, Ordering::Relaxed);
    let last = writer.join().expect("it ends");
    assert!(last > 30, "{last} writes are no load");
    let on = plan.primary("b");
    for number in last - 15..=last {
        let at = (number % 16 * MIB) as usize;
        let found = &on[at..at + 65536];
        // The write after the last one that was answered may have been carried out or not.
        let next = noise(number + 16, 65536);
        assert!(found == noise(number, 65536) || found == next, "write {number} of {last}");
    }
    server.stop(&[]);
}

#[test]
fn what_cannot_be_served_leaves_everything_as_it_was() {
    let mut plan = Plan::new(&["a", "b"]);
    plan.cache += "\nwrite_cache_depth = \"1h\"";
    let server = plan.start();
    server.ask(&["set", "b", "mode=write-only"]);
    let mut a = plan.connect("a");
    a.write(0, &noise(1, MIB as usize), false).expect("it is written");
    let good = plan.volumes.clone();

    // Found out before anything is handed over.
    let pid = server.status()["pid"].clone();
    plan.volumes.push(("c", "absent", ""));
    let said = plan.refused(&server);
    assert!(said.contains("volume c") && said.contains("absent"), "{said}");
    plan.volumes.clone_from(&good);
    let cache = plan.cache.clone();
    fs::write(plan.place.path("foreign"), noise(3, 32 << 20)).expect("it is written");
    plan.cache = format!("path = {:?}", plan.place.text("foreign"));
    let said = plan.refused(&server);
    assert!(said.contains("foreign: it is not empty"), "{said}");
    assert!(fs::read(plan.place.path("foreign")).expect("it is there") == noise(3, 32 << 20));
    // A new cache could not tell whether the primary holds the same data.
    plan.cache = format!("path = {:?}\nsize = \"64MiB\"", plan.place.text("new.img"));
    plan.place.make("else", 16 * MIB);
    plan.volumes[0].1 = "else";
    let said = plan.refused(&server);
    assert!(said.contains("volume a gets another primary, and the cache is replaced"), "{said}");
    plan.volumes.clone_from(&good);
    plan.cache.clone_from(&cache);
    plan.volumes[0].0 = "renamed";
    let other = plan.place.text("other.toml");
    fs::copy(plan.write(), &other).expect("it is copied");
    plan.volumes.clone_from(&good);
    plan.write();
    let output = forebay(&["apply", &other, &server.control_argument()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("differs from"), "{said}");
    assert_eq!(server.status()["pid"], pid, "the same server serves");

    // This one shows only when the next server opens it: the one before comes back.
    plan.place.make("busy", 16 * MIB);
    let busy = OpenOptions::new().write(true).open(plan.place.path("busy")).expect("it is there");
    rustix::fs::flock(&busy, rustix::fs::FlockOperation::LockExclusive).expect("it is ours");
    plan.volumes.push(("busy", "busy", ""));
    plan.volumes.remove(1);
    let said = plan.refused(&server);
    assert!(said.contains("it did not serve: ") && said.contains("in use"), "{said}");
    assert_ne!(server.status()["pid"], pid);
    assert_eq!(volumes(&server)[1].2, "write-only", "what was set stays");
    assert!(read(&mut a, 0, MIB) == noise(1, MIB as usize), "the connection is handed back too");
    server.stop(&["--drain"]);
    assert!(plan.primary("a")[..1 << 20] == noise(1, MIB as usize));
}

#[test]
fn a_hangup_hands_over_where_it_must() {
    let mut plan = Plan::new(&["a", "b"]);
    let server = plan.start();
    let pid = server.status()["pid"].clone();
    plan.volumes.pop();
    plan.write();
    server.signal("HUP");
    server.log("comes into force by a hand-over");
    until("another server", || {
        let said = forebay(&["status", "--json", &server.control_argument()]);
        let status: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap_or_default();
        status["pid"].is_u64() && status["pid"] != pid
    });
    assert_eq!(volumes(&server).len(), 1);
    server.stop(&[]);
}

/// Entries of a volume that is gone stay in the log for a while, when its places in the store are
/// others' already. `check` took the blocks there for damaged ones of the volume.
#[test]
fn places_of_a_volume_that_is_gone_are_used_by_others() {
    let mut plan = Plan::new(&["a", "b"]);
    plan.place.make("a", 64 * MIB);
    plan.cache = plan.cache.replace("64MiB", "24MiB");
    plan.more = "shards = 1\n[memory]\nram = \"0\"".to_owned();
    let server = plan.start();
    let stored = |server: &Server| server.status()["counters"]["stored_blocks"].clone();
    let mut b = plan.connect("b");
    for at in 0..12 {
        b.write(at * MIB, &noise(at, MIB as usize), false).expect("it is written");
    }
    until("a store with blocks", || stored(&server).as_u64() > Some(1000));
    plan.volumes.pop();
    plan.apply(&server);
    let mut a = plan.connect("a");
    for at in 0..14 {
        a.write(at * MIB, &noise(100 + at, MIB as usize), false).expect("it is written");
    }
    server.stop(&[]);
    let cache = plan.place.text("cache.img");
    for words in [&["check", &cache][..], &["salvage", &cache, "--list"]] {
        let output = forebay(words);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let lost = words[0] == "salvage" && said.contains("removed");
        assert!(output.status.success() && !lost, "{words:?}: {said}");
    }
    let server = plan.start();
    for at in 0..14 {
        let found = read(&mut plan.connect("a"), at * MIB, MIB);
        assert!(found == noise(100 + at, MIB as usize), "{at}");
    }
    server.stop(&[]);
}

/// Files and disks: those that stay do not notice, and those that change do.
#[test]
fn files_and_disks_follow() {
    if !can_attach() || !have(&["mkfs.xfs", "xfs_growfs", "xfs_repair"]) {
        return;
    }
    let _alone = alone();
    let mut plan = Plan::new(&["b", "c"]);
    plan.place.make("disk", 512 * MIB);
    plan.volumes.insert(0, ("disk", "disk", ""));
    fs::create_dir(plan.place.path("volumes")).expect("it is made");
    let _cleanup = Cleanup::of(&plan.place, &["mounted"]);
    plan.more = format!("fuse = {:?}", plan.place.text("volumes"));
    let server = plan.start();
    assert_eq!(listed(&plan), [".forebay", "b", "c", "disk"]);
    let device = attach(&server, &[]);
    run(&["mkfs.xfs", "-q"], &device);
    let (mounted, _) = mount_point(&plan.place);
    client("mount", &[&device, &mounted.to_string_lossy()]);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (mounted, stop) = (mounted.clone(), Arc::clone(&stop));
        thread::spawn(move || write_files(&mounted, &stop))
    };
    let c = open(&plan.place.path("volumes").join("c"), 0);
    c.write_all_at(&noise(3, 70_000), 4096).expect("it is written");

    // An attached volume neither goes nor gets another name.
    let all = plan.volumes.clone();
    plan.volumes.remove(0);
    assert!(plan.refused(&server).contains("volume disk is attached as /dev/loop"));
    plan.volumes.clone_from(&all);
    plan.volumes[0].0 = "z";
    assert!(plan.refused(&server).contains("volume disk is attached as /dev/loop"));
    plan.volumes[0].0 = "b";
    plan.volumes[1].0 = "disk";
    assert!(plan.refused(&server).contains("volume disk is attached as /dev/loop"));

    plan.place.make("d", 16 * MIB);
    plan.volumes = vec![("disk", "disk", ""), ("d", "d", ""), ("new", "c", "")];
    plan.apply(&server);
    assert_eq!(listed(&plan), [".forebay", "d", "disk", "new"]);
    for gone in ["b", "c"] {
        let looked = fs::metadata(plan.place.path("volumes").join(gone));
        assert_eq!(looked.map_err(|error| error.kind()).err(), Some(std::io::ErrorKind::NotFound));
    }
    // The file that was open is the same one under its new name.
    let mut found = vec![0; 70_000];
    c.read_exact_at(&mut found, 4096).expect("it is read");
    assert!(found == noise(3, 70_000));
    let texts = plan.place.path("volumes").join(".forebay/volumes");
    assert!(fs::read_to_string(texts.join("new")).expect("a text").contains("new"));
    assert!(!texts.join("c").exists());

    // The disk grows under its file system.
    let file = OpenOptions::new().write(true).open(plan.place.path("disk")).expect("it is there");
    file.set_len(768 * MIB).expect("it grows");
    let said = plan.apply(&server);
    assert!(said.contains("disk: grown from 512 MiB to 768 MiB"), "{said}");
    let size = fs::metadata(plan.place.path("volumes").join("disk")).expect("it is there").size();
    assert_eq!(size, 768 * MIB);
    let sectors = client("blockdev", &["--getsize64", &device]);
    assert_eq!(sectors.trim(), (768 * MIB).to_string());
    client("xfs_growfs", &[&mounted.to_string_lossy()]);
    thread::sleep(Duration::from_millis(300));
    stop.store(true, Ordering::Relaxed);
    let count = writer.join().expect("no file saw an error");
    assert!(count > 20, "{count} files are no load");
    drop(c);
    client("umount", &[&mounted.to_string_lossy()]);
    run(&["xfs_repair", "-n"], &device);
    server.ask(&["detach", "disk"]);
    plan.volumes.remove(0);
    plan.apply(&server);
    run(&["xfs_repair", "-n", "-f"], &plan.place.text("disk"));
    server.stop(&[]);
}

/// The kernel knows a file of the mount by its volume's id, which a new cache once gave to another
/// volume: who had the file open wrote into that one.
#[test]
fn an_open_file_of_a_volume_that_is_gone_is_no_other_volumes() {
    if !can_attach() {
        return;
    }
    let _alone = alone();
    for at_once in [true, false] {
        let mut plan = Plan::new(&["a", "b"]);
        fs::create_dir(plan.place.path("volumes")).expect("it is made");
        let _cleanup = Cleanup::of(&plan.place, &[]);
        plan.more = format!("fuse = {:?}", plan.place.text("volumes"));
        let server = plan.start();
        let file = |name: &str| open(&plan.place.path("volumes").join(name), 0);
        let (a, b) = (file("a"), file("b"));
        a.write_all_at(&noise(1, 70_000), 4096).expect("it is written");
        b.write_all_at(&noise(2, 70_000), 4096).expect("it is written");
        b.sync_all().expect("it is flushed");
        plan.volumes.pop();
        if !at_once {
            plan.apply(&server);
        }
        plan.place.make("c", 16 * MIB);
        plan.volumes.push(("c", "c", ""));
        plan.cache = format!("path = {:?}\nsize = \"64MiB\"", plan.place.text("new.img"));
        plan.apply(&server);
        assert_eq!(listed(&plan), [".forebay", "a", "c"]);
        let written = b.write_all_at(&noise(3, 70_000), 4096).and_then(|()| b.sync_all());
        written.expect_err("its volume is gone");
        a.write_all_at(&noise(4, 70_000), 4096).expect("this one is not");
        a.sync_all().expect("it is flushed");
        assert!(read(&mut plan.connect("c"), 4096, 70_000) == vec![0; 70_000]);
        assert!(read(&mut plan.connect("a"), 4096, 70_000) == noise(4, 70_000));
        drop((a, b));
        server.stop(&[]);
    }
}

/// The names in the mount.
fn listed(plan: &Plan) -> Vec<String> {
    let entries = fs::read_dir(plan.place.path("volumes")).expect("it is mounted");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<_> = entries.map(|one| name(one).into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

/// A device that is given up early: clients write all the time, and find everything on the
/// primary, then on the primary behind a new cache.
#[test]
fn a_device_is_retired_under_load_and_replaced() {
    let mut plan = Plan::new(&["a", "b"]);
    plan.cache += "\nwrite_cache_depth = \"1h\"";
    let server = plan.start();
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (mut nbd, stop) = (plan.connect("b"), Arc::clone(&stop));
        thread::spawn(move || {
            let mut written = 0;
            while !stop.load(Ordering::Relaxed) {
                let (at, bytes) = (written % 200 * 65536, noise(written, 65536));
                nbd.write(at, &bytes, written % 16 == 0).expect("no request fails");
                assert!(read(&mut nbd, at, 65536) == bytes, "write {written}");
                written += 1;
            }
            written
        })
    };
    let mut a = plan.connect("a");
    a.write(0, &noise(1, 8 << 20), false).expect("it is written");
    thread::sleep(Duration::from_millis(300));
    let said = server.ask(&["retire"]);
    assert!(said.ends_with("the cache device is out of use: it can be taken out\n"), "{said}");
    let status = server.status();
    assert_eq!(
        (&status["health"], &status["cache"]["dirty_bytes"]),
        (&"detached".into(), &0.into())
    );
    assert!(plan.primary("a")[..8 << 20] == noise(1, 8 << 20));
    let again = forebay(&["retire", &server.control_argument()]);
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("out of use already"));
    // Nothing is written to the device any more: it may as well be gone.
    let before = fs::read(plan.place.path("cache.img")).expect("it is there");
    thread::sleep(Duration::from_millis(200));
    assert!(fs::read(plan.place.path("cache.img")).expect("it is there") == before);
    fs::remove_file(plan.place.path("cache.img")).expect("it is taken out");
    plan.cache = plan.cache.replace("cache.img", "new.img");
    plan.apply(&server);
    assert_eq!(server.status()["health"], "good");
    assert!(read(&mut a, 0, 8 * MIB) == noise(1, 8 << 20));
    thread::sleep(Duration::from_millis(200));
    stop.store(true, Ordering::Relaxed);
    let written = writer.join().expect("no request failed");
    assert!(written > 40, "{written} writes are no load");
    server.stop(&["--drain"]);
    let on = plan.primary("b");
    for number in written.saturating_sub(200)..written {
        let at = (number % 200 * 65536) as usize;
        assert!(on[at..at + 65536] == noise(number, 65536), "write {number}");
    }
}

/// Regression: a server that the keeper started, or that took over, made a new cache on a device
/// that had been retired and was about to be taken out.
#[test]
fn a_retired_device_stays_out_of_use_until_an_operator_starts_the_server() {
    let mut plan = Plan::new(&["a"]);
    plan.cache += "\nwrite_cache_depth = \"1h\"\nidle_destage = \"0s\"";
    let server = plan.start();
    plan.connect("a").write(0, &noise(1, 1 << 20), true).expect("it is written");
    server.ask(&["retire"]);
    let own = env!("CARGO_BIN_EXE_forebay");
    for round in 0..4 {
        match round % 2 {
            0 => drop(server.kill_kept()),
            _ => drop(server.ask(&["upgrade", own])),
        }
        let answers = || forebay(&["status", &server.control_argument()]).status.success();
        until("another server", answers);
        until("it is out of use", || server.status()["health"] == "detached");
        let mut a = plan.connect("a");
        a.write(0, &noise(round, 1 << 20), true).expect("it is written");
        assert_eq!(server.status()["cache"]["dirty_bytes"], 0);
        assert!(plan.primary("a")[..1 << 20] == noise(round, 1 << 20), "round {round}");
    }
    server.stop(&[]);
    let server = plan.start();
    assert_eq!(server.status()["health"], "good");
    assert_eq!(plan.on_record(".retired"), None);
    server.kill_kept();
    until("another server", || forebay(&["status", &server.control_argument()]).status.success());
    assert_eq!(server.status()["health"], "good");
    server.stop(&[]);
}

/// The file of a retired cache may get another size, as that of any cache that is given up.
#[test]
fn a_retired_cache_becomes_one_of_another_size() {
    let mut plan = Plan::new(&["a"]);
    plan.cache += "\nwrite_cache_depth = \"1h\"";
    let server = plan.start();
    let mut a = plan.connect("a");
    a.write(0, &noise(1, 1 << 20), false).expect("it is written");
    server.ask(&["retire"]);
    for size in [96, 48] {
        plan.cache = format!("path = {:?}\nsize = \"{size}MiB\"", plan.place.text("cache.img"));
        plan.apply(&server);
        let status = server.status();
        let shown = (&status["health"], &status["cache"]["device_size"]);
        assert_eq!(shown, (&"good".into(), &(size * MIB).into()));
        assert!(read(&mut a, 0, MIB) == noise(1, 1 << 20));
        server.ask(&["retire"]);
    }
    server.stop(&[]);
}

/// A size that cannot be was noticed only by the server that was to make the new cache. By then the
/// old one was given up and its file was emptied, and no server could open it any more.
#[test]
fn a_size_that_no_cache_can_have_changes_nothing() {
    let mut plan = Plan::new(&["a"]);
    plan.cache += "\nwrite_cache_depth = \"1h\"";
    let server = plan.start();
    let mut a = plan.connect("a");
    a.write(0, &noise(1, 1 << 20), false).expect("it is written");
    let pid = server.status()["pid"].clone();
    let good = plan.cache.clone();
    let free = rustix::fs::statvfs(plan.place.path("a")).expect("it is there");
    let too_much = free.f_blocks * free.f_frsize + (1 << 30);
    let missing = format!("path = {:?}\nsize = \"32MiB\"", plan.place.text("missing/c"));
    let cases = [
        (good.replace("64MiB", "1MiB"), "", "1 MiB: the cache device has 1048576 bytes"),
        (good.replace("64MiB", &too_much.to_string()), "", "there is room for"),
        (good.replace("64MiB", "32MiB"), "shards = 60", "60 shards need at least"),
        (missing, "", "missing"),
    ];
    for (cache, more, expected) in cases {
        (plan.cache, plan.more) = (cache, more.to_owned());
        let said = plan.refused(&server);
        assert!(said.contains(expected) && said.contains("nothing was changed"), "{said}");
    }
    let status = server.status();
    assert_eq!((&status["pid"], &status["health"]), (&pid, &"good".into()));
    assert!(status["cache"]["dirty_bytes"].as_u64() >= Some(1 << 20), "nothing was drained");
    (plan.cache, plan.more) = (good.replace("64MiB", "48MiB"), String::new());
    plan.apply(&server);
    assert_eq!(server.status()["cache"]["device_size"], 48 * MIB);
    assert!(read(&mut a, 0, MIB) == noise(1, 1 << 20));
    server.stop(&[]);
}

/// A start with a bad size left a file that is no cache, and the next one refused it.
#[test]
fn a_start_after_one_with_a_bad_size_finds_the_cache_that_was_given_up() {
    let mut plan = Plan::new(&["a"]);
    let server = plan.start();
    plan.connect("a").write(0, &noise(1, 1 << 20), false).expect("it is written");
    server.ask(&["retire"]);
    server.stop(&[]);
    let good = plan.cache.clone();
    for bad in ["1MiB", "4000TiB"] {
        plan.cache = good.replace("64MiB", bad);
        let arguments = ["serve".to_owned(), format!("--config={}", plan.write())];
        let said = plan.place.refuse(&arguments);
        assert!(said.contains("cache"), "{said}");
        assert_eq!(plan.primary("cache.img").len(), 64 << 20, "{said}");
    }
    plan.cache = good.replace("64MiB", "48MiB");
    let server = plan.start();
    assert_eq!(server.status()["cache"]["device_size"], 48 * MIB);
    assert!(read(&mut plan.connect("a"), 0, MIB) == noise(1, 1 << 20));
    server.stop(&[]);
    // Nor is a file emptied that was never a cache.
    fs::write(plan.place.path("other"), noise(2, 2 << 20)).expect("it is written");
    plan.cache = format!("path = {:?}\nsize = \"48MiB\"", plan.place.text("other"));
    plan.place.refuse(&["serve".to_owned(), format!("--config={}", plan.write())]);
    assert!(plan.primary("other") == noise(2, 2 << 20));
}

/// A volume that was added has been written when the server dies: the configuration of before does
/// not know it, and must not come back.
#[test]
fn a_server_that_dies_soon_after_a_volume_came_and_was_written_keeps_it() {
    let mut plan = Plan::new(&["a", "b"]);
    plan.cache += "\nwrite_cache_depth = \"1h\"\nidle_destage = \"0s\"";
    let both = plan.volumes.clone();
    plan.volumes.pop();
    let server = plan.start();
    plan.connect("a").write(0, &noise(1, 1 << 20), true).expect("it is written");
    plan.volumes = both;
    plan.apply(&server);
    plan.connect("b").write(0, &noise(2, 1 << 20), true).expect("it is written");
    server.kill_kept();
    until("another server", || forebay(&["status", &server.control_argument()]).status.success());
    assert!(read(&mut plan.connect("b"), 0, MIB) == noise(2, 1 << 20));
    assert!(read(&mut plan.connect("a"), 0, MIB) == noise(1, 1 << 20));
    server.stop(&[]);
}

/// A cache has 64 ids for volumes. Those of volumes that are gone come back when the log has
/// forgotten them.
#[test]
fn volumes_may_come_and_go_for_ever() {
    let mut plan = Plan::new(&["a", "b"]);
    plan.cache = plan.cache.replace("64MiB", "16MiB");
    plan.more = "shards = 1\n[memory]\nram = \"0\"".to_owned();
    let server = plan.start();
    let mut a = plan.connect("a");
    let mut written = 0;
    for round in 0..70 {
        let mut b = plan.connect("b");
        let before = if round == 0 { vec![0; 65536] } else { noise(round - 1, 65536) };
        assert!(read(&mut b, 0, 65536) == before, "round {round}");
        b.write(0, &noise(round, 65536), false).expect("it is written");
        // As much as the log takes, so that it forgets.
        while round > 60 && written < round * MIB {
            a.write(written % (8 * MIB), &noise(written, MIB as usize), false).expect("written");
            written += MIB;
        }
        let b = plan.volumes.pop().expect("it is there");
        plan.apply(&server);
        assert!(plan.primary("b")[..65536] == noise(round, 65536), "round {round}");
        plan.volumes.push(b);
        plan.apply(&server);
    }
    server.stop(&[]);
}
