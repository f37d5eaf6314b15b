//! Every write and flush of a volume, to judge an image of it that may be old.
//!
//! A disk that loses power has all writes that completed before the submission of its last
//! completed flush, and any of the later ones that had been submitted. An image is *legal* if a
//! disk that lost power at one moment could have been left with it. The moment may lie in the past:
//! this is what the primary of an ordered volume holds when its cache is lost.
//!
//! For each sector, every write whose content is found there gives an interval of moments: from its
//! submission until a later write, which must have replaced it, was durable. An image is legal if
//! its sectors have a moment in common.

use std::collections::BTreeMap;

use forebay_block::{ByteRange, SECTOR_SIZE, VolumeId};

use crate::content::{Content, describe};
use crate::{Model, Violation, Wrong, covered};

/// A moment that has not come.
const NEVER: u64 = u64::MAX;

/// A write, by counts of events.
#[derive(Clone, Copy, Debug)]
struct Write {
    submitted: u64,
    /// When it completed; [`NEVER`] if it failed, or is not known to have survived a crash.
    ended: u64,
    /// When it became certain that no power failure can undo it.
    durable: u64,
    /// It need not take effect.
    discard: bool,
}

/// The writes and flushes of a volume.
#[derive(Clone, Debug)]
pub struct History {
    volume: VolumeId,
    /// The caller's time of each event, in nanoseconds.
    times: Vec<u64>,
    writes: BTreeMap<u64, Write>,
    /// For each sector, its initial content, and the number and content of each write.
    sectors: Vec<(Content, Vec<(u64, Content)>)>,
}

/// A flush in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlushMark(u64);

/// The moments of a volume at which a power failure could have left an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moments {
    /// The latest of them, as the caller's time in nanoseconds. It ends when a write completed
    /// durably that the image lacks.
    pub latest: u64,
    /// Whether the image lacks nothing.
    pub is_current: bool,
}

impl History {
    /// A volume of `size` bytes that holds `initial(sector)`.
    #[must_use]
    pub fn new(volume: VolumeId, size: u64, initial: impl Fn(u64) -> Content) -> Self {
        let sectors = (0..size / SECTOR_SIZE as u64).map(|n| (initial(n), Vec::new())).collect();
        Self { volume, times: vec![0], writes: BTreeMap::new(), sectors }
    }

    fn tick(&mut self, now: u64) -> u64 {
        self.times.push(now);
        self.times.len() as u64 - 1
    }

    /// Records the submission of write `id`, which `model` has just recorded.
    pub fn begin_write(&mut self, now: u64, model: &Model, id: u64, range: ByteRange) {
        let submitted = self.tick(now);
        let mut discard = false;
        for n in covered(range) {
            let entries = model.sectors[n].entries.iter().rev();
            let Some(entry) = entries.into_iter().find(|entry| entry.id == id) else { continue };
            discard |= entry.discard;
            self.sectors[n].1.push((id, entry.content.clone()));
        }
        let write = Write { submitted, ended: NEVER, durable: NEVER, discard };
        self.writes.insert(id, write);
    }

    /// Records the end of write `id`.
    pub fn end_write(&mut self, now: u64, id: u64, ok: bool, fua: bool) {
        let at = self.tick(now);
        let write = self.writes.get_mut(&id).expect("a write that ends was submitted");
        if ok && !write.discard {
            write.ended = at;
            write.durable = if fua { at } else { NEVER };
        }
    }

    /// Records the submission of a flush.
    pub fn begin_flush(&mut self, now: u64) -> FlushMark {
        FlushMark(self.tick(now))
    }

    /// Records the success of a flush.
    pub fn end_flush(&mut self, now: u64, flush: FlushMark) {
        let at = self.tick(now);
        for write in self.writes.values_mut().filter(|write| write.ended < flush.0) {
            write.durable = write.durable.min(at);
        }
    }

    /// Records a crash, or a failed flush: writes that are not durable may be lost, and no later
    /// flush says otherwise.
    pub fn doubt(&mut self, now: u64) {
        self.tick(now);
        for write in self.writes.values_mut().filter(|write| write.durable == NEVER) {
            write.ended = NEVER;
        }
    }

    /// Judges an image: `read` gives the sectors of a range. Only `ranges` are looked at.
    ///
    /// # Errors
    /// The first sector that has no moment in common with those before it.
    pub fn judge(
        &self,
        ranges: &[ByteRange],
        read: impl Fn(ByteRange) -> Vec<u8>,
    ) -> Result<Moments, Violation> {
        let mut common = vec![(0, NEVER)];
        for &range in ranges {
            let data = read(range);
            for (n, bytes) in covered(range).zip(data.chunks(SECTOR_SIZE)) {
                let moments = self.moments(n, bytes);
                let both = intersection(&common, &moments);
                if both.is_empty() {
                    let what = format!(
                        "found {}, of moments {moments:?}, next to sectors of {common:?}",
                        describe(bytes)
                    );
                    let wrong = if moments.is_empty() { Wrong::Foreign } else { Wrong::Mixed };
                    let (volume, sector) = (self.volume, n as u64);
                    return Err(Violation { wrong, volume, sector, what });
                }
                common = both;
            }
        }
        let last = common.last().map_or(0, |&(_, end)| end);
        let newest = self.times.last().copied().unwrap_or_default();
        let latest = self.times.get(last as usize).copied().unwrap_or(newest);
        Ok(Moments { latest, is_current: last == NEVER })
    }

    /// The moments at which the sector could hold these bytes: intervals without their ends, in
    /// ascending order.
    fn moments(&self, n: usize, bytes: &[u8]) -> Vec<(u64, u64)> {
        let (initial, changes) = &self.sectors[n];
        let of = |id: &u64| self.writes[id];
        let until = |ended: u64| {
            let after = changes.iter().map(|(id, _)| of(id));
            let after = after.filter(|write| write.submitted > ended);
            after.map(|write| write.durable).min().unwrap_or(NEVER)
        };
        let is = |content: &Content| content.matches(self.volume, n as u64, 0, bytes);
        let first = is(initial).then(|| (0, until(0)));
        let found = changes.iter().filter(|(_, content)| is(content));
        let later = found.map(|(id, _)| (of(id).submitted, until(of(id).ended)));
        let mut all: Vec<_> =
            first.into_iter().chain(later).filter(|(from, to)| from < to).collect();
        all.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (from, to) in all {
            match joined.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ => joined.push((from, to)),
            }
        }
        joined
    }
}

fn intersection(a: &[(u64, u64)], b: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let pairs = a.iter().flat_map(|&x| b.iter().map(move |&y| (x, y)));
    let common = pairs.map(|(x, y)| (x.0.max(y.0), x.1.min(y.1)));
    common.filter(|(from, to)| from < to).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Change;

    const VOLUME: VolumeId = VolumeId(3);
    const SECTOR: u64 = SECTOR_SIZE as u64;

    /// A volume of eight sectors, with the model that gives writes their content.
    struct Bed {
        model: Model,
        history: History,
        image: Vec<u8>,
        now: u64,
    }

    impl Bed {
        fn new() -> Self {
            Self {
                model: Model::new(VOLUME, 8 * SECTOR, |_| Content::Zero),
                history: History::new(VOLUME, 8 * SECTOR, |_| Content::Zero),
                image: vec![0; 8 * SECTOR_SIZE],
                now: 0,
            }
        }

        /// Writes a sector, and waits for the end.
        fn write(&mut self, id: u64, sector: u64) {
            self.begin(id, sector);
            self.end(id, false);
        }

        fn begin(&mut self, id: u64, sector: u64) {
            self.now += 10;
            let range = ByteRange::new(sector * SECTOR, SECTOR);
            self.model.begin_write(id, range, Change::Stamp).expect("whole sectors");
            self.history.begin_write(self.now, &self.model, id, range);
        }

        fn end(&mut self, id: u64, fua: bool) {
            self.now += 10;
            self.model.end_write(id, true, fua);
            self.history.end_write(self.now, id, true, fua);
        }

        fn flush(&mut self) {
            self.now += 10;
            let mark = self.history.begin_flush(self.now);
            self.history.end_flush(self.now, mark);
        }

        /// Lets the image have a write.
        fn has(&mut self, id: u64, sector: u64) {
            let at = (sector * SECTOR) as usize;
            Content::Stamp(id).fill(VOLUME, sector, &mut self.image[at..at + SECTOR_SIZE]);
        }

        fn judge(&self) -> Result<Moments, Violation> {
            let all = ByteRange::new(0, 8 * SECTOR);
            self.history.judge(&[all], |range| {
                self.image[range.offset as usize..range.end() as usize].to_vec()
            })
        }
    }

    #[test]
    fn an_image_may_lack_the_end_and_nothing_before_it() {
        let mut bed = Bed::new();
        bed.write(1, 0);
        bed.flush();
        bed.write(2, 1);
        bed.flush();
        bed.write(3, 2);
        assert_eq!(bed.judge().map(|m| m.latest), Ok(30), "nothing: before the first flush");
        bed.has(2, 1);
        assert!(bed.judge().is_err(), "the second without the first");
        bed.has(1, 0);
        assert_eq!(bed.judge().map(|m| m.is_current), Ok(true), "the third was not flushed");
        bed.flush();
        assert_eq!(bed.judge(), Ok(Moments { latest: 90, is_current: false }));
        bed.has(3, 2);
        assert_eq!(bed.judge().map(|m| m.is_current), Ok(true));
    }

    #[test]
    fn between_two_flushes_any_subset_is_legal() {
        let mut bed = Bed::new();
        bed.write(1, 0);
        bed.flush();
        bed.has(1, 0);
        for (id, sector) in [(2, 1), (3, 2), (4, 1)] {
            bed.write(id, sector);
        }
        bed.has(3, 2);
        assert!(bed.judge().is_ok());
        bed.has(2, 1);
        assert!(bed.judge().is_ok(), "an older version of the interval");
        bed.flush();
        assert_eq!(bed.judge().map(|m| m.is_current), Ok(false));
        bed.write(5, 3);
        bed.has(5, 3);
        assert!(bed.judge().is_err(), "newer than a flush that covered another version");
    }

    #[test]
    fn force_unit_access_is_a_flush_of_one_write() {
        let mut bed = Bed::new();
        bed.begin(1, 0);
        bed.end(1, true);
        bed.write(2, 1);
        bed.has(2, 1);
        assert!(bed.judge().is_err());
        bed.has(1, 0);
        assert!(bed.judge().is_ok());
    }

    #[test]
    fn writes_at_the_same_time_may_be_in_any_order() {
        let mut bed = Bed::new();
        bed.begin(1, 0);
        bed.begin(2, 0);
        bed.end(2, false);
        bed.end(1, false);
        bed.flush();
        for id in [1, 2] {
            bed.has(id, 0);
            assert_eq!(bed.judge().map(|m| m.is_current), Ok(true));
        }
    }

    #[test]
    fn a_crash_leaves_it_open_what_survived() {
        let mut bed = Bed::new();
        bed.write(1, 0);
        bed.history.doubt(bed.now);
        bed.write(2, 1);
        bed.flush();
        bed.has(2, 1);
        assert!(bed.judge().is_ok(), "the first may be lost");
        bed.has(1, 0);
        assert!(bed.judge().is_ok());
    }

    #[test]
    fn bytes_that_no_write_made_are_of_no_moment() {
        let mut bed = Bed::new();
        bed.image[700] = 1;
        let violation = bed.judge().expect_err("garbage");
        assert_eq!((violation.wrong, violation.sector), (Wrong::Foreign, 1));
    }
}
