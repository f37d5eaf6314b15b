//! Lists of numbered blocks, linked through arrays: a block is in at most one list of a set.

const NONE: u32 = u32::MAX;

/// Links between blocks, for any number of lists.
pub struct Links {
    newer: Vec<u32>,
    older: Vec<u32>,
}

/// The ends of a list.
#[derive(Clone, Copy)]
pub struct List {
    newest: u32,
    oldest: u32,
    len: u32,
}

impl List {
    /// A list without blocks.
    pub const EMPTY: Self = Self { newest: NONE, oldest: NONE, len: 0 };

    /// Number of blocks.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// The block that has been in the list for longest.
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}

impl Links {
    /// Links for blocks with numbers below `blocks`.
    pub fn new(blocks: u32) -> Self {
        Self { newer: vec![NONE; blocks as usize], older: vec![NONE; blocks as usize] }
    }

    /// Adds a block, which is in no list, as the newest.
    pub fn push(&mut self, list: &mut List, block: u32) {
        self.newer[block as usize] = NONE;
        self.older[block as usize] = list.newest;
        match list.newest {
            NONE => list.oldest = block,
            newest => self.newer[newest as usize] = block,
        }
        list.newest = block;
        list.len += 1;
    }

    /// Removes a block that is in the list.
    pub fn remove(&mut self, list: &mut List, block: u32) {
        let (newer, older) = (self.newer[block as usize], self.older[block as usize]);
        match newer {
            NONE => list.newest = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => list.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
        list.len -= 1;
    }

    /// Removes the oldest block.
    pub fn pop(&mut self, list: &mut List) -> Option<u32> {
        let block = list.oldest()?;
        self.remove(list, block);
        Some(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_leave_as_they_came_or_from_the_middle() {
        let (mut links, mut list, mut other) = (Links::new(6), List::EMPTY, List::EMPTY);
        (0..5).for_each(|block| links.push(&mut list, block));
        links.remove(&mut list, 2);
        links.push(&mut other, 2);
        links.remove(&mut list, 0);
        links.remove(&mut list, 4);
        links.push(&mut list, 0);
        assert_eq!((list.len(), list.oldest(), other.len()), (3, Some(1), 1));
        let left: Vec<_> = std::iter::from_fn(|| links.pop(&mut list)).collect();
        assert_eq!((left, list.len(), links.pop(&mut other)), (vec![1, 3, 0], 0, Some(2)));
    }
}
