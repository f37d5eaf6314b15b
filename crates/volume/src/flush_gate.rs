//! Flushes of one device that several shards use: a failure is everybody's.
//!
//! A flush that fails may have given up what any shard wrote, and the device does not say so
//! again. So a flush of one shard must not count as good when that of another failed meanwhile:
//! all that are asked for before a failure is known fail with it, and every shard is told, since
//! what it wrote and has not had flushed may be lost too.
//!
//! Flushes go in rounds. While one is under way those that are asked for wait, and are the next:
//! it covers what was written before it was sent. Where a flush covers all queues of the device, a
//! round is one flush for all. Where it covers only its own queue, as with the connections of an
//! NBD server, each shard of the round sends its own, and all are answered when all have ended.

use std::mem;
use std::sync::Arc;

use forebay_block::sync::atomic::{AtomicU64, Ordering};
use forebay_block::{IoError, IoResult, IoTag};

/// A shard's flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    /// The shard.
    pub shard: usize,
    /// The shard's name for it.
    pub tag: IoTag,
}

/// What to do with a flush that is asked for.
#[derive(Debug)]
pub enum Ask {
    /// Send one to the device.
    Send,
    /// Nothing: it is answered by [`FlushGate::ended`].
    Wait,
    /// Answer with this error: the shard has not been told yet that another one failed.
    Fail(IoError),
}

/// What to do when the device has answered.
#[derive(Debug)]
pub struct Ended {
    /// Flushes that have ended, and how; none while others of the round are under way.
    pub answered: Vec<Asked>,
    /// How they ended. After a failure tell every shard; each is [`FlushGate::told`] when it
    /// knows.
    pub result: IoResult<()>,
    /// Shards that are to send a flush to the device now.
    pub send: Vec<usize>,
}

/// How many flushes of a device have failed. All copies show the same.
#[derive(Clone, Debug, Default)]
pub struct FailedFlushes(Arc<AtomicU64>);

impl FailedFlushes {
    /// The count. It grows before anyone is told of the failure.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn add_one(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The flushes of one device.
#[derive(Debug)]
pub struct FlushGate {
    /// Each queue of the device is flushed by itself.
    by_queue: bool,
    /// The present round.
    running: Vec<Asked>,
    /// Flushes of it that the device has.
    sent: usize,
    /// The first failure in it.
    error: Option<IoError>,
    waiting: Vec<Asked>,
    /// By shard: the failure it has not been told of.
    untold: Vec<Option<IoError>>,
    failed: FailedFlushes,
}

impl FlushGate {
    /// A gate for this many shards. `by_queue`: a flush covers only what was completed on the
    /// queue that it is sent to.
    #[must_use]
    pub fn new(shards: usize, by_queue: bool) -> Self {
        Self {
            by_queue,
            running: Vec::new(),
            sent: 0,
            error: None,
            waiting: Vec::new(),
            untold: vec![None; shards],
            failed: FailedFlushes::default(),
        }
    }

    /// A shard wants a flush.
    pub fn ask(&mut self, asked: Asked) -> Ask {
        if let Some(error) = &self.untold[asked.shard] {
            return Ask::Fail(error.clone());
        }
        if self.running.is_empty() {
            self.running.push(asked);
            self.sent = 1;
            return Ask::Send;
        }
        self.waiting.push(asked);
        Ask::Wait
    }

    /// The device has answered the flush that `shard` sent.
    ///
    /// # Panics
    /// If none is under way.
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
        let result = match self.error.take() {
            None => {
                self.running = mem::take(&mut self.waiting);
                Ok(())
            }
            Some(error) => {
                answered.append(&mut self.waiting);
                self.untold.fill(Some(error.clone()));
                self.failed.add_one();
                Err(error)
            }
        };
        let mut send: Vec<usize> = self.running.iter().map(|asked| asked.shard).collect();
        send.sort_unstable();
        send.dedup();
        if !self.by_queue && !send.is_empty() {
            send = vec![shard];
        }
        self.sent = send.len();
        Ended { answered, result, send }
    }

    /// Whether a flush has ever failed: then the device may show what power failure takes from it.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.count() > 0
    }

    /// Counts the failures: one for each time that every shard is told.
    #[must_use]
    pub fn failed(&self) -> FailedFlushes {
        self.failed.clone()
    }

    /// A shard knows of the failure: its flushes count again.
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
        let mut gate = FlushGate::new(3, false);
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
        let mut gate = FlushGate::new(3, true);
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
        let mut gate = FlushGate::new(2, false);
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
}
