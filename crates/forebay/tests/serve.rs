//! The server as a process with real clients: it serves, stops in order, survives being killed, and
//! refuses invalid requests.

mod support;

use std::fs;

use support::{Place, client, forebay, noise};

const MIB: u64 = 1 << 20;

/// Writes `bytes` at the start of the volume, and flushes.
fn write(place: &Place, bytes: &[u8]) {
    fs::write(place.path("data"), bytes).expect("a file can be written");
    let (data, uri) = (place.text("data"), place.uri());
    client("nbdcopy", &["--flush", &data, &uri]);
}

/// Reads the start of the volume.
fn read(place: &Place, len: usize) -> Vec<u8> {
    let (out, uri) = (place.text("out"), place.uri());
    let _ = fs::remove_file(place.path("out"));
    client("nbdcopy", &[&uri, &out]);
    let mut bytes = fs::read(place.path("out")).expect("it was copied");
    bytes.truncate(len);
    bytes
}

fn primary(place: &Place, len: usize) -> Vec<u8> {
    let mut bytes = fs::read(place.path("disk.img")).expect("it is there");
    bytes.truncate(len);
    bytes
}

#[test]
fn clients_read_what_they_wrote_and_a_drain_brings_it_to_the_primary() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    assert_eq!(server.ready.trim(), format!("ready unix:{}", place.text("nbd.sock")));
    let data = noise(1, 8 << 20);
    write(&place, &data);
    assert_eq!(read(&place, data.len()), data);
    let status = server.status();
    assert_eq!((&status["state"], &status["health"]), (&"serving".into(), &"good".into()));
    let count = |name: &str| status["counters"][name].as_u64().unwrap_or(u64::MAX);
    assert_eq!(
        count("lookups"),
        count("hits") + count("partial_hits") + count("misses") + count("bypasses")
    );
    assert!(server.ask(&["status"]).contains("at risk"));
    assert!(server.ask(&["drain", "disk"]).contains("done"));
    assert_eq!(server.status()["cache"]["dirty_bytes"], 0);
    assert_eq!(primary(&place, data.len()), data);
    assert_eq!(server.ask(&["stop"]), "stopped\n");
    assert_eq!(server.wait(), Some(0));
    assert!(!place.path("control.sock").exists() && !place.path("nbd.sock").exists());
}

#[test]
fn a_hangup_stops_nothing() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    server.signal("HUP");
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(server.status()["state"], "serving");
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_signal_stops_in_order_and_the_next_start_has_everything() {
    for name in ["TERM", "INT"] {
        let (place, arguments) = Place::with_disk();
        let data = noise(2, 4 << 20);
        let server = place.start(&arguments);
        write(&place, &data);
        server.signal(name);
        assert_eq!(server.wait(), Some(0), "SIG{name}");
        let checked = forebay(&["check", &place.text("cache.img")]);
        let said = String::from_utf8_lossy(&checked.stdout).into_owned();
        assert_eq!(checked.status.code(), Some(0), "{said}");
        assert!(said.contains("stopped in order"), "{said}");
        assert!(said.contains("good: sound, ") && said.contains("all of it readable"), "{said}");

        let server = place.start(&arguments);
        assert_eq!(read(&place, data.len()), data);
        server.stop(&["--drain"]);
        assert_eq!(primary(&place, data.len()), data);
    }
}

#[test]
fn what_was_flushed_survives_a_kill() {
    let (place, arguments) = Place::with_disk();
    for round in 0..3 {
        let data = noise(10 + round, 4 << 20);
        let server = place.start(&arguments);
        write(&place, &data);
        server.kill();
        let server = place.start(&arguments);
        assert_eq!(read(&place, data.len()), data, "round {round}");
        server.kill();
    }
}

#[test]
fn rewritten_blocks_are_deltas_and_survive_a_kill() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    let deltas = |server: &support::Server| {
        server.status()["counters"]["delta_blocks"].as_u64().expect("it is counted")
    };
    // Too short to count as a sequential stream.
    let mut data = noise(5, 400 << 10);
    write(&place, &data);
    assert_eq!(deltas(&server), 0);
    for round in 0..3 {
        data.chunks_mut(4096).for_each(|block| block[100 * round + 7] ^= 0xff);
        write(&place, &data);
    }
    assert_eq!(deltas(&server), 300);
    server.kill();
    assert_eq!(forebay(&["check", &place.text("cache.img")]).status.code(), Some(0));

    let server = place.start(&arguments);
    assert_eq!(read(&place, data.len()), data);
    let said = server.ask(&["set", "disk", "content=independent"]);
    assert!(said.ends_with("content=independent\n"), "{said}");
    data.chunks_mut(4096).for_each(|block| block[1000] ^= 0xff);
    write(&place, &data);
    assert_eq!(deltas(&server), 0, "none since it was started");
    assert_eq!(read(&place, data.len()), data);
    server.stop(&["--drain"]);
    assert_eq!(primary(&place, data.len()), data);
}

#[test]
fn limits_can_be_changed_while_serving() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    let limit = |server: &support::Server| {
        let status = server.status();
        status["cache"]["dirty_limit_bytes"].as_u64().expect("it has a limit")
    };
    let whole = limit(&server);
    let said = server.ask(&["set", "dirty_limit=10%", "write_cache_depth=5s", "idle_timeout=1h"]);
    assert_eq!(said, "dirty_limit=10% write_cache_depth=5s idle_timeout=1h\n");
    let tenth = limit(&server);
    assert!(tenth.abs_diff(whole / 5) < whole / 50, "10 of 50 %: {tenth} of {whole}");
    let said = server.ask(&["set", "disk", "dirty_limit=40%", "sequential_threshold=64KiB"]);
    assert_eq!(said, "disk: sequential_threshold=64KiB dirty_limit=40%\n");
    let in_force = limit(&server);
    assert!(in_force.abs_diff(tenth / 5 * 2) < tenth / 50, "{in_force} of {tenth}: the volume's");
    let control = place.text("control.sock");
    let refused = forebay(&["set", "disk", "dirty_guarantee=60%", "--control", &control]);
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("more than the volume's dirty_limit"), "{refused}");
    server.stop(&[]);

    let server = place.start(&arguments);
    assert_eq!(limit(&server), in_force, "it is kept");
    let said = server.ask(&["set", "disk", "dirty_limit=default", "dirty_guarantee=60%"]);
    assert_eq!(said, "disk: dirty_guarantee=60% dirty_limit=none\n");
    server.ask(&["set", "dirty_limit=default"]);
    assert_eq!(limit(&server), whole);
}

#[test]
fn the_mode_can_be_changed_while_serving() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    let said = server.ask(&["set", "disk", "mode=write-through"]);
    assert_eq!(said, "disk: mode=write-through\n");
    let data = noise(3, 1 << 20);
    write(&place, &data);
    assert_eq!(server.status()["volumes"][0]["mode"], "write-through");
    assert_eq!(primary(&place, data.len()), data, "acknowledged is on the primary");
    let control = format!("--control={}", place.text("control.sock"));
    let refused = forebay(&["set", "other", "mode=write-back", &control]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("the volumes are: disk"));
}

#[test]
fn two_servers_do_not_share_a_cache_or_a_primary() {
    let (place, arguments) = Place::with_disk();
    let _server = place.start(&arguments);
    let other = Place::new();
    other.make("disk.img", 64 * MIB);
    let change = |name: &str, value: String| {
        let mut changed = other.serve("disk.img", "cache.img,size=32MiB");
        let at = changed.iter().position(|argument| argument.starts_with(name));
        changed[at.expect("it is given")] = format!("{name}={value}");
        changed
    };
    let said = other.refuse(&change("--cache", place.text("cache.img")));
    assert!(said.contains("in use"), "{said}");
    let said = other.refuse(&change("--primary", place.text("disk.img")));
    assert!(said.contains("in use"), "{said}");
    let said = other.refuse(&change("--control", place.text("control.sock")));
    assert!(said.contains("another server answers"), "{said}");
    let said = other.refuse(&change("--nbd", format!("unix:{}", place.text("nbd.sock"))));
    assert!(said.contains("nbd.sock"), "{said}");
    let checked = forebay(&["check", &place.text("cache.img")]);
    assert_eq!(checked.status.code(), Some(1));
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains("in use") && lines[0].contains("trying again for 6 s"), "{said}");
    assert!(lines[1].contains("in use") && lines.len() == 2, "{said}");
}

#[test]
fn a_cache_of_another_primary_is_refused() {
    let (place, arguments) = Place::with_disk();
    place.start(&arguments).kill();
    place.make("other.img", 64 * MIB);
    let said = place.refuse(&place.serve("other.img", "cache.img"));
    assert!(said.contains("disk.img") && said.contains("other.img"), "{said}");
    place.start(&arguments).kill();
}

#[test]
fn a_primary_that_shrank_or_changed_is_refused() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    write(&place, &noise(4, 1 << 20));
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    let file = fs::File::options().write(true).open(place.path("disk.img")).expect("it is there");
    std::os::unix::fs::FileExt::write_all_at(&file, b"changed", 64 * MIB - 4096)
        .expect("it is written");
    let said = place.refuse(&arguments);
    assert!(said.contains("was changed since"), "{said}");
    file.set_len(32 * MIB).expect("it can be cut");
    let said = place.refuse(&arguments);
    assert!(said.contains("shrunk"), "{said}");
}

#[test]
fn an_older_copy_of_the_cache_is_refused() {
    let (place, arguments) = Place::with_disk();
    let stop = |server: support::Server| {
        server.signal("TERM");
        assert_eq!(server.wait(), Some(0));
    };
    stop(place.start(&arguments));
    fs::copy(place.path("cache.img"), place.path("older")).expect("it can be copied");
    let server = place.start(&arguments);
    write(&place, &noise(20, 1 << 20));
    stop(server);
    fs::copy(place.path("cache.img"), place.path("newer")).expect("it can be copied");
    fs::copy(place.path("older"), place.path("cache.img")).expect("it can be put back");
    let said = place.refuse(&arguments);
    assert!(said.contains("older copy") && said.contains("--reset-cache"), "{said}");
    fs::copy(place.path("newer"), place.path("cache.img")).expect("it can be put back");
    let server = place.start(&arguments);
    assert_eq!(read(&place, 1 << 20), noise(20, 1 << 20));
    stop(server);
}

#[test]
fn a_damaged_superblock_is_survived_and_two_are_refused() {
    let (place, arguments) = Place::with_disk();
    let data = noise(21, 1 << 20);
    for damaged in [0, 65536] {
        let server = place.start(&arguments);
        write(&place, &data);
        server.signal("TERM");
        assert_eq!(server.wait(), Some(0));
        damage(&place, damaged);
        let server = place.start(&arguments);
        assert_eq!(read(&place, data.len()), data);
        server.kill();
    }
    damage(&place, 0);
    damage(&place, 65536);
    let said = place.refuse(&arguments);
    assert!(said.contains("superblocks") && said.contains("damaged"), "{said}");
}

fn damage(place: &Place, offset: u64) {
    let file = fs::File::options().write(true).open(place.path("cache.img"));
    let file = file.expect("it is there");
    std::os::unix::fs::FileExt::write_all_at(&file, b"damage", offset + 40).expect("it is written");
}

#[test]
fn a_read_only_volume_takes_no_writes() {
    let (place, mut arguments) = Place::with_disk();
    arguments.push("--read-only".to_owned());
    let server = place.start(&arguments);
    let info = client("nbdinfo", &[&place.uri()]);
    assert!(info.contains("is_read_only: true"), "{info}");
    let mut nbd = support::nbd::Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    assert!(nbd.write(0, &[1; 4096], false).is_err());
    assert_eq!(server.status()["volumes"][0]["read_only"], true);
}

#[test]
fn a_primary_that_grew_is_served_whole() {
    let (place, arguments) = Place::with_disk();
    let data = noise(22, 1 << 20);
    let server = place.start(&arguments);
    write(&place, &data);
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    let file = fs::File::options().write(true).open(place.path("disk.img")).expect("it is there");
    file.set_len(96 * MIB).expect("it can grow");
    drop(file);
    let _server = place.start(&arguments);
    assert_eq!(client("nbdinfo", &["--size", &place.uri()]).trim(), (96 * MIB).to_string());
    assert_eq!(read(&place, data.len()), data);
}

#[test]
fn a_reset_asks_before_it_loses_data() {
    let (place, mut arguments) = Place::with_disk();
    let server = place.start(&arguments);
    // Nothing may be destaged before the server is killed.
    write(&place, &noise(5, 1 << 20));
    assert_ne!(server.status()["cache"]["dirty_bytes"], 0);
    server.kill();
    arguments.push("--reset-cache".to_owned());
    let said = place.refuse(&arguments);
    assert!(said.contains("not on the primaries") && said.contains("--accept-data-loss"), "{said}");
    arguments.push("--accept-data-loss".to_owned());
    let server = place.start(&arguments);
    assert_eq!(server.status()["cache"]["dirty_bytes"], 0);
    assert_eq!(server.status()["cache"]["cached_bytes"], 0);
    // Left in a unit file, neither option takes effect again.
    let data = noise(6, 1 << 20);
    write(&place, &data);
    server.kill();
    let server = place.start(&arguments);
    assert_eq!(read(&place, data.len()), data);
    assert_ne!(server.status()["cache"]["cached_bytes"], 0);
    server.kill();
    // After a start without them, they take effect again.
    let without = &arguments[..arguments.len() - 2];
    place.start(without).kill();
    let server = place.start(&arguments);
    assert_eq!(server.status()["cache"]["cached_bytes"], 0);
}

#[test]
fn a_reset_says_what_it_would_destroy_and_asks() {
    let place = Place::new();
    place.make("disk.img", 64 * MIB);
    let arguments = place.serve("disk.img", "cache.img");
    let reset = [&arguments[..], &["--reset-cache".to_owned()]].concat();
    let both = [&reset[..], &["--accept-data-loss".to_owned()]].concat();
    // The magic number of ext4 at its offset.
    let mut foreign = vec![0; 64 << 20];
    foreign[1024 + 56..1024 + 58].copy_from_slice(&[0x53, 0xef]);
    fs::write(place.path("cache.img"), &foreign).expect("it is written");
    for arguments in [&arguments, &reset] {
        let said = place.refuse(arguments);
        assert!(said.contains("ext4"), "{said}");
    }
    assert!(fs::read(place.path("cache.img")).expect("it is there") == foreign);
    let server = place.start(&both);
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    // The two devices are swapped: the primary is a cache.
    fs::rename(place.path("cache.img"), place.path("other.img")).expect("it can be renamed");
    fs::rename(place.path("disk.img"), place.path("cache.img")).expect("it can be renamed");
    fs::rename(place.path("other.img"), place.path("disk.img")).expect("it can be renamed");
    let said = place.refuse(&both);
    assert!(said.contains("swapped"), "{said}");
}

#[test]
fn devices_that_cannot_be_used_are_refused() {
    let (place, arguments) = Place::with_disk();
    let with = |name: &str, value: &str| {
        let mut changed = arguments.clone();
        let at = changed.iter().position(|argument| argument.starts_with(name));
        changed[at.expect("it is given")] = format!("{name}={value}");
        changed
    };
    fs::write(place.path("garbage"), noise(6, 32 << 20)).expect("a file can be written");
    place.make("small", MIB + 4096);
    let garbage = place.text("garbage");
    for (name, value, words) in [
        ("--cache", garbage.as_str(), "not a Forebay cache"),
        ("--cache", &place.text("small"), "need at least"),
        ("--cache", &place.text("missing"), "give it a size"),
        ("--primary", &place.text("missing"), "missing"),
        ("--state", "/proc/forebay", "--state"),
        ("--nbd", "unix:/nonexistent/nbd.sock", "/nonexistent/nbd.sock"),
    ] {
        let said = place.refuse(&with(name, value));
        assert!(said.contains(words), "{name}={value}: {words:?} is missing from {said}");
    }
    assert_eq!(fs::read(&garbage).expect("it is there"), noise(6, 32 << 20), "left alone");
}

#[test]
fn check_finds_damage_and_dump_lists_blocks() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    let data = noise(7, 1 << 20);
    write(&place, &data);
    server.kill();
    let cache = place.text("cache.img");
    let dump = forebay(&["dump", &cache, "--blocks", "--json"]);
    assert_eq!(dump.status.code(), Some(0), "{}", String::from_utf8_lossy(&dump.stderr));
    let dump: serde_json::Value = serde_json::from_slice(&dump.stdout).expect("it prints JSON");
    let blocks = dump["blocks"].as_array().expect("blocks were asked for");
    let block = blocks.iter().find(|block| block["block"] == 9).expect("block 9 was written");
    assert_eq!(forebay(&["check", &cache]).status.code(), Some(0));

    let offset = block["offset"].as_u64().expect("it is somewhere");
    let file = fs::File::options().write(true).open(&cache).expect("it is there");
    std::os::unix::fs::FileExt::write_all_at(&file, b"rot", offset + 100).expect("it is written");
    drop(file);
    let checked = forebay(&["check", &cache]);
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert_eq!(checked.status.code(), Some(1), "{said}");
    assert!(said.contains("problem: "), "{said}");
    assert!(said.contains(" dirty, 4 KiB of it lost (unreadable blocks: 1)"), "{said}");
    let fast = forebay(&["check", "--fast", &cache]);
    let said = String::from_utf8_lossy(&fast.stdout).into_owned();
    assert!(said.contains("good: its structures are sound"), "{said}");
}

#[test]
fn several_volumes_share_a_cache() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.make(&format!("{name}.img"), 16 * MIB);
    }
    let volume = |name: &str| {
        let primary = place.text(&format!("{name}.img"));
        format!("[[volume]]\nname = \"{name}\"\nprimary = \"{primary}\"\n")
    };
    let text = format!(
        "[cache]\npath = \"{}\"\nsize = \"32MiB\"\nstate_dir = \"{}\"\n\
         [control]\nsocket = \"{}\"\n[server]\nshards = 1\nnbd = [\"unix:{}\"]\n{}{}",
        place.text("cache.img"),
        place.text("state"),
        place.text("control.sock"),
        place.text("nbd.sock"),
        volume("a"),
        volume("b")
    );
    fs::write(place.path("forebay.toml"), text).expect("a file can be written");
    let arguments = ["serve".to_owned(), "--config".to_owned(), place.text("forebay.toml")];
    let server = place.start(&arguments);
    for (name, seed) in [("a", 8), ("b", 9)] {
        fs::write(place.path("data"), noise(seed, 1 << 20)).expect("a file can be written");
        let uri = format!("nbd+unix:///{name}?socket={}", place.text("nbd.sock"));
        client("nbdcopy", &["--flush", &place.text("data"), &uri]);
    }
    server.stop(&["--drain"]);
    for (name, seed) in [("a", 8), ("b", 9)] {
        let mut bytes = fs::read(place.path(&format!("{name}.img"))).expect("it is there");
        bytes.truncate(1 << 20);
        assert_eq!(bytes, noise(seed, 1 << 20), "{name}");
    }
}
