//! The parts of a read that have arrived. A server may send them in any order, but each byte once.

use std::ops::Range;

/// Maximum number of separate parts: as many as a read of 2 MiB has when every other sector of 512
/// bytes has arrived.
const PARTS_MAX: usize = 2048;

/// Disjoint ranges in ascending order, with gaps between them.
#[derive(Debug, Default)]
pub(super) struct Covered(Vec<Range<u32>>);

impl Covered {
    /// Adds a part that is not empty. Returns false if bytes of it were there already, or if there
    /// would be too many parts.
    pub(super) fn add(&mut self, part: Range<u32>) -> bool {
        let Self(parts) = self;
        let at = parts.partition_point(|other| other.end <= part.start);
        let next = parts.get(at).map(|next| next.start);
        if next.is_some_and(|next| next < part.end) {
            return false;
        }
        let extends_last = at > 0 && parts[at - 1].end == part.start;
        let extends_next = next == Some(part.end);
        match (extends_last, extends_next) {
            (true, true) => parts[at - 1].end = parts.remove(at).end,
            (true, false) => parts[at - 1].end = part.end,
            (false, true) => parts[at].start = part.start,
            (false, false) if parts.len() == PARTS_MAX => return false,
            (false, false) => parts.insert(at, part),
        }
        true
    }

    /// Whether the parts are exactly the first `len` bytes.
    pub(super) fn is_all(&self, len: u32) -> bool {
        matches!(&self.0[..], [whole] if *whole == (0..len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Numbers;

    #[test]
    fn parts_in_any_order_are_the_whole_and_none_may_come_twice() {
        let mut numbers = Numbers::new(5);
        for _ in 0..500 {
            let len = 1 + numbers.below(40) as u32;
            let (mut covered, mut seen) = (Covered::default(), vec![false; len as usize]);
            while seen.contains(&false) {
                assert!(!covered.is_all(len));
                let start = numbers.below(u64::from(len)) as u32;
                let end = start + 1 + numbers.below(u64::from(len - start)) as u32;
                let bytes = &mut seen[start as usize..end as usize];
                assert_eq!(covered.add(start..end), !bytes.contains(&true));
                if !bytes.contains(&true) {
                    bytes.fill(true);
                }
            }
            assert!(covered.is_all(len) && covered.0.len() == 1);
        }
    }

    #[test]
    fn the_number_of_parts_is_bounded() {
        let mut covered = Covered::default();
        let alternate = (0..PARTS_MAX as u32).map(|i| 2 * i);
        assert!(alternate.clone().all(|at| covered.add(at..at + 1)));
        let beyond = 2 * PARTS_MAX as u32;
        assert!(!covered.add(beyond..beyond + 1));
        assert!(alternate.clone().all(|at| covered.add(at + 1..at + 2)), "gaps may close");
        assert!(covered.is_all(beyond));
    }
}
