//! The checks of a program that shall take over from a server that still serves. Nothing is locked,
//! and nothing written to the devices, which are the other server's. In the state directory a file
//! is created and removed: a start needs room there.

use std::fs::File;
use std::io::ErrorKind;

use anyhow::{Context, bail};
use forebay_control::config::Config;
use forebay_control::units::Size;
use forebay_device::primary_size;
use forebay_format::Superblock;
use forebay_runtime::StateDir;

use crate::host::overlap;
use crate::server::cache::no_state;
use crate::server::cache::superblocks::copies_in;
use crate::server::endpoints;
use crate::server::primaries::{samples, users};

/// The files of a cache that a start replaces, each by a new one beside it.
const REPLACED: [&str; 5] = ["witness", "settings", "detached", samples::KIND, users::KIND];
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
pub fn check(config: &Config, applied: bool) -> anyhow::Result<()> {
    overlap::check(config)?;
    endpoints::certificates(&config.server)?;
    if applied {
        for volume in &config.volumes {
            primary_size(&volume.primary).with_context(|| format!("volume {}", volume.name))?;
        }
        let there = usable(config)?;
        return has_room(config, there.as_ref());
    }
    let cache = || format!("cache {}", config.cache.path.display());
    let file = File::open(&config.cache.path).with_context(cache)?;
    let copies = copies_in(&file).context("its superblock").with_context(cache)?;
    let served = newest(&copies).with_context(cache)?;
    for volume in &served.volumes {
        let name = &volume.name;
        let Some(configured) = config.volumes.iter().find(|one| one.name == *name) else {
            bail!(
                "volume {name} is served, and no longer configured; an upgrade keeps all volumes: \
                 configure it, or stop the server and start it again"
            );
        };
        // A primary that is away, or reached over a network, is opened when it is taken over.
        if let Ok(Some(size)) = primary_size(&configured.primary)
            && size != volume.size
        {
            bail!(
                "volume {name}: {} has {}, and {} are served; stop the server to change it",
                configured.primary,
                Size(size),
                Size(volume.size)
            );
        }
    }
    has_room(config, Some(&served))
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
