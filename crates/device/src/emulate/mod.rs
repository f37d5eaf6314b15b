//! A disk model over any device: the data is transferred at once on the device below, and each
//! completion is delayed until the modeled device would have finished. For evaluation without
//! disks; the figures are in `docs/user/emulation.md` and do not change.

mod model;
mod spindle;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_block::{Completion, DeviceInfo, Instant, Io, IoQueue, IoTag};

use crate::device::BlockDevice;
use crate::layer::{Layer, Layered};
use model::{Model, Ticket};

/// A device that can be emulated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Profile {
    /// One disk of 7,200 turns a minute.
    Hdd,
    /// Four such disks: two mirrored pairs, striped.
    Raid10x4,
    /// Five such disks, one of them for parity.
    Raid5x5,
    /// The mirrored array behind a network.
    San,
    /// A cloud volume with limits on operations and bytes per second.
    Cloud,
}

impl Profile {
    /// Every profile with its name.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("hdd", Self::Hdd),
        ("raid10x4", Self::Raid10x4),
        ("raid5x5", Self::Raid5x5),
        ("san", Self::San),
        ("cloud", Self::Cloud),
    ];

    /// The profile with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, profile)| profile)
    }
}

/// A device with the timing of another.
pub type EmulatedDevice = Layered<Emulation>;

/// The model of a device that all queues share.
pub struct Emulation {
    info: DeviceInfo,
    shared: Arc<Mutex<Shared>>,
}

/// The model, and for each queue the ends that another queue's thread found.
struct Shared {
    model: Model,
    /// The latest time seen by any thread; their clock readings differ slightly.
    now: Instant,
    ended: Vec<Ticket>,
    /// For each queue the ends found for it; `None` if the queue does not exist.
    queues: Vec<Option<Vec<u64>>>,
}

impl EmulatedDevice {
    /// Gives `below` the timing of `profile`; `seed` sets the initial angle of its platters.
    #[must_use]
    pub fn new(below: Arc<dyn BlockDevice>, profile: Profile, seed: u64) -> Self {
        let mut info = below.info().clone();
        info.rotational = profile != Profile::Cloud;
        info.fast_zero = false;
        match profile {
            Profile::Raid10x4 | Profile::San => info.optimal_io = model::STRIPE_UNIT as u32,
            Profile::Raid5x5 => info.optimal_io = model::FULL_STRIPE as u32,
            Profile::Hdd | Profile::Cloud => {}
        }
        let shared = Shared {
            model: Model::new(profile, info.size, seed),
            now: Instant(0),
            ended: Vec::new(),
            queues: Vec::new(),
        };
        let layer = Emulation { info, shared: Arc::new(Mutex::new(shared)) };
        Self { below, layer }
    }
}

impl Layer for Emulation {
    fn info<'a>(&'a self, _: &'a DeviceInfo) -> &'a DeviceInfo {
        &self.info
    }

    fn queue(&self, below: Box<dyn IoQueue>) -> Box<dyn IoQueue> {
        let mut shared = locked(&self.shared);
        let id = shared.queues.iter().position(Option::is_none).unwrap_or_else(|| {
            shared.queues.push(None);
            shared.queues.len() - 1
        });
        shared.queues[id] = Some(Vec::new());
        Box::new(EmulatedQueue {
            inner: below,
            info: self.info.clone(),
            shared: Arc::clone(&self.shared),
            id,
            held: Vec::new(),
            free: Vec::new(),
            done: Vec::new(),
            due: Vec::new(),
        })
    }
}

/// Poisoning is ignored: each change of the model is one call, so a panic elsewhere leaves it
/// consistent.
fn locked(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Advances the model to `now`, and distributes the ended requests to their queues.
    fn advance(&mut self, now: Instant) {
        self.now = self.now.max(now);
        self.model.ended(self.now, &mut self.ended);
        for (queue, slot) in self.ended.drain(..) {
            if let Some(ends) = &mut self.queues[queue] {
                ends.push(slot);
            }
        }
    }
}

struct EmulatedQueue {
    inner: Box<dyn IoQueue>,
    info: DeviceInfo,
    shared: Arc<Mutex<Shared>>,
    id: usize,
    held: Vec<Held>,
    free: Vec<usize>,
    /// Scratch space; empty between uses, like `due`.
    done: Vec<Completion>,
    due: Vec<u64>,
}

/// A request: it completes when the device below is done and its modeled time has come.
#[derive(Default)]
struct Held {
    tag: IoTag,
    done: Option<Completion>,
    due: bool,
}

impl IoQueue for EmulatedQueue {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, now: Instant, mut io: Io) -> Result<(), Io> {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.held.push(Held::default());
            self.held.len() - 1
        });
        let (tag, op, range) = (io.tag, io.op, io.range);
        let refused = crate::device::check(&self.info, &io).is_err();
        io.tag = IoTag(slot as u64);
        if let Err(mut io) = self.inner.submit(now, io) {
            io.tag = tag;
            self.free.push(slot);
            return Err(io);
        }
        // A request that the device below refuses takes no time.
        self.held[slot] = Held { tag, done: None, due: refused };
        if !refused {
            let mut shared = locked(&self.shared);
            shared.advance(now);
            let arrival = shared.now;
            shared.model.submit(arrival, (self.id, slot as u64), op, range);
        }
        Ok(())
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        let mut shared = locked(&self.shared);
        shared.advance(now);
        if let Some(ends) = &mut shared.queues[self.id] {
            self.due.append(ends);
        }
        drop(shared);
        let mut due = std::mem::take(&mut self.due);
        for slot in due.drain(..) {
            self.held[slot as usize].due = true;
            self.release(slot as usize, done);
        }
        self.due = due;
        let mut below = std::mem::take(&mut self.done);
        self.inner.poll(now, &mut below);
        for completion in below.drain(..) {
            let slot = completion.tag.0 as usize;
            self.held[slot].done = Some(completion);
            self.release(slot, done);
        }
        self.done = below;
    }

    fn deadline(&self) -> Option<Instant> {
        let below = self.inner.deadline();
        if self.held.len() == self.free.len() {
            return below;
        }
        let shared = locked(&self.shared);
        let event = shared.model.next_event();
        // Another thread may have found the end of a request of this queue.
        let found = shared.queues[self.id].as_ref().is_some_and(|ends| !ends.is_empty());
        let found = found.then_some(Instant(0));
        below.into_iter().chain(event).chain(found).min()
    }
}

impl EmulatedQueue {
    /// Passes a completion up once both of its conditions hold.
    fn release(&mut self, slot: usize, done: &mut Vec<Completion>) {
        let held = &mut self.held[slot];
        if !held.due {
            return;
        }
        if let Some(mut completion) = held.done.take() {
            completion.tag = held.tag;
            held.due = false;
            self.free.push(slot);
            done.push(completion);
        }
    }
}

impl Drop for EmulatedQueue {
    fn drop(&mut self) {
        locked(&self.shared).queues[self.id] = None;
    }
}

#[cfg(test)]
mod tests;
