//! The io_uring itself, with submissions of 64 bytes, or of 128 for files with their own commands.
//! The width makes no difference to other operations.

use std::io;

use io_uring::squeue::{Entry, Entry128, EntryMarker};
use io_uring::{IoUring, Parameters, Submitter, cqueue, opcode, types};

use super::{COMPLETIONS_PER_ENTRY, Setup};

/// One submission.
pub(super) enum Submission {
    /// A submission for a ring of either width.
    Narrow(Entry),
    /// A submission for a wide ring only.
    Wide(Entry128),
}

impl Submission {
    /// A file's own command: its opcode, its part of the submission, and the two memory regions
    /// that it shares with the kernel.
    pub fn command(
        file: types::Fixed,
        number: u32,
        own: [u8; 80],
        regions: &[libc::iovec; 2],
    ) -> Self {
        let command = opcode::UringCmd80::new(file, number).cmd(own);
        let entry = command.addr(Some(regions.as_ptr() as u64)).build();
        // SAFETY: an entry is 128 bytes of plain data, as the crate asserts, so it can be viewed as
        // 32 words.
        let mut words: [u32; 32] = unsafe { std::mem::transmute(entry) };
        // The length, for which the crate has no setter, is the word at byte 24 of an entry.
        words[6] = regions.len() as u32;
        // SAFETY: as above; and any value of that word is valid.
        Self::Wide(unsafe { std::mem::transmute::<[u32; 32], Entry128>(words) })
    }

    pub fn user_data(self, user_data: u64) -> Self {
        match self {
            Self::Narrow(entry) => Self::Narrow(entry.user_data(user_data)),
            Self::Wide(entry) => Self::Wide(entry.user_data(user_data)),
        }
    }
}

impl From<Entry> for Submission {
    fn from(entry: Entry) -> Self {
        Self::Narrow(entry)
    }
}

/// An io_uring of either width.
pub(super) enum Uring {
    Narrow(IoUring),
    Wide(IoUring<Entry128>),
}

impl Uring {
    /// A ring with the first of `setups` that the kernel accepts.
    pub fn build(entries: u32, setups: &[Setup], wide: bool) -> io::Result<(Self, Setup)> {
        let mut refusal = io::Error::other("no set-up to try");
        for &setup in setups {
            let built = if wide {
                build(entries, setup).map(Self::Wide)
            } else {
                build(entries, setup).map(Self::Narrow)
            };
            match built {
                Ok(uring) => return Ok((uring, setup)),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    pub fn is_wide(&self) -> bool {
        matches!(self, Self::Wide(_))
    }

    pub fn params(&self) -> &Parameters {
        match self {
            Self::Narrow(uring) => uring.params(),
            Self::Wide(uring) => uring.params(),
        }
    }

    pub fn submitter(&self) -> Submitter<'_> {
        match self {
            Self::Narrow(uring) => uring.submitter(),
            Self::Wide(uring) => uring.submitter(),
        }
    }

    /// Submissions in the queue that the kernel has not taken.
    pub fn pending(&mut self) -> usize {
        match self {
            Self::Narrow(uring) => uring.submission().len(),
            Self::Wide(uring) => uring.submission().len(),
        }
    }

    /// Puts a submission into the queue. Returns false if the queue is full, or the submission is
    /// too wide.
    ///
    /// # Safety
    /// The memory that it points to must stay in place until its last completion.
    pub unsafe fn push(&mut self, submission: &Submission) -> bool {
        match (self, submission) {
            (Self::Narrow(uring), Submission::Narrow(entry)) => {
                // SAFETY: as the caller promises.
                unsafe { uring.submission().push(entry) }.is_ok()
            }
            (Self::Wide(uring), Submission::Narrow(entry)) => {
                // SAFETY: as the caller promises.
                unsafe { uring.submission().push(&Entry128::from(entry.clone())) }.is_ok()
            }
            (Self::Wide(uring), Submission::Wide(entry)) => {
                // SAFETY: as the caller promises.
                unsafe { uring.submission().push(entry) }.is_ok()
            }
            (Self::Narrow(_), Submission::Wide(_)) => false,
        }
    }

    /// Appends the new completions to `fetched`.
    pub fn fetch(&mut self, fetched: &mut Vec<cqueue::Entry>) {
        match self {
            Self::Narrow(uring) => fetched.extend(uring.completion()),
            Self::Wide(uring) => fetched.extend(uring.completion()),
        }
    }
}

fn build<S: EntryMarker>(entries: u32, setup: Setup) -> io::Result<IoUring<S>> {
    let mut builder = IoUring::<S>::builder();
    builder.setup_cqsize(entries * COMPLETIONS_PER_ENTRY).setup_clamp();
    match setup {
        Setup::Deferred => builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all(),
        Setup::Cooperative => builder.setup_coop_taskrun().setup_submit_all(),
    };
    builder.build(entries)
}
