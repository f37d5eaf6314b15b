//! LIRS: blocks whose last two references were close together (LIR) keep nearly all places; the
//! others (HIR) pass through a short queue (Jiang and Zhang, "LIRS: an efficient low
//! inter-reference recency set replacement policy", SIGMETRICS 2002, section 3.3).

use super::Cache;
use super::list::{Links, List};

/// Share of the places for HIR blocks, in percent; the paper's value.
const HIR_PERCENT: u32 = 1;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Lir,
    Hir,
    /// Not cached; it may be in the stack.
    Gone,
}

/// A cache with a stack of recent blocks and a queue of cached HIR blocks.
pub struct Lirs {
    stack_links: Links,
    /// Recent blocks, cached or not; the oldest is a LIR block.
    stack: List,
    in_stack: Vec<bool>,
    queue_links: Links,
    queue: List,
    state: Vec<State>,
    lir: u32,
    lir_places: u32,
    places: u32,
}

impl Lirs {
    /// An empty cache with `places` places, for blocks with numbers below `blocks`.
    pub fn new(blocks: u32, places: u32) -> Self {
        Self {
            stack_links: Links::new(blocks),
            stack: List::EMPTY,
            in_stack: vec![false; blocks as usize],
            queue_links: Links::new(blocks),
            queue: List::EMPTY,
            state: vec![State::Gone; blocks as usize],
            lir: 0,
            lir_places: places - (places * HIR_PERCENT / 100).max(1),
            places,
        }
    }

    /// Moves a block to the top of the stack. Returns whether it was in it.
    fn stack_up(&mut self, block: u32) -> bool {
        let was = std::mem::replace(&mut self.in_stack[block as usize], true);
        if was {
            self.stack_links.remove(&mut self.stack, block);
        }
        self.stack_links.push(&mut self.stack, block);
        was
    }

    /// Removes blocks from the bottom of the stack until the lowest is a LIR block.
    fn prune(&mut self) {
        while let Some(block) = self.stack.oldest()
            && self.state[block as usize] != State::Lir
        {
            self.stack_links.remove(&mut self.stack, block);
            self.in_stack[block as usize] = false;
        }
    }

    /// Makes a block that is on top of the stack a LIR block; the lowest one becomes a HIR block if
    /// there are too many.
    fn promote(&mut self, block: u32) {
        self.state[block as usize] = State::Lir;
        self.lir += 1;
        if self.lir > self.lir_places
            && let Some(lowest) = self.stack.oldest()
        {
            self.state[lowest as usize] = State::Hir;
            self.lir -= 1;
            self.queue_links.push(&mut self.queue, lowest);
        }
        self.prune();
    }

    fn bring(&mut self, block: u32) {
        if self.lir + self.queue.len() == self.places
            && let Some(victim) = self.queue_links.pop(&mut self.queue)
        {
            self.state[victim as usize] = State::Gone;
        }
        if self.lir_places == 0 {
            self.state[block as usize] = State::Hir;
            self.queue_links.push(&mut self.queue, block);
        } else if self.stack_up(block) || self.lir < self.lir_places {
            self.promote(block);
        } else {
            self.state[block as usize] = State::Hir;
            self.queue_links.push(&mut self.queue, block);
        }
    }
}

impl Cache for Lirs {
    fn reference(&mut self, block: u32) -> bool {
        match self.state[block as usize] {
            State::Gone => {
                self.bring(block);
                return false;
            }
            State::Lir => {
                self.stack_up(block);
                self.prune();
            }
            State::Hir => {
                self.queue_links.remove(&mut self.queue, block);
                if self.lir_places > 0 && self.stack_up(block) {
                    self.promote(block);
                } else {
                    self.queue_links.push(&mut self.queue, block);
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_second_reference_soon_makes_a_block_stay() {
        // Two LIR blocks and one HIR block.
        let mut lirs = Lirs::new(10, 3);
        assert_eq!([0, 1, 2, 3].map(|block| lirs.reference(block)), [false; 4]);
        assert!(lirs.state[0] == State::Lir && lirs.state[1] == State::Lir);
        assert!(lirs.state[2] == State::Gone && lirs.state[3] == State::Hir);
        // Block 2 is gone but in the stack: it becomes LIR, and the lowest LIR block, 0, HIR.
        assert!(!lirs.reference(2));
        assert!(lirs.state[2] == State::Lir && lirs.state[0] == State::Hir);
        assert!(lirs.state[3] == State::Gone && lirs.state[1] == State::Lir);
        // Block 0 left the stack with that, so its hit does not make it LIR again.
        assert!(lirs.reference(0));
        assert!(lirs.state[0] == State::Hir);
        assert!(lirs.reference(0), "it is in the stack now");
        assert!(lirs.state[0] == State::Lir && lirs.state[1] == State::Hir);
    }

    proptest! {
        #[test]
        fn places_are_never_exceeded(
            blocks in prop::collection::vec(0u32..40, 0..400),
            places in 1u32..30,
        ) {
            let mut lirs = Lirs::new(40, places);
            for block in blocks {
                let cached = lirs.state[block as usize] != State::Gone;
                prop_assert_eq!(lirs.reference(block), cached);
                let count = |state| lirs.state.iter().filter(|&&known| known == state).count();
                prop_assert_eq!(count(State::Lir), lirs.lir as usize);
                prop_assert_eq!(count(State::Hir), lirs.queue.len() as usize);
                prop_assert!(lirs.lir + lirs.queue.len() <= places);
                prop_assert!(lirs.lir <= lirs.lir_places);
                let lowest = lirs.stack.oldest();
                prop_assert!(lowest.is_none_or(|block| lirs.state[block as usize] == State::Lir));
            }
        }
    }
}
