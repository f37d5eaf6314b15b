//! The FUSE file system: a file for each volume, and text to `cat` under `.forebay`.
//!
//! [`FuseServer`] is a [`Responder`](forebay_block::Responder): it parses requests of the kernel
//! and builds the answers. It does no I/O and reads no clock; the owner of `/dev/fuse` passes it
//! messages, over the device or over io_uring, and mounts and unmounts.
//!
//! ```text
//! /                      3 kinds of files; only another server of the mount changes their list
//! |-- VOLUME             reads, writes, flushes, holes; direct I/O only
//! `-- .forebay
//!     |-- status         the text of `forebay status`
//!     |-- status.json    the same as JSON
//!     |-- metrics        what Prometheus reads
//!     `-- volumes/VOLUME one volume
//! ```
//!
//! `docs/user/disks.md` is the manual.

#![forbid(unsafe_code)]

mod handshake;
mod in_flight;
mod notices;
mod server;
mod transmission;
mod tree;

pub use handshake::{Agreement, HandshakeError, REQUEST_BYTES, negotiate, resend};
pub use notices::{KnownFile, notices};
pub use server::{FuseServer, Owner, ServerError, SharedFile};
pub use tree::Topic;
