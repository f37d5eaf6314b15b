//! The one error type of block I/O. Its kind tells the caller what to do; the cause is kept.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// The outcome of block I/O.
pub type IoResult<T> = Result<T, IoError>;

/// The kind of a failure, by what the caller can do about it. At most nine kinds; the operating
/// system's error number, if there was one, is in the source.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ErrorKind {
    /// The device could not read or write this range; other ranges may work.
    Media,
    /// No space left to take the write.
    NoSpace,
    /// The range is not on the device, or not aligned to its blocks.
    OutOfRange,
    /// The device does not support this operation; check its `DeviceInfo` first.
    Unsupported,
    /// The device cannot be written.
    ReadOnly,
    /// The device no longer answers.
    DeviceGone,
    /// The bytes read do not match their checksum.
    Corrupt,
    /// No answer arrived in time.
    Timeout,
    /// The server is stopping and accepts no new requests.
    ShuttingDown,
}

impl ErrorKind {
    /// The nearest error number of the operating system, for protocols that use those.
    #[must_use]
    pub fn errno(self) -> i32 {
        match self {
            Self::Media | Self::DeviceGone | Self::Corrupt => 5, // EIO
            Self::NoSpace => 28,                                 // ENOSPC
            Self::OutOfRange => 22,                              // EINVAL
            Self::Unsupported => 95,                             // EOPNOTSUPP
            Self::ReadOnly => 1,                                 // EPERM
            Self::Timeout => 110,                                // ETIMEDOUT
            Self::ShuttingDown => 108,                           // ESHUTDOWN
        }
    }

    /// A description of the kind, for messages.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Media => "the device failed the request",
            Self::NoSpace => "no space left on the device",
            Self::OutOfRange => "the range is not on the device or not aligned to it",
            Self::Unsupported => "the device does not support the operation",
            Self::ReadOnly => "the device is read-only",
            Self::DeviceGone => "the device does not answer",
            Self::Corrupt => "the data does not match its checksum",
            Self::Timeout => "no answer in time",
            Self::ShuttingDown => "the server is shutting down",
        }
    }
}

/// A failed request: kind, and the cause if there is one. Cheap to clone, since one failed fetch
/// may answer many waiting requests.
#[derive(Clone, Debug)]
pub struct IoError {
    kind: ErrorKind,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

impl IoError {
    /// An error that keeps its cause.
    pub fn with_source(kind: ErrorKind, source: impl Error + Send + Sync + 'static) -> Self {
        Self { kind, source: Some(Arc::new(source)) }
    }

    /// The error for a number returned by the operating system.
    #[must_use]
    pub fn from_errno(errno: i32) -> Self {
        let kind = match errno {
            28 | 122 => ErrorKind::NoSpace,     // ENOSPC, EDQUOT
            22 => ErrorKind::OutOfRange,        // EINVAL
            95 | 25 => ErrorKind::Unsupported,  // EOPNOTSUPP, ENOTTY
            1 | 13 | 30 => ErrorKind::ReadOnly, // EPERM, EACCES, EROFS
            // ENXIO, ENODEV, EPIPE, ENOLINK (a path to a disk is lost), ECONNRESET
            6 | 19 | 32 | 67 | 104 => ErrorKind::DeviceGone,
            62 | 110 => ErrorKind::Timeout, // ETIME, ETIMEDOUT
            108 => ErrorKind::ShuttingDown, // ESHUTDOWN
            _ => ErrorKind::Media,
        };
        Self::with_source(kind, std::io::Error::from_raw_os_error(errno))
    }

    /// What the caller can do about the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl From<ErrorKind> for IoError {
    fn from(kind: ErrorKind) -> Self {
        Self { kind, source: None }
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.text())
    }
}

impl Error for IoError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|e| e as _)
    }
}
