//! Flushes of one device that several shards use: a failure is reported to every shard.
//!
//! A failed flush may have lost data that any shard wrote, and the device reports the failure only
//! once. So a flush of one shard must not succeed when a flush of another shard has just failed:
//! all flushes requested before the failure is known fail with it. Every shard is told, since its
//! unflushed writes may be lost too.
//!
//! Flushes go in rounds. Flushes requested during a round wait and form the next one, which covers
//! everything written before it is sent. Where a flush covers all queues of the device, a round is
//! one flush for all shards. Where it covers only its own queue, as on the connections of an NBD
//! server, each shard of the round sends its own, and all are answered when the last has ended.
//!
//! A round waits for shards that are about to request a flush ([`Coming`]), so that one flush of
//! the device serves all shards of a client's flush.

use std::mem;
use std::sync::Arc;

use forebay_block::sync::atomic::{AtomicU64, Ordering};
use forebay_block::{IoError, IoResult, IoTag};

use crate::coming::{Awaited, Coming};

/// A flush that a shard requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    /// The requesting shard.
    pub shard: usize,
    /// The shard's tag for the flush.
    pub tag: IoTag,
}

/// The answer to [`FlushGate::ask`].
#[derive(Debug)]
pub enum Ask {
    /// Send a flush to the device now.
    Send,
    /// Do nothing: [`FlushGate::ended`] answers the flush.
    Wait,
    /// Answer the flush with this error: another flush failed, and the shard has not been told yet.
    Fail(IoError),
}

/// The consequences of a device's answer.
#[derive(Debug)]
pub struct Ended {
    /// The flushes of the round, once all of them have ended; empty before.
    pub answered: Vec<Asked>,
    /// Their common result. After a failure, tell every shard, and call [`FlushGate::told`] for
    /// each when it knows.
    pub result: IoResult<()>,
    /// Shards that must send a flush to the device now.
    pub send: Vec<usize>,
}

/// Number of failed flushes of a device. All clones share the counter.
#[derive(Clone, Debug, Default)]
pub struct FailedFlushes(Arc<AtomicU64>);

impl FailedFlushes {
    /// The number so far. It grows before any shard is told of the failure.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn add_one(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The gate that all flushes of one device pass.
#[derive(Debug)]
pub struct FlushGate {
    /// A flush covers only the queue that it is sent to.
    by_queue: bool,
    /// The flushes of the current round.
    running: Vec<Asked>,
    /// Flushes of the round that the device has not answered yet.
    sent: usize,
    /// The first failure in the round.
    error: Option<IoError>,
    waiting: Vec<Asked>,
    coming: Coming,
    /// The flushes on their way that the next round waits for. Not empty only between rounds.
    held: Vec<Awaited>,
    /// For each shard, the failure that it has not been told of.
    untold: Vec<Option<IoError>>,
    failed: FailedFlushes,
}

impl FlushGate {
    /// Creates a gate for `shards` shards. `by_queue`: a flush covers only writes completed on the
    /// queue that it is sent to. `coming`: the clients' flushes on their way to the shards.
    #[must_use]
    pub fn new(shards: usize, by_queue: bool, coming: Coming) -> Self {
        Self {
            by_queue,
            running: Vec::new(),
            sent: 0,
            error: None,
            waiting: Vec::new(),
            coming,
            held: Vec::new(),
            untold: vec![None; shards],
            failed: FailedFlushes::default(),
        }
    }

    /// Takes a shard's request for a flush.
    pub fn ask(&mut self, asked: Asked) -> Ask {
        if let Some(error) = &self.untold[asked.shard] {
            return Ask::Fail(error.clone());
        }
        if self.running.is_empty() && self.held.is_empty() {
            self.held = self.coming.awaited();
            if self.held.is_empty() {
                self.running.push(asked);
                self.sent = 1;
                return Ask::Send;
            }
        }
        self.waiting.push(asked);
        Ask::Wait
    }

    /// Notes that a shard has looked at flushes on their way to it; returns the shards that must
    /// send a flush to the device now.
    pub fn seen(&mut self, shard: usize) -> Vec<usize> {
        if self.held.is_empty() {
            return Vec::new();
        }
        self.held.retain(|&awaited| !self.coming.has_seen(awaited));
        if self.held.is_empty() { self.begin(shard) } else { Vec::new() }
    }

    /// Begins a round with the waiting flushes; returns the shards that must send a flush to the
    /// device now: `shard` if one is enough for all.
    fn begin(&mut self, shard: usize) -> Vec<usize> {
        self.running = mem::take(&mut self.waiting);
        let mut send: Vec<usize> = self.running.iter().map(|asked| asked.shard).collect();
        send.sort_unstable();
        send.dedup();
        if !self.by_queue && !send.is_empty() {
            send = vec![shard];
        }
        self.sent = send.len();
        send
    }

    /// Takes the device's answer to the flush that `shard` sent.
    ///
    /// # Panics
    /// If no flush is under way.
    pub fn ended(&mut self, shard: usize, result: &IoResult<()>) -> Ended {
        assert!(self.sent > 0, "a flush ends that was sent");
        self.sent -= 1;
        if let Err(error) = result {
            self.error.get_or_insert_with(|| error.clone());
        }
        if self.sent > 0 {
            return Ended { answered: Vec::new(), result: Ok(()), send: Vec::new() };
        }
        let mut answered = mem::take(&mut self.running);
        if let Some(error) = self.error.take() {
            answered.append(&mut self.waiting);
            self.untold.fill(Some(error.clone()));
            self.failed.add_one();
            return Ended { answered, result: Err(error), send: Vec::new() };
        }
        if !self.waiting.is_empty() {
            self.held = self.coming.awaited();
        }
        let send = if self.held.is_empty() { self.begin(shard) } else { Vec::new() };
        Ended { answered, result: Ok(()), send }
    }

    /// Whether a flush has ever failed: then the device may show data that a power failure would
    /// take.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.count() > 0
    }

    /// The counter of failures: each failure that every shard is told of counts once.
    #[must_use]
    pub fn failed(&self) -> FailedFlushes {
        self.failed.clone()
    }

    /// The shard knows of the failure: its flushes may succeed again.
    pub fn told(&mut self, shard: usize) {
        self.untold[shard] = None;
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::ErrorKind;

    use super::*;

    fn asked(shard: usize, tag: u64) -> Asked {
        Asked { shard, tag: IoTag(tag) }
    }

    #[test]
    fn those_who_come_late_share_the_next() {
        let mut gate = FlushGate::new(3, false, Coming::new(3));
        assert!(matches!(gate.ask(asked(0, 1)), Ask::Send));
        assert!(matches!(gate.ask(asked(1, 1)), Ask::Wait));
        assert!(matches!(gate.ask(asked(2, 9)), Ask::Wait));
        let ended = gate.ended(0, &Ok(()));
        assert_eq!((ended.answered, ended.send), (vec![asked(0, 1)], vec![0]));
        assert!(matches!(gate.ask(asked(0, 2)), Ask::Wait));
        let ended = gate.ended(0, &Ok(()));
        assert_eq!((ended.answered, ended.send), (vec![asked(1, 1), asked(2, 9)], vec![0]));
        assert!(gate.ended(0, &Ok(())).send.is_empty() && !gate.has_failed());
        assert!(matches!(gate.ask(asked(1, 2)), Ask::Send));
    }

    #[test]
    fn where_each_queue_is_flushed_by_itself_everyone_sends_and_all_wait_for_all() {
        let mut gate = FlushGate::new(3, true, Coming::new(3));
        assert!(matches!(gate.ask(asked(0, 1)), Ask::Send));
        for (shard, tag) in [(2, 9), (1, 1), (2, 10)] {
            assert!(matches!(gate.ask(asked(shard, tag)), Ask::Wait));
        }
        let ended = gate.ended(0, &Ok(()));
        assert_eq!((ended.answered, ended.send), (vec![asked(0, 1)], vec![1, 2]));
        let ended = gate.ended(2, &Ok(()));
        assert!(ended.answered.is_empty() && ended.send.is_empty());
        let ended = gate.ended(1, &Err(ErrorKind::DeviceGone.into()));
        assert_eq!(ended.answered, [asked(2, 9), asked(1, 1), asked(2, 10)]);
        assert!(ended.result.is_err() && ended.send.is_empty());
        assert!(matches!(gate.ask(asked(0, 2)), Ask::Fail(_)), "not told yet");
    }

    #[test]
    fn a_failure_is_everybodys_until_they_know() {
        let mut gate = FlushGate::new(2, false, Coming::new(2));
        assert!(matches!(gate.ask(asked(0, 1)), Ask::Send));
        assert!(matches!(gate.ask(asked(1, 1)), Ask::Wait));
        let ended = gate.ended(0, &Err(ErrorKind::Media.into()));
        assert_eq!(ended.answered, [asked(0, 1), asked(1, 1)]);
        assert!(ended.result.is_err() && ended.send.is_empty() && gate.has_failed());
        for shard in 0..2 {
            assert!(matches!(gate.ask(asked(shard, 2)), Ask::Fail(_)), "not told yet");
            gate.told(shard);
        }
        assert!(matches!(gate.ask(asked(1, 3)), Ask::Send));
    }

    #[test]
    fn a_round_waits_for_those_who_have_yet_to_look() {
        let coming = Coming::new(3);
        let mut gate = FlushGate::new(3, false, coming.clone());
        coming.send(1);
        coming.send(2);
        assert!(matches!(gate.ask(asked(0, 1)), Ask::Wait));
        assert!(matches!(gate.ask(asked(1, 1)), Ask::Wait));
        // What comes later is not waited for.
        coming.send(1);
        coming.see(1, 1);
        assert!(gate.seen(1).is_empty());
        coming.see(2, 1);
        assert_eq!(gate.seen(2), [2], "the last to look sends one flush for all");
        assert!(matches!(gate.ask(asked(2, 5)), Ask::Wait));
        let ended = gate.ended(2, &Ok(()));
        assert_eq!((ended.answered, ended.send), (vec![asked(0, 1), asked(1, 1)], vec![]));
        coming.see(1, 1);
        assert_eq!(gate.seen(1), [1]);
        assert_eq!(gate.ended(1, &Ok(())).answered, [asked(2, 5)]);
    }

    #[test]
    fn a_round_does_not_wait_for_those_with_nothing_to_flush() {
        let coming = Coming::new(2);
        let mut gate = FlushGate::new(2, false, coming.clone());
        coming.note_unflushed(1, false);
        coming.send(1);
        assert!(matches!(gate.ask(asked(0, 1)), Ask::Send));
        assert!(gate.ended(0, &Ok(())).send.is_empty());
        coming.note_unflushed(1, true);
        assert!(matches!(gate.ask(asked(0, 2)), Ask::Wait));
    }
}
