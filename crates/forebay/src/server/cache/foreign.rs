//! Recognizes the content of a device that is not a Forebay cache by its magic numbers, so that
//! `--reset-cache` can name the content that it would destroy.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use forebay_block::ByteRange;
use forebay_format::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use forebay_runtime::Blocking;

/// Bytes examined at each end of a device.
pub const EXAMINED: u64 = 128 << 10;

/// The content of a cache in order.
pub const CACHE: &str = "a Forebay cache";

/// A magic number: the name of the content, the offset, and the bytes.
type Mark = (&'static str, usize, &'static [u8]);

/// Magic numbers near the start of a device; the first match decides.
const MARKS: [Mark; 20] = [
    ("a Forebay cache whose superblocks are damaged", 0, b"ForebayS"),
    ("a Forebay cache whose superblocks are damaged", 65_536, b"ForebayS"),
    ("an XFS file system", 0, b"XFSB"),
    ("a btrfs file system", 65_536 + 64, b"_BHRfS_M"),
    ("an ext2, ext3 or ext4 file system", 1024 + 56, &[0x53, 0xef]),
    ("an F2FS file system", 1024, &[0x10, 0x20, 0xf5, 0xf2]),
    ("an NTFS file system", 3, b"NTFS    "),
    ("a FAT file system", 82, b"FAT32   "),
    ("a FAT file system", 54, b"FAT16   "),
    ("an LVM physical volume", 512, b"LABELONE"),
    ("an LVM physical volume", 0, b"LABELONE"),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("a bcache device", 4096 + 24, &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca]),
    ("a member of an md array", 4096, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("a member of an md array", 0, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("a partition table (GPT)", 512, b"EFI PART"),
    ("a partition table (GPT)", 4096, b"EFI PART"),
    ("an ISO 9660 file system", 32_769, b"CD001"),
    ("a partition table (MBR)", 510, &[0x55, 0xaa]),
];

/// The content of the device; `None` if all bytes examined are zero.
///
/// # Errors
/// If it cannot be read.
pub fn content(queue: &mut Blocking, size: u64) -> anyhow::Result<Option<&'static str>> {
    if size < EXAMINED {
        return Ok(None);
    }
    let head = queue.read(ByteRange::new(0, EXAMINED))?;
    let from = size.saturating_sub(EXAMINED) / 4096 * 4096;
    let tail = queue.read(ByteRange::new(from, (size - from) / 4096 * 4096))?;
    Ok(of_bytes(&head, &tail))
}

/// The content of the device or file at `path`; `None` if all bytes examined are zero. A Forebay
/// cache in order is one too.
///
/// # Errors
/// If it cannot be read.
pub fn at(path: &Path) -> io::Result<Option<&'static str>> {
    let mut file = File::open(path)?;
    let size = file.seek(SeekFrom::End(0))?;
    let piece = |from: u64, most: u64| {
        let mut bytes = vec![0; usize::try_from(most.min(size - from)).unwrap_or(0)];
        file.read_exact_at(&mut bytes, from).map(|()| bytes)
    };
    let head = piece(0, EXAMINED)?;
    let is_cache = SUPERBLOCK_OFFSETS.iter().any(|&at| {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let found = head.get(at..).and_then(|rest| rest.get(..SUPERBLOCK_BYTES));
        found.is_some_and(|bytes| Superblock::decode(bytes).is_ok())
    });
    if is_cache {
        return Ok(Some(CACHE));
    }
    let from = size.saturating_sub(EXAMINED) / 4096 * 4096;
    Ok(of_bytes(&head, &piece(from, EXAMINED)?))
}

fn of_bytes(head: &[u8], tail: &[u8]) -> Option<&'static str> {
    let has = |at: usize, mark: &[u8]| head.get(at..at + mark.len()) == Some(mark);
    if let Some((what, ..)) = MARKS.iter().find(|(_, at, mark)| has(*at, mark)) {
        return Some(what);
    }
    // Older md arrays have their magic number near the end of the device.
    let md = [0xfc, 0x4e, 0x2b, 0xa9];
    if tail.chunks_exact(4096).any(|page| page.starts_with(&md)) {
        return Some("a member of an md array");
    }
    let is_blank = head.iter().all(|&byte| byte == 0);
    (!is_blank).then_some("something that is not known here, perhaps a database's own volume")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_known_and_a_blank_device_has_none() {
        let (blank, end) = (vec![0; EXAMINED as usize], vec![0; EXAMINED as usize]);
        assert_eq!(of_bytes(&blank, &end), None);
        for (what, at, mark) in MARKS {
            let mut head = blank.clone();
            head[at..at + mark.len()].copy_from_slice(mark);
            assert_eq!(of_bytes(&head, &end), Some(what));
        }
        let mut md = end.clone();
        md[EXAMINED as usize - 8192..][..4].copy_from_slice(&[0xfc, 0x4e, 0x2b, 0xa9]);
        assert_eq!(of_bytes(&blank, &md), Some("a member of an md array"));
        let mut other = blank;
        other[70_000] = 1;
        assert!(of_bytes(&other, &end).is_some_and(|what| what.contains("not known")));
    }
}
