//! Why a pool of shard threads did not start.

use std::error::Error;
use std::fmt;
use std::io;

/// Why a pool did not start.
#[derive(Debug)]
pub enum StartError {
    /// A thread, its ring, or a queue to a device could not be created.
    Io(io::Error),
    /// A shard cannot use the cache.
    Refused {
        /// Index of the shard.
        shard: usize,
        /// The reason, as text.
        why: String,
    },
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "cannot start the shard threads: {error}"),
            Self::Refused { shard, why } => {
                write!(f, "shard {shard} cannot use the cache: {why}")
            }
        }
    }
}

impl Error for StartError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::Refused { .. } => None,
        }
    }
}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
