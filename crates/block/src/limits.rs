//! Limits shared by several crates. Each is defined here once, so that no layer accepts what
//! another cannot serve. `cargo xtask style` rejects public limits of the same name in two crates.

/// Maximum number of shards of a pool. Each has a thread, and a flush goes to all of them at once.
pub const SHARDS_MAX: usize = 64;
/// Maximum number of volumes that share one cache; volume IDs are below it.
pub const VOLUMES_MAX: usize = 64;
/// Maximum length of a volume's name in bytes, as stored in the superblock.
pub const NAME_BYTES_MAX: usize = 64;
/// Maximum number of concurrent clients that can be configured. One thread may serve them all, and
/// its ring must have a file for each, in addition to devices and listeners.
pub const CLIENTS_MAX: usize = 900;

const _: () = assert!(VOLUMES_MAX <= 1 << 8, "an id is a byte");
