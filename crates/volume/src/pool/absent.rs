//! Renamed volumes, and volumes that are no longer configured.
//!
//! A volume is identified by its primary. A removed volume leaves its ID behind, in a record that
//! no configuration can name. Its entries stay in the log until they are reclaimed, and recovery
//! skips entries of a volume that is not served. An ID is not used again before the log has none of
//! these entries any more, so none of them can come back in another volume, or in the same volume
//! after its primary was written without the cache.

use forebay_block::VolumeId;
use forebay_format::{Superblock, VolumeRecord};

use super::primary::NAME_ONLY;
use super::{Refusal, VolumeSpec, refuse};

/// Prefix of the name in a removed volume's record; no volume name has a colon.
const REMOVED: &str = "removed:";

/// A volume that is not configured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Absent {
    /// The volume's ID.
    pub id: VolumeId,
    /// Number of its dirty blocks.
    pub dirty: u64,
    /// Whether to give them up.
    pub forget: bool,
}

/// The volumes of a pool that are not in `volumes`.
#[must_use]
pub fn absent<'a>(pool: &'a Superblock, volumes: &[VolumeSpec]) -> Vec<&'a VolumeRecord> {
    let known = volumes.iter().filter_map(|spec| record_of(&pool.volumes, volumes, spec));
    let known: Vec<usize> = known.collect();
    let absent = pool.volumes.iter().enumerate();
    let absent = absent.filter(|(at, one)| !known.contains(at) && !is_removed(one));
    absent.map(|(_, record)| record).collect()
}

/// Whether the record only keeps the ID of a removed volume.
#[must_use]
pub fn is_removed(record: &VolumeRecord) -> bool {
    record.name.starts_with(REMOVED)
}

/// The index of a configured volume's record: the record of its primary or, failing that, the
/// record of its name, unless that one belongs to the primary of another volume.
pub(super) fn record_of(
    records: &[VolumeRecord],
    volumes: &[VolumeSpec],
    spec: &VolumeSpec,
) -> Option<usize> {
    // A temporary name may belong to another device today.
    let of_primary = |record: &VolumeRecord, spec: &VolumeSpec| {
        let named = spec.identity.starts_with(NAME_ONLY);
        !named && !is_removed(record) && record.identity == spec.identity
    };
    records.iter().position(|record| of_primary(record, spec)).or_else(|| {
        let named = records.iter().position(|record| record.name == spec.name)?;
        (!volumes.iter().any(|other| of_primary(&records[named], other))).then_some(named)
    })
}

/// Turns the records of volumes that are no longer configured into those of removed volumes.
/// Returns notes for the log.
pub(super) fn drop_absent(
    records: &mut [VolumeRecord],
    volumes: &[VolumeSpec],
    known: &[Absent],
) -> Result<Vec<String>, Refusal> {
    let served = volumes.iter().filter_map(|spec| record_of(records, volumes, spec));
    let served: Vec<usize> = served.collect();
    let mut notes = Vec::new();
    for (at, record) in records.iter_mut().enumerate() {
        if served.contains(&at) || is_removed(record) {
            continue;
        }
        let VolumeRecord { name, identity, .. } = &*record;
        let Some(found) = known.iter().find(|known| known.id == record.id) else {
            return refuse(format!(
                "the cache holds volume {name} of {identity}, which is not configured; add it, or \
                 discard the whole cache with --reset-cache"
            ));
        };
        if found.dirty > 0 && !found.forget {
            return refuse(format!(
                "volume {name} of {identity} is not configured any more, but {} blocks of it are \
                 not on its primary yet; add it again and drain it, or give them up with \
                 --forget-volume {name}",
                found.dirty
            ));
        }
        if served.is_empty() && !found.forget {
            return refuse(format!(
                "the cache holds volume {name} of {identity}, and none of its volumes is \
                 configured: is it the right cache device? Add the volume, or give it up with \
                 --forget-volume {name}"
            ));
        }
        let lost = if found.dirty > 0 {
            format!("; {} blocks that were not on its primary are lost", found.dirty)
        } else {
            String::new()
        };
        notes.push(format!("volume {name} of {identity} is removed from the cache{lost}"));
        let id = record.id;
        *record = VolumeRecord {
            id,
            name: format!("{REMOVED}{}", id.0),
            size: 0,
            identity: String::new(),
            fingerprint: None,
        };
    }
    Ok(notes)
}
