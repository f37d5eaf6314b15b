//! The gate of an ordered volume: leads all shards through its cuts, one after the other
//! ([`CutNews`], [`CutOrder`]).
//!
//! | step | all shards have | order to all shards |
//! |---|---|---|
//! | idle | nothing of a cut in memory | take, once a shard wants a cut |
//! | taking | been ordered to take their part | release, when all have |
//! | staging | taken their part | write, when all have staged it |
//! | writing | staged their part | none; idle, when the primary has all parts |
//!
//! The orders must reach each shard in the order in which the gate gives them.
//!
//! Until the order to write, any shard can abandon the cut. Nothing of it is on the primary then,
//! and all forget it.
//!
//! The primary alone is a state of the volume whenever no cut is being written, and the order of
//! steps keeps it at one if the cache device is lost: what is being written then is in memory, all
//! of it.

use forebay_engine::{CutNews, CutOrder};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Step {
    Idle,
    Taking,
    Staging,
    Writing,
}

/// The gate of one volume.
#[derive(Clone, Debug)]
pub struct CutGate {
    step: Step,
    /// Number of the current cut, or of the last one.
    number: u64,
    /// A shard wants another cut.
    wanted: bool,
    /// For each shard, the progress of its part.
    parts: Vec<Part>,
    /// The last cut that the primary has, if all shards follow the order since.
    complete: Option<u64>,
}

/// The progress of a shard's part of the current cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Part {
    taken: bool,
    staged: bool,
    written: bool,
    /// As reported when it was taken.
    last: bool,
    whole: bool,
}

impl CutGate {
    /// A gate for `shards` shards.
    #[must_use]
    pub fn new(shards: usize) -> Self {
        let parts = vec![Part::default(); shards];
        Self { step: Step::Idle, number: 0, wanted: false, parts, complete: None }
    }

    /// Takes a shard's report; returns the order for every shard, if one is due.
    pub fn take(&mut self, shard: usize, news: CutNews) -> Option<CutOrder> {
        let number = self.number;
        let part = &mut self.parts[shard];
        match news {
            CutNews::Wanted => {
                // An order to take a part may be on its way to the shard.
                self.wanted |= part.taken || self.step == Step::Idle;
            }
            CutNews::Taken { number: of, last, whole }
                if of == number && self.step == Step::Taking =>
            {
                *part = Part { taken: true, last, whole, ..Part::default() };
            }
            CutNews::Staged(of) if of == number => part.staged = part.taken,
            CutNews::Written(of) if of == number => part.written = part.taken,
            CutNews::Abandoned(of) if of == number && self.step < Step::Writing => {
                return self.abandon();
            }
            _ => return None,
        }
        self.advance()
    }

    fn abandon(&mut self) -> Option<CutOrder> {
        let was_idle = std::mem::replace(&mut self.step, Step::Idle) == Step::Idle;
        self.parts.fill(Part::default());
        self.wanted = false;
        (!was_idle).then_some(CutOrder::Abandon(self.number))
    }

    fn advance(&mut self) -> Option<CutOrder> {
        let all = |done: fn(&Part) -> bool| self.parts.iter().all(done);
        match self.step {
            Step::Taking if all(|part| part.taken) => {
                self.step = Step::Staging;
                Some(CutOrder::Release(self.number))
            }
            Step::Staging if all(|part| part.staged) => {
                self.step = Step::Writing;
                let last = all(|part| part.last);
                Some(CutOrder::Write { number: self.number, last })
            }
            Step::Writing if all(|part| part.written) => {
                self.complete = all(|part| part.whole).then_some(self.number);
                self.step = Step::Idle;
                self.parts.fill(Part::default());
                self.advance()
            }
            Step::Idle if self.wanted => {
                self.wanted = false;
                self.step = Step::Taking;
                self.number += 1;
                Some(CutOrder::Take(self.number))
            }
            _ => None,
        }
    }

    /// Whether shards are writing a cut: the primary is between two states.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        self.step == Step::Writing
    }

    /// Number of the last cut that the primary has durably, if that makes it a state of the volume
    /// at one moment. `None` until the first cut since the start is complete.
    #[must_use]
    pub fn complete(&self) -> Option<u64> {
        self.complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(number: u64) -> CutNews {
        CutNews::Taken { number, last: false, whole: true }
    }

    /// Leads two shards to the order to write.
    fn staged(gate: &mut CutGate, number: u64) {
        assert_eq!(gate.take(0, taken(number)), None);
        assert_eq!(gate.take(0, CutNews::Staged(number)), None);
        assert_eq!(gate.take(1, taken(number)), Some(CutOrder::Release(number)));
        let write = CutOrder::Write { number, last: false };
        assert_eq!(gate.take(1, CutNews::Staged(number)), Some(write));
    }

    #[test]
    fn each_step_waits_for_every_shard() {
        let mut gate = CutGate::new(2);
        assert_eq!(gate.take(1, CutNews::Wanted), Some(CutOrder::Take(1)));
        assert_eq!(gate.take(0, CutNews::Wanted), None, "the order is on its way");
        staged(&mut gate, 1);
        assert!(gate.is_writing() && gate.complete().is_none());
        assert_eq!(gate.take(0, CutNews::Written(1)), None);
        assert_eq!(gate.take(1, CutNews::Written(1)), None);
        assert_eq!((gate.is_writing(), gate.complete()), (false, Some(1)));
        assert_eq!(gate.take(0, CutNews::Wanted), Some(CutOrder::Take(2)));
    }

    #[test]
    fn a_cut_that_is_wanted_meanwhile_follows() {
        let mut gate = CutGate::new(2);
        gate.take(0, CutNews::Wanted);
        staged(&mut gate, 1);
        assert_eq!(gate.take(0, CutNews::Written(1)), None);
        assert_eq!(gate.take(0, CutNews::Wanted), None);
        assert_eq!(gate.take(1, CutNews::Written(1)), Some(CutOrder::Take(2)));
    }

    #[test]
    fn any_shard_abandons_a_cut_until_it_is_written() {
        let mut gate = CutGate::new(2);
        gate.take(0, CutNews::Wanted);
        gate.take(0, taken(1));
        assert_eq!(gate.take(1, CutNews::Abandoned(1)), Some(CutOrder::Abandon(1)));
        assert_eq!(gate.take(0, CutNews::Staged(1)), None, "it is late");
        assert_eq!(gate.take(1, CutNews::Wanted), Some(CutOrder::Take(2)));
        assert_eq!(gate.take(0, CutNews::Abandoned(1)), None);
        staged(&mut gate, 2);
        assert_eq!(gate.take(0, CutNews::Abandoned(2)), None);
        assert!(gate.is_writing());
    }

    #[test]
    fn the_last_cut_is_one_in_which_every_device_has_failed() {
        for (others, whole) in [(true, true), (false, true), (true, false)] {
            let mut gate = CutGate::new(2);
            gate.take(0, CutNews::Wanted);
            gate.take(0, CutNews::Taken { number: 1, last: true, whole: true });
            gate.take(1, CutNews::Taken { number: 1, last: others, whole });
            gate.take(0, CutNews::Staged(1));
            let write = CutOrder::Write { number: 1, last: others };
            assert_eq!(gate.take(1, CutNews::Staged(1)), Some(write));
            gate.take(0, CutNews::Written(1));
            gate.take(1, CutNews::Written(1));
            assert_eq!(gate.complete(), whole.then_some(1));
        }
    }
}
