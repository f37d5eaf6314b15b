//! The oldest segment on its way out of the log: facts that reclaim and the writers of the log
//! exchange.

use forebay_format::{ENTRY_CELLS, PAGE, SegmentSeq, footer_bytes};

use crate::key::{Key, KeyMap};
use crate::log::Log;

/// The segment being reclaimed, and the state of its reclaim.
#[derive(Debug, Default)]
pub struct Leaving {
    seq: Option<SegmentSeq>,
    /// Upper limit on the bytes of log that its copies take, once known.
    needs: Option<u64>,
    /// Blocks of the store that entries in it name, or whose base they name.
    named: KeyMap<()>,
    /// It cannot be freed until more of it has been destaged.
    is_pressed: bool,
    /// Bytes of records with client writes or admissions, since reclaim last took the count.
    client_bytes: u64,
}

impl Log {
    /// The segment being reclaimed.
    pub fn leaving(&self) -> Option<SegmentSeq> {
        self.leaving.seq
    }

    /// Sets the segment being reclaimed, if any, and the upper limit on the bytes that its copies
    /// take.
    pub fn set_leaving(&mut self, seq: Option<SegmentSeq>, needs: Option<u64>) {
        if self.leaving.seq != seq {
            self.leaving.named.clear();
        }
        (self.leaving.seq, self.leaving.needs) = (seq, needs);
    }

    /// Notes a block of the store that an entry of the segment names, or whose base it names;
    /// returns whether that is new.
    pub fn note_named(&mut self, key: Key) -> bool {
        self.leaving.named.insert(key, ()).is_none()
    }

    /// Whether a block of the store, or its base, is named by an entry that leaves the log: nothing
    /// new may rest on it.
    pub fn is_named_leaving(&self, key: Key) -> bool {
        self.leaving.named.contains_key(&key)
    }

    /// Whether the copies out of the oldest segment fit into an empty segment of `segment` bytes:
    /// see [`Log::would_fit`].
    pub fn copies_fit(&self, segment: u32) -> bool {
        self.leaving.needs.is_some_and(|needs| self.would_fit(needs, segment))
    }

    /// Whether `needs` bytes of copies fit into an empty segment of `segment` bytes, together with
    /// the record being built, and leave room for the record that drops the oldest segment. A
    /// quarter is spared, for records that crashes cut short. An eighth is enough if clients or
    /// admissions, which no crash leaves behind, have a part of the record.
    pub fn would_fit(&self, needs: u64, segment: u32) -> bool {
        let segment = u64::from(segment);
        match self.builder.has_news() {
            true => (self.builder.pages() * PAGE) as u64 + needs <= segment / 8 * 7,
            false => needs <= segment / 4 * 3,
        }
    }

    /// Whether `needs` bytes of copies, with `entries` entries, fit into the open segment if it is
    /// the last one, together with the record being built, and leave room for the record that drops
    /// the oldest segment.
    pub fn fits_last(&self, needs: u64, entries: usize, size: u32) -> bool {
        if self.free > 0 {
            return true;
        }
        let Some(open) = &self.open else { return false };
        let pages = (self.builder.pages() + 1) * PAGE;
        let segment = &self.segments[open.index];
        let cells = segment.cells as usize + self.builder.cells() + (entries + 1) * ENTRY_CELLS;
        let (footer, used) = (footer_bytes(cells), u64::from(segment.used));
        used + needs + (pages + footer) as u64 <= u64::from(size)
    }

    /// Whether reclaim waits for dirty blocks of the oldest segment.
    pub fn is_pressed(&self) -> bool {
        self.leaving.is_pressed
    }

    /// Notes whether reclaim waits for dirty blocks of the oldest segment.
    pub fn press(&mut self, on: bool) {
        self.leaving.is_pressed = on;
    }

    /// Counts the `len` bytes of a record with client writes or admissions.
    pub fn note_client_bytes(&mut self, len: u64) {
        self.leaving.client_bytes += len;
    }

    /// Takes the count of bytes of records with client writes or admissions.
    pub fn take_client_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.leaving.client_bytes)
    }
}
