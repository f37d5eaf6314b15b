//! Worlds in which the cache device is damaged while it is not in use: between a crash or an
//! orderly stop and the next start, some of its pages get flipped bits, become zeros or garbage,
//! become copies of other pages, or return to their content at an earlier start.
//!
//! A start is refused only if it is unknown which data were lost. Otherwise no read returns a wrong
//! byte: blocks that cannot be read return errors and are in the list of lost blocks; every other
//! block is intact. The newest sealed segment and those after it are not damaged: if a record is
//! proved durable neither by a later record nor by a footer, nobody can tell that it ever existed.

use forebay_block::{BLOCK_SIZE, ByteRange, IoOp};
use forebay_format::SUPERBLOCK_OFFSETS;
use forebay_volume::offline::examine;

use crate::atlas::Scenario;
use crate::config::{MIXED_SEEDS, STORE_SEEDS, Setup, TAKEOVER_SEEDS};
use crate::failure::Kind;
use crate::rng::Rng;
use crate::script::{Step, script};
use crate::world::{Failure, World};

const PAGE: u64 = 4096;
const BLOCK: u64 = BLOCK_SIZE as u64;
/// Most pages damaged at a time.
const PAGES_MAX: u64 = 6;
/// Percentage of cases in which a superblock is among them.
const SUPERBLOCK_PERCENT: u64 = 3;
/// The reasons for which a start may be refused: dirty blocks may be lost, and it is unknown which.
/// The last reason is that a newer superblock is damaged.
const REFUSALS: [&str; 4] =
    ["perhaps with the newest version", "may hold dirty blocks", "is missing", "older copy"];

/// Seeds from this one on are mixed worlds.
const MIXED_FROM: u64 = 1_000_000;

/// The world of a seed, and its script.
#[must_use]
pub fn world(seed: u64) -> (Setup, Vec<Step>) {
    // Worlds of which most have a store.
    let of = (seed ^ 0x0da3_a6ed) % (TAKEOVER_SEEDS - STORE_SEEDS);
    let kind = if seed < MIXED_FROM { STORE_SEEDS } else { MIXED_SEEDS };
    let mut setup = Setup::from_seed(kind + of);
    (setup.steered, setup.takeover) = (None, false);
    setup.seed = seed;
    setup.scenario = Scenario::CacheDamaged;
    setup.also = None;
    // Garbage on the primary itself is another fault.
    setup.primary.garbles = false;
    let mut steps = script(&setup);
    // The fault never ends: more damage comes at every start.
    steps.retain(|step| !matches!(step, Step::Heal));
    (setup, steps)
}

/// Whether a start may be refused for this reason.
#[must_use]
pub fn may_refuse(why: &str) -> bool {
    REFUSALS.iter().any(|reason| why.contains(reason))
}

impl World {
    /// Damages the cache device if it is time.
    pub(crate) fn damage_at_rest(&mut self) {
        if !self.setup.meets(Scenario::CacheDamaged) || !self.broken || self.rng.percent(30) {
            return;
        }
        let places = self.old_pages();
        let mut rng = self.rng.fork();
        if places.is_empty() {
            return;
        }
        for _ in 0..rng.within(1, PAGES_MAX) {
            let at = rng.pick(&places);
            let page = self.damaged_page(&mut rng, at, &places);
            self.cache.spoil(at, &page);
            self.trace.mix(&[self.now, at]);
            self.trace.line(self.now, || format!("damaged: the page at {at}"));
        }
        if rng.percent(SUPERBLOCK_PERCENT) {
            let at = rng.pick(&SUPERBLOCK_OFFSETS);
            self.cache.rot(at + rng.below(PAGE), rng.below(8) as u32);
            self.trace.line(self.now, || format!("damaged: the superblock at {at}"));
        }
    }

    /// The damaged content of a page.
    fn damaged_page(&self, rng: &mut Rng, at: u64, places: &[u64]) -> Vec<u8> {
        let mut page = vec![0; PAGE as usize];
        self.cache.view().read(at, &mut page);
        match rng.below(6) {
            0 => page.fill(0),
            1 => page.iter_mut().for_each(|byte| *byte = rng.below(256) as u8),
            2 => self.cache.view().read(rng.pick(places), &mut page),
            3 => self.earlier(rng, at, &mut page),
            _ => {
                for _ in 0..rng.within(1, 3) {
                    page[rng.below(PAGE) as usize] ^= 1 << rng.below(8);
                }
            }
        }
        page
    }

    /// The pages of each log that precede its newest sealed segment.
    fn old_pages(&self) -> Vec<u64> {
        let mut read = |at, bytes: &mut [u8]| {
            self.cache.view().read(at, bytes);
            Ok(())
        };
        let Ok(report) = examine(&mut read, false) else { return Vec::new() };
        let segment = u64::from(report.superblock.segment_size);
        let mut places = Vec::new();
        for (shard, area) in report.shards.iter().zip(&report.superblock.shards) {
            let Some((first, last)) = shard.segments else { continue };
            for sequence in first.0..last.0.saturating_sub(shard.unsealed) {
                let log = report.superblock.log_segments_of(area);
                let at = area.offset + sequence % log * segment;
                places.extend((at..at + segment).step_by(PAGE as usize));
            }
        }
        places
    }

    /// Checks that every block that cannot be read is in the list of lost blocks.
    pub(crate) fn check_lost(&mut self) -> Result<(), Failure> {
        if !self.setup.meets(Scenario::CacheDamaged) || !self.broken {
            return Ok(());
        }
        for volume in 0..self.setup.volumes.len() {
            for window in self.setup.volumes[volume].windows.clone() {
                let mut at = window.offset;
                while at < window.end() && self.server.is_some() && self.crash_in.is_none() {
                    let end = (at / BLOCK + 1) * BLOCK;
                    let range = ByteRange::new(at, end.min(window.end()) - at);
                    let failed = self.tally.failed;
                    self.request(volume, IoOp::Read, range, false, None)?;
                    self.settle()?;
                    if self.tally.failed > failed && self.server.is_some() {
                        self.is_listed(volume, range)?;
                    }
                    at = end;
                }
            }
        }
        Ok(())
    }

    fn is_listed(&self, volume: usize, range: ByteRange) -> Result<(), Failure> {
        let states = self.volume_states();
        let mut lost = states.iter().filter(|state| usize::from(state.id.0) == volume);
        if lost.any(|state| state.lost.iter().any(|listed| listed.overlaps(&range))) {
            return Ok(());
        }
        let what = format!("{range} of volume {volume} cannot be read, and is not listed as lost");
        Err(self.fail(Kind::Unsaid, what))
    }
}
