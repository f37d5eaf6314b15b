//! One thread's io_uring, shared by everything that does I/O on that thread.
//!
//! An operation ([`Op`]) owns its memory while the kernel may access it; the ring keeps it in a
//! slot from submission to the last completion and then returns it ([`Done`]). So no code outside
//! needs `unsafe`. Users are separated by a [`Client`] each; dropping a client discards its
//! outstanding completions. Open files are in a registered table ([`RingFile`]); dropping one
//! cancels operations that wait for a peer, lets disk I/O finish, and only then closes it.
//!
//! The ring is entered once per turn of the event loop, by [`Ring::wait`], which submits, waits,
//! and sorts completions. Operations in flight, files and clients are limited; more are refused.

mod fuse;
mod op;
mod ublk;
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
pub use ublk::{ControlCall, UblkControl, UblkQueue, UblkSlot};
use uring::{Submission, Uring};
#[cfg(not(loom))]
use wake::Alarm;
#[cfg(loom)]
pub use wake::Alarm;
pub use wake::Waker;

/// Maximum number of files registered with one ring.
pub const FILES_MAX: u32 = 1024;
/// Completions that may be outstanding for each submission entry.
const COMPLETIONS_PER_ENTRY: u32 = 4;
/// Maximum number of submission entries; the kernel's own limit is 32,768.
const ENTRIES_MAX: u32 = 4096;
/// How long dropping a ring waits for operations in flight.
const DROP_PATIENCE: Duration = Duration::from_secs(5);
/// Set-ups to try, best first.
const SETUPS: [Setup; 2] = [Setup::Deferred, Setup::Cooperative];
/// User data of operations whose completion is ignored.
const NOBODY: u64 = u64::MAX;

/// The kernel features that the ring uses, best first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Setup {
    /// Single issuer with deferred task run (Linux 6.1).
    Deferred,
    /// Cooperative task run (Linux 5.19). Older kernels also lack an accept that goes on, and the
    /// cancellation of all operations of a file.
    Cooperative,
}

/// One thread's io_uring. Not `Send`: it is created on the thread that uses it.
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
    /// Number of completions sorted to clients but not yet fetched by them.
    delivered: usize,
    /// Scratch space; empty between uses.
    fetched: Vec<cqueue::Entry>,
    alarm: Alarm,
}

/// An operation in flight, or a free slot for one.
#[derive(Default)]
struct Slot {
    op: Option<Op>,
    token: u64,
    client: u32,
    /// Its file in the table; `None` if the operation has its own.
    file: Option<u32>,
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
    /// A ring with room for `entries` submissions per turn and four times as many in flight.
    /// Operations on buffers from `arena` then need no page lookup each.
    ///
    /// # Errors
    /// When the kernel has no io_uring, or denies it to this process.
    pub fn new(entries: u32, arena: Option<Arc<Arena>>) -> io::Result<Rc<Self>> {
        Self::with_setups(entries, arena, &SETUPS, false)
    }

    /// A ring with 128-byte submissions, for files with their own commands, such as FUSE's (Linux
    /// 5.19); a common ring if the kernel does not support them.
    ///
    /// # Errors
    /// As for [`Ring::new`].
    pub fn wide(entries: u32, arena: Option<Arc<Arena>>) -> io::Result<Rc<Self>> {
        let ring = Self::with_setups(entries, arena.clone(), &SETUPS, true);
        ring.or_else(|_| Self::new(entries, arena))
    }

    /// A ring with the first of `setups` that the kernel accepts.
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
            return Err(explained(&Errno::INVAL.into()));
        }
        let limit = params.cq_entries() as usize;
        let files = file_limit();
        uring.submitter().register_files_sparse(files)?;
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

    /// The set-up that the kernel accepted.
    #[must_use]
    pub fn setup(&self) -> Setup {
        self.setup
    }

    /// Whether files with their own commands are supported.
    #[must_use]
    pub fn is_wide(&self) -> bool {
        self.core.borrow().uring.is_wide()
    }

    /// Whether the arena is registered with the kernel; it is used in any case.
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

    /// Registers an open file or socket. The ring keeps it open; the caller may close its own
    /// descriptor.
    ///
    /// # Errors
    /// When the table is full, or the kernel refuses.
    pub fn register(self: &Rc<Self>, fd: impl AsFd) -> io::Result<RingFile> {
        let index = self.core.borrow_mut().register(fd.as_fd().as_raw_fd())?;
        Ok(RingFile { ring: Rc::clone(self), index })
    }

    /// Submits everything, then waits for a completion, a wake-up, or `until`. Returns at once if a
    /// completion has not been fetched yet. Spurious early returns are possible.
    ///
    /// # Errors
    /// When the ring itself fails; it is unusable from then on.
    pub fn wait(&self, clock: &Clock, until: Option<Instant>) -> io::Result<()> {
        self.wait_for(|| until.map(|until| until.since(clock.now())))
    }

    /// As [`Ring::wait`], for at most as long as `patience` says, which is asked only if there is
    /// something to wait for.
    ///
    /// # Errors
    /// As for [`Ring::wait`].
    pub fn wait_for(&self, patience: impl FnOnce() -> Option<Duration>) -> io::Result<()> {
        let mut core = self.core.borrow_mut();
        core.arm_alarm()?;
        let idle = core.delivered == 0 && !core.alarm.rang();
        core.enter(if idle { patience() } else { Some(Duration::ZERO) })?;
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

/// One user of a ring, with the completions of its operations.
pub struct Client {
    ring: Rc<Ring>,
    id: u32,
}

impl Client {
    /// Queues an operation; the kernel sees it at the next [`Ring::wait`] at the latest.
    ///
    /// # Errors
    /// Returns the operation if too many are in flight (try again after a completion), or if it
    /// needs a wide ring and this is not one.
    ///
    /// # Panics
    /// If the file belongs to another ring, or a span is not within its buffer.
    pub fn submit(&self, file: &RingFile, token: u64, op: Op) -> Result<(), Op> {
        assert!(Rc::ptr_eq(&self.ring, &file.ring), "a file is used on the ring that has it");
        self.ring.core.borrow_mut().submit(self.id, Some(file.index), token, op)
    }

    /// As [`Client::submit`], for a slot: it has its own file.
    ///
    /// # Errors
    /// Returns the slot, as [`Client::submit`] does.
    pub fn submit_slot(&self, token: u64, slot: Box<UblkSlot>) -> Result<(), Box<UblkSlot>> {
        let submitted = self.ring.core.borrow_mut().submit(self.id, None, token, Op::Ublk(slot));
        submitted.map_err(|op| match op {
            Op::Ublk(slot) => slot,
            _ => unreachable!("the ring gives back its own"),
        })
    }

    /// Appends the completed operations to `done`.
    pub fn reap(&self, done: &mut Vec<Done>) {
        let mut core = self.ring.core.borrow_mut();
        let mine = &mut core.clients[self.id as usize].done;
        let count = mine.len();
        done.append(mine);
        core.delivered -= count;
    }

    /// Operations in flight, without those that completed but were not fetched.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ring.core.borrow().clients[self.id as usize].in_flight as usize
    }

    /// The ring that it uses.
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

/// A file or socket in a ring's table.
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
            // If the queue is full, the operation is cancelled when the ring is dropped.
            self.push(&cancel);
        }
    }

    /// Removes a file without operations in flight from the table.
    fn release_file(&mut self, index: u32) {
        // Cannot fail: the index is in the table, and -1 removes an entry.
        let _ = self.uring.submitter().register_files_update(index, &[-1]);
        self.free_files.push(index);
    }

    fn submit(&mut self, client: u32, file: Option<u32>, token: u64, mut op: Op) -> Result<(), Op> {
        if self.in_flight >= self.limit {
            return Err(op);
        }
        let index = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        let place = file.unwrap_or(u32::MAX);
        let entry = op.entry(place, self.arena.as_ref()).user_data(u64::from(index));
        if !self.push(&entry) {
            self.free_slots.push(index);
            return Err(op);
        }
        if let Some(file) = file {
            let holder = &mut self.files[file as usize];
            holder.in_flight += 1;
            holder.waits_for_peer |= op.waits_for_peer();
        }
        self.clients[client as usize].in_flight += 1;
        self.in_flight += 1;
        self.slots[index as usize] = Slot { op: Some(op), token, client, file };
        Ok(())
    }

    /// Puts an entry into the submission queue, submitting the queue first if it is full. Returns
    /// false if there is still no room.
    fn push(&mut self, entry: &Submission) -> bool {
        for attempt in 0..2 {
            // SAFETY: the memory that the entry points to is owned by an `Op` that the caller puts
            // into a slot, or by the alarm, and stays there until the completion; moving the owner
            // does not move the bytes. Dropping a ring waits for completions or leaks the memory.
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
                // Interrupted; timed out; completions must be fetched first; no memory now.
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
        if !more && let Some(file) = file {
            let holder = &mut self.files[file as usize];
            holder.in_flight -= 1;
            if holder.closing && holder.in_flight == 0 {
                self.release_file(file);
            }
        }
    }

    /// Keeps a read of the wake-up counter in flight.
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
    /// Cancels operations that wait for a peer, waits for the rest, and leaks what does not end:
    /// leaked memory is better than memory that the kernel writes to after it was freed. Commands
    /// of ublk cannot be cancelled; they end with the ring or the device, and their memory is
    /// leaked.
    fn drop(&mut self) {
        let clock = Clock::start();
        let deadline = clock.now() + DROP_PATIENCE;
        let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build();
        self.push(&cancel.user_data(NOBODY).into());
        let stay = self.slots.iter().filter_map(|slot| slot.op.as_ref());
        let stay = stay.filter(|op| matches!(op, Op::Ublk(_) | Op::UblkControl(_))).count();
        while (self.in_flight > stay || self.alarm.is_armed()) && clock.now() < deadline {
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

/// The reason that there is no ring, with advice.
fn explained(refusal: &io::Error) -> io::Error {
    let advice = match Errno::from_io_error(refusal) {
        Some(Errno::NOSYS) => "this kernel has none; Linux 5.19 or later is needed",
        Some(Errno::INVAL) => "that of this kernel is too old; Linux 5.19 or later is needed",
        Some(Errno::PERM | Errno::ACCESS) => {
            "this process may not use it; see the sysctl kernel.io_uring_disabled, and the \
             seccomp profile if in a container"
        }
        Some(Errno::NOMEM) => "no memory may be locked for it; see ulimit -l",
        _ => "the kernel refused",
    };
    io::Error::new(refusal.kind(), format!("cannot set up io_uring: {advice} ({refusal})"))
}

/// Size of the file table: the kernel counts it against the process's limit of open files.
fn file_limit() -> u32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|n| u32::try_from(n).ok()).map_or(FILES_MAX, |n| n.min(FILES_MAX))
}

/// Registers the arena's memory. Without it (because of a limit on locked memory) plain reads and
/// writes do the same work a little more slowly.
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
