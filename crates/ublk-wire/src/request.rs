//! A request of the kernel, and its answer.

use forebay_block::{ByteRange, ErrorKind, IoFlags, IoOp};

use crate::SECTOR;

/// Length of a descriptor in the memory that the kernel shares, in bytes.
pub const DESCRIPTOR_BYTES: usize = 24;

/// Where the data of the request in slot `tag` of queue `queue` begins, in the file `/dev/ublkcN`:
/// there the server reads the data of a write, and writes that of a read.
#[must_use]
pub fn data_position(queue: u16, tag: u16) -> u64 {
    /// `UBLKSRV_IO_BUF_OFFSET`; the bits below a tag, and below a queue.
    const START: u64 = 0x8000_0000;
    const TAG_SHIFT: u32 = 25;
    const QUEUE_SHIFT: u32 = 41;
    START + (u64::from(queue) << QUEUE_SHIFT | u64::from(tag) << TAG_SHIFT)
}

/// What the kernel says of a request (`struct ublksrv_io_desc`):
///
/// ```text
///  0  operation, 8 bits, and flags, 24 bits   u32
///  4  sectors                                 u32
///  8  first sector                            u64
/// 16  buffer                                  u64, unused with `UBLK_F_USER_COPY`
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    word: u32,
    sectors: u32,
    start: u64,
}

/// A block request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The operation.
    pub op: IoOp,
    /// The bytes that it covers; empty for a flush.
    pub range: ByteRange,
    /// Its modifiers.
    pub flags: IoFlags,
}

const FUA: u32 = 1 << 13;
const NO_UNMAP: u32 = 1 << 15;

impl Descriptor {
    /// A descriptor from the kernel's memory.
    #[must_use]
    pub fn decode(bytes: &[u8; DESCRIPTOR_BYTES]) -> Self {
        let word = |at: usize| {
            let bytes = bytes[at..].first_chunk();
            u32::from_ne_bytes(*bytes.expect("a word lies in the descriptor"))
        };
        let start = bytes[8..].first_chunk();
        let start = u64::from_ne_bytes(*start.expect("it lies in the descriptor"));
        Self { word: word(0), sectors: word(4), start }
    }

    /// The request; its data has at most `request_bytes`.
    ///
    /// # Errors
    /// `Unsupported` for operations of zoned devices and of newer kernels; `OutOfRange` for data
    /// that does not fit, and for a range beyond all addresses.
    pub fn request(&self, request_bytes: usize) -> Result<Request, ErrorKind> {
        let op = match self.word & 0xff {
            0 => IoOp::Read,
            1 => IoOp::Write,
            2 => IoOp::Flush,
            3 => IoOp::Discard,
            5 => IoOp::WriteZeroes,
            _ => return Err(ErrorKind::Unsupported),
        };
        let flags = IoFlags {
            fua: self.word & FUA != 0,
            no_hole: op == IoOp::WriteZeroes && self.word & NO_UNMAP != 0,
            fast_only: false,
        };
        if op == IoOp::Flush {
            return Ok(Request { op, range: ByteRange::default(), flags: IoFlags::default() });
        }
        let offset = self.start.checked_mul(SECTOR).ok_or(ErrorKind::OutOfRange)?;
        let length = u64::from(self.sectors) * SECTOR;
        let data = matches!(op, IoOp::Read | IoOp::Write);
        if data && length > request_bytes as u64 || offset.checked_add(length).is_none() {
            return Err(ErrorKind::OutOfRange);
        }
        Ok(Request { op, range: ByteRange::new(offset, length), flags })
    }
}

impl Request {
    /// The result to commit: bytes of data for a success, otherwise a negative error number.
    #[must_use]
    pub fn result(&self, result: Result<(), ErrorKind>) -> i32 {
        match result {
            Ok(()) if matches!(self.op, IoOp::Read | IoOp::Write) => {
                i32::try_from(self.range.len).expect("a request's data is short")
            }
            Ok(()) => 0,
            Err(kind) => -kind.errno(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 256 << 10;

    fn descriptor(word: u32, sectors: u32, start: u64) -> Descriptor {
        let mut bytes = [0xaa; DESCRIPTOR_BYTES];
        bytes[0..4].copy_from_slice(&word.to_ne_bytes());
        bytes[4..8].copy_from_slice(&sectors.to_ne_bytes());
        bytes[8..16].copy_from_slice(&start.to_ne_bytes());
        Descriptor::decode(&bytes)
    }

    #[test]
    fn each_operation_has_its_counterpart() {
        let operations =
            [(0, IoOp::Read), (1, IoOp::Write), (3, IoOp::Discard), (5, IoOp::WriteZeroes)];
        for (number, op) in operations {
            let request = descriptor(number, 8, 2048).request(MOST).expect("it is known");
            assert_eq!((request.op, request.range), (op, ByteRange::new(1 << 20, 4096)));
            assert_eq!(request.flags, IoFlags::default());
        }
        let flush = descriptor(2, 0, u64::MAX).request(MOST).expect("it is known");
        assert_eq!((flush.op, flush.range), (IoOp::Flush, ByteRange::default()));
        for unknown in [4, 10, 15, 18, 255] {
            let refused = descriptor(unknown, 8, 0).request(MOST);
            assert_eq!(refused, Err(ErrorKind::Unsupported), "{unknown}");
        }
    }

    #[test]
    fn flags_become_modifiers() {
        let flags = |word| descriptor(word, 8, 0).request(MOST).expect("it is known").flags;
        assert!(flags(1 | FUA).fua);
        assert!(!flags(1 | 1 << 8 | 1 << 16).fua, "hints are not modifiers");
        assert!(flags(5 | NO_UNMAP).no_hole);
        assert!(!flags(3 | NO_UNMAP).no_hole);
    }

    #[test]
    fn data_must_fit_its_slot_and_a_range_its_addresses() {
        let most = MOST as u32 / 512;
        assert!(descriptor(1, most, 0).request(MOST).is_ok());
        assert_eq!(descriptor(1, most + 1, 0).request(MOST), Err(ErrorKind::OutOfRange));
        assert!(descriptor(3, u32::MAX, 0).request(MOST).is_ok(), "a discard has no data");
        for start in [u64::MAX, u64::MAX / 512] {
            assert_eq!(descriptor(3, 8, start).request(MOST), Err(ErrorKind::OutOfRange));
        }
    }

    #[test]
    fn the_data_of_each_slot_has_its_own_place() {
        assert_eq!(data_position(0, 0), 0x8000_0000);
        assert_eq!(data_position(0, 1), 0x8200_0000);
        assert_eq!(data_position(3, 4095), 0x8000_0000 + (3 << 41) + (4095 << 25));
    }

    #[test]
    fn a_result_is_a_length_or_an_error() {
        let of = |number| descriptor(number, 8, 0).request(MOST).expect("it is known");
        assert_eq!(of(0).result(Ok(())), 4096);
        assert_eq!(of(1).result(Ok(())), 4096);
        assert_eq!(of(3).result(Ok(())), 0);
        assert_eq!(of(2).result(Err(ErrorKind::Media)), -5);
        assert_eq!(of(5).result(Err(ErrorKind::Unsupported)), -95);
    }
}
