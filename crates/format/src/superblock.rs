//! The superblock: the identity of the cache device, its division among shards, and the volumes
//! that it caches.
//!
//! There are two copies. An update is written to the older one, with the next generation. Only one
//! copy is ever being written, so a torn write leaves the other intact. The first superblock of a
//! pool is first written to a third place, the announcement, which is blanked before the pool
//! serves. The log's state is not here: recovery finds it in the segments.

use forebay_block::{NAME_BYTES_MAX, SHARDS_MAX, VOLUMES_MAX, VolumeId};

use crate::bytes::{PREFIX_BYTES, Reader, Writer, ensure_len, magic, seal};
use crate::entry::VOLUME_BLOCKS_MAX;
use crate::error::{FormatError, Rule, ensure_eq, ensure_max, ensure_min};
use crate::{FORMAT_VERSION, PAGE, SEGMENT_SIZE_MAX, SEGMENT_SIZE_MIN};

/// Length of a copy of the superblock, in bytes.
pub const SUPERBLOCK_BYTES: usize = 32768;
/// Offsets of the two copies on the cache device.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 65536];
/// Offset of the announcement: a new pool's superblock is written here before its copies. If a
/// crash damages the copies, it proves that nothing of value was there.
pub const ANNOUNCEMENT_OFFSET: u64 = 32768;
/// Minimum offset of the shards' areas.
pub const AREA_OFFSET: u64 = 1 << 20;
/// Shard entries in the superblock. Fewer shards can be served: [`forebay_block::SHARDS_MAX`].
pub const SHARD_AREAS: usize = 256;
/// Volume entries in the superblock.
const VOLUME_RECORDS: usize = 64;
/// Bytes for a volume's name in the superblock.
const NAME_BYTES: usize = 64;
/// Maximum length of a primary's identity, in bytes.
pub const IDENTITY_BYTES_MAX: usize = 255;

const MAGIC: u64 = magic(b"ForebayS");
const HEAD_BYTES: usize = 128;
const HEAD_USED: usize = PREFIX_BYTES + 2 + 8 + 16 + 8 + 4 + 4 + 8 + 8 + 2 + 2 + 4;
const AREA_BYTES: usize = 16;
const AREAS_AT: usize = HEAD_BYTES;
const VOLUME_BYTES: usize = 384;
const VOLUME_USED: usize = 8 + 8 + 8 + NAME_BYTES + IDENTITY_BYTES_MAX;
const VOLUMES_AT: usize = AREAS_AT + SHARD_AREAS * AREA_BYTES;
const END: usize = VOLUMES_AT + VOLUME_RECORDS * VOLUME_BYTES;
const SHARDS_COUNT_AT: usize = HEAD_USED - 8;
const VOLUMES_COUNT_AT: usize = HEAD_USED - 6;
const LOG_SEGMENTS_AT: usize = HEAD_USED - 4;
/// Version of a superblock whose areas have a store; without one, it is [`FORMAT_VERSION`].
const VERSION_WITH_STORE: u16 = 2;
/// The same, if records and footers may have unit entries.
const VERSION_WITH_UNITS: u16 = 3;

const FLAG_CLEAN: u16 = 1;
const FLAG_FINGERPRINT: u8 = 1;

/// The properties of a cache device and its pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// Number of the pool, repeated in every record. It is derived from the UUID, so that records
    /// of an earlier pool in the same place are recognized as foreign.
    pub pool: u64,
    /// The pool's universally unique ID.
    pub uuid: [u8; 16],
    /// Generation of this superblock; the copy with the higher one is valid.
    pub generation: u64,
    /// Number of this server run, repeated in every record.
    pub epoch: u32,
    /// Length of a segment, in bytes.
    pub segment_size: u32,
    /// Size of the cache device in bytes when it was formatted.
    pub device_size: u64,
    /// The area of each shard, in ascending order on the device.
    pub shards: Vec<ShardArea>,
    /// Number of segments of each area that are its log, if the rest of the area is its store. If
    /// `None`, all of it is the log.
    pub log_segments: Option<u32>,
    /// Whether records and footers may have unit entries, which earlier builds do not know; only
    /// with a store.
    pub unit_entries: bool,
    /// The volumes, in ascending order of their IDs.
    pub volumes: Vec<VolumeRecord>,
    /// Whether the server was stopped in order.
    pub clean: bool,
    /// Time of formatting, in seconds since 1970.
    pub created_unix: u64,
}

/// The area of the cache device that holds a shard's log and store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ShardArea {
    /// First byte.
    pub offset: u64,
    /// Length in bytes, a multiple of the segment size.
    pub len: u64,
}

/// A volume that the pool caches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeRecord {
    /// The volume's ID in entries.
    pub id: VolumeId,
    /// Its name for users; at most [`NAME_BYTES_MAX`] bytes.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// Identity of its primary; at most [`IDENTITY_BYTES_MAX`] bytes.
    pub identity: String,
    /// Fingerprint of the primary's content at the last orderly stop.
    pub fingerprint: Option<u64>,
}

impl Superblock {
    /// Encodes the superblock over all of `out`.
    ///
    /// # Panics
    /// If `out` is not [`SUPERBLOCK_BYTES`] long, or [`Superblock::check`] fails.
    pub fn encode(&self, out: &mut [u8]) {
        assert!(out.len() == SUPERBLOCK_BYTES, "a superblock in {} bytes", out.len());
        if let Err(error) = self.check() {
            panic!("the superblock cannot be encoded: {error}");
        }
        let mut w = Writer::new(&mut *out);
        w.prefix(MAGIC, self.version());
        w.u16(u16::from(self.clean) * FLAG_CLEAN);
        w.u64(self.pool);
        w.put(&self.uuid);
        w.u64(self.generation);
        w.u32(self.epoch);
        w.u32(self.segment_size);
        w.u64(self.device_size);
        w.u64(self.created_unix);
        w.u16(u16::try_from(self.shards.len()).expect("checked against SHARD_AREAS"));
        w.u16(u16::try_from(self.volumes.len()).expect("checked against VOLUMES_MAX"));
        w.u32(self.log_segments.unwrap_or(0));
        w.zeros(HEAD_BYTES - HEAD_USED);
        for area in &self.shards {
            w.u64(area.offset);
            w.u64(area.len);
        }
        w.zeros((SHARD_AREAS - self.shards.len()) * AREA_BYTES);
        for volume in &self.volumes {
            volume.put(&mut w);
        }
        w.zeros((VOLUME_RECORDS - self.volumes.len()) * VOLUME_BYTES + SUPERBLOCK_BYTES - END);
        seal(out);
    }

    /// Number of segments in the log of an area.
    #[must_use]
    pub fn log_segments_of(&self, area: &ShardArea) -> u64 {
        self.log_segments.map_or(area.len / u64::from(self.segment_size), u64::from)
    }

    /// Version of the encoded superblock.
    fn version(&self) -> u16 {
        match (self.log_segments, self.unit_entries) {
            (None, _) => FORMAT_VERSION,
            (Some(_), false) => VERSION_WITH_STORE,
            (Some(_), true) => VERSION_WITH_UNITS,
        }
    }

    /// Decodes and checks one copy.
    ///
    /// # Errors
    /// [`FormatError::Blank`] for an unused device, [`FormatError::NoMagic`] for one with foreign
    /// data, otherwise the damaged field.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        ensure_len(bytes, SUPERBLOCK_BYTES)?;
        let bytes = bytes.get(..SUPERBLOCK_BYTES).unwrap_or(bytes);
        let mut r = Reader::new(bytes);
        let (_, version) = r.prefix("superblock", MAGIC, bytes, VERSION_WITH_UNITS)?;
        let flags = r.u16()?;
        ensure_eq("unknown flags", r.at() - 2, u64::from(flags & !FLAG_CLEAN), 0)?;
        let (pool, uuid, generation) = (r.u64()?, r.array()?, r.u64()?);
        let (epoch, segment_size, device_size) = (r.u32()?, r.u32()?, r.u64()?);
        let created_unix = r.u64()?;
        let (shard_count, volume_count) = (usize::from(r.u16()?), usize::from(r.u16()?));
        check_counts(shard_count, volume_count)?;
        let log_segments = r.u32()?;
        ensure_eq(
            "log segments of a superblock without a store",
            LOG_SEGMENTS_AT,
            u64::from(if version == FORMAT_VERSION { log_segments } else { 0 }),
            0,
        )?;
        let log_segments = (version > FORMAT_VERSION).then_some(log_segments);
        r.reserved(HEAD_BYTES - r.at())?;
        let mut shards = Vec::with_capacity(shard_count);
        for _ in 0..shard_count {
            shards.push(ShardArea { offset: r.u64()?, len: r.u64()? });
        }
        r.reserved(VOLUMES_AT - r.at())?;
        let mut volumes = Vec::with_capacity(volume_count);
        for _ in 0..volume_count {
            volumes.push(VolumeRecord::take(&mut r)?);
        }
        r.reserved(SUPERBLOCK_BYTES - r.at())?;
        let superblock = Self {
            pool,
            uuid,
            generation,
            epoch,
            segment_size,
            device_size,
            shards,
            log_segments,
            unit_entries: version == VERSION_WITH_UNITS,
            volumes,
            clean: flags & FLAG_CLEAN != 0,
            created_unix,
        };
        superblock.check()?;
        Ok(superblock)
    }

    /// Checks the fields against each other. Names and identities come from users, so check before
    /// encoding.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn check(&self) -> Result<(), FormatError> {
        check_counts(self.shards.len(), self.volumes.len())?;
        let without = u64::from(self.unit_entries && self.log_segments.is_none());
        ensure_eq("unit entries without a store", PREFIX_BYTES - 2, without, 0)?;
        let segment = u64::from(self.segment_size);
        let (least, most) = (u64::from(SEGMENT_SIZE_MIN), u64::from(SEGMENT_SIZE_MAX));
        ensure_min("segment size", 52, segment, least)?;
        ensure_max("segment size", 52, segment, most)?;
        let page = PAGE as u64;
        ensure_eq("segment size's remainder in pages", 52, segment % page, 0)?;
        let mut free_from = AREA_OFFSET;
        for (area, at) in self.shards.iter().zip((AREAS_AT..).step_by(AREA_BYTES)) {
            ensure_min("start of a shard's area", at, area.offset, free_from)?;
            ensure_eq("area offset's remainder in pages", at, area.offset % page, 0)?;
            ensure_eq("area length's remainder in segments", at + 8, area.len % segment, 0)?;
            ensure_min("length of a shard's area", at + 8, area.len, 2 * segment)?;
            free_from = area.offset.saturating_add(area.len);
            ensure_max("end of a shard's area", at, free_from, self.device_size)?;
            if let Some(log) = self.log_segments.map(u64::from) {
                ensure_min("log segments", LOG_SEGMENTS_AT, log, 2)?;
                ensure_max("log segments", LOG_SEGMENTS_AT, log, area.len / segment - 1)?;
            }
        }
        let mut next_id = 0;
        for (volume, at) in self.volumes.iter().zip((VOLUMES_AT..).step_by(VOLUME_BYTES)) {
            let id = u64::from(volume.id.0);
            ensure_min("volume id", at, id, next_id)?;
            volume.check(at)?;
            next_id = id + 1;
        }
        Ok(())
    }
}

fn check_counts(shards: usize, volumes: usize) -> Result<(), FormatError> {
    let (s, v) = (shards as u64, volumes as u64);
    ensure_min("number of shards", SHARDS_COUNT_AT, s, 1)?;
    ensure_max("number of shards", SHARDS_COUNT_AT, s, SHARD_AREAS as u64)?;
    ensure_max("number of volumes", VOLUMES_COUNT_AT, v, VOLUMES_MAX as u64)
}

impl VolumeRecord {
    fn put(&self, w: &mut Writer<'_>) {
        w.u8(self.id.0);
        w.u8(u8::from(self.fingerprint.is_some()) * FLAG_FINGERPRINT);
        w.u8(u8::try_from(self.name.len()).expect("checked against NAME_BYTES_MAX"));
        w.u8(u8::try_from(self.identity.len()).expect("checked against IDENTITY_BYTES_MAX"));
        w.u32(0);
        w.u64(self.size);
        w.u64(self.fingerprint.unwrap_or(0));
        w.put(self.name.as_bytes());
        w.zeros(NAME_BYTES - self.name.len());
        w.put(self.identity.as_bytes());
        w.zeros(IDENTITY_BYTES_MAX - self.identity.len() + VOLUME_BYTES - VOLUME_USED);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, FormatError> {
        let (id, flags) = (VolumeId(r.u8()?), r.u8()?);
        let unknown = u64::from(flags & !FLAG_FINGERPRINT);
        ensure_eq("unknown volume flags", r.at() - 1, unknown, 0)?;
        let (name_len, identity_len) = (usize::from(r.u8()?), usize::from(r.u8()?));
        r.reserved(4)?;
        let (size, fingerprint) = (r.u64()?, r.u64()?);
        let present = flags & FLAG_FINGERPRINT != 0;
        if !present {
            ensure_eq("absent fingerprint", r.at() - 8, fingerprint, 0)?;
        }
        let name = text(r, name_len, NAME_BYTES)?;
        let identity = text(r, identity_len, IDENTITY_BYTES_MAX)?;
        r.reserved(VOLUME_BYTES - VOLUME_USED)?;
        Ok(Self { id, name, size, identity, fingerprint: present.then_some(fingerprint) })
    }

    fn check(&self, at: usize) -> Result<(), FormatError> {
        let most = VOLUMES_MAX as u64 - 1;
        let id = u64::from(self.id.0);
        ensure_max("volume id", at, id, most)?;
        let (len, most) = (self.name.len() as u64, NAME_BYTES_MAX as u64);
        ensure_max("bytes of a volume's name", at + 2, len, most)?;
        ensure_min("bytes of a volume's name", at + 2, len, 1)?;
        let (len, most) = (self.identity.len() as u64, IDENTITY_BYTES_MAX as u64);
        ensure_max("bytes of a primary's identity", at + 3, len, most)?;
        let most = VOLUME_BLOCKS_MAX * PAGE as u64;
        ensure_max("volume size", at + 8, self.size, most)
    }
}

/// Reads `len` bytes of text from a field of `width` bytes, whose other bytes must be zero.
fn text(r: &mut Reader<'_>, len: usize, width: usize) -> Result<String, FormatError> {
    let at = r.at();
    ensure_max("bytes of text", at, len as u64, width as u64)?;
    let text = std::str::from_utf8(r.take(len)?);
    r.reserved(width - len)?;
    text.map(str::to_owned).map_err(|error| FormatError::Invalid {
        what: "bytes of UTF-8 in a text",
        at,
        found: error.valid_up_to() as u64,
        rule: Rule::Exactly,
        expected: len as u64,
    })
}

/// Chooses between the two copies of a device: the valid one, or if both are valid the one with the
/// higher generation. Returns it with its index in [`SUPERBLOCK_OFFSETS`]; the next update goes to
/// the other offset.
///
/// # Errors
/// If neither copy is valid: a damaged copy's error rather than an absent one's, foreign data
/// rather than blank.
pub fn newest(
    a: Result<Superblock, FormatError>,
    b: Result<Superblock, FormatError>,
) -> Result<(Superblock, usize), FormatError> {
    match (a, b) {
        (Ok(a), Ok(b)) if b.generation > a.generation => Ok((b, 1)),
        (Ok(a), _) => Ok((a, 0)),
        (Err(_), Ok(b)) => Ok((b, 1)),
        (Err(a), Err(b)) if !a.is_absent() || b == FormatError::Blank => Err(a),
        (Err(_), Err(b)) => Err(b),
    }
}

const _: () = assert!(HEAD_USED <= HEAD_BYTES && VOLUME_USED <= VOLUME_BYTES);
const _: () = assert!(END <= SUPERBLOCK_BYTES);
const _: () = assert!(ANNOUNCEMENT_OFFSET >= SUPERBLOCK_OFFSETS[0] + SUPERBLOCK_BYTES as u64);
const _: () = assert!(SUPERBLOCK_OFFSETS[1] >= ANNOUNCEMENT_OFFSET + SUPERBLOCK_BYTES as u64);
const _: () = assert!(AREA_OFFSET >= SUPERBLOCK_OFFSETS[1] + SUPERBLOCK_BYTES as u64);
const _: () = assert!(SHARDS_MAX <= SHARD_AREAS);
const _: () = assert!(VOLUMES_MAX == VOLUME_RECORDS && NAME_BYTES_MAX == NAME_BYTES);
const _: () = assert!(NAME_BYTES_MAX < 256 && IDENTITY_BYTES_MAX < 256);
