//! The checks of a program that shall take over from a server that still serves. Nothing is locked,
//! and nothing written to the devices, which are the other server's. In the state directory a file
//! is created and removed: a start needs room there.

use std::fs::File;
use std::io::ErrorKind;

use anyhow::{Context, bail};
use forebay_control::config::{Config, VolumeConfig};
use forebay_control::units::Size;
use forebay_device::{OpenError, network_identity};
use forebay_format::{Superblock, VolumeRecord};
use forebay_runtime::StateDir;
use forebay_volume::pool::is_removed;

use crate::host::overlap;
use crate::server::applying::Applying;
use crate::server::cache::no_state;
use crate::server::cache::superblocks::copies_in;
use crate::server::endpoints;
use crate::server::primaries::{self, addresses, samples, users};

/// The files of a cache that a start replaces, each by a new one beside it.
const REPLACED: [&str; 6] =
    ["witness", "settings", "detached", addresses::KIND, samples::KIND, users::KIND];
/// Room for those that the server before has taken away, or that become larger, in bytes.
const MORE_ROOM: u64 = 8 << 10;
/// Space is given to files in units of this many bytes, or fewer.
const UNIT: u64 = 4 << 10;

/// Checks the configuration against what is served, and whether this program can read the cache. If
/// the server was told to bring the configuration into force, it has checked and done what other
/// volumes and another cache demand.
///
/// # Errors
/// If a start with this configuration would fail, as far as that can be told.
pub fn check(config: &Config, applying: Option<&Applying>) -> anyhow::Result<()> {
    overlap::check(config)?;
    endpoints::certificates(&config.server)?;
    let there = match applying {
        Some(_) => usable(config)?,
        None => Some(served(config)?),
    };
    let records = there.as_ref().map_or(&[][..], |pool| &pool.volumes);
    if applying.is_none() {
        check_all_stay(config, records)?;
    }
    for (volume, size) in config.volumes.iter().zip(primaries::sizes(config)?) {
        let name = &volume.name;
        let record = records.iter().find(|record| match applying {
            Some(applying) => applying.ids.iter().any(|(id, one)| *id == record.id && one == name),
            None => record.name == *name,
        });
        check_primary(volume, record, size, applying.is_some())?;
    }
    has_room(config, there.as_ref())
}

/// The superblock of the cache in use.
fn served(config: &Config) -> anyhow::Result<Superblock> {
    let cache = || format!("cache {}", config.cache.path.display());
    let file = File::open(&config.cache.path).with_context(cache)?;
    let copies = copies_in(&file).context("its superblock").with_context(cache)?;
    newest(&copies).with_context(cache)
}

/// Checks that no volume is removed.
fn check_all_stay(config: &Config, served: &[VolumeRecord]) -> anyhow::Result<()> {
    let is_configured = |name: &String| config.volumes.iter().any(|one| one.name == *name);
    let mut left = served.iter().filter(|record| !is_removed(record));
    if let Some(VolumeRecord { name, .. }) = left.find(|record| !is_configured(&record.name)) {
        bail!(
            "volume {name} is served, and no longer configured; an upgrade keeps all volumes: \
             configure it, or stop the server and start it again"
        );
    }
    Ok(())
}

/// Checks a primary against the record of its volume. One that is served may be away, and may have
/// grown.
fn check_primary(
    volume: &VolumeConfig,
    record: Option<&VolumeRecord>,
    size: Result<u64, OpenError>,
    applied: bool,
) -> anyhow::Result<()> {
    let VolumeConfig { name, primary, .. } = volume;
    let shown = || format!("volume {name}");
    let identity = network_identity(primary).with_context(shown)?;
    // A change of a disk's name is not seen here, so a disk must be there for what is applied.
    let is_served = record.is_some_and(|record| match &identity {
        Some(identity) => record.identity == *identity,
        None => !applied,
    });
    match (size, record) {
        (Err(error), _) if !is_served => Err(error).with_context(shown),
        (Err(_), _) => Ok(()),
        (Ok(size), Some(record)) if size < record.size => bail!(
            "volume {name}: {primary} has shrunk from {} to {}, and clients may have written to \
             what is missing; restore its size",
            Size(record.size),
            Size(size)
        ),
        (Ok(_), _) => Ok(()),
    }
}

/// Checks whether a start can put on record what it must.
fn has_room(config: &Config, pool: Option<&Superblock>) -> anyhow::Result<()> {
    let room = |state: StateDir| {
        let largest = pool.map_or(Ok(0), |pool| state.largest(pool.uuid, &REPLACED))?;
        let bytes = largest.next_multiple_of(UNIT) + MORE_ROOM;
        state.has_room_for(usize::try_from(bytes).expect("files are small"))
    };
    StateDir::open(&config.cache.state_dir).and_then(room).map_err(no_state)
}

/// Checks whether the cache device is one that this program can read, or has nothing on it. Returns
/// its superblock.
fn usable(config: &Config) -> anyhow::Result<Option<Superblock>> {
    let path = &config.cache.path;
    let shown = || format!("cache {}", path.display());
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound && config.cache.size.is_some() => {
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(shown),
    };
    let copies = copies_in(&file).with_context(shown)?;
    if copies.iter().flatten().all(|&byte| byte == 0) {
        return Ok(None);
    }
    newest(&copies).map(Some).with_context(|| format!("{}: it is not empty", shown()))
}

/// The newest superblock that this program can read.
fn newest(copies: &[Vec<u8>; 2]) -> anyhow::Result<Superblock> {
    let [first, second] = copies.each_ref().map(|copy| Superblock::decode(copy));
    let found = forebay_format::newest(first, second).context("this program cannot read it")?;
    Ok(found.0)
}
