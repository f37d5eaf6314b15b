//! Operations in flight, named by small numbers that are used again.

use forebay_block::Slab as Table;

/// Names an operation in flight.
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
    /// Adds an operation and names it.
    pub fn insert(&mut self, item: T) -> Id {
        Id(self.0.insert(item))
    }

    /// The name of the next operation.
    pub fn next_id(&self) -> Id {
        Id(self.0.next())
    }

    /// Takes an operation out.
    pub fn remove(&mut self, id: Id) -> T {
        self.0.remove(id.0).expect("an operation ends once")
    }

    /// An operation.
    pub fn get(&self, id: Id) -> &T {
        self.0.get(id.0).expect("the operation is in flight")
    }

    /// An operation, to change.
    pub fn get_mut(&mut self, id: Id) -> &mut T {
        self.0.get_mut(id.0).expect("the operation is in flight")
    }

    /// All of them, in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (Id, &T)> {
        self.0.iter().map(|(at, item)| (Id(at), item))
    }

    /// The number of operations.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}
