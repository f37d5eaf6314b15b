//! Memory that cannot be allocated: an error before anything is written, or less of the device in
//! use.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use support::nbd::Nbd;
use support::{Place, forebay, noise};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Regression: a process that could not allocate used to end with SIGABRT, after a superblock and a
/// witness were written.
#[test]
fn ram_that_cannot_be_had_is_refused_and_nothing_is_written() {
    let (place, mut arguments) = Place::with_disk();
    arguments.push("--ram=8TiB".to_owned());
    arguments.retain(|argument| argument != "--ram=4MiB");
    let said = place.refuse(&arguments);
    assert!(said.contains("memory: 8 TiB for recent blocks") && said.contains("--ram"), "{said}");
    let with = |flag: &str| {
        let small = place.serve("disk.img", "cache.img,size=32MiB");
        place.refuse(&[&small[..], &[flag.to_owned()]].concat())
    };
    let said = with("--client-memory=1TiB");
    assert!(said.contains("1 TiB for clients") && said.contains("client_memory"), "{said}");
    let said = with("--ordered=1TiB");
    assert!(said.contains("1 TiB for ordered volumes") && said.contains("`ordered`"), "{said}");
    for name in ["cache.img", "state"] {
        assert!(!place.path(name).exists(), "{name} is left");
    }
    // Nor on an existing device.
    place.make("cache.img", 32 * MIB);
    place.refuse(&arguments);
    let bytes = fs::read(place.path("cache.img")).expect("it is there");
    assert!(bytes.iter().all(|&byte| byte == 0), "nothing was written on it");
}

#[test]
fn a_cache_with_little_memory_for_its_index_uses_less_of_its_device() {
    let place = Place::new();
    place.make("disk.img", 64 * MIB);
    place.make("cache.img", 16 * GIB);
    let few = place.serve("disk.img", "cache.img");
    let mut arguments = few.clone();
    arguments.push("--index=16MiB".to_owned());
    let server = place.start(&arguments);
    let size = |status: &serde_json::Value| status["cache"]["size"].as_u64().expect("a number");
    let status = server.status();
    let used = size(&status);
    assert!((GIB..2 * GIB).contains(&used), "{used}");
    assert_eq!(status["cache"]["device_size"].as_u64(), Some(16 * GIB));
    let index = status["counters"]["index_bytes"].as_u64().expect("a number");
    assert!(index <= 16 * MIB, "{index}");
    assert!(server.ask(&["status"]).contains("of the device's 16 GiB"));
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    nbd.write(0, &noise(1, 1 << 20), true).expect("it is written");
    drop(nbd);
    server.kill();

    // The cache keeps its size, however much memory there is now.
    for arguments in [&few, &[&few[..], &["--index=1MiB".to_owned()]].concat()] {
        let server = place.start(arguments);
        assert_eq!(size(&server.status()), used);
        let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
        let mut found = vec![0; 1 << 20];
        nbd.read(0, &mut found).expect("it can be read");
        assert!(found == noise(1, 1 << 20));
        drop(nbd);
        server.kill();
    }
}

/// 1 TiB of cache needs 12.6 GB for its index; here the process may have 5 GB.
#[test]
fn a_terabyte_of_cache_starts_under_a_limit_on_memory() {
    let place = Place::new();
    place.make("disk.img", 64 * MIB);
    place.make("cache.img", 1 << 40);
    let mut command = Command::new("prlimit");
    command.arg("--as=5000000000").arg(env!("CARGO_BIN_EXE_forebay"));
    command.args(place.serve("disk.img", "cache.img")).env("FOREBAY_NO_KEEPER", "1");
    let mut server =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("prlimit runs");
    let mut ready = String::new();
    let stdout = server.stdout.take().expect("it was asked for");
    BufReader::new(stdout).read_line(&mut ready).expect("it can be read");
    let control = format!("--control={}", place.text("control.sock"));
    let status = forebay(&["status", "--json", &control]);
    let stopped = forebay(&["stop", &control]);
    let code = server.wait().expect("it is our child").code();
    let mut said = String::new();
    let mut stderr = server.stderr.take().expect("it was asked for");
    stderr.read_to_string(&mut said).expect("it can be read");
    assert!(ready.starts_with("ready "), "{said}");
    assert!(said.contains("of the cache device's 1 TiB are used"), "{said}");
    assert_eq!((stopped.status.code(), code), (Some(0), Some(0)), "{said}");
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
    let used = status["cache"]["size"].as_u64().expect("a number");
    assert!((100 * GIB..400 * GIB).contains(&used), "{used}");
}
