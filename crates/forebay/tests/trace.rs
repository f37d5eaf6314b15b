//! `forebay trace` with a real server: the recorded requests are those that clients sent, and a
//! replay sends the same ones.

mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use forebay_block::{ByteRange, IoOp};
use forebay_trace::{TraceReader, TraceRequest};
use support::Place;
use support::nbd::Nbd;

const SIZE: u64 = 64 << 20;

fn forebay(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_forebay")).arg("trace").args(arguments).output();
    output.expect("it runs")
}

/// The output of a command, which must have succeeded.
fn printed(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The error of a command that must fail with this exit code.
fn refused(code: i32, arguments: &[&str]) -> String {
    let output = forebay(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}");
    said
}

/// The requests of a trace without their times.
fn requests(path: &Path) -> Vec<(IoOp, bool, ByteRange)> {
    let bytes = std::fs::read(path).expect("the trace is there");
    let reader = TraceReader::new(&bytes[..], None).expect("a trace");
    let plain = |request: TraceRequest| (request.op, request.fua, request.range);
    reader.map(|request| plain(request.expect("it is whole"))).collect()
}

/// Starts to record, and waits until the server records.
fn record(place: &Place, out: &str) -> std::process::Child {
    let child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["trace", "record", "disk", "--json"])
        .args(["--control", &place.text("control.sock"), "--out", &place.text(out)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let patience = Instant::now() + Duration::from_secs(20);
    // The head is written once all threads have been told.
    while std::fs::metadata(place.path(out)).map_or(0, |file| file.len()) == 0
        && Instant::now() < patience
    {
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

/// Sends Ctrl-C; returns the output.
fn interrupt(child: std::process::Child) -> serde_json::Value {
    let pid = child.id().to_string();
    let sent = Command::new("kill").args(["-INT", &pid]).status().expect("kill runs");
    assert!(sent.success());
    let output = child.wait_with_output().expect("it ends");
    serde_json::from_str(&printed(&output)).expect("JSON")
}

/// Sends 500 requests of all kinds that an NBD client can make, to both shards.
fn ask(client: &mut Nbd) -> Vec<(IoOp, bool, ByteRange)> {
    let mut asked = Vec::new();
    let mut buf = vec![0; 12_288];
    for i in 0u64..500 {
        let offset = i * 7919 * 512 % (SIZE - (1 << 20));
        let len = 512 * (1 + i % 24);
        let range = ByteRange::new(offset, len);
        let part = &mut buf[..usize::try_from(len).expect("it is short")];
        match i % 10 {
            0..5 => {
                client.read(offset, part).expect("it reads");
                asked.push((IoOp::Read, false, range));
            }
            9 => {
                client.flush().expect("it flushes");
                asked.push((IoOp::Flush, false, ByteRange::default()));
            }
            kind => {
                client.write(offset, part, kind == 8).expect("it writes");
                asked.push((IoOp::Write, kind == 8, range));
            }
        }
    }
    asked
}

#[test]
fn what_is_recorded_is_asked_again_by_a_replay() {
    let place = Place::new();
    place.make("primary.img", SIZE);
    let mut arguments = place.serve("primary.img", "cache.img");
    arguments[2] += ",size=64MiB";
    let server = place.start(&arguments);
    let mut client = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mut early = [0; 512];
    client.read(0, &mut early).expect("it reads");

    let recording = record(&place, "first.trace");
    let control = place.text("control.sock");
    let again =
        refused(1, &["record", "disk", "--control", &control, "--out", &place.text("other.trace")]);
    assert!(again.contains("being recorded already"), "{again}");
    let asked = ask(&mut client);
    let status = interrupt(recording);
    assert_eq!(status["requests"], 500, "{status}");
    assert_eq!((&status["dropped"], &status["state"]), (&0.into(), &"done".into()));
    assert_eq!(requests(&place.path("first.trace")), asked);

    let uri = format!("nbd+unix:///disk?socket={}", place.text("nbd.sock"));
    let first = place.text("first.trace");
    let unwilling = refused(2, &["replay", &first, &uri]);
    assert!(unwilling.contains("--write") && unwilling.contains("200 requests"), "{unwilling}");
    let recording = record(&place, "second.trace");
    // One request at a time keeps the order.
    let replay = ["replay", &first, &uri, "--write", "--speed=max", "--depth=1", "--json"];
    let report: serde_json::Value =
        serde_json::from_str(&printed(&forebay(&replay))).expect("JSON");
    assert_eq!((&report["requests"], &report["errors"]), (&500.into(), &0.into()), "{report}");
    let kinds: Vec<(&str, u64)> = report["latencies_micros"]
        .as_array()
        .expect("latencies")
        .iter()
        .map(|row| (row["operation"].as_str().unwrap_or(""), row["requests"].as_u64().unwrap_or(0)))
        .collect();
    assert_eq!(kinds, [("read", 250), ("write", 200), ("flush", 50)]);
    interrupt(recording);
    assert_eq!(requests(&place.path("second.trace")), asked);

    let taken = refused(1, &["record", "disk", "--control", &control, "--out", &first]);
    assert!(taken.contains("first.trace") && taken.contains("does not exist"), "{taken}");
    let unknown = refused(1, &["record", "desk", "--control", &control, "--out", "/tmp/x"]);
    assert!(unknown.contains("\"desk\"") && unknown.contains("disk"), "{unknown}");
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_replay_keeps_time_and_minds_the_end() {
    let place = Place::new();
    place.make("disk.img", 1 << 20);
    let trace = place.text("a.csv");
    let lines = "0,R,0,8\n200000,R,2047,2\n400000,W,8,8\n600000,R,4096,8\n";
    std::fs::write(&trace, lines).expect("a trace can be written");
    let disk = place.text("disk.img");
    let said = refused(2, &["replay", &trace, &disk, "--reads-only"]);
    assert!(said.contains("byte 2101248") && said.contains("--past-end wrap"), "{said}");
    let report = |more: &[&str]| -> serde_json::Value {
        let output = forebay(&[&["replay", &trace, &disk, "--json"], more].concat());
        serde_json::from_str(&printed(&output)).expect("JSON")
    };
    let kept = report(&["--reads-only", "--past-end=wrap", "--speed=2"]);
    assert_eq!((&kept["requests"], &kept["skipped"]), (&3.into(), &1.into()), "{kept}");
    let seconds = kept["seconds"].as_f64().expect("seconds");
    assert!((0.3..5.0).contains(&seconds), "600 ms at twice the speed took {seconds}");
    assert_eq!(kept["lateness_micros"]["requests"], 3);
    let written = report(&["--write", "--past-end=skip", "--speed=max"]);
    assert_eq!((&written["requests"], &written["skipped"]), (&2.into(), &2.into()), "{written}");
    let bytes = std::fs::read(&disk).expect("the disk is there");
    assert!(bytes[4096..8192].iter().any(|&byte| byte != 0), "the write was carried out");
    assert!(bytes[8192..].iter().all(|&byte| byte == 0), "and no more");
    for (arguments, words) in [
        (["replay", &trace, &disk, "--speed=0"], "factor above 0"),
        (["replay", &trace, "/nowhere/x", "--reads-only"], "/nowhere/x"),
        (["replay", "/nowhere/y", &disk, "--write"], "/nowhere/y"),
        (["replay", &disk, &disk, "--write"], "no known format"),
        (["replay", &trace, &disk, "--format=blktrace"], "blkparse"),
    ] {
        let output = forebay(&arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{arguments:?}: {said}");
    }
}

#[test]
fn a_recording_ends_by_itself() {
    let place = Place::new();
    place.make("primary.img", SIZE);
    let mut arguments = place.serve("primary.img", "cache.img");
    arguments[2] += ",size=64MiB";
    let server = place.start(&arguments);
    let control = place.text("control.sock");
    let out = place.text("short.trace");
    let said =
        printed(&forebay(&["record", "disk", "--control", &control, "--out", &out, "--seconds=1"]));
    assert!(said.contains("0 requests") && said.contains("short.trace"), "{said}");
    assert_eq!(requests(&place.path("short.trace")), []);
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn simulate_prints_a_table_and_json() {
    let cut = Path::new(env!("CARGO_MANIFEST_DIR")).join("../trace/tests/data/own_pg_bench.csv");
    let cut = cut.to_string_lossy();
    let table = printed(&forebay(&["simulate", &cut, "--size=10%,1MiB", "--policy=fifo,lru"]));
    let rows = |word: &str| table.lines().filter(|line| line.contains(word)).count();
    assert_eq!((rows("fifo"), rows("lru"), rows("(10.0%)")), (2, 2, 7), "{table}");
    assert_eq!((rows("textbook"), rows("optimum"), rows("LIRS")), (10, 2, 2), "{table}");
    let json = printed(&forebay(&["simulate", &cut, "--size=1MiB", "--json"]));
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let results = report["results"].as_array().expect("results");
    let named = |wanted: &serde_json::Value| -> Vec<String> {
        let rows = results.iter().filter(|row| row["textbook"] == *wanted);
        rows.map(|row| row["policy"].as_str().unwrap_or("").to_string()).collect()
    };
    assert_eq!(named(&true.into()), ["LRU", "S3-FIFO", "ARC", "LIRS", "optimum"]);
    assert_eq!(named(&false.into()), ["fifo", "lru", "frequency"], "every policy");
    let ratio = |row: &serde_json::Value| row["read_block_miss_ratio"].as_f64().unwrap_or(9.0);
    let optimum = results.iter().find(|row| row["policy"] == "optimum").map_or(9.0, ratio);
    for row in results {
        assert!(ratio(row) >= optimum && ratio(row) <= 1.0, "{row}");
        assert_eq!(row["default"], row["policy"] == "frequency", "{row}");
    }
    for row in results.iter().filter(|row| row["textbook"] == false) {
        let sum = ["logged_bytes", "admitted_bytes", "copied_bytes"]
            .map(|name| row[name].as_u64().unwrap_or(0));
        assert_eq!(row["ssd_bytes"].as_u64(), Some(sum.iter().sum()), "{row}");
    }
    let small = refused(2, &["simulate", &cut, "--size=4KiB"]);
    assert!(small.contains("4 KiB") && small.contains("32 KiB"), "{small}");
    for (large, what) in [
        (&["--size=99999GiB"][..], "a cache of 97.7 TiB is too large"),
        (&["--size=1MiB", "--ram=99TiB"], "a RAM tier of 99 TiB is too large"),
        (&["--size=1MiB", "--ram=15TiB", "--compress=16"], "a RAM tier of 15 TiB is too large"),
    ] {
        let said = refused(2, &[&["simulate", &cut], large].concat());
        assert!(said.contains(what) && said.contains("is the most"), "{said}");
    }
    assert!(refused(2, &["simulate", &cut, "--size=0%"]).contains("\"0%\""));
    assert!(refused(2, &["simulate", &cut, "--policy=arc"]).contains("frequency"));
    assert!(refused(2, &["simulate", &cut, "--policy=adaptive"]).contains("lru"));
}

#[test]
fn simulate_compares_layouts() {
    let cut = Path::new(env!("CARGO_MANIFEST_DIR")).join("../trace/tests/data/own_pg_bench.csv");
    let cut = cut.to_string_lossy();
    let both = ["simulate", &cut, "--size=1MiB", "--layout=log,journal-store", "--no-textbook"];
    let json = printed(&forebay(&[&both[..], &["--json"]].concat()));
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let results = report["results"].as_array().expect("results");
    let defaults: Vec<_> = results.iter().filter(|row| row["default"] == true).collect();
    let names = defaults.iter().map(|row| (row["layout"].as_str(), row["policy"].as_str()));
    let wanted = [(Some("log"), Some("frequency")), (Some("journal-store"), Some("adaptive"))];
    assert_eq!(names.collect::<Vec<_>>(), wanted);
    assert!(results.iter().all(|row| row["gap_closed"].is_null()), "there is no LRU to compare");
    let bytes = |row: &serde_json::Value, name: &str| row[name].as_u64().unwrap_or(0);
    for row in results.iter().filter(|row| row["layout"] == "journal-store") {
        let parts = ["logged_bytes", "admitted_bytes", "moved_bytes", "mapping_bytes"];
        let sum: u64 = parts.iter().map(|name| bytes(row, name)).sum();
        assert_eq!((bytes(row, "ssd_bytes"), bytes(row, "copied_bytes")), (sum, 0), "{row}");
        assert!(bytes(row, "moved_bytes") > 0 && bytes(row, "entries") > 0, "{row}");
    }
    let small = [&both[..], &["--journal=1"]].concat();
    assert!(refused(2, &small).contains("--journal 1 is too small"), "{}", refused(2, &small));
}
