//! The faults of a run: how those of its scenarios begin, and how they end.

use forebay_block::{ByteRange, ErrorKind, IoOp};

use crate::atlas::Scenario;
use crate::away::Away;
use crate::disk::{Fault, Rule};
use crate::rng::Rng;
use crate::world::World;

const SECOND: u64 = 1_000_000_000;

impl World {
    /// Begins the faults of the run.
    pub(crate) fn break_something(&mut self, seed: u64) {
        self.broken = true;
        self.was_broken = true;
        if !self.setup.outcome().crashes {
            self.crash_in = None;
        }
        self.begin(self.setup.scenario, Rng::new(seed));
        if let Some(also) = self.setup.also {
            self.begin(also, Rng::new(!seed));
        }
    }

    /// Begins one fault.
    fn begin(&mut self, scenario: Scenario, mut rng: Rng) {
        let everywhere = ByteRange::new(0, u64::MAX);
        let some = rng.within(1, 6) as u32;
        let rule = |fault, ops, times| Rule { fault, ops, range: everywhere, times };
        let media = Fault::Error(ErrorKind::Media);
        let write: &[IoOp] = &[IoOp::Write, IoOp::WriteZeroes];
        let change: &[IoOp] = &[IoOp::Write, IoOp::WriteZeroes, IoOp::Discard];
        let chosen = rng.below(self.primaries.len() as u64) as usize;
        self.note_concerned(scenario, chosen);
        match scenario {
            Scenario::Crashes | Scenario::ModeSwitches | Scenario::CacheDamaged => {}
            Scenario::CacheReadErrors => self.cache.add_rule(rule(media, &[IoOp::Read], some)),
            Scenario::CacheWriteErrors => {
                let fault = rng.pick(&[media, Fault::TornError]);
                self.cache.add_rule(rule(fault, change, some));
            }
            Scenario::CacheWritesFail => {
                let fault = rng.pick(&[media, Fault::TornError]);
                self.cache.add_rule(rule(fault, change, u32::MAX));
            }
            Scenario::CacheFlushErrors => self.cache.add_rule(rule(media, &[IoOp::Flush], some)),
            Scenario::CacheFull => {
                let full = Fault::Error(ErrorKind::NoSpace);
                self.cache.add_rule(rule(full, change, u32::MAX));
            }
            Scenario::CacheVanishes => self.cache.vanish(),
            Scenario::CacheEnds if self.cache.is_failing() => self.cache.vanish(),
            Scenario::CacheEnds => match rng.below(6) {
                0 => self.cache.add_rule(rule(media, change, u32::MAX)),
                1 => self.cache.add_rule(rule(media, &[IoOp::Flush], u32::MAX)),
                _ => self.cache.vanish(),
            },
            Scenario::CacheRot => {
                let area = self.cache.size() - (1 << 20);
                for _ in 0..rng.within(1, 200) {
                    let at = (1 << 20) + rng.below(area);
                    self.cache.rot(at, rng.below(8) as u32);
                }
            }
            Scenario::CacheLosesWrites => self.cache.add_rule(rule(Fault::Lost, write, some)),
            Scenario::CacheMisdirects => {
                let by = rng.within(1, 64) * 4096;
                self.cache.add_rule(rule(Fault::Misdirected(by), write, some));
            }
            Scenario::CacheSlow => {
                let slow = Fault::Slow(rng.below(4 * SECOND));
                let ops = &[IoOp::Read, IoOp::Write, IoOp::Flush, IoOp::Discard];
                self.cache.add_rule(rule(slow, ops, some));
            }
            Scenario::PrimaryReadErrors => {
                self.primaries[chosen].add_rule(rule(media, &[IoOp::Read], some));
            }
            Scenario::PrimaryWriteErrors => {
                let fault = rng.pick(&[media, Fault::TornError]);
                self.primaries[chosen].add_rule(rule(fault, write, some));
            }
            Scenario::PrimaryFlushErrors => {
                self.primaries[chosen].add_rule(rule(media, &[IoOp::Flush], some));
            }
            Scenario::PrimaryReturns => {
                let ops: &[&[IoOp]] = &[
                    &[IoOp::Write],
                    write,
                    &[IoOp::Read],
                    &[IoOp::Flush],
                    &[IoOp::Discard, IoOp::WriteZeroes],
                    &[IoOp::Read, IoOp::Write, IoOp::WriteZeroes, IoOp::Discard, IoOp::Flush],
                ];
                self.primaries[chosen].add_rule(rule(Fault::Gone, rng.pick(ops), some));
            }
            Scenario::PrimaryVanishes => self.primaries[chosen].vanish(),
            Scenario::PrimaryStaysAway => self.send_away(),
            Scenario::CacheLost => self.lose_cache = true,
            Scenario::CacheStale => self.turn_back = true,
        }
    }

    /// Notes which volumes a fault concerns: one of a primary is for nobody else to notice.
    fn note_concerned(&mut self, scenario: Scenario, chosen: usize) {
        match scenario {
            Scenario::Crashes | Scenario::ModeSwitches => {}
            Scenario::PrimaryReadErrors
            | Scenario::PrimaryWriteErrors
            | Scenario::PrimaryFlushErrors
            | Scenario::PrimaryReturns
            | Scenario::PrimaryVanishes => self.concerned.extend([chosen]),
            Scenario::PrimaryStaysAway => self.concerned.extend([Away::of(&self.setup).volume]),
            Scenario::CacheReadErrors
            | Scenario::CacheWriteErrors
            | Scenario::CacheWritesFail
            | Scenario::CacheFlushErrors
            | Scenario::CacheFull
            | Scenario::CacheVanishes
            | Scenario::CacheEnds
            | Scenario::CacheRot
            | Scenario::CacheLosesWrites
            | Scenario::CacheMisdirects
            | Scenario::CacheSlow
            | Scenario::CacheLost
            | Scenario::CacheStale
            | Scenario::CacheDamaged => self.concerned.extend(0..self.primaries.len()),
        }
    }

    /// Ends the faults that can end.
    pub(crate) fn heal(&mut self) {
        let ends = [Scenario::CacheVanishes, Scenario::CacheEnds];
        if !ends.into_iter().any(|end| self.setup.meets(end)) {
            self.cache.heal();
        }
        let away = self.away.map(|away| away.volume);
        let disks = self.primaries.iter_mut().enumerate();
        disks.filter(|(at, _)| Some(*at) != away).for_each(|(_, disk)| disk.heal());
    }
}
