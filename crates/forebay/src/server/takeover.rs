//! The checks of a program that shall take over from a server that still serves. Nothing is locked
//! or written: the devices are the other server's.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

use anyhow::{Context, bail};
use forebay_control::config::Config;
use forebay_control::units::Size;
use forebay_device::primary_size;
use forebay_format::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};

use crate::server::endpoints;

/// Checks the configuration against what is served, and whether this program can read the cache. If
/// the server was told to bring the configuration into force, it has checked and done what other
/// volumes and another cache demand.
///
/// # Errors
/// If a start with this configuration would fail, as far as that can be told.
pub fn check(config: &Config, applied: bool) -> anyhow::Result<()> {
    endpoints::certificates(&config.server)?;
    if applied {
        for volume in &config.volumes {
            primary_size(&volume.primary).with_context(|| format!("volume {}", volume.name))?;
        }
        return usable(config);
    }
    let cache = config.cache.path.display();
    let file = File::open(&config.cache.path).with_context(|| format!("cache {cache}"))?;
    let served = newest(&file).with_context(|| format!("cache {cache}"))?;
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
    Ok(())
}

/// Checks whether the cache device is one that this program can read, or has nothing on it.
fn usable(config: &Config) -> anyhow::Result<()> {
    let path = &config.cache.path;
    let shown = || format!("cache {}", path.display());
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound && config.cache.size.is_some() => {
            return Ok(());
        }
        Err(error) => return Err(error).with_context(shown),
    };
    let blank = || -> std::io::Result<bool> {
        let mut bytes = vec![0; SUPERBLOCK_BYTES];
        for offset in SUPERBLOCK_OFFSETS {
            file.read_exact_at(&mut bytes, offset)?;
            if bytes.iter().any(|&byte| byte != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    if blank().with_context(shown)? {
        return Ok(());
    }
    newest(&file).map(drop).with_context(|| format!("{}: it is not empty", shown()))
}

/// The newest superblock that this program can read.
fn newest(file: &File) -> anyhow::Result<Superblock> {
    let mut newest: Option<Superblock> = None;
    let mut problem = None;
    for offset in SUPERBLOCK_OFFSETS {
        let mut bytes = vec![0; SUPERBLOCK_BYTES];
        file.read_exact_at(&mut bytes, offset).context("its superblock")?;
        match Superblock::decode(&bytes) {
            Ok(found) if newest.as_ref().is_none_or(|one| one.generation < found.generation) => {
                newest = Some(found);
            }
            Ok(_) => {}
            Err(error) => problem = Some(error),
        }
    }
    match (newest, problem) {
        (Some(superblock), _) => Ok(superblock),
        (None, Some(problem)) => Err(problem).context("this program cannot read it"),
        (None, None) => bail!("it has no superblock"),
    }
}
