//! A table of values identified by number. Numbers are reused last in, first out; the size is
//! bounded.

/// A table of at most `limit` values; a value's number is free again once it is removed.
#[derive(Debug)]
pub struct Slab<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
    limit: u32,
}

impl<T> Slab<T> {
    /// An empty table. Memory is allocated as it fills.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self { places: Vec::new(), free: Vec::new(), limit }
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether the table is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the table is at its limit.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.places.len() == self.limit as usize
    }

    /// The number of the next value; `limit` if the table is full.
    #[must_use]
    pub fn next(&self) -> u32 {
        self.free.last().copied().unwrap_or(self.places.len() as u32)
    }

    /// Inserts a value and returns its number.
    ///
    /// # Panics
    /// If the table is full.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(at) = self.free.pop() {
            self.places[at as usize] = Some(value);
            return at;
        }
        assert!(!self.is_full(), "the table holds at most {} values", self.limit);
        let at = u32::try_from(self.places.len()).expect("below the limit, a u32");
        self.places.push(Some(value));
        at
    }

    /// Removes and returns a value; `None` if the number is not in use.
    pub fn remove(&mut self, at: u32) -> Option<T> {
        let value = self.places.get_mut(at as usize)?.take();
        if value.is_some() {
            self.free.push(at);
        }
        value
    }

    /// Takes every value out, in the order of numbers.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        self.free.clear();
        self.places.drain(..).flatten()
    }

    /// The value with this number.
    #[must_use]
    pub fn get(&self, at: u32) -> Option<&T> {
        self.places.get(at as usize)?.as_ref()
    }

    /// Mutable access to the value with this number.
    pub fn get_mut(&mut self, at: u32) -> Option<&mut T> {
        self.places.get_mut(at as usize)?.as_mut()
    }

    /// Every value with its number, in ascending order of number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.places.iter().zip(0u32..).filter_map(|(place, at)| Some((at, place.as_ref()?)))
    }

    /// Mutable access to every value, with its number.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.places.iter_mut().zip(0u32..).filter_map(|(place, at)| Some((at, place.as_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_reused_and_the_limit_holds() {
        let mut slab = Slab::new(3);
        assert_eq!([slab.insert('a'), slab.insert('b'), slab.insert('c')], [0, 1, 2]);
        assert!(slab.is_full());
        assert_eq!(slab.remove(1), Some('b'));
        assert_eq!(slab.remove(1), None);
        assert_eq!(slab.remove(7), None);
        assert!(!slab.is_full());
        assert_eq!((slab.next(), slab.insert('d'), slab.next()), (1, 1, 3));
        assert_eq!(
            slab.iter().map(|(at, &v)| (at, v)).collect::<Vec<_>>(),
            [(0, 'a'), (1, 'd'), (2, 'c')]
        );
        assert_eq!(slab.len(), 3);
        slab.remove(0);
        assert_eq!(slab.drain().collect::<Vec<_>>(), ['d', 'c']);
        assert!(slab.is_empty());
        assert_eq!(slab.insert('e'), 0);
    }
}
