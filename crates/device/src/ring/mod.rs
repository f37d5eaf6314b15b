//! One thread's io_uring, shared by everything on that thread that does I/O.
//!
//! An operation ([`Op`]) owns its memory while the kernel may touch it; the ring keeps it in a
//! slot from submission to the last completion and then hands it back ([`Done`]). So nobody
//! outside needs `unsafe`. Users are kept apart by a [`Client`] each; dropping a client drops
//! what would still come for it. Open files live in a registered table ([`RingFile`]); dropping
//! one cancels what waits on a peer, lets disk I/O finish, and only then closes it.
//!
//! The ring is entered once a turn of the event loop, by [`Ring::wait`], which submits, waits,
//! and sorts completions. Limits: operations in flight, files and clients are counted and
//! refused beyond a fixed number.

mod fuse;
mod op;
mod uring;
mod wake;

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{Arena, Instant};
use io_uring::{EnterFlags, Submitter, cqueue, opcode, types};
use rustix::io::Errno;

use crate::clock::Clock;
pub use fuse::{FuseSlot, Returned};
use op::FixedArena;
pub use op::{Done, Op, Payload};
use uring::{Submission, Uring};
#[cfg(not(loom))]
use wake::Alarm;
#[cfg(loom)]
pub use wake::Alarm;
pub use wake::Waker;

/// Most files registered with one ring.
pub const FILES_MAX: u32 = 1024;
/// Completions that may be outstanding for each submission entry.
const COMPLETIONS_PER_ENTRY: u32 = 4;
/// Most submission entries; the kernel's own limit is 32,768.
const ENTRIES_MAX: u32 = 4096;
/// How long a ring being dropped waits for what is in flight.
const DROP_PATIENCE: Duration = Duration::from_secs(5);
/// What is tried, best first.
const SETUPS: [Setup; 3] = [Setup::Deferred, Setup::Cooperative, Setup::Plain];
/// User data of operations whose completion nobody looks at.
const NOBODY: u64 = u64::MAX;

/// Which set-up the kernel accepted, best first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Setup {
    /// Single issuer with deferred task run (Linux 6.1).
    Deferred,
    /// Cooperative task run (Linux 5.19).
    Cooperative,
    /// Neither.
    Plain,
}

/// One thread's io_uring. Not `Send`: it is made on the thread that uses it.
pub struct Ring {
    core: RefCell<Core>,
    setup: Setup,
    arena_fixed: bool,
    waker: Waker,
}

struct Core {
    uring: Uring,
    arena: Option<FixedArena>,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    in_flight: usize,
    limit: usize,
    files: Vec<FileSlot>,
    free_files: Vec<u32>,
    clients: Vec<ClientSlot>,
    /// Completions sorted to clients that have not fetched them.
    delivered: usize,
    /// Empty between uses.
    fetched: Vec<cqueue::Entry>,
    alarm: Alarm,
}

/// An operation the kernel has, or a place for one.
#[derive(Default)]
struct Slot {
    op: Option<Op>,
    token: u64,
    client: u32,
    file: u32,
}

#[derive(Default)]
struct FileSlot {
    in_flight: u32,
    waits_for_peer: bool,
    closing: bool,
}

#[derive(Default)]
struct ClientSlot {
    open: bool,
    in_flight: u32,
    done: Vec<Done>,
}

impl Ring {
    /// A ring with room for `entries` submissions between two turns and four times as many in
    /// flight. Buffers from `arena` then need no page lookup for each operation.
    ///
    /// # Errors
    /// When the kernel has no io_uring or refuses one to this process.
    pub fn new(entries: u32, arena: Option<Arc<Arena>>) -> io::Result<Rc<Self>> {
        Self::with_setups(entries, arena, &SETUPS, false)
    }

    /// The same with submissions of 128 bytes, for files that have commands of their own, such
    /// as FUSE's (Linux 5.19); a common ring where the kernel has none of those.
    ///
    /// # Errors
    /// As for [`Ring::new`].
    pub fn wide(entries: u32, arena: Option<Arc<Arena>>) -> io::Result<Rc<Self>> {
        let ring = Self::with_setups(entries, arena.clone(), &SETUPS, true);
        ring.or_else(|_| Self::new(entries, arena))
    }

    /// A ring with the first of these set-ups that the kernel accepts.
    fn with_setups(
        entries: u32,
        arena: Option<Arc<Arena>>,
        setups: &[Setup],
        wide: bool,
    ) -> io::Result<Rc<Self>> {
        let entries = entries.clamp(8, ENTRIES_MAX).next_power_of_two();
        let built = Uring::build(entries, setups, wide);
        let (uring, setup) = built.map_err(|refusal| explained(&refusal))?;
        let params = uring.params();
        if !params.is_feature_nodrop() || !params.is_feature_ext_arg() {
            return Err(io::Error::other("io_uring of this kernel is too old: 5.11 is needed"));
        }
        let limit = params.cq_entries() as usize;
        let files = file_limit();
        register_files(&uring.submitter(), files)?;
        let arena = arena.and_then(|arena| register_arena(&uring.submitter(), arena));
        let (alarm, waker) = Alarm::new()?;
        let core = Core {
            uring,
            arena,
            slots: Vec::new(),
            free_slots: Vec::new(),
            in_flight: 0,
            limit,
            files: (0..files).map(|_| FileSlot::default()).collect(),
            free_files: (0..files).rev().collect(),
            clients: Vec::new(),
            delivered: 0,
            fetched: Vec::new(),
            alarm,
        };
        let arena_fixed = core.arena.is_some();
        let ring = Self { core: RefCell::new(core), setup, arena_fixed, waker };
        ring.core.borrow_mut().arm_alarm()?;
        Ok(Rc::new(ring))
    }

    /// The set-up the kernel accepted.
    #[must_use]
    pub fn setup(&self) -> Setup {
        self.setup
    }

    /// Whether files with commands of their own can be served.
    #[must_use]
    pub fn is_wide(&self) -> bool {
        self.core.borrow().uring.is_wide()
    }

    /// Whether the arena could be registered; it is used in any case.
    #[must_use]
    pub fn arena_is_registered(&self) -> bool {
        self.arena_fixed
    }

    /// A new user of the ring.
    #[must_use]
    pub fn client(self: &Rc<Self>) -> Client {
        let mut core = self.core.borrow_mut();
        let vacant = core.clients.iter().position(|c| !c.open && c.in_flight == 0);
        let id = vacant.unwrap_or_else(|| {
            core.clients.push(ClientSlot::default());
            core.clients.len() - 1
        });
        core.clients[id].open = true;
        Client { ring: Rc::clone(self), id: id as u32 }
    }

    /// Registers an open file or socket. The ring holds it open by itself; the caller may close
    /// its own descriptor.
    ///
    /// # Errors
    /// When the table is full, or the kernel refuses.
    pub fn register(self: &Rc<Self>, fd: impl AsFd) -> io::Result<RingFile> {
        let index = self.core.borrow_mut().register(fd.as_fd().as_raw_fd())?;
        Ok(RingFile { ring: Rc::clone(self), index })
    }

    /// Submits everything, then waits for a completion, a wake-up, or `until`; returns at once
    /// when there is a completion that nobody has fetched. May return early for no reason.
    ///
    /// # Errors
    /// When the ring itself fails; it cannot be used any more then.
    pub fn wait(&self, clock: &Clock, until: Option<Instant>) -> io::Result<()> {
        let mut core = self.core.borrow_mut();
        core.arm_alarm()?;
        let idle = core.delivered == 0 && !core.alarm.rang();
        let patience = match until {
            _ if !idle => Some(Duration::ZERO),
            Some(until) => Some(until.since(clock.now())),
            None => None,
        };
        core.enter(patience)?;
        core.collect();
        core.alarm.quiet();
        Ok(())
    }

    /// A handle that makes [`Ring::wait`] return, from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }
}

/// One user of a ring, and the completions that are for it.
pub struct Client {
    ring: Rc<Ring>,
    id: u32,
}

impl Client {
    /// Queues an operation; the kernel sees it at the next [`Ring::wait`] at the latest.
    ///
    /// # Errors
    /// Gives the operation back when too many are in flight: try again after a completion; or
    /// when it needs a wide ring, and this is none.
    ///
    /// # Panics
    /// If the file is of another ring, or a span is not within its buffer.
    pub fn submit(&self, file: &RingFile, token: u64, op: Op) -> Result<(), Op> {
        assert!(Rc::ptr_eq(&self.ring, &file.ring), "a file is used on the ring that has it");
        self.ring.core.borrow_mut().submit(self.id, file.index, token, op)
    }

    /// Appends what has completed.
    pub fn reap(&self, done: &mut Vec<Done>) {
        let mut core = self.ring.core.borrow_mut();
        let mine = &mut core.clients[self.id as usize].done;
        let count = mine.len();
        done.append(mine);
        core.delivered -= count;
    }

    /// Operations in flight, those completed but not yet fetched not counted.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ring.core.borrow().clients[self.id as usize].in_flight as usize
    }

    /// The ring it is a user of.
    #[must_use]
    pub fn ring(&self) -> &Rc<Ring> {
        &self.ring
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut core = self.ring.core.borrow_mut();
        let slot = &mut core.clients[self.id as usize];
        slot.open = false;
        let unread = std::mem::take(&mut slot.done);
        core.delivered -= unread.len();
    }
}

/// A file or socket in the table of a ring.
pub struct RingFile {
    ring: Rc<Ring>,
    index: u32,
}

impl Drop for RingFile {
    fn drop(&mut self) {
        self.ring.core.borrow_mut().close(self.index);
    }
}

impl Core {
    fn register(&mut self, fd: i32) -> io::Result<u32> {
        let full = || io::Error::other(format!("more than {} open files", self.files.len()));
        let index = *self.free_files.last().ok_or_else(full)?;
        self.uring.submitter().register_files_update(index, &[fd])?;
        self.free_files.pop();
        self.files[index as usize] = FileSlot::default();
        Ok(index)
    }

    fn close(&mut self, index: u32) {
        let file = &mut self.files[index as usize];
        file.closing = true;
        if file.in_flight == 0 {
            return self.release_file(index);
        }
        if file.waits_for_peer {
            let which = types::CancelBuilder::fd(types::Fixed(index)).all();
            let cancel = opcode::AsyncCancel2::new(which).build().user_data(NOBODY).into();
            // If the queue is full, the ring's own end cancels it.
            self.push(&cancel);
        }
    }

    /// Drops the ring's hold on a file that has nothing in flight.
    fn release_file(&mut self, index: u32) {
        // Cannot fail: the index is in the table, and -1 asks for no new file.
        let _ = self.uring.submitter().register_files_update(index, &[-1]);
        self.free_files.push(index);
    }

    fn submit(&mut self, client: u32, file: u32, token: u64, mut op: Op) -> Result<(), Op> {
        if self.in_flight >= self.limit {
            return Err(op);
        }
        let index = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        let entry = op.entry(file, self.arena.as_ref()).user_data(u64::from(index));
        if !self.push(&entry) {
            self.free_slots.push(index);
            return Err(op);
        }
        let holder = &mut self.files[file as usize];
        holder.in_flight += 1;
        holder.waits_for_peer |= op.waits_for_peer();
        self.clients[client as usize].in_flight += 1;
        self.in_flight += 1;
        self.slots[index as usize] = Slot { op: Some(op), token, client, file };
        Ok(())
    }

    /// Puts an entry into the submission queue, making room by submitting what is there. False
    /// when there is no room even so.
    fn push(&mut self, entry: &Submission) -> bool {
        for attempt in 0..2 {
            // SAFETY: what the entry points to is owned by an `Op` that the caller puts into a
            // slot, or by the alarm, and stays there until the completion; the bytes do not
            // move with their owner. A ring that is dropped waits for completions or leaks them.
            if unsafe { self.uring.push(entry) } {
                return true;
            }
            if attempt == 0 && self.enter(Some(Duration::ZERO)).is_err() {
                return false;
            }
        }
        false
    }

    /// Submits, runs deferred work, and waits for a completion for at most `patience`.
    fn enter(&mut self, patience: Option<Duration>) -> io::Result<()> {
        let pending = self.uring.pending() as u32;
        let submitter = self.uring.submitter();
        let result = match patience {
            Some(Duration::ZERO) => {
                let flags = EnterFlags::GETEVENTS.bits();
                // SAFETY: no argument is passed, and `pending` is what the queue holds.
                unsafe { submitter.enter::<libc::sigset_t>(pending, 0, flags, None) }
            }
            Some(patience) => {
                let time = types::Timespec::from(patience);
                let args = types::SubmitArgs::new().timespec(&time);
                submitter.submit_with_args(1, &args)
            }
            None => submitter.submit_and_wait(1),
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) => match Errno::from_io_error(&error) {
                // Interrupted; out of time; completions must be fetched first; no memory now.
                Some(Errno::INTR | Errno::TIME | Errno::BUSY | Errno::AGAIN) => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Sorts completions to their clients.
    fn collect(&mut self) {
        let mut fetched = std::mem::take(&mut self.fetched);
        self.uring.fetch(&mut fetched);
        for entry in fetched.drain(..) {
            match entry.user_data() {
                NOBODY => {}
                wake::USER_DATA => self.alarm.ring(),
                index => self.finish(index as u32, entry.result(), cqueue::more(entry.flags())),
            }
        }
        self.fetched = fetched;
    }

    fn finish(&mut self, index: u32, result: i32, more: bool) {
        let slot = &mut self.slots[index as usize];
        let (token, client, file) = (slot.token, slot.client, slot.file);
        let accepting = matches!(slot.op, Some(Op::Accept));
        let mut payload = Payload::None;
        if accepting && result >= 0 {
            // SAFETY: a successful accept returns a new descriptor that nobody else owns.
            payload = Payload::Socket(unsafe { OwnedFd::from_raw_fd(result) });
        }
        let owner = &mut self.clients[client as usize];
        if !more {
            let mut op = slot.op.take().expect("a slot holds its operation until the last one");
            if let Op::Fuse(slot) = &mut op
                && result >= 0
            {
                slot.fetched();
            }
            if !accepting {
                payload = op.into_payload();
            }
            self.free_slots.push(index);
            self.in_flight -= 1;
            owner.in_flight -= 1;
        }
        if owner.open {
            let result = usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
            owner.done.push(Done { token, result, more, payload });
            self.delivered += 1;
        }
        if !more {
            let holder = &mut self.files[file as usize];
            holder.in_flight -= 1;
            if holder.closing && holder.in_flight == 0 {
                self.release_file(file);
            }
        }
    }

    /// Has a read of the wake-up counter in flight, always.
    fn arm_alarm(&mut self) -> io::Result<()> {
        let Some(entry) = self.alarm.arm() else { return Ok(()) };
        if self.push(&entry.into()) {
            return Ok(());
        }
        self.alarm.disarm();
        Err(io::Error::other("the ring takes no operations"))
    }
}

impl Drop for Core {
    /// Cancels what waits for others, waits for the rest, and leaks what does not end: better
    /// lost memory than memory that the kernel writes to after it was freed.
    fn drop(&mut self) {
        let clock = Clock::start();
        let deadline = clock.now() + DROP_PATIENCE;
        let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build();
        self.push(&cancel.user_data(NOBODY).into());
        while (self.in_flight > 0 || self.alarm.is_armed()) && clock.now() < deadline {
            if self.enter(Some(Duration::from_millis(10))).is_err() {
                break;
            }
            self.collect();
        }
        if self.in_flight > 0 {
            std::mem::forget(std::mem::take(&mut self.slots));
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({:?})", self.setup)
    }
}

/// Why there is no ring, with what to do about it.
fn explained(refusal: &io::Error) -> io::Error {
    let advice = match Errno::from_io_error(refusal) {
        Some(Errno::NOSYS) => "this kernel has none; Linux 5.11 or later is needed",
        Some(Errno::PERM | Errno::ACCESS) => {
            "this process may not use it; see the sysctl kernel.io_uring_disabled, and the \
             seccomp profile if in a container"
        }
        Some(Errno::NOMEM) => "no memory may be locked for it; see ulimit -l",
        _ => "the kernel refused",
    };
    io::Error::new(refusal.kind(), format!("cannot set up io_uring: {advice} ({refusal})"))
}

/// How many files to make room for: the kernel counts the table against the process's limit.
fn file_limit() -> u32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|n| u32::try_from(n).ok()).map_or(FILES_MAX, |n| n.min(FILES_MAX))
}

fn register_files(submitter: &Submitter<'_>, count: u32) -> io::Result<()> {
    if submitter.register_files_sparse(count).is_ok() {
        return Ok(());
    }
    submitter.register_files(&vec![-1; count as usize])
}

/// Registers the arena's memory; without it (a limit on locked memory) plain reads and writes
/// do the same work a little slower.
fn register_arena(submitter: &Submitter<'_>, arena: Arc<Arena>) -> Option<FixedArena> {
    let fixed = FixedArena::new(arena);
    let vectors: Vec<libc::iovec> = fixed
        .chunks()
        .into_iter()
        .map(|(base, len)| libc::iovec { iov_base: base.cast(), iov_len: len })
        .collect();
    // SAFETY: the chunks lie within the arena's region, which lives as long as the ring since
    // `FixedArena` holds it.
    let registered = unsafe { submitter.register_buffers(&vectors) };
    registered.is_ok().then_some(fixed)
}

#[cfg(test)]
mod tests;
