//! Contents of which a part is still to be loaded: the shard serves although the log has entries
//! that have not been applied yet.
//!
//! A block is *settled* if its newest version is known: all of its entries were applied before the
//! shard served, or it has been placed or forgotten since. Only settled blocks are visible: between
//! two entries of any other block, the index may have an old version of it, or none. A block that
//! is not settled is clean, so its primary has the newest version.

use crate::contents::Contents;
use crate::key::{Key, LargeMap};

/// The settled blocks, while the rest is being loaded. Each block that is settled while the shard
/// serves has an entry in the log, of which no segment is freed in the meantime. So the free
/// segments limit their number.
#[derive(Debug, Default)]
pub(super) struct Loading {
    pub(super) settled: LargeMap<()>,
    /// Whether the changes are those of entries being applied.
    is_applying: bool,
}

impl Contents {
    /// Notes that only the entries of these blocks have been applied, or will be before the shard
    /// serves.
    pub fn begin_loading(&mut self, settled: LargeMap<()>) {
        self.loading = Some(Box::new(Loading { settled, is_applying: false }));
        self.pages.set_loading(true);
    }

    /// Notes that all entries have been applied. Returns the settled blocks, which nothing needs
    /// any more: all of their memory takes long to free.
    pub fn end_loading(&mut self) -> LargeMap<()> {
        self.pages.set_loading(false);
        self.loading.take().map(|loading| loading.settled).unwrap_or_default()
    }

    /// Whether there are entries that have not been applied.
    pub fn is_loading(&self) -> bool {
        self.loading.is_some()
    }

    /// Whether the newest version of a block is known.
    pub fn is_settled(&self, key: Key) -> bool {
        self.loading.as_ref().is_none_or(|loading| loading.settled.contains_key(&key))
    }

    /// Whether an entry of a block that is not settled is being applied.
    pub(super) fn is_applying(&self) -> bool {
        self.loading.as_ref().is_some_and(|loading| loading.is_applying)
    }

    /// Begins to apply entries of blocks that are not settled, or ends it.
    pub fn set_applying(&mut self, on: bool) {
        if let Some(loading) = &mut self.loading {
            loading.is_applying = on;
        }
    }

    /// Whether the index has the newest version of a block, or what the entries applied so far
    /// say is requested.
    pub(super) fn is_visible(&self, key: Key) -> bool {
        match &self.loading {
            Some(loading) if !loading.is_applying => loading.settled.contains_key(&key),
            _ => true,
        }
    }

    /// Notes that a block changes, unless an entry is being applied.
    pub(super) fn settle_block(&mut self, key: Key) {
        if let Some(loading) = self.loading.as_mut().filter(|loading| !loading.is_applying) {
            loading.settled.insert(key, ());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::FREED_ROOM;
    use crate::ram::Ram;

    #[test]
    fn the_settled_blocks_grow_and_go_in_parts() {
        let settled = || {
            let (mut contents, mut ram) = (Contents::new(1, 8, 1), Ram::new(0, false));
            contents.begin_loading(LargeMap::default());
            (0..200_000).for_each(|n| contents.forget(Key(n), &mut ram));
            assert!(contents.is_settled(Key(7)) && !contents.is_settled(Key(200_000)));
            contents
        };
        let mut contents = settled();
        let mut ended = contents.end_loading();
        assert_eq!((ended.len(), contents.is_loading()), (200_000, false));
        let steps = std::iter::from_fn(|| ended.drop_parts(FREED_ROOM).then_some(())).count();
        assert!(steps > 10, "a part is a small share of them: {steps} steps");
        // A device that fails while the shard loads gives the same up.
        let mut contents = settled();
        contents.give_up();
        let dropped = || contents.has_given_up().then(|| contents.drop_given_up());
        let given_up = std::iter::from_fn(dropped).count();
        assert!(given_up > steps, "{given_up} steps");
    }
}
