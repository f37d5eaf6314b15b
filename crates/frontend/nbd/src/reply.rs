//! Replies, appended to the output. Success without data is a simple reply, which is shorter and
//! always allowed; data and errors are chunks if those were negotiated.

use forebay_block::IoBuf;
use forebay_nbd_wire::{
    ChunkHeader, Extent, NbdError, ReplyFlags, SimpleReply, encode_block_status,
    encode_data_header, encode_error_chunk,
};

/// Maximum length of the header before data, in bytes.
const DATA_HEAD: usize = ChunkHeader::BYTES + 8;

/// Appends replies to the output, in the negotiated form.
pub(crate) struct Replies<'a> {
    pub out: &'a mut Vec<u8>,
    pub structured: bool,
}

impl Replies<'_> {
    /// The reply to a request that succeeded without data to return.
    pub fn done(&mut self, cookie: u64) {
        self.simple(cookie, NbdError::OK);
    }

    /// The reply to a request that failed.
    pub fn failed(&mut self, cookie: u64, error: NbdError, message: &str) {
        if self.structured {
            encode_error_chunk(self.out, cookie, error, message);
        } else {
            self.simple(cookie, error);
        }
    }

    /// The reply with the `len` bytes read at `offset`, in one or more buffers.
    pub fn data(&mut self, cookie: u64, offset: u64, len: u32, buffers: &[IoBuf]) {
        self.out.reserve(DATA_HEAD + len as usize);
        self.data_head(cookie, offset, len);
        for buffer in buffers {
            self.out.extend_from_slice(buffer);
        }
    }

    /// The header before the `len` bytes read at `offset`.
    pub fn data_head(&mut self, cookie: u64, offset: u64, len: u32) {
        if self.structured {
            self.out.extend_from_slice(&encode_data_header(cookie, offset, len));
        } else {
            self.simple(cookie, NbdError::OK);
        }
    }

    /// The reply with one extent of one metadata context.
    pub fn status(&mut self, cookie: u64, context: u32, extent: Extent) {
        encode_block_status(self.out, cookie, ReplyFlags::DONE, context, &[extent]);
    }

    fn simple(&mut self, cookie: u64, error: NbdError) {
        self.out.extend_from_slice(&SimpleReply { error, cookie }.encode());
    }
}
