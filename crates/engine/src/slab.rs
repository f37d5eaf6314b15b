//! Operations in flight, identified by small numbers that are reused.

/// Identifies an operation in flight.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Id(pub u32);

/// Slots addressed by [`Id`].
#[derive(Debug)]
pub struct Slab<T> {
    items: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { items: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Adds an item and returns its ID.
    pub fn insert(&mut self, item: T) -> Id {
        if let Some(i) = self.free.pop() {
            self.items[i as usize] = Some(item);
            return Id(i);
        }
        self.items.push(Some(item));
        Id(u32::try_from(self.items.len() - 1).expect("operations in flight fit 32 bits"))
    }

    /// Returns the ID that the next item will get.
    pub fn next_id(&self) -> Id {
        let fresh = || u32::try_from(self.items.len()).expect("operations in flight fit 32 bits");
        Id(self.free.last().copied().unwrap_or_else(fresh))
    }

    /// Takes an item out; its ID may be reused.
    pub fn remove(&mut self, id: Id) -> T {
        let item = self.items[id.0 as usize].take().expect("an operation ends once");
        self.free.push(id.0);
        item
    }

    /// Returns the item with an ID.
    pub fn get(&self, id: Id) -> &T {
        self.items[id.0 as usize].as_ref().expect("the operation is in flight")
    }

    /// Returns the item with an ID, for changes.
    pub fn get_mut(&mut self, id: Id) -> &mut T {
        self.items[id.0 as usize].as_mut().expect("the operation is in flight")
    }

    /// Returns all items, in the order of their IDs.
    pub fn iter(&self) -> impl Iterator<Item = (Id, &T)> {
        let named = self.items.iter().enumerate();
        named.filter_map(|(i, item)| item.as_ref().map(|item| (Id(i as u32), item)))
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.items.len() - self.free.len()
    }
}
