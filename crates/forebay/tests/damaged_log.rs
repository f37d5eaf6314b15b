//! A cache device whose log was damaged while no server used it. What the log has twice is used;
//! what the primary has as well is read from there; what nobody else has is an error or a refusal,
//! never older data.

mod support;

use std::fs;
use std::os::unix::fs::FileExt;

use serde_json::Value;
use support::nbd::Nbd;
use support::{Place, Server, forebay, noise};

const BLOCK: u64 = 4096;
const DISK: u64 = 64 << 20;
/// Where the only shard's segments begin.
const AREA: u64 = 1 << 20;
const BLOCKS: u64 = 600;
/// The last of them, each written alone and durable before the next.
const ALONE: u64 = 10;

fn place_of(number: u64) -> u64 {
    number * 7919 % (DISK / BLOCK) * BLOCK
}

fn content(number: u64) -> Vec<u8> {
    noise(number + 1, BLOCK as usize)
}

/// A pool that was filled and left, and its cache as it was then.
struct Left {
    place: Place,
    cache: Vec<u8>,
    dump: Value,
    starts: u64,
}

impl Left {
    /// All blocks are dirty; the server was killed.
    fn dirty() -> Self {
        Self::filled(false)
    }

    /// All blocks are clean; the server was stopped in order.
    fn clean() -> Self {
        Self::filled(true)
    }

    fn filled(clean: bool) -> Self {
        let place = Place::new();
        place.make("disk.img", DISK);
        let mut left = Self { place, cache: Vec::new(), dump: Value::Null, starts: 0 };
        let mut arguments = left.arguments();
        if !clean {
            // So slow that nothing to speak of is destaged.
            arguments[1] += "?emulate=hdd";
        }
        let server = left.place.start(&arguments);
        let mut nbd = left.connect();
        for number in 0..BLOCKS {
            let alone = number >= BLOCKS - ALONE;
            nbd.write(place_of(number), &content(number), alone).expect("it is written");
        }
        nbd.flush().expect("it is flushed");
        drop(nbd);
        if clean {
            server.ask(&["stop", "--drain"]);
            assert_eq!(server.wait(), Some(0));
        } else {
            server.kill();
        }
        let output = forebay(&["dump", &left.place.text("cache.img"), "--blocks", "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        left.dump = serde_json::from_slice(&output.stdout).expect("it prints JSON");
        assert_eq!(left.dump["problems"], Value::Array(Vec::new()));
        assert_eq!(left.dump["volumes"][0]["dirty_bytes"] == 0, clean, "{}", left.dump["volumes"]);
        left.cache = fs::read(left.place.path("cache.img")).expect("it is there");
        left
    }

    /// Each start has a state of its own, since the cache is put back every time.
    fn arguments(&mut self) -> Vec<String> {
        self.starts += 1;
        let mut arguments = self.place.serve("disk.img", "cache.img,size=32MiB");
        arguments.retain(|argument| !argument.starts_with("--state"));
        arguments.retain(|argument| !argument.starts_with("--shards"));
        let state = self.place.text(&format!("state{}", self.starts));
        arguments.extend([format!("--state={state}"), "--shards=1".to_owned()]);
        arguments.extend(["--no-compression".to_owned(), "--sequential-threshold=0".to_owned()]);
        arguments
    }

    fn connect(&self) -> Nbd {
        Nbd::connect(&self.place.path("nbd.sock"), "disk").expect("it serves")
    }

    /// Puts the cache back as it was, but for these bytes.
    fn damage(&self, places: &[u64]) {
        let file = fs::File::options().write(true).open(self.place.path("cache.img"));
        let file = file.expect("it is there");
        file.lock().expect("no server uses it");
        file.write_all_at(&self.cache, 0).expect("it is written");
        for &at in places {
            let wrong = self.cache[at as usize..at as usize + 16].iter().map(|byte| !byte);
            file.write_all_at(&wrong.collect::<Vec<u8>>(), at).expect("it is written");
        }
    }

    fn refused(&mut self) -> String {
        let arguments = self.arguments();
        self.place.refuse(&arguments)
    }

    fn start(&mut self) -> Server {
        let arguments = self.arguments();
        self.place.start(&arguments)
    }

    fn number(&self, name: &str) -> u64 {
        self.dump["shards"][0][name].as_u64().expect("it is a number")
    }

    /// First and last byte but one page of a sealed segment in the midst of the log.
    fn sealed(&self) -> (u64, u64) {
        let size = self.dump["segment_size"].as_u64().expect("it is a number");
        let segment = (self.number("first_segment") + self.number("last_segment")) / 2;
        assert!(segment < self.number("last_segment"), "it must be sealed");
        (AREA + segment * size, AREA + (segment + 1) * size - BLOCK)
    }

    /// Where the payload of block `number` is.
    fn payload(&self, number: u64) -> (u64, u64) {
        let blocks = self.dump["blocks"].as_array().expect("blocks were asked for");
        let wanted = place_of(number) / BLOCK;
        let block = blocks.iter().find(|block| block["block"] == wanted).expect("it is there");
        assert_eq!(block["kind"], "raw");
        let number = |name: &str| block[name].as_u64().expect("it is a number");
        (number("offset"), number("record"))
    }

    /// Reads every block; those that cannot be read.
    fn unreadable(&self) -> Vec<u64> {
        let mut nbd = self.connect();
        let mut found = vec![0; BLOCK as usize];
        let mut unreadable = Vec::new();
        for number in 0..BLOCKS {
            match nbd.read(place_of(number), &mut found) {
                Ok(()) => assert!(found == content(number), "block {number} is wrong"),
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(5), "block {number}: {error}");
                    unreadable.push(number);
                }
            }
        }
        unreadable
    }
}

#[test]
fn a_damaged_footer_is_replaced_by_the_records() {
    let mut left = Left::dirty();
    let (_, last_page) = left.sealed();
    for (what, at) in [("trailer", last_page + BLOCK - 128), ("entries", last_page)] {
        left.damage(&[at]);
        let server = left.start();
        assert!(left.unreadable().is_empty(), "{what}");
        server.kill();
    }
}

#[test]
fn a_damaged_segment_with_dirty_blocks_is_refused_and_nothing_is_changed() {
    let mut left = Left::dirty();
    let (first_page, last_page) = left.sealed();
    left.damage(&[first_page, last_page + BLOCK - 128]);
    let damaged = fs::read(left.place.path("cache.img")).expect("it is there");
    let said = left.refused();
    assert!(said.contains("damaged") && said.contains("dirty"), "{said}");
    let after = fs::read(left.place.path("cache.img")).expect("it is there");
    assert!(damaged[AREA as usize..] == after[AREA as usize..], "the log was changed");
    left.damage(&[]);
    let server = left.start();
    assert!(left.unreadable().is_empty());
    server.kill();
}

#[test]
fn a_damaged_segment_of_clean_blocks_is_left_out() {
    let mut left = Left::clean();
    let (first_page, last_page) = left.sealed();
    left.damage(&[first_page, last_page + BLOCK - 128]);
    let server = left.start();
    assert!(left.unreadable().is_empty(), "the primary has them");
    server.ask(&["stop"]);
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_record_that_was_durable_and_is_gone_is_missed() {
    let mut left = Left::dirty();
    let (payload, record) = left.payload(BLOCKS - 3);
    assert!(record < left.number("last_record"), "others follow");
    left.damage(&[payload - BLOCK]);
    let said = left.refused();
    assert!(said.contains("durable") || said.contains("damaged"), "{said}");
}

#[test]
fn a_dirty_block_with_bad_bytes_is_an_error_until_it_is_written_again() {
    let mut left = Left::dirty();
    let (payload, _) = left.payload(100);
    left.damage(&[payload + 1000]);
    let server = left.start();
    assert_eq!(left.unreadable(), [100]);
    assert_eq!(server.status()["cache"]["fenced_bytes"], BLOCK);
    assert!(server.ask(&["status"]).contains("LOST"));
    let mut nbd = left.connect();
    nbd.write(place_of(100), &content(100), true).expect("it can be written");
    assert!(left.unreadable().is_empty());
    server.ask(&["stop", "--drain"]);
    assert_eq!(server.wait(), Some(0));
    let disk = fs::read(left.place.path("disk.img")).expect("it is there");
    for number in 0..BLOCKS {
        let at = place_of(number) as usize;
        assert!(disk[at..at + BLOCK as usize] == content(number), "block {number} on the primary");
    }
}

#[test]
fn a_clean_block_with_bad_bytes_comes_from_the_primary() {
    let mut left = Left::clean();
    let (payload, _) = left.payload(100);
    left.damage(&[payload + 1000]);
    let server = left.start();
    assert!(left.unreadable().is_empty());
    assert_eq!(server.status()["cache"]["fenced_bytes"], 0);
    server.kill();
}
