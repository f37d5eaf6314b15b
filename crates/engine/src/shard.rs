//! A shard as its drivers see it: the shard threads and the simulator.

use std::time::Duration;

use forebay_block::{BlockRange, Completion, Instant, IoError, VolumeId};
use forebay_format::Lsn;

use crate::api::cut::CutOrder;
use crate::api::listing::Listing;
use crate::api::{DetachedStripe, Effects, Health, Request, Setting, State, Target, Trust};
use crate::{Stats, VolumeState};

/// A shard: a state machine that is handed requests, completions and the time, and returns the
/// actions to carry out in [`Effects`].
pub trait Shard {
    /// Starts the shard. It accepts requests once its state is serving.
    fn start(&mut self, now: Instant, fx: &mut Effects);
    /// Announces the requests that will be submitted next: the shard may prefetch memory for them,
    /// and does nothing else.
    fn warm(&self, _requests: &[Request]) {}
    /// Takes a request.
    fn submit(&mut self, now: Instant, request: Request, fx: &mut Effects);
    /// Takes the completion of an I/O that the shard requested.
    fn complete(&mut self, now: Instant, target: Target, done: Completion, fx: &mut Effects);
    /// Notes that the thread has had nothing to do for this time since the last note. Work that no
    /// client waits for may take a part of it.
    fn rested(&mut self, _rest: Duration) {}
    /// Called once a turn, after all the requests and completions of that turn.
    fn poll(&mut self, now: Instant, fx: &mut Effects);
    /// Accepts no new requests, finishes those it has, and makes everything durable.
    fn stop(&mut self, now: Instant, fx: &mut Effects);
    /// Returns the stage of the shard's life.
    fn state(&self) -> &State;
    /// Returns the health of the cache device.
    fn health(&self) -> Health;
    /// Verifies the invariants that hold between calls, for the simulator.
    ///
    /// # Errors
    /// Describes the invariant that is violated.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
    /// Returns counters and levels.
    fn stats(&self, now: Instant) -> Stats;
    /// Turns immediate destaging of everything dirty on or off.
    fn set_drain(&mut self, on: bool);
    /// Turns immediate destaging of one volume on or off; does nothing in a shard without dirty
    /// blocks.
    fn drain_volume(&mut self, _volume: VolumeId, _on: bool) {}
    /// Returns the number of blocks that are newer in the cache than on their primary.
    fn dirty_blocks(&self) -> u64;
    /// Returns the state of each volume; empty if the shard does not track it.
    fn volumes(&self, _now: Instant) -> Vec<VolumeState> {
        Vec::new()
    }
    /// Whether a client's flush would have to wait for a device; may say yes without need.
    fn has_unflushed(&self) -> bool {
        true
    }
    /// The volumes of which completed writes were lost and no flush has been told so, a bit for
    /// each id. Whoever serves after this shard must know.
    fn untold(&self) -> u64 {
        0
    }
    /// The last record of a log that an orderly stop has ended; zero if it was not ended, or there
    /// is none.
    fn log_end(&self) -> Lsn {
        Lsn(0)
    }
    /// Returns the number of dirty blocks that cannot be read back.
    fn lost_blocks(&self) -> u64 {
        0
    }
    /// Gives up the cache device as if it had failed, although it works: its dirty blocks go to the
    /// primaries, nothing more is written to it, and the pool goes on without it. Tell one shard:
    /// the others follow when that is recorded. Does nothing in a shard without a cache.
    fn retire(&mut self) {}
    /// Returns the cached blocks, clean and dirty, from a point of the list on, which begins at 0;
    /// none in a shard without a cache.
    fn list(&self, _from: u64) -> Listing {
        Listing::default()
    }
    /// Replaces the blocks of a volume that stay in the cache; does nothing in a shard without one.
    fn pin(&mut self, _volume: VolumeId, _blocks: &[BlockRange]) {}
    /// Changes a setting for requests from now on; does nothing if the shard has no use for it.
    fn set(&mut self, setting: Setting);
    /// Notes that this level of trust in the cache device has been recorded for the whole pool;
    /// another shard may have requested it with [`Effects::record_trust`].
    fn trust_recorded(&mut self, now: Instant, trust: Trust, fx: &mut Effects);
    /// Notes that these stripes have been recorded as requested by [`Effects::detach`].
    fn detached(&mut self, _now: Instant, _stripes: &[DetachedStripe], _fx: &mut Effects) {}
    /// Follows an order of the gate of an ordered volume: see [`Effects::cuts`].
    fn cut(&mut self, _now: Instant, _volume: VolumeId, _order: CutOrder, _fx: &mut Effects) {}
    /// Notes that another shard found the volume's primary changed without the cache.
    fn distrust(&mut self, _volume: VolumeId) {}
    /// Notes that a flush of a device failed, no matter which shard sent it. Writes of this shard
    /// that the device has not flushed may be lost too, and its next flush would not report that.
    /// Called once per failure, after the completions of everything that the device completed
    /// earlier.
    fn flush_failed(&mut self, now: Instant, target: Target, error: &IoError, fx: &mut Effects);
}
