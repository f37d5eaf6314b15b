//! Caches that older builds wrote, opened by this one: every block is compared, then destaged and
//! compared on the primary. `data/make-image` makes such an image with a given build.
//!
//! | build | images |
//! |---|---|
//! | `a3df4d1` | `rewrite` and `similar` content after an orderly stop and a kill, `independent` after a kill |
//! | `45bc592` | `store-`: with a store, and each block of a unit with an entry of its own |

mod support;

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use support::nbd::Nbd;
use support::{Place, forebay};

/// Directory of the primaries of all images: the path is part of a primary's identity.
const PLACE: &str = "/var/tmp/forebay-images-of-older-builds";
/// Time of the last change of the primaries of stopped caches.
const CHANGED: Duration = Duration::from_secs(1_700_000_000);
const CACHE: usize = 6 << 20;
const DISK: usize = 2 << 20;

/// Unpacks one image; returns the content that clients must read.
fn lay_out(packed: &[u8]) -> Vec<u8> {
    let image = zstd::decode_all(packed).expect("it is whole");
    let (cache, rest) = image.split_at(CACHE);
    let (disk, rest) = rest.split_at(DISK);
    let (expected, witness) = rest.split_at(DISK);
    let place = Path::new(PLACE);
    let _ = fs::remove_dir_all(place);
    fs::create_dir_all(place.join("state")).expect("a directory can be made");
    fs::write(place.join("cache.img"), cache).expect("it can be written");
    fs::write(place.join("disk.img"), disk).expect("it can be written");
    let disk = File::options().write(true).open(place.join("disk.img")).expect("it is there");
    disk.set_modified(SystemTime::UNIX_EPOCH + CHANGED).expect("its time can be set");
    let text = std::str::from_utf8(witness).expect("a witness is text");
    let pool = text.lines().find_map(|line| line.strip_prefix("pool ")).expect("it names the pool");
    let path = place.join("state").join(format!("{pool}.witness"));
    fs::write(path, witness).expect("it can be written");
    expected.to_vec()
}

fn compare(name: &str, expected: &[u8], found: &[u8]) {
    let blocks = expected.chunks(4096).zip(found.chunks(4096));
    let wrong: Vec<usize> =
        blocks.enumerate().filter(|(_, (a, b))| a != b).map(|(at, _)| at).collect();
    assert!(wrong.is_empty() && expected.len() == found.len(), "{name}: wrong blocks {wrong:?}");
}

fn open(name: &str, packed: &[u8]) {
    let expected = lay_out(packed);
    let disk = fs::read(format!("{PLACE}/disk.img")).expect("it is there");
    assert!(disk != expected, "{name}: its dirty blocks are in the cache alone");
    let cache = format!("{PLACE}/cache.img");
    let checked = forebay(&["check", &cache]);
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert_eq!(checked.status.code(), Some(0), "{name}: {said}");
    let place = Place::new();
    let mut arguments = place.serve("disk.img", "cache.img");
    for (flag, file) in
        [("--primary=", "disk.img"), ("--cache=", "cache.img"), ("--state=", "state")]
    {
        let at = arguments.iter().position(|argument| argument.starts_with(flag));
        arguments[at.expect("it is given")] = format!("{flag}{PLACE}/{file}");
    }
    let server = place.start(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mut found = vec![0; DISK];
    for (at, part) in found.chunks_mut(64 << 10).enumerate() {
        nbd.read((at * (64 << 10)) as u64, part).expect("it can be read");
    }
    compare(name, &expected, &found);
    drop(nbd);
    server.stop(&["--drain"]);
    let disk = fs::read(format!("{PLACE}/disk.img")).expect("it is there");
    compare(&format!("{name}, drained"), &expected, &disk);
}

#[test]
fn caches_of_older_builds_are_opened_with_all_that_they_hold() {
    // The directory is the same for every run of this test on the machine.
    let lock = File::create(format!("{PLACE}.lock")).expect("a file can be made");
    lock.lock().expect("it can be locked");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut opened = 0;
    for entry in fs::read_dir(data).expect("the images are there") {
        let path = entry.expect("it can be listed").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".image.zst") {
            open(&name, &fs::read(&path).expect("it can be read"));
            opened += 1;
        }
    }
    assert!(opened >= 7, "{opened} images");
    fs::remove_dir_all(PLACE).expect("it is there");
    // If it were removed while held, another run would lock a file that is gone; so it stays.
    drop(lock);
}
