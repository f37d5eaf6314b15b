//! Permissions of a Unix socket: mode bits, and an owner and a group by name or number.
//!
//! Names are looked up in this host's `/etc/passwd` and `/etc/group`; users and groups of a
//! directory service must be given as numbers.

use std::fs;
use std::path::Path;
use std::str::FromStr;

const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";
/// Maximum length of those files, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Permission bits, printed in octal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SocketMode(pub u32);

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = (3..=4).contains(&text.len()) && text.chars().all(|c| c.is_digit(8));
        let mode = u32::from_str_radix(text, 8).ok().filter(|&mode| digits && mode <= 0o777);
        mode.map(Self).ok_or_else(|| {
            format!("{text:?} is not a mode; use three octal digits, as \"0660\" (owner and group)")
        })
    }
}

/// Permissions of a socket; absent parts keep the process's defaults.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct SocketAccess {
    /// Permission bits.
    pub mode: Option<SocketMode>,
    /// Its owner, by name or number.
    pub owner: Option<String>,
    /// Its group, by name or number.
    pub group: Option<String>,
}

impl SocketAccess {
    /// The numbers of its owner and its group.
    ///
    /// # Errors
    /// When a name is unknown on this host.
    pub fn numbers(&self) -> Result<(Option<u32>, Option<u32>), String> {
        let owner = self.owner.as_deref().map(|name| number("user", USERS, name));
        let group = self.group.as_deref().map(|name| number("group", GROUPS, name));
        Ok((owner.transpose()?, group.transpose()?))
    }
}

/// The number of a user of this host, by name or number.
///
/// # Errors
/// When the name is unknown.
pub fn user_number(name: &str) -> Result<u32, String> {
    number("user", USERS, name)
}

/// The number of a user or group name according to `file`.
fn number(noun: &str, file: &str, name: &str) -> Result<u32, String> {
    // The highest number means "unchanged" to chown(2).
    if let Some(number) = name.parse().ok().filter(|&number| number < u32::MAX) {
        return Ok(number);
    }
    let unknown =
        || format!("there is no {noun} {name:?} in {file}; use one of those, or a number");
    let length = fs::metadata(Path::new(file)).map_err(|_| unknown())?.len();
    if length > FILE_BYTES_MAX {
        return Err(unknown());
    }
    let text = fs::read_to_string(file).map_err(|_| unknown())?;
    find(&text, name).ok_or_else(unknown)
}

/// The number in the line for `name`; both files have lines `NAME:PASSWORD:NUMBER:`.
fn find(text: &str, name: &str) -> Option<u32> {
    let lines = text.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let mut found = lines.filter(|fields| !name.is_empty() && fields.first() == Some(&name));
    found.find_map(|fields| fields.get(2)?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!("0660".parse(), Ok(SocketMode(0o660)));
        assert_eq!("606".parse(), Ok(SocketMode(0o606)));
        for text in ["", "66", "0880", "1777", "u=rw", "00660", "+660"] {
            let error = text.parse::<SocketMode>().expect_err(text);
            assert!(error.contains(text) && error.contains("octal"), "{error}");
        }
    }

    #[test]
    fn names_have_numbers() {
        let text = "root:x:0:0:root:/root:/bin/sh\nkvm:x:78:\nbroken:x\n";
        assert_eq!((find(text, "root"), find(text, "kvm")), (Some(0), Some(78)));
        assert_eq!((find(text, "broken"), find(text, "ro"), find(text, "")), (None, None, None));
        let access = |owner: &str, group: &str| {
            let (owner, group) = (Some(owner.to_owned()), Some(group.to_owned()));
            SocketAccess { owner, group, mode: None }.numbers()
        };
        assert_eq!(access("root", "7"), Ok((Some(0), Some(7))));
        let error = access("root", "no-such").expect_err("there is none");
        assert!(error.contains("no group \"no-such\" in /etc/group"), "{error}");
        access("4294967295", "0").expect_err("that number means no change");
    }
}
