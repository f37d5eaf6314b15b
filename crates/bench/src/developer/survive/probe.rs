//! A client of a disk that does one thing after the other: it writes a block durably, reads it back
//! and compares. Each answer is recorded, so gaps show how long the disk did not answer.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use forebay_block::IoBuf;
use forebay_block::testing::{Numbers, noise};
use rustix::fs::OFlags;

use crate::load::pulse::Pulse;

const BLOCK: usize = 4096;
/// Number of blocks of the file.
const BLOCKS: u64 = 64;
/// Pause after each round, so that other clients have the disk for themselves most of the time.
const PAUSE: Duration = Duration::from_millis(3);

/// Writes and reads a file until `stop`; returns the number of rounds.
///
/// # Errors
/// At the first error of the disk, or block that differs from what was written.
pub fn run(path: &Path, pulse: &Pulse, stop: &AtomicBool) -> anyhow::Result<u64> {
    let name = path.display();
    let file = open(path)?;
    let mut last = [None; BLOCKS as usize];
    let mut numbers = Numbers::new(1);
    let mut block = IoBuf::zeroed(BLOCK);
    let mut round = 0;
    while !stop.load(Relaxed) {
        round += 1;
        let at = numbers.below(BLOCKS);
        block.copy_from_slice(&noise(round, BLOCK));
        file.write_all_at(&block, at * BLOCK as u64).with_context(|| format!("writing {name}"))?;
        last[at as usize] = Some(round);
        pulse.beat();
        let old = numbers.below(BLOCKS);
        for at in [at, old] {
            let Some(round) = last[at as usize] else { continue };
            let read = file.read_exact_at(&mut block, at * BLOCK as u64);
            read.with_context(|| format!("reading {name}"))?;
            ensure!(block[..] == noise(round, BLOCK)[..], "{name}: block {at} is not as written");
            pulse.beat();
        }
        std::thread::sleep(PAUSE);
    }
    Ok(round)
}

/// A new file whose blocks are all allocated, for direct and durable writes.
fn open(path: &Path) -> anyhow::Result<File> {
    let direct = i32::try_from((OFlags::DIRECT | OFlags::DSYNC).bits())?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).custom_flags(direct);
    let file = options.open(path).with_context(|| format!("{}", path.display()))?;
    for at in 0..BLOCKS {
        file.write_all_at(&IoBuf::zeroed(BLOCK), at * BLOCK as u64)?;
    }
    Ok(file)
}
