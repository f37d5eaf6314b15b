//! Rules for `--reset-cache` and `--accept-data-loss`: content is named before it is discarded,
//! possible only copies are discarded only with both options, and each option is valid for one
//! start. And a cache that is configured as a primary is refused.

use std::path::Path;
use std::sync::Arc;

use anyhow::{anyhow, bail};
use forebay_block::{BLOCK_SIZE, ByteRange, ErrorKind};
use forebay_control::config::Config;
use forebay_control::units::Size;
use forebay_device::BlockDevice;
use forebay_format::Superblock;
use forebay_runtime::Blocking;
use forebay_volume::offline;

use crate::server::applying::Applying;
use crate::server::args::ServeArgs;
use crate::server::cache::read_at;
use crate::server::cache::stops::Stops;
use crate::server::cache::{foreign, once};
use crate::server::primaries::DISK_PATIENCE;

/// The options that are valid at this start.
#[derive(Debug, Default)]
pub struct Allowed {
    /// Create a new cache whatever the device holds.
    pub reset: bool,
    /// Serve a log with a lost part; the loss, to be recorded.
    pub accepted: Option<String>,
}

/// Refuses a primary that is a Forebay cache: cache and primary may be swapped, and clients would
/// write over its dirty blocks. A volume that this cache has served may hold one as its data.
///
/// # Errors
/// If there is such a primary, and it was not accepted; or if one does not answer.
pub fn not_swapped(
    args: &ServeArgs,
    config: &Config,
    primaries: &[Arc<dyn BlockDevice>],
    found: Option<&Superblock>,
    applied: Option<&Applying>,
) -> anyhow::Result<()> {
    for (volume, primary) in config.volumes.iter().zip(primaries) {
        let (name, info) = (&volume.name, primary.info());
        let is_known = found
            .is_some_and(|pool| pool.volumes.iter().any(|record| record.identity == info.identity));
        let stays = applied.is_some_and(|applied| applied.ids.iter().any(|(_, one)| one == name));
        if is_known || stays || args.accept_primary.contains(name) || primary.is_away() {
            continue;
        }
        let Ok(mut queue) = Blocking::open_within(&**primary, DISK_PATIENCE) else { continue };
        let first = ByteRange::new(0, info.size.min(BLOCK_SIZE as u64));
        if let Err(error) = queue.read(first)
            && matches!(error.kind(), ErrorKind::Timeout | ErrorKind::DeviceGone)
        {
            // Nothing can stand in for it.
            bail!("volume {name}: the primary {}: {error}; check that it is up", info.name);
        }
        if superblock(&mut queue, info.size).is_some() {
            bail!(
                "volume {name}: the primary {} is a Forebay cache; are the primary and the cache \
                 swapped? If a cache is what the volume holds, start once with --accept-primary \
                 {name}",
                info.identity
            );
        }
    }
    Ok(())
}

/// Decides which options are valid at this start; logs the content that a reset would destroy.
///
/// # Errors
/// If a reset would destroy data whose loss was not accepted.
pub fn allowed(
    args: &ServeArgs,
    config: &Config,
    queue: &mut Blocking,
    size: u64,
    stops: &Stops,
) -> anyhow::Result<Allowed> {
    let state = &config.cache.state_dir;
    let found = superblock(queue, size);
    let mut reset = args.reset_cache;
    let mut accept = args.accept_data_loss && !args.reset_cache;
    if let Some(found) = &found {
        reset = option(state, found, once::RESET, "--reset-cache", reset)?;
        accept = option(state, found, once::ACCEPTED, "--accept-data-loss", accept)?;
    }
    if reset {
        match &found {
            Some(found) => may_discard(args, found, queue, size)?,
            None => may_overwrite(args, config, queue, size)?,
        }
    }
    let accepted = if accept && found.is_some() { damage(queue, size, stops)? } else { None };
    Ok(Allowed { reset, accepted })
}

/// Adds the content of the device to the reason for a refusal.
pub fn explain(error: anyhow::Error, queue: &mut Blocking, size: u64) -> anyhow::Error {
    if superblock(queue, size).is_some() {
        return error;
    }
    match foreign::content(queue, size) {
        Ok(Some(what)) => anyhow!("{error:#}; the device holds {what}"),
        _ => error,
    }
}

fn superblock(queue: &mut Blocking, size: u64) -> Option<Superblock> {
    offline::superblock(&mut |offset, bytes| read_at(queue, size, offset, bytes)).ok()
}

/// Whether an option is valid at this start.
fn option(
    state: &Path,
    found: &Superblock,
    what: &str,
    name: &str,
    given: bool,
) -> anyhow::Result<bool> {
    let counts = once::counts(state, found.uuid, what, given)?;
    if given && !counts {
        tracing::warn!(
            "{name} was used for this cache already and is ignored; to use it again, start \
             once without it"
        );
    }
    Ok(counts)
}

/// Allows the reset of a cache, unless it holds dirty data.
fn may_discard(
    args: &ServeArgs,
    found: &Superblock,
    queue: &mut Blocking,
    size: u64,
) -> anyhow::Result<()> {
    let mut read = |offset: u64, bytes: &mut [u8]| read_at(queue, size, offset, bytes);
    let hint = "start without --reset-cache and drain it, or write them to a primary with \
                `forebay salvage`; to lose them, add --accept-data-loss";
    let report = match offline::examine(&mut read, false) {
        Ok(report) => report,
        Err(error) if args.accept_data_loss => {
            tracing::warn!(error, "the cache is discarded; its content is unknown");
            return Ok(());
        }
        Err(error) => bail!("--reset-cache: {error}; {hint}"),
    };
    let damaged = report.problems.iter().filter(|problem| problem.dirty).count();
    let dirty = report.dirty_blocks(None);
    let held = |blocks: u64| Size(blocks * forebay_block::BLOCK_SIZE as u64);
    let volumes = found.volumes.iter().map(|volume| {
        let dirty = held(report.dirty_blocks(Some(volume.id)));
        format!("{dirty} of volume {}", volume.name)
    });
    let volumes = volumes.collect::<Vec<_>>().join(", ");
    let parts = if damaged > 0 { ", and parts that cannot be read" } else { "" };
    if args.accept_data_loss || dirty == 0 && damaged == 0 {
        tracing::warn!(
            "--reset-cache: discarding a cache with {volumes} not on the primaries{parts}"
        );
        return Ok(());
    }
    bail!(
        "--reset-cache: the cache holds {} that are not on the primaries ({volumes}){parts}; \
         {hint}",
        held(dirty)
    )
}

/// Allows the reset of a device without a cache only if it is blank.
fn may_overwrite(
    args: &ServeArgs,
    config: &Config,
    queue: &mut Blocking,
    size: u64,
) -> anyhow::Result<()> {
    let Some(what) = foreign::content(queue, size)? else { return Ok(()) };
    let path = config.cache.path.display();
    if !args.accept_data_loss {
        bail!(
            "--reset-cache: {path} holds {what}, which would be destroyed; check that it is the \
             right device; to destroy it, add --accept-data-loss"
        );
    }
    tracing::warn!("--reset-cache: {path} held {what}; it is overwritten");
    Ok(())
}

/// The damage to a cache's log that may have cost dirty data; `None` if there is none.
fn damage(queue: &mut Blocking, size: u64, stops: &Stops) -> anyhow::Result<Option<String>> {
    let mut read = |offset: u64, bytes: &mut [u8]| read_at(queue, size, offset, bytes);
    let report = offline::examine(&mut read, false).map_err(|error| anyhow!(error))?;
    let damage = report.problems.iter().filter(|problem| problem.dirty);
    let mut damage: Vec<String> =
        damage.map(|one| format!("{}: {}", one.place, one.what)).collect();
    for (number, shard) in report.shards.iter().enumerate() {
        let end = stops.of_shard(number).end;
        if shard.last_lsn < end {
            let last = shard.last_lsn;
            damage.push(format!("shard {number}: the log ends at {last}; a stop wrote {end}"));
        }
    }
    Ok((!damage.is_empty()).then(|| damage.join("\n")))
}
