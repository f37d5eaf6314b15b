//! Ring operations, as values that own their memory, and their encoding for the kernel.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use forebay_block::{Arena, IoBuf};
use io_uring::{opcode, squeue, types};
use rustix::io::Errno;

use super::fuse::FuseSlot;
use super::ublk::{ControlCall, UblkSlot};
use super::uring::Submission;

/// Maximum length of a registered buffer in bytes: the kernel's limit.
const CHUNK: usize = 1 << 30;
/// `_IO(0x12, 0)`, from linux/blkdev.h: discard as a ring command, since Linux 6.12.
const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;

/// One operation on a registered file. It owns the memory that it reads or writes until its
/// completion. A `span` is the part of the buffer that takes part, and must lie within it.
#[derive(Debug)]
pub enum Op {
    /// Read at an offset into a span of the buffer.
    Read {
        /// Byte offset in the file.
        offset: u64,
        /// Room for the data.
        buf: IoBuf,
        /// The part of `buf` to fill.
        span: Range<usize>,
    },
    /// Write a span of the buffer at an offset.
    Write {
        /// Byte offset in the file.
        offset: u64,
        /// The data.
        buf: IoBuf,
        /// The part of `buf` to write.
        span: Range<usize>,
        /// Complete only when the data is durable.
        durable: bool,
    },
    /// Make completed writes durable, with the metadata needed to read them again.
    Sync,
    /// Allocate, free or zero a range, by the mode bits of fallocate(2).
    Allocate {
        /// `FALLOC_FL_*` bits.
        mode: i32,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Discard a range of a block device.
    Discard {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Receive the bytes that have arrived, at least one, into a span; zero bytes mean that the
    /// peer closed.
    Receive {
        /// Room for the data.
        bytes: Vec<u8>,
        /// The part of `bytes` to fill.
        span: Range<usize>,
    },
    /// Send a span, or as much of it as the socket takes; at least one byte.
    Send {
        /// The data.
        bytes: Vec<u8>,
        /// The part of `bytes` to send.
        span: Range<usize>,
    },
    /// Accept connections of a listening socket until cancelled; each is a separate completion.
    Accept,
    /// Wait for poll(2) events once.
    Poll {
        /// `POLL*` bits.
        events: u32,
    },
    /// Submit the answer in a slot, if there is one, and wait for the kernel's next request.
    Fuse(Box<FuseSlot>),
    /// The same for a slot of a ublk device, which has the device's file.
    Ublk(Box<UblkSlot>),
    /// A command for ublk's control device.
    UblkControl(Box<ControlCall>),
}

/// The memory or socket that a completion returns.
#[derive(Debug)]
pub enum Payload {
    /// Nothing: the operation has no memory.
    None,
    /// The buffer of a read or write.
    Buf(IoBuf),
    /// The buffer of a receive, a send, or a command for a control device.
    Bytes(Vec<u8>),
    /// An accepted connection.
    Socket(OwnedFd),
    /// The slot of a FUSE command.
    Fuse(Box<FuseSlot>),
    /// The slot of a ublk command.
    Ublk(Box<UblkSlot>),
}

/// The end of an operation, or one of several results of an accept.
#[derive(Debug)]
pub struct Done {
    /// The submitter's name for the operation.
    pub token: u64,
    /// Bytes transferred or events seen, or the error.
    pub result: Result<usize, Errno>,
    /// Whether further completions of the same operation follow.
    pub more: bool,
    /// The operation's memory, or an accepted socket.
    pub payload: Payload,
}

/// An arena registered with the kernel, so that its pages need no lookup per operation.
pub(super) struct FixedArena {
    arena: Arc<Arena>,
}

impl FixedArena {
    pub(super) fn new(arena: Arc<Arena>) -> Self {
        Self { arena }
    }

    /// Start and length of each buffer to register.
    pub(super) fn chunks(&self) -> Vec<(*mut u8, usize)> {
        let (base, bytes) = self.arena.region();
        let starts = (0..bytes).step_by(CHUNK);
        starts.map(|at| (base.wrapping_add(at), CHUNK.min(bytes - at))).collect()
    }

    /// Index of the registered buffer that contains all of `span` of `buf`, if there is one.
    fn index(&self, buf: &IoBuf, span: &Range<usize>) -> Option<u16> {
        if !buf.is_from(&self.arena) {
            return None;
        }
        let start = buf.as_ptr() as usize - self.arena.region().0 as usize + span.start;
        let last = start + span.len().max(1) - 1;
        let same = start / CHUNK == last / CHUNK;
        same.then(|| u16::try_from(start / CHUNK).ok()).flatten()
    }
}

impl Op {
    /// Whether it waits for a peer, and must be cancelled before its file can close.
    pub(super) fn waits_for_peer(&self) -> bool {
        match self {
            Self::Receive { .. } | Self::Send { .. } | Self::Accept => true,
            Self::Poll { .. } | Self::Fuse(_) | Self::Ublk(_) => true,
            Self::Read { .. } | Self::Write { .. } | Self::Sync => false,
            Self::Allocate { .. } | Self::Discard { .. } | Self::UblkControl(_) => false,
        }
    }

    /// The submission for registered file `file`. It points into memory that the operation owns, on
    /// the heap or in the arena, which does not move with the operation.
    ///
    /// # Panics
    /// If a span is not within its buffer.
    pub(super) fn entry(&mut self, file: u32, arena: Option<&FixedArena>) -> Submission {
        let fd = types::Fixed(file);
        let entry = match self {
            Self::Read { offset, buf, span } => read_entry(fd, *offset, buf, span, arena),
            Self::Write { offset, buf, span, durable } => {
                let flags = if *durable { libc::RWF_DSYNC } else { 0 };
                write_entry(fd, *offset, buf, span, flags, arena)
            }
            Self::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Self::Allocate { mode, offset, len } => {
                opcode::Fallocate::new(fd, *len).offset(*offset).mode(*mode).build()
            }
            Self::Discard { offset, len } => {
                // The length travels in the first eight bytes of the command, which are `addr3`.
                let mut cmd = [0; 16];
                cmd[..8].copy_from_slice(&len.to_ne_bytes());
                let discard = opcode::UringCmd16::new(fd, BLOCK_URING_CMD_DISCARD);
                discard.addr(Some(*offset)).cmd(cmd).build()
            }
            Self::Receive { bytes, span } => {
                let part = &mut bytes[span.clone()];
                opcode::Recv::new(fd, part.as_mut_ptr(), length(part.len())).build()
            }
            Self::Send { bytes, span } => {
                let part = &bytes[span.clone()];
                let send = opcode::Send::new(fd, part.as_ptr(), length(part.len()));
                send.flags(libc::MSG_NOSIGNAL).build()
            }
            Self::Accept => opcode::AcceptMulti::new(fd).flags(libc::SOCK_CLOEXEC).build(),
            Self::Poll { events } => opcode::PollAdd::new(fd, *events).build(),
            Self::Fuse(slot) => {
                assert!(slot.is_whole(), "what the kernel gets is not lent to others");
                return Submission::command(fd, slot.number(), slot.own_part(), slot.regions());
            }
            Self::Ublk(slot) => {
                let own = slot.own_part();
                let command = opcode::UringCmd80::new(types::Fd(slot.file()), slot.number());
                return Submission::Wide(command.cmd(own).build());
            }
            Self::UblkControl(call) => {
                let command = opcode::UringCmd80::new(fd, call.control.number());
                return Submission::Wide(command.cmd(call.own_part()).build());
            }
        };
        entry.into()
    }

    /// The memory to return when the operation has ended.
    pub(super) fn into_payload(self) -> Payload {
        match self {
            Self::Read { buf, .. } | Self::Write { buf, .. } => Payload::Buf(buf),
            Self::Receive { bytes, .. } | Self::Send { bytes, .. } => Payload::Bytes(bytes),
            Self::Fuse(slot) => Payload::Fuse(slot),
            Self::Ublk(slot) => Payload::Ublk(slot),
            Self::UblkControl(call) => Payload::Bytes(call.buffer),
            Self::Sync
            | Self::Allocate { .. }
            | Self::Discard { .. }
            | Self::Accept
            | Self::Poll { .. } => Payload::None,
        }
    }
}

fn read_entry(
    fd: types::Fixed,
    offset: u64,
    buf: &mut IoBuf,
    span: &Range<usize>,
    arena: Option<&FixedArena>,
) -> squeue::Entry {
    let index = arena.and_then(|arena| arena.index(buf, span));
    let part = &mut buf[span.clone()];
    let (ptr, len) = (part.as_mut_ptr(), length(part.len()));
    match index {
        Some(index) => opcode::ReadFixed::new(fd, ptr, len, index).offset(offset).build(),
        None => opcode::Read::new(fd, ptr, len).offset(offset).build(),
    }
}

fn write_entry(
    fd: types::Fixed,
    offset: u64,
    buf: &IoBuf,
    span: &Range<usize>,
    flags: i32,
    arena: Option<&FixedArena>,
) -> squeue::Entry {
    let index = arena.and_then(|arena| arena.index(buf, span));
    let part = &buf[span.clone()];
    let (ptr, len) = (part.as_ptr(), length(part.len()));
    match index {
        Some(index) => {
            opcode::WriteFixed::new(fd, ptr, len, index).offset(offset).rw_flags(flags).build()
        }
        None => opcode::Write::new(fd, ptr, len).offset(offset).rw_flags(flags).build(),
    }
}

/// A length for the kernel. A longer span is transferred in part, which every caller must handle.
fn length(len: usize) -> u32 {
    const MOST: usize = 1 << 30;
    len.min(MOST) as u32
}
