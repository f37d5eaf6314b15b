//! Synchronization types: from the standard library, or with `--cfg loom` from loom, which runs a
//! model in every order that the memory model allows. Code that has loom models imports them from
//! here, so that the modeled code is the shipped code. `Arc` is the standard library's in both.

#[cfg(not(loom))]
pub use std::sync::{Mutex, MutexGuard, OnceLock, atomic};

#[cfg(loom)]
pub use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(loom)]
pub use once::OnceLock;

/// loom has no `OnceLock`. The value is in one of the standard library's; a loom atomic records
/// whether it is set, with the orderings that the standard library documents.
#[cfg(loom)]
mod once {
    use super::atomic::{AtomicBool, Ordering};

    /// A value that is set once.
    #[derive(Debug)]
    pub struct OnceLock<T> {
        set: AtomicBool,
        value: std::sync::OnceLock<T>,
    }

    impl<T> OnceLock<T> {
        /// A cell without a value.
        #[must_use]
        pub fn new() -> Self {
            Self { set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
        }

        /// The value, if it is set.
        pub fn get(&self) -> Option<&T> {
            if self.set.load(Ordering::Acquire) { self.value.get() } else { None }
        }

        /// Sets the value.
        ///
        /// # Errors
        /// Returns `value` if the cell already had one.
        pub fn set(&self, value: T) -> Result<(), T> {
            self.value.set(value)?;
            self.set.store(true, Ordering::Release);
            Ok(())
        }
    }

    impl<T> Default for OnceLock<T> {
        fn default() -> Self {
            Self::new()
        }
    }
}
