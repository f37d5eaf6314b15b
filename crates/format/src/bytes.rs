//! A reader and a writer of little-endian fields, and the checks common to all structures. A reader
//! never runs past the end of its bytes: it reports that the structure is too short.

use crate::error::{FormatError, ensure_eq, ensure_min};
use crate::{FORMAT_VERSION, PAGE};

/// Length in bytes of the prefix of every structure: magic, CRC and version.
pub(crate) const PREFIX_BYTES: usize = 14;
/// First byte that the CRC covers: everything after the magic number and the CRC itself.
const COVERED_FROM: usize = 12;

/// CRC32C (Castagnoli), the checksum of everything on the cache device.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Reads consecutive fields from a byte slice.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Offset of the next field from the start of the slice.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], FormatError> {
        ensure_min("bytes left for a field", self.at, self.bytes.len() as u64, len as u64)?;
        let (head, rest) = self.bytes.split_at(len);
        self.bytes = rest;
        self.at += len;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, FormatError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, FormatError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FormatError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FormatError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Skips `len` reserved bytes, which must be zero.
    pub(crate) fn reserved(&mut self, len: usize) -> Result<(), FormatError> {
        let at = self.at;
        match self.take(len)?.iter().zip(at..).find(|(byte, _)| **byte != 0) {
            None => Ok(()),
            Some((byte, at)) => ensure_eq("reserved byte", at, u64::from(*byte), 0),
        }
    }

    /// Reads and checks the prefix of a structure that exists in versions up to `newest`: magic
    /// number, CRC over `covered` (the whole structure) and version, in this order, so that garbage
    /// is not mistaken for a later version. Returns CRC and version.
    pub(crate) fn prefix(
        &mut self,
        what: &'static str,
        magic: u64,
        covered: &[u8],
        newest: u16,
    ) -> Result<(u32, u16), FormatError> {
        check_magic(what, self.u64()?, magic, covered)?;
        let crc = self.u32()?;
        let computed = crc32c(covered.get(COVERED_FROM..).unwrap_or_default());
        ensure_eq("CRC", self.at - 4, u64::from(crc), u64::from(computed))?;
        let version = self.u16()?;
        let known = if version > newest { newest } else { version.max(FORMAT_VERSION) };
        ensure_eq("format version", self.at - 2, u64::from(version), u64::from(known))?;
        Ok((crc, version))
    }
}

/// Tells apart blank bytes, foreign bytes, and a structure.
pub(crate) fn check_magic(
    what: &'static str,
    found: u64,
    magic: u64,
    bytes: &[u8],
) -> Result<(), FormatError> {
    if found == magic {
        Ok(())
    } else if bytes.iter().all(|byte| *byte == 0) {
        Err(FormatError::Blank)
    } else {
        Err(FormatError::NoMagic { what, found, expected: magic })
    }
}

/// An error unless there are at least `needed` bytes.
pub(crate) fn ensure_len(bytes: &[u8], needed: usize) -> Result<(), FormatError> {
    ensure_min("bytes given", 0, bytes.len() as u64, needed as u64)
}

/// The magic number with the bytes of `text`, so that it is readable in a dump.
pub(crate) const fn magic(text: &[u8; 8]) -> u64 {
    u64::from_le_bytes(*text)
}

/// Writes consecutive fields to a byte slice.
pub(crate) struct Writer<'a> {
    bytes: &'a mut [u8],
}

impl<'a> Writer<'a> {
    pub(crate) fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes }
    }

    pub(crate) fn put(&mut self, field: &[u8]) {
        let (head, rest) = std::mem::take(&mut self.bytes)
            .split_at_mut_checked(field.len())
            .expect("the caller asserted the structure's length");
        head.copy_from_slice(field);
        self.bytes = rest;
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    pub(crate) fn zeros(&mut self, len: usize) {
        const ZEROS: [u8; PAGE] = [0; PAGE];
        let mut left = len;
        while left > 0 {
            let some = ZEROS.get(..left).unwrap_or(&ZEROS);
            self.put(some);
            left -= some.len();
        }
    }

    /// Writes the prefix of a structure of this version; [`seal`] fills in its CRC once the rest is
    /// written.
    pub(crate) fn prefix(&mut self, magic: u64, version: u16) {
        self.u64(magic);
        self.u32(0);
        self.u16(version);
    }
}

/// Computes the CRC of the structure in `bytes`, stores it in the prefix, and returns it.
pub(crate) fn seal(bytes: &mut [u8]) -> u32 {
    let crc = crc32c(bytes.get(COVERED_FROM..).unwrap_or_default());
    if let Some(field) = bytes.get_mut(8..COVERED_FROM) {
        field.copy_from_slice(&crc.to_le_bytes());
    }
    crc
}

const _: () = assert!(PREFIX_BYTES == COVERED_FROM + size_of_val(&FORMAT_VERSION));
