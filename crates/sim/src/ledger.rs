//! What disks and clients saw of a server since its start: its statistics must say the same.
//!
//! Counters are compared exactly where no fault makes the engine repeat requests. The number of
//! dirty blocks may be too high, since a block counts until the primary has flushed it; it must
//! never be too low, nor must the age of the oldest.

use std::collections::{BTreeMap, BTreeSet};

use forebay_block::{BlockRange, ByteRange, Io, IoOp, IoResult};
use forebay_engine::{Health, State, Stats, VolumeState};

use crate::checks::first_broken;
use crate::failure::{Failure, Kind};
use crate::world::World;

/// What disks saw of a shard.
#[derive(Clone, Copy, Default, Debug)]
struct OfShard {
    /// Bytes that it sent to its log and store.
    sent_bytes: u64,
    /// Bytes that it discarded there.
    discarded_bytes: u64,
    /// Its requests that failed on the cache device, except discards.
    cache_errors: u64,
    /// Its requests that failed on a primary.
    primary_errors: u64,
}

/// What clients asked of a volume, and what its primary stored.
#[derive(Clone, Copy, Default, Debug)]
struct OfVolume {
    reads: u64,
    read_bytes: u64,
    read_blocks: u64,
    writes: u64,
    write_bytes: u64,
    discards: u64,
    flushes: u64,
    stored_blocks: u64,
}

/// What disks and clients saw of a server.
#[derive(Default, Debug)]
pub(crate) struct Ledger {
    shards: BTreeMap<usize, OfShard>,
    volumes: BTreeMap<usize, OfVolume>,
    /// When a write to each block of a volume was last answered.
    written_at: BTreeMap<(usize, u64), u64>,
}

impl Ledger {
    /// Notes a client's request to a server with `shards`.
    pub fn asked(&mut self, volume: usize, io: &Io, shards: usize) {
        let seen = self.volumes.entry(volume).or_default();
        let pieces = io.range.stripes().count() as u64;
        match io.op {
            IoOp::Read => {
                seen.reads += pieces;
                seen.read_bytes += io.range.len;
                seen.read_blocks += io.range.blocks().count;
            }
            IoOp::Write | IoOp::WriteZeroes => {
                seen.writes += pieces;
                seen.write_bytes += io.range.len;
            }
            IoOp::Discard => seen.discards += pieces,
            IoOp::Flush => seen.flushes += shards as u64,
            IoOp::Prefetch => {}
        }
    }

    /// Notes that a client's change of a volume was answered.
    pub fn changed(&mut self, volume: usize, range: ByteRange, now: u64) {
        self.written_at.extend(range.blocks().iter().map(|block| ((volume, block), now)));
    }

    /// Notes a shard's request to the cache device.
    pub fn sent(&mut self, shard: usize, io: &Io) {
        if io.op == IoOp::Write {
            self.shards.entry(shard).or_default().sent_bytes += io.range.len;
        }
    }

    /// Notes the end of a shard's request to the cache device.
    pub fn cache_ended(
        &mut self,
        shard: usize,
        (op, range): (IoOp, ByteRange),
        result: &IoResult<()>,
    ) {
        let seen = self.shards.entry(shard).or_default();
        match (op, result) {
            (IoOp::Discard, Ok(())) => seen.discarded_bytes += range.len,
            (IoOp::Discard, Err(_)) | (_, Ok(())) => {}
            (_, Err(_)) => seen.cache_errors += 1,
        }
    }

    /// Notes the end of a shard's request to a volume's primary.
    pub fn primary_ended(
        &mut self,
        (shard, volume): (usize, usize),
        (op, range): (IoOp, ByteRange),
        result: &IoResult<()>,
    ) {
        if result.is_err() {
            self.shards.entry(shard).or_default().primary_errors += 1;
        } else if matches!(op, IoOp::Write | IoOp::WriteZeroes) {
            self.volumes.entry(volume).or_default().stored_blocks += range.blocks().count;
        }
    }
}

impl World {
    /// Checks that the statistics say what disks and clients saw, while no request of clients is
    /// in flight.
    pub(crate) fn check_truth(&self) -> Result<(), Failure> {
        let Some(server) = &self.server else { return Ok(()) };
        let serves = server.all_in(&State::Serving) && server.health() == Health::Good;
        if !(serves && server.is_up_to_date() && self.mischief.lets_judge_statistics()) {
            return Ok(());
        }
        let (mut shards, mut volumes) = (server.stats(self.now), server.volumes(self.now));
        if volumes.is_empty() {
            // The engine that tests the world keeps no statistics.
            return Ok(());
        }
        self.mischief.showing(&mut shards, &mut volumes);
        for (shard, stats) in shards.iter().enumerate() {
            let seen = self.ledger.shards.get(&shard).copied().unwrap_or_default();
            if let Some(rule) = broken_of_shard(stats, &seen) {
                return Err(self.untrue(format!("shard {shard}: {rule}: {seen:?}, {stats:?}")));
            }
        }
        let oldest = shards.iter().map(|stats| stats.oldest_dirty_nanos).max();
        for volume in self.steering.configured() {
            let mut said = VolumeState::default();
            let id = self.steering.ids[volume];
            volumes.iter().filter(|part| Some(part.id) == id).for_each(|part| said.merge(part));
            self.check_volume(volume, &said, oldest.unwrap_or_default())?;
        }
        Ok(())
    }

    /// Checks what the server said of a volume, and of the age of the oldest dirty block.
    fn check_volume(&self, volume: usize, said: &VolumeState, oldest: u64) -> Result<(), Failure> {
        let stats = &said.stats;
        let seen = self.ledger.volumes.get(&volume).copied().unwrap_or_default();
        if let Some(rule) = broken_of_volume(stats, &seen, self.was_broken) {
            return Err(self.untrue(format!("volume {volume}: {rule}: {seen:?}, {stats:?}")));
        }
        if self.was_broken {
            return Ok(());
        }
        let (newer, since) = self.newer_in_cache(volume);
        let waits = since.map_or(0, |since| self.now - since);
        let is_known = self.is_promised()[volume] && self.cut_gates[volume].complete().is_some();
        let age = if is_known { self.age_of_primary(volume)? } else { None };
        let levels = [
            ("blocks that the primary lacks", newer, said.dirty_blocks),
            ("ns for which the oldest of them waits", waits, oldest),
            ("ns of age of the primary", age.unwrap_or(0), stats.primary_age_nanos),
        ];
        match levels.into_iter().find(|(_, real, said)| real > said) {
            Some((what, real, said)) => {
                Err(self.untrue(format!("volume {volume}: {real} {what}; {said}, says the server")))
            }
            None => Ok(()),
        }
    }

    fn untrue(&self, what: String) -> Failure {
        self.fail(Kind::Untrue, what)
    }

    /// The number of blocks of which the primary does not have the newest version, and when the
    /// first of those that were written since the server's start was last written.
    fn newer_in_cache(&self, volume: usize) -> (u64, Option<u64>) {
        let (mut count, mut since) = (0, None);
        let mut judged = BTreeSet::new();
        for &window in &self.setup.volumes[volume].windows {
            for block in window.blocks().iter().filter(|&block| judged.insert(block)) {
                let range = BlockRange { first: block, count: 1 }.bytes().intersection(&window);
                let mut data = vec![0; range.len as usize];
                self.primaries[volume].view().read(range.offset, &mut data);
                if self.models[volume].check(range.offset / 512, &data).is_ok() {
                    continue;
                }
                count += 1;
                let at = self.ledger.written_at.get(&(volume, block)).copied();
                since = since.into_iter().chain(at).min();
            }
        }
        (count, since)
    }
}

/// The first rule that a shard's statistics break.
fn broken_of_shard(stats: &Stats, seen: &OfShard) -> Option<&'static str> {
    let rules = [
        (stats.cache_errors == seen.cache_errors, "errors of the cache device"),
        // A probe that fails is none.
        (stats.primary_errors <= seen.primary_errors, "errors of primaries"),
        (stats.written_bytes() == seen.sent_bytes, "bytes written to the cache device"),
        (stats.discarded_bytes == seen.discarded_bytes, "bytes discarded"),
    ];
    first_broken(rules)
}

/// The first rule that a volume's statistics break.
fn broken_of_volume(stats: &Stats, seen: &OfVolume, was_broken: bool) -> Option<&'static str> {
    let sources = stats.ram_hit_blocks + stats.ssd_hit_blocks + stats.primary_read_blocks;
    let rules = [
        (stats.reads == seen.reads, "reads"),
        (stats.read_bytes == seen.read_bytes, "bytes read"),
        (stats.lookups == seen.reads, "lookups"),
        (stats.writes == seen.writes, "writes"),
        (stats.write_bytes == seen.write_bytes, "bytes written"),
        (stats.discards == seen.discards, "discards"),
        (stats.flushes == seen.flushes, "flushes"),
        (stats.destaged_blocks <= seen.stored_blocks, "blocks destaged that no primary got"),
        (was_broken || sources == seen.read_blocks, "blocks read are not the sum of their sources"),
    ];
    first_broken(rules)
}
