//! What threads share: the standard library's, or with `--cfg loom` that of loom, which runs a
//! model in every order that the memory model allows. Code with models takes these from here, so
//! that what is modelled is what is shipped. `Arc` is the standard library's in both.

#[cfg(not(loom))]
pub use std::sync::{Mutex, MutexGuard, OnceLock, atomic};

#[cfg(loom)]
pub use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(loom)]
pub use once::OnceLock;

/// loom has none: the value is in the standard library's, and whether it is there in an atomic of
/// loom's, with the orderings that the standard library documents.
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
        /// Without a value.
        #[must_use]
        pub fn new() -> Self {
            Self { set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
        }

        /// The value, if it is there.
        pub fn get(&self) -> Option<&T> {
            if self.set.load(Ordering::Acquire) { self.value.get() } else { None }
        }

        /// Sets it.
        ///
        /// # Errors
        /// The value, if there was one.
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
