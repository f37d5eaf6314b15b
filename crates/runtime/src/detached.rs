//! Stripes that a failed cache device has left, recorded in the state directory: the device's log
//! is out of date for them ([`DetachedStripe`]).
//!
//! Lines are appended, each with a checksum. A crash may tear the last ones; they were not yet
//! reported as durable. A bad line followed by a good one is damage.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;

use forebay_codec::crc32c;
use forebay_engine::DetachedStripe;

use forebay_block::VolumeId;

use crate::state::{StateDir, file_of};

/// Longest file that is read, in bytes.
const BYTES_MAX: u64 = 128 << 20;
/// Most lines that are added: keeps the file below [`BYTES_MAX`].
const LINES_MAX: usize = 1 << 20;

/// A stripe with the number of its shard.
pub type OfShard = (usize, DetachedStripe);

/// The list of one pool.
#[derive(Debug)]
pub struct DetachedList {
    state: StateDir,
    name: String,
    lines: usize,
}

/// Name of a pool's file.
#[must_use]
pub fn file_name(uuid: [u8; 16]) -> String {
    file_of(uuid, "detached")
}

impl DetachedList {
    /// Opens the list of a pool for appending, and returns its stripes by shard and stripe.
    ///
    /// # Errors
    /// If the list cannot be read or is damaged, or its torn end cannot be removed.
    pub fn open(state: &StateDir, uuid: [u8; 16]) -> io::Result<(Self, Vec<OfShard>)> {
        let (state, name) = (state.clone(), file_name(uuid));
        let Some(text) = state.read(&name, BYTES_MAX)? else {
            return Ok((Self { state, name, lines: 0 }, Vec::new()));
        };
        let stripes = stripes_in(&text, &name)?;
        let (lines, whole) = (stripes.len(), print(&stripes));
        match lines {
            // The torn part may be the whole file.
            0 => state.remove(&name)?,
            // It takes space to write it again.
            _ if whole == text => state.sync(&name)?,
            _ => state.replace(&name, &whole)?,
        }
        Ok((Self { state, name, lines }, stripes))
    }

    /// Adds stripes; durable when this returns.
    ///
    /// # Errors
    /// If they could not be made durable, or the list is full. Each may then be in the list or not.
    pub fn add(&mut self, stripes: &[OfShard]) -> io::Result<()> {
        if self.lines + stripes.len() > LINES_MAX {
            let what = format!("{}: {LINES_MAX} stripes are listed, and no more can be", self.name);
            return Err(io::Error::other(what));
        }
        self.state.append(&self.name, &print(stripes))?;
        self.lines += stripes.len();
        Ok(())
    }

    /// Removes the list: nothing on the device counts any more.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(&mut self) -> io::Result<()> {
        self.state.remove(&self.name)
    }
}

/// Reads the list of a pool.
///
/// # Errors
/// If it cannot be read, or is damaged.
pub fn read(state: &StateDir, uuid: [u8; 16]) -> io::Result<Vec<OfShard>> {
    load(state, &file_name(uuid))
}

fn load(state: &StateDir, name: &str) -> io::Result<Vec<OfShard>> {
    let text = state.read(name, BYTES_MAX)?;
    text.map_or(Ok(Vec::new()), |text| stripes_in(&text, name))
}

fn stripes_in(text: &str, name: &str) -> io::Result<Vec<OfShard>> {
    let mut stripes = BTreeMap::new();
    let mut torn = false;
    for line in text.split_inclusive('\n') {
        match parse(line) {
            // The last line about a stripe counts.
            Some((shard, stripe)) if !torn => {
                stripes.insert((shard, stripe.volume, stripe.stripe), stripe);
            }
            Some(_) => {
                let what =
                    format!("{name}: the list of stripes that the cache has left is damaged");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            None => torn = true,
        }
    }
    Ok(stripes.into_iter().map(|((shard, ..), stripe)| (shard, stripe)).collect())
}

fn print(stripes: &[OfShard]) -> String {
    let mut text = String::new();
    for (shard, DetachedStripe { volume, stripe, kept }) in stripes {
        let mut line = format!("{shard} {} {stripe}", volume.0);
        for word in kept {
            let _ = write!(line, " {word:x}");
        }
        let _ = writeln!(text, "{line} {:08x}", crc32c(line.as_bytes()));
    }
    text
}

fn parse(line: &str) -> Option<OfShard> {
    let (body, sum) = line.strip_suffix('\n')?.rsplit_once(' ')?;
    if sum.len() != 8 || u32::from_str_radix(sum, 16).ok()? != crc32c(body.as_bytes()) {
        return None;
    }
    let mut words = body.split(' ');
    let shard = words.next()?.parse().ok()?;
    let volume = VolumeId(words.next()?.parse().ok()?);
    let stripe = words.next()?.parse().ok()?;
    let mut kept = [0; 4];
    for word in &mut kept {
        *word = u64::from_str_radix(words.next()?, 16).ok()?;
    }
    words.next().is_none().then_some((shard, DetachedStripe { volume, stripe, kept }))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::testing::TempDir;

    const UUID: [u8; 16] = *b"0123456789abcdef";

    fn stripe(shard: usize, stripe: u64, kept: u64) -> OfShard {
        (shard, DetachedStripe { volume: VolumeId(3), stripe, kept: [0, kept, 0, u64::MAX] })
    }

    #[test]
    fn what_was_added_is_there_and_the_last_line_of_a_stripe_counts() {
        let dir = TempDir::new();
        let state = StateDir::open(&dir.path("state")).unwrap();
        let (mut list, before) = DetachedList::open(&state, UUID).unwrap();
        assert!(before.is_empty());
        list.add(&[stripe(0, 7, 1), stripe(1, 1 << 40, 2)]).unwrap();
        list.add(&[stripe(0, 7, 0)]).unwrap();
        let expected = vec![stripe(0, 7, 0), stripe(1, 1 << 40, 2)];
        assert_eq!(read(&state, UUID).unwrap(), expected);
        let (mut list, found) = DetachedList::open(&state, UUID).unwrap();
        assert_eq!((found, list.lines), (expected, 2));
        list.remove().unwrap();
        assert!(read(&state, UUID).unwrap().is_empty());
    }

    #[test]
    fn a_torn_end_is_cut_off_and_damage_before_the_end_is_an_error() {
        let dir = TempDir::new();
        let state = StateDir::open(&dir.path("state")).unwrap();
        let path = dir.path("state").join(file_name(UUID));
        let all = [stripe(0, 1, 5), stripe(0, 2, 6), stripe(2, 3, 7)];
        let text = print(&all);
        let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at + 1).collect();
        for cut in 0..text.len() {
            fs::write(&path, &text[..cut]).unwrap();
            let whole = ends.iter().filter(|&&end| end <= cut).count();
            let (mut list, found) = DetachedList::open(&state, UUID).unwrap();
            assert_eq!(found, all[..whole], "cut at {cut}");
            list.add(&[stripe(9, 9, 9)]).unwrap();
            assert_eq!(read(&state, UUID).unwrap().len(), whole + 1, "added after {cut}");
        }
        for at in 0..ends[1] - 1 {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            assert!(DetachedList::open(&state, UUID).is_err(), "byte {at} changed");
        }
    }

    #[test]
    fn the_list_is_bounded() {
        let dir = TempDir::new();
        let state = StateDir::open(&dir.path("state")).unwrap();
        let (mut list, _) = DetachedList::open(&state, UUID).unwrap();
        list.lines = LINES_MAX - 1;
        assert!(list.add(&[stripe(0, 1, 0), stripe(0, 2, 0)]).is_err());
        assert!(read(&state, UUID).unwrap().is_empty());
        list.add(&[stripe(0, 1, 0)]).unwrap();
        let longest = print(&[(
            usize::MAX,
            DetachedStripe { volume: VolumeId(255), stripe: u64::MAX, kept: [u64::MAX; 4] },
        )]);
        assert!(longest.len() as u64 * LINES_MAX as u64 <= BYTES_MAX);
    }
}
