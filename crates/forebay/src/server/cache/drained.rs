//! The volumes that had no dirty block in the cache when the server stopped, in the state
//! directory. The log alone does not tell: it names an entry dirty until the oldest dirty block of
//! any volume is newer.

use std::io;

use forebay_block::VolumeId;
use forebay_format::Superblock;
use forebay_runtime::{StateDir, Stopped, file_of, sealed, unsealed};

/// First line of the file.
const HEADING: &str = "forebay drained 1";
/// Longest file that is read, in bytes: a line for each volume, and a few more.
const BYTES_MAX: u64 = 4 << 10;

fn name_of(uuid: [u8; 16]) -> String {
    file_of(uuid, "drained")
}

/// Records the volumes of `closed`, the superblock of this stop, of which nothing is left.
///
/// # Errors
/// If they cannot be made durable.
pub fn store(state: &StateDir, closed: &Superblock, stopped: &Stopped) -> io::Result<()> {
    let mut body = format!("{HEADING}\ngeneration {}\n", closed.generation);
    let is_left = |name: &String| stopped.left.iter().any(|left| left.volume == *name);
    for volume in closed.volumes.iter().filter(|volume| !is_left(&volume.name)) {
        body += &format!("volume {}\n", volume.id.0);
    }
    state.replace(&name_of(closed.uuid), &sealed(&body))
}

/// The volumes on record for the stop that wrote `found`. None if nothing is on record, or the
/// cache was used since.
///
/// # Errors
/// If the file cannot be read.
pub fn load(state: &StateDir, found: &Superblock) -> io::Result<Vec<VolumeId>> {
    let text = state.read(&name_of(found.uuid), BYTES_MAX)?;
    let known = text.as_deref().and_then(parse);
    let known = known.filter(|(generation, _)| *generation == found.generation && found.clean);
    Ok(known.map(|(_, volumes)| volumes).unwrap_or_default())
}

fn parse(text: &str) -> Option<(u64, Vec<VolumeId>)> {
    let mut lines = unsealed(text)?.lines();
    if lines.next()? != HEADING {
        return None;
    }
    let generation = lines.next()?.strip_prefix("generation ")?.parse().ok()?;
    let volume = |line: &str| Some(VolumeId(line.strip_prefix("volume ")?.parse().ok()?));
    Some((generation, lines.map(volume).collect::<Option<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_file_of_this_kind_counts() {
        let whole = sealed(&format!("{HEADING}\ngeneration 7\nvolume 0\nvolume 63\n"));
        assert_eq!(parse(&whole), Some((7, vec![VolumeId(0), VolumeId(63)])));
        for wrong in ["", "generation x\n", "generation 7\nvolume 256\n", "generation 7\nvol 1\n"] {
            assert_eq!(parse(&sealed(&format!("{HEADING}\n{wrong}"))), None, "{wrong}");
        }
        for cut in 0..whole.len() {
            assert_eq!(parse(&whole[..cut]), None, "{cut} bytes");
        }
    }
}
