//! The oldest segment on its way out of the log: what reclaim says about it to whoever writes the
//! log, and the other way round.

use forebay_format::{PAGE, SegmentSeq};

use crate::log::Log;

/// The segment that is being reclaimed, and the need for that.
#[derive(Debug, Default)]
pub struct Leaving {
    seq: Option<SegmentSeq>,
    /// Bytes of the log that its copies take at most, once that is known.
    needs: Option<u64>,
    /// It cannot be freed before more of it has been destaged.
    is_pressed: bool,
    /// Bytes of records of clients and admissions, since reclaim last asked.
    client_bytes: u64,
}

impl Log {
    /// The segment that is being reclaimed.
    pub fn leaving(&self) -> Option<SegmentSeq> {
        self.leaving.seq
    }

    /// Another segment is being reclaimed, or none; with the bytes that its copies take at most.
    pub fn set_leaving(&mut self, seq: Option<SegmentSeq>, needs: Option<u64>) {
        (self.leaving.seq, self.leaving.needs) = (seq, needs);
    }

    /// Whether the copies out of the oldest segment have room in an empty one of `segment` bytes,
    /// with the record being built, and with enough to spare for the record that says so: a
    /// quarter, for records that crashes cut short, or an eighth if clients or admissions, which
    /// no crash leaves behind, have a part of the record.
    pub fn copies_fit(&self, segment: u32) -> bool {
        let segment = u64::from(segment);
        self.leaving.needs.is_some_and(|needs| match self.builder.has_news() {
            true => (self.builder.pages() * PAGE) as u64 + needs <= segment / 8 * 7,
            false => needs <= segment / 4 * 3,
        })
    }

    /// Whether reclaim waits for dirty blocks of the oldest segment.
    pub fn is_pressed(&self) -> bool {
        self.leaving.is_pressed
    }

    /// Reclaim waits for dirty blocks of the oldest segment, or waits no more.
    pub fn press(&mut self, on: bool) {
        self.leaving.is_pressed = on;
    }

    /// A record of clients or admissions needs `len` bytes.
    pub fn note_client_bytes(&mut self, len: u64) {
        self.leaving.client_bytes += len;
    }

    /// Bytes of records of clients and admissions since this was last called.
    pub fn take_client_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.leaving.client_bytes)
    }
}
