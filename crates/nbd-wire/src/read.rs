//! Checked reading of big-endian fields from a slice.

use crate::error::Flaw;
use crate::{STRING_MAX, WireError, WireResult};

/// The bytes left to read.
#[derive(Clone)]
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self, what: &'static str) -> WireResult<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(WireError::new(
            what,
            self.0.len() as u64,
            N as u64,
        ))?;
        self.0 = rest;
        Ok(*head)
    }

    pub fn u16(&mut self, what: &'static str) -> WireResult<u16> {
        self.array(what).map(u16::from_be_bytes)
    }

    pub fn u32(&mut self, what: &'static str) -> WireResult<u32> {
        self.array(what).map(u32::from_be_bytes)
    }

    pub fn u64(&mut self, what: &'static str) -> WireResult<u64> {
        self.array(what).map(u64::from_be_bytes)
    }

    pub fn bytes(&mut self, len: usize, what: &'static str) -> WireResult<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len).ok_or(WireError::new(
            what,
            self.0.len() as u64,
            len as u64,
        ))?;
        self.0 = rest;
        Ok(head)
    }

    /// A string of `len` bytes: UTF-8 without NUL, at most [`STRING_MAX`] bytes.
    pub fn string(&mut self, len: usize, what: &'static str) -> WireResult<&'a str> {
        if len > STRING_MAX {
            return Err(WireError::new(what, len as u64, STRING_MAX as u64));
        }
        text(self.bytes(len, what)?, what)
    }

    /// All remaining bytes, as a string.
    pub fn rest(&mut self, what: &'static str) -> WireResult<&'a str> {
        self.string(self.0.len(), what)
    }

    pub fn end(self, what: &'static str) -> WireResult<()> {
        WireError::expect(what, self.0.len() as u64, 0)
    }
}

/// `bytes` as a string of the protocol.
fn text<'a>(bytes: &'a [u8], what: &'static str) -> WireResult<&'a str> {
    let bad = |flaw| WireError { what, flaw };
    if let Some(at) = bytes.iter().position(|&byte| byte == 0) {
        return Err(bad(Flaw::Nul { at }));
    }
    std::str::from_utf8(bytes).map_err(|error| bad(Flaw::NotUtf8 { at: error.valid_up_to() }))
}
