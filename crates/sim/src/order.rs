//! The loss of the cache device of ordered volumes: each primary must be left at a moment of the
//! past, a state that a plain disk could have after a power failure ([`forebay_model::History`]).
//!
//! The server lives on, and brings the cut that it has in memory to the primaries. The loss of
//! server and cache device together is survived only while no cut is being written.

use forebay_model::Moments;

use crate::disk::SLOWER;
use crate::failure::Kind;
use crate::run::SECOND;
use crate::world::{Failure, World};

/// Virtual time in which a cut must be on the primary after the loss.
const WRITTEN_MAX: u64 = 120 * SECOND;
/// Greatest age of a primary beyond the write-cache depth, without a fault: the time in which a
/// disk writes two cuts.
const LATE_MAX: u64 = SECOND / 4;
/// Requests in a cut that wait for each other and may be slow: a write and two flushes.
const SLOW_FLUSHES: u64 = 2;

impl World {
    /// Ends a run whose cache device was lost.
    pub(crate) fn finish_without_cache(&mut self) -> Result<(), Failure> {
        self.settle()?;
        let since = self.now;
        while self.is_writing() {
            if !self.event()? || self.now > since + WRITTEN_MAX {
                return Err(self.fail(Kind::Stuck, "a cut is not written after the loss"));
            }
        }
        let promised = self.is_promised();
        self.cut();
        self.judge(&promised)
    }

    /// Whether a cut is on its way to a primary.
    fn is_writing(&self) -> bool {
        let serves = self.server.is_some();
        serves && self.cut_gates.iter().any(forebay_volume::CutGate::is_writing)
    }

    /// For each volume, whether its primary alone is promised to be a state of one moment: while no
    /// cut is being written, from the first cut after a start on. Nothing was dirty at the first
    /// start.
    pub(crate) fn is_promised(&self) -> Vec<bool> {
        let first = self.tally.starts == 1;
        let gates = self.cut_gates.iter();
        gates.map(|gate| !gate.is_writing() && (first || gate.complete().is_some())).collect()
    }

    /// Judges the primaries of ordered volumes after a loss.
    pub(crate) fn judge(&mut self, promised: &[bool]) -> Result<(), Failure> {
        for (volume, &is_promised) in promised.iter().enumerate() {
            match is_promised {
                true => self.judge_volume(volume)?,
                false => self.tally.ends[2] += u64::from(self.histories[volume].is_some()),
            }
        }
        Ok(())
    }

    /// Judges the primaries that have just got the last block of a cut, as if server and device
    /// were lost now.
    pub(crate) fn judge_cuts(&mut self) -> Result<(), Failure> {
        let volumes = std::mem::take(&mut self.cuts_written);
        volumes.into_iter().try_for_each(|volume| self.judge_volume(volume))
    }

    /// The time that has passed since an ordered volume was last as its primary is now, without
    /// power; `None` if the volume is still so.
    pub(crate) fn age_of_primary(&self, volume: usize) -> Result<Option<u64>, Failure> {
        let Some(history) = &self.histories[volume] else { return Ok(None) };
        let windows = &self.setup.volumes[volume].windows;
        let verdict = history.judge(windows, |range| self.stored(volume, range));
        let Moments { latest, is_current } = verdict.map_err(|violation| {
            self.fail(Kind::Alone, format!("no state of one moment: {violation}"))
        })?;
        Ok((!is_current).then(|| self.now.saturating_sub(latest)))
    }

    fn judge_volume(&mut self, volume: usize) -> Result<(), Failure> {
        if self.histories[volume].is_none() {
            return Ok(());
        }
        self.tally.ends[0] += 1;
        if let Some(age) = self.age_of_primary(volume)? {
            self.tally.ends[1] += 1;
            self.tally.oldest = self.tally.oldest.max(age);
            let depth = self.setup.write_cache_depth.as_nanos() as u64;
            let disk = &self.setup.primary;
            let slow = (disk.latency.1 + SLOW_FLUSHES * disk.flush.1) * SLOWER * 2;
            let late_max = LATE_MAX + if disk.slow_percent == 0 { 0 } else { slow };
            let bound = self.setup.volumes[volume].pace.rate.is_some();
            if !self.was_broken && !bound && age > depth + late_max {
                let age = age / 1_000_000;
                return Err(self.fail(Kind::Alone, format!("the primary is {age} ms old")));
            }
        }
        Ok(())
    }
}
