//! The memory of clients is bounded in total, whatever they request and do not read; a client that
//! reads nothing is disconnected, and all others are served.

mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use support::nbd::Nbd;
use support::{Place, Server, client, noise, until};
use tools::have;

const MIB: u64 = 1 << 20;
/// The longest request.
const LONGEST: u32 = 32 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// A server of 64 MiB with this much memory for clients, which may stall for a second.
fn serve(place: &Place, memory: &str) -> Server {
    serve_patiently(place, memory, "1s")
}

fn serve_patiently(place: &Place, memory: &str, stall: &str) -> Server {
    fs::write(place.path("disk.img"), noise(3, 64 << 20)).expect("a file can be written");
    let mut arguments = place.serve("disk.img", "cache.img,size=64MiB");
    arguments.push(format!("--client-memory={memory}"));
    arguments.push(format!("--client-stall-timeout={stall}"));
    place.start(&arguments)
}

fn connect(place: &Place) -> Nbd {
    Nbd::connect(&place.path("nbd.sock"), "disk").expect("there is a place")
}

/// Resident memory of the server, in MiB.
fn resident(server: &Server) -> u64 {
    let status = Path::new("/proc").join(server.id().to_string()).join("status");
    let status = fs::read_to_string(status).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kilobytes.expect("it has one").parse::<u64>().expect("a number") / 1024
}

fn clients(server: &Server) -> u64 {
    server.status()["clients"].as_u64().expect("a number")
}

/// 24 clients with requests of 32 MiB each used to take 768 MiB, for as long as they liked.
#[test]
fn clients_that_take_nothing_cost_what_they_may_and_are_disconnected() {
    let place = Place::new();
    let server = serve(&place, "128MiB");
    let mut other = connect(&place);
    let mut block = [0; 4096];
    other.read(0, &mut block).expect("it serves");
    let before = resident(&server);
    let mut idle: Vec<_> = (0..24).map(|_| connect(&place)).collect();
    for nbd in &mut idle {
        nbd.begin_read(0, LONGEST).expect("it is taken");
    }
    let (mut most, limit) = (0, Instant::now() + PATIENCE);
    let bytes = noise(3, 4096);
    while clients(&server) > 1 {
        assert!(Instant::now() < limit, "{} clients are left", clients(&server));
        most = most.max(resident(&server));
        other.read(0, &mut block).expect("small requests do not wait");
        assert!(block[..] == bytes);
        thread::sleep(Duration::from_millis(10));
    }
    assert!(most < before + 300, "{before} MiB, then {most} MiB");
    server.log("it took no byte of its answers for client_stall_timeout");
    let mut all = vec![0; LONGEST as usize];
    other.read(0, &mut all).expect("their memory is free again");
    assert!(all == noise(3, LONGEST as usize));
}

#[test]
fn requests_larger_than_the_memory_are_served_in_turn() {
    let place = Place::new();
    let server = serve(&place, "16MiB");
    let (read, written) = (noise(3, LONGEST as usize), noise(4, LONGEST as usize));
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut found = vec![0; LONGEST as usize];
                for _ in 0..2 {
                    connect(&place).read(0, &mut found).expect("it is served");
                    assert!(found == read);
                }
            });
        }
        // In both directions at once: data arrives while answers wait.
        let mut asks = connect(&place);
        let mut hears = asks.twin().expect("a descriptor is to be had");
        scope.spawn(move || {
            for _ in 0..2 {
                asks.begin_read(0, LONGEST).expect("it is taken");
                asks.begin_write(32 * MIB, LONGEST, &written).expect("it is taken");
            }
        });
        let mut found = vec![0; LONGEST as usize];
        for _ in 0..2 {
            hears.finish(&mut found).expect("it is served");
            assert!(found == read);
            hears.finish(&mut []).expect("it is served");
        }
    });
    let mut found = vec![0; LONGEST as usize];
    connect(&place).read(32 * MIB, &mut found).expect("it is served");
    assert!(found == noise(4, LONGEST as usize));
    drop(server);
}

/// The client waits for the server to take its write, and the server for the client to take its
/// answer.
#[test]
fn a_client_that_writes_instead_of_taking_its_answer_is_disconnected() {
    let place = Place::new();
    let _server = serve(&place, "16MiB");
    let mut stubborn = connect(&place);
    stubborn.begin_read(0, LONGEST).expect("it is taken");
    let outcome = stubborn.begin_write(0, LONGEST, &noise(5, LONGEST as usize));
    let kind = outcome.expect_err("nobody reads it").kind();
    assert!(matches!(kind, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{kind:?}");
    let mut found = vec![0; LONGEST as usize];
    connect(&place).read(0, &mut found).expect("the memory is free again");
    assert!(found == noise(3, LONGEST as usize), "nothing of a part of a write is written");
}

/// Encrypted input waits in another place than plain input.
#[test]
fn clients_over_tls_wait_for_memory_and_go_on() {
    if !have(&["nbdcopy", "openssl"]) {
        return;
    }
    let place = Place::new();
    fs::write(place.path("disk.img"), noise(3, 64 << 20)).expect("a file can be written");
    let mut arguments = place.serve("disk.img", "cache.img,size=64MiB");
    let (cert, key) = place.certificate();
    arguments.push("--client-memory=16MiB".to_owned());
    arguments.push("--nbd=tcp:127.0.0.1:0".to_owned());
    arguments.extend([format!("--tls-cert={cert}"), format!("--tls-key={key}")]);
    let server = place.start(&arguments);
    let tls = format!("tls-certificates={}", place.text(""));
    let uri = format!("nbds://localhost:{}/disk?{tls}", server.port());
    let (seen, other) = (place.text("seen"), place.text("other"));
    fs::write(&other, noise(6, 64 << 20)).expect("a file can be written");
    let many = ["--request-size=33554432", "--requests=4", "--connections=4"];
    let copy = |from: &str, to: &str| {
        client("timeout", &[&["60", "nbdcopy"], &many[..], &[from, to]].concat());
    };
    copy(&uri, &seen);
    assert!(fs::read(&seen).expect("it was copied") == noise(3, 64 << 20));
    copy(&other, &uri);
    copy(&uri, &seen);
    assert!(fs::read(&seen).expect("it was copied") == noise(6, 64 << 20));
}

#[test]
fn a_write_that_does_not_go_on_holds_no_memory_for_ever() {
    let place = Place::new();
    let server = serve(&place, "16MiB");
    let mut slow = connect(&place);
    slow.begin_write(0, LONGEST, &[7; 100_000]).expect("it is taken");
    let mut found = vec![0; 4 << 20];
    connect(&place).read(0, &mut found).expect("its turn comes");
    assert!(found == noise(3, 4 << 20), "nothing of a part of a write is written");
    server.log("it sent no byte of its write");
    assert!(slow.finish(&mut []).is_err(), "it is disconnected");
}

/// Takes an answer at `rate` bytes a second, as long as `goes_on`.
fn trickle(nbd: &mut Nbd, rate: u64, goes_on: impl Fn(Duration) -> bool) -> io::Result<()> {
    let (begin, mut taken) = (Instant::now(), 0);
    while goes_on(begin.elapsed()) {
        let due = begin.elapsed().as_millis() as u64 * rate / 1000 - taken;
        nbd.take(&mut vec![0; due as usize])?;
        taken += due;
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Six slow readers of long answers used to keep all memory for as long as they liked.
#[test]
fn a_slow_client_does_not_keep_memory_that_others_wait_for() {
    let place = Place::new();
    let server = serve(&place, "16MiB");
    let mut slow = connect(&place);
    slow.begin_read(0, 4 << 20).expect("it is taken");
    let mut other = connect(&place);
    other.begin_read(0, 8 << 20).expect("it is taken");
    // It takes bytes all the time, and would need 40 seconds for all.
    trickle(&mut slow, 100 << 10, |took| took < Duration::from_secs(30))
        .expect_err("it has about five seconds");
    server.log("it was too slow with memory that others waited for");
    let mut found = vec![0; 8 << 20];
    other.finish(&mut found).expect("its turn comes");
    assert!(found == noise(3, 8 << 20));
}

/// The kernel completes a send only when most of the bytes before it are taken, so a client that
/// took bytes all the time seemed to take none.
#[test]
fn a_slow_and_steady_client_is_not_disconnected() {
    let place = Place::new();
    let _server = serve_patiently(&place, "128MiB", "3s");
    let mut slow = connect(&place);
    slow.begin_read(0, LONGEST).expect("it is taken");
    trickle(&mut slow, 40 << 10, |took| took < Duration::from_secs(10)).expect("it stays");
}

/// Clients that had left while they waited for memory used to be served one after another.
#[test]
fn memory_goes_to_none_who_has_left() {
    let place = Place::new();
    let server = serve_patiently(&place, "16MiB", "30s");
    let mut holder = connect(&place);
    holder.begin_read(0, LONGEST).expect("it is taken");
    let mut waiting: Vec<_> = (0..20).map(|_| connect(&place)).collect();
    for nbd in &mut waiting {
        nbd.begin_read(0, LONGEST).expect("it is taken");
    }
    // They are in the line when the server has their requests.
    thread::sleep(Duration::from_millis(300));
    let reads = || server.status()["counters"]["reads"].as_u64().expect("it is counted");
    drop(waiting);
    let before = reads();
    let mut found = vec![0; LONGEST as usize];
    holder.finish(&mut found).expect("it is served");
    until("their places are free", || clients(&server) == 1);
    assert_eq!(reads(), before, "nothing was read for them");
}
