//! Operations in flight, identified by small numbers that are reused.

use forebay_block::Slab as Table;

/// Identifies an operation in flight.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Id(pub u32);

/// Operations in flight by [`Id`]. An id that names none is a mistake of the engine.
#[derive(Debug)]
pub struct Slab<T>(Table<T>);

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self(Table::new(u32::MAX))
    }
}

impl<T> Slab<T> {
    /// Adds an item and returns its ID.
    pub fn insert(&mut self, item: T) -> Id {
        Id(self.0.insert(item))
    }

    /// Returns the ID that the next item will get.
    pub fn next_id(&self) -> Id {
        Id(self.0.next())
    }

    /// Takes an item out; its ID may be reused.
    pub fn remove(&mut self, id: Id) -> T {
        self.0.remove(id.0).expect("an operation ends once")
    }

    /// Returns the item with an ID.
    pub fn get(&self, id: Id) -> &T {
        self.0.get(id.0).expect("the operation is in flight")
    }

    /// Returns the item with an ID, for changes.
    pub fn get_mut(&mut self, id: Id) -> &mut T {
        self.0.get_mut(id.0).expect("the operation is in flight")
    }

    /// Returns all items, in the order of their IDs.
    pub fn iter(&self) -> impl Iterator<Item = (Id, &T)> {
        self.0.iter().map(|(at, item)| (Id(at), item))
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}
