//! Statistics of windows, of real servers under load: they add up, by volume and by window.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use support::nbd::Nbd;
use support::{Place, Server, noise, until};

const MIB: u64 = 1 << 20;
const WINDOWS: [&str; 5] = ["now", "5m", "1h", "1d", "start"];

/// A server of two volumes.
fn two_volumes(place: &Place) -> Server {
    let config = format!(
        "[cache]\npath = \"{}\"\nsize = \"32MiB\"\nstate_dir = \"{}\"\n[memory]\nram = \"4MiB\"\n\
         [server]\nshards = 2\nnbd = [\"unix:{}\"]\n[control]\nsocket = \"{}\"\n\
         [[volume]]\nname = \"db\"\nprimary = \"{}\"\n\
         [[volume]]\nname = \"log\"\nprimary = \"{}\"\nmode = \"write-through\"\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("nbd.sock"),
        place.text("control.sock"),
        place.text("db.img"),
        place.text("log.img")
    );
    place.make("db.img", 64 * MIB);
    place.make("log.img", 64 * MIB);
    std::fs::write(place.path("forebay.toml"), config).expect("a file can be written");
    place.start(&["serve".to_owned(), format!("--config={}", place.text("forebay.toml"))])
}

/// Reads and writes a volume in an order that has hits, misses and streams, until told to stop.
fn load(place: &Place, volume: &str, stop: &AtomicBool) {
    let mut client = Nbd::connect(&place.path("nbd.sock"), volume).expect("it is served");
    let (mut buf, data) = (vec![0; 16 << 10], noise(7, 16 << 10));
    let mut round: u64 = 0;
    while !stop.load(Ordering::Relaxed) {
        let at = (round * 7919 % 4096) * 4096;
        client.read(at, &mut buf).expect("it can be read");
        client.read(round % 64 * 4096, &mut buf[..4096]).expect("it can be read");
        client.write(at, &data[..4096], false).expect("it can be written");
        if round.is_multiple_of(50) {
            client.flush().expect("it can be flushed");
            client.read_and_forget(round % 30 * MIB, 1 << 20).expect("it can be read");
        }
        round += 1;
    }
}

/// Ends the load when it goes out of scope, also because an assertion failed.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn statistics(server: &Server, window: &str) -> Value {
    let text = server.ask(&["status", "--window", window, "--json"]);
    serde_json::from_str(&text).expect("it prints JSON")
}

fn count(of: &Value, name: &str) -> u64 {
    of[name].as_u64().unwrap_or_else(|| panic!("{name} is missing in {of}"))
}

/// The sum of the counters whose names begin so.
fn total_of(counters: &Value, start: &str) -> u64 {
    let all = counters.as_object().expect("an object").iter();
    let all = all.filter(|(name, _)| name.starts_with(start));
    all.map(|(_, value)| value.as_u64().expect("a number")).sum()
}

/// The laws of `docs/user/statistics.md`.
fn check_laws(all: &Value) {
    let volumes = all["volumes"].as_array().expect("a list");
    let parts = volumes.iter().map(|volume| &volume["counters"]);
    for counters in parts.clone().chain([&all["cache"]["counters"]]) {
        let outcomes =
            ["hits", "partial_hits", "misses", "bypasses"].map(|name| count(counters, name));
        assert_eq!(count(counters, "lookups"), outcomes.iter().sum::<u64>(), "{counters}");
        assert_eq!(count(counters, "destaged_blocks"), total_of(counters, "destaged_for_"));
    }
    for volume in volumes {
        let dirty = total_of(&volume["counters"], "dirty_for_");
        assert_eq!(count(volume, "dirty_bytes"), dirty * 4096, "{volume}");
    }
    for volume in volumes {
        for operation in ["read", "write"] {
            let requests = |list: &str| {
                let all = volume[list].as_array().expect("a list").iter();
                let of = all.filter(|one| one["operation"] == operation);
                of.map(|one| count(one, "requests")).sum::<u64>()
            };
            assert_eq!(requests("latencies"), requests("tiers"), "{operation} by tier: {volume}");
        }
    }
    let (total, first) = (&all["cache"]["counters"], &volumes[0]["counters"]);
    for name in first.as_object().expect("an object").keys() {
        let sum: u64 = parts.clone().map(|counters| count(counters, name)).sum();
        assert_eq!(count(total, name), sum, "{name} of all volumes");
    }
}

#[test]
fn the_laws_hold_by_volume_and_by_window_under_load() {
    let place = Place::new();
    let server = two_volumes(&place);
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _ends = Ends(&stop);
        for volume in ["db", "log"] {
            let (place, stop) = (&place, &stop);
            scope.spawn(move || load(place, volume, stop));
        }
        until("both volumes are used", || {
            let all = statistics(&server, "now");
            check_laws(&all);
            (0..2).all(|at| count(&all["volumes"][at]["counters"], "writes") > 0)
        });
        for _ in 0..20 {
            WINDOWS.iter().for_each(|window| check_laws(&statistics(&server, window)));
        }
    });
    // The load may have been too short for anything to be destaged.
    server.ask(&["drain"]);
    let all = statistics(&server, "start");
    check_laws(&all);
    let status = server.status();
    for (name, value) in all["cache"]["counters"].as_object().expect("an object") {
        let moves = [
            "cpu_nanos",
            "destage",
            "primary_flushes",
            "cache_flushes",
            "log_",
            "store_",
            "dirty_for",
        ];
        if !moves.iter().any(|word| name.contains(word)) {
            assert_eq!(*value, status["counters"][name], "{name} since the start");
        }
    }
    for volume in all["volumes"].as_array().expect("a list") {
        let counters = &volume["counters"];
        assert!(count(counters, "ram_hit_blocks") > 0 && count(counters, "misses") > 0);
        assert!(count(counters, "primary_read_blocks") > 0, "{counters}");
        assert!(count(counters, "destaged_blocks") > 0, "{counters}");
        let tiers = volume["tiers"].as_array().expect("a list");
        let tiers: Vec<_> = tiers.iter().map(|one| (&one["operation"], &one["tier"])).collect();
        assert!(tiers.iter().any(|(operation, tier)| *operation == "read" && *tier == "ram"));
        let read = &volume["latencies"][0];
        assert_eq!(read["operation"], "read");
        let [p50, p99] = ["p50_micros", "p99_micros"].map(|name| read[name].as_f64().expect(name));
        assert!(p50 > 0.0 && p50 <= p99, "{read}");
        let primary = volume["primary"].as_array().expect("a list");
        assert!(primary.iter().any(|one| one["operation"] == "read" && count(one, "requests") > 0));
    }
    // Client requests are counted by the router, as often as clients asked.
    let text = server.ask(&["status", "db", "--window", "start"]);
    assert!(text.contains("READS/s") && text.contains("primary") && !text.contains("\nlog "));
    assert!(text.contains("dirty for up to: ") && text.contains("destaged for: "), "{text}");
    server.stop(&[]);
}

/// What each client has asked for, as often as it did.
#[test]
fn clients_are_listed_with_what_they_have_done() {
    let place = Place::new();
    let server = two_volumes(&place);
    let clients = |arguments: &[&str]| -> Value {
        let text = server.ask(&[&["clients", "--json"][..], arguments].concat());
        serde_json::from_str(&text).expect("it prints JSON")
    };
    assert_eq!(clients(&[]), serde_json::json!([]));
    let socket = place.path("nbd.sock");
    let mut one = Nbd::connect(&socket, "db").expect("it is served");
    let mut other = Nbd::connect(&socket, "log").expect("it is served");
    let mut buf = vec![0; 8192];
    for at in 0..3 {
        one.write(at * 8192, &noise(at, 8192), false).expect("it can be written");
        one.read(at * 8192, &mut buf).expect("it can be read");
    }
    other.read(MIB, &mut buf).expect("it can be read");
    other.flush().expect("it can be flushed");
    let all = clients(&[]);
    assert_eq!(all.as_array().map(Vec::len), Some(2));
    let of = |volume: &str| {
        let mut all = all.as_array().expect("a list").iter();
        let found = all.find(|one| one["volume"] == volume).expect("it is listed").clone();
        let operations = found["operations"].as_array().expect("a list");
        let requests: Vec<u64> = operations.iter().map(|one| count(one, "requests")).collect();
        (requests, count(&found, "read_bytes"), count(&found, "write_bytes"))
    };
    assert_eq!(of("db"), (vec![3, 3, 0, 0, 0, 0], 3 * 8192, 3 * 8192));
    assert_eq!(of("log"), (vec![1, 0, 1, 0, 0, 0], 8192, 0));
    assert_eq!(clients(&["log"]).as_array().map(Vec::len), Some(1));
    let refused = support::forebay(&["clients", "nothing", &server.control_argument()]);
    assert_eq!(refused.status.code(), Some(1));
    drop(one);
    until("a client is gone", || clients(&[]).as_array().map(Vec::len) == Some(1));
    server.stop(&[]);
}

#[test]
fn an_unknown_window_is_refused_with_the_known_ones() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    let output = support::forebay(&["status", "--window", "2m", &server.control_argument()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("2m") && said.contains("5m, 1h, 1d, start"), "{said}");
    server.stop(&[]);
}
