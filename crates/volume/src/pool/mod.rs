//! Decides how to start from the superblocks of a cache device, the witness kept outside it, and
//! the configuration: make a new pool, open the existing one, or refuse. Pure decisions; the caller
//! reads and writes.
//!
//! | superblocks | witness | outcome |
//! |---|---|---|
//! | none, device blank | | a new pool |
//! | none, device blank | another pool may have dirty blocks of a primary | refused: the device was replaced or wiped |
//! | none, device not blank | | refused: it holds something else |
//! | none good, but one announced | | a new pool: making the last one was interrupted |
//! | damaged both | | refused |
//! | good | newer start count | refused: an older copy of the device |
//! | good | trust nothing | a new pool: the primaries were written without the cache |
//! | good, of the first start | of no start yet | a new pool: that start made it and never served |
//! | good | trust dirty only | opened for its dirty blocks |
//! | good | no longer names the primary | refused: another cache has served it since |
//! | good, more shards than can be served, or segments of a size or number that cannot be used | | refused |
//! | good, volume of another name, but the same primary | | opened, renamed |
//! | good, volume of another name, whose primary is where another volume's was | | refused: disks have exchanged their names |
//! | good, volume missing in the configuration | | dropped, if it has no dirty blocks or is to be forgotten; else refused |
//! | good, volume added | another pool may have dirty blocks of its primary | refused |
//! | good, other primary, or primary smaller, or changed | | refused |
//! | good, other primary, or changed, and accepted | | opened for its dirty blocks |
//! | good | same or none | opened |

mod absent;
mod primary;

use std::error::Error;
use std::fmt;

use forebay_block::{
    BLOCK_SIZE, ByteRange, IoBuf, NAME_BYTES_MAX, SHARDS_MAX, VOLUMES_MAX, VolumeId,
};
use forebay_engine::{
    SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SEGMENTS_MAX, SEGMENTS_MIN, Trust, blocks_in, bytes_for,
};
use forebay_format::{
    ANNOUNCEMENT_OFFSET, AREA_OFFSET, FormatError, IDENTITY_BYTES_MAX, SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS, ShardArea, Superblock, VOLUME_BLOCKS_MAX, VolumeRecord, newest,
};

pub use absent::{Absent, absent, is_removed};
use absent::{drop_absent, record_of};
use primary::{Standing, is_same, judge};

/// Size of a segment in bytes, if the device is large enough.
pub const SEGMENT_SIZE: u32 = 4 << 20;
/// Size of the smallest segment in a new pool, in bytes.
const SEGMENT_SIZE_SMALLEST: u32 = SEGMENT_BYTES_MIN as u32;
/// The most bytes that a volume may have.
const VOLUME_BYTES_MAX: u64 = VOLUME_BLOCKS_MAX * BLOCK_SIZE as u64;
/// Number of segments that a shard should have before larger segments are chosen.
const SEGMENTS_WANTED: u64 = 64;
/// The same for the log of a cache with a store, whose segments are freed one by one.
const LOG_SEGMENTS_WANTED: u64 = 32;
/// Share of a device, in percent, that is never written, for the device's own housekeeping: unless
/// another one is configured.
pub const SPARE_PERCENT: u8 = 10;
/// The largest share that may be configured.
const SPARE_PERCENT_MAX: u8 = 50;
/// Share of a cache, in percent, at which all of it is one log.
pub const ALL_LOG: u8 = 100;
/// Blocks in the index for every 100 blocks of cache device: more than 100, since compressed
/// blocks take less than 4 KiB. TPC-C's pages take a third with LZ4.
const INDEX_PERCENT: u64 = 300;

/// The facts about a pool that are kept outside its cache device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Witness {
    /// The pool's UUID.
    pub uuid: [u8; 16],
    /// The pool's start count when the witness was written.
    pub epoch: u32,
    /// How far the device may be trusted.
    pub trust: Trust,
    /// Whether the cache may have blocks that the primaries lack: true from each start to an
    /// orderly stop with nothing dirty.
    pub dirty: bool,
    /// The identities of the primaries that were last served with this pool. `None` if unknown,
    /// because the witness is from an earlier version.
    pub primaries: Option<Vec<String>>,
}

impl Witness {
    /// The start count in the first witness of a new pool, which is stored before the superblock.
    /// The pool has nothing until the next witness, of its first start, is stored.
    pub const BEFORE_SERVING: u32 = 0;

    fn names(&self, identity: &str) -> bool {
        self.primaries.as_ref().is_some_and(|all| all.iter().any(|one| one == identity))
    }

    fn names_primary(&self, spec: &VolumeSpec) -> bool {
        self.primaries.as_ref().is_some_and(|all| all.iter().any(|one| is_same(one, spec)))
    }
}

/// A configured volume, with the current state of its primary.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeSpec {
    /// The volume's name.
    pub name: String,
    /// The primary's size in bytes.
    pub size: u64,
    /// The primary's identity, independent of its current name if possible.
    pub identity: String,
    /// The primary's current path, or its URI without parameters.
    pub path: String,
    /// A digest of samples of its content in the lower half, and of its modification time in the
    /// upper half. It covers as many bytes as the primary had when it was last recorded.
    pub fingerprint: Option<u64>,
    /// Whether its samples are all alike, so that they do not tell which primary it is.
    pub blank: bool,
    /// Result of comparing the primary with samples kept while it was served: the offset of the
    /// first difference, if any. `None` if there are no samples.
    pub sampled: Option<Option<u64>>,
    /// Whether to accept the primary although it was changed or is another one: only the cache's
    /// dirty blocks are used then.
    pub accepted: bool,
    /// The volume of the pool whose primary was at this address at the last start, if known.
    pub was_here: Option<VolumeId>,
}

/// All inputs of the decision.
#[derive(Clone, Debug)]
pub struct OpenRequest<'a> {
    /// The cache device's size in bytes.
    pub device_size: u64,
    /// The bytes at [`forebay_format::SUPERBLOCK_OFFSETS`].
    pub copies: [&'a [u8]; 2],
    /// The bytes at [`ANNOUNCEMENT_OFFSET`].
    pub announcement: &'a [u8],
    /// The volumes as configured.
    pub volumes: &'a [VolumeSpec],
    /// The witnesses of all pools.
    pub witnesses: &'a [Witness],
    /// The pool's volumes that are not configured.
    pub absent: &'a [Absent],
    /// Removed volumes of which the log has no entry any more: their ids may be used again.
    pub forgotten: &'a [VolumeId],
    /// How a new pool is divided.
    pub division: Division,
    /// The ids that volumes of a new pool keep from the pool before it, by name: what the host
    /// knows by a volume's id, such as the files of a mount, stays the same. Ids with other names
    /// are not used.
    pub kept_ids: &'a [(VolumeId, String)],
    /// Whether to make a new pool regardless of the device's content.
    pub reset: bool,
    /// Whether an existing pool keeps its format: a program that does not know a later one may come
    /// back.
    pub keeps_format: bool,
    /// UUID of a new pool; random.
    pub uuid: [u8; 16],
    /// The current time, in seconds since 1970.
    pub now_unix: u64,
}

/// How a new pool is to be divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Division {
    /// Number of shards.
    pub shards: u16,
    /// Share of the device that is never written, in percent.
    pub spare_percent: u8,
    /// Share of the rest that is the log, in percent; what then remains is the store.
    pub log_percent: u8,
}

impl Division {
    /// The division with which a pool was made. If the areas of the pool are those of this one, but
    /// for rounding, it is this one.
    #[must_use]
    pub fn found_in(self, pool: &Superblock) -> Self {
        let shards = u16::try_from(pool.shards.len()).unwrap_or(u16::MAX);
        let wanted = Self { shards, ..self };
        let is_as_wanted = |made: Geometry| {
            let same = (made.segment_size, made.log_segments, &made.shards);
            same == (pool.segment_size, pool.log_segments, &pool.shards)
        };
        if geometry(pool.device_size, wanted).is_ok_and(is_as_wanted) {
            return wanted;
        }
        let percent = |part: u64, of: u64| {
            let rounded = (u128::from(part) * 100 + u128::from(of) / 2) / u128::from(of.max(1));
            u8::try_from(rounded.min(100)).expect("a share")
        };
        // Areas are of whole segments.
        let or = |found: u8, wanted: u8| if found.abs_diff(wanted) > 1 { found } else { wanted };
        let in_areas: u64 = pool.shards.iter().map(|area| area.len).sum();
        let spare = 100 - percent(in_areas, pool.device_size.saturating_sub(AREA_OFFSET));
        let segments =
            pool.shards.first().map_or(0, |area| area.len / u64::from(pool.segment_size));
        let log = pool.log_segments.map_or(ALL_LOG, |log| percent(log.into(), segments));
        Self {
            shards,
            spare_percent: or(spare, self.spare_percent),
            log_percent: or(log, self.log_percent),
        }
    }
}

/// How to start.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Opened {
    /// The superblock that must be written and flushed before anything else.
    pub superblock: Superblock,
    /// The copy of the superblock to overwrite: the older one. In a new pool both are written, this
    /// one first.
    pub copy: usize,
    /// Whether an announcement must be erased before the pool serves.
    pub announced: bool,
    /// Whether the pool is new, so that there is nothing to recover.
    pub fresh: bool,
    /// How far to trust the log.
    pub trust: Trust,
    /// The ID of each configured volume, in the order of the request.
    pub ids: Vec<VolumeId>,
    /// Volumes whose clean blocks should be compared with the primary before they are relied on,
    /// because nothing proves that it was not changed.
    pub suspect: Vec<VolumeId>,
    /// A witness to store before the superblock is written, if this start trusts the log less than
    /// the last one: the superblock alone would show primaries that were accepted as they are, and
    /// not that clean blocks are of earlier ones.
    pub distrust: Option<Witness>,
    /// Witnesses to store after the superblock is written and before the pool serves: those of this
    /// pool, and of pools whose primaries this one takes over.
    pub witnesses: Vec<Witness>,
    /// Messages for the administrator.
    pub notes: Vec<String>,
}

impl Opened {
    /// The range to discard after [`Opened::writes`], if the device takes discards: all of a new
    /// pool but its superblocks. Not earlier: if the new superblocks are not written, the old ones
    /// count at the next start.
    #[must_use]
    pub fn discard(&self) -> Option<ByteRange> {
        let len = self.superblock.device_size.checked_sub(AREA_OFFSET)?;
        self.fresh.then_some(ByteRange::new(AREA_OFFSET, len))
    }

    /// The writes to carry out before anything else, as offset and bytes. Each must be followed by
    /// a flush.
    ///
    /// The superblock of a new pool is announced first. While both copies may hold garbage, the
    /// announcement tells that nothing of value was there. Afterwards it is erased, so that it
    /// never excuses two damaged copies of a pool with data.
    #[must_use]
    pub fn writes(&self) -> Vec<(u64, IoBuf)> {
        let mut bytes = IoBuf::zeroed(SUPERBLOCK_BYTES);
        self.superblock.encode(&mut bytes);
        let copy = |at: u64| {
            let mut buf = IoBuf::zeroed(SUPERBLOCK_BYTES);
            buf.copy_from_slice(&bytes);
            (at, buf)
        };
        let mut writes = Vec::new();
        if self.fresh {
            writes.push(copy(ANNOUNCEMENT_OFFSET));
        }
        writes.push(copy(SUPERBLOCK_OFFSETS[self.copy]));
        if self.fresh {
            writes.push(copy(SUPERBLOCK_OFFSETS[1 - self.copy]));
        }
        if self.fresh || self.announced {
            writes.push((ANNOUNCEMENT_OFFSET, IoBuf::zeroed(SUPERBLOCK_BYTES)));
        }
        writes
    }
}

/// Why a cache device cannot be used, and what to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Refusal {}

fn refuse<T>(why: String) -> Result<T, Refusal> {
    Err(Refusal(why))
}

/// Decides what to do with a cache device.
///
/// # Errors
/// [`Refusal`], which says why and what to do. Nothing has been changed in that case.
pub fn open(request: &OpenRequest) -> Result<Opened, Refusal> {
    check_specs(request.volumes)?;
    if request.reset {
        return make(request, vec!["the cache device's content was discarded".into()], true);
    }
    let [a, b] = request.copies.map(Superblock::decode);
    if a.is_err() && b.is_err() && Superblock::decode(request.announcement).is_ok() {
        // All objections were checked, or overruled, when the announcement was written.
        let note = "an earlier start was interrupted while it made a cache here: it is made again";
        return make(request, vec![note.into()], true);
    }
    if is_absent(&a) && is_absent(&b) {
        if request.copies.iter().any(|copy| copy.iter().any(|&byte| byte != 0)) {
            return refuse(
                "the cache device holds something that is not a Forebay cache; to overwrite it, \
                 start once with --reset-cache"
                    .into(),
            );
        }
        return make(request, Vec::new(), false);
    }
    let durable = [&a, &b].map(|copy| {
        copy.as_ref().ok().filter(|copy| is_durable(request, copy)).map(|copy| copy.uuid)
    });
    let (superblock, newer) = match newest(a, b) {
        Ok(found) => found,
        Err(error) => {
            return refuse(format!(
                "both superblocks of the cache device are damaged ({error}); its dirty blocks, if \
                 any, are lost; to start over, use --reset-cache"
            ));
        }
    };
    let copy = match durable.map(|uuid| uuid == Some(superblock.uuid)) {
        [true, false] => 1,
        [false, true] => 0,
        _ => 1 - newer,
    };
    reopen(request, superblock, copy)
}

/// Whether a copy is known to be durable: the witness of a start is stored after its superblock has
/// been flushed. A newer copy may be from a start whose flush failed, or from a stop, whose loss
/// does no harm. In those cases the newer copy is the one to overwrite.
fn is_durable(request: &OpenRequest, copy: &Superblock) -> bool {
    let known = |one: &Witness| one.uuid == copy.uuid && one.epoch == copy.epoch;
    !copy.clean && request.witnesses.iter().any(known)
}

/// Decides whether the primary of a volume may be used if it was away at the start and has appeared
/// while the volume is served, or if it is to receive dirty blocks without a server. The decision
/// is that of a start, with the records from before this start, including its samples. `record` is
/// from the superblock that this start found; `witness` is that of the pool as it is stored now.
///
/// The cache is already serving, so a primary that may only receive its dirty blocks is refused,
/// even if that was accepted. Everything else of the volume must be compared before it is relied
/// on, as with a suspect primary.
///
/// # Errors
/// [`Refusal`], which says why and what to do.
pub fn rejoin(
    record: &VolumeRecord,
    spec: &VolumeSpec,
    witness: Option<&Witness>,
) -> Result<(), Refusal> {
    let spec = VolumeSpec { accepted: false, ..spec.clone() };
    check_specs(std::slice::from_ref(&spec))?;
    judge(record, &spec, witness).map(drop)
}

fn is_absent(copy: &Result<Superblock, FormatError>) -> bool {
    copy.as_ref().is_err_and(FormatError::is_absent)
}

fn check_specs(volumes: &[VolumeSpec]) -> Result<(), Refusal> {
    if volumes.is_empty() || volumes.len() > VOLUMES_MAX {
        return refuse(format!("{} volumes; a cache serves 1 to {VOLUMES_MAX}", volumes.len()));
    }
    for (i, volume) in volumes.iter().enumerate() {
        let VolumeSpec { name, size, identity, .. } = volume;
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return refuse(format!("volume name {name:?}: needs 1 to {NAME_BYTES_MAX} bytes"));
        }
        if identity.len() > IDENTITY_BYTES_MAX {
            return refuse(format!(
                "volume {name}: its primary's name is longer than {IDENTITY_BYTES_MAX} bytes"
            ));
        }
        if *size == 0 || !size.is_multiple_of(512) {
            return refuse(format!(
                "volume {name}: its primary has {size} bytes; it needs a multiple of 512, not 0"
            ));
        }
        if *size > VOLUME_BYTES_MAX {
            return refuse(format!(
                "volume {name}: its primary has {size} bytes; {VOLUME_BYTES_MAX} (4 PiB) are the \
                 most"
            ));
        }
        for other in &volumes[..i] {
            if other.name == *name {
                return refuse(format!("volume {name} is configured twice"));
            }
            if other.identity == *identity {
                return refuse(format!("volumes {} and {name} have the same primary", other.name));
            }
        }
    }
    Ok(())
}

/// Opens the existing pool.
fn reopen(request: &OpenRequest, mut old: Superblock, copy: usize) -> Result<Opened, Refusal> {
    let is_forgotten = |id: &VolumeId| request.forgotten.contains(id);
    old.volumes.retain(|record| !(is_removed(record) && is_forgotten(&record.id)));
    let last = request.witnesses.iter().find(|witness| witness.uuid == old.uuid);
    last_used(&old, last)?;
    let trust = last.map_or(Trust::Full, |witness| witness.trust);
    // A witness of an earlier start comes from a crash between writing the superblock and the
    // witness.
    let witness = last.filter(|witness| witness.epoch == old.epoch);
    let is_outdated = last.is_some() && witness.is_none();
    if trust == Trust::Nothing {
        let note =
            "the cache was given up, and its primaries are written without it: it is made again";
        return make(request, vec![note.into()], false);
    }
    if last.is_some_and(|last| last.epoch == Witness::BEFORE_SERVING) {
        let note = "an earlier start made this cache and was interrupted before it served: it is \
                    made again";
        return make(request, vec![note.into()], false);
    }
    check_device(request, &old)?;
    let mut volumes = old.volumes.clone();
    let mut notes = drop_absent(&mut volumes, request.volumes, request.absent)?;
    let mut ids = Vec::new();
    let (mut suspect, mut accepted) = (Vec::new(), Vec::new());
    for spec in request.volumes {
        match record_of(&old.volumes, request.volumes, spec) {
            Some(at) => {
                if is_outdated {
                    // It does not tell whether another pool has had the primary since.
                    check_holder(request, spec, Some(old.uuid))?;
                }
                let record = &mut volumes[at];
                match judge(record, spec, witness)? {
                    Standing::Sound => {}
                    Standing::Suspect => suspect.push(record.id),
                    Standing::Accepted => accepted.push(spec.name.as_str()),
                }
                if record.name != spec.name {
                    check_not_exchanged(&old.volumes, record, spec)?;
                    notes.push(format!("volume {} is now named {}", record.name, spec.name));
                    record.name.clone_from(&spec.name);
                }
                record.size = spec.size;
                record.identity.clone_from(&spec.identity);
                ids.push(record.id);
            }
            None => {
                // Its own witness may be of the start before, which had the volume.
                check_holder(request, spec, Some(old.uuid))?;
                ids.push(add_volume(&mut volumes, spec, &[])?);
            }
        }
    }
    let found = request.division.found_in(&old);
    if found.shards != request.division.shards {
        notes.push(format!("the cache was made with {} shards and keeps them", found.shards));
    }
    if found != (Division { shards: found.shards, ..request.division }) {
        notes.push(format!(
            "the cache was made with {}% of the device spare and a log of {}% of the rest, and \
             keeps them until forebay apply makes a new one",
            found.spare_percent, found.log_percent
        ));
    }
    let before = trust;
    let trust = if accepted.is_empty() { trust } else { Trust::DirtyOnly };
    let distrust = (trust != before).then(|| match last {
        Some(last) => Witness { trust, ..last.clone() },
        None => {
            let Superblock { uuid, epoch, .. } = old;
            Witness { uuid, epoch, trust, dirty: true, primaries: None }
        }
    });
    notes.extend(accepted.iter().map(|name| {
        format!(
            "volume {name}: its primary is taken as it is; the cache is opened for its dirty \
             blocks only, and made again at the next start after they are written"
        )
    }));
    for record in &mut volumes {
        record.fingerprint = None;
    }
    volumes.sort_by_key(|record| record.id);
    let Some(epoch) = old.epoch.checked_add(1) else {
        return refuse("the cache has been started too often; use --reset-cache".into());
    };
    let generation = old.generation + 1;
    let unit_entries = old.unit_entries || old.log_segments.is_some() && !request.keeps_format;
    let superblock = Superblock { generation, epoch, volumes, unit_entries, clean: false, ..old };
    let announced = request.announcement.iter().any(|&byte| byte != 0);
    let witnesses = witnesses(request, &superblock, trust);
    Ok(Opened {
        superblock,
        copy,
        announced,
        fresh: false,
        trust,
        ids,
        suspect,
        distrust,
        witnesses,
        notes,
    })
}

/// Refuses to rename a volume if its primary was found at the address of another volume's: nobody
/// gave it this name. The kernel has given one disk's name to another disk, and the clients of one
/// volume would use the other.
fn check_not_exchanged(
    records: &[VolumeRecord],
    found: &VolumeRecord,
    spec: &VolumeSpec,
) -> Result<(), Refusal> {
    let at_last = |record: &&VolumeRecord| Some(record.id) == spec.was_here && !is_removed(record);
    match records.iter().find(at_last) {
        Some(last) if last.id != found.id => refuse(format!(
            "volume {}: {} is now {}, the primary of volume {}; at the last start it was {}, the \
             primary of volume {}: disks have exchanged their names; configure each primary by a \
             name that stays, such as those in /dev/disk/by-id",
            spec.name, spec.path, found.identity, found.name, last.identity, last.name
        )),
        _ => Ok(()),
    }
}

/// Checks that the device is the one that was last used, not an older copy of it. `witness` is that
/// of the pool.
///
/// # Errors
/// [`Refusal`], which says why and what to do.
pub fn last_used(pool: &Superblock, witness: Option<&Witness>) -> Result<(), Refusal> {
    match witness {
        Some(witness) if witness.epoch > pool.epoch => refuse(format!(
            "the cache device is an older copy: it was last used in start {}, this one is from \
             start {}; use the right device, or discard this one with --reset-cache",
            witness.epoch, pool.epoch
        )),
        _ => Ok(()),
    }
}

/// Checks that the device holds the whole pool, and that the pool can be served.
fn check_device(request: &OpenRequest, old: &Superblock) -> Result<(), Refusal> {
    if request.device_size < old.device_size {
        return refuse(format!(
            "the cache device has {} bytes, but the cache on it was made for {}; restore its size",
            request.device_size, old.device_size
        ));
    }
    if old.shards.len() > SHARDS_MAX {
        return refuse(format!(
            "the cache was made for {} shards, and {SHARDS_MAX} can be served; it has never been \
             served and holds nothing: start once with --reset-cache and at most {SHARDS_MAX} \
             shards",
            old.shards.len()
        ));
    }
    check_geometry(old)
}

/// Checks that the engine can read the log. Each pool that [`geometry`] has divided passes.
///
/// # Errors
/// [`Refusal`], which names the first number that is out of its limits.
pub fn check_geometry(pool: &Superblock) -> Result<(), Refusal> {
    let within = |what, found: u64, least, most| match found {
        _ if (least..=most).contains(&found) => Ok(()),
        _ => refuse(format!(
            "the cache has {what} {found}, and {least} to {most} can be used: no version of \
             Forebay made it, or it is damaged; to start over, use --reset-cache"
        )),
    };
    let segment = u64::from(pool.segment_size);
    within("a segment size of", segment, SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)?;
    for area in &pool.shards {
        within(
            "a shard with a number of segments of",
            area.len / segment,
            SEGMENTS_MIN,
            SEGMENTS_MAX,
        )?;
        let log = pool.log_segments_of(area);
        within("a number of log segments of", log, SEGMENTS_MIN, SEGMENTS_MAX)?;
    }
    Ok(())
}

/// Refuses a volume whose dirty blocks another pool than `own` may have.
fn check_holder(
    request: &OpenRequest,
    spec: &VolumeSpec,
    own: Option<[u8; 16]>,
) -> Result<(), Refusal> {
    if let Some(other) = holder(request, spec, own) {
        return refuse(format!(
            "volume {}: primary {} was last served with another cache, {:032x}, which \
             may have the newest version of its blocks; use and drain that one; if it \
             is lost, remove its witness from the state directory",
            spec.name,
            spec.path,
            u128::from_be_bytes(other.uuid)
        ));
    }
    Ok(())
}

/// The pool other than `own` that may have dirty blocks of a primary, according to the witnesses.
fn holder<'a>(
    request: &OpenRequest<'a>,
    spec: &VolumeSpec,
    own: Option<[u8; 16]>,
) -> Option<&'a Witness> {
    let mut all = request.witnesses.iter().filter(|one| Some(one.uuid) != own);
    all.find(|one| one.dirty && one.trust != Trust::Nothing && one.names_primary(spec))
}

/// The witnesses to store from this start on.
fn witnesses(request: &OpenRequest, superblock: &Superblock, trust: Trust) -> Vec<Witness> {
    let Superblock { uuid, epoch, .. } = *superblock;
    let primaries: Vec<String> = request.volumes.iter().map(|s| s.identity.clone()).collect();
    let others = request.witnesses.iter().filter(|one| one.uuid != uuid);
    let outdated = others.filter(|one| request.volumes.iter().any(|spec| one.names_primary(spec)));
    let without = |one: &Witness| {
        let mut one = one.clone();
        let taken = |name: &String| request.volumes.iter().any(|spec| is_same(name, spec));
        one.primaries.iter_mut().for_each(|all| all.retain(|name| !taken(name)));
        one
    };
    let mut witnesses: Vec<Witness> = outdated.map(without).collect();
    let primaries = Some(primaries);
    witnesses.push(Witness { uuid, epoch, trust, dirty: true, primaries });
    witnesses
}

/// Adds a record, under an id that no record and no other volume of `kept` has.
fn add_volume(
    volumes: &mut Vec<VolumeRecord>,
    spec: &VolumeSpec,
    kept: &[(VolumeId, String)],
) -> Result<VolumeId, Refusal> {
    if let Some(other) = volumes.iter().find(|record| is_same(&record.identity, spec)) {
        return refuse(format!(
            "volume {}: primary {} is cached as volume {} already",
            spec.name, spec.path, other.name
        ));
    }
    let own = kept.iter().find(|(_, name)| *name == spec.name).map(|&(id, _)| id);
    let is_free = |id: &VolumeId| {
        let kept = kept.iter().any(|(other, _)| other == id);
        !kept && volumes.iter().all(|record| record.id != *id)
    };
    let free = || (0..VOLUMES_MAX as u8).map(VolumeId).find(is_free);
    let no_room = || Refusal("the cache has no room for a volume".into());
    let id = own.or_else(free).ok_or_else(no_room)?;
    volumes.push(VolumeRecord {
        id,
        name: spec.name.clone(),
        size: spec.size,
        identity: spec.identity.clone(),
        fingerprint: None,
    });
    Ok(id)
}

/// Makes a new pool; with `forced`, even if another one may have dirty blocks of a primary.
fn make(request: &OpenRequest, mut notes: Vec<String>, forced: bool) -> Result<Opened, Refusal> {
    for spec in request.volumes {
        let Some(other) = holder(request, spec, None) else { continue };
        let uuid = u128::from_be_bytes(other.uuid);
        if !forced {
            let blank = request.copies.iter().all(|copy| is_absent(&Superblock::decode(copy)));
            let what = if blank { "is blank" } else { "holds no data" };
            return refuse(format!(
                "the cache device {what}, but volume {} of {} was last served with cache \
                 {uuid:032x}, which may have the newest version of its blocks; use that cache \
                 device; if it is lost, start once with --reset-cache to go on with the primary \
                 as it is",
                spec.name, spec.path
            ));
        }
        notes.push(format!("cache {uuid:032x} of {} is given up", spec.path));
    }
    let Geometry { segment_size, shards, log_segments } =
        geometry(request.device_size, request.division)?;
    let used: u64 = shards.iter().map(|area| area.len).sum();
    let usable = usable(request.device_size, request.division.spare_percent);
    // Areas are of whole segments.
    if used + shards.len() as u64 * u64::from(segment_size) < usable {
        notes.push(format!(
            "{} of the cache device stay unused: a shard takes {} at most; choose more shards \
             (server.shards, --shards)",
            gib(usable - used),
            gib(SEGMENTS_MAX * u64::from(segment_size))
        ));
    }
    let mut volumes = Vec::new();
    let mut ids = Vec::new();
    for spec in request.volumes {
        ids.push(add_volume(&mut volumes, spec, request.kept_ids)?);
    }
    volumes.sort_by_key(|record| record.id);
    let generations =
        request.copies.map(|copy| Superblock::decode(copy).map_or(0, |s| s.generation));
    let mut pool = [0; 8];
    pool.copy_from_slice(&request.uuid[..8]);
    let superblock = Superblock {
        pool: u64::from_le_bytes(pool),
        uuid: request.uuid,
        generation: generations.into_iter().max().unwrap_or(0) + 1,
        epoch: 1,
        segment_size,
        device_size: request.device_size,
        shards,
        unit_entries: log_segments.is_some(),
        log_segments,
        volumes,
        clean: false,
        created_unix: request.now_unix,
    };
    // Overwrites the older copy, so that a torn write leaves the newer one.
    let copy = usize::from(generations[0] > generations[1]);
    let trust = Trust::Full;
    Ok(Opened {
        witnesses: witnesses(request, &superblock, trust),
        superblock,
        copy,
        announced: true,
        fresh: true,
        trust,
        ids,
        suspect: Vec::new(),
        distrust: None,
        notes,
    })
}

/// The division of a cache device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size of a segment, in bytes.
    pub segment_size: u32,
    /// The areas of the shards.
    pub shards: Vec<ShardArea>,
    /// Number of segments of each area that are its log, if the others are its store.
    pub log_segments: Option<u32>,
}

/// The areas of a new pool.
///
/// # Errors
/// If the device is too small.
pub fn geometry(device_size: u64, division: Division) -> Result<Geometry, Refusal> {
    let Division { shards, spare_percent, log_percent } = division;
    if shards == 0 || usize::from(shards) > SHARDS_MAX {
        return refuse(format!("{shards} shards; choose 1 to {SHARDS_MAX}"));
    }
    let smallest = u64::from(SEGMENT_SIZE_SMALLEST);
    let count = u64::from(shards);
    let per_shard = usable(device_size, spare_percent) / count;
    if per_shard < SEGMENTS_MIN * smallest {
        let least = (SEGMENTS_MIN * smallest * count * 100).div_ceil(in_use(spare_percent));
        return refuse(format!(
            "the cache device has {device_size} bytes; {shards} shards need at least {}",
            (least + AREA_OFFSET + 100).next_multiple_of(1 << 20)
        ));
    }
    let percent = u64::from(log_percent.clamp(1, ALL_LOG));
    let mut segment = u64::from(SEGMENT_SIZE);
    let log = |segment: u64| (per_shard / segment).min(SEGMENTS_MAX) * percent / 100;
    let wanted = if log_percent < ALL_LOG { LOG_SEGMENTS_WANTED } else { SEGMENTS_WANTED };
    while segment > smallest && log(segment) < wanted {
        segment /= 2;
    }
    let segments = (per_shard / segment).min(SEGMENTS_MAX);
    let log = log(segment).clamp(SEGMENTS_MIN, segments);
    let len = segments * segment;
    let shards = (0..count).map(|i| ShardArea { offset: AREA_OFFSET + i * len, len }).collect();
    let log_segments = (log < segments).then_some(log as u32);
    Ok(Geometry { segment_size: segment as u32, shards, log_segments })
}

/// The superblock of an orderly stop, with the fingerprint of each volume's primary.
#[must_use]
pub fn closed(mut last: Superblock, fingerprints: &[(VolumeId, Option<u64>)]) -> Superblock {
    last.generation += 1;
    last.clean = true;
    for record in &mut last.volumes {
        let found = fingerprints.iter().find(|(id, _)| *id == record.id);
        record.fingerprint = found.and_then(|&(_, fingerprint)| fingerprint);
    }
    last
}

/// Converts a shard's area to the byte range that the engine takes.
#[must_use]
pub fn area_of(area: ShardArea) -> ByteRange {
    ByteRange::new(area.offset, area.len)
}

/// Number of blocks in a shard's index. It depends only on the area: an index that became smaller
/// than the content of the log could not be recovered.
#[must_use]
pub fn index_blocks(area: ShardArea) -> u64 {
    area.len / BLOCK_SIZE as u64 * INDEX_PERCENT / 100
}

/// Most bytes of memory that a shard's index takes. It takes less while it holds fewer blocks.
#[must_use]
pub fn index_bytes(area: ShardArea) -> u64 {
    bytes_for(index_blocks(area))
}

/// The largest cache device, in bytes, whose index takes at most `bytes` bytes of memory if
/// `spare_percent` of the device are never written.
#[must_use]
pub fn device_for_index(bytes: u64, spare_percent: u8) -> u64 {
    let area = (blocks_in(bytes) / INDEX_PERCENT * 100).saturating_mul(BLOCK_SIZE as u64);
    AREA_OFFSET + area / in_use(spare_percent) * 100
}

/// Bytes of a device that may be divided.
fn usable(device_size: u64, spare_percent: u8) -> u64 {
    device_size.saturating_sub(AREA_OFFSET) / 100 * in_use(spare_percent)
}

/// A size for people.
fn gib(bytes: u64) -> String {
    format!("{} GiB", bytes >> 30)
}

/// Share of the device that is not spare, in percent.
fn in_use(spare_percent: u8) -> u64 {
    100 - u64::from(spare_percent.min(SPARE_PERCENT_MAX))
}

const _: () = assert!(SUPERBLOCK_BYTES as u64 <= AREA_OFFSET / 2);
const _: () = assert!(SEGMENT_SIZE as u64 <= SEGMENT_BYTES_MAX);

#[cfg(test)]
mod tests;
