//! Process settings of the server, all best effort: without them the server works, but may wait for
//! its own storage when memory is short.

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, Rlimit, configure_io_flusher_behavior, getrlimit, setrlimit};

/// Open files, for connections, devices and rings.
const FILES: u64 = 16 << 10;

/// Prepares the process. Its memory is locked if `lock` is set and it serves a disk of this very
/// machine.
pub fn prepare(lock: bool, serves_this_machine: bool) {
    if let Err(error) = become_flusher() {
        if serves_this_machine {
            tracing::warn!(
                %error,
                "not marked as a flusher of I/O (needs CAP_SYS_RESOURCE): when memory is short, \
                 the server may wait for a disk that it serves itself"
            );
        } else {
            tracing::info!(%error, "not marked as a flusher of I/O (needs CAP_SYS_RESOURCE)");
        }
    }
    if lock || serves_this_machine {
        lock_or_warn();
    }
    raise_file_limit();
}

/// Locks the memory as [`lock_memory`] does, or logs that this failed.
pub fn lock_or_warn() {
    if let Err(error) = lock_memory() {
        let limit = getrlimit(Resource::Memlock).current;
        tracing::warn!(
            %error,
            limit,
            "memory is not locked: when it is short, the server may wait for its own swap or \
             disk; raise the limit on locked memory (LimitMEMLOCK=infinity, ulimit -l unlimited)"
        );
    }
}

/// Allows as many open files as this process may have, up to a limit.
pub fn raise_file_limit() {
    let files = getrlimit(Resource::Nofile);
    let wanted = files.maximum.map_or(FILES, |most| most.min(FILES));
    if files.current.is_some_and(|current| current < wanted) {
        let limit = Rlimit { current: Some(wanted), maximum: files.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::info!(%error, "the limit on open files stays");
        }
    }
}

/// Marks this process as a flusher of I/O: it must not wait for memory to be freed by writes to a
/// volume that it serves, since it would wait for itself.
pub fn become_flusher() -> rustix::io::Result<()> {
    configure_io_flusher_behavior(true)
}

/// Locks all memory in use, and later memory once it is used.
pub fn lock_memory() -> rustix::io::Result<()> {
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)
}

/// Notifies systemd, if it expects that.
pub fn notify(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "systemd could not be told");
    }
}
