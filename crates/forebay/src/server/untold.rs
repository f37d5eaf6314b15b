//! Losses of completed writes that no flush has been told of. They outlast the server: its clients
//! go on with the next one, and their next flush must fail there.
//!
//! The keeper holds a file in memory. It begins with a number for each shard, in which the shard
//! sets the bits of such volumes, by their ids; then come the ids and the primaries of the volumes,
//! since the next server may number them in another way.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use forebay_block::{SHARDS_MAX, VolumeId};
use forebay_runtime::Untold;
use forebay_volume::Registry;

use crate::server::kept::{Kept, content, memory};

/// The name under which the keeper holds the file.
const NAME: &str = "untold losses";
/// Length of a shard's number.
const BYTES: usize = size_of::<u64>();
/// Length of all numbers.
const HEAD: usize = SHARDS_MAX * BYTES;

/// The identities of the primaries of which a server before has left such losses.
///
/// # Errors
/// If the file cannot be read.
pub fn take(kept: &mut Kept) -> io::Result<Vec<String>> {
    let Some(held) = kept.take(NAME) else { return Ok(Vec::new()) };
    Ok(parse(&content(held.descriptor)?))
}

/// Leaves a file with the keeper, if there is one, that begins with the losses `before`. Returns
/// where shards note theirs.
///
/// # Errors
/// If memory is short or the keeper is gone.
pub fn hold(kept: &Kept, registry: &Registry, before: &[String]) -> io::Result<Option<Untold>> {
    if !kept.is_there() {
        return Ok(None);
    }
    let volumes = registry.volumes().iter();
    let volumes: Vec<_> = volumes.map(|one| (one.id, one.info.identity.clone())).collect();
    for identity in before {
        match registry.volumes().iter().find(|one| one.info.identity == *identity) {
            Some(volume) => tracing::error!(
                volume = volume.name,
                "completed writes were lost before this start: the next flush fails"
            ),
            None => tracing::error!(
                "completed writes to {identity}, which is no longer served, were lost: a flush of \
                 it had failed"
            ),
        }
    }
    let file = Arc::new(memory(NAME, &print(&volumes, before))?);
    kept.hold(NAME, "", file.as_fd())?;
    Ok(Some(Arc::new(move |shard, bits| note(&file, shard, bits))))
}

fn note(file: &File, shard: usize, bits: u64) {
    if let Err(error) = file.write_all_at(&bits.to_le_bytes(), (shard * BYTES) as u64) {
        tracing::error!(%error, "the next server will not know of a loss");
    }
}

fn print(volumes: &[(VolumeId, String)], before: &[String]) -> Vec<u8> {
    let lost = volumes.iter().filter(|(_, identity)| before.contains(identity));
    // The first shard's: it renews it in its first turn.
    let bits = lost.fold(0_u64, |bits, (id, _)| bits | 1 << id.0);
    let mut bytes = vec![0; HEAD];
    bytes[..BYTES].copy_from_slice(&bits.to_le_bytes());
    let lines = volumes.iter().map(|(id, identity)| format!("{} {identity}\n", id.0));
    bytes.extend(lines.flat_map(String::into_bytes));
    bytes
}

fn parse(bytes: &[u8]) -> Vec<String> {
    let Some((head, rest)) = bytes.split_at_checked(HEAD) else { return Vec::new() };
    let (numbers, _) = head.as_chunks::<BYTES>();
    let bits = numbers.iter().fold(0, |bits, number| bits | u64::from_le_bytes(*number));
    let has_bit = |id: u32| bits.checked_shr(id).is_some_and(|bits| bits & 1 > 0);
    let is_lost = |id: &str| id.parse().is_ok_and(has_bit);
    let lines = std::str::from_utf8(rest).unwrap_or_default().lines();
    let volumes = lines.filter_map(|line| line.split_once(' '));
    volumes.filter(|(id, _)| is_lost(id)).map(|(_, identity)| identity.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_server_knows_of_what_any_shard_and_the_server_before_noted() {
        let names = ["serial:A", "path:/dev/b c", "nbd://h/c", "file:d"].map(String::from);
        let volumes: Vec<_> = (0..).map(VolumeId).zip(names.clone()).collect();
        let file = memory(NAME, &print(&volumes, &names[2..3])).expect("there is memory");
        let read = |file: &File| {
            parse(&content(file.try_clone().expect("it is open").into()).expect("it is there"))
        };
        assert_eq!(read(&file), names[2..3]);
        note(&file, SHARDS_MAX - 1, 1 << 1);
        note(&file, 3, 1 << 3 | 1 << 63);
        assert_eq!(read(&file), names[1..]);
        note(&file, 0, 0);
        note(&file, 3, 0);
        assert_eq!(read(&file), names[1..2]);
    }

    #[test]
    fn a_file_that_makes_no_sense_names_nothing() {
        for bytes in [&[][..], &[0xff; HEAD - 1], &[0xff; HEAD + 9]] {
            assert_eq!(parse(bytes), Vec::<String>::new());
        }
        let mut bytes = vec![0xff; HEAD];
        bytes.extend(b"64 a\n4294967296 b\n-1 c\nd\n63 e\n");
        assert_eq!(parse(&bytes), ["e"]);
    }
}
