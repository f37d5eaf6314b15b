//! Where the primaries of a cache were when it was last served, in the state directory. By this an
//! absent primary is known: its name is the volume's, and another configuration may have given that
//! to another primary.
//!
//! ```text
//! forebay addresses 1
//! volume ID ADDRESS
//! end CRC                   of all lines before
//! ```

use std::fmt::Write;
use std::io;

use anyhow::bail;
use forebay_block::{VOLUMES_MAX, VolumeId};
use forebay_control::config::VolumeConfig;
use forebay_device::{OpenError, network_identity, primary_path};
use forebay_format::{Superblock, VolumeRecord};
use forebay_runtime::{StateDir, file_of, sealed, unsealed};
use forebay_volume::pool::is_removed;

/// First line of the file.
const HEADING: &str = "forebay addresses 1";
/// The kind of file.
pub const KIND: &str = "addresses";
/// Longest file that is read, in bytes: a path or a URI for each volume.
const BYTES_MAX: u64 = 1 << 20;

/// The address of each primary.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Addresses(Vec<(VolumeId, String)>);

impl Addresses {
    /// Those of the volumes of a configuration.
    pub fn of(config: &[VolumeConfig], ids: &[VolumeId]) -> Self {
        let address = |(volume, &id): (&VolumeConfig, &VolumeId)| {
            Some((id, address_of(&volume.primary).ok()?))
        };
        Self(config.iter().zip(ids).filter_map(address).collect())
    }

    /// Those on record for the cache `uuid`. They are an aid: if they cannot be read, there are
    /// none.
    pub fn load(state: &StateDir, uuid: [u8; 16]) -> Self {
        let text = state.read(&file_of(uuid, KIND), BYTES_MAX).unwrap_or_else(|error| {
            tracing::warn!(%error, "where the primaries were is not known");
            None
        });
        text.as_deref().and_then(Self::parse).unwrap_or_default()
    }

    /// Puts them on record for the cache `uuid`, or nothing if that is impossible.
    pub fn keep(&self, state: &StateDir, uuid: [u8; 16]) {
        if Self::load(state, uuid) == *self {
            return;
        }
        let name = file_of(uuid, KIND);
        if let Err(error) = state.replace(&name, &self.print()) {
            tracing::warn!(%error, "where the primaries are is not on record");
            // Old ones could be wrong.
            let _ = state.remove(&name);
        }
    }

    /// The record of a volume whose primary is absent; `None` if the cache has none of it.
    ///
    /// # Errors
    /// If the cache has a volume of this name with another primary.
    pub fn record_of<'a>(
        &self,
        pool: &'a Superblock,
        volume: &VolumeConfig,
    ) -> anyhow::Result<Option<&'a VolumeRecord>> {
        let (name, uri) = (&volume.name, &volume.primary);
        let (identity, address) = (network_identity(uri)?, address_of(uri)?);
        let mut records = pool.volumes.iter().filter(|record| !is_removed(record));
        let is_it = |record: &&VolumeRecord| match &identity {
            Some(identity) => record.identity == *identity,
            None => self.get(record.id) == Some(&address),
        };
        if let Some(record) = records.clone().find(is_it) {
            return Ok(Some(record));
        }
        let Some(record) = records.find(|record| record.name == *name) else { return Ok(None) };
        let known = self.get(record.id).or_else(|| {
            // A record of a version that put none on record.
            let is_other = identity.is_some() || record.identity.starts_with("nbd");
            is_other.then_some(&record.identity)
        });
        match known {
            None => Ok(Some(record)),
            Some(known) => bail!(
                "volume {name}: its primary {uri} is absent, and the cache has served {known} \
                 under this name; start again when {uri} is present, or name the previous primary"
            ),
        }
    }

    /// The volume whose primary was last at the address of this URI.
    pub fn at(&self, uri: &str) -> Option<VolumeId> {
        let address = address_of(uri).ok()?;
        self.0.iter().find(|(_, one)| *one == address).map(|&(id, _)| id)
    }

    fn get(&self, id: VolumeId) -> Option<&String> {
        self.0.iter().find(|(one, _)| *one == id).map(|(_, address)| address)
    }

    fn print(&self) -> String {
        let mut body = format!("{HEADING}\n");
        for (id, address) in &self.0 {
            writeln!(body, "volume {} {address}", id.0).expect("memory takes it");
        }
        sealed(&body)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = unsealed(text)?.lines();
        if lines.next()? != HEADING {
            return None;
        }
        let volume = |line: &str| {
            let (id, address) = line.strip_prefix("volume ")?.split_once(' ')?;
            let id = id.parse().ok().filter(|&id: &u8| usize::from(id) < VOLUMES_MAX)?;
            Some((VolumeId(id), address.to_owned()))
        };
        lines.map(volume).collect::<Option<_>>().map(Self)
    }
}

/// The address of a primary in one line, without what does not tell where it is: the identity of a
/// server's export, or an absolute path as it is configured.
fn address_of(uri: &str) -> Result<String, OpenError> {
    let path = primary_path(uri)?.map(|path| std::path::absolute(&path).unwrap_or(path));
    let address = match path {
        Some(path) => path.to_string_lossy().into_owned(),
        None => network_identity(uri)?.unwrap_or_default(),
    };
    Ok(address.escape_default().to_string())
}

/// Removes those on record.
///
/// # Errors
/// If the file stays.
pub fn remove(state: &StateDir, uuid: [u8; 16]) -> io::Result<()> {
    state.remove(&file_of(uuid, KIND))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_back_and_what_is_not_whole_is_none() {
        let volumes = ["/dev/a b\n", "nbd://h:10809/x?delay=1s", "file:/dev/c?seed=1&emulate=hdd"];
        let ids: Vec<VolumeId> = (4..7).map(VolumeId).collect();
        let uris = volumes.map(address_of).map(|found| found.expect("it is a URI"));
        assert_eq!(uris, ["/dev/a b\\n", "nbd://h/x", "/dev/c"]);
        let addresses = Addresses(ids.into_iter().zip(uris).collect());
        let text = addresses.print();
        assert_eq!(Addresses::parse(&text), Some(addresses));
        for cut in 0..text.len() {
            assert_eq!(Addresses::parse(&text[..cut]), None, "{cut} bytes");
        }
        let wrong = format!("{HEADING}\nvolume {VOLUMES_MAX} /dev/a\n");
        assert_eq!(Addresses::parse(&sealed(&wrong)), None, "no such id");
    }

    #[test]
    fn the_state_directory_has_the_last_ones() {
        let name = format!("forebay-addresses-{}", std::process::id());
        let state = StateDir::open(&std::env::temp_dir().join(name)).expect("it is made");
        let uuid = [3; 16];
        assert_eq!(Addresses::load(&state, uuid), Addresses::default());
        for address in ["/dev/a", "/dev/b"] {
            let addresses = Addresses(vec![(VolumeId(1), address.to_owned())]);
            addresses.keep(&state, uuid);
            assert_eq!(Addresses::load(&state, uuid), addresses);
        }
        remove(&state, uuid).expect("it is ours");
        state.undo();
    }
}
