//! The bytes of the FUSE protocol: requests of the kernel and their answers, as on `/dev/fuse` and
//! in the slots of its io_uring variant. Decoding and encoding only.
//!
//! Sources: `include/uapi/linux/fuse.h` (7.31 to 7.45) and `Documentation/filesystems/fuse/
//! fuse-io-uring.rst` of Linux. Everything is in the byte order of the host. Input is not trusted:
//! a message that is shorter than it claims is an error, never a panic.

#![forbid(unsafe_code)]

mod numbers;
mod reply;
mod request;
mod ring;

pub use numbers::{Init, Mode, Op, Open};
pub use reply::{
    Attributes, OutHeader, attr_out, dirent, entry_out, forget_inode, forget_name, init_out,
    open_out, statfs_out, write_out,
};
pub use request::{
    Allocate, Header, InitIn, Message, Request, SetAttributes, Transfer, WireError, split,
};
pub use ring::{COMMAND_BYTES, Entry, Fetch, HEAD_BYTES, command};
