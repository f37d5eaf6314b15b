//! The file of a cache that was given up: the next cache in it may have another size.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use anyhow::Context;
use forebay_control::config::CacheConfig;
use forebay_engine::Trust;
use forebay_format::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use forebay_runtime::Witness;
use rustix::fs::{FlockOperation, flock};

/// Empties the file of the cache if it has another size than `size` bytes, and is that of a cache
/// that was given up, which nobody has open. An empty file is made anew.
///
/// # Errors
/// If the witness of its cache cannot be read, or the file cannot be emptied.
pub fn make_room(cache: &CacheConfig, size: u64) -> anyhow::Result<()> {
    let Ok(file) = OpenOptions::new().read(true).write(true).open(&cache.path) else {
        return Ok(());
    };
    let found = file.metadata().context("cache")?;
    let fits = !found.is_file() || found.len() == size || found.len() == 0;
    if fits || !cache.state_dir.exists() || flock(&file, LOCK).is_err() {
        return Ok(());
    }
    let witness = Witness::open(&cache.state_dir).context(super::NO_STATE)?;
    let given_up = |superblock: &Superblock| -> anyhow::Result<bool> {
        let record = witness.load(superblock.uuid)?;
        Ok(record.is_some_and(|record| record.trust == Trust::Nothing && !record.dirty))
    };
    let all = SUPERBLOCK_OFFSETS.into_iter().filter_map(|offset| superblock(&file, offset));
    let all: Vec<bool> = all.map(|found| given_up(&found)).collect::<Result<_, _>>()?;
    if !all.is_empty() && all.iter().all(|&given_up| given_up) {
        let shown = cache.path.display();
        tracing::info!("cache {shown}: it was given up, and is made anew with another size");
        file.set_len(0).with_context(|| format!("cache {shown}"))?;
        file.sync_all().with_context(|| format!("cache {shown}"))?;
    }
    Ok(())
}

/// A server holds the file of its cache in this way.
const LOCK: FlockOperation = FlockOperation::NonBlockingLockExclusive;

fn superblock(file: &File, offset: u64) -> Option<Superblock> {
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Superblock::decode(&bytes).ok()
}
