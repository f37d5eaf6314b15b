//! A digest that tells whether a primary is unchanged: the time of its last change, if the system
//! keeps one, and samples of its content. Samples detect a change only at their own places; for
//! regular files the time detects every change.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use forebay_block::{BLOCK_SIZE, ByteRange, ErrorKind, IoError, IoResult};
use forebay_codec::crc32c;
use forebay_device::BlockDevice;
use forebay_runtime::Blocking;

use crate::server::primaries::samples::is_blank;

/// Number of blocks sampled: few enough that a disk answers at once.
const SAMPLES: u64 = 32;

/// The fingerprint of a primary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fingerprint {
    /// A digest of the content in the lower half, and of the time of the last change in the upper.
    /// `None` if not all samples could be read.
    pub digest: Option<u64>,
    /// Whether all samples are alike, so that they cannot identify this primary.
    pub blank: bool,
}

/// The fingerprint of the first `size` bytes of a primary.
///
/// # Errors
/// If no sample can be read, or it has not answered for as long as `patience`.
pub fn of(primary: &dyn BlockDevice, size: u64, patience: Duration) -> IoResult<Fingerprint> {
    let mut queue = Blocking::open_within(primary, patience)
        .map_err(|error| IoError::with_source(ErrorKind::DeviceGone, error))?;
    let samples = queue.read_many(&places(size.min(primary.info().size)))?;
    let content = samples.iter().try_fold(0, |crc, sample| {
        let mut both = crc32c(sample.as_ref()?).to_le_bytes().to_vec();
        both.extend(u32::to_le_bytes(crc));
        Some(crc32c(&both))
    });
    let changed = u64::from(crc32c(&changed(&primary.info().name)));
    let digest = content.map(|content| changed << 32 | u64::from(content));
    Ok(Fingerprint { digest, blank: is_blank(samples.iter().flatten()) })
}

/// The ranges of the samples: the first blocks, the last one, and evenly spaced ones.
fn places(size: u64) -> Vec<ByteRange> {
    let block = BLOCK_SIZE as u64;
    let blocks = size.div_ceil(block);
    let count = blocks.min(SAMPLES);
    let mut places: Vec<ByteRange> = (0..count)
        .map(|at| if count > 1 { at * (blocks - 1) / (count - 1) } else { 0 })
        .map(|at| ByteRange::new(at * block, block.min(size - at * block)))
        .collect();
    places.dedup();
    places
}

/// The time of a regular file's last change, empty for other files: the time of a device's node
/// says nothing about its content.
fn changed(name: &str) -> Vec<u8> {
    let found = std::fs::metadata(Path::new(name)).ok().filter(std::fs::Metadata::is_file);
    found.map_or(Vec::new(), |found| {
        [found.mtime().to_le_bytes(), found.mtime_nsec().to_le_bytes()].concat()
    })
}

#[cfg(test)]
mod tests {
    use forebay_block::IoBuf;
    use forebay_device::MemoryDevice;

    use super::*;
    use crate::server::primaries::samples::tests::Sore;

    #[test]
    fn samples_are_on_the_device() {
        for size in [512, 4096, 4608, 100 * 4096, (1 << 30) + 512] {
            let places = places(size);
            assert!(places.iter().all(|place| place.end() <= size && !place.is_empty()), "{size}");
            assert_eq!(places[0].offset, 0);
            assert_eq!(places.last().map(ByteRange::end), Some(size));
            assert_eq!(places.len() as u64, size.div_ceil(4096).min(SAMPLES));
        }
    }

    #[test]
    fn a_change_in_a_sample_is_seen() {
        let device = MemoryDevice::new(1 << 20);
        let now = |size| of(&device, size, Blocking::PATIENCE).expect("memory can be read");
        let (before, half) = (now(1 << 20), now(1 << 19));
        assert_eq!(now(1 << 20), before);
        assert!(before.blank && half.blank);
        let mut queue = Blocking::open(&device).expect("memory can be opened");
        queue.write((1 << 20) - 512, IoBuf::copy_of(&[1; 512])).expect("memory can be written");
        assert!(now(1 << 20) != before && !now(1 << 20).blank);
        assert_eq!(now(1 << 19), half, "as large as it was, it is as it was");
    }

    #[test]
    fn a_sample_that_cannot_be_read_leaves_no_digest() {
        let device = MemoryDevice::new(1 << 20);
        let now =
            |bad: ByteRange| of(&Sore(device.clone(), vec![bad]), 1 << 20, Blocking::PATIENCE);
        let found = now(ByteRange::new(0, 512)).expect("others are read");
        assert_eq!(found, Fingerprint { digest: None, blank: true });
        let none = now(ByteRange::new(0, 1 << 20)).expect_err("none is read");
        assert_eq!(none.kind(), ErrorKind::Media);
    }

    #[test]
    fn a_change_of_a_file_is_seen_anywhere() {
        let path = std::env::temp_dir().join(format!("forebay-print-{}", std::process::id()));
        std::fs::write(&path, vec![0; 1 << 20]).expect("a file can be written");
        let name = path.to_string_lossy().into_owned();
        let before = changed(&name);
        assert_eq!(before.len(), 16);
        let file = std::fs::File::options().write(true).open(&path).expect("it is there");
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(1);
        file.set_modified(later).expect("its time can be set");
        assert_ne!(changed(&name), before);
        std::fs::remove_file(&path).expect("it can be removed");
        assert_eq!(changed("/dev/null"), Vec::<u8>::new());
    }
}
