//! Layers: devices over devices, with the same interface above and below, so that they stack.
//! [`watch`] keeps the records of primaries valid; [`delay`] and [`fault`] are parameters of a URI,
//! for tests and for trying out failures.

pub(crate) mod delay;
pub(crate) mod fault;
pub(crate) mod watch;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::{DeviceInfo, Instant, Io, IoQueue, IoTag, Slab};

use crate::device::BlockDevice;
use crate::layer::watch::Watch;
use crate::ring::Ring;

/// What a layer does to the requests of a queue.
pub trait Layer: Send + Sync {
    /// A queue over one of the device below.
    fn queue(&self, below: Box<dyn IoQueue>) -> Box<dyn IoQueue>;

    /// What the device is with this layer, given what it is without.
    fn info<'a>(&'a self, below: &'a DeviceInfo) -> &'a DeviceInfo {
        below
    }
}

/// A device with a layer over it: in everything else it is the device below.
#[derive(Clone)]
pub struct Layered<L> {
    /// The device below.
    pub(crate) below: Arc<dyn BlockDevice>,
    /// What is done to its requests.
    pub(crate) layer: L,
}

impl<L: Layer> BlockDevice for Layered<L> {
    fn info(&self) -> &DeviceInfo {
        self.layer.info(self.below.info())
    }

    fn remark(&self) -> Option<&str> {
        self.below.remark()
    }

    fn is_away(&self) -> bool {
        self.below.is_away()
    }

    fn keeps_space(&self) -> bool {
        self.below.keeps_space()
    }

    fn await_stragglers(&self) {
        self.below.await_stragglers();
    }

    fn has_stragglers(&self) -> bool {
        self.below.has_stragglers()
    }

    fn recognize_by(&self, record: &Arc<Watch>) {
        self.below.recognize_by(record);
    }

    fn prepare(&self, queues: usize) -> io::Result<()> {
        self.below.prepare(queues)
    }

    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        Ok(self.layer.queue(self.below.open_queue(ring)?))
    }
}

/// Requests that a layer has passed to the device below: for each tag given to that device, the
/// original tag and the layer's own data.
pub(crate) struct Slots<T>(Slab<(IoTag, T)>);

impl<T> Default for Slots<T> {
    fn default() -> Self {
        // The submitter bounds the number of requests.
        Self(Slab::new(u32::MAX))
    }
}

impl<T> Slots<T> {
    /// Passes a request on, and stores `what` of it. Returns both if the queue below has no room.
    pub(crate) fn pass(
        &mut self,
        below: &mut dyn IoQueue,
        now: Instant,
        mut io: Io,
        what: T,
    ) -> Result<(), (Io, T)> {
        io.tag = self.put(io.tag, what);
        below.submit(now, io).map_err(|mut io| {
            let what;
            (io.tag, what) = self.take(io.tag);
            (io, what)
        })
    }

    /// Stores a request; returns the tag for the device below.
    pub(crate) fn put(&mut self, tag: IoTag, what: T) -> IoTag {
        IoTag(self.0.insert((tag, what)).into())
    }

    /// Removes a request; returns its original tag and data.
    pub(crate) fn take(&mut self, tag: IoTag) -> (IoTag, T) {
        let slot = u32::try_from(tag.0).ok().and_then(|slot| self.0.remove(slot));
        slot.expect("the device below completes what it was given, once")
    }
}
