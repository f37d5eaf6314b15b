//! Contents of which a part is still to be loaded: the shard serves although the log has entries
//! that have not been applied yet.
//!
//! A block is *settled* if its newest version is known: all of its entries were applied before the
//! shard served, or it has been placed or forgotten since. Only settled blocks are visible: between
//! two entries of any other block, the index may have an old version of it, or none. A block that
//! is not settled is clean, so its primary has the newest version.

use crate::contents::Contents;
use crate::key::{Key, KeyMap};

/// The settled blocks, while the rest is being loaded. Each block that is settled while the shard
/// serves has an entry in the log, of which no segment is freed in the meantime. So the free
/// segments limit their number.
#[derive(Debug, Default)]
pub(super) struct Loading {
    settled: KeyMap<()>,
    /// Whether the changes are those of entries being applied.
    is_applying: bool,
}

impl Contents {
    /// Notes that only the entries of these blocks have been applied, or will be before the shard
    /// serves.
    pub fn begin_loading(&mut self, settled: KeyMap<()>) {
        self.loading = Some(Box::new(Loading { settled, is_applying: false }));
        self.pages.set_loading(true);
    }

    /// Notes that all entries have been applied.
    pub fn end_loading(&mut self) {
        self.loading = None;
        self.pages.set_loading(false);
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
