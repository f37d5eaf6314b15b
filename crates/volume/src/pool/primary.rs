//! Whether a primary is the one that a cache belongs to, and whether it is as it was left.
//!
//! | identity | content | outcome |
//! |---|---|---|
//! | the same | the same, its time too | sound |
//! | the same | the same where it is sampled; its time is another, or unknown | suspect |
//! | the same | another | refused, or its dirty blocks only |
//! | another, both lasting | | refused, or its dirty blocks only |
//! | another, and one is only a name | the same, and not blank | as with the same identity |
//! | another, and one is only a name | another, blank, or unknown | refused, or its dirty blocks only |

use forebay_format::VolumeRecord;

use super::{Refusal, VolumeSpec, Witness, refuse};

/// What a primary's identity begins with when it is only its name of the day.
pub(super) const NAME_ONLY: &str = "name:";
/// What the identities of devices begin with that are the same whatever the device is called.
const LASTING: [&str; 8] =
    ["dm:", "dm-name:", "md:", "loop:", "partuuid:", "wwid:", "serial:", "nbd"];

/// How far what a cache has of a primary may be used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Standing {
    /// The primary is as it was left.
    Sound,
    /// Nothing shows that it was changed, and nothing proves that it was not.
    Suspect,
    /// It was changed, or is another, and was accepted all the same: clean blocks are out of date.
    Accepted,
}

/// What comparing a primary with what is on record of it shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    /// All that is on record is as it was, the time of the last change too.
    Same,
    /// What was sampled is as it was.
    SameSamples,
    /// Nothing is on record.
    Unknown,
    /// It differs, first in the block at this place if that is known.
    Changed(Option<u64>),
}

/// Judges one primary.
pub(super) fn judge(
    record: &VolumeRecord,
    spec: &VolumeSpec,
    witness: Option<&Witness>,
) -> Result<Standing, Refusal> {
    let (name, path) = (&spec.name, &spec.path);
    let content = compare(record, spec);
    let served = witness.is_none_or(|one| one.primaries.is_none() || one.names(&record.identity));
    if !served && content != Content::Same {
        return refuse(format!(
            "volume {name}: primary {path} has been served with another cache since; what this one \
             has of it is out of date: discard it with --reset-cache"
        ));
    }
    if spec.size < record.size {
        return refuse(format!(
            "volume {name}: primary {path} has shrunk from {} to {} bytes; restore its size, or \
             discard the cache with --reset-cache",
            record.size, spec.size
        ));
    }
    let known = is_same(&record.identity, spec) || is_moved(record, spec, content);
    match content {
        _ if spec.accepted && !known => Ok(Standing::Accepted),
        Content::Changed(_) if spec.accepted => Ok(Standing::Accepted),
        _ if !known => refuse(format!(
            "volume {name}: the cache belongs to primary {}, and {path} is {}; use that primary, \
             or another cache device. If {path} has its content and is only known otherwise now, \
             start once with --accept-primary {name}: the cache's dirty blocks are written to it, \
             and the rest of the cache is discarded",
            record.identity, spec.identity
        )),
        Content::Changed(at) => refuse(format!(
            "volume {name}: primary {path} was changed since the cache was last used{}; cached \
             blocks are out of date. To keep its dirty blocks, start once with --accept-primary \
             {name}: they are written over the primary, and the rest of the cache is discarded; \
             --reset-cache discards them too",
            at.map_or(String::new(), |at| format!(", in the block at {at}"))
        )),
        Content::Same => Ok(Standing::Sound),
        Content::SameSamples | Content::Unknown => Ok(Standing::Suspect),
    }
}

fn compare(record: &VolumeRecord, spec: &VolumeSpec) -> Content {
    if let Some(Some(at)) = spec.sampled {
        return Content::Changed(Some(at));
    }
    match record.fingerprint.zip(spec.fingerprint) {
        Some((old, new)) if old == new => Content::Same,
        // The lower half is of the content, the upper of the time.
        Some((old, new)) if old as u32 == new as u32 => Content::SameSamples,
        Some(_) => Content::Changed(None),
        None if spec.sampled.is_some() => Content::SameSamples,
        None => Content::Unknown,
    }
}

/// Whether an identity on record is that of a primary as it is now. Earlier versions wrote down
/// the path of a block device, which now has a lasting identity.
pub(super) fn is_same(recorded: &str, spec: &VolumeSpec) -> bool {
    let name = recorded.strip_prefix(NAME_ONLY).unwrap_or(recorded);
    recorded == spec.identity || (!is_lasting(recorded) && name == spec.path)
}

/// Whether the content says that a primary is the one on record, though it is named otherwise. It
/// cannot where both have lasting identities: copies have the same content.
fn is_moved(record: &VolumeRecord, spec: &VolumeSpec, content: Content) -> bool {
    let network = record.identity.starts_with("nbd") && spec.identity.starts_with("nbd");
    if spec.blank || (is_lasting(&record.identity) && is_lasting(&spec.identity) && !network) {
        return false;
    }
    let by_name = [&record.identity, &spec.identity].iter().any(|one| one.starts_with(NAME_ONLY));
    content == Content::Same || (by_name && content == Content::SameSamples)
}

fn is_lasting(identity: &str) -> bool {
    LASTING.iter().any(|kind| identity.starts_with(kind))
}
