//! Recognizes requests that belong to a sequential stream; follows several streams at once.
//!
//! A stream is a head (the end of its furthest request) and a balance: the bytes that extended it
//! minus the bytes that it skipped. A request belongs to a stream when it touches or passes its
//! head within a window, or fills a hole that an earlier request skipped; clients that spread one
//! stream over several connections deliver it in a slightly wrong order, and a hole that is filled
//! costs nothing. A stream whose balance reaches the threshold is sequential. Reads and writes form
//! separate streams.
//!
//! Bytes accessed again do not count, so rewriting a small area over and over is not a stream. A
//! larger area is one stream per lap: the count begins again at the wrap. Random requests skip far
//! more than they extend, so their balance stays low.
//!
//! Small writes are counted but never bypass the cache. A client that writes a stream in small
//! pieces, as a database writes its log and pages, waits for each piece, and the cache answers
//! sooner than a disk.

use forebay_block::ByteRange;

/// Writes shorter than this, in bytes, never bypass the cache.
const WRITE_MIN: u64 = 64 << 10;
/// Maximum distance of a request from the head of the stream that it belongs to, in bytes.
const WINDOW: u64 = 2 << 20;
/// Maximum number of holes remembered per stream; the oldest is forgotten first.
const HOLES_MAX: usize = 16;
/// Heads compared at once in the coarse search.
const LOOK: usize = 16;
/// Minimum balance: a bad start is not held against a stream forever.
const BALANCE_MIN: i64 = -(WINDOW as i64);
/// Larger thresholds are reduced to this; no stream is that long.
const THRESHOLD_MAX: u64 = 1 << 60;

/// Tells requests of sequential streams from others.
#[derive(Clone, Debug)]
pub struct SequentialDetector {
    threshold: i64,
    streams_max: usize,
    reads: Streams,
    writes: Streams,
}

impl SequentialDetector {
    /// A detector of at most `streams_max` streams of reads and as many of writes. A threshold of
    /// 0 bytes turns it off.
    ///
    /// # Panics
    /// If `streams_max` is 0.
    #[must_use]
    pub fn new(threshold_bytes: u64, streams_max: usize) -> Self {
        assert!(streams_max > 0, "a detector follows at least one stream");
        let (reads, writes) = (Streams::default(), Streams::default());
        let threshold = threshold_bytes.min(THRESHOLD_MAX) as i64;
        Self { threshold, streams_max, reads, writes }
    }

    /// Changes the threshold, as in [`SequentialDetector::new`], for requests from now on. Streams
    /// are forgotten.
    pub fn set_threshold(&mut self, threshold_bytes: u64) {
        *self = Self::new(threshold_bytes, self.streams_max);
    }

    /// Counts a request. Returns whether it should bypass the cache: it belongs to a stream that
    /// has reached the threshold, this request included, and is not a small write.
    pub fn observe(&mut self, range: ByteRange, is_write: bool) -> bool {
        if self.threshold == 0 || range.is_empty() {
            return false;
        }
        let streams = if is_write { &mut self.writes } else { &mut self.reads };
        // High enough for a stream to stay sequential over a skipped window, low enough to end soon
        // after the stream does.
        let most = self.threshold + WINDOW as i64;
        let balance = streams.count(range, most, self.streams_max);
        balance >= self.threshold && (!is_write || range.len >= WRITE_MIN)
    }
}

/// The streams of one direction. Most requests of a random load are far from every stream, and this
/// case must be fast: one pass over the window numbers of the heads, four bytes each.
#[derive(Clone, Debug, Default)]
struct Streams {
    /// The window number of each head, truncated to 32 bits, for a coarse search.
    windows: Vec<u32>,
    heads: Vec<u64>,
    streams: Vec<Stream>,
    /// The clock value at each stream's last request.
    used: Vec<u64>,
    clock: u64,
}

#[derive(Clone, Debug, Default)]
struct Stream {
    balance: i64,
    /// Skipped ranges, oldest first.
    holes: Vec<ByteRange>,
}

/// The relation of a request to the streams.
enum Found {
    /// It continues this stream.
    Continues(usize, Fit),
    /// It repeats bytes just before a head, which is neither progress nor a new stream.
    TouchesAgain,
    /// It is near no head.
    Nothing,
}

/// How a request continues a stream; the smaller value is the better fit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    /// It starts at the head, or before it and ends after it.
    Extends,
    /// It lies before the head, where bytes were skipped.
    Fills,
    /// It starts this many bytes after the head.
    Skips(u64),
}

impl Streams {
    /// Counts a request and returns the balance of its stream; 0 if it belongs to none.
    fn count(&mut self, range: ByteRange, most: i64, streams_max: usize) -> i64 {
        self.clock += 1;
        match self.find(range) {
            Found::Continues(index, fit) => {
                let (stream, head) = (&mut self.streams[index], &mut self.heads[index]);
                stream.extend(head, range, fit, most);
                self.windows[index] = window(*head);
                self.used[index] = self.clock;
                self.streams[index].balance
            }
            Found::TouchesAgain => 0,
            Found::Nothing => {
                let balance = signed(range.len).min(most);
                self.begin(range.end(), balance, streams_max);
                balance
            }
        }
    }

    /// The stream that the request fits best; among equal fits the one with the highest balance,
    /// then the first.
    fn find(&self, range: ByteRange) -> Found {
        let (low, high) = (range.offset.saturating_sub(WINDOW), range.end().saturating_add(WINDOW));
        let (first, more) = (window(low), window(high - low) + 1);
        let near = |number: &u32| number.wrapping_sub(first) <= more;
        let mut found = Found::Nothing;
        for (chunk, windows) in self.windows.chunks(LOOK).enumerate() {
            // Without a branch per window, so that the compiler vectorizes the comparison.
            if !windows.iter().fold(false, |any, number| any | near(number)) {
                continue;
            }
            let indices = chunk * LOOK..chunk * LOOK + windows.len();
            for index in indices.filter(|index| (low..=high).contains(&self.heads[*index])) {
                found = self.better(found, index, range);
            }
        }
        found
    }

    /// The better of `found` and a continuation of the stream at `index`.
    fn better(&self, found: Found, index: usize, range: ByteRange) -> Found {
        let (stream, head) = (&self.streams[index], self.heads[index]);
        match (stream.fit(head, range), found) {
            (Some(fit), Found::Continues(other, best))
                if fit > best || fit == best && stream.balance <= self.streams[other].balance =>
            {
                Found::Continues(other, best)
            }
            (Some(fit), _) => Found::Continues(index, fit),
            (None, Found::Nothing) if head == range.end() => Found::TouchesAgain,
            (None, found) => found,
        }
    }

    fn begin(&mut self, head: u64, balance: i64, streams_max: usize) {
        let index = if self.streams.len() < streams_max {
            self.windows.push(0);
            self.heads.push(0);
            self.used.push(0);
            self.streams.push(Stream::default());
            self.streams.len() - 1
        } else {
            let oldest = self.used.iter().enumerate().min_by_key(|(_, used)| **used);
            oldest.expect("the table is full, so it is not empty").0
        };
        self.used[index] = self.clock;
        let stream = &mut self.streams[index];
        stream.balance = balance;
        stream.holes.clear();
        self.heads[index] = head;
        self.windows[index] = window(head);
    }
}

/// The number of the window that contains a byte, truncated to 32 bits.
fn window(byte: u64) -> u32 {
    (byte / WINDOW) as u32
}

impl Stream {
    fn fit(&self, head: u64, range: ByteRange) -> Option<Fit> {
        if range.offset > head {
            Some(Fit::Skips(range.offset - head))
        } else if range.end() > head {
            Some(Fit::Extends)
        } else {
            self.holes.iter().any(|hole| hole.overlaps(&range)).then_some(Fit::Fills)
        }
    }

    fn extend(&mut self, head: &mut u64, range: ByteRange, fit: Fit, most: i64) {
        let gained = match fit {
            Fit::Extends => signed(range.end() - *head),
            // Refunds the bytes deducted when the hole was skipped, and adds the bytes themselves.
            Fit::Fills => 2 * signed(self.fill(range)),
            Fit::Skips(gap) => {
                self.skip(ByteRange::new(*head, gap));
                signed(range.len) - signed(gap)
            }
        };
        *head = range.end().max(*head);
        self.balance = self.balance.saturating_add(gained).clamp(BALANCE_MIN, most);
    }

    fn skip(&mut self, hole: ByteRange) {
        if self.holes.len() == HOLES_MAX {
            self.holes.remove(0);
        }
        self.holes.push(hole);
    }

    /// Removes the bytes of `range` from the holes and returns their number.
    fn fill(&mut self, range: ByteRange) -> u64 {
        let mut filled = 0;
        let holes = std::mem::take(&mut self.holes);
        for hole in holes {
            if !hole.overlaps(&range) {
                self.holes.push(hole);
                continue;
            }
            let common = hole.intersection(&range);
            filled += common.len;
            let before = ByteRange { offset: hole.offset, len: common.offset - hole.offset };
            let after = ByteRange { offset: common.end(), len: hole.end() - common.end() };
            self.holes.extend([before, after].into_iter().filter(|rest| !rest.is_empty()));
        }
        let surplus = self.holes.len().saturating_sub(HOLES_MAX);
        self.holes.drain(..surplus);
        filled
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX / 4)
}
