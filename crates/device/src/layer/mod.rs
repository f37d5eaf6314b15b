//! Layers: devices over devices, with the same interface above and below, so that they stack.
//! [`watch`] serves the records of primaries; [`delay`] and [`fault`] are parameters of a URI, for
//! tests and for whoever tries how a failure looks.

pub(crate) mod delay;
pub(crate) mod fault;
pub(crate) mod watch;

use forebay_block::{IoTag, Slab};

/// Requests that a layer has below it: the tag that came from above, and what the layer must
/// remember, found again by the tag that it gave them.
pub(crate) struct Slots<T>(Slab<(IoTag, T)>);

impl<T> Default for Slots<T> {
    fn default() -> Self {
        // Whoever sends the requests bounds them.
        Self(Slab::new(u32::MAX))
    }
}

impl<T> Slots<T> {
    /// Remembers a request; returns the tag to give it.
    pub(crate) fn put(&mut self, tag: IoTag, what: T) -> IoTag {
        IoTag(self.0.insert((tag, what)).into())
    }

    /// Forgets a request; returns its own tag and what was remembered.
    pub(crate) fn take(&mut self, tag: IoTag) -> (IoTag, T) {
        let slot = u32::try_from(tag.0).ok().and_then(|slot| self.0.remove(slot));
        slot.expect("the device below completes what it was given, once")
    }
}
