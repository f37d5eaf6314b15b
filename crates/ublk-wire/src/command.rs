//! The commands' own part of their submissions (`sqe->cmd`), and their numbers.
//!
//! ```text
//! to the control device (struct ublksrv_ctrl_cmd)
//!     0  device        u32, or all ones where there is none yet
//!     4  queue         u16, always all ones here
//!     6  buffer bytes  u16
//!     8  buffer        u64, an address
//!    16  data          u64
//!    24  path bytes u16 | padding u16 | reserved u32
//! to a device (struct ublksrv_io_cmd)
//!     0  queue         u16
//!     2  tag           u16
//!     4  result        i32, of the request that is answered
//!     8  buffer        u64, zero with `UBLK_F_USER_COPY`
//! ```

/// Length of a command's own part of a submission, in bytes.
pub const COMMAND_BYTES: usize = 80;
/// Length of `struct ublksrv_ctrl_cmd` and of `struct ublksrv_io_cmd`, which the numbers contain.
const CONTROL_BYTES: u32 = 32;
const IO_BYTES: u32 = 16;
/// Directions of an ioctl number.
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// `_IOC(direction, 'u', number, bytes)`.
const fn ioctl(direction: u32, number: u32, bytes: u32) -> u32 {
    direction << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

/// The commands of the control device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Control {
    /// Describes a device.
    GetInfo,
    /// Makes a device, without a disk yet.
    Add,
    /// Removes a device; waits until nobody has it open.
    Delete,
    /// Removes a device once nobody has it open, without waiting (Linux 6.6).
    DeleteLater,
    /// Makes the disk; waits until each queue has all of its slots.
    Start,
    /// Removes the disk. Its requests in flight are answered first; later ones fail.
    Stop,
    /// Sets size and limits; before the start only.
    SetParams,
    /// Makes a device whose server is gone ready for another server.
    StartRecovery,
    /// Hands the device to this server; waits as `Start` does.
    EndRecovery,
    /// Lists the features of this kernel.
    GetFeatures,
}

impl Control {
    /// The command's number.
    #[must_use]
    pub const fn number(self) -> u32 {
        let (direction, number) = match self {
            Self::GetInfo => (READ, 0x02),
            Self::Add => (READ_WRITE, 0x04),
            Self::Delete => (READ_WRITE, 0x05),
            Self::Start => (READ_WRITE, 0x06),
            Self::Stop => (READ_WRITE, 0x07),
            Self::SetParams => (READ_WRITE, 0x08),
            Self::StartRecovery => (READ_WRITE, 0x10),
            Self::EndRecovery => (READ_WRITE, 0x11),
            Self::GetFeatures => (READ, 0x13),
            Self::DeleteLater => (READ, 0x14),
        };
        ioctl(direction, number, CONTROL_BYTES)
    }

    /// The kernel's name of the command, for messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GetInfo => "GET_DEV_INFO",
            Self::Add => "ADD_DEV",
            Self::Delete => "DEL_DEV",
            Self::DeleteLater => "DEL_DEV_ASYNC",
            Self::Start => "START_DEV",
            Self::Stop => "STOP_DEV",
            Self::SetParams => "SET_PARAMS",
            Self::StartRecovery => "START_USER_RECOVERY",
            Self::EndRecovery => "END_USER_RECOVERY",
            Self::GetFeatures => "GET_FEATURES",
        }
    }
}

/// The arguments of a control command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControlCommand {
    /// The device's number; `None` for a new one, and for commands without a device.
    pub device: Option<u32>,
    /// Address and length of the memory that the kernel reads or fills.
    pub buffer: (u64, u16),
    /// For `Start` and `EndRecovery` the process ID of the server; otherwise zero.
    pub data: u64,
}

impl ControlCommand {
    /// The command's own part of its submission.
    #[must_use]
    pub fn encode(&self) -> [u8; COMMAND_BYTES] {
        let (address, length) = self.buffer;
        let mut bytes = [0; COMMAND_BYTES];
        bytes[0..4].copy_from_slice(&self.device.unwrap_or(u32::MAX).to_ne_bytes());
        bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        bytes[6..8].copy_from_slice(&length.to_ne_bytes());
        bytes[8..16].copy_from_slice(&address.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.data.to_ne_bytes());
        bytes
    }
}

/// The function of a device's command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fetch {
    /// Waits for the first request.
    First,
    /// Answers the request in the slot with this result, and waits for the next one.
    Commit(i32),
}

impl Fetch {
    /// The command's number.
    #[must_use]
    pub const fn number(self) -> u32 {
        let number = match self {
            Self::First => 0x20,
            Self::Commit(_) => 0x21,
        };
        ioctl(READ_WRITE, number, IO_BYTES)
    }
}

/// A device command's own part of its submission, for slot `tag` of queue `queue`.
#[must_use]
pub fn fetch(queue: u16, tag: u16, fetch: Fetch) -> [u8; COMMAND_BYTES] {
    let result = match fetch {
        Fetch::First => 0,
        Fetch::Commit(result) => result,
    };
    let mut bytes = [0; COMMAND_BYTES];
    bytes[0..2].copy_from_slice(&queue.to_ne_bytes());
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..8].copy_from_slice(&result.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a C compiler expands the macros of Linux 6.12's `ublk_cmd.h`.
    #[test]
    fn numbers_are_those_of_the_header() {
        let numbers = [
            (Control::GetInfo, 0x8020_7502),
            (Control::Add, 0xc020_7504),
            (Control::Delete, 0xc020_7505),
            (Control::Start, 0xc020_7506),
            (Control::Stop, 0xc020_7507),
            (Control::SetParams, 0xc020_7508),
            (Control::StartRecovery, 0xc020_7510),
            (Control::EndRecovery, 0xc020_7511),
            (Control::GetFeatures, 0x8020_7513),
            (Control::DeleteLater, 0x8020_7514),
        ];
        for (control, number) in numbers {
            assert_eq!(control.number(), number, "{}", control.name());
        }
        assert_eq!(Fetch::First.number(), 0xc010_7520);
        assert_eq!(Fetch::Commit(0).number(), 0xc010_7521);
    }

    #[test]
    fn a_control_command_names_its_device_and_buffer() {
        let command = ControlCommand { device: Some(7), buffer: (0x1000, 64), data: 99 };
        let bytes = command.encode();
        assert_eq!(bytes[0..4], 7u32.to_ne_bytes());
        assert_eq!(bytes[4..6], [0xff; 2]);
        assert_eq!(bytes[6..8], 64u16.to_ne_bytes());
        assert_eq!(bytes[8..16], 0x1000u64.to_ne_bytes());
        assert_eq!(bytes[16..24], 99u64.to_ne_bytes());
        assert_eq!(bytes[24..], [0; 56]);
        let none = ControlCommand { device: None, ..command };
        assert_eq!(none.encode()[0..4], [0xff; 4]);
    }

    #[test]
    fn a_fetch_names_its_slot_and_result() {
        let bytes = fetch(3, 258, Fetch::Commit(-5));
        assert_eq!(bytes[0..2], 3u16.to_ne_bytes());
        assert_eq!(bytes[2..4], 258u16.to_ne_bytes());
        assert_eq!(bytes[4..8], (-5i32).to_ne_bytes());
        assert_eq!(bytes[8..], [0; 72]);
    }
}
