//! The programs' allocator: large allocations are page-aligned mappings with huge pages.
//!
//! A request accesses random places of the RAM tier, the index and the tables next to them. With
//! pages of 4 KiB most of these accesses miss the TLB, and within a virtual machine a TLB miss
//! costs more than the access itself. So every large allocation gets its own mapping, and the
//! kernel is asked for 2 MiB pages there (`madvise` with `MADV_HUGEPAGE`;
//! Documentation/admin-guide/mm/transhuge.rst). This is advice: if huge pages are unavailable or
//! switched off, the pages are small. Since mappings are page-aligned, blocks and buckets also span
//! as few cache lines as possible, which they do not after a heap header.
//!
//! Memory is still committed on first use, but 2 MiB at a time. [`populate`] commits all at once.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, copy_nonoverlapping, null_mut};
use std::{fs, io};

use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap, munmap,
};

/// Size of a huge page, in bytes.
const HUGE: usize = 2 << 20;
/// Smaller allocations are left to the system's allocator; from this size on, the unused rest of
/// the last huge page is a small share.
const LARGE: usize = 2 * HUGE;
/// Alignment of any mapping, in bytes.
const PAGE: usize = 4096;

/// The system's allocator, except for large allocations.
#[derive(Clone, Copy, Debug, Default)]
pub struct HugePages;

// SAFETY: the layout alone decides which allocator an allocation belongs to, so it is freed and
// resized by the allocator that made it. A mapping is at least as long as its layout and aligned to
// a page; it is not shared, and it is unmapped with the length it was mapped with.
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
                // SAFETY: it was mapped with this length, and the caller no longer uses it.
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
                // SAFETY: it was mapped with the length `before`, and the caller uses the returned
                // address in its place.
                let moved = unsafe { mremap(start.cast(), before, after, MremapFlags::MAYMOVE) };
                moved.map_or(null_mut(), |start| advised(start, after))
            }
            _ => {
                // SAFETY: `size` is not zero, as the caller promises; both allocations are at least
                // as long as the copied bytes, and the caller gives up the old one.
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

/// Length of the mapping for a layout; `None` if the layout gets no mapping of its own.
fn mapping(layout: Layout) -> Option<usize> {
    let large = layout.size() >= LARGE && layout.align() <= PAGE;
    // A layout is at most half of the address space.
    large.then(|| layout.size().next_multiple_of(HUGE))
}

/// A new mapping, all zeros; null if there is no memory.
fn map(length: usize) -> *mut u8 {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address chosen by the kernel affects no existing memory.
    let start = unsafe { mmap_anonymous(null_mut(), length, access, MapFlags::PRIVATE) };
    start.map_or(null_mut(), |start| advised(start, length))
}

fn advised(start: *mut c_void, length: usize) -> *mut u8 {
    // SAFETY: the pages are a mapping of this allocator; this advice has no effect visible to a
    // program.
    let _ = unsafe { madvise(start, length, Advice::LinuxHugepage) };
    start.cast()
}

/// Commits all private memory that the process has reserved so far, so that its first use costs
/// nothing later. Only for measurements: an empty cache reserves far more memory than it uses.
/// Returns the number of bytes; memory that is freed meanwhile, or not available, does not count.
///
/// # Errors
/// If the mappings of the process cannot be listed, or the kernel has no `MADV_POPULATE_WRITE`
/// (Linux 5.14).
pub fn populate() -> io::Result<usize> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let mut bytes = 0;
    for range in maps.lines().filter_map(anonymous) {
        for from in range.clone().step_by(HUGE) {
            let (start, length) = (ptr::without_provenance_mut(from), HUGE.min(range.end - from));
            // SAFETY: this advice changes no content, of whichever mapping.
            match unsafe { madvise(start, length, Advice::LinuxPopulateWrite) } {
                Ok(()) => bytes += length,
                Err(Errno::NOMEM) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(bytes)
}

/// The addresses of a line of `/proc/self/maps` (proc_pid_maps(5)), if these are private writable
/// memory of no file.
fn anonymous(line: &str) -> Option<Range<usize>> {
    let mut fields = line.split_ascii_whitespace();
    let (addresses, access) = (fields.next()?, fields.next()?);
    let has_name = fields.nth(3).is_some();
    let (start, end) = addresses.split_once('-')?;
    let address = |hex| usize::from_str_radix(hex, 16).ok();
    let range = address(start)?..address(end)?;
    (access == "rw-p" && !has_name).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_anonymous_memory_is_populated() {
        let memory = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0 ";
        assert_eq!(anonymous(memory), Some(0x7f00_0000_0000..0x7f00_0020_0000));
        let others = [
            "7f0000000000-7f0000200000 r--p 00000000 00:00 0 ",
            "7f0000000000-7f0000200000 rw-s 00000000 00:00 0 ",
            "7f0000000000-7f0000200000 rw-p 00000000 08:01 77                   /lib/libc.so.6",
            "7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                    [stack]",
            "7f0000000000 rw-p",
            "",
        ];
        assert_eq!(others.map(anonymous), [const { None }; 6]);
    }

    #[test]
    fn what_was_populated_is_used_without_page_faults() {
        let layout = Layout::from_size_align(3 * LARGE, 64).unwrap();
        let faults_of_first_use = |prepare: fn()| {
            // SAFETY: the layout is not empty, and all accesses lie within the allocation.
            unsafe {
                let start = HugePages.alloc(layout);
                assert!(!start.is_null());
                prepare();
                let before = page_faults();
                (0..layout.size()).step_by(PAGE).for_each(|at| start.add(at).write_volatile(1));
                let faults = page_faults() - before;
                HugePages.dealloc(start, layout);
                faults
            }
        };
        let huge_pages = (layout.size() / HUGE) as i64;
        assert!(faults_of_first_use(|| ()) >= huge_pages);
        // The kernel may take a page away again, as to move it to another node.
        let rest = faults_of_first_use(|| assert!(populate().unwrap() >= 3 * LARGE));
        assert!(rest < huge_pages / 2, "{rest}");
    }

    /// Page faults of this thread so far.
    fn page_faults() -> i64 {
        // SAFETY: all fields are integers; the kernel fills in the structure.
        unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &mut usage), 0);
            usage.ru_minflt
        }
    }

    /// Allocates, grows or shrinks, and frees, across the size limit in both directions.
    #[test]
    fn content_survives_every_change_of_size() {
        let sizes = [1, LARGE - 1, LARGE, LARGE + 1, LARGE + HUGE, 5 * HUGE + 777];
        for (from, to, align) in sizes.iter().flat_map(|from| {
            sizes.iter().flat_map(move |to| [1, 64, PAGE, HUGE].map(|align| (*from, *to, align)))
        }) {
            let old = Layout::from_size_align(from, align).unwrap();
            let new = Layout::from_size_align(to, align).unwrap();
            let last = from.min(to) - 1;
            // SAFETY: no layout has size zero; all accesses lie within the allocation, which is
            // freed with its current layout.
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
        // SAFETY: the layout does not have size zero.
        assert!(unsafe { HugePages.alloc(layout) }.is_null());
    }
}
