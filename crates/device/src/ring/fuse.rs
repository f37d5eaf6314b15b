//! A slot for requests of the kernel to a FUSE server, over the ring. Kernel and server pass each
//! other its memory: while a command is in flight it is the kernel's, and the ring's; between a
//! command's completion and the next it is the server's.
//!
//! The kernel remembers the memory from the first command on, and which request a slot is for.
//! So both are the slot's own and cannot be exchanged.

use forebay_block::IoBuf;
use forebay_fuse_wire::{COMMAND_BYTES, Entry, Fetch, HEAD_BYTES, Message, command};

/// What an answer returns.
#[derive(Clone, Copy, Debug)]
pub enum Returned<'a> {
    /// So many bytes that are in the payload already.
    InPlace(usize),
    /// These bytes.
    Bytes(&'a [u8]),
}

/// Memory for one request at a time, and its answer.
pub struct FuseSlot {
    queue: u16,
    fetch: Fetch,
    /// A page of which the first bytes are used.
    head: IoBuf,
    payload: IoBuf,
    /// Where both are: the kernel reads this when the slot is registered.
    regions: [libc::iovec; 2],
}

impl FuseSlot {
    /// A slot for a queue of the kernel's, of which there is one for each possible processor.
    #[must_use]
    pub fn new(queue: u16, payload_bytes: usize) -> Self {
        let (mut head, mut payload) = (IoBuf::zeroed(HEAD_BYTES), IoBuf::zeroed(payload_bytes));
        let regions = [&mut head, &mut payload]
            .map(|buf| libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() });
        Self { queue, fetch: Fetch::Register, head, payload, regions }
    }

    /// The request in it; call it only when a command of it has succeeded.
    #[must_use]
    pub fn message(&self) -> Message<'_> {
        let head = self.head.first_chunk().expect("the head has its length");
        Entry::new(head, &self.payload).message()
    }

    /// Lends its payload, shortened to `length`, to be filled with what its answer returns. It
    /// must be given back before anything else is done with the slot.
    ///
    /// # Panics
    /// If it is lent already, or shorter.
    #[must_use]
    pub fn lend(&mut self, length: usize) -> IoBuf {
        let mut payload = std::mem::take(&mut self.payload);
        payload.set_len(length);
        payload
    }

    /// Whether its payload is lent.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.payload.capacity() == 0
    }

    /// Takes its payload back.
    ///
    /// # Panics
    /// If it is another one: the kernel knows this slot's alone.
    pub fn give_back(&mut self, mut payload: IoBuf) {
        let [_, region] = self.regions;
        assert!(std::ptr::eq(payload.as_ptr(), region.iov_base.cast()), "a slot keeps its memory");
        payload.set_len(region.iov_len);
        self.payload = payload;
    }

    /// Puts an answer in, to be handed over by its next command: what is in the payload, or
    /// `returned`.
    ///
    /// # Panics
    /// If the answer returns more than the payload holds.
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

    /// Whether all its memory is here, so that the kernel may have it.
    pub(super) fn is_whole(&self) -> bool {
        self.payload.len() == self.regions[1].iov_len
    }

    /// A command of it has succeeded: there is a request, and the next command answers it.
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
