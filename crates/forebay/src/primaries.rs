//! The primaries of a server, between what is on record of them and the shards: compared at the
//! start, watched while they are served, and recorded at the end.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use forebay_block::VolumeId;
use forebay_control::config::{Config, VolumeConfig};
use forebay_device::{BlockDevice, Watch, WatchedDevice};
use forebay_engine::pool::{Opened, VolumeSpec};
use forebay_format::Superblock;
use forebay_runtime::Stopped;

use crate::cli::ServeArgs;
use crate::fingerprint;
use crate::keeper::Kept;
use crate::samples::{self, Sample, Table};

/// The digest of each primary that could be recorded.
type Fingerprints = Vec<(VolumeId, Option<u64>)>;

/// The volumes with what their primaries are now, compared with what is on record of them in the
/// newest superblock and in the state directory.
///
/// # Errors
/// When a primary that something is on record of cannot be read.
pub fn specs(
    args: &ServeArgs,
    config: &Config,
    primaries: &[Arc<dyn BlockDevice>],
    newest: Option<&Superblock>,
) -> anyhow::Result<Vec<VolumeSpec>> {
    let record = newest.map(|newest| (newest, samples_of(newest, &config.cache.state_dir)));
    let volumes = config.volumes.iter().zip(primaries);
    volumes.map(|(volume, primary)| spec_of(args, volume, &**primary, record.as_ref())).collect()
}

/// The samples that the last start kept, if they are there and sound.
fn samples_of(newest: &Superblock, dir: &Path) -> Option<Table> {
    let found = Table::load(dir, newest.uuid, newest.epoch);
    found.unwrap_or_else(|error| {
        tracing::warn!(%error, "samples of the primaries were kept and cannot be read: left out");
        None
    })
}

/// Samples of every primary as it is, for the start that `opened` describes.
pub fn sample(opened: &Opened, primaries: &[Arc<dyn BlockDevice>]) -> Table {
    let Superblock { uuid, epoch, .. } = opened.superblock;
    let name = |id| name_of(&opened.superblock, id);
    let take = |(&id, primary): (&VolumeId, &Arc<dyn BlockDevice>)| {
        let found = samples::take(&**primary).unwrap_or_else(|error| {
            tracing::warn!(volume = name(id), %error, "no samples of its primary");
            samples::unknown(&**primary)
        });
        (id, found)
    };
    Table { uuid, epoch, volumes: opened.ids.iter().zip(primaries).map(take).collect() }
}

/// What people call a volume.
fn name_of(superblock: &Superblock, id: VolumeId) -> &str {
    let found = superblock.volumes.iter().find(|volume| volume.id == id);
    found.map_or("?", |volume| &volume.name)
}

/// The primaries as the shards get them: what is on record of them is watched.
pub fn watch(
    table: &Table,
    ids: &[VolumeId],
    primaries: &[Arc<dyn BlockDevice>],
) -> (Vec<Arc<dyn BlockDevice>>, Vec<Kept>) {
    let (mut watched, mut kept) = (Vec::<Arc<dyn BlockDevice>>::new(), Vec::new());
    for (&id, primary) in ids.iter().zip(primaries) {
        let samples: &[Sample] = table.of(id);
        let known: Vec<bool> = samples.iter().map(|sample| sample.crc.is_some()).collect();
        let places = samples.iter().map(|sample| sample.range).collect();
        let watch = Arc::new(Watch::new(places, &known));
        watched.push(Arc::new(WatchedDevice::new(Arc::clone(primary), Arc::clone(&watch))));
        kept.push(Kept { id, primary: Arc::clone(primary), watch });
    }
    (watched, kept)
}

/// A volume with what its primary is now, compared with what is on record of it.
fn spec_of(
    args: &ServeArgs,
    volume: &VolumeConfig,
    primary: &dyn BlockDevice,
    recorded: Option<&(&Superblock, Option<Table>)>,
) -> anyhow::Result<VolumeSpec> {
    let (name, info) = (&volume.name, primary.info());
    if info.identity.starts_with("name:") {
        tracing::warn!(
            volume = name,
            "nothing lasting is known of primary {}, only its name: after a start it is told from \
             others by its size and samples of its content; see docs/devices.md",
            info.name
        );
    }
    let record = recorded.and_then(|(superblock, table)| {
        let mut records = superblock.volumes.iter();
        let lasting = !info.identity.starts_with("name:");
        let same = records.clone().find(|one| lasting && one.identity == info.identity);
        let record = same.or_else(|| records.find(|one| one.name == *name))?;
        Some((record, table.as_ref().map_or(&[][..], |table| table.of(record.id))))
    });
    let (mut print, mut compared) = (None, None);
    if let Some((record, samples)) = record {
        let failed = || format!("volume {name}: primary");
        if record.fingerprint.is_some() {
            print = Some(fingerprint::of(primary, record.size).with_context(failed)?);
        }
        compared = samples::compare(primary, samples).with_context(failed)?;
    }
    let blanks = [print.map(|print| print.blank), compared.map(|compared| compared.blank)];
    Ok(VolumeSpec {
        name: name.clone(),
        size: info.size,
        identity: info.identity.clone(),
        path: info.name.clone(),
        fingerprint: print.map(|print| print.digest),
        blank: blanks.iter().flatten().all(|&blank| blank) && blanks != [None, None],
        sampled: compared.map(|compared| compared.changed),
        accepted: args.accept_primary.contains(name),
    })
}

/// Fingerprints and samples of the primaries after an orderly stop: of what is durable, so that a
/// power loss after the stop leaves just that.
pub fn leave(
    superblock: &Superblock,
    primaries: &[(VolumeId, Arc<dyn BlockDevice>)],
    stopped: &Stopped,
) -> (Fingerprints, Vec<(VolumeId, Vec<Sample>)>) {
    let (mut fingerprints, mut volumes) = (Vec::new(), Vec::new());
    for (id, primary) in primaries {
        let mut sampled = samples::unknown(&**primary);
        let found = samples::take(&**primary)
            .and_then(|found| Ok((fingerprint::of(&**primary, primary.info().size)?, found)));
        match found {
            // It says yes to the next flush, and may yet lose what it shows.
            _ if stopped.doubtful.contains(id) => {
                let volume = name_of(superblock, *id);
                tracing::warn!(volume, "no fingerprint of its primary, since a flush of it failed");
            }
            Ok((print, found)) => {
                sampled = found;
                fingerprints.push((*id, Some(print.digest)));
            }
            Err(error) => {
                let volume = name_of(superblock, *id);
                tracing::warn!(volume, %error, "no fingerprint of its primary");
            }
        }
        volumes.push((*id, sampled));
    }
    (fingerprints, volumes)
}
