//! Replies, appended to what the client will be sent. Success without data is a simple reply,
//! which is shorter and always allowed; data and errors are chunks once those are agreed on.

use forebay_block::IoBuf;
use forebay_nbd_wire::{
    ChunkHeader, Extent, NbdError, ReplyFlags, SimpleReply, encode_block_status,
    encode_data_header, encode_error_chunk,
};

/// Bytes in front of data, at most.
const DATA_HEAD: usize = ChunkHeader::BYTES + 8;

/// Where replies go, and in which shape.
pub(crate) struct Replies<'a> {
    pub out: &'a mut Vec<u8>,
    pub structured: bool,
}

impl Replies<'_> {
    /// The request was done; it has no data to return.
    pub fn done(&mut self, cookie: u64) {
        self.simple(cookie, NbdError::OK);
    }

    /// The request failed.
    pub fn failed(&mut self, cookie: u64, error: NbdError, message: &str) {
        if self.structured {
            encode_error_chunk(self.out, cookie, error, message);
        } else {
            self.simple(cookie, error);
        }
    }

    /// The `len` bytes that were read at `offset`, in one or more buffers.
    pub fn data(&mut self, cookie: u64, offset: u64, len: u32, buffers: &[IoBuf]) {
        self.out.reserve(DATA_HEAD + len as usize);
        self.data_head(cookie, offset, len);
        for buffer in buffers {
            self.out.extend_from_slice(buffer);
        }
    }

    /// What comes before the `len` bytes that were read at `offset`.
    pub fn data_head(&mut self, cookie: u64, offset: u64, len: u32) {
        if self.structured {
            self.out.extend_from_slice(&encode_data_header(cookie, offset, len));
        } else {
            self.simple(cookie, NbdError::OK);
        }
    }

    /// One extent of one metadata context.
    pub fn status(&mut self, cookie: u64, context: u32, extent: Extent) {
        encode_block_status(self.out, cookie, ReplyFlags::DONE, context, &[extent]);
    }

    fn simple(&mut self, cookie: u64, error: NbdError) {
        self.out.extend_from_slice(&SimpleReply { error, cookie }.encode());
    }
}
