//! The list of mounts, as the kernel gives it, and the devices that their file systems are on.
//!
//! A mount names the device of its file system by its numbers. Btrfs, whose file systems may have
//! several devices, gives numbers that are no device's: then the mount's source is one of them, and
//! `/sys/fs/btrfs` lists the others.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The mounts of this process.
const LIST: &str = "proc/self/mountinfo";
/// The types of file systems that the kernel knows.
const KINDS: &str = "proc/filesystems";
/// A directory for each mounted file system, with links to its devices.
const BTRFS: &str = "sys/fs/btrfs";
/// The start of the numbers that are no device's.
const NO_DEVICE: &str = "0:";

/// One mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountEntry {
    /// Major and minor number of the device, as `7:0`; major number 0 if the file system's numbers
    /// are no device's.
    pub device: String,
    /// The mount point.
    pub place: PathBuf,
    /// The file system's type.
    pub kind: String,
    /// What is mounted: the path of a device, if the type takes one.
    pub source: PathBuf,
}

/// Every mount that this process sees, in the order in which they were made.
pub fn all() -> io::Result<Vec<MountEntry>> {
    below(Path::new("/"))
}

fn below(root: &Path) -> io::Result<Vec<MountEntry>> {
    Ok(parse(&fs::read(root.join(LIST))?))
}

/// Where file systems on one of these devices are mounted, on a host whose files are below `root`.
/// Each device is its numbers, as `7:0`.
pub fn of_devices(root: &Path, devices: &[String]) -> io::Result<Vec<PathBuf>> {
    let of_one_more = in_one_btrfs_with(root, devices);
    let kinds = fs::read_to_string(root.join(KINDS)).unwrap_or_default();
    let is_on = |entry: &MountEntry| {
        let by_source = || {
            let found = takes_device(&kinds, &entry.kind).then(|| numbers_of(root, &entry.source));
            found.flatten().is_some_and(|numbers| of_one_more.contains(&numbers))
        };
        devices.contains(&entry.device) || (entry.device.starts_with(NO_DEVICE) && by_source())
    };
    let on = below(root)?.into_iter().filter(is_on);
    Ok(on.map(|entry| entry.place).collect())
}

/// Whether the source of a mount of this type is a device: that of others is any text.
fn takes_device(kinds: &str, kind: &str) -> bool {
    kinds.lines().any(|line| line.strip_prefix('\t') == Some(kind))
}

/// The devices of the file system that an absolute path without symbolic links is on, as `7:0`.
pub fn devices_of(root: &Path, path: &Path) -> io::Result<Vec<String>> {
    let over = below(root)?.into_iter().filter(|entry| path.starts_with(&entry.place));
    // The last one made hides the others.
    let Some(entry) = over.max_by_key(|entry| entry.place.as_os_str().len()) else {
        return Ok(Vec::new());
    };
    let kinds = fs::read_to_string(root.join(KINDS)).unwrap_or_default();
    let by_source = entry.device.starts_with(NO_DEVICE) && takes_device(&kinds, &entry.kind);
    Ok(match numbers_of(root, &entry.source).filter(|_| by_source) {
        Some(numbers) => in_one_btrfs_with(root, &[numbers]),
        None => vec![entry.device],
    })
}

/// The numbers of the block device at an absolute path.
pub fn numbers_of(root: &Path, path: &Path) -> Option<String> {
    let found = fs::metadata(root.join(path.strip_prefix("/").ok()?)).ok()?;
    let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
    found.file_type().is_block_device().then(|| format!("{major}:{minor}"))
}

/// These devices, and those that share a mounted btrfs with one of them.
fn in_one_btrfs_with(root: &Path, devices: &[String]) -> Vec<String> {
    let list = |directory: &Path| fs::read_dir(directory).into_iter().flatten().flatten();
    let mut all = devices.to_vec();
    for file_system in list(&root.join(BTRFS)) {
        let links = list(&file_system.path().join("devices"));
        let numbers = links.filter_map(|link| fs::read_to_string(link.path().join("dev")).ok());
        let own: Vec<String> = numbers.map(|numbers| numbers.trim().to_owned()).collect();
        if own.iter().any(|one| devices.contains(one)) {
            all.extend(own);
        }
    }
    all
}

/// The mount at `place`; the last one made hides the others.
pub fn at(place: &Path) -> io::Result<Option<MountEntry>> {
    Ok(all()?.into_iter().rev().find(|entry| entry.place == place))
}

fn parse(text: &[u8]) -> Vec<MountEntry> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

/// `36 35 98:0 /root /place options... - type source options`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let words: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let dash = words.iter().position(|word| *word == b"-")?;
    let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
    Some(MountEntry {
        device: text(words.get(2)?),
        place: PathBuf::from(OsString::from_vec(unescape(words.get(4)?))),
        kind: text(words.get(dash + 1)?),
        source: PathBuf::from(OsString::from_vec(unescape(words.get(dash + 2)?))),
    })
}

/// The kernel escapes blanks as a backslash and three octal digits.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = word;
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.get(..3).filter(|_| first == b'\\');
        let octal = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &behind[3..];
            }
            None => {
                out.push(first);
                rest = behind;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_and_without_optional_fields() {
        let text = b"22 1 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
            36 22 0:43 / /srv/a\\040b rw - fuse.forebay forebay rw,user_id=0\nrubbish\n";
        let found = parse(text);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].device.as_str(), found[0].kind.as_str()), ("0:20", "sysfs"));
        assert_eq!(found[1].place, Path::new("/srv/a b"));
        assert_eq!(found[1].kind, "fuse.forebay");
        assert_eq!(found[1].source, Path::new("forebay"));
    }

    /// The other device of the file system is any block device of this machine. A source that is no
    /// device, a type that takes none, and a file system on other devices are not taken for it.
    #[test]
    fn a_btrfs_is_found_by_its_source_and_by_its_other_devices() {
        let is_block = |path: &PathBuf| numbers_of(Path::new("/"), path).is_some();
        let entries = fs::read_dir("/dev").expect("there is one").flatten();
        let Some(real) = entries.map(|entry| entry.path()).find(is_block) else { return };
        let numbers = numbers_of(Path::new("/"), &real).expect("it is one");
        let root = std::env::temp_dir().join(format!("forebay-mounts-{}", std::process::id()));
        let put = |name: &str, text: &str| {
            let path = root.join(name);
            fs::create_dir_all(path.parent().expect("it has one")).expect("it can be made");
            fs::write(path, text).expect("it can be written");
        };
        put("dev/none", "");
        std::os::unix::fs::symlink(&real, root.join("dev/a b")).expect("it can be made");
        put(KINDS, "nodev\ttmpfs\n\tbtrfs\n");
        put(
            LIST,
            "1 0 0:50 / /one rw - btrfs /dev/a\\040b rw,subvol=/\n\
             2 0 0:50 /sub /two rw - btrfs /dev/a\\040b rw,subvol=/sub\n\
             3 0 0:51 / /three rw - tmpfs /dev/a\\040b rw\n\
             4 0 0:52 / /four rw - btrfs /dev/none rw\n\
             5 0 250:9 / /five rw - ext4 /dev/x rw\n",
        );
        let found = |numbers: &str| {
            let places = of_devices(&root, &[numbers.to_owned()]).expect("there is a list");
            places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(found(&numbers), ["/one", "/two"]);
        assert_eq!(found("250:9"), ["/five"]);
        assert_eq!(found("250:8"), Vec::<String>::new());
        put(&format!("{BTRFS}/1234/devices/loop0/dev"), "250:8\n");
        put(&format!("{BTRFS}/1234/devices/other/dev"), &format!("{numbers}\n"));
        put(&format!("{BTRFS}/features/x"), "0\n");
        assert_eq!(found("250:8"), ["/one", "/two"]);
        let mut devices = devices_of(&root, Path::new("/two/x")).expect("there is a list");
        devices.sort_by_key(|device| device == "250:8");
        assert_eq!(devices[0], numbers);
        assert_eq!(devices.last().map(String::as_str), Some("250:8"));
        assert_eq!(devices_of(&root, Path::new("/five/x/y")).expect("a list"), ["250:9"]);
        assert!(devices_of(&root, Path::new("/fives")).expect("a list").is_empty());
        fs::remove_dir_all(&root).expect("it is ours");
    }
}
