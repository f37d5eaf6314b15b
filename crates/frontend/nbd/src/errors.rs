//! Failed requests in the words of the protocol.

use forebay_block::ErrorKind;
use forebay_nbd_wire::NbdError;

/// A request that is answered with an error and not passed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refusal {
    pub error: NbdError,
    pub message: &'static str,
}

impl Refusal {
    pub const fn new(error: NbdError, message: &'static str) -> Self {
        Self { error, message }
    }

    pub const STOPPING: Self = Self::new(NbdError::ESHUTDOWN, "the server is shutting down");
}

/// The error number for a failed `Io`. `ENOTSUP` is only for zeros that had to be fast: elsewhere
/// the specification has `EINVAL`.
pub(crate) fn number(kind: ErrorKind, fast_only: bool) -> NbdError {
    match kind {
        ErrorKind::Media | ErrorKind::DeviceGone | ErrorKind::Corrupt | ErrorKind::Timeout => {
            NbdError::EIO
        }
        ErrorKind::NoSpace => NbdError::ENOSPC,
        ErrorKind::OutOfRange => NbdError::EINVAL,
        ErrorKind::Unsupported if fast_only => NbdError::ENOTSUP,
        ErrorKind::Unsupported => NbdError::EINVAL,
        ErrorKind::ReadOnly => NbdError::EPERM,
        ErrorKind::ShuttingDown => NbdError::ESHUTDOWN,
    }
}
