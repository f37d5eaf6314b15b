//! The stable identity of a block device, independent of its current name.
//!
//! Names such as `/dev/sdb` depend on the order in which disks were found, so they may differ at
//! the next start. Stable identifiers are tried in this order, and the first one found is used:
//!
//! | device | identity | from |
//! |---|---|---|
//! | device-mapper (LVM, multipath, LUKS) | `dm:UUID`, else `dm-name:NAME` | sysfs |
//! | md | `md:UUID` | sysfs, udev |
//! | loop | `loop:FILE@OFFSET` | sysfs |
//! | partition | `partuuid:UUID`, after its disk's identity and `/` | sysfs, partition table, udev |
//! | disk | `wwid:WWID`, else `serial:SERIAL` | sysfs, udev |
//! | anything else | `name:PATH` | |
//!
//! `name:` means that no stable identifier is known. udev is used only where the kernel does not
//! provide the value.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Maximum length of an identity in bytes; leaves room for what a partition appends to its disk's.
const TEXT_MAX: usize = 180;
/// Bytes of a GPT header that are checked.
const GPT_HEADER: usize = 92;
/// Valid sizes of a GPT partition entry, in bytes.
const GPT_ENTRY: std::ops::RangeInclusive<u64> = 128..=4096;
/// Number of entries in the MBR itself; further partitions are in a chain that is not followed.
const MBR_PRIMARY: u32 = 4;

/// The identity of an open block device whose current name is `name`.
pub(super) fn of_block(file: &File, name: &str) -> String {
    let Ok(found) = file.metadata() else { return format!("name:{name}") };
    let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
    let node = Node::at(PathBuf::from(format!("/sys/dev/block/{major}:{minor}")));
    node.and_then(|node| node.identity()).unwrap_or_else(|| format!("name:{name}"))
}

/// A block device in sysfs.
struct Node {
    /// Its directory, with links resolved.
    dir: PathBuf,
}

impl Node {
    fn at(dir: PathBuf) -> Option<Self> {
        Some(Self { dir: dir.canonicalize().ok()? })
    }

    fn identity(&self) -> Option<String> {
        if self.dir.join("dm").is_dir() {
            let uuid = self.told("dm/uuid").map(|uuid| format!("dm:{uuid}"));
            return uuid.or_else(|| Some(format!("dm-name:{}", self.told("dm/name")?)));
        }
        if self.dir.join("md").is_dir() {
            let uuid = self.told("md/uuid").or_else(|| self.udev("MD_UUID"));
            return uuid.map(|uuid| format!("md:{}", uuid.to_lowercase()));
        }
        if let Some(file) = self.text("loop/backing_file") {
            let offset = self.text("loop/offset").unwrap_or_else(|| "0".into());
            return Some(format!("loop:{file}@{offset}"));
        }
        match self.number("partition") {
            Some(number) => self.partition(number),
            None => self.disk(),
        }
    }

    /// A partition's own UUID, prefixed by its disk's identity: a copy of a disk has the same
    /// UUIDs.
    fn partition(&self, number: u32) -> Option<String> {
        let disk = Self { dir: self.dir.parent()?.to_owned() };
        let told = self.uevent("PARTUUID").or_else(|| disk.partition_uuid(number));
        let uuid = told.or_else(|| self.udev("ID_PART_ENTRY_UUID"))?.to_lowercase();
        Some(match disk.identity() {
            Some(disk) => format!("{disk}/partuuid:{uuid}"),
            None => format!("partuuid:{uuid}"),
        })
    }

    fn disk(&self) -> Option<String> {
        // NVMe, SCSI and ATA, then udev's version of the same.
        let wwid = self.told("wwid").or_else(|| self.told("device/wwid"));
        let wwid = wwid.or_else(|| self.udev("ID_WWN_WITH_EXTENSION"));
        if let Some(wwid) = wwid {
            return Some(format!("wwid:{wwid}"));
        }
        // virtio, then NVMe before it had a WWID, then MMC, whose `cid` is the full identifier.
        let serial = ["serial", "device/cid", "device/serial"].iter().find_map(|at| self.told(at));
        let serial = serial.or_else(|| self.udev("ID_SERIAL"));
        serial.map(|serial| format!("serial:{serial}"))
    }

    /// A partition's UUID from the partition table on this disk.
    fn partition_uuid(&self, number: u32) -> Option<String> {
        let disk = File::open(Path::new("/dev").join(self.uevent("DEVNAME")?)).ok()?;
        let sector = self.number("queue/logical_block_size").unwrap_or(512);
        partition_uuid(&disk, u64::from(sector), number)
    }

    /// The text of a sysfs attribute.
    fn text(&self, at: &str) -> Option<String> {
        let text = fs::read(self.dir.join(at)).ok()?;
        let text = String::from_utf8_lossy(&text).trim_matches(['\0', '\n', ' ']).to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// The text of a sysfs attribute, unless it is a placeholder.
    fn told(&self, at: &str) -> Option<String> {
        self.text(at).and_then(|text| lasting(&text))
    }

    fn number(&self, at: &str) -> Option<u32> {
        self.text(at)?.parse().ok()
    }

    fn uevent(&self, key: &str) -> Option<String> {
        value_of(&self.text("uevent")?, "", key)
    }

    /// A property of the device in udev's database.
    fn udev(&self, key: &str) -> Option<String> {
        let noted = fs::read(format!("/run/udev/data/b{}", self.text("dev")?)).ok()?;
        value_of(&String::from_utf8_lossy(&noted), "E:", key).and_then(|text| lasting(&text))
    }
}

/// The value of `key` in lines of the form `prefix KEY=VALUE`.
fn value_of(text: &str, prefix: &str, key: &str) -> Option<String> {
    let start = format!("{prefix}{key}=");
    let value = text.lines().find_map(|line| line.strip_prefix(&start))?;
    (!value.is_empty()).then(|| value.to_owned())
}

/// A normalized identifier, or `None` for a placeholder: blank, or zeros. Runs of blanks, with
/// which some disks pad their fields, become one.
fn lasting(text: &str) -> Option<String> {
    let text = text.split_whitespace().collect::<Vec<_>>().join("_");
    let number = text.rsplit('.').next().unwrap_or(&text);
    let told = number.chars().any(|c| c.is_alphanumeric() && c != '0');
    told.then(|| text.chars().take(TEXT_MAX).collect())
}

/// The UUID of a partition, in the kernel's notation: for a GPT its GUID, for an MBR the disk's
/// signature and the partition's number.
fn partition_uuid(disk: &File, sector: u64, number: u32) -> Option<String> {
    let read = |offset: u64, bytes: &mut [u8]| disk.read_exact_at(bytes, offset).ok();
    let mut header = [0; GPT_HEADER];
    read(sector, &mut header)?;
    if header.starts_with(b"EFI PART") {
        let at = |at: usize, len: usize| {
            header[at..at + len].iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte))
        };
        let (table, count, size) = (at(72, 8), at(80, 4), at(84, 4));
        let index = u64::from(number.checked_sub(1)?);
        if index >= count || !GPT_ENTRY.contains(&size) {
            return None;
        }
        let mut guid = [0; 16];
        read(table.checked_mul(sector)?.checked_add(index * size + 16)?, &mut guid)?;
        return guid.iter().any(|&byte| byte != 0).then(|| guid_text(&guid));
    }
    let mut mbr = [0; 512];
    read(0, &mut mbr)?;
    let signature = u32::from_le_bytes([mbr[440], mbr[441], mbr[442], mbr[443]]);
    let is_table = mbr[510..] == [0x55, 0xaa] && signature != 0 && number <= MBR_PRIMARY;
    is_table.then(|| format!("{signature:08x}-{number:02x}"))
}

/// A GUID as text: its first three fields are little-endian.
fn guid_text(guid: &[u8; 16]) -> String {
    const ORDER: [usize; 16] = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
    let mut text = String::new();
    for (i, &at) in ORDER.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{:02x}", guid[at]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempPath;

    fn disk(bytes: &[u8]) -> (TempPath, File) {
        let path = TempPath::new();
        fs::write(&path.0, bytes).unwrap();
        let file = File::open(&path.0).unwrap();
        (path, file)
    }

    #[test]
    fn partitions_are_known_by_their_table() {
        let mut mbr = vec![0; 4096];
        mbr[440..444].copy_from_slice(&0x1234_abcd_u32.to_le_bytes());
        let (_path, file) = disk(&mbr);
        assert_eq!(partition_uuid(&file, 512, 1), None, "not a table");
        mbr[510..512].copy_from_slice(&[0x55, 0xaa]);
        let (_path, file) = disk(&mbr);
        assert_eq!(partition_uuid(&file, 512, 2).as_deref(), Some("1234abcd-02"));
        assert_eq!(partition_uuid(&file, 512, 5), None, "a logical one");
        for sector in [512, 4096] {
            let mut gpt = vec![0; 16 * sector];
            gpt[510..512].copy_from_slice(&[0x55, 0xaa]);
            gpt[sector..sector + 8].copy_from_slice(b"EFI PART");
            for (at, value) in [(72, 2_u64), (80, 4), (84, 128)] {
                let len = if at == 72 { 8 } else { 4 };
                gpt[sector + at..sector + at + len].copy_from_slice(&value.to_le_bytes()[..len]);
            }
            let guid: Vec<u8> = (0..16).collect();
            gpt[2 * sector + 128 + 16..2 * sector + 128 + 32].copy_from_slice(&guid);
            let (_path, file) = disk(&gpt);
            let found = partition_uuid(&file, sector as u64, 2);
            assert_eq!(found.as_deref(), Some("03020100-0504-0706-0809-0a0b0c0d0e0f"));
            assert_eq!(partition_uuid(&file, sector as u64, 1), None, "an empty entry");
            assert_eq!(partition_uuid(&file, sector as u64, 5), None, "behind the table");
        }
        let (_path, file) = disk(&[0; 100]);
        assert_eq!(partition_uuid(&file, 512, 1), None, "too short");
    }

    #[test]
    fn what_does_not_tell_disks_apart_is_no_name() {
        for nothing in ["", "  ", "0000", "naa.0000000000000000", "eui.00000000"] {
            assert_eq!(lasting(nothing), None, "{nothing:?}");
        }
        let ata = "t10.ATA     Disk 5000                 S123  ";
        assert_eq!(lasting(ata).as_deref(), Some("t10.ATA_Disk_5000_S123"));
        assert_eq!(lasting("naa.600a0b80").as_deref(), Some("naa.600a0b80"));
        assert!(lasting(&"x".repeat(1000)).is_some_and(|text| text.len() == TEXT_MAX));
    }

    #[test]
    fn what_udev_noted_is_found() {
        let noted = "S:disk/by-id/x\nE:ID_SERIAL_SHORT=7\nE:ID_SERIAL=Disk_7\nE:ID_WWN=\n";
        assert_eq!(value_of(noted, "E:", "ID_SERIAL").as_deref(), Some("Disk_7"));
        assert_eq!(value_of(noted, "E:", "ID_WWN"), None);
        assert_eq!(value_of("DEVNAME=sda\nPARTN=1", "", "PARTN").as_deref(), Some("1"));
    }
}
