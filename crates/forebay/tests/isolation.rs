//! Two volumes share a cache, and the primary of one goes away while the other is in use.

#[path = "support/nbdkit.rs"]
mod nbdkit;
mod support;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nbdkit::Nbdkit;
use support::nbd::Nbd;
use support::{Place, forebay, noise};

const BLOCK: u64 = 4096;
/// Longest time of a write of the healthy volume; a write at the other volume's limit takes as long
/// as the configured patience.
const SOON: Duration = Duration::from_secs(5);

/// The SAN, with a file as its disk.
fn start_san(place: &Place) -> Nbdkit {
    Nbdkit::start(&place.path("san.sock"), &["file", &place.text("a.img")])
}

/// A configuration of the volumes `a`, on the SAN, and `b`, on a file.
fn configuration(place: &Place) -> Vec<String> {
    let text = format!(
        "[cache]\npath = \"{}\"\nsize = \"32MiB\"\nstate_dir = \"{}\"\n\
         [memory]\nram = \"4MiB\"\n\
         [control]\nsocket = \"{}\"\n\
         [server]\nshards = 1\npatience = \"2s\"\nnbd = [\"unix:{}\"]\n\
         [[volume]]\nname = \"a\"\nprimary = \"nbd+unix:///?socket={}\"\n\
         [[volume]]\nname = \"b\"\nprimary = \"{}\"\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("control.sock"),
        place.text("nbd.sock"),
        place.text("san.sock"),
        place.text("b.img"),
    );
    let path = place.path("forebay.toml");
    fs::write(&path, text).expect("a file can be written");
    vec!["serve".to_owned(), format!("--config={}", path.display())]
}

/// The block of number `at`; blocks are apart, so that they do not form a sequential stream.
fn block(at: u64) -> (u64, Vec<u8>) {
    (at * 17 % 8000 * BLOCK, noise(at + 1, BLOCK as usize))
}

/// Writes blocks to a volume whose primary is away until one is refused; returns how many were
/// accepted.
fn fill(socket: &Path) -> u64 {
    let mut nbd = Nbd::connect(socket, "a").expect("it serves");
    for at in 0..8000 {
        let (offset, bytes) = block(at);
        if nbd.write(offset, &bytes, false).is_err() {
            return at;
        }
    }
    panic!("the volume never came to its limit");
}

#[test]
fn a_primary_that_is_away_stops_the_writes_of_its_own_volume_only() {
    let place = Place::new();
    place.make("a.img", 64 << 20);
    place.make("b.img", 64 << 20);
    let san = start_san(&place);
    let arguments = configuration(&place);
    let server = place.start(&arguments);
    let socket = place.path("nbd.sock");
    drop(san);

    let filler = {
        let socket = socket.clone();
        std::thread::spawn(move || fill(&socket))
    };
    let mut b = Nbd::connect(&socket, "b").expect("it serves");
    let (mut written, mut slowest) = (0, Duration::ZERO);
    let mut write = |b: &mut Nbd| {
        let (offset, bytes) = block(written);
        let began = Instant::now();
        b.write(offset, &bytes, false).expect("its primary is there");
        slowest = slowest.max(began.elapsed());
        written += 1;
        written
    };
    while !filler.is_finished() {
        write(&mut b);
        std::thread::sleep(Duration::from_millis(5));
    }
    let taken = filler.join().expect("it counts");
    assert!(taken > 500, "only {taken} blocks were taken");
    // More than fits into the cache together with the other volume's blocks: they are destaged
    // meanwhile.
    while write(&mut b) < 6000 {}
    b.flush().expect("its primary is there");
    assert!(slowest < SOON, "a write of the other volume took {slowest:?}");
    assert!(server.status()["counters"]["given_up_writes"].as_u64() > Some(0));

    // The blocks that the cache accepted for the volume can be read.
    let mut a = Nbd::connect(&socket, "a").expect("it serves");
    let mut found = vec![0; BLOCK as usize];
    for (offset, bytes) in (0..taken).map(block) {
        a.read(offset, &mut found).expect("the cache has it");
        assert!(found == bytes, "the block at {offset} is wrong");
    }

    // The other volume is drained as if it were alone.
    let (offset, bytes) = block(written);
    b.write(offset, &bytes, true).expect("its primary is there");
    let began = Instant::now();
    let said = server.ask(&["drain", "b", "--json"]);
    assert!(began.elapsed() < SOON, "it waited for {:?}", began.elapsed());
    let job: serde_json::Value = serde_json::from_str(&said).expect("it is JSON");
    assert_eq!((&job["volume"], &job["state"]), (&"b".into(), &"done".into()), "{said}");
    assert_eq!(job["remaining_bytes"], 0, "{said}");

    // Neither a drain nor a stop waits forever, and both report the dirty data left.
    drop((a, b));
    let control = server.control_argument();
    let drained = forebay(&["drain", "a", &control]);
    let said = String::from_utf8_lossy(&drained.stderr);
    assert_eq!(drained.status.code(), Some(1), "{said}");
    assert!(said.contains("remain") && said.contains("the primary of volume a does"), "{said}");
    let first = job["id"].as_u64().expect("it has a number");
    let second = first + 1;
    let asked = forebay(&["drain", &format!("--job={second}"), &control]);
    let said = String::from_utf8_lossy(&asked.stdout);
    let failed = format!("job {second} failed: volume a");
    assert!(asked.status.code() == Some(1) && said.contains(&failed), "{said}");
    let listed = server.ask(&["drain", "--list"]);
    let lines: Vec<&str> = listed.lines().collect();
    let done = format!("job {first} done: volume b");
    assert!(lines.len() == 2 && lines[0].starts_with(&done), "{listed}");
    let listed = server.ask(&["drain", "--list", "--json"]);
    assert_eq!(listed.lines().count(), 2, "an object a line");
    let stopped = forebay(&["stop", "--drain", &control]);
    let said = String::from_utf8_lossy(&stopped.stderr);
    assert_eq!(stopped.status.code(), Some(1), "{said}");
    assert!(said.contains("stay in the cache"), "{said}");
    assert_eq!(server.wait(), Some(1), "the server says so, too");

    // When the primary is back, nothing is lost.
    let _san = start_san(&place);
    let server = place.start(&arguments);
    server.ask(&["drain", "a"]);
    let mut a = Nbd::connect(&socket, "a").expect("it serves");
    for (offset, bytes) in (0..taken).map(block) {
        a.read(offset, &mut found).expect("it is there");
        assert!(found == bytes, "the block at {offset} is wrong");
    }
    drop(a);
    server.stop(&["--drain"]);
    let primary = fs::read(place.path("a.img")).expect("it is a file");
    for (offset, bytes) in (0..taken).map(block) {
        assert!(primary[offset as usize..][..BLOCK as usize] == bytes, "{offset} on the primary");
    }
}
