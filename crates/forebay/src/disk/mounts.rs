//! The list of mounts, as the kernel gives it.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountEntry {
    /// Major and minor number of the device, as `7:0`.
    pub device: String,
    /// The mount point.
    pub place: PathBuf,
    /// The file system's type.
    pub kind: String,
}

/// Every mount that this process sees, in the order in which they were made.
pub fn all() -> io::Result<Vec<MountEntry>> {
    of(Path::new("/proc/self/mountinfo"))
}

/// Every mount in a file of this form.
pub fn of(list: &Path) -> io::Result<Vec<MountEntry>> {
    Ok(parse(&std::fs::read(list)?))
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
    }
}
