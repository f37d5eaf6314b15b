//! Answers to the kernel: a header, followed by the operation's result.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The header that every answer begins with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct OutHeader {
    len: u32,
    error: i32,
    unique: u64,
}

impl OutHeader {
    /// Length of the header, in bytes.
    pub const BYTES: usize = 16;

    /// The header before `body` bytes; `errno` is 0, or the error number.
    #[must_use]
    pub fn new(unique: u64, errno: i32, body: usize) -> Self {
        let len = u32::try_from(Self::BYTES + body).expect("an answer is shorter than 4 GiB");
        Self { len, error: -errno, unique }
    }

    /// The message by which a server asks for every request again that it, or the server before it,
    /// has read and not answered (`FUSE_NOTIFY_RESEND`, Linux 6.9). The kernel then marks the
    /// highest bit of their `unique`; the answer must have it too.
    #[must_use]
    pub fn resend() -> Self {
        const NOTIFY_RESEND: i32 = 7;
        Self::notice(NOTIFY_RESEND, 0)
    }

    /// The header of a notice, a message that answers no request, before `body` bytes.
    fn notice(code: i32, body: usize) -> Self {
        let len = u32::try_from(Self::BYTES + body).expect("a notice is short");
        Self { len, error: code, unique: 0 }
    }

    /// The encoded header.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        zerocopy::transmute!(*self)
    }
}

/// The notice by which the kernel forgets the attributes of an inode (`FUSE_NOTIFY_INVAL_INODE`);
/// with `content`, also what it has cached of it: for a directory, the list of its names.
#[must_use]
pub fn forget_inode(node: u64, content: bool) -> Vec<u8> {
    const NOTIFY_INVAL_INODE: i32 = 2;
    // A negative offset stands for the attributes alone, and length 0 for all after the offset.
    let offset = if content { 0 } else { -1_i64 };
    let body = [node.to_le_bytes(), offset.to_le_bytes(), 0_i64.to_le_bytes()].concat();
    [&OutHeader::notice(NOTIFY_INVAL_INODE, body.len()).encode()[..], &body].concat()
}

/// The notice by which the kernel forgets a name in a directory (`FUSE_NOTIFY_INVAL_ENTRY`).
#[must_use]
pub fn forget_name(directory: u64, name: &str) -> Vec<u8> {
    const NOTIFY_INVAL_ENTRY: i32 = 3;
    let length = u32::try_from(name.len()).expect("a name is short");
    let head = [directory.to_le_bytes(), u64::from(length).to_le_bytes()].concat();
    let body = [&head[..], name.as_bytes(), &[0]].concat();
    [&OutHeader::notice(NOTIFY_INVAL_ENTRY, body.len()).encode()[..], &body].concat()
}

/// The attributes of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attributes {
    /// Its inode number.
    pub node: u64,
    /// Its size, in bytes.
    pub size: u64,
    /// Kind and permission bits.
    pub mode: u32,
    /// Number of links.
    pub links: u32,
    /// User ID of the owner.
    pub uid: u32,
    /// Group ID of the owner.
    pub gid: u32,
    /// Modification time, in seconds since 1970.
    pub seconds: u64,
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Attr {
    node: u64,
    size: u64,
    blocks: u64,
    times: [u64; 3],
    nanos: [u32; 3],
    mode: u32,
    links: u32,
    uid: u32,
    gid: u32,
    device: u32,
    block_size: u32,
    flags: u32,
}

impl Attr {
    fn of(from: &Attributes) -> Self {
        Self {
            node: from.node,
            size: from.size,
            blocks: from.size.div_ceil(512),
            times: [from.seconds; 3],
            nanos: [0; 3],
            mode: from.mode,
            links: from.links,
            uid: from.uid,
            gid: from.gid,
            device: 0,
            block_size: 4096,
            flags: 0,
        }
    }
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct EntryOut {
    node: u64,
    generation: u64,
    valid: [u64; 2],
    valid_nanos: [u32; 2],
    attr: Attr,
}

/// The answer to a lookup: the file's attributes, and their validity in seconds.
#[must_use]
pub fn entry_out(file: &Attributes, valid: u64) -> [u8; 128] {
    let attr = Attr::of(file);
    let (valid, valid_nanos) = ([valid; 2], [0; 2]);
    zerocopy::transmute!(EntryOut { node: file.node, generation: 0, valid, valid_nanos, attr })
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct AttrOut {
    valid: u64,
    valid_nanos: u32,
    padding: u32,
    attr: Attr,
}

/// A file's attributes, and their validity in seconds.
#[must_use]
pub fn attr_out(file: &Attributes, valid: u64) -> [u8; 104] {
    let attr = Attr::of(file);
    zerocopy::transmute!(AttrOut { valid, valid_nanos: 0, padding: 0, attr })
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct OpenOut {
    handle: u64,
    flags: u32,
    backing: u32,
}

/// The answer to an open: a handle, and bits of [`crate::Open`].
#[must_use]
pub fn open_out(handle: u64, flags: u32) -> [u8; 16] {
    zerocopy::transmute!(OpenOut { handle, flags, backing: 0 })
}

/// The answer to a write: the number of bytes written.
#[must_use]
pub fn write_out(bytes: u32) -> [u8; 8] {
    zerocopy::transmute!([bytes, 0])
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct StatfsOut {
    blocks: u64,
    free: u64,
    available: u64,
    files: u64,
    files_free: u64,
    block_size: u32,
    name_bytes: u32,
    fragment: u32,
    padding: u32,
    spare: [u32; 6],
}

/// File-system statistics: this many bytes in this many files, with nothing free.
#[must_use]
pub fn statfs_out(bytes: u64, files: u64, name_bytes: u32) -> [u8; 80] {
    zerocopy::transmute!(StatfsOut {
        blocks: bytes.div_ceil(4096),
        free: 0,
        available: 0,
        files,
        files_free: 0,
        block_size: 4096,
        name_bytes,
        fragment: 4096,
        padding: 0,
        spare: [0; 6],
    })
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct InitOut {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    max_background: u16,
    congestion: u16,
    max_write: u32,
    time_granularity: u32,
    max_pages: u16,
    map_alignment: u16,
    flags2: u32,
    unused: [u32; 7],
}

/// The server's answer to an init request: the version, bits of [`crate::Init`], the maximum length
/// of a write or read in bytes (a multiple of 4096), and the maximum number of background requests
/// in flight.
#[must_use]
pub fn init_out(
    version: (u32, u32),
    flags: u64,
    max_readahead: u32,
    request_bytes: u32,
    background: u16,
) -> [u8; 64] {
    zerocopy::transmute!(InitOut {
        major: version.0,
        minor: version.1,
        max_readahead,
        flags: flags as u32,
        max_background: background,
        congestion: background / 4 * 3,
        max_write: request_bytes,
        time_granularity: 1,
        max_pages: u16::try_from(request_bytes / 4096).unwrap_or(u16::MAX),
        map_alignment: 0,
        flags2: (flags >> 32) as u32,
        unused: [0; 7],
    })
}

/// Appends a directory entry; `next` is the offset of the following one. Returns false if it does
/// not fit into `room` bytes.
pub fn dirent(out: &mut Vec<u8>, room: usize, node: u64, next: u64, mode: u32, name: &str) -> bool {
    let bytes = (24 + name.len()).next_multiple_of(8);
    if out.len() + bytes > room {
        return false;
    }
    let end = out.len() + bytes;
    let length = u32::try_from(name.len()).expect("a name is short");
    out.extend_from_slice(&node.to_ne_bytes());
    out.extend_from_slice(&next.to_ne_bytes());
    out.extend_from_slice(&length.to_ne_bytes());
    out.extend_from_slice(&(mode >> 12).to_ne_bytes());
    out.extend_from_slice(name.as_bytes());
    out.resize(end, 0);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_negative_and_the_length_counts_the_header() {
        let bytes = OutHeader::new(3, 5, 0).encode();
        assert_eq!(bytes[..4], 16u32.to_ne_bytes());
        assert_eq!(bytes[4..8], (-5i32).to_ne_bytes());
        assert_eq!(bytes[8..], 3u64.to_ne_bytes());
        assert_eq!(OutHeader::new(3, 0, 8).encode()[..4], 24u32.to_ne_bytes());
    }

    #[test]
    fn entries_of_a_directory_are_aligned_and_stop_at_the_room() {
        let mut out = Vec::new();
        assert!(dirent(&mut out, 64, 4, 1, 0o100_600, "disk"));
        assert_eq!(out.len(), 32);
        assert_eq!(out[20..24], 8u32.to_ne_bytes());
        assert!(dirent(&mut out, 64, 5, 2, 0o040_700, "12345678"));
        assert_eq!(out.len(), 64);
        assert!(!dirent(&mut out, 64, 6, 3, 0o040_700, "x"));
        assert_eq!(out.len(), 64);
    }

    #[test]
    fn abilities_travel_in_two_words() {
        let bytes = init_out((7, 42), crate::Init::OVER_IO_URING | 1, 0, 1 << 18, 64);
        assert_eq!(bytes[12..16], 1u32.to_ne_bytes());
        assert_eq!(bytes[32..36], (1u32 << 9).to_ne_bytes());
        assert_eq!(bytes[28..30], 64u16.to_ne_bytes());
    }
}
