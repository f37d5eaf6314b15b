//! Prefetching memory that is accessed soon; only on x86_64, since the standard library has no stable
//! way for others.

/// Asks the processor to load the cache line where `item` begins, without waiting for it. A load
/// would do so too, but it keeps its place among the instructions in progress until memory has
/// answered, so few of them can wait at the same time.
#[inline]
pub fn prefetch<T: ?Sized>(item: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing that a program can see, and SSE is part of x86_64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(item).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = item;
}
