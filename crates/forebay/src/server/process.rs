//! What the server asks of the operating system for itself. All of it is best effort: without it
//! the server works, but may wait for its own storage when memory is short.

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, Rlimit, configure_io_flusher_behavior, getrlimit, setrlimit};

/// Files for connections, devices and rings.
const FILES: u64 = 16 << 10;

/// Prepares the process. With `lock`, and when it serves a disk of this very machine, its memory
/// is locked.
pub fn prepare(lock: bool, serves_this_machine: bool) {
    // Memory that is freed by writing to a volume that this process serves must not be waited
    // for by this process: it would wait for itself.
    if let Err(error) = configure_io_flusher_behavior(true) {
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
        lock_memory();
    }
    let files = getrlimit(Resource::Nofile);
    let wanted = files.maximum.map_or(FILES, |most| most.min(FILES));
    if files.current.is_some_and(|current| current < wanted) {
        let limit = Rlimit { current: Some(wanted), maximum: files.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::info!(%error, "the limit on open files stays");
        }
    }
}

/// Locks what is in memory now, and what comes later once it is used.
fn lock_memory() {
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = mlockall(flags) {
        let limit = getrlimit(Resource::Memlock).current;
        tracing::warn!(
            %error,
            limit,
            "memory is not locked: when it is short, the server may wait for its own swap or \
             disk; raise the limit on locked memory (LimitMEMLOCK=infinity, ulimit -l unlimited)"
        );
    }
}

/// Tells systemd, if it waits to be told.
pub fn notify(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "systemd could not be told");
    }
}
