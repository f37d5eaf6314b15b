//! Failures around a running server: a primary that fails or vanishes, too many clients or clients
//! that send garbage, and a service manager that waits for the ready message.

#[path = "support/nbdkit.rs"]
mod nbdkit;
mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nbdkit::Nbdkit;
use support::nbd::Nbd;
use support::{Place, Server, client, forebay, noise, until};

const EIO: i32 = 5;
const BLOCK: u64 = 4096;

/// A process that is killed with the test.
struct Helper(Child);

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The arguments of a server whose primary is at the NBD socket `san`.
fn over_nbd(place: &Place) -> Vec<String> {
    let mut arguments = place.serve("unused", "cache.img,size=32MiB");
    arguments[1] = format!("--primary=nbd+unix:///?socket={}", place.text("san.sock"));
    arguments
}

fn counter(server: &Server, name: &str) -> u64 {
    server.status()["counters"][name].as_u64().expect("it is a counter")
}

/// Block `at` of the tests' data; blocks are apart, so that they do not form a sequential stream.
fn block(at: u64) -> (u64, Vec<u8>) {
    (at * 17 % 1000 * BLOCK, noise(at + 1, BLOCK as usize))
}

fn write_blocks(nbd: &mut Nbd, which: std::ops::Range<u64>) {
    for (offset, bytes) in which.map(block) {
        nbd.write(offset, &bytes, false).expect("the cache takes it");
    }
    nbd.flush().expect("the cache takes it");
}

fn check_blocks(nbd: &mut Nbd, which: std::ops::Range<u64>) {
    let mut found = vec![0; BLOCK as usize];
    for (offset, bytes) in which.map(block) {
        nbd.read(offset, &mut found).expect("it can be read");
        assert!(found == bytes, "the block at {offset} is wrong");
    }
}

#[test]
fn a_primary_that_fails_costs_what_it_alone_has() {
    let place = Place::new();
    let trigger = place.text("fails");
    let errors = format!("error-file={trigger}");
    let filter = ["--filter=error", "memory", "64M", "error-rate=100%", &errors];
    let _san = Nbdkit::start(&place.path("san.sock"), &filter);
    let server = place.start(&over_nbd(&place));
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    write_blocks(&mut nbd, 0..100);

    fs::write(&trigger, "").expect("a file can be written");
    let mut found = vec![0; BLOCK as usize];
    let missed = nbd.read(5000 * BLOCK, &mut found);
    assert_eq!(missed.expect_err("nobody has it").raw_os_error(), Some(EIO));
    check_blocks(&mut nbd, 0..100);
    write_blocks(&mut nbd, 100..200);
    check_blocks(&mut nbd, 100..200);
    until("destaging meets the error", || counter(&server, "primary_errors") > 1);
    assert!(counter(&server, "dirty_blocks") > 0, "what is not on the primary stays dirty");
    assert_eq!(server.status()["health"], "good", "the cache is not to blame");

    fs::remove_file(&trigger).expect("it is there");
    server.ask(&["drain", "disk"]);
    nbd.read(5000 * BLOCK, &mut found).expect("the primary is back");
    server.stop(&[]);
    let mut san = Nbd::connect(&place.path("san.sock"), "").expect("it serves");
    check_blocks(&mut san, 0..200);
}

#[test]
fn faults_and_delays_of_a_uri_are_those_of_the_primary() {
    let (place, mut arguments) = Place::with_disk();
    let plain = arguments[1].clone();
    arguments[1] = format!("{plain}?fault=write:1&delay=100ms");
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mut found = vec![0; BLOCK as usize];
    let mut read = || {
        let begin = Instant::now();
        nbd.read(5000 * BLOCK, &mut found).expect("reads do not fail");
        begin.elapsed()
    };
    let (miss, hit) = (read(), read());
    assert!(miss >= Duration::from_millis(100) && hit < miss, "{miss:?}, then {hit:?}");
    write_blocks(&mut nbd, 0..50);
    until("destaging meets the error", || counter(&server, "primary_errors") > 0);
    assert!(counter(&server, "dirty_blocks") > 0, "what is not on the primary stays dirty");
    server.stop(&[]);

    // The cache recognizes the same primary, and nothing is lost.
    arguments[1] = plain;
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    check_blocks(&mut nbd, 0..50);
    server.stop(&["--drain"]);
}

#[test]
fn a_primary_that_vanishes_is_found_again() {
    let place = Place::new();
    place.make("san.img", 64 << 20);
    let file = format!("file={}", place.text("san.img"));
    let san = Nbdkit::start(&place.path("san.sock"), &["file", &file]);
    let server = place.start(&over_nbd(&place));
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    write_blocks(&mut nbd, 0..100);
    drop(san);

    let mut found = vec![0; BLOCK as usize];
    nbd.read(5000 * BLOCK, &mut found).expect_err("nobody has it");
    check_blocks(&mut nbd, 0..100);
    write_blocks(&mut nbd, 100..200);

    let _san = Nbdkit::start(&place.path("san.sock"), &["file", &file]);
    until("it is found again", || nbd.read(5000 * BLOCK, &mut found).is_ok());
    server.stop(&["--drain"]);
    let mut san = Nbd::connect(&place.path("san.sock"), "").expect("it serves");
    check_blocks(&mut san, 0..200);
}

#[test]
fn clients_beyond_the_limit_are_turned_away_and_garbage_hurts_nobody() {
    let place = Place::new();
    place.make("disk.img", 16 << 20);
    let mut arguments = place.serve("disk.img", "cache.img,size=32MiB");
    arguments.push("--max-clients=2".to_owned());
    let server = place.start(&arguments);
    let socket = place.path("nbd.sock");
    let mut first = Nbd::connect(&socket, "disk").expect("there is room");
    assert_eq!(first.size, 16 << 20);
    let mut second = UnixStream::connect(&socket).expect("there is room");
    until("both are counted", || server.status()["clients"] == 2);
    assert!(Nbd::connect(&socket, "disk").is_err(), "the third is turned away");

    second.write_all(&noise(1, 64 << 10)).expect("the socket takes it");
    let mut rest = Vec::new();
    let _ = second.read_to_end(&mut rest);
    until("the garbage's connection is closed", || server.status()["clients"] == 1);
    write_blocks(&mut first, 0..20);
    check_blocks(&mut first, 0..20);
    Nbd::connect(&socket, "disk").expect("there is room again");
}

#[test]
fn a_port_is_chosen_and_tls_is_required() {
    let place = Place::new();
    place.make("disk.img", 16 << 20);
    let (cert, key) = place.certificate();
    let mut arguments = place.serve("disk.img", "cache.img,size=32MiB");
    let at = arguments.iter().position(|argument| argument.starts_with("--nbd")).expect("given");
    arguments[at] = "--nbd=tcp:127.0.0.1:0".to_owned();
    arguments.extend([format!("--tls-cert={cert}"), format!("--tls-key={key}")]);
    let server = place.start(&arguments);
    let port = server.ready.trim().rsplit(':').next().expect("a port").to_owned();
    assert_ne!(port, "0", "{}", server.ready);
    let uri = format!(
        "nbds://localhost:{port}/disk?tls-certificates={}",
        place.path("").to_string_lossy().trim_end_matches('/')
    );
    assert_eq!(client("nbdinfo", &["--size", &uri]).trim(), (16 << 20).to_string());
    let plain = Command::new("nbdinfo").arg(format!("nbd://localhost:{port}/disk")).output();
    assert!(!plain.expect("nbdinfo runs").status.success(), "without TLS nothing is said");
    let text = fs::read_to_string(&key).expect("it is there");
    fs::write(&key, text.replace("BEGIN", "BEGUN")).expect("it can be written");
    drop(server);
    assert!(place.refuse(&arguments).contains("key"));
}

#[test]
fn systemd_and_the_log_are_told() {
    let place = Place::new();
    place.make("disk.img", 16 << 20);
    let notices = UnixDatagram::bind(place.path("notify.sock")).expect("a socket can be made");
    notices.set_read_timeout(Some(Duration::from_secs(30))).expect("it can be set");
    let mut arguments = place.serve("disk.img", "cache.img,size=32MiB");
    arguments.push("--log-format=json".to_owned());
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(&arguments).env("NOTIFY_SOCKET", place.path("notify.sock"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Helper(command.spawn().expect("the binary runs"));
    let heard = || {
        let mut notice = [0; 256];
        let length = notices.recv(&mut notice).expect("a notice comes");
        String::from_utf8_lossy(&notice[..length]).into_owned()
    };
    assert!(heard().contains("READY=1"));
    let control = format!("--control={}", place.text("control.sock"));
    assert_eq!(forebay(&["stop", &control]).status.code(), Some(0));
    assert!(heard().contains("STOPPING=1"));
    assert!(child.0.wait().expect("it is our child").success());
    let mut log = String::new();
    let mut stderr = child.0.stderr.take().expect("it was asked for");
    stderr.read_to_string(&mut log).expect("it is text");
    assert!(log.lines().count() >= 2, "{log}");
    for line in log.lines() {
        let entry: serde_json::Value = serde_json::from_str(line).expect("each line is JSON");
        assert!(entry["level"].is_string() && entry["message"].is_string(), "{line}");
    }
}

/// A server was killed during the drain before its stop, and `stop --drain` said that nothing is
/// left. Without a drain it always said so.
#[test]
fn what_a_stop_leaves_is_told_or_said_to_be_unknown() {
    let place = Place::new();
    place.make("disk.img", 256 << 20);
    let mut arguments = place.serve("disk.img", "cache.img,size=32MiB");
    arguments[1] += "?emulate=hdd";
    let write = |server: &Server| {
        let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
        for at in 0..1500 {
            let bytes = noise(at + 1, BLOCK as usize);
            nbd.write(at * 7919 % 65_536 * BLOCK, &bytes, false).expect("the cache takes it");
        }
        nbd.flush().expect("the cache takes it");
        assert!(counter(server, "dirty_blocks") > 1000, "a disk is slower than that");
    };
    let server = place.start(&arguments);
    write(&server);
    let control = format!("--control={}", place.text("control.sock"));
    let output = forebay(&["stop", "--json", &control]);
    let left: serde_json::Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    let dirty = left["dirty_bytes"].as_u64().expect("a number");
    assert_eq!((output.status.code(), &left["lost_bytes"]), (Some(0), &0.into()));
    assert_eq!(server.wait(), Some(0));

    let server = place.start(&arguments);
    let found = server.status()["cache"]["dirty_bytes"].as_u64().expect("a number");
    assert!(dirty > 0 && found <= dirty, "{found} of {dirty} bytes that were left");
    write(&server);
    let mut stop = Command::new(env!("CARGO_BIN_EXE_forebay"));
    stop.args(["stop", "--drain", &control]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let stop = stop.spawn().expect("the binary runs");
    until("the status tells of it", || server.status()["state"] == "stopping");
    server.kill();
    let output = stop.wait_with_output().expect("it is our child");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(output.stdout.is_empty(), "it must not say that all is well");
    assert!(said.contains("without telling whether all is drained"), "{said}");

    let server = place.start(&arguments);
    let output = forebay(&["stop", "--drain", "--json", &control]);
    let left: serde_json::Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    assert_eq!((output.status.code(), &left["dirty_bytes"]), (Some(0), &0.into()));
    assert_eq!(server.wait(), Some(0));
}

/// Ends the drain of a stop.
type GivesUp = fn(&Server);

/// Regression: a stop without a drain waited for the drain of another stop.
#[test]
fn a_drain_that_precedes_a_stop_is_seen_and_can_be_given_up() {
    let ways: [GivesUp; 2] = [|server| server.signal("TERM"), |server| drop(server.ask(&["stop"]))];
    ways.into_iter().for_each(a_drain_is_given_up);
}

fn a_drain_is_given_up(by: GivesUp) {
    let place = Place::new();
    place.make("disk.img", 256 << 20);
    let mut arguments = place.serve("disk.img", "cache.img,size=32MiB");
    arguments[1] += "?emulate=hdd";
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    // Spread over the disk, so that its heads must move for each block.
    let spread = |at: u64| (at * 7919 % 65_536 * BLOCK, noise(at + 1, BLOCK as usize));
    for (offset, bytes) in (0..1500).map(spread) {
        nbd.write(offset, &bytes, false).expect("the cache takes it");
    }
    nbd.flush().expect("the cache takes it");
    drop(nbd);
    let control = format!("--control={}", place.text("control.sock"));
    let mut stop = Command::new(env!("CARGO_BIN_EXE_forebay"));
    stop.args(["stop", "--drain", &control]).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut stop = Helper(stop.spawn().expect("the binary runs"));
    until("the status tells of it", || server.status()["state"] == "stopping");
    let dirty = server.status()["cache"]["dirty_bytes"].as_u64().expect("a number");
    assert!(dirty > 0, "a disk is slower than that");
    let again = forebay(&["stop", "--drain", &control]);
    let refusal = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(refusal.contains("the server is ending already"), "{refusal}");
    by(&server);
    assert_eq!(server.wait(), Some(0), "given up, but stopped in order");
    let mut said = String::new();
    let mut stderr = stop.0.stderr.take().expect("it was asked for");
    stderr.read_to_string(&mut said).expect("it is text");
    assert_eq!(stop.0.wait().expect("it is our child").code(), Some(1), "not all is drained");
    assert!(said.contains("a signal or another stop ended the drain"), "{said}");

    let server = place.start(&arguments);
    assert!(counter(&server, "dirty_blocks") > 0, "what was left is still in the cache");
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mut found = vec![0; BLOCK as usize];
    for (offset, bytes) in (0..1500).map(spread) {
        nbd.read(offset, &mut found).expect("it can be read");
        assert!(found == bytes, "the block at {offset} is wrong");
    }
}
