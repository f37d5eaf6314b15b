//! The server is killed repeatedly under load, and while it recovers. No flushed data may be
//! missing, and no block may be a mixture of versions.
//!
//! Four clients write blocks of one volume; every sector of a block contains the block's number and
//! a version that only grows. A client knows which versions it has submitted, and which completed
//! before a successful flush. After a restart a block must hold one version between the two in all
//! of its sectors. Meanwhile fio writes and verifies another volume.

mod support;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use forebay_block::testing::Numbers;
use support::nbd::Nbd;
use support::{Place, Server, forebay};

/// How often the server is killed under load.
const ROUNDS: u64 = 20;
/// Duration of the load in a round.
const LOAD: Duration = Duration::from_millis(400);
/// Milliseconds after its start at which a recovering server is killed.
const RECOVERING: [u64; 5] = [2, 10, 20, 40, 80];

const CLIENTS: usize = 4;
const BLOCKS: u64 = 512;
const BLOCK: usize = 4096;
const SECTOR: usize = 512;
/// Writes between two flushes of a client.
const FLUSH_EVERY: u64 = 16;

/// A client's knowledge of one of its blocks.
#[derive(Clone, Copy, Default, Debug)]
struct Known {
    /// Highest version written before a successful flush, or seen after a restart.
    durable: u64,
    /// Highest version completed.
    completed: u64,
    /// Highest version submitted, perhaps never completed.
    submitted: u64,
}

/// A block of `version`: each sector holds both numbers, then bytes that compress somewhat.
fn content(block: u64, version: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BLOCK);
    for sector in 0..(BLOCK / SECTOR) as u64 {
        let words = [block, version, sector, block.wrapping_mul(version).wrapping_add(sector)];
        let line: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let noise = support::noise(words[3], SECTOR / 2);
        bytes.extend(&line);
        bytes.extend(&noise);
        bytes.resize(bytes.len() + SECTOR - line.len() - noise.len(), version as u8);
    }
    bytes
}

/// The version that all sectors of a block hold.
fn version_of(block: u64, bytes: &[u8]) -> Result<u64, String> {
    if bytes.iter().all(|&byte| byte == 0) {
        return Ok(0);
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let version = word(8);
    if bytes == content(block, version) {
        return Ok(version);
    }
    let versions: Vec<u64> = (0..BLOCK / SECTOR).map(|sector| word(sector * SECTOR + 8)).collect();
    Err(format!("block {block} is a mixture, its sectors of versions {versions:?}"))
}

/// One client's part of the volume.
#[derive(Clone)]
struct Part {
    first: u64,
    blocks: Vec<Known>,
    numbers: Numbers,
}

impl Part {
    fn next(&mut self, below: u64) -> u64 {
        self.numbers.below(below)
    }

    /// Writes until the server is gone.
    fn load(&mut self, socket: &Path) {
        let Ok(mut nbd) = Nbd::connect(socket, "disk") else { return };
        for count in 1.. {
            let at = self.next(BLOCKS) as usize;
            let block = self.first + at as u64;
            let fua = self.next(8) == 0;
            let version = self.blocks[at].submitted + 1;
            self.blocks[at].submitted = version;
            let offset = block * BLOCK as u64;
            if nbd.write(offset, &content(block, version), fua).is_err() {
                return;
            }
            self.blocks[at].completed = version;
            if fua {
                self.blocks[at].durable = version;
            }
            if count % FLUSH_EVERY == 0 {
                if nbd.flush().is_err() {
                    return;
                }
                self.blocks.iter_mut().for_each(|known| known.durable = known.completed);
            }
        }
    }

    /// Reads every block after a restart. The versions seen now must stay.
    fn verify(&mut self, mut read: impl FnMut(u64, &mut [u8])) {
        let mut bytes = vec![0; BLOCK];
        for (at, known) in self.blocks.iter_mut().enumerate() {
            let block = self.first + at as u64;
            read(block * BLOCK as u64, &mut bytes);
            let version = version_of(block, &bytes).unwrap_or_else(|error| panic!("{error}"));
            assert!(
                (known.durable..=known.submitted).contains(&version),
                "block {block} is version {version}, but {known:?}"
            );
            *known = Known { durable: version, completed: version, submitted: version };
        }
    }
}

fn verify_all(parts: &mut [Part], socket: &Path) {
    let mut nbd = Nbd::connect(socket, "disk").expect("it serves");
    for part in parts {
        part.verify(|offset, bytes| nbd.read(offset, bytes).expect("it can be read"));
    }
}

/// Runs fio on the other volume, which writes and verifies its data, until it has finished or the
/// server is gone.
fn fio(place: &Place, seconds: u64) -> Child {
    let uri = format!("--uri=nbd+unix:///load?socket={}", place.text("nbd.sock"));
    let runtime = format!("--runtime={seconds}");
    Command::new("fio")
        .args(["--name=load", "--ioengine=nbd", &uri, "--rw=randwrite", "--bs=4k", "--size=16m"])
        .args(["--iodepth=16", "--verify=crc32c", "--verify_backlog=256", "--verify_fatal=1"])
        .args(["--time_based", &runtime, "--randrepeat=0", "--verify_state_save=0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("fio runs (make setup)")
}

/// The outcome and output of fio: it may have lost its server, but must not have read wrong data.
fn said(mut fio: Child) -> (bool, String) {
    let mut text = String::new();
    fio.stdout.take().expect("asked for").read_to_string(&mut text).expect("it is text");
    fio.stderr.take().expect("asked for").read_to_string(&mut text).expect("it is text");
    let success = fio.wait().expect("it is our child").success();
    for wrong in ["verify failed", "bad magic", "bad header", "verify: "] {
        assert!(!text.contains(wrong), "fio read wrong data: {text}");
    }
    (success, text)
}

fn configuration(place: &Place, mode: &str, log_share: &str) -> PathBuf {
    for name in ["disk", "load"] {
        place.make(&format!("{name}.img"), 32 << 20);
    }
    let volume = |name: &str| {
        let primary = place.text(&format!("{name}.img"));
        let primary = format!("primary = \"{primary}?emulate=cloud\"");
        format!("[[volume]]\nname = \"{name}\"\n{primary}\nmode = \"{mode}\"\n")
    };
    let text = format!(
        "[cache]\npath = \"{}\"\nsize = \"24MiB\"\nlog_share = \"{log_share}\"\n\
         state_dir = \"{}\"\n[memory]\nram = \"1MiB\"\n[control]\nsocket = \"{}\"\n\
         [server]\nshards = 2\nnbd = [\"unix:{}\"]\n{}{}",
        place.text("cache.img"),
        place.text("state"),
        place.text("control.sock"),
        place.text("nbd.sock"),
        volume("disk"),
        volume("load")
    );
    let path = place.path("forebay.toml");
    fs::write(&path, text).expect("a file can be written");
    path
}

/// Checks the primary alone. The lock waits for a killed server's requests in flight.
fn verify_primary(parts: &mut [Part], place: &Place) {
    let mut file = fs::File::open(place.path("disk.img")).expect("it is there");
    file.lock().expect("the server is gone");
    let mut primary = Vec::new();
    file.read_to_end(&mut primary).expect("it can be read");
    for part in parts {
        part.verify(|offset, bytes| {
            let at = offset as usize;
            bytes.copy_from_slice(&primary[at..at + bytes.len()]);
        });
    }
}

#[test]
fn twenty_kills_under_load_lose_nothing_that_was_flushed() {
    survives_kills("write-back", "100%");
}

/// Most blocks are in the store when the server dies.
#[test]
fn twenty_kills_of_a_cache_with_a_store_lose_nothing_that_was_flushed() {
    survives_kills("write-back", "15%");
}

/// Here the primary alone has all flushed data whenever the server dies. After the restart a newer
/// version that was submitted may still replace it.
#[test]
fn twenty_kills_in_write_through_leave_what_was_flushed_on_the_primary() {
    survives_kills("write-through", "100%");
}

fn survives_kills(mode: &str, log_share: &str) {
    let place = Place::new();
    let configuration = configuration(&place, mode, log_share).to_string_lossy().into_owned();
    let arguments = ["serve".to_owned(), format!("--config={configuration}")];
    let socket = place.path("nbd.sock");
    let mut parts: Vec<Part> = (0..CLIENTS as u64)
        .map(|client| Part {
            first: client * BLOCKS,
            blocks: vec![Known::default(); BLOCKS as usize],
            numbers: Numbers::new(client),
        })
        .collect();
    for _ in 0..ROUNDS {
        let server = place.start(&arguments);
        verify_all(&mut parts, &socket);
        let load = fio(&place, 60);
        thread::scope(|scope| {
            for part in &mut parts {
                let socket = &socket;
                scope.spawn(move || part.load(socket));
            }
            thread::sleep(LOAD);
            server.kill();
        });
        said(load);
        if mode == "write-through" {
            verify_primary(&mut parts.clone(), &place);
        }
    }
    let written: u64 = parts.iter().flat_map(|part| &part.blocks).map(|b| b.submitted).sum();
    assert!(written > ROUNDS * 100, "only {written} writes: this was no load");

    for millis in RECOVERING {
        Server::start_and_kill(&arguments, Duration::from_millis(millis));
    }
    let server = place.start(&arguments);
    verify_all(&mut parts, &socket);
    let (success, text) = said(fio(&place, 2));
    assert!(success, "{text}");
    server.stop(&["--drain"]);
    let checked = forebay(&["check", &place.text("cache.img")]);
    assert_eq!(checked.status.code(), Some(0), "{}", String::from_utf8_lossy(&checked.stderr));

    verify_primary(&mut parts, &place);
}

#[test]
fn a_mixture_would_be_seen() {
    let (old, new) = (content(5, 1), content(5, 2));
    assert_eq!(version_of(5, &old), Ok(1));
    assert_eq!(version_of(5, &[0; BLOCK]), Ok(0));
    assert!(version_of(6, &old).is_err(), "another block's data");
    let torn = [&new[..SECTOR], &old[SECTOR..]].concat();
    assert!(version_of(5, &torn).is_err());
    let mut rotten = old;
    rotten[BLOCK - 1] ^= 1;
    assert!(version_of(5, &rotten).is_err());
}
