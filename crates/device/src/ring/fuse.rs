//! A slot for requests from the kernel to a FUSE server, over the ring. Kernel and server take
//! turns with its memory: while a command is in flight it belongs to the kernel and the ring;
//! between a command's completion and the next command it belongs to the server.
//!
//! The kernel remembers the memory, and the request that a slot is for, from the first command on.
//! So both belong to the slot permanently and cannot be exchanged.

use forebay_block::IoBuf;
use forebay_fuse_wire::{COMMAND_BYTES, Entry, Fetch, HEAD_BYTES, Message, command};

/// The payload of an answer.
#[derive(Clone, Copy, Debug)]
pub enum Returned<'a> {
    /// This many bytes, which are in the slot's payload already.
    InPlace(usize),
    /// These bytes.
    Bytes(&'a [u8]),
}

/// Memory for one request at a time, and for its answer.
pub struct FuseSlot {
    queue: u16,
    fetch: Fetch,
    /// A page; only its first bytes are used.
    head: IoBuf,
    payload: IoBuf,
    /// Address and length of both buffers, read by the kernel when the slot is registered.
    regions: [libc::iovec; 2],
}

impl FuseSlot {
    /// A slot for queue `queue` of the kernel, which has one queue per possible processor.
    #[must_use]
    pub fn new(queue: u16, payload_bytes: usize) -> Self {
        let (mut head, mut payload) = (IoBuf::zeroed(HEAD_BYTES), IoBuf::zeroed(payload_bytes));
        let regions = [&mut head, &mut payload]
            .map(|buf| libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() });
        Self { queue, fetch: Fetch::Register, head, payload, regions }
    }

    /// The request in the slot; call it only after a command has succeeded.
    #[must_use]
    pub fn message(&self) -> Message<'_> {
        let head = self.head.first_chunk().expect("the head has its length");
        Entry::new(head, &self.payload).message()
    }

    /// Lends the slot's payload, shortened to `length` bytes, to be filled with the answer's data.
    /// It must be returned before anything else is done with the slot.
    ///
    /// # Panics
    /// If it is already lent, or shorter than `length`.
    #[must_use]
    pub fn lend(&mut self, length: usize) -> IoBuf {
        let mut payload = std::mem::take(&mut self.payload);
        payload.set_len(length);
        payload
    }

    /// Whether the payload is lent.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.payload.capacity() == 0
    }

    /// Takes the payload back.
    ///
    /// # Panics
    /// If it is not this slot's own payload, the only one that the kernel knows.
    pub fn give_back(&mut self, mut payload: IoBuf) {
        let [_, region] = self.regions;
        assert!(std::ptr::eq(payload.as_ptr(), region.iov_base.cast()), "a slot keeps its memory");
        payload.set_len(region.iov_len);
        self.payload = payload;
    }

    /// Stores an answer for the next command: the first bytes of the payload, or `returned`.
    ///
    /// # Panics
    /// If the answer is longer than the payload.
    pub fn answer(&mut self, header: &[u8], returned: Returned<'_>) {
        let length = match returned {
            Returned::InPlace(length) => length,
            Returned::Bytes(bytes) => {
                self.payload[..bytes.len()].copy_from_slice(bytes);
                bytes.len()
            }
        };
        assert!(length <= self.payload.len(), "an answer fits its slot");
        let head = self.head.first_chunk_mut().expect("the head has its length");
        Entry::answer(head, header, length);
    }

    /// Whether no memory is lent, so that the kernel may have all of it.
    pub(super) fn is_whole(&self) -> bool {
        self.payload.len() == self.regions[1].iov_len
    }

    /// Records that a command has succeeded: there is a request, which the next command answers.
    pub(super) fn fetched(&mut self) {
        let head = self.head.first_chunk().expect("the head has its length");
        self.fetch = Fetch::Commit(Entry::new(head, &self.payload).commit_id());
    }

    pub(super) fn number(&self) -> u32 {
        self.fetch.number()
    }

    pub(super) fn own_part(&self) -> [u8; COMMAND_BYTES] {
        command(self.queue, self.fetch)
    }

    pub(super) fn regions(&self) -> &[libc::iovec; 2] {
        &self.regions
    }
}

impl std::fmt::Debug for FuseSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FuseSlot(queue {}, {:?})", self.queue, self.fetch)
    }
}
