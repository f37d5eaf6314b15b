//! Layers: devices over devices, with the same interface above and below, so that they stack.
//! [`watch`] keeps the records of primaries valid; [`delay`] and [`fault`] are parameters of a URI,
//! for tests and for trying out failures.

pub(crate) mod delay;
pub(crate) mod fault;
pub(crate) mod watch;

use forebay_block::{IoTag, Slab};

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
