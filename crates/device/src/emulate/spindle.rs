//! One disk: a head, a rotating platter, and a queue that the drive serves in the cheapest order.
//!
//! Positions are bytes. A track is the data that passes the head in one turn; the angle of a byte
//! is its position in its track. A request costs a seek by distance, the rotation to its first
//! byte, and the transfer. A request that begins where the last one ended costs the transfer only,
//! since the drive's buffer hides the rest.

use forebay_block::Instant;

/// Duration of one turn at 7,200 rpm, in nanoseconds.
const TURN: u64 = 60_000_000_000 / 7200;
/// Bytes transferred per second.
const BYTES_PER_SECOND: u64 = 150_000_000;
/// Length of a track in bytes: the data of one turn.
pub(super) const TRACK: u64 = BYTES_PER_SECOND * TURN / 1_000_000_000;
/// Duration of a seek to a neighboring track, in nanoseconds.
const SEEK_LEAST: u64 = 1_000_000;
/// Average duration of a seek between two uniformly random positions, in nanoseconds.
const SEEK_MEAN: u64 = 8_500_000;
/// Mean square root of the distance between two such positions, as a fraction of the span: 8/15.
const MEAN_ROOT: (u64, u64) = (8, 15);
/// Nanoseconds by which the longest seek exceeds the shortest, chosen to yield the average above.
const SEEK_SPAN: u64 = (SEEK_MEAN - SEEK_LEAST) * MEAN_ROOT.1 / MEAN_ROOT.0;
/// Number of requests that the drive chooses from: the oldest of its queue.
pub(super) const CHOICE: usize = 32;
/// Age in nanoseconds from which a request is served before cheaper ones.
const AGE_MAX: u64 = 1_000_000_000;

/// A request's part on one disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// The request that it belongs to.
    pub(super) serial: u64,
    /// First byte on the disk.
    pub(super) at: u64,
    /// Number of bytes.
    pub(super) len: u64,
    /// Whether the bytes are read first and written one turn later.
    pub(super) updates: bool,
    /// Time of arrival; for a part that had to wait, when it became one of those that the drive
    /// chooses from.
    pub(super) arrived: Instant,
}

/// One disk.
pub(super) struct Spindle {
    /// Distance of the longest seek, in bytes.
    span: u64,
    /// Angle of the platter at time zero, in nanoseconds of its turn.
    phase: u64,
    /// The byte after the last one transferred.
    head: u64,
    /// End of the newest request in the queue, where a stream would continue.
    tail: u64,
    current: Option<(Part, Instant)>,
    queue: Vec<Part>,
}

impl Spindle {
    /// A disk of `size` bytes with the initial platter angle `phase`.
    pub(super) fn new(size: u64, phase: u64) -> Self {
        let span = size.max(TRACK);
        Self { span, phase: phase % TURN, head: 0, tail: 0, current: None, queue: Vec::new() }
    }

    /// Number of requests waiting or being served.
    pub(super) fn load(&self) -> usize {
        self.queue.len() + usize::from(self.current.is_some())
    }

    /// Distance in bytes from the end of the newest request in the queue to `at`.
    pub(super) fn distance(&self, at: u64) -> u64 {
        self.tail.abs_diff(at)
    }

    /// Adds a part. Parts must be added in order of time, and `advance` called in between.
    pub(super) fn push(&mut self, part: Part) {
        self.tail = part.at + part.len;
        if self.current.is_none() {
            self.begin(part, part.arrived);
        } else {
            self.queue.push(part);
        }
    }

    /// When the part being served ends.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.current.as_ref().map(|&(_, end)| end)
    }

    /// Serves parts until `now`; calls `ended` for each part that ends.
    pub(super) fn advance(&mut self, now: Instant, mut ended: impl FnMut(u64, Instant)) {
        while let Some((part, end)) = self.current.filter(|&(_, end)| end <= now) {
            self.head = part.at + part.len;
            self.current = None;
            ended(part.serial, end);
            if let Some(index) = self.choose(end) {
                let next = self.queue.remove(index);
                if let Some(entering) = self.queue.get_mut(CHOICE - 1) {
                    entering.arrived = end;
                }
                self.begin(next, end);
            }
        }
    }

    fn begin(&mut self, part: Part, now: Instant) {
        let turns = if part.updates { TURN } else { 0 };
        let busy = self.positioning(part.at, now) + turns + transfer(part.len);
        self.current = Some((part, Instant(now.0 + busy)));
    }

    /// Of the oldest parts, the one reached first; or the very oldest if it has waited too long.
    fn choose(&self, now: Instant) -> Option<usize> {
        let oldest = self.queue.first()?;
        if now.0.saturating_sub(oldest.arrived.0) > AGE_MAX {
            return Some(0);
        }
        let choice = self.queue.iter().take(CHOICE).enumerate();
        choice.min_by_key(|(_, part)| self.positioning(part.at, now)).map(|(index, _)| index)
    }

    /// Nanoseconds until the head is over byte `at`, starting at `now`.
    fn positioning(&self, at: u64, now: Instant) -> u64 {
        if at == self.head {
            return 0;
        }
        let seek = self.seek(self.head.abs_diff(at));
        let angle = (now.0 + seek + self.phase) % TURN;
        let wanted = at % TRACK * TURN / TRACK;
        seek + (wanted + TURN - angle) % TURN
    }

    /// Nanoseconds to cross `distance` bytes: 0 within a track, otherwise growing with the square
    /// root.
    fn seek(&self, distance: u64) -> u64 {
        if distance < TRACK {
            return 0;
        }
        let share = (distance as f64 / self.span as f64).min(1.0);
        SEEK_LEAST + (SEEK_SPAN as f64 * share.sqrt()) as u64
    }
}

fn transfer(len: u64) -> u64 {
    (u128::from(len) * 1_000_000_000 / u128::from(BYTES_PER_SECOND)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeks_grow_with_distance_between_the_bounds() {
        let disk = Spindle::new(1 << 40, 0);
        assert_eq!(disk.seek(TRACK - 1), 0);
        assert!((SEEK_LEAST..SEEK_LEAST + 50_000).contains(&disk.seek(TRACK)));
        let full = disk.seek(1 << 40);
        assert_eq!(full, SEEK_LEAST + SEEK_SPAN);
        assert!(disk.seek(1 << 39) < full && disk.seek(1 << 38) < disk.seek(1 << 39));
    }

    #[test]
    fn an_old_request_is_served_before_near_ones() {
        let mut disk = Spindle::new(1 << 40, 0);
        let part = |serial, at, len, arrived| Part { serial, at, len, updates: false, arrived };
        let far = part(1, 1 << 39, 4096, Instant(0));
        disk.push(part(0, 0, 4096, Instant(0)));
        disk.push(far);
        let (mut now, mut at, mut served) = (Instant(0), 4096u64, None);
        // A stream that always has its next request waiting, without positioning cost.
        for serial in 2..10_000 {
            disk.push(part(serial, at, 65536, now));
            at += 65536;
            now = disk.next_end().unwrap();
            disk.advance(now, |serial, end| {
                if serial == 1 {
                    served = Some(end);
                }
            });
        }
        let served = served.expect("the far request was starved").0;
        assert!(served > AGE_MAX && served < AGE_MAX + 40_000_000, "served after {served} ns");
    }
}
