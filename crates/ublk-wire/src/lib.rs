//! The structures of ublk, the kernel's block devices in user space: commands for
//! `/dev/ublk-control` and `/dev/ublkcN`, the requests that the kernel describes, and their
//! answers. Encoding and decoding only.
//!
//! Source: `include/uapi/linux/ublk_cmd.h` of Linux 6.12, and `drivers/block/ublk_drv.c` where the
//! header is silent. Commands have the ioctl encoding (`UBLK_F_CMD_IOCTL_ENCODE`, Linux 6.5).
//! Everything is in the byte order of the host.

#![forbid(unsafe_code)]

mod command;
mod device;
mod request;

pub use command::{COMMAND_BYTES, Control, ControlCommand, Fetch, fetch};
pub use device::{DevInfo, FEATURES_BYTES, Params, State, flags};
pub use request::{DESCRIPTOR_BYTES, Descriptor, Request, data_position};

/// Most requests in flight in one queue (`UBLK_MAX_QUEUE_DEPTH`).
pub const QUEUE_DEPTH_MAX: u16 = 4096;
/// Bytes in a sector, the unit of addresses and lengths.
pub const SECTOR: u64 = 512;
