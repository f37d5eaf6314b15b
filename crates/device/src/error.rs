//! Why a device could not be opened. Every message names the value and what to do.

use std::io;

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The operating system refused.
    #[error("{what}: {source}{}", hint(source))]
    System {
        /// The attempted action, with the path or address.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Another process has it open.
    #[error(
        "{path} is in use by another process, or mounted; stop that process or unmount it first"
    )]
    InUse {
        /// The device.
        path: String,
    },
    /// It exists, but cannot serve as a device.
    #[error("{path} {reason}")]
    Unfit {
        /// The device.
        path: String,
        /// The problem, and what would be valid.
        reason: String,
    },
    /// The URI is invalid.
    #[error("{uri}: {reason}")]
    BadUri {
        /// The URI.
        uri: String,
        /// The problem, and what would be valid.
        reason: String,
    },
    /// The peer refused, or sent an unexpected answer.
    #[error("{peer}: {reason}")]
    Refused {
        /// The URI of the peer.
        peer: String,
        /// Its answer.
        reason: String,
    },
}

/// Advice for an error of the operating system.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; name one that is there",
        io::ErrorKind::PermissionDenied => "; run this as a user with access, or name another",
        io::ErrorKind::ConnectionRefused => "; start its server, or name another",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            "; check that its host is up"
        }
        io::ErrorKind::TimedOut => "; check that its server is up",
        _ => "",
    }
}

impl OpenError {
    /// Wraps an error of the operating system.
    pub(crate) fn system(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { what: what.into(), source: source.into() }
    }

    pub(crate) fn unfit(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Unfit { path: path.into(), reason: reason.into() }
    }
}
