//! Clients' flushes on their way to the shards.
//!
//! A client's flush goes to every shard, and each asks for a flush of the device when it hears of
//! it. If the first to ask had its flush sent immediately, the others would be too late for it, and
//! need a second one. So a flush of a device waits for the shards that are about to ask. It waits
//! only until they have looked at their messages, which nothing holds up, and only for those that
//! have something to flush.

use std::sync::Arc;

use forebay_block::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The flushes on their way to each shard. All clones are one.
#[derive(Clone, Debug)]
pub struct Coming(Arc<[Shard]>);

#[derive(Debug, Default)]
struct Shard {
    /// Number of flushes that were sent to it.
    sent: AtomicU64,
    /// Number of those that it has looked at.
    seen: AtomicU64,
    /// It has nothing to flush.
    clean: AtomicBool,
}

/// The last flush on its way to a shard at some moment.
#[derive(Clone, Copy, Debug)]
pub struct Awaited {
    shard: usize,
    /// Its number.
    sent: u64,
}

impl Coming {
    /// Creates it for `shards` shards.
    #[must_use]
    pub fn new(shards: usize) -> Self {
        Self((0..shards).map(|_| Shard::default()).collect())
    }

    /// Counts a flush that is about to be sent to a shard.
    pub fn send(&self, shard: usize) {
        self.0[shard].sent.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that a shard has looked at `count` of them, and has asked for all that they need. Then
    /// call [`crate::FlushGate::seen`] of every device.
    pub fn see(&self, shard: usize, count: u64) {
        self.0[shard].seen.fetch_add(count, Ordering::SeqCst);
    }

    /// Notes whether a shard has written anything that it has not flushed. A wrong answer costs a
    /// flush or a little time, and nothing else.
    pub fn note_unflushed(&self, shard: usize, has_some: bool) {
        self.0[shard].clean.store(!has_some, Ordering::Relaxed);
    }

    /// The flushes that shards with something to flush have not looked at.
    pub(crate) fn awaited(&self) -> Vec<Awaited> {
        let some = |(shard, at): (usize, &Shard)| {
            let sent = at.sent.load(Ordering::SeqCst);
            let is_late = at.seen.load(Ordering::SeqCst) < sent;
            (is_late && !at.clean.load(Ordering::Relaxed)).then_some(Awaited { shard, sent })
        };
        self.0.iter().enumerate().filter_map(some).collect()
    }

    /// Whether the shard has looked at it.
    pub(crate) fn has_seen(&self, awaited: Awaited) -> bool {
        self.0[awaited.shard].seen.load(Ordering::SeqCst) >= awaited.sent
    }
}
