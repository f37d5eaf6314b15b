//! The properties of an export that a server announces in the handshake.

use forebay_nbd_wire::TransmissionFlags;

/// The announced properties of an export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Size of the export, in bytes.
    pub size: u64,
    /// Supported operations.
    pub flags: TransmissionFlags,
    /// Whether replies come in chunks.
    pub structured: bool,
    /// Offsets and lengths of requests are multiples of this, in bytes.
    pub minimum: u32,
    /// Preferred unit of I/O, in bytes.
    pub preferred: u32,
    /// Maximum length of a payload, in bytes.
    pub maximum: u32,
}
