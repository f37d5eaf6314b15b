//! Shares of the cache, of a real server: a guarantee keeps the blocks of a volume that another one
//! would displace, and a limit that is lowered while serving shrinks a volume.

mod support;

use support::nbd::Nbd;
use support::{Place, Server, forebay, noise, until};

const MIB: u64 = 1 << 20;
/// Bytes of the cache.
const CACHE: u64 = 32 * MIB;
/// Bytes of RAM, the least there is. The device gets what RAM alone has once a minute.
const RAM: u64 = MIB;
/// The part of each volume that is read: it fits the cache, and it does not.
const DB: u64 = 6 * MIB;
const NEIGHBOR: u64 = 40 * MIB;
/// Nearly all of the first volume that the device has while RAM has the rest.
const MOST_OF_DB: u64 = (DB - RAM) * 95 / 100;

/// A server of two volumes; the first may have a guarantee.
fn two_volumes(place: &Place, guarantee: &str) -> Server {
    let config = format!(
        "[cache]\npath = \"{}\"\nsize = \"{CACHE}\"\nstate_dir = \"{}\"\neviction = \"lru\"\n\
         [memory]\nram = \"{RAM}\"\n\
         [server]\nshards = 1\nnbd = [\"unix:{}\"]\n[control]\nsocket = \"{}\"\n\
         [[volume]]\nname = \"db\"\nprimary = \"{}\"\nsequential_threshold = \"0\"\n{guarantee}\n\
         [[volume]]\nname = \"neighbor\"\nprimary = \"{}\"\nsequential_threshold = \"0\"\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("nbd.sock"),
        place.text("control.sock"),
        place.text("db.img"),
        place.text("neighbor.img")
    );
    for (name, bytes) in [("db.img", DB), ("neighbor.img", NEIGHBOR)] {
        std::fs::write(place.path(name), noise(bytes, bytes as usize)).expect("it can be written");
    }
    std::fs::write(place.path("forebay.toml"), config).expect("a file can be written");
    place.start(&["serve".to_owned(), format!("--config={}", place.text("forebay.toml"))])
}

/// Reads a volume again and again, until it has as many bytes in the cache: reads that are faster
/// than the log leave most blocks out.
fn fill(place: &Place, server: &Server, (at, name, size): (usize, &str, u64), bytes: u64) {
    until("the cache has it", || {
        read(place, name, size, 1);
        cached(server, at) >= bytes
    });
}

/// Reads the first `bytes` of a volume `times` times, in requests of 16 KiB.
fn read(place: &Place, volume: &str, bytes: u64, times: usize) {
    let mut client = Nbd::connect(&place.path("nbd.sock"), volume).expect("it is served");
    let mut buf = [0; 16 << 10];
    for at in (0..times).flat_map(|_| (0..bytes).step_by(16 << 10)) {
        client.read(at, &mut buf).expect("it can be read");
    }
}

fn cached(server: &Server, volume: usize) -> u64 {
    server.status()["volumes"][volume]["cached_bytes"].as_u64().expect("a number")
}

/// What the cache still has of a volume after another one has read more than fits, in bytes.
fn left_by_a_neighbor(guarantee: &str) -> u64 {
    let place = Place::new();
    let server = two_volumes(&place, guarantee);
    fill(&place, &server, (0, "db", DB), MOST_OF_DB);
    until("the neighbor has displaced a cache full of blocks", || {
        read(&place, "neighbor", NEIGHBOR, 1);
        let evicted = &server.status()["counters"]["evicted_blocks"];
        evicted.as_u64().is_some_and(|blocks| blocks * 4096 > CACHE)
    });
    let left = cached(&server, 0);
    server.stop(&[]);
    left
}

#[test]
fn a_guarantee_keeps_the_blocks_that_a_neighbor_would_displace() {
    let with = left_by_a_neighbor("cache_guarantee = \"30%\"");
    let without = left_by_a_neighbor("");
    println!("of {DB} bytes {with} are left with a guarantee, {without} without");
    assert!(with >= MOST_OF_DB, "{with} of {DB}");
    assert!(without < DB / 2, "{without} of {DB}");
}

#[test]
fn a_lowered_limit_shrinks_a_volume_while_it_is_served() {
    let place = Place::new();
    let server = two_volumes(&place, "");
    fill(&place, &server, (1, "neighbor", NEIGHBOR), CACHE / 2);
    let said = server.ask(&["set", "neighbor", "cache_limit=20%"]);
    assert_eq!(said, "neighbor: cache_limit=20%\n");
    until("it has shrunk", || cached(&server, 1) <= CACHE / 5);
    let volume = &server.status()["volumes"][1];
    assert!(volume["cache_limit_bytes"].as_u64().is_some_and(|limit| limit <= CACHE / 5));
    // It stays there, and leaves room to others.
    fill(&place, &server, (0, "db", DB), MOST_OF_DB);
    read(&place, "neighbor", NEIGHBOR, 2);
    until("it is within its limit", || cached(&server, 1) <= CACHE / 5);
    assert!(cached(&server, 0) >= MOST_OF_DB);
    server.stop(&[]);
}

#[test]
fn guarantees_that_leave_no_room_are_refused() {
    let place = Place::new();
    let server = two_volumes(&place, "cache_guarantee = \"60%\"");
    let control = place.text("control.sock");
    for (setting, expected) in [
        (
            "cache_guarantee=40%",
            "all of them together are 100%; guarantee 90% of the cache at most",
        ),
        ("cache_guarantee=95%", "95% is out of range; use 0% to 90%"),
    ] {
        let refused = forebay(&["set", "neighbor", setting, "--control", &control]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(expected), "{said}");
    }
    let refused = forebay(&["set", "db", "cache_limit=50%", "--control", &control]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("60% is more than the volume's cache_limit, 50%"), "{said}");
    server.stop(&[]);
}

#[test]
fn what_misses_bring_in_is_bound_and_counted_and_the_wear_is_shown() {
    let place = Place::new();
    let server = two_volumes(&place, "");
    assert!(!server.ask(&["status"]).contains("\nwear "));
    let said = server.ask(&["set", "fill_rate=64KiB", "wear_budget=1GiB"]);
    assert_eq!(said, "fill_rate=64KiB wear_budget=1GiB\n");
    read(&place, "db", DB, 2);
    let status = server.status();
    let count = |name: &str| status["counters"][name].as_u64().expect("a number");
    let refused = count("unadmitted_rate");
    assert!(refused > DB / 4096 && refused == count("unadmitted_blocks"), "{status}");
    assert!(count("admitted_blocks") < DB / 4096 / 2, "{status}");
    let wear = &status["cache"]["wear"];
    assert_eq!(
        (&wear["budget_bytes_per_day"], &wear["pressure_percent"]),
        (&(1 << 30).into(), &0.into())
    );
    let written = count("log_bytes") + count("store_bytes");
    assert_eq!(wear["written_bytes"], written);
    let text = server.ask(&["status"]);
    assert!(
        text.contains(" budget 1 GiB per day; now ") && text.contains(", pressure 0 %\n"),
        "{text}"
    );
    server.stop(&[]);
}
