//! The bytes of the NBD protocol, shared by the server and the client: encoding and decoding only.
//!
//! The source is the protocol's specification, `doc/proto.md` of the NBD project, sections
//! "Protocol phases" and "Values". All integers are big-endian.
//!
//! Messages of fixed size define `BYTES`, decode from an array of that size and encode to one.
//! Messages whose length was announced by the peer decode from a slice of exactly that length.
//! Decoders are total: hostile bytes yield a [`WireError`], never a panic, and nothing larger than
//! the input is allocated. The caller checks announced lengths against the limits named here.
//!
//! Numbers that the protocol may extend (options, commands, errors) are newtypes with named
//! constants, so that an unknown one can be carried and answered instead of failing to decode.
//! Extended headers are not supported; their magic numbers are reserved here.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod error;
mod handshake;
mod numbers;
mod option;
mod option_reply;
mod read;
mod reply;
mod request;

pub use error::{Flaw, NbdError, WireError, WireResult};
pub use handshake::{ClientFlags, ExportReply, Greeting, HandshakeFlags, OPTION_MAGIC};
pub use option::{InfoKind, InfoRequest, MetaRequest, OptionCode, OptionHeader};
pub use option_reply::{
    Info, MetaContext, OptionReplyHeader, OptionReplyKind, ServerEntry, encode_option_reply,
};
pub use reply::{
    AllocationFlags, BlockStatus, ChunkHeader, ChunkKind, ErrorChunk, Extent, Hole, ReplyFlags,
    ReplyHead, SimpleReply, encode_block_status, encode_data_header, encode_error_chunk,
};
pub use request::{Command, CommandFlags, Request, TransmissionFlags};

/// Maximum length of a string in bytes: an export's name, a description, an error message.
pub const STRING_MAX: usize = 4096;
/// Length in bytes of the longest read or write payload that every peer must accept.
pub const PAYLOAD_MAX: u32 = 32 << 20;
/// The metadata context that tells holes from data.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Magic number of a request with an extended header; not supported.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Magic number of a reply with an extended header; not supported.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;
