//! Errors of the protocol for failed requests.

use forebay_block::ErrorKind;
use forebay_nbd_wire::NbdError;

/// A request that is answered with an error instead of being passed on.
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

/// The protocol's error for a failed `Io`. `ENOTSUP` is only for zeroing that had to be fast; in
/// other cases the specification requires `EINVAL`.
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
