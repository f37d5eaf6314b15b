//! The contents of a ticket for a request passed on, in this crate's types.

use forebay_block::Ticket;

use crate::tree::Topic;

/// A request that waits for a volume or for a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waiting {
    /// A read with this length in bytes.
    Read(u32),
    /// A write with this length in bytes.
    Write(u32),
    /// A flush.
    Sync,
    /// The rest of a range of a volume to be zeroed, from an offset to an end; `keep` the space
    /// allocated or not.
    Zeroes { volume: usize, from: u64, end: u64, keep: bool },
    /// An open of a text.
    Text(Topic),
    /// A read from a text that an earlier server of the mount has opened.
    TextAgain { handle: u64, offset: u32, bytes: u32 },
}

const READ: u64 = 0;
const WRITE: u64 = 1;
const SYNC: u64 = 2;
const ZEROES: u64 = 3;
const KEEPING_ZEROES: u64 = 4;
const TEXT: u64 = 5;
const TEXT_AGAIN: u64 = 6;
const KIND_BITS: u32 = 8;

impl Waiting {
    pub fn ticket(self, unique: u64) -> Ticket {
        let note = match self {
            Self::Read(bytes) => [READ, bytes.into(), 0],
            Self::Write(bytes) => [WRITE, bytes.into(), 0],
            Self::Sync => [SYNC, 0, 0],
            Self::Zeroes { volume, from, end, keep } => {
                let kind = if keep { KEEPING_ZEROES } else { ZEROES };
                [kind | (volume as u64) << KIND_BITS, from, end]
            }
            Self::Text(topic) => [TEXT, topic.number(), 0],
            Self::TextAgain { handle, offset, bytes } => {
                [TEXT_AGAIN, handle, u64::from(offset) << 32 | u64::from(bytes)]
            }
        };
        Ticket { unique, note }
    }

    pub fn of(ticket: &Ticket) -> Self {
        let [kind, first, second] = ticket.note;
        let volume = (kind >> KIND_BITS) as usize;
        match kind & ((1 << KIND_BITS) - 1) {
            READ => Self::Read(first as u32),
            WRITE => Self::Write(first as u32),
            SYNC => Self::Sync,
            TEXT => Self::Text(Topic::of(first)),
            TEXT_AGAIN => {
                let (offset, bytes) = ((second >> 32) as u32, second as u32);
                Self::TextAgain { handle: first, offset, bytes }
            }
            kind => Self::Zeroes { volume, from: first, end: second, keep: kind == KEEPING_ZEROES },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_says_what_it_was_made_for() {
        let all = [
            Waiting::Read(u32::MAX),
            Waiting::Write(1),
            Waiting::Sync,
            Waiting::Zeroes { volume: 63, from: 1 << 40, end: u64::MAX, keep: true },
            Waiting::Zeroes { volume: 0, from: 0, end: 1, keep: false },
            Waiting::Text(Topic::Volume(63)),
            Waiting::Text(Topic::Metrics),
            Waiting::TextAgain { handle: u64::MAX, offset: 7, bytes: u32::MAX },
        ];
        for waiting in all {
            assert_eq!(Waiting::of(&waiting.ticket(5)), waiting);
        }
    }
}
