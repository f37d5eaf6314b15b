//! What is known of the orderly stops of a cache, in the state directory: where the shards' logs
//! ended, and of which volumes nothing was dirty. It shows whether the cache device has lost the
//! end of a log since, or is an older copy. And it shows what is clean: the log alone names an
//! entry dirty until the oldest dirty block of any volume is newer.
//!
//! The record stays true over later starts, whether they end in order or not. A start that cannot
//! continue it, or that another version has made, ends it: record numbers are used again after an
//! accepted loss.

use std::io;

use anyhow::bail;
use forebay_block::VolumeId;
use forebay_engine::{LastStop, Lsn};
use forebay_format::{SUPERBLOCK_OFFSETS, Superblock};
use forebay_runtime::{StateDir, Stopped, file_of, sealed, unsealed};

/// First line of the file.
const HEADING: &str = "forebay drained 2";
/// Longest file that is read, in bytes: for each of 64 volumes the number of a record of each of 64
/// shards, and a few more lines.
const BYTES_MAX: u64 = 128 << 10;

/// The kind of file.
pub const KIND: &str = "drained";

fn name_of(uuid: [u8; 16]) -> String {
    file_of(uuid, KIND)
}

/// The last orderly stop of a cache.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stops {
    /// Generation of the superblock that it wrote.
    generation: u64,
    /// The last start that knew of it.
    epoch: u32,
    /// For each shard, what is known of its log.
    shards: Vec<LastStop>,
}

impl Stops {
    /// What is on record for the pool that `found` describes, as a start finds it. Nothing, if it
    /// is of another version's start.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn load(state: &StateDir, found: &Superblock) -> io::Result<Self> {
        let text = state.read(&name_of(found.uuid), BYTES_MAX)?;
        let known = text.as_deref().and_then(parse);
        let known = known
            .filter(|stops| stops.epoch >= found.epoch && stops.shards.len() == found.shards.len());
        Ok(known.unwrap_or_default())
    }

    /// Refuses a device that the last stop did not write, as long as nothing has been changed: it
    /// is a copy from before. `known` are its valid superblocks. With one of them damaged, the ends
    /// of the logs will tell.
    ///
    /// # Errors
    /// Says what to do.
    pub fn check(&self, known: &[Superblock]) -> anyhow::Result<()> {
        let written = known.iter().map(|superblock| superblock.generation).max();
        if let Some(written) = written.filter(|&written| written < self.generation)
            && known.len() == SUPERBLOCK_OFFSETS.len()
        {
            bail!(
                "the cache device is an older copy, from before the last stop: superblock {} was \
                 written then, the last one on it is {written}; use the right device; to serve \
                 what is on this one, start once with --accept-data-loss, or discard it with \
                 --reset-cache",
                self.generation
            );
        }
        Ok(())
    }

    /// The volumes of which nothing is dirty, if the cache was not used since that stop: in each
    /// shard they were clean at its last record. One that is dirty had been dirtied by a record.
    pub fn drained(&self, found: &Superblock) -> Vec<VolumeId> {
        let is_of_found = self.generation == found.generation && found.clean;
        let Some(first) = self.shards.first().filter(|_| is_of_found) else { return Vec::new() };
        let is_drained = |volume: &VolumeId| {
            self.shards.iter().all(|shard| shard.clean.contains(&(*volume, shard.end)))
        };
        first.clean.iter().map(|(volume, _)| *volume).filter(is_drained).collect()
    }

    /// What is known of a shard's log.
    pub fn of_shard(&self, shard: usize) -> LastStop {
        self.shards.get(shard).cloned().unwrap_or_default()
    }

    /// Keeps the record for the start that `begun` describes, before that writes anything. If this
    /// fails, the next start knows of no stop. If a loss of records may be accepted, what they say
    /// of volumes counts no more, in this start and after it.
    ///
    /// # Errors
    /// If it cannot be made durable.
    pub fn begin(&mut self, state: &StateDir, begun: &Superblock, loss: bool) -> io::Result<()> {
        if self.shards.is_empty() {
            return Ok(());
        }
        self.epoch = begun.epoch;
        if loss {
            self.shards.iter_mut().for_each(|shard| shard.clean.clear());
        }
        self.store(state, begun.uuid)
    }

    /// Forgets all stops: a loss of records was accepted.
    ///
    /// # Errors
    /// If that cannot be made durable.
    pub fn forget(state: &StateDir, uuid: [u8; 16]) -> io::Result<()> {
        state.remove(&name_of(uuid))
    }

    /// Records a stop, of which `closed` is the superblock.
    ///
    /// # Errors
    /// If it cannot be made durable.
    pub fn end(self, state: &StateDir, closed: &Superblock, stopped: &Stopped) -> io::Result<()> {
        if !stopped.complete {
            return Ok(());
        }
        let is_left = |name: &String| stopped.left.iter().any(|left| left.volume == *name);
        let drained = closed.volumes.iter().filter(|volume| !is_left(&volume.name));
        let drained: Vec<VolumeId> = drained.map(|volume| volume.id).collect();
        let ends = stopped.log_ends.iter().enumerate();
        let shards = ends.map(|(shard, &end)| self.of_shard(shard).then(end, &drained)).collect();
        let (generation, epoch) = (closed.generation, closed.epoch);
        Self { generation, epoch, shards }.store(state, closed.uuid)
    }

    fn store(&self, state: &StateDir, uuid: [u8; 16]) -> io::Result<()> {
        state.replace(&name_of(uuid), &sealed(&self.print()))
    }

    fn print(&self) -> String {
        let mut text = format!("{HEADING}\ngeneration {}\nepoch {}", self.generation, self.epoch);
        for (number, shard) in self.shards.iter().enumerate() {
            text += &format!("\nshard {number} {}", shard.end.0);
            for (volume, end) in &shard.clean {
                text += &format!("\nclean {} {}", volume.0, end.0);
            }
        }
        text + "\n"
    }
}

fn parse(text: &str) -> Option<Stops> {
    let mut lines = unsealed(text)?.lines();
    if lines.next()? != HEADING {
        return None;
    }
    let generation = lines.next()?.strip_prefix("generation ")?.parse().ok()?;
    let epoch = lines.next()?.strip_prefix("epoch ")?.parse().ok()?;
    let mut stops = Stops { generation, epoch, ..Stops::default() };
    for line in lines {
        let mut words = line.split(' ');
        match words.next()? {
            "shard" if words.next()?.parse() == Ok(stops.shards.len()) => {
                let end = Lsn(words.next()?.parse().ok()?);
                stops.shards.push(LastStop { end, clean: Vec::new() });
            }
            "clean" => {
                let volume = VolumeId(words.next()?.parse().ok()?);
                let end = Lsn(words.next()?.parse().ok()?);
                stops.shards.last_mut()?.clean.push((volume, end));
            }
            _ => return None,
        }
        if words.next().is_some() {
            return None;
        }
    }
    Some(stops)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::primaries::samples::tests::superblock;

    #[test]
    fn only_what_was_clean_at_the_end_of_every_log_is_drained() {
        let (a, b, c) = (VolumeId(0), VolumeId(5), VolumeId(63));
        let shard = |end, clean: &[(VolumeId, u64)]| LastStop {
            end: Lsn(end),
            clean: clean.iter().map(|&(volume, lsn)| (volume, Lsn(lsn))).collect(),
        };
        let shards = vec![
            shard(9, &[(a, 9), (b, 9), (c, 9)]),
            // Nothing but its last record was logged since the stop before.
            shard(4, &[(b, 3), (c, 4), (a, 4)]),
        ];
        let stops = Stops { generation: 7, epoch: 3, shards };
        let found = Superblock { clean: true, ..superblock([1; 16], 3, 7) };
        assert_eq!(stops.drained(&found), [a, c]);
        assert_eq!(stops.drained(&Superblock { generation: 8, ..found.clone() }), []);
        assert_eq!(stops.drained(&Superblock { clean: false, ..found.clone() }), []);
        assert_eq!(Stops { shards: Vec::new(), ..stops }.drained(&found), []);
    }

    #[test]
    fn what_is_printed_is_read_and_nothing_else() {
        let stops = Stops {
            generation: 7,
            epoch: 3,
            shards: vec![
                LastStop { end: Lsn(9), clean: vec![(VolumeId(0), Lsn(9)), (VolumeId(1), Lsn(2))] },
                LastStop { end: Lsn(u64::MAX), clean: Vec::new() },
            ],
        };
        let whole = sealed(&stops.print());
        assert_eq!(parse(&whole), Some(stops));
        for cut in 0..whole.len() {
            assert_eq!(parse(&whole[..cut]), None, "{cut} bytes");
        }
        for wrong in [
            "",
            "generation 7\n",
            "generation 7\nepoch x\n",
            "generation 7\nepoch 1\nvolume 256\n",
            "generation 7\nepoch 1\nvol 1\n",
            "generation 7\nepoch 1\nshard 0 5\nclean 256 5\n",
            "generation 7\nepoch 1\nclean 1 1\n",
            "generation 7\nepoch 1\nshard 1 5\n",
            "generation 7\nepoch 1\nshard 0 5 6\n",
        ] {
            assert_eq!(parse(&sealed(&format!("{HEADING}\n{wrong}"))), None, "{wrong}");
        }
    }
}
