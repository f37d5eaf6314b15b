//! Owned, page-aligned buffers, and the arena that supplies them on the hot path.
//!
//! An [`IoBuf`] is moved into a request and comes back with its completion, so no other code can
//! touch memory that the kernel is using. Its bytes are always initialized. It comes from the heap,
//! or from an [`Arena`]: one region that can be registered with io_uring once, cut into slots of
//! three sizes, each marked free or taken by a bit. Dropping a buffer frees its slot from any
//! thread.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const PAGE: usize = 4096;
/// Slot sizes of an arena in bytes, smallest first.
const CLASSES: [usize; 3] = [PAGE, 16 * PAGE, 256 * PAGE];

/// A page-aligned, initialized, owned byte buffer.
pub struct IoBuf {
    ptr: NonNull<u8>,
    len: usize,
    capacity: usize,
    home: Home,
}

enum Home {
    Nowhere,
    Heap,
    Slot { arena: Arc<Arena>, class: usize, index: usize },
}

// SAFETY: an IoBuf owns its bytes exclusively, wherever they live; the arena's slot bitmap is
// atomic.
unsafe impl Send for IoBuf {}
// SAFETY: shared access is read-only.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// A buffer without bytes; allocates nothing.
    #[must_use]
    pub fn empty() -> Self {
        Self { ptr: NonNull::dangling(), len: 0, capacity: 0, home: Home::Nowhere }
    }

    /// A buffer of `len` zero bytes from the heap.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        if len == 0 {
            return Self::empty();
        }
        let capacity = len.next_multiple_of(PAGE);
        let layout = heap_layout(capacity);
        // SAFETY: the layout has a size above zero.
        let raw = unsafe { alloc_zeroed(layout) };
        let ptr = NonNull::new(raw).unwrap_or_else(|| handle_alloc_error(layout));
        Self { ptr, len, capacity, home: Home::Heap }
    }

    /// A heap buffer with a copy of `bytes`.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buf = Self::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// Bytes that the buffer could hold without moving.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Shortens the buffer, or lengthens it up to its capacity. Bytes gained are unspecified but
    /// initialized.
    ///
    /// # Panics
    /// If `len` is above the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "length {len} exceeds capacity {}", self.capacity);
        self.len = len;
    }

    /// Whether the bytes lie in `arena`, whose region may be registered with a ring.
    #[must_use]
    pub fn is_from(&self, arena: &Arena) -> bool {
        matches!(&self.home, Home::Slot { arena: mine, .. } if std::ptr::eq(&**mine, arena))
    }
}

fn heap_layout(capacity: usize) -> Layout {
    Layout::from_size_align(capacity, PAGE).expect("a buffer's size fits the address space")
}

impl Drop for IoBuf {
    fn drop(&mut self) {
        match &self.home {
            Home::Nowhere => {}
            // SAFETY: allocated in `zeroed` with this very layout, and owned by no one else.
            Home::Heap => unsafe { dealloc(self.ptr.as_ptr(), heap_layout(self.capacity)) },
            Home::Slot { arena, class, index } => arena.free(*class, *index),
        }
    }
}

impl Default for IoBuf {
    fn default() -> Self {
        Self::empty()
    }
}

impl Deref for IoBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` points to `capacity >= len` initialized bytes that this buffer owns, or
        // is dangling with a length of zero.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for IoBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({} bytes)", self.len)
    }
}

/// One region of memory, cut into slots of 4 KiB, 64 KiB and 1 MiB.
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    classes: [SlotClass; CLASSES.len()],
}

struct SlotClass {
    offset: usize,
    slots: usize,
    /// One bit a slot, set when taken.
    taken: Box<[AtomicU64]>,
    /// Bitmap word where the next search starts.
    hint: AtomicUsize,
}

// SAFETY: the region is plain memory; slots are handed out exclusively through atomic bits.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// An arena of about `bytes` bytes, a third for each slot size, at least one slot of each.
    #[must_use]
    pub fn new(bytes: usize) -> Arc<Self> {
        let mut offset = 0;
        let classes = CLASSES.map(|size| {
            let slots = (bytes / CLASSES.len() / size).max(1);
            let words = (0..slots.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
            let class = SlotClass { offset, slots, taken: words, hint: AtomicUsize::new(0) };
            offset += slots * size;
            class
        });
        let layout = heap_layout(offset);
        // SAFETY: the layout has a size above zero.
        let raw = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(raw).unwrap_or_else(|| handle_alloc_error(layout));
        Arc::new(Self { base, bytes: offset, classes })
    }

    /// Start and length of the region, for registration with a ring.
    #[must_use]
    pub fn region(&self) -> (*mut u8, usize) {
        (self.base.as_ptr(), self.bytes)
    }

    fn take(self: &Arc<Self>, len: usize) -> Option<IoBuf> {
        let class = CLASSES.iter().position(|&size| len <= size)?;
        let index = self.classes[class].take()?;
        let offset = self.classes[class].offset + index * CLASSES[class];
        // SAFETY: `offset` is within the region, and the slot is ours until it is freed.
        let ptr = unsafe { self.base.add(offset) };
        let home = Home::Slot { arena: Arc::clone(self), class, index };
        Some(IoBuf { ptr, len, capacity: CLASSES[class], home })
    }

    fn free(&self, class: usize, index: usize) {
        let bit = 1u64 << (index % 64);
        let before = self.classes[class].taken[index / 64].fetch_and(!bit, Ordering::Release);
        debug_assert!(before & bit != 0, "a slot is freed once");
    }
}

impl SlotClass {
    fn take(&self) -> Option<usize> {
        let words = self.taken.len();
        let start = self.hint.load(Ordering::Relaxed);
        for step in 0..words {
            let word = (start + step) % words;
            let valid = if word + 1 < words || self.slots.is_multiple_of(64) {
                u64::MAX
            } else {
                (1u64 << (self.slots % 64)) - 1
            };
            let mut seen = self.taken[word].load(Ordering::Relaxed);
            while seen & valid != valid {
                let bit = (!seen & valid).trailing_zeros();
                let with = seen | 1 << bit;
                match self.taken[word].compare_exchange_weak(
                    seen,
                    with,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => {
                        self.hint.store(word, Ordering::Relaxed);
                        return Some(word * 64 + bit as usize);
                    }
                    Err(now) => seen = now,
                }
            }
        }
        None
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; every buffer holds an `Arc`, so none is
        // left.
        unsafe { dealloc(self.base.as_ptr(), heap_layout(self.bytes)) }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} bytes)", self.bytes)
    }
}

/// The source of buffers: an arena first, the heap if the arena is exhausted or absent.
#[derive(Clone, Debug, Default)]
pub struct BufPool {
    arena: Option<Arc<Arena>>,
}

impl BufPool {
    /// A pool over `arena`.
    #[must_use]
    pub fn new(arena: Arc<Arena>) -> Self {
        Self { arena: Some(arena) }
    }

    /// A buffer of `len` bytes whose content is unspecified but initialized.
    #[must_use]
    pub fn get(&self, len: usize) -> IoBuf {
        if len == 0 {
            return IoBuf::empty();
        }
        let slot = self.arena.as_ref().and_then(|arena| arena.take(len));
        slot.unwrap_or_else(|| IoBuf::zeroed(len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_exclusive_and_come_back() {
        let arena = Arena::new(3 << 20);
        let pool = BufPool::new(Arc::clone(&arena));
        let mut held: Vec<IoBuf> = (0..300).map(|_| pool.get(4096)).collect();
        for (i, buf) in held.iter_mut().enumerate() {
            buf.fill(i as u8);
        }
        assert!(held.iter().enumerate().all(|(i, buf)| buf[..] == [i as u8; 4096]));
        assert_eq!(held.iter().filter(|buf| buf.is_from(&arena)).count(), 256);
        held.clear();
        assert!(pool.get(1).is_from(&arena));
        assert!(pool.get(1 << 20).is_from(&arena));
        assert!(!pool.get((1 << 20) + 1).is_from(&arena));
    }

    #[test]
    fn buffers_are_page_aligned_and_sized() {
        for len in [1usize, 511, 4096, 5000, 1 << 20] {
            let buf = IoBuf::zeroed(len);
            assert_eq!(buf.len(), len);
            assert_eq!(buf.as_ptr() as usize % 4096, 0);
            assert!(buf[..] == vec![0; len]);
        }
        assert!(IoBuf::empty().is_empty());
    }
}

/// Models, run by `tools/loom`.
#[cfg(all(test, loom))]
mod models {
    use loom::cell::UnsafeCell;
    use loom::thread;

    use super::*;

    /// Two threads take the only small slot again and again. The holder is alone, and sees the
    /// previous holder's writes.
    #[test]
    fn model_a_slot_has_one_owner_at_a_time() {
        loom::model(|| {
            let arena = Arena::new(3 * PAGE);
            // Stands for the bytes of the slot; loom does not see accesses to them.
            let slot = Arc::new(UnsafeCell::new(0));
            let work = |arena: Arc<Arena>, slot: Arc<UnsafeCell<u32>>| {
                let mut had = 0;
                for _ in 0..2 {
                    let Some(buf) = arena.take(PAGE) else { continue };
                    // SAFETY: loom aborts the model if the other thread could hold the slot at the
                    // same time.
                    slot.with_mut(|count| unsafe { *count += 1 });
                    drop(buf);
                    had += 1;
                }
                had
            };
            let (theirs, place) = (Arc::clone(&arena), Arc::clone(&slot));
            let other = thread::spawn(move || work(theirs, place));
            let had = work(Arc::clone(&arena), Arc::clone(&slot)) + other.join().unwrap();
            assert!(had >= 2, "who is alone is not turned away");
            let buf = arena.take(PAGE).expect("all came back");
            // SAFETY: both threads are done.
            slot.with(|count| assert_eq!(unsafe { *count }, had));
            drop(buf);
        });
    }

    /// Two threads share a word of the bitmap, but never a slot in it.
    #[test]
    fn model_two_slots_of_a_word_are_two() {
        loom::model(|| {
            let arena = Arena::new(3 * 2 * PAGE);
            let slots = Arc::new([UnsafeCell::new(0), UnsafeCell::new(0)]);
            let work = |arena: Arc<Arena>, slots: Arc<[UnsafeCell<u32>; 2]>| {
                let buf = arena.take(PAGE).expect("there are two");
                let at = (buf.as_ptr() as usize - arena.region().0 as usize) / PAGE;
                // SAFETY: loom aborts the model if the other thread could hold the slot at the same
                // time.
                slots[at].with_mut(|count| unsafe { *count += 1 });
                drop(buf);
            };
            let (theirs, places) = (Arc::clone(&arena), Arc::clone(&slots));
            let other = thread::spawn(move || work(theirs, places));
            work(arena, Arc::clone(&slots));
            other.join().unwrap();
        });
    }
}
