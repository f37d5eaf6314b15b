//! Samples of the primaries that stay valid while they are served, so that a start after a crash
//! can compare too: a file in the state directory, replaced whole.
//!
//! Each sample has its own checksum, or none while the server itself may change its place. So every
//! recorded checksum is correct, and any difference is a foreign change.
//!
//! The file names the generation of the superblock for which it was written. A file that can be
//! neither replaced nor removed is made void by a newer superblock (`store.rs`).
//!
//! ```text
//! forebay samples 2
//! pool UUID
//! epoch START
//! generation GENERATION     not in version 1
//! volume ID
//! OFFSET BYTES CRC          the CRC is `-` when it is not on record
//! end CRC                   of all lines before
//! ```

use std::io::{self, ErrorKind};
use std::time::Duration;

use forebay_block::{ByteRange, IoBuf, IoResult, VolumeId};
use forebay_codec::crc32c;
use forebay_device::BlockDevice;
use forebay_format::Superblock;
use forebay_runtime::{Blocking, StateDir, file_of};

const HEADING: &str = "forebay samples 2";
/// That of the version before, which names no generation.
const HEADING_BEFORE: &str = "forebay samples 1";
/// The kind of file.
pub const KIND: &str = "samples";
/// Longest file that is read: 64 volumes with 128 samples of 50 bytes a line.
const BYTES_MAX: u64 = 1 << 20;

/// A place of a primary, and the checksum of its content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Range of the place.
    pub range: ByteRange,
    /// CRC32C of the content; `None` while the server may be changing it.
    pub crc: Option<u32>,
}

/// The samples of all volumes of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    /// UUID of the pool.
    pub uuid: [u8; 16],
    /// The start that keeps the samples; those of an earlier start are void.
    pub epoch: u32,
    /// The generation of the superblock for which they are valid; those of an earlier one are void.
    pub generation: u64,
    /// The samples of each volume, in ascending order of their ranges.
    pub volumes: Vec<(VolumeId, Vec<Sample>)>,
}

/// The result of comparing a primary with its samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Compared {
    /// Offset of the first sample that differs.
    pub changed: Option<u64>,
    /// Whether all samples consist of one repeated byte.
    pub blank: bool,
}

impl Table {
    /// The samples of a pool, if the file exists and is valid for this superblock of it.
    ///
    /// # Errors
    /// If the file cannot be read, is damaged, or others may have written it.
    pub fn load(state: &StateDir, pool: &Superblock) -> io::Result<Option<Self>> {
        Ok(Self::read(state, pool.uuid)?.filter(|table| table.is_valid_for(pool)))
    }

    /// The samples of a pool, valid or not.
    ///
    /// # Errors
    /// As [`Table::load`].
    pub fn read(state: &StateDir, uuid: [u8; 16]) -> io::Result<Option<Self>> {
        let Some(text) = state.read(&file_name(uuid), BYTES_MAX)? else { return Ok(None) };
        let damaged = || io::Error::new(ErrorKind::InvalidData, "the file is damaged");
        Self::parse(&text).filter(|table| table.uuid == uuid).ok_or_else(damaged).map(Some)
    }

    /// Whether they were kept up to this superblock, or later.
    pub fn is_valid_for(&self, pool: &Superblock) -> bool {
        self.epoch >= pool.epoch && self.generation >= pool.generation
    }

    /// Replaces the file; durable when this returns.
    ///
    /// # Errors
    /// If it could not be made durable: the next start may then find the old or the new table.
    pub fn store(&self, state: &StateDir) -> io::Result<()> {
        state.replace(&file_name(self.uuid), &self.print())
    }

    /// Removes the file when it cannot be replaced; durable when this returns.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(&self, state: &StateDir) -> io::Result<()> {
        state.remove(&file_name(self.uuid))
    }

    /// The samples of a volume.
    pub fn of(&self, id: VolumeId) -> &[Sample] {
        self.volumes.iter().find(|(one, _)| *one == id).map_or(&[], |(_, samples)| samples)
    }

    fn print(&self) -> String {
        let uuid = u128::from_be_bytes(self.uuid);
        let mut text = format!("{HEADING}\npool {uuid:032x}\nepoch {}\n", self.epoch);
        text += &format!("generation {}\n", self.generation);
        for (id, samples) in &self.volumes {
            text += &format!("volume {}\n", id.0);
            for Sample { range, crc } in samples {
                let crc = crc.map_or_else(|| "-".to_owned(), |crc| format!("{crc:08x}"));
                text += &format!("{} {} {crc}\n", range.offset, range.len);
            }
        }
        let sum = crc32c(text.as_bytes());
        text + &format!("end {sum:08x}\n")
    }

    fn parse(text: &str) -> Option<Self> {
        let end = text.rfind("end ")?;
        let sum = text[end..].strip_prefix("end ")?.strip_suffix('\n')?;
        if u32::from_str_radix(sum, 16).ok()? != crc32c(&text.as_bytes()[..end]) {
            return None;
        }
        let mut lines = text[..end].lines();
        let heading = lines.next()?;
        if heading != HEADING && heading != HEADING_BEFORE {
            return None;
        }
        let uuid = u128::from_str_radix(lines.next()?.strip_prefix("pool ")?, 16).ok()?;
        let epoch = lines.next()?.strip_prefix("epoch ")?.parse().ok()?;
        let generation = match heading == HEADING {
            true => lines.next()?.strip_prefix("generation ")?.parse().ok()?,
            // Valid for every superblock of its start.
            false => u64::MAX,
        };
        let mut volumes: Vec<(VolumeId, Vec<Sample>)> = Vec::new();
        for line in lines {
            if let Some(id) = line.strip_prefix("volume ") {
                volumes.push((VolumeId(id.parse().ok()?), Vec::new()));
                continue;
            }
            let mut words = line.split(' ');
            let range =
                ByteRange::checked(words.next()?.parse().ok()?, words.next()?.parse().ok()?)?;
            let crc = match words.next()? {
                "-" => None,
                crc => Some(u32::from_str_radix(crc, 16).ok()?),
            };
            volumes.last_mut()?.1.push(Sample { range, crc });
        }
        Some(Self { uuid: uuid.to_be_bytes(), epoch, generation, volumes })
    }
}

/// The name of a pool's file in the state directory.
pub fn file_name(uuid: [u8; 16]) -> String {
    file_of(uuid, KIND)
}

/// Compares a primary with its recorded samples; `None` if there are none. A place that cannot be
/// read tells nothing.
///
/// # Errors
/// If none of the places can be read, or it has not answered for as long as `patience`.
pub fn compare(
    primary: &dyn BlockDevice,
    samples: &[Sample],
    patience: Duration,
) -> IoResult<Option<Compared>> {
    let size = primary.info().size;
    let known: Vec<&Sample> =
        samples.iter().filter(|one| one.crc.is_some() && one.range.end() <= size).collect();
    if known.is_empty() {
        return Ok(None);
    }
    let ranges: Vec<ByteRange> = known.iter().map(|one| one.range).collect();
    let found = open(primary, patience)?.read_many(&ranges)?;
    let pairs = known.iter().zip(&found).filter_map(|(one, now)| Some((one, now.as_ref()?)));
    let differs = pairs.clone().find(|(one, now)| one.crc != Some(crc32c(now)));
    let changed = differs.map(|(one, _)| one.range.offset);
    Ok(Some(Compared { changed, blank: is_blank(pairs.map(|(_, now)| now)) }))
}

/// Whether all of these buffers, none of which is empty, consist of one repeated byte.
pub fn is_blank<'a>(found: impl Iterator<Item = &'a IoBuf>) -> bool {
    let mut bytes = found.flat_map(|buf| buf.iter());
    let first = bytes.next();
    bytes.all(|byte| Some(byte) == first)
}

/// The samples of a primary. Checksums in `known` are taken as they are, since a record is correct
/// until it is voided; the other places are read, after a flush. While stragglers may still change
/// these, they are left off the record, as is a place that cannot be read.
///
/// # Errors
/// If it cannot be flushed, if none of these places can be read, or if it has not answered for as
/// long as `patience`.
pub fn take(
    primary: &dyn BlockDevice,
    known: &[Sample],
    patience: Duration,
) -> IoResult<Vec<Sample>> {
    let mut samples = on_record(primary, known);
    let mut unread: Vec<_> = samples.iter_mut().filter(|sample| sample.crc.is_none()).collect();
    if unread.is_empty() || primary.has_stragglers() {
        return Ok(samples);
    }
    flush(primary, patience)?;
    let ranges: Vec<ByteRange> = unread.iter().map(|sample| sample.range).collect();
    for (sample, found) in unread.iter_mut().zip(&open(primary, patience)?.read_many(&ranges)?) {
        sample.crc = found.as_ref().map(|found| crc32c(found));
    }
    Ok(samples)
}

/// The places of a primary, with the checksums in `known`; nothing is read.
pub fn on_record(primary: &dyn BlockDevice, known: &[Sample]) -> Vec<Sample> {
    let on_record = |range: ByteRange| {
        let at = known.binary_search_by_key(&range.offset, |one| one.range.offset).ok()?;
        known[at].crc.filter(|_| known[at].range == range)
    };
    let mut samples = unknown(primary);
    samples.iter_mut().for_each(|sample| sample.crc = on_record(sample.range));
    samples
}

/// Makes the content of a primary durable.
///
/// # Errors
/// If it cannot be flushed, or has not answered for as long as `patience`.
pub fn flush(primary: &dyn BlockDevice, patience: Duration) -> IoResult<()> {
    if primary.info().read_only {
        return Ok(());
    }
    open(primary, patience)?.flush()
}

/// The places of a primary, without checksums.
pub fn unknown(primary: &dyn BlockDevice) -> Vec<Sample> {
    let places = places(primary.info().size);
    places.into_iter().map(|range| Sample { range, crc: None }).collect()
}

fn open(primary: &dyn BlockDevice, patience: Duration) -> IoResult<Blocking> {
    Blocking::open_within(primary, patience).map_err(|error| {
        forebay_block::IoError::with_source(forebay_block::ErrorKind::DeviceGone, error)
    })
}

/// The ranges of the samples of a primary of `size` bytes: where file systems, partition tables,
/// volume managers and databases record changes, and evenly spaced ones.
pub fn places(size: u64) -> Vec<ByteRange> {
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    // First byte, end, and length of each sample.
    let mut wanted = vec![
        // Partition tables, superblocks of ext4, XFS, swap; LVM's label and its metadata; first
        // pages of databases.
        (0, 64 * KIB, 4 * KIB),
        // Btrfs's superblock, then the rest of the area in which ZFS rotates its uberblocks.
        (64 * KIB, 68 * KIB, 4 * KIB),
        (68 * KIB, 128 * KIB, 60 * KIB),
        (128 * KIB, 256 * KIB, 32 * KIB),
        // The same for a first partition that begins here.
        (MIB, MIB + 4 * KIB, 4 * KIB),
        (MIB + 4 * KIB, MIB + 64 * KIB, 60 * KIB),
        (MIB + 64 * KIB, MIB + 68 * KIB, 4 * KIB),
    ];
    // The second partition table, superblocks of md, ZFS's last two labels.
    if let Some(tail) = (size / (4 * KIB) * (4 * KIB)).checked_sub(512 * KIB) {
        wanted.push((tail, tail + 448 * KIB, 64 * KIB));
        wanted.push((tail + 448 * KIB, size, 4 * KIB));
    }
    let mut all = Vec::new();
    for (from, to, step) in wanted {
        let mut at = from;
        while at < to.min(size) {
            all.push(ByteRange::new(at, step.min(size - at)));
            at += step;
        }
    }
    const EVENLY: u64 = 32;
    let block = size / EVENLY / (4 * KIB) * (4 * KIB);
    all.extend((0..EVENLY).map(|i| ByteRange::new(i * block, (4 * KIB).min(size))));
    all.sort_by_key(|range| range.offset);
    let mut end = 0;
    all.retain(|range| {
        let apart = range.offset >= end && !range.is_empty();
        end = if apart { range.end() } else { end };
        apart
    });
    all
}

#[cfg(test)]
pub mod tests {
    use std::fs;
    use std::rc::Rc;

    use forebay_block::{Completion, DeviceInfo, Instant, Io, IoOp, IoQueue};
    use forebay_device::{MemoryDevice, Ring};

    use super::*;

    /// A device that fails to read the ranges that begin in one of these.
    pub struct Sore(pub MemoryDevice, pub Vec<ByteRange>);

    struct SoreQueue(Box<dyn IoQueue>, Vec<ByteRange>, Vec<Completion>);

    impl BlockDevice for Sore {
        fn info(&self) -> &DeviceInfo {
            self.0.info()
        }

        fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
            Ok(Box::new(SoreQueue(self.0.open_queue(ring)?, self.1.clone(), Vec::new())))
        }
    }

    impl IoQueue for SoreQueue {
        fn info(&self) -> &DeviceInfo {
            self.0.info()
        }

        fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
            let is_bad =
                self.1.iter().any(|bad| (bad.offset..bad.end()).contains(&io.range.offset));
            if io.op != IoOp::Read || !is_bad {
                return self.0.submit(now, io);
            }
            self.2.push(io.complete(Err(forebay_block::ErrorKind::Media.into())));
            Ok(())
        }

        fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
            done.append(&mut self.2);
            self.0.poll(now, done);
        }
    }

    /// Regression: one bad sector took a whole primary out of service, silently.
    #[test]
    fn a_place_that_cannot_be_read_tells_nothing() {
        let device = MemoryDevice::new(1 << 20);
        let patience = Blocking::PATIENCE;
        let samples = take(&device, &[], patience).expect("memory can be read");
        let mut queue = Blocking::open(&device).expect("memory can be opened");
        queue.write(8192, IoBuf::copy_of(&[1; 512])).expect("it can be written");
        let compared =
            |bad: Vec<ByteRange>| compare(&Sore(device.clone(), bad), &samples, patience);
        let changed = compared(vec![samples[1].range]).expect("others are read");
        assert_eq!(changed, Some(Compared { changed: Some(8192), blank: false }));
        let changed = compared(vec![samples[2].range]).expect("others are read");
        assert_eq!(changed, Some(Compared { changed: None, blank: true }));
        let none = compared(vec![ByteRange::new(0, 1 << 20)]).expect_err("none is read");
        assert_eq!(none.kind(), forebay_block::ErrorKind::Media);
        let taken = take(&Sore(device.clone(), vec![samples[2].range]), &[], patience);
        let taken = taken.expect("others are read");
        let unread = taken.iter().filter(|sample| sample.crc.is_none());
        assert_eq!(unread.map(|sample| sample.range).collect::<Vec<_>>(), [samples[2].range]);
    }

    /// A superblock as far as samples look at it.
    pub fn superblock(uuid: [u8; 16], epoch: u32, generation: u64) -> Superblock {
        Superblock {
            pool: 1,
            uuid,
            generation,
            epoch,
            device_size: 1 << 20,
            segment_size: 1 << 16,
            log_segments: None,
            unit_entries: false,
            shards: Vec::new(),
            volumes: Vec::new(),
            created_unix: 0,
            clean: false,
        }
    }

    #[test]
    fn places_are_apart_and_on_the_device() {
        for size in [512, 4096, 4608, 60 << 10, 1 << 20, (64 << 20) + 512, 1 << 40] {
            let places = places(size);
            assert!(places.is_sorted_by(|a, b| a.end() <= b.offset), "{size}");
            assert_eq!(places[0].offset, 0, "{size}");
            assert!(places.iter().all(|one| !one.is_empty() && one.end() <= size), "{size}");
            assert!(places.len() <= 100, "{size}: {}", places.len());
            assert!(size < 1 << 20 || places.last().map(ByteRange::end) == Some(size), "{size}");
        }
    }

    #[test]
    fn what_is_stored_is_loaded_and_damage_is_seen() {
        let dir = std::env::temp_dir().join(format!("forebay-samples-{}", std::process::id()));
        let state = StateDir::open(&dir).expect("a directory can be made");
        let device = MemoryDevice::new(1 << 20);
        let mut samples = take(&device, &[], Blocking::PATIENCE).expect("memory can be read");
        samples[1].crc = None;
        let uuid = *b"0123456789abcdef";
        let volumes = vec![(VolumeId(3), samples), (VolumeId(5), unknown(&device))];
        let table = Table { uuid, epoch: 7, generation: 9, volumes };
        let load =
            |epoch: u32, generation: u64| Table::load(&state, &superblock(uuid, epoch, generation));
        assert_eq!(load(7, 9).expect("there is none"), None);
        for _ in 0..2 {
            table.store(&state).expect("it can be stored");
        }
        assert_eq!(load(7, 9).expect("it is there"), Some(table.clone()));
        assert_eq!(load(6, 8).expect("it is there"), Some(table.clone()), "of a later one");
        assert_eq!(load(8, 9).expect("it is there"), None, "of an earlier start");
        assert_eq!(load(7, 10).expect("it is there"), None, "of an earlier superblock");
        let path = dir.join(file_name(uuid));
        let text = fs::read_to_string(&path).expect("it is there");
        for cut in 0..text.len() {
            fs::write(&path, &text[..cut]).expect("it can be cut");
            assert!(load(7, 9).is_err(), "cut at {cut}");
        }
        // As the version before wrote it.
        let body = text[..text.rfind("end ").expect("it is there")]
            .replace(HEADING, HEADING_BEFORE)
            .replace("generation 9\n", "");
        fs::write(&path, format!("{body}end {:08x}\n", crc32c(body.as_bytes()))).expect("ours");
        let before = load(7, 1000).expect("it is known").expect("it is valid");
        assert_eq!(before.volumes, table.volumes);
        assert_eq!(load(8, 9).expect("it is known"), None);
        fs::remove_file(&path).expect("it is ours");
        fs::write(dir.join("other"), &text).expect("it can be written");
        std::os::unix::fs::symlink(dir.join("other"), &path).expect("it can be made");
        assert!(load(7, 9).is_err(), "a link is not followed");
        table.remove(&state).expect("it can be removed");
        assert_eq!(load(7, 9).expect("there is none"), None);
        fs::remove_dir_all(&dir).expect("it is ours");
    }

    #[test]
    fn only_places_that_are_not_on_record_are_read() {
        let device = MemoryDevice::new(1 << 20);
        let before = take(&device, &[], Blocking::PATIENCE).expect("memory can be read");
        let mut known = before.clone();
        known[1].crc = None;
        known[2].crc = Some(7);
        known[3].range.len -= 512;
        let mut queue = Blocking::open(&device).expect("memory can be opened");
        queue.write(4096, forebay_block::IoBuf::copy_of(&[1; 512])).expect("it can be written");
        let found = take(&device, &known, Blocking::PATIENCE).expect("memory can be read");
        assert_ne!(found[1].crc, before[1].crc, "it was read");
        assert_eq!(found[2].crc, Some(7), "it was not");
        assert_eq!(found[3..], before[3..], "a record of another range is none");
        assert_eq!(take(&device, &found, Blocking::PATIENCE).expect("memory can be read"), found);
    }

    #[test]
    fn the_first_sample_that_differs_is_told() {
        let device = MemoryDevice::new(1 << 20);
        let samples = take(&device, &[], Blocking::PATIENCE).expect("memory can be read");
        let compared = |samples: &[Sample]| {
            compare(&device, samples, Blocking::PATIENCE).expect("it can be read")
        };
        assert_eq!(compared(&samples), Some(Compared { changed: None, blank: true }));
        assert_eq!(compared(&unknown(&device)), None);
        let mut queue = Blocking::open(&device).expect("memory can be opened");
        queue.write(8192, forebay_block::IoBuf::copy_of(&[1; 512])).expect("it can be written");
        assert_eq!(compared(&samples), Some(Compared { changed: Some(8192), blank: false }));
        let mut void = samples.clone();
        void[2].crc = None;
        assert_eq!(compared(&void).and_then(|found| found.changed), None, "ours to change");
    }
}
