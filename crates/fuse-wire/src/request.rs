//! Requests of the kernel. A message has three parts: a header common to all, the operation's own
//! structure, and data: a name, or the data to write. On the device they follow each other; in a
//! ring each has its own place.

use std::fmt;

use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::numbers::Op;

/// Why a message cannot be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WireError {
    /// It is shorter than its header: its length in bytes.
    Header(usize),
    /// The operation's structure is too short: its length in bytes.
    Argument(Op, usize),
    /// The length that it claims, in bytes, is not its actual length.
    Length(Op, u64),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(bytes) => write!(f, "{bytes} bytes are no message"),
            Self::Argument(op, bytes) => write!(f, "{} with {bytes} bytes of argument", op.name()),
            Self::Length(op, bytes) => write!(f, "{} that claims {bytes} bytes", op.name()),
        }
    }
}

impl std::error::Error for WireError {}

/// The three parts of a message.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The header that every message begins with.
    pub header: &'a [u8],
    /// The operation's own structure; more bytes may follow it.
    pub argument: &'a [u8],
    /// A name, or the data to write.
    pub data: &'a [u8],
}

/// The header of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Length of the whole message, in bytes.
    pub len: u32,
    op: u32,
    /// The kernel's ID of the request, repeated in the answer.
    pub unique: u64,
    /// Inode number of the file.
    pub node: u64,
    /// User ID of the requester.
    pub uid: u32,
    /// Group ID of the requester.
    pub gid: u32,
    /// Process ID of the requester; 0 for the kernel itself, or for a process of an invisible PID
    /// namespace.
    pub pid: u32,
    extensions: u16,
    padding: u16,
}

impl Header {
    /// Length of the header, in bytes.
    pub const BYTES: usize = 40;

    /// The requested operation.
    #[must_use]
    pub fn op(&self) -> Op {
        Op(self.op)
    }

    /// Decodes the header of a message.
    ///
    /// # Errors
    /// When it is too short.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let found = Self::read_from_prefix(bytes).map_err(|_| WireError::Header(bytes.len()))?;
        Ok(found.0)
    }
}

/// Splits a contiguous message into its parts.
///
/// # Errors
/// When it is too short for its header and the operation's structure, or does not have the length
/// that it claims.
pub fn split(bytes: &[u8]) -> Result<Message<'_>, WireError> {
    let header = Header::decode(bytes)?;
    let op = header.op();
    if header.len as usize != bytes.len() {
        return Err(WireError::Length(op, header.len.into()));
    }
    let (header, rest) = bytes.split_at(Header::BYTES);
    let found = rest.split_at_checked(op.argument_bytes());
    let (argument, data) = found.ok_or(WireError::Argument(op, rest.len()))?;
    Ok(Message { header, argument, data })
}

/// A request with its parameters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Request<'a> {
    /// Negotiate version and capabilities.
    Init(InitIn),
    /// Find a file by its name in a directory.
    Lookup(&'a [u8]),
    /// Get a file's attributes.
    GetAttributes,
    /// Change a file's attributes.
    SetAttributes(SetAttributes),
    /// Open a file, with the flags of open(2).
    Open(u32),
    /// Read a file.
    Read(Transfer),
    /// Write a file.
    Write(Transfer, &'a [u8]),
    /// Get file-system statistics.
    Statfs,
    /// Release an open file, by its handle.
    Release(u64),
    /// Make writes to a file durable.
    Sync,
    /// Open a directory.
    OpenDirectory,
    /// Read a directory.
    ReadDirectory(Transfer),
    /// Release an open directory.
    ReleaseDirectory,
    /// Make changes to a directory durable; there are none.
    SyncDirectory,
    /// Allocate, punch or zero a range.
    Allocate(Allocate),
    /// The kernel forgets one or more files.
    Forget,
    /// Interrupt a request: its answer is no longer wanted.
    Interrupt,
    /// Unmount the file system.
    Destroy,
    /// An unknown operation.
    Other(Op),
}

/// The kernel's side of the negotiation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InitIn {
    /// Major version of the protocol.
    pub major: u32,
    /// Minor version of the protocol.
    pub minor: u32,
    /// Maximum read-ahead, in bytes.
    pub max_readahead: u32,
    flags: u32,
    flags2: u32,
    unused: [u32; 11],
}

impl InitIn {
    /// The capabilities it offers: bits of [`crate::Init`].
    #[must_use]
    pub fn offers(&self) -> u64 {
        u64::from(self.flags2) << 32 | u64::from(self.flags)
    }
}

/// A read or write of an open file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Transfer {
    /// The handle given at open.
    pub handle: u64,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub size: u32,
    transfer_flags: u32,
    lock_owner: u64,
    /// The flags of open(2), with additions for this request.
    pub flags: u32,
    padding: u32,
}

/// A range to allocate, punch or zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Allocate {
    /// The handle given at open.
    pub handle: u64,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
    /// The mode of fallocate(2).
    pub mode: u32,
    padding: u32,
}

/// Changes of attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SetAttributes {
    valid: u32,
    padding: u32,
    handle: u64,
    size: u64,
    unused: [u64; 4],
    rest: [u32; 8],
}

impl SetAttributes {
    /// The bits for mode, owner and group.
    const RIGHTS: u32 = 0b111;
    const SIZE: u32 = 1 << 3;

    /// The new size, if it changes.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        (self.valid & Self::SIZE != 0).then_some(self.size)
    }

    /// Whether owner, group or mode change.
    #[must_use]
    pub fn changes_rights(&self) -> bool {
        self.valid & Self::RIGHTS != 0
    }
}

impl<'a> Request<'a> {
    /// Decodes the request of a message.
    ///
    /// # Errors
    /// When a part is too short.
    pub fn decode(op: Op, message: &Message<'a>) -> Result<Self, WireError> {
        let argument = message.argument;
        Ok(match op {
            Op::INIT => Self::Init(structure(op, argument)?),
            Op::LOOKUP => Self::Lookup(name(message.data)),
            Op::GETATTR => Self::GetAttributes,
            Op::SETATTR => Self::SetAttributes(structure(op, argument)?),
            Op::OPEN => Self::Open(structure(op, argument)?),
            Op::READ => Self::Read(structure(op, argument)?),
            Op::WRITE => {
                let write: Transfer = structure(op, argument)?;
                if write.size as usize != message.data.len() {
                    return Err(WireError::Length(op, write.size.into()));
                }
                Self::Write(write, message.data)
            }
            Op::STATFS => Self::Statfs,
            Op::RELEASE => Self::Release(structure(op, argument)?),
            Op::FSYNC => Self::Sync,
            Op::OPENDIR => Self::OpenDirectory,
            Op::READDIR => Self::ReadDirectory(structure(op, argument)?),
            Op::RELEASEDIR => Self::ReleaseDirectory,
            Op::FSYNCDIR => Self::SyncDirectory,
            Op::FALLOCATE => Self::Allocate(structure(op, argument)?),
            Op::FORGET | Op::BATCH_FORGET => Self::Forget,
            Op::INTERRUPT => Self::Interrupt,
            Op::DESTROY => Self::Destroy,
            other => Self::Other(other),
        })
    }
}

fn structure<T: FromBytes + KnownLayout + Immutable>(
    op: Op,
    argument: &[u8],
) -> Result<T, WireError> {
    let found = T::read_from_prefix(argument);
    found.map(|(found, _)| found).map_err(|_| WireError::Argument(op, argument.len()))
}

/// A name without its terminating NUL.
fn name(data: &[u8]) -> &[u8] {
    let end = data.iter().position(|&byte| byte == 0).unwrap_or(data.len());
    &data[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(op: Op, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&((Header::BYTES + body.len()) as u32).to_ne_bytes());
        bytes.extend_from_slice(&op.0.to_ne_bytes());
        bytes.extend_from_slice(&7u64.to_ne_bytes());
        bytes.extend_from_slice(&9u64.to_ne_bytes());
        for word in [1000u32, 100, 4711, 0] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(body);
        bytes
    }

    fn write_body(claimed: u32, data: &[u8]) -> Vec<u8> {
        let mut body = vec![0; 40];
        body[8..16].copy_from_slice(&8192u64.to_ne_bytes());
        body[16..20].copy_from_slice(&claimed.to_ne_bytes());
        body.extend_from_slice(data);
        body
    }

    #[test]
    fn a_write_is_taken_apart() {
        let bytes = message(Op::WRITE, &write_body(5, b"hello"));
        let parts = split(&bytes).expect("it is whole");
        let header = Header::decode(parts.header).expect("it is whole");
        assert_eq!((header.unique, header.node, header.pid), (7, 9, 4711));
        match Request::decode(header.op(), &parts).expect("it is whole") {
            Request::Write(write, b"hello") => assert_eq!((write.offset, write.size), (8192, 5)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_too_short_or_lies_is_refused() {
        let whole = message(Op::WRITE, &write_body(5, b"hello"));
        assert_eq!(split(&whole[..39]).err(), Some(WireError::Header(39)));
        assert_eq!(split(&whole[..60]).err(), Some(WireError::Length(Op::WRITE, 85)));
        let short = message(Op::WRITE, &[0; 12]);
        assert_eq!(split(&short).err(), Some(WireError::Argument(Op::WRITE, 12)));
        let lie = message(Op::WRITE, &write_body(6, b"hello"));
        let parts = split(&lie).expect("its parts are there");
        let refused = Request::decode(Op::WRITE, &parts);
        assert_eq!(refused, Err(WireError::Length(Op::WRITE, 6)));
        let bare = Message { header: &[], argument: &[0; 3], data: &[] };
        assert_eq!(Request::decode(Op::READ, &bare), Err(WireError::Argument(Op::READ, 3)));
    }

    #[test]
    fn the_table_of_sizes_fits_the_structures() {
        assert_eq!(size_of::<Header>(), Header::BYTES);
        assert_eq!(size_of::<InitIn>(), Op::INIT.argument_bytes());
        assert_eq!(size_of::<Transfer>(), Op::READ.argument_bytes());
        assert_eq!(size_of::<Transfer>(), Op::WRITE.argument_bytes());
        assert_eq!(size_of::<Allocate>(), Op::FALLOCATE.argument_bytes());
        assert_eq!(size_of::<SetAttributes>(), Op::SETATTR.argument_bytes());
    }

    #[test]
    fn names_end_at_the_zero() {
        let bytes = message(Op::LOOKUP, b"disk\0");
        let parts = split(&bytes).expect("it is whole");
        assert_eq!(Request::decode(Op::LOOKUP, &parts), Ok(Request::Lookup(b"disk")));
    }
}
