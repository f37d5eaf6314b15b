//! The bounds that several crates share. Each stands here once, so that no layer accepts what
//! another cannot serve. `cargo xtask style` refuses a public bound of one name in two crates.

/// Most shards of a pool: each has a thread, and a flush asks all of them in one wave.
pub const SHARDS_MAX: usize = 64;
/// Most volumes that share one cache; also the limit of their ids.
pub const VOLUMES_MAX: usize = 64;
/// Most bytes in a volume's name, as the superblock keeps it.
pub const NAME_BYTES_MAX: usize = 64;
/// Most clients at once that may be configured: one thread may get them all, and its ring must
/// have a file for each, besides devices and listeners.
pub const CLIENTS_MAX: usize = 900;

const _: () = assert!(VOLUMES_MAX <= 1 << 8, "an id is a byte");
