//! What the control device is told about a device, and tells.

use forebay_block::DeviceInfo;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::SECTOR;

/// Length of the answer to `GET_FEATURES`, a mask of [`flags`].
pub const FEATURES_BYTES: usize = 8;
/// Longest discard, and longest write of zeros where the primary has a quick way to do it, in
/// sectors: 1 GiB.
const DISCARD_SECTORS: u32 = 1 << 21;
/// Longest write of zeros otherwise, in sectors: 1 MiB.
const ZEROES_SECTORS: u32 = 1 << 11;
/// Sectors in a stripe of 1 MiB.
const STRIPE_SECTORS: u32 = 1 << 11;

/// Features of the driver, and properties of a device.
pub mod flags {
    /// A device outlives its server, and waits for the next one (Linux 6.1).
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests that the dead server had are handed to the next one.
    pub const REISSUE: u64 = 1 << 4;
    /// Commands have the ioctl encoding (Linux 6.5).
    pub const IOCTL_ENCODE: u64 = 1 << 6;
    /// The server copies the data of requests itself (Linux 6.5).
    pub const USER_COPY: u64 = 1 << 7;
    /// A device can be quiesced by command (Linux 6.16). Not used, but a kernel that has it can
    /// begin a recovery again that a server has begun and not ended.
    pub const QUIESCE: u64 = 1 << 12;
    /// All that a disk of Forebay needs.
    pub const NEEDED: u64 = USER_RECOVERY | REISSUE | IOCTL_ENCODE | USER_COPY;
}

/// A device (`struct ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DevInfo {
    /// Number of queues. The kernel lowers it to the number of processors.
    pub queues: u16,
    /// Slots in each queue.
    pub depth: u16,
    state: u16,
    pad0: u16,
    /// Most bytes of data in a request.
    pub request_bytes: u32,
    /// The device's number.
    pub number: u32,
    /// Process ID of its server.
    pub server: i32,
    pad1: u32,
    /// Its [`flags`].
    pub flags: u64,
    /// The server's own mark, which the kernel keeps and does not look at (`ublksrv_flags`).
    pub mark: u64,
    owner_user: u32,
    owner_group: u32,
    reserved: [u64; 2],
}

/// The state of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It has no disk.
    Dead,
    /// A server serves it, or died just now.
    Live,
    /// Its server is gone; requests wait for the next one.
    Quiesced,
    /// A state of newer kernels: this number.
    Other(u16),
}

impl DevInfo {
    /// A new device that survives its server.
    #[must_use]
    pub fn new(queues: u16, depth: u16, request_bytes: u32, mark: u64) -> Self {
        let (number, flags) = (u32::MAX, flags::NEEDED);
        Self { queues, depth, request_bytes, number, flags, mark, ..Self::empty() }
    }

    /// Room for the answer to `GET_DEV_INFO`.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            queues: 0,
            depth: 0,
            state: 0,
            pad0: 0,
            request_bytes: 0,
            number: 0,
            server: -1,
            pad1: 0,
            flags: 0,
            mark: 0,
            owner_user: 0,
            owner_group: 0,
            reserved: [0; 2],
        }
    }

    /// Its state.
    #[must_use]
    pub fn state(&self) -> State {
        match self.state {
            0 => State::Dead,
            1 => State::Live,
            2 => State::Quiesced,
            other => State::Other(other),
        }
    }
}

/// Size and limits of a disk (`struct ublk_params`, with the parts for all disks and for discards).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    attributes: u32,
    sector_shift: u8,
    optimal_shift: u8,
    request_sectors: u32,
    sectors: u64,
    discard_sectors: u32,
    zeroes_sectors: u32,
}

impl Params {
    /// Length of the encoded form, in bytes.
    pub const BYTES: usize = 60;

    const READ_ONLY: u32 = 1 << 0;
    const ROTATIONAL: u32 = 1 << 1;
    const VOLATILE_CACHE: u32 = 1 << 2;
    const FUA: u32 = 1 << 3;
    /// The parts that are present: for all disks, and for discards.
    const TYPES: u32 = 1 << 0 | 1 << 1;

    /// The disk of a volume, with sectors of `sector` bytes, a power of two, and requests of at
    /// most `request_bytes`. It has a volatile cache, so that file systems send flushes and FUA,
    /// and its requests do not cross a stripe.
    #[must_use]
    pub fn new(volume: &DeviceInfo, sector: u32, request_bytes: u32) -> Self {
        let mut attributes = Self::VOLATILE_CACHE | Self::FUA;
        if volume.read_only {
            attributes |= Self::READ_ONLY;
        }
        if volume.rotational {
            attributes |= Self::ROTATIONAL;
        }
        let optimal = volume.optimal_io.max(4096);
        Self {
            attributes,
            sector_shift: sector.trailing_zeros() as u8,
            optimal_shift: optimal.ilog2().min(20) as u8,
            request_sectors: request_bytes / SECTOR as u32,
            sectors: volume.size / SECTOR,
            discard_sectors: if volume.discard { DISCARD_SECTORS } else { 0 },
            zeroes_sectors: if volume.fast_zero { DISCARD_SECTORS } else { ZEROES_SECTORS },
        }
    }

    /// ```text
    ///  0  bytes u32 | parts u32
    ///  8  attributes u32 | log2 of: sector, physical sector, optimal I/O, least I/O, u8 each
    /// 16  most sectors of a request u32 | sectors between borders u32
    /// 24  sectors u64 | mask of borders in memory u64
    /// 40  discards: alignment u32 | granularity u32 | most sectors u32
    /// 52  most sectors of zeros u32 | most ranges of a discard u16 | reserved u16
    /// ```
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        /// log2 of a block's size.
        const BLOCK_SHIFT: u8 = 12;
        let mut bytes = [0; Self::BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &(Self::BYTES as u32).to_ne_bytes());
        put(4, &Self::TYPES.to_ne_bytes());
        put(8, &self.attributes.to_ne_bytes());
        put(12, &[self.sector_shift, BLOCK_SHIFT, self.optimal_shift, BLOCK_SHIFT]);
        put(16, &self.request_sectors.to_ne_bytes());
        put(20, &STRIPE_SECTORS.to_ne_bytes());
        put(24, &self.sectors.to_ne_bytes());
        put(44, &(1u32 << BLOCK_SHIFT).to_ne_bytes());
        put(48, &self.discard_sectors.to_ne_bytes());
        put(52, &self.zeroes_sectors.to_ne_bytes());
        put(56, &1u16.to_ne_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets as a C compiler has them, from Linux 6.12's `ublk_cmd.h`.
    #[test]
    fn a_device_has_the_layout_of_the_header() {
        use std::mem::offset_of;
        assert_eq!(offset_of!(DevInfo, state), 4);
        assert_eq!(offset_of!(DevInfo, owner_user), 40);
        assert_eq!(offset_of!(DevInfo, owner_group), 44);
        assert_eq!(offset_of!(DevInfo, reserved), 48);
        let info = DevInfo::new(2, 64, 256 << 10, 0x0123_4567_89ab_cdef);
        let bytes = info.as_bytes();
        assert_eq!(bytes.len(), 64);
        assert_eq!(bytes[0..4], [2u16.to_ne_bytes(), 64u16.to_ne_bytes()].concat());
        assert_eq!(bytes[8..12], (256u32 << 10).to_ne_bytes());
        assert_eq!(bytes[12..16], [0xff; 4]);
        assert_eq!(bytes[16..20], (-1i32).to_ne_bytes());
        assert_eq!(bytes[24..32], 0xd8u64.to_ne_bytes());
        assert_eq!(bytes[32..40], 0x0123_4567_89ab_cdefu64.to_ne_bytes());
        let mut answer = bytes.to_vec();
        for (number, state) in
            [(0, State::Dead), (1, State::Live), (2, State::Quiesced), (3, State::Other(3))]
        {
            answer[4] = number;
            let read = DevInfo::read_from_bytes(&answer).expect("it has its length");
            assert_eq!((read.state(), read.mark), (state, info.mark));
        }
    }

    #[test]
    fn parameters_say_what_the_volume_can() {
        let mut volume = DeviceInfo { optimal_io: 64 << 10, ..DeviceInfo::plain(1 << 30, "v") };
        let bytes = Params::new(&volume, 512, 256 << 10).encode();
        let word = |at: usize| u32::from_ne_bytes(*bytes[at..].first_chunk().expect("it is there"));
        assert_eq!((word(0), word(4), word(8)), (60, 3, 0b1100));
        assert_eq!(bytes[12..16], [9, 12, 16, 12]);
        assert_eq!((word(16), word(20)), (512, 2048));
        assert_eq!(bytes[24..32], (1u64 << 21).to_ne_bytes());
        assert_eq!((word(44), word(48), word(52)), (4096, 1 << 21, 1 << 11));
        assert_eq!(bytes[56..60], [1u16.to_ne_bytes(), [0; 2]].concat());
        volume.read_only = true;
        volume.discard = false;
        let bytes = Params::new(&volume, 4096, 256 << 10).encode();
        assert_eq!((bytes[8], bytes[12]), (0b1101, 12));
        assert_eq!(bytes[48..52], [0; 4]);
    }
}
