//! Prefetching memory that is accessed soon.

/// Asks the processor to load the cache line where `item` begins, without waiting for it. A load
/// would do so too, but it keeps its place among the instructions in progress until memory has
/// answered, so few of them can wait at the same time. It is what other processors than x86_64 get:
/// the standard library has no stable prefetch for them.
#[inline]
pub fn prefetch<T>(item: &T) {
    let line = std::ptr::from_ref(item);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing that a program can see, and SSE is part of x86_64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    if size_of::<T>() > 0 {
        // SAFETY: the byte belongs to the item, and may have no value, as between fields.
        unsafe { line.cast::<std::mem::MaybeUninit<u8>>().read_volatile() };
    }
}
