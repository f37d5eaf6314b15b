//! What RAM alone has: a miss brings blocks into RAM first, and they enter the log when their place
//! there is wanted, if they are worth it by then ([`forebay_policy::Window`]).
//!
//! Where RAM has room for all that comes, nothing would ever leave it. So that a crash or a restart
//! costs what the last minute's misses brought in, not more, every place is looked at now and then.

use std::ops::Range;
use std::time::Duration;

use forebay_block::BLOCK_SIZE;
use forebay_policy::Window;

use crate::api::{Effects, Health};
use crate::cache::Cache;
use crate::contents::Index;
use crate::contents::block_of;
use crate::key::Key;
use crate::locks::Locks;
use crate::ram::Round;

/// In so much time every place of the RAM tier is looked at, while there is anything to look for.
const ROUND: Duration = Duration::from_secs(60);
/// Places looked at in one turn of the event loop.
const PLACES_MAX: u64 = 1024;
/// How often, where nothing else happens.
pub const ROUND_TICK: Duration = Duration::from_millis(100);

impl Cache {
    /// Before a block gets a place in RAM: what loses its place for it enters the log, if it is
    /// not there and worth it.
    pub(crate) fn make_way(&mut self, key: Key, fx: &mut Effects) {
        if self.ram.has_room_for(key) {
            return;
        }
        let (index, locks) = (self.contents.index(), &self.locks);
        let run = self.ram.leaving(|key| is_alone(index, locks, key));
        let blocks = run.end - run.start;
        if blocks > 0 && !self.weigh(run, fx) {
            self.stats.unadmitted_blocks += blocks;
        }
    }

    /// Looks at the next places of the RAM tier for what has been there alone for long.
    pub(crate) fn pump_alone(&mut self, fx: &mut Effects) {
        let Some(Round { since, place: from }) = self.ram.alone().round(self.now) else { return };
        let frames = self.ram.frames() as u64;
        let so_far = self.now.since(since).as_millis() * u128::from(frames) / ROUND.as_millis();
        let due = u64::try_from(so_far).unwrap_or(frames).min(frames).min(from + PLACES_MAX);
        let (mut place, mut weighed) = (from, 0..0);
        while place < due && !self.form.background().turn_is_over() {
            let (recent, index, locks) = (self.ram.recent(), self.contents.index(), &self.locks);
            let alone = |key: u64| is_alone(index, locks, key);
            let at = u32::try_from(place).expect("places have 32 bits");
            if let Some(key) = recent.at(at).filter(|&key| !weighed.contains(&key) && alone(key)) {
                weighed = Window::around(recent, key, at, alone);
                self.weigh(weighed.clone(), fx);
            }
            place += 1;
        }
        let round = (place < frames).then_some(Round { since, place });
        self.ram.alone().set_round(round);
    }

    /// Puts blocks that RAM has alone into the log if they are worth it, and says whether they are.
    fn weigh(&mut self, run: Range<u64>, fx: &mut Effects) -> bool {
        let reads_enter = self.admits_reads(Key(run.start).volume());
        let admits = reads_enter && self.policy.admits(run.clone());
        if admits {
            let mut block = [0; BLOCK_SIZE];
            for key in run.map(Key) {
                // A record that is closed for one of them may let a write go on that takes another
                // one out of RAM.
                let found = self.ram.peek(key, |bytes| block.copy_from_slice(bytes));
                if found.is_some() && is_alone(self.contents.index(), &self.locks, key.0) {
                    self.admit(key, &block, fx);
                }
            }
        }
        admits
    }

    /// Puts a block of the primary into the log, unless writes wait for that, but for the one being
    /// logged.
    pub(crate) fn admit(&mut self, key: Key, block: &[u8], fx: &mut Effects) {
        // What a primary has not flushed it may lose, and must not outlive it as a clean copy.
        let volume = self.volume(key.volume());
        let settled = volume.direct == volume.direct_durable && !volume.flush_failed;
        let admitted = settled
            && self.health() == Health::Good
            && self.has_client_space()
            && self.log.queued() <= 1
            && self.push_admitted(fx, key, block);
        self.stats.admitted_blocks += u64::from(admitted);
    }
}

/// Whether the log lacks a block that RAM has, and nobody is changing it.
fn is_alone(index: &Index, locks: &Locks, key: u64) -> bool {
    let key = Key(key);
    block_of(key) == key && index.get(key).is_none() && !locks.is_locked(key)
}
