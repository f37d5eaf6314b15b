//! The optimum: of the cached blocks the one referenced again last leaves (Belady, "A study of
//! replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966).
//!
//! A block that is not worth a place is not kept at all. For the misses of reads a block that is
//! written before it is read again is worth none: the write brings its data. Then each stay of a
//! block saves one miss, and to end the longest stay first saves the most.

use std::collections::BTreeSet;

use super::{Misses, References};

/// The position of no reference.
const NEVER: u32 = u32::MAX;

/// The fewest misses of reads, and the fewest of all references.
pub fn misses(trace: &References, places: u32) -> Misses {
    let reads = trace.reads() - hits(trace, places, true);
    Misses { reads, references: trace.len() - hits(trace, places, false) }
}

/// The most hits: of reads alone, or of reads and writes.
fn hits(trace: &References, places: u32, reads_only: bool) -> u64 {
    let next = next(trace, reads_only);
    // A cached block is known by the position of its next reference.
    let mut cached = BTreeSet::new();
    let mut hits = 0;
    for (at, &next) in (0u32..).zip(&next) {
        hits += u64::from(cached.remove(&at));
        if next != NEVER {
            cached.insert(next);
        }
        if cached.len() > places as usize {
            cached.pop_last();
        }
    }
    hits
}

/// For each reference the position of its block's next one; [`NEVER`] if that is no possible hit.
fn next(trace: &References, reads_only: bool) -> Vec<u32> {
    let mut later = vec![NEVER; trace.blocks() as usize];
    let mut next = vec![NEVER; trace.iter().len()];
    for (at, (block, write)) in trace.iter().enumerate().rev() {
        let position = u32::try_from(at).expect("references are numbered by 32 bits");
        let counts = !(write && reads_only);
        next[at] = later[block as usize];
        later[block as usize] = if counts { position } else { NEVER };
    }
    next
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn trace(refs: &[(u64, bool)]) -> References {
        let mut trace = References::new();
        refs.iter().for_each(|&(key, write)| trace.push(key, write).expect("it is short"));
        trace
    }

    #[test]
    fn the_block_referenced_last_leaves() {
        // The usual example: nine misses with three places if each page must enter, eight if not:
        // page 4 is never referenced again.
        let pages = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        let trace = trace(&pages.map(|page| (page, false)));
        assert_eq!(misses(&trace, 3), Misses { reads: 8, references: 8 });
    }

    #[test]
    fn what_is_written_first_needs_no_place() {
        let refs = [(1, false), (2, false), (1, true), (2, false)];
        // Block 2 gets the only place. To count the write too, block 1 would do as well.
        assert_eq!(misses(&trace(&refs), 1), Misses { reads: 2, references: 3 });
    }

    /// Most hits by trying every set of blocks to keep, one reference after the other.
    fn tried(refs: &[(u64, bool)], places: u32, reads_only: bool) -> u64 {
        let mut best: BTreeMap<u32, u64> = BTreeMap::from([(0, 0)]);
        for &(block, write) in refs {
            let mut after: BTreeMap<u32, u64> = BTreeMap::new();
            for (&set, &hits) in &best {
                let hit = set >> block & 1 == 1 && !(write && reads_only);
                let with = set | 1u32 << block;
                let mut kept = with;
                loop {
                    if kept.count_ones() <= places {
                        let entry = after.entry(kept).or_default();
                        *entry = (*entry).max(hits + u64::from(hit));
                    }
                    if kept == 0 {
                        break;
                    }
                    kept = (kept - 1) & with;
                }
            }
            best = after;
        }
        best.into_values().max().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn nobody_finds_more_hits(
            refs in prop::collection::vec((0u64..5, any::<bool>()), 0..30),
            places in 1u32..5,
            reads_only: bool,
        ) {
            let most = tried(&refs, places, reads_only);
            prop_assert_eq!(hits(&trace(&refs), places, reads_only), most);
        }
    }
}
