//! Flushes of one device that several shards use: one at a time, and a failure is everybody's.
//!
//! A flush that fails may have given up what any shard wrote, and the device does not say so
//! again. So a flush of one shard must not count as good when that of another failed meanwhile:
//! all that are asked for before a failure is known fail with it, and every shard is told, since
//! what it wrote and has not had flushed may be lost too. While one is under way those that are
//! asked for wait, and share the next: it covers what was written before it was sent.

use std::mem;

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
    /// Flushes that have ended as the device's did.
    pub answered: Vec<Asked>,
    /// Send another one to the device.
    pub again: bool,
    /// Tell every shard that a flush failed; each is [`FlushGate::told`] when it knows.
    pub failed: bool,
}

/// The flushes of one device.
#[derive(Debug)]
pub struct FlushGate {
    running: Vec<Asked>,
    waiting: Vec<Asked>,
    /// By shard: the failure it has not been told of.
    untold: Vec<Option<IoError>>,
    has_failed: bool,
}

impl FlushGate {
    /// A gate for so many shards.
    #[must_use]
    pub fn new(shards: usize) -> Self {
        Self {
            running: Vec::new(),
            waiting: Vec::new(),
            untold: vec![None; shards],
            has_failed: false,
        }
    }

    /// A shard wants a flush.
    pub fn ask(&mut self, asked: Asked) -> Ask {
        if let Some(error) = &self.untold[asked.shard] {
            return Ask::Fail(error.clone());
        }
        if self.running.is_empty() {
            self.running.push(asked);
            return Ask::Send;
        }
        self.waiting.push(asked);
        Ask::Wait
    }

    /// The device has answered.
    pub fn ended(&mut self, result: &IoResult<()>) -> Ended {
        let mut answered = mem::take(&mut self.running);
        let failed = match result {
            Ok(()) => {
                self.running = mem::take(&mut self.waiting);
                false
            }
            Err(error) => {
                answered.append(&mut self.waiting);
                self.untold.fill(Some(error.clone()));
                self.has_failed = true;
                true
            }
        };
        Ended { answered, again: !self.running.is_empty(), failed }
    }

    /// Whether a flush has ever failed: then the device may show what power failure takes from it.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.has_failed
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
        let mut gate = FlushGate::new(3);
        assert!(matches!(gate.ask(asked(0, 1)), Ask::Send));
        assert!(matches!(gate.ask(asked(1, 1)), Ask::Wait));
        assert!(matches!(gate.ask(asked(2, 9)), Ask::Wait));
        let ended = gate.ended(&Ok(()));
        assert_eq!((ended.answered, ended.again, ended.failed), (vec![asked(0, 1)], true, false));
        assert!(matches!(gate.ask(asked(0, 2)), Ask::Wait));
        let ended = gate.ended(&Ok(()));
        assert_eq!((ended.answered, ended.again), (vec![asked(1, 1), asked(2, 9)], true));
        assert!(!gate.ended(&Ok(())).again && !gate.has_failed());
        assert!(matches!(gate.ask(asked(1, 2)), Ask::Send));
    }

    #[test]
    fn a_failure_is_everybodys_until_they_know() {
        let mut gate = FlushGate::new(2);
        assert!(matches!(gate.ask(asked(0, 1)), Ask::Send));
        assert!(matches!(gate.ask(asked(1, 1)), Ask::Wait));
        let ended = gate.ended(&Err(ErrorKind::Media.into()));
        assert_eq!(ended.answered, [asked(0, 1), asked(1, 1)]);
        assert!(ended.failed && !ended.again && gate.has_failed());
        for shard in 0..2 {
            assert!(matches!(gate.ask(asked(shard, 2)), Ask::Fail(_)), "not told yet");
            gate.told(shard);
        }
        assert!(matches!(gate.ask(asked(1, 3)), Ask::Send));
    }
}
