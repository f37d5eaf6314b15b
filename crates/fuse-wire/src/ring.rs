//! FUSE over io_uring. For each queue (one per possible processor) the server registers entries,
//! each with a head and a payload in its own memory. The kernel completes an entry's command after
//! storing a request there; the server stores the answer in the same place, and commits it with a
//! command that completes when the next request is there.
//!
//! ```text
//! head      0  header of request or answer    128 bytes
//!         128  structure of the operation     128 bytes
//!         256  flags | id for the commit | bytes of payload | padding | reserved
//! payload      data of the request, then all that the answer returns
//! ```

use crate::request::Message;

/// Length of an entry's head, in bytes.
pub const HEAD_BYTES: usize = 288;
/// Length of a command's own part of a submission, in bytes.
pub const COMMAND_BYTES: usize = 80;
const ARGUMENT: usize = 128;
const COMMIT_ID: usize = 264;
const PAYLOAD_BYTES: usize = 272;

/// The function of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fetch {
    /// Registers the entry and waits for a request.
    Register,
    /// Commits the answer to the request with this ID, and waits for the next request.
    Commit(u64),
}

impl Fetch {
    /// The command's number.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Register => 1,
            Self::Commit(_) => 2,
        }
    }
}

/// The command's own part of its submission.
#[must_use]
pub fn command(queue: u16, fetch: Fetch) -> [u8; COMMAND_BYTES] {
    let mut bytes = [0; COMMAND_BYTES];
    if let Fetch::Commit(id) = fetch {
        bytes[8..16].copy_from_slice(&id.to_ne_bytes());
    }
    bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
    bytes
}

/// The memory of an entry after the kernel has stored a request there.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    head: &'a [u8; HEAD_BYTES],
    payload: &'a [u8],
}

impl<'a> Entry<'a> {
    /// An entry that holds a request.
    #[must_use]
    pub fn new(head: &'a [u8; HEAD_BYTES], payload: &'a [u8]) -> Self {
        Self { head, payload }
    }

    /// The ID for committing its answer.
    #[must_use]
    pub fn commit_id(&self) -> u64 {
        let bytes = self.head[COMMIT_ID..].first_chunk();
        u64::from_ne_bytes(*bytes.expect("it lies in the head"))
    }

    /// The parts of the request. If it claims more payload than there is, the payload is truncated,
    /// and decoding the operation reports that it is too short.
    #[must_use]
    pub fn message(&self) -> Message<'a> {
        let bytes = self.head[PAYLOAD_BYTES..].first_chunk();
        let claimed = u32::from_ne_bytes(*bytes.expect("it lies in the head")) as usize;
        Message {
            header: &self.head[..ARGUMENT],
            argument: &self.head[ARGUMENT..2 * ARGUMENT],
            data: &self.payload[..claimed.min(self.payload.len())],
        }
    }

    /// Writes the header of an answer, and the length of its payload, into a head.
    pub fn answer(head: &mut [u8; HEAD_BYTES], header: &[u8], returned: usize) {
        head[..header.len()].copy_from_slice(header);
        let bytes = u32::try_from(returned).expect("a payload is shorter than 4 GiB");
        head[PAYLOAD_BYTES..PAYLOAD_BYTES + 4].copy_from_slice(&bytes.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_beyond_the_payload_is_cut() {
        let mut head = [0; HEAD_BYTES];
        head[COMMIT_ID..COMMIT_ID + 8].copy_from_slice(&77u64.to_ne_bytes());
        head[PAYLOAD_BYTES..PAYLOAD_BYTES + 4].copy_from_slice(&u32::MAX.to_ne_bytes());
        let entry = Entry::new(&head, &[1, 2, 3]);
        assert_eq!(entry.commit_id(), 77);
        assert_eq!(entry.message().data, [1, 2, 3]);
    }

    #[test]
    fn commands_name_their_queue_and_request() {
        assert_eq!(command(3, Fetch::Register)[16..18], 3u16.to_ne_bytes());
        let commit = command(0, Fetch::Commit(9));
        assert_eq!(commit[8..16], 9u64.to_ne_bytes());
        assert_eq!((Fetch::Register.number(), Fetch::Commit(9).number()), (1, 2));
    }
}
