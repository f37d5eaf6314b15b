//! How much of the cache device a start uses. The configured size is that of a new cache; a file of
//! a cache that was given up gets it.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use forebay_control::config::{CacheConfig, Config};
use forebay_control::units::Size;
use forebay_engine::Trust;
use forebay_format::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use forebay_runtime::Witness;
use forebay_volume::pool::geometry;
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock, statvfs};
use rustix::io::Errno;

use super::Start;
use super::superblocks::copies_in;
use crate::server::events::Came;

/// The bytes to use, if that is configured.
///
/// A restart takes the size that it finds. The configuration may be the one before that of the last
/// server, which had made a new cache and could not serve. If that one only gave the cache up,
/// there is room for the one of this configuration. A start after a hand-over that ended before the
/// cache was given up takes the size that it finds, too.
///
/// # Errors
/// As [`make_room`].
pub fn of(config: &Config, start: Start<'_>) -> anyhow::Result<Option<u64>> {
    let cache = &config.cache;
    let Some(Size(size)) = cache.size else { return Ok(None) };
    if start.came != Came::Restarted {
        make_room(config, size)?;
    } else if is_given_up(cache)?
        && let Err(error) = make_room(config, size)
    {
        tracing::warn!("the cache keeps the size that it has: {error:#}");
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

/// Checks whether a new cache can be made as configured: whether it is large enough, and whether
/// its file finds room, with what that has already.
///
/// # Errors
/// Names the size, and the least or the most.
pub fn check(config: &Config) -> anyhow::Result<()> {
    let CacheConfig { path, size, .. } = &config.cache;
    let shown = path.display();
    let mut file = match File::open(path) {
        Ok(file) => Some(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| format!("cache {shown}")),
    };
    let end = file.as_mut().map(|file| file.seek(SeekFrom::End(0))).transpose()?;
    let Some(size) = size.map(|Size(size)| size).or(end) else {
        bail!("cache {shown}: it does not exist; to create a file, give it a size");
    };
    check_least(config, file.as_ref(), size)?;
    let found = file.map(|file| file.metadata()).transpose()?;
    let is_there = found.as_ref().is_some_and(|found| !found.is_file() || found.len() == size);
    if is_there { Ok(()) } else { check_room(path, size, found.map_or(0, |found| found.blocks())) }
}

/// Fails if a cache of `size` bytes is too small. One that is made in place of another has as many
/// shards, unless configured.
fn check_least(config: &Config, file: Option<&File>, size: u64) -> anyhow::Result<()> {
    let there = file.and_then(|file| superblocks(file).first().map(|one| one.shards.len()));
    let there = there.and_then(|shards| u16::try_from(shards).ok());
    let shards = config.server.shards.or(there).unwrap_or_else(super::shards_by_processors);
    let fits = geometry(size, super::wanted(config, shards));
    fits.map(drop).map_err(|error| anyhow!("cache.size {}: {error}", Size(size)))
}

/// Fails if the file system has no room for a file of `size` bytes that has `blocks` of 512 bytes.
fn check_room(path: &Path, size: u64, blocks: u64) -> anyhow::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let found = statvfs(directory).with_context(|| format!("cache: {}", directory.display()))?;
    let is_root = rustix::process::geteuid().is_root();
    let free = if is_root { found.f_bfree } else { found.f_bavail };
    let free = free.saturating_mul(found.f_frsize).saturating_add(blocks * 512);
    // Some file systems do not tell.
    if found.f_blocks > 0 && size > free {
        let (size, free, shown) = (Size(size), Size(free), path.display());
        bail!("cache.size {size}: there is room for {free} at {shown}; use less, or make room");
    }
    Ok(())
}

/// The size that the cache on the device needs.
fn found(cache: &CacheConfig, size: u64) -> Option<u64> {
    let file = File::open(&cache.path).ok()?;
    let found = file.metadata().ok()?;
    let largest = superblocks(&file).iter().map(|superblock| superblock.device_size).max()?;
    Some(if found.is_file() { found.len() } else { largest.max(size) })
}

/// The size for which the cache in a file was made, and the size of the file, if that is less.
pub fn truncated(path: &Path) -> Option<(u64, u64)> {
    let file = File::open(path).ok()?;
    let found = file.metadata().ok().filter(|found| found.is_file())?;
    let read = |offset: &u64| {
        let mut bytes = vec![0; SUPERBLOCK_BYTES];
        file.read_exact_at(&mut bytes, *offset).ok()?;
        Superblock::decode(&bytes).ok()
    };
    let made = SUPERBLOCK_OFFSETS.iter().filter_map(read).map(|one| one.device_size).max()?;
    (found.len() < made).then_some((made, found.len()))
}

/// Whether there is a cache, and it was given up.
///
/// # Errors
/// If its witness cannot be read.
fn is_given_up(cache: &CacheConfig) -> anyhow::Result<bool> {
    let Ok(file) = File::open(&cache.path) else { return Ok(false) };
    if !cache.state_dir.exists() {
        return Ok(false);
    }
    let witness = Witness::open(&cache.state_dir).map_err(super::no_state)?;
    let given_up = |superblock: &Superblock| -> anyhow::Result<bool> {
        let record = witness.load(superblock.uuid)?;
        // Also if it failed, or was retired: its dirty blocks are on the primaries by then.
        Ok(record.is_some_and(|record| record.trust == Trust::Nothing))
    };
    let all: Vec<bool> = superblocks(&file).iter().map(given_up).collect::<anyhow::Result<_>>()?;
    Ok(!all.is_empty() && all.iter().all(|&given_up| given_up))
}

/// Gives the file of the cache `size` bytes if it has another size, and is that of a cache that was
/// given up, which nobody has open. An empty file gets its size when it is opened.
///
/// The superblock stays until that of the new cache takes its place. So the file is known to be
/// free to use should this start fail, whatever size it has by then.
///
/// # Errors
/// If that is too small for a cache, there is no room for it, or the witness of the cache cannot be
/// read.
fn make_room(config: &Config, size: u64) -> anyhow::Result<()> {
    let cache = &config.cache;
    let Ok(file) = OpenOptions::new().read(true).write(true).open(&cache.path) else {
        return Ok(());
    };
    let found = file.metadata().context("cache")?;
    let fits = !found.is_file() || found.len() == size || found.len() == 0;
    if fits || flock(&file, LOCK).is_err() || !is_given_up(cache)? {
        return Ok(());
    }
    check_least(config, Some(&file), size)?;
    check_room(&cache.path, size, found.blocks())?;
    let shown = cache.path.display();
    tracing::info!("cache {shown}: it was given up; a new one with another size takes its place");
    resize(&file, found.len(), size).with_context(|| format!("cache {shown}: {}", Size(size)))
}

/// Changes the size of a file, durably or not at all; what is added has its space allocated.
fn resize(file: &File, from: u64, to: u64) -> io::Result<()> {
    let added = to.saturating_sub(from);
    match fallocate(file, FallocateFlags::empty(), from, added) {
        _ if added == 0 => file.set_len(to)?,
        Ok(()) => {}
        Err(Errno::OPNOTSUPP) => file.set_len(to)?,
        Err(error) => {
            // A part may have been added.
            file.set_len(from)?;
            return Err(error.into());
        }
    }
    file.sync_all()
}

/// A server holds the file of its cache in this way.
const LOCK: FlockOperation = FlockOperation::NonBlockingLockExclusive;

/// The valid superblocks in the file.
fn superblocks(file: &File) -> Vec<Superblock> {
    let copies = copies_in(file).into_iter().flatten();
    copies.filter_map(|bytes| Superblock::decode(&bytes).ok()).collect()
}
