//! The configuration of a server: one struct, whether it comes from a TOML file or from flags.
//!
//! The fields are here; names, defaults, ranges and help are in [`crate::settings::TABLE`].
//! [`Config::defaults`] fills the fields in; the `Default` of these types is blank and unusable.
//! Reading (`read.rs`) refuses unknown keys and names the line; [`Config::check`] (`check.rs`)
//! then checks the settings against each other. No device is opened here: whether a path can be
//! read or a device is large enough is found when it is opened.

mod check;
mod read;

use std::path::PathBuf;

use forebay_engine::{ContentLocality, DirtyShare, Eviction, Mode};

use crate::access::{SocketAccess, SocketMode};
use crate::endpoint::Listen;
use crate::units::{Percent, Size, Time};

/// Where the host remembers the state of its caches, unless configured otherwise: the unit's
/// `StateDirectory=`.
pub const STATE_DIR: &str = "/var/lib/forebay";

/// Everything that `serve` needs to know.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Config {
    /// The cache device and how it is used.
    pub cache: CacheConfig,
    /// Memory.
    pub memory: MemoryConfig,
    /// The control socket.
    pub control: ControlConfig,
    /// Threads, endpoints and clients.
    pub server: ServerConfig,
    /// The volumes that share the cache.
    pub volumes: Vec<VolumeConfig>,
}

/// The cache device and how it is used.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CacheConfig {
    /// A block device or a file.
    pub path: PathBuf,
    /// Bytes of it to use; all of it when absent. A file that is not there is made this long.
    pub size: Option<Size>,
    /// Where the host keeps what it must know about the cache should the device fail.
    pub state_dir: PathBuf,
    /// How clean blocks are chosen to leave.
    pub eviction: Eviction,
    /// Share of the cache that may be dirty.
    pub dirty_limit: Percent,
    /// The longest a dirty block may wait before it is on the primary.
    pub write_cache_depth: Time,
    /// Whether blocks are compressed.
    pub compress: bool,
    /// How rewritten blocks are stored.
    pub content: ContentLocality,
}

/// Memory.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MemoryConfig {
    /// Bytes of RAM for recent blocks; the index comes on top.
    pub ram: Size,
    /// Bytes that the index of a new cache may take; half of the machine's when absent.
    pub index: Option<Size>,
    /// Whether all memory is locked, so that the server never waits for its own swap.
    pub lock: bool,
}

/// The control socket.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ControlConfig {
    /// Its path; [`crate::default_socket`] when absent.
    pub socket: Option<PathBuf>,
    /// Its permission bits; the owner's alone when absent. Whoever can connect can stop the server.
    pub mode: Option<SocketMode>,
    /// Its owner.
    pub owner: Option<String>,
    /// Its group.
    pub group: Option<String>,
}

impl ControlConfig {
    /// Who may connect.
    #[must_use]
    pub fn access(&self) -> SocketAccess {
        let Self { mode, owner, group, .. } = self.clone();
        SocketAccess { mode, owner, group }
    }
}

/// Threads, endpoints and clients.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ServerConfig {
    /// Threads; what the cache was made with, or chosen by the processors, when absent.
    pub shards: Option<u16>,
    /// Clients at once; more are turned away.
    pub max_clients: u32,
    /// Bytes of memory for what clients ask and are answered, all together.
    pub client_memory: Size,
    /// How long a client may take nothing of its answers, or send nothing of a write that it
    /// began, before it is disconnected.
    pub client_stall_timeout: Time,
    /// How long a client that has chosen a volume may ask for nothing; 0 is for ever.
    pub idle_timeout: Time,
    /// How long a device may leave a request unanswered before that is reported, and a write at
    /// the dirty limit waits for a primary that is away before it gets an error.
    pub patience: Time,
    /// Where NBD clients connect.
    pub nbd: Vec<Listen>,
    /// The directory where a file for each volume is mounted.
    pub fuse: Option<PathBuf>,
    /// How the kernel hands over requests to those files.
    pub fuse_transport: FuseTransport,
    /// Whether clients over TCP may or must use TLS; an endpoint may say otherwise.
    pub tls: TlsPolicy,
    /// The server's certificates, PEM.
    pub tls_cert: Option<PathBuf>,
    /// The key of the first certificate, PEM.
    pub tls_key: Option<PathBuf>,
    /// Who signs the clients' certificates, PEM; clients need one when this is given.
    pub tls_ca: Option<PathBuf>,
}

/// One volume: a primary seen through the cache.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct VolumeConfig {
    /// What clients and commands call it.
    pub name: String,
    /// Where its data is: a path or a URI.
    pub primary: String,
    /// What the cache does for it.
    pub mode: Mode,
    /// Bytes after which a sequential stream goes past the cache; 0 is never.
    pub sequential_threshold: Size,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Share of the cache's dirty limit that no other volume can take.
    pub dirty_guarantee: Option<Percent>,
    /// Share of the cache's dirty limit at which the writes of this volume wait.
    pub dirty_limit: Option<Percent>,
}

impl VolumeConfig {
    /// Its part of the dirty limit.
    #[must_use]
    pub fn share(&self) -> DirtyShare {
        let percent = |share: Option<Percent>| share.map(|percent| percent.0);
        DirtyShare { at_least: percent(self.dirty_guarantee), at_most: percent(self.dirty_limit) }
    }
}

/// Whether clients may or must use TLS.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum TlsPolicy {
    /// It is not offered.
    #[default]
    Off,
    /// Clients choose.
    Allowed,
    /// Clients without it are turned away.
    Required,
}

/// How the kernel hands over requests to the files of a FUSE mount.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum FuseTransport {
    /// Over io_uring if the kernel offers it, else over the device.
    #[default]
    Auto,
    /// Over io_uring, or not at all.
    IoUring,
    /// Over `/dev/fuse`.
    Device,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("configuration {path}: {source}; name a file that you may read")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It is not TOML, a key is not known, or a value cannot be used.
    #[error("configuration {path}, line {line}: {what}")]
    Syntax {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it and what would be right.
        what: String,
    },
    /// Values cannot be used together.
    #[error("{key}: {what}; {hint}")]
    Invalid {
        /// The key, as in the file.
        key: String,
        /// What is wrong, with the value.
        what: String,
        /// What to do.
        hint: String,
    },
}

fn invalid(key: impl Into<String>, what: impl Into<String>, hint: &str) -> ConfigError {
    ConfigError::Invalid { key: key.into(), what: what.into(), hint: hint.to_owned() }
}
