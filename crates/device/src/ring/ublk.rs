//! ublk: slots for the kernel's requests to a block device, and commands for the control device.
//!
//! A queue of a device has a fixed number of slots. A slot's command completes when the kernel has
//! a request in it; the next command answers the request. Kernel and server take turns with a slot.
//! What the request is, the kernel says in memory that all slots of a queue share, which only the
//! kernel writes.
//!
//! The server copies the data of a request, by reading and writing the device's file. The kernel
//! would also do it, with each command. But if the server is killed at that moment, the kernel may
//! fail to find the server's memory, and then fails the read (`__ublk_complete_rq` of Linux 6.12):
//! seen as an I/O error of the disk in one of six kills under load.
//!
//! The device's file is not in the ring's table of files: Linux before 6.13 releases files of that
//! table in the order of their removal, and one whose operation waits for ever, such as an accept,
//! would keep the device open.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;
use std::{io, ptr};

use forebay_ublk_wire::{
    COMMAND_BYTES, Control, ControlCommand, DESCRIPTOR_BYTES, Descriptor, Fetch, QUEUE_DEPTH_MAX,
    data_position, fetch,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{Client, Op, Payload, Ring, RingFile};
use crate::clock::Clock;

/// One queue of a ublk device: the descriptions of its requests, shared by the kernel.
pub struct UblkQueue {
    device: OwnedFd,
    number: u16,
    depth: u16,
    map: NonNull<u8>,
    bytes: usize,
}

impl UblkQueue {
    /// Queue `number` of the device `/dev/ublkcN`, which has `depth` slots in each queue.
    ///
    /// # Errors
    /// If the kernel does not share the queue's memory: it has no such queue, or another depth.
    pub fn open(device: OwnedFd, number: u16, depth: u16) -> io::Result<Rc<Self>> {
        let page = rustix::param::page_size();
        let length = |slots: u16| (usize::from(slots) * DESCRIPTOR_BYTES).next_multiple_of(page);
        let (bytes, offset) = (length(depth), usize::from(number) * length(QUEUE_DEPTH_MAX));
        let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let map =
            unsafe { mmap(ptr::null_mut(), bytes, read, shared, device.as_fd(), offset as u64)? };
        let map = NonNull::new(map.cast()).expect("a mapping does not begin at zero");
        Ok(Rc::new(Self { device, number, depth, map, bytes }))
    }

    /// What the kernel says of the request in slot `tag`.
    fn descriptor(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "a slot is one of its queue's");
        let at = usize::from(tag) * DESCRIPTOR_BYTES;
        // SAFETY: the descriptor lies within the mapping, which lives as long as `self`, and any
        // bytes are valid. The kernel does not write it while the server has the slot; the read is
        // volatile since it does at other times.
        let bytes = unsafe { self.map.add(at).cast::<[u8; DESCRIPTOR_BYTES]>().read_volatile() };
        Descriptor::decode(&bytes)
    }
}

impl Drop for UblkQueue {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `open`, and nothing refers to it any more.
        let unmapped = unsafe { munmap(self.map.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping can be removed");
    }
}

/// A slot of a queue.
pub struct UblkSlot {
    queue: Rc<UblkQueue>,
    tag: u16,
    next: Fetch,
}

impl UblkSlot {
    /// Slot `tag` of a queue.
    #[must_use]
    pub fn new(queue: &Rc<UblkQueue>, tag: u16) -> Self {
        Self { queue: Rc::clone(queue), tag, next: Fetch::First }
    }

    /// What the kernel says of the request in the slot; call it only after a command has succeeded.
    #[must_use]
    pub fn descriptor(&self) -> Descriptor {
        self.queue.descriptor(self.tag)
    }

    /// Copies the data of the write in the slot.
    ///
    /// # Errors
    /// The kernel's; `IO` if it does not have all of the data.
    pub fn copy_out(&self, data: &mut [u8]) -> Result<(), Errno> {
        let at = data_position(self.queue.number, self.tag);
        let copied = rustix::io::pread(&self.queue.device, &mut *data, at)?;
        if copied == data.len() { Ok(()) } else { Err(Errno::IO) }
    }

    /// Copies the data for the read in the slot.
    ///
    /// # Errors
    /// The kernel's; `IO` if it does not take all of the data.
    pub fn copy_in(&self, data: &[u8]) -> Result<(), Errno> {
        let at = data_position(self.queue.number, self.tag);
        let copied = rustix::io::pwrite(&self.queue.device, data, at)?;
        if copied == data.len() { Ok(()) } else { Err(Errno::IO) }
    }

    /// Stores the result for the next command.
    pub fn answer(&mut self, result: i32) {
        self.next = Fetch::Commit(result);
    }

    pub(super) fn file(&self) -> RawFd {
        self.queue.device.as_raw_fd()
    }

    pub(super) fn number(&self) -> u32 {
        self.next.number()
    }

    pub(super) fn own_part(&self) -> [u8; COMMAND_BYTES] {
        fetch(self.queue.number, self.tag, self.next)
    }
}

impl std::fmt::Debug for UblkSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UblkSlot(queue {}, tag {}, {:?})", self.queue.number, self.tag, self.next)
    }
}

/// A command for the control device, with the memory that it names.
#[derive(Debug)]
pub struct ControlCall {
    /// The command.
    pub control: Control,
    /// The device's number, if the command has one.
    pub device: Option<u32>,
    /// As in [`ControlCommand`].
    pub data: u64,
    /// What the kernel reads or fills.
    pub buffer: Vec<u8>,
}

impl ControlCall {
    pub(super) fn own_part(&mut self) -> [u8; COMMAND_BYTES] {
        let length = u16::try_from(self.buffer.len()).expect("a command's memory is short");
        let address = if length == 0 { 0 } else { self.buffer.as_mut_ptr() as u64 };
        let Self { device, data, .. } = *self;
        ControlCommand { device, buffer: (address, length), data }.encode()
    }
}

/// The open control device, with a ring of its own: a command may wait for a queue's thread.
pub struct UblkControl {
    client: Client,
    file: RingFile,
    clock: Clock,
    patience: Duration,
    /// The number of calls so far: the token of the last one.
    calls: u64,
}

impl UblkControl {
    /// Commands for the open control device, each of which may take as long as `patience`.
    ///
    /// # Errors
    /// If there is no io_uring with commands of files (Linux 5.19).
    pub fn new(device: impl AsFd, patience: Duration) -> io::Result<Self> {
        /// Submissions at the same time: one command, and the ring's own.
        const ENTRIES: u32 = 8;
        let ring = Ring::wide(ENTRIES, None)?;
        if !ring.is_wide() {
            return Err(io::Error::other("io_uring takes no commands of files: Linux 5.19 does"));
        }
        let file = ring.register(device)?;
        Ok(Self { client: ring.client(), file, clock: Clock::start(), patience, calls: 0 })
    }

    /// Sends a command, and waits for its end; returns the command's memory.
    ///
    /// # Errors
    /// What the kernel answers; `TIMEDOUT` if it does not.
    pub fn call(&mut self, call: ControlCall) -> Result<Vec<u8>, Errno> {
        self.calls += 1;
        let token = self.calls;
        let submitted = self.client.submit(&self.file, token, Op::UblkControl(Box::new(call)));
        submitted.map_err(|_| Errno::BUSY)?;
        let until = self.clock.now() + self.patience;
        let mut done = Vec::new();
        while self.clock.now() < until {
            let waited = self.client.ring().wait(&self.clock, Some(until));
            waited.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
            self.client.reap(&mut done);
            // An earlier call may get its answer after it has timed out.
            let Some(end) = done.drain(..).find(|end| end.token == token) else { continue };
            end.result?;
            let Payload::Bytes(buffer) = end.payload else { unreachable!("the ring's own") };
            return Ok(buffer);
        }
        Err(Errno::TIMEDOUT)
    }
}
