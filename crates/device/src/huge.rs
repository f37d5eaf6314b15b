//! The allocator of the programs: large memory on huge pages, at their borders.
//!
//! A request finds its block at a random place of the RAM tier, the index and the tables beside
//! them. On pages of 4 KiB most of these looks miss the processor's table of translations, and
//! within a virtual machine such a miss costs more than the look itself. So what is large has a
//! mapping of its own, and the kernel is asked for pages of 2 MiB there (`madvise` with
//! `MADV_HUGEPAGE`; Documentation/admin-guide/mm/transhuge.rst). It is advice: where they are not
//! to be had or switched off, the pages are small. Beginning at a page, blocks and buckets also
//! lie in as few lines of memory as they can, which they do not behind the header of a heap.
//!
//! Memory is taken when it is first used, as ever, but 2 MiB at a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::c_void;
use std::ptr::{copy_nonoverlapping, null_mut};

use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap, munmap,
};

/// The page that the kernel is asked for.
const HUGE: usize = 2 << 20;
/// What is smaller is the system's allocator's: of the last huge page little is lost.
const LARGE: usize = 2 * HUGE;
/// Any mapping is aligned so far.
const PAGE: usize = 4096;

/// The system's allocator, but for what is large.
#[derive(Clone, Copy, Debug, Default)]
pub struct HugePages;

// SAFETY: whose an allocation is depends on its layout alone, so that it is freed and changed by
// who made it. A mapping is at least as long as its layout and aligned to a page; nobody else has
// it, and it is unmapped with the length it was mapped with.
unsafe impl GlobalAlloc for HugePages {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match mapping(layout) {
            Some(length) => map(length),
            // SAFETY: as the caller promises.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match mapping(layout) {
            Some(length) => map(length),
            // SAFETY: as the caller promises.
            None => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        match mapping(layout) {
            Some(length) => {
                // SAFETY: it was mapped with this length, and the caller has no more use for it.
                let unmapped = unsafe { munmap(start.cast(), length) };
                debug_assert!(unmapped.is_ok(), "a mapping of one's own can be unmapped");
            }
            // SAFETY: as the caller promises.
            None => unsafe { System.dealloc(start, layout) },
        }
    }

    unsafe fn realloc(&self, start: *mut u8, old: Layout, size: usize) -> *mut u8 {
        let Ok(new) = Layout::from_size_align(size, old.align()) else { return null_mut() };
        match (mapping(old), mapping(new)) {
            // SAFETY: as the caller promises.
            (None, None) => unsafe { System.realloc(start, old, size) },
            (Some(before), Some(after)) if before == after => start,
            (Some(before), Some(after)) => {
                // SAFETY: it was mapped with the length `before`, and the caller takes what is
                // returned in its place.
                let moved = unsafe { mremap(start.cast(), before, after, MremapFlags::MAYMOVE) };
                moved.map_or(null_mut(), |start| advised(start, after))
            }
            _ => {
                // SAFETY: `size` is not zero, as the caller promises; both allocations are as long
                // as what is copied, and the old one is the caller's, who gives it up.
                unsafe {
                    let moved = self.alloc(new);
                    if !moved.is_null() {
                        copy_nonoverlapping(start, moved, old.size().min(size));
                        self.dealloc(start, old);
                    }
                    moved
                }
            }
        }
    }
}

/// Length of the mapping for a layout; `None` when it gets none.
fn mapping(layout: Layout) -> Option<usize> {
    let large = layout.size() >= LARGE && layout.align() <= PAGE;
    // A layout is at most half of the address space long.
    large.then(|| layout.size().next_multiple_of(HUGE))
}

/// New memory, all zeros; null when there is none.
fn map(length: usize) -> *mut u8 {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping where the kernel has room for one touches nobody's memory.
    let start = unsafe { mmap_anonymous(null_mut(), length, access, MapFlags::PRIVATE) };
    start.map_or(null_mut(), |start| advised(start, length))
}

fn advised(start: *mut c_void, length: usize) -> *mut u8 {
    // SAFETY: the pages are a mapping of this allocator's own; this advice changes nothing that a
    // program can see.
    let _ = unsafe { madvise(start, length, Advice::LinuxHugepage) };
    start.cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocates, grows or shrinks, and frees, from below and above the limit to the other side.
    #[test]
    fn content_survives_every_change_of_size() {
        let sizes = [1, LARGE - 1, LARGE, LARGE + 1, LARGE + HUGE, 5 * HUGE + 777];
        for (from, to, align) in sizes.iter().flat_map(|from| {
            sizes.iter().flat_map(move |to| [1, 64, PAGE, HUGE].map(|align| (*from, *to, align)))
        }) {
            let old = Layout::from_size_align(from, align).unwrap();
            let new = Layout::from_size_align(to, align).unwrap();
            let last = from.min(to) - 1;
            // SAFETY: no layout is of size zero; what is read and written lies within the
            // allocation, which is freed with the layout that it has then.
            unsafe {
                let start = HugePages.alloc_zeroed(old);
                assert!((start as usize).is_multiple_of(align));
                assert_eq!((*start, *start.add(from - 1)), (0, 0));
                *start = 3;
                *start.add(last) = 7;
                let start = HugePages.realloc(start, old, to);
                assert!((start as usize).is_multiple_of(align));
                assert_eq!(*start.add(last), 7);
                *start.add(to - 1) = 9;
                HugePages.dealloc(start, new);
            }
        }
    }

    #[test]
    fn too_much_is_refused() {
        let layout = Layout::from_size_align(1 << 60, 8).unwrap();
        // SAFETY: the layout is not of size zero.
        assert!(unsafe { HugePages.alloc(layout) }.is_null());
    }
}
