//! A shard as those see it who drive it: threads, and the simulator.

use forebay_block::{Completion, Instant, IoError, VolumeId};

use crate::api::{DetachedStripe, Effects, Health, Request, Setting, State, Target, Trust};
use crate::{Stats, VolumeState};

/// A shard: a state machine that is handed requests, completions and the time, and says in
/// [`Effects`] what it wants done.
pub trait Shard {
    /// Begins; requests are taken once the state is serving.
    fn start(&mut self, now: Instant, fx: &mut Effects);
    /// These requests will be submitted next: what they need of memory may be fetched, nothing
    /// else happens.
    fn warm(&self, _requests: &[Request]) {}
    /// Takes a request.
    fn submit(&mut self, now: Instant, request: Request, fx: &mut Effects);
    /// Takes the completion of an I/O it asked for.
    fn complete(&mut self, now: Instant, target: Target, done: Completion, fx: &mut Effects);
    /// Called once a turn, after all the requests and completions of that turn.
    fn poll(&mut self, now: Instant, fx: &mut Effects);
    /// Takes no new requests, finishes what it has, and makes everything durable.
    fn stop(&mut self, now: Instant, fx: &mut Effects);
    /// Where it is in its life.
    fn state(&self) -> &State;
    /// How its cache device is doing.
    fn health(&self) -> Health;
    /// Verifies what holds between calls, for the simulator.
    ///
    /// # Errors
    /// What does not hold.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
    /// Counters and levels.
    fn stats(&self, now: Instant) -> Stats;
    /// Whether to destage all that is dirty, at once.
    fn set_drain(&mut self, on: bool);
    /// The same of one volume; nothing where no block is ever dirty.
    fn drain_volume(&mut self, _volume: VolumeId, _on: bool) {}
    /// Blocks newer in the cache than on their primary.
    fn dirty_blocks(&self) -> u64;
    /// How each volume stands; nothing where that is not known.
    fn volumes(&self) -> Vec<VolumeState> {
        Vec::new()
    }
    /// Dirty blocks that cannot be read back.
    fn lost_blocks(&self) -> u64 {
        0
    }
    /// Changes a setting for the requests from now on; nothing where the shard has no use for it.
    fn set(&mut self, setting: Setting);
    /// So much trust in the cache device is recorded for the whole pool; another shard may have
    /// asked for it with [`Effects::record_trust`].
    fn trust_recorded(&mut self, now: Instant, trust: Trust, fx: &mut Effects);
    /// These stripes are recorded as [`Effects::detach`] asked.
    fn detached(&mut self, _now: Instant, _stripes: &[DetachedStripe], _fx: &mut Effects) {}
    /// Another shard found that the volume's primary was changed without the cache.
    fn distrust(&mut self, _volume: VolumeId) {}
    /// A flush of a device failed, whoever sent it: what this shard has written there and not had
    /// flushed may be lost with the rest, and the next flush would not say so. Called once for each
    /// failure, after the completions of what the device had completed before.
    fn flush_failed(&mut self, now: Instant, target: Target, error: &IoError, fx: &mut Effects);
}
