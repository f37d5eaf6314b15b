//! What a server says of an export in the handshake.

use forebay_nbd_wire::TransmissionFlags;

/// What a server said of an export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Bytes.
    pub size: u64,
    /// What it can do.
    pub flags: TransmissionFlags,
    /// Whether replies come in chunks.
    pub structured: bool,
    /// Requests are multiples of this.
    pub minimum: u32,
    /// The unit of I/O that it likes best.
    pub preferred: u32,
    /// Bytes in the longest payload.
    pub maximum: u32,
}
