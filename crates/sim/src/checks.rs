//! What must hold in a run: the content, through the server and on the primaries alone, and the
//! statistics.

use forebay_block::{ByteRange, IoOp};
use forebay_engine::{Health, Stats};
use forebay_model::Model;

use crate::failure::{Failure, Kind};
use crate::world::World;

/// Length of the reads that check everything, in bytes.
const CHECK_BYTES: u64 = 32 << 10;

impl World {
    /// Reads everything that clients touched and compares it with the model; after a crash, also
    /// checks that no block mixes two versions.
    pub(crate) fn check_all(&mut self, after_crash: bool) -> Result<(), Failure> {
        self.settle()?;
        for volume in 0..self.setup.volumes.len() {
            let windows = self.setup.volumes[volume].windows.clone();
            self.strict = after_crash && self.is_atomic(volume);
            for window in windows {
                let Some(window) = self.served(volume, window) else { continue };
                let mut at = window.offset;
                while at < window.end() && self.server.is_some() {
                    let len = CHECK_BYTES.min(window.end() - at);
                    let depth = self.setup.client_depth;
                    self.wait("a check", |world| world.waiting() < depth)?;
                    let range = ByteRange::new(at, len);
                    if self.server.is_some() && !self.would_hang(volume, IoOp::Read, range) {
                        self.request(volume, IoOp::Read, range, false, None)?;
                    }
                    at += len;
                }
            }
            self.settle()?;
            self.strict = false;
        }
        Ok(())
    }

    /// Checks that the counters add up.
    pub(crate) fn check_stats(&mut self) -> Result<(), Failure> {
        let Some(server) = &self.server else { return Ok(()) };
        if server.health() != Health::Good {
            return Ok(());
        }
        // Parts of a failed flush may continue after its answer.
        let parts = server.in_flight() as u64;
        for (shard, stats) in server.stats(self.now).iter().enumerate() {
            let ends = !self.is_idle() || stats.requests_in_flight <= parts;
            let broken = broken_rule(stats, self.setup.ram_bytes);
            if let Some(rule) = broken.or((!ends).then_some("requests never end")) {
                let what = format!("shard {shard}: {rule}: {stats:?}");
                return Err(self.fail(Kind::Counters, what));
            }
        }
        self.check_truth()
    }

    /// Compares the primaries' current content with the model, where they must be complete even
    /// without the cache: a write that survived only in the cache, and was seen there, may be
    /// missing until a flush.
    pub(crate) fn check_primaries(&self) -> Result<(), Failure> {
        for volume in 0..self.models.len() {
            if self.setup.is_complete(volume) {
                self.compare(volume, &self.models[volume])?;
            } else if let Some(alone) = &self.alone[volume] {
                self.compare(volume, alone)?;
            }
        }
        Ok(())
    }

    /// Checks that the primaries alone hold the content, even without cache and power.
    pub(crate) fn check_alone(&self) -> Result<(), Failure> {
        (0..self.models.len()).try_for_each(|volume| self.compare(volume, &self.models[volume]))
    }

    pub(crate) fn compare(&self, volume: usize, model: &Model) -> Result<(), Failure> {
        let mut model = model.clone();
        model.crash();
        for &window in &self.setup.volumes[volume].windows {
            let data = self.stored(volume, window);
            let verdict = model.check(window.offset / 512, &data);
            verdict.map_err(|v| self.fail(Kind::Alone, format!("on the primary alone: {v}")))?;
        }
        Ok(())
    }

    /// Checks primaries after the loss of the cache: where they are not complete, they hold older
    /// content of the same place and nothing else.
    pub(crate) fn check_losses(&mut self) -> Result<(), Failure> {
        for volume in 0..self.models.len() {
            for window in self.setup.volumes[volume].windows.clone() {
                let data = self.stored(volume, window);
                let verdict = self.models[volume].check_origin(window.offset / 512, &data);
                verdict
                    .map_err(|v| self.fail(Kind::Alone, format!("on the primary alone: {v}")))?;
            }
        }
        Ok(())
    }

    pub(crate) fn stored(&self, volume: usize, range: ByteRange) -> Vec<u8> {
        let mut data = vec![0; range.len as usize];
        self.primaries[volume].image().read(range.offset, &mut data);
        data
    }
}

/// The first rule between the statistics of a shard that does not hold.
fn broken_rule(s: &Stats, ram_bytes: u64) -> Option<&'static str> {
    let packed = s.lz4_blocks + s.zstd_blocks + s.similar_blocks;
    let whole = s.raw_blocks + packed + s.zero_blocks;
    let rules = [
        (
            s.lookups == s.hits + s.partial_hits + s.misses + s.bypasses,
            "lookups are not the sum of their outcomes",
        ),
        (
            s.unadmitted_blocks == s.unadmitted_by.iter().sum::<u64>(),
            "unadmitted blocks are not the sum of their reasons",
        ),
        (
            s.dirty_blocks == s.dirty_by_age.iter().sum::<u64>(),
            "dirty blocks are not the sum of their ages",
        ),
        (
            s.destaged_blocks == s.destaged_by.iter().sum::<u64>(),
            "destaged blocks are not the sum of their reasons",
        ),
        (s.bypasses <= s.bypassed_by.iter().sum::<u64>(), "bypasses have no reason"),
        (
            s.segments_free + s.unloaded_segments <= s.segments,
            "more segments are free than there are",
        ),
        (s.fenced_blocks <= s.dirty_blocks, "more blocks are fenced than dirty"),
        (s.dirty_blocks <= s.cached_blocks, "more blocks are dirty than cached"),
        (s.associate_blocks <= s.cached_blocks, "more blocks are deltas than cached"),
        (
            s.payload_bytes <= (s.cached_blocks + s.associate_blocks) * 4096,
            "the payload is longer than its blocks",
        ),
        (
            whole <= s.cached_blocks && s.cached_blocks <= whole + s.fenced_blocks,
            "the forms of blocks do not add up",
        ),
        (s.deltas_by_size.iter().sum::<u64>() == s.delta_blocks, "deltas by size do not add up"),
        (
            s.delta_blocks <= s.delta_tries
                && s.dense_blocks <= s.dense_tries
                && s.similar_written <= s.similar_tries
                && s.similar_tries <= s.similar_searches,
            "more was written than tried",
        ),
        (
            s.ram_compressed_blocks <= s.ram_blocks
                && s.ram_compressed_bytes <= s.ram_bytes
                && s.ram_compressed_blocks <= s.ram_compression_tries
                && s.ram_bytes <= ram_bytes,
            "RAM does not add up",
        ),
    ];
    first_broken(rules)
}

/// The first of some rules, each with whether it holds, that does not.
pub(crate) fn first_broken<const N: usize>(
    rules: [(bool, &'static str); N],
) -> Option<&'static str> {
    rules.into_iter().find(|(holds, _)| !holds).map(|(_, rule)| rule)
}
