//! Layers: devices over devices, with the same interface above and below, so that they stack.
//! [`watch`] serves the records of primaries; [`delay`] and [`fault`] are parameters of a URI, for
//! tests and for whoever tries how a failure looks.

pub(crate) mod delay;
pub(crate) mod fault;
pub(crate) mod watch;

use forebay_block::IoTag;

/// Requests that a layer has below it: the tag that came from above, and what the layer must
/// remember, found again by the tag that it gave them.
pub(crate) struct Slots<T> {
    taken: Vec<Option<(IoTag, T)>>,
    free: Vec<usize>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { taken: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slots<T> {
    /// Remembers a request; returns the tag to give it.
    pub(crate) fn put(&mut self, tag: IoTag, what: T) -> IoTag {
        let index = self.free.pop().unwrap_or_else(|| {
            self.taken.push(None);
            self.taken.len() - 1
        });
        self.taken[index] = Some((tag, what));
        IoTag(index as u64)
    }

    /// Forgets a request; returns its own tag and what was remembered.
    pub(crate) fn take(&mut self, tag: IoTag) -> (IoTag, T) {
        let index = tag.0 as usize;
        self.free.push(index);
        self.taken[index].take().expect("the device below completes what it was given, once")
    }
}
