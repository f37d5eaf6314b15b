//! Why a device could not be opened. Every message names the value and what to do.

use std::io;

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The operating system refused.
    #[error("{what}: {source}{}", hint(source))]
    System {
        /// What was tried, with the path or address.
        what: String,
        /// The refusal.
        source: io::Error,
    },
    /// Someone else has it open.
    #[error("{path} is in use by another process, or mounted; end that first")]
    InUse {
        /// The device.
        path: String,
    },
    /// It is there, but cannot serve as a device.
    #[error("{path} {reason}")]
    Unfit {
        /// The device.
        path: String,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// A URI that is not understood.
    #[error("{uri}: {reason}")]
    BadUri {
        /// The URI.
        uri: String,
        /// Which part of it, and what would be right.
        reason: String,
    },
    /// The other side of a connection answered with something else than the device.
    #[error("{peer}: {reason}")]
    Refused {
        /// The URI of the peer.
        peer: String,
        /// What it said.
        reason: String,
    },
}

/// What to do about a refusal.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; name one that is there",
        io::ErrorKind::PermissionDenied => "; run this as a user who may, or name another",
        io::ErrorKind::ConnectionRefused => "; start its server, or name another",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            "; see whether its host is up"
        }
        io::ErrorKind::TimedOut => "; see whether its server is up",
        _ => "",
    }
}

impl OpenError {
    /// Wraps what the operating system said.
    pub(crate) fn system(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { what: what.into(), source: source.into() }
    }

    pub(crate) fn unfit(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Unfit { path: path.into(), reason: reason.into() }
    }
}
