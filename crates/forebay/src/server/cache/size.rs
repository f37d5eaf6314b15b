//! How much of the cache device a start uses. The configured size is that of a new cache; a file of
//! a cache that was given up gets it.

use std::fs::{File, OpenOptions};

use anyhow::Context;
use forebay_control::config::CacheConfig;
use forebay_control::units::Size;
use forebay_engine::Trust;
use forebay_format::Superblock;
use forebay_runtime::Witness;
use rustix::fs::{FlockOperation, flock};

use super::Start;
use super::superblocks::copies_in;
use crate::server::events::Came;

/// The bytes to use, if that is configured.
///
/// A restart takes the size that it finds. The configuration may be the one before that of the last
/// server, which had made a new cache and could not serve. So does a start after a hand-over that
/// ended before the cache was given up.
///
/// # Errors
/// As [`make_room`].
pub fn of(cache: &CacheConfig, start: Start<'_>) -> anyhow::Result<Option<u64>> {
    let Some(Size(size)) = cache.size else { return Ok(None) };
    if start.came != Came::Restarted {
        make_room(cache, size)?;
    }
    if start.keeps_size()
        && let Some(found) = found(cache, size)
    {
        if found != size {
            let (found, size) = (Size(found), Size(size));
            tracing::warn!("the cache has {found} and not {size} as configured, and is used so");
        }
        return Ok(Some(found));
    }
    Ok(Some(size))
}

/// The size that the cache on the device needs.
fn found(cache: &CacheConfig, size: u64) -> Option<u64> {
    let file = File::open(&cache.path).ok()?;
    let found = file.metadata().ok()?;
    let largest = superblocks(&file).iter().map(|superblock| superblock.device_size).max()?;
    Some(if found.is_file() { found.len() } else { largest.max(size) })
}

/// Empties the file of the cache if it has another size than `size` bytes, and is that of a cache
/// that was given up, which nobody has open. An empty file gets its
/// size when it is opened.
///
/// # Errors
/// If the witness of its cache cannot be read, or the file cannot be emptied.
fn make_room(cache: &CacheConfig, size: u64) -> anyhow::Result<()> {
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
        // Also if it failed, or was retired: its dirty blocks are on the primaries by then.
        Ok(record.is_some_and(|record| record.trust == Trust::Nothing))
    };
    let all = superblocks(&file);
    let all: Vec<bool> = all.iter().map(given_up).collect::<Result<_, _>>()?;
    if !all.is_empty() && all.iter().all(|&given_up| given_up) {
        let shown = cache.path.display();
        tracing::info!(
            "cache {shown}: it was given up; a new one with another size takes its place"
        );
        file.set_len(0).with_context(|| format!("cache {shown}"))?;
        file.sync_all().with_context(|| format!("cache {shown}"))?;
    }
    Ok(())
}

/// A server holds the file of its cache in this way.
const LOCK: FlockOperation = FlockOperation::NonBlockingLockExclusive;

/// The valid superblocks in the file.
fn superblocks(file: &File) -> Vec<Superblock> {
    let copies = copies_in(file).into_iter().flatten();
    copies.filter_map(|bytes| Superblock::decode(&bytes).ok()).collect()
}
