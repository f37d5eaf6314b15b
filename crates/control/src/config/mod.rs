//! The configuration of a server: one struct, filled from a TOML file or from flags.
//!
//! The fields are here; names, defaults, ranges and help are in [`crate::settings::TABLE`].
//! [`Config::defaults`] fills the fields in; the `Default` of these types is blank and unusable.
//! Reading (`read.rs`) refuses unknown keys and names the line; [`Config::check`] (`check.rs`) then
//! checks the settings against each other. No device is opened here; an unreadable path or a device
//! that is too small is reported when it is opened.

mod check;
mod list;
mod observed;
mod pins;
mod read;
mod rules;

use std::path::PathBuf;
use std::time::Duration;

use forebay_block::BLOCK_SIZE;
use forebay_engine::{CacheShare, ContentLocality, DirtyShare, Eviction, Mode, Pace};

pub use check::{check_name, location};
pub use list::{ListItem, TextList};
pub use observed::{EventsConfig, WebConfig, WebListen};
pub use pins::{PINNED_RANGES_MAX, Pin, PinEdit, PinList};
pub use read::FILE_BYTES_MAX;
pub use rules::RuleList;

use crate::access::{SocketAccess, SocketMode};
use crate::endpoint::Listen;
use crate::peer::ChangesBy;
use crate::units::{Latency, Percent, Share, Size, Time};

/// Default directory where the host keeps the state of its caches: the unit's `StateDirectory=`.
pub const STATE_DIR: &str = "/var/lib/forebay";

/// All settings of `serve`.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Config {
    /// The cache device and how it is used.
    pub cache: CacheConfig,
    /// Memory for cached blocks and the index.
    pub memory: MemoryConfig,
    /// The control socket.
    pub control: ControlConfig,
    /// The read-only listener.
    pub web: WebConfig,
    /// The consumers of events.
    pub events: EventsConfig,
    /// Threads, endpoints and clients.
    pub server: ServerConfig,
    /// The volumes that share the cache.
    pub volumes: Vec<VolumeConfig>,
}

/// The cache device and how it is used.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CacheConfig {
    /// Path of a block device or a file.
    pub path: PathBuf,
    /// Bytes of the device to use; all of it when absent. A missing file is created with this
    /// length.
    pub size: Option<Size>,
    /// Directory for what the host must know about the cache if the device fails.
    pub state_dir: PathBuf,
    /// Eviction policy: which blocks enter the cache, and which clean blocks leave it.
    pub eviction: Eviction,
    /// Maximum share of the cache that may be dirty.
    pub dirty_limit: Share,
    /// Share of the dirty limit above which blocks are destaged.
    pub dirty_target: Share,
    /// Time without client requests from which everything is destaged; 0 is never.
    pub idle_destage: Time,
    /// The most bytes per second of missed blocks that enter the cache device; 0 is unlimited.
    pub fill_rate: Size,
    /// Bytes per day written to the cache device, above which only clients' writes are; 0 is
    /// unlimited.
    pub wear_budget: Size,
    /// Share of a new cache's device that is never written.
    pub spare: Percent,
    /// Share of the rest that is its log; what then remains is its store.
    pub log_share: Percent,
    /// Maximum time that a dirty block may wait before it is written to the primary.
    pub write_cache_depth: Time,
    /// Whether blocks are compressed.
    pub compress: bool,
    /// Whether the cache device is told what is free.
    pub discard: bool,
    /// How blocks are stored that equal or resemble others.
    pub content: ContentLocality,
    /// Which requests are cached.
    pub rules: RuleList,
}

impl CacheConfig {
    /// Time without client requests from which everything is destaged; never when `None`.
    #[must_use]
    pub fn idle_destage(&self) -> Option<Duration> {
        Some(self.idle_destage.0).filter(|after| !after.is_zero())
    }

    /// The most bytes per second of missed blocks that enter the cache device; unlimited when
    /// `None`.
    #[must_use]
    pub fn fill_rate(&self) -> Option<u64> {
        Some(self.fill_rate.0).filter(|&rate| rate > 0)
    }

    /// Bytes per day written to the cache device, above which only clients' writes are; no budget
    /// when `None`.
    #[must_use]
    pub fn wear_budget(&self) -> Option<u64> {
        Some(self.wear_budget.0).filter(|&bytes| bytes > 0)
    }
}

/// Memory for cached blocks and the index.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MemoryConfig {
    /// Bytes of RAM for recent blocks; the index comes in addition.
    pub ram: Size,
    /// Maximum size of a new cache's index, in bytes; half of the machine's memory when absent.
    pub index: Option<Size>,
    /// Whether all memory is locked, so that the server never waits for its own swapped pages.
    pub lock: bool,
}

/// The control socket.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ControlConfig {
    /// Its path; [`crate::default_socket`] when absent.
    pub socket: Option<PathBuf>,
    /// Its permission bits; by default only the owner has access.
    pub mode: Option<SocketMode>,
    /// Its owner.
    pub owner: Option<String>,
    /// Its group.
    pub group: Option<String>,
    /// Who may change something; everyone who may connect may read.
    pub changes: ChangesBy,
}

impl ControlConfig {
    /// The permissions of the socket.
    #[must_use]
    pub fn access(&self) -> SocketAccess {
        let Self { mode, owner, group, .. } = self.clone();
        SocketAccess { mode, owner, group }
    }
}

/// Threads, endpoints and clients.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ServerConfig {
    /// Number of threads; by default as the cache was created, or derived from the processor count.
    pub shards: Option<u16>,
    /// Maximum number of concurrent clients; others are refused.
    pub max_clients: u32,
    /// Memory for requests and answers of all clients together, in bytes.
    pub client_memory: Size,
    /// Disconnect a client that accepts no byte of its answers, or sends no byte of a write that it
    /// began, for this long.
    pub client_stall_timeout: Time,
    /// Disconnect a client that has chosen a volume but sends no request for this long; 0 is never.
    pub idle_timeout: Time,
    /// A request that a device leaves unanswered for this long is reported. A write at the dirty
    /// limit waits this long for a primary that is away before it fails.
    pub patience: Time,
    /// Endpoints for NBD clients.
    pub nbd: Vec<Listen>,
    /// The mount point of the file system with a file for each volume.
    pub fuse: Option<PathBuf>,
    /// How the kernel passes on requests to those files.
    pub fuse_transport: FuseTransport,
    /// Whether TCP clients may or must use TLS; an endpoint can override it.
    pub tls: TlsPolicy,
    /// The server's certificate chain, PEM.
    pub tls_cert: Option<PathBuf>,
    /// The key of the first certificate, PEM.
    pub tls_key: Option<PathBuf>,
    /// The authority that signs client certificates, PEM; if set, clients must present one.
    pub tls_ca: Option<PathBuf>,
}

impl ServerConfig {
    /// How long a client may send no request; unlimited when `None`.
    #[must_use]
    pub fn idle(&self) -> Option<Duration> {
        Some(self.idle_timeout.0).filter(|idle| !idle.is_zero())
    }
}

/// One volume: a primary seen through the cache.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct VolumeConfig {
    /// The volume's name in clients and commands.
    pub name: String,
    /// The primary that holds its data: a path or a URI.
    pub primary: String,
    /// The cache mode.
    pub mode: Mode,
    /// Bytes after which a sequential stream bypasses the cache; 0 is never.
    pub sequential_threshold: Size,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Share of the cache down to which other volumes displace no blocks of this one.
    pub cache_guarantee: Option<Share>,
    /// Share of the cache at which new blocks of this volume displace its own.
    pub cache_limit: Option<Share>,
    /// Share of the cache's dirty limit that no other volume can take.
    pub dirty_guarantee: Option<Share>,
    /// Share of the cache's dirty limit at which the writes of this volume wait.
    pub dirty_limit: Option<Share>,
    /// Latency of client requests at the primary that destaging aims at.
    pub latency_target: Option<Latency>,
    /// The most bytes per second that are destaged; 0 is unlimited.
    pub destage_rate: Size,
    /// Bytes of a full stripe of the primary; 0 if it has none.
    pub stripe_size: Option<Size>,
    /// Bytes that stay in the cache.
    pub pinned: PinList,
    /// Bytes of RAM in which an ordered volume stages its dirty blocks; 0 if it is not ordered.
    pub ordered: Size,
}

impl VolumeConfig {
    /// The volume's share of the cache.
    #[must_use]
    pub fn cache_share(&self) -> CacheShare {
        let part = |share: Option<Share>| share.map(|share| share.0);
        CacheShare { at_least: part(self.cache_guarantee), at_most: part(self.cache_limit) }
    }

    /// The volume's share of the dirty limit.
    #[must_use]
    pub fn share(&self) -> DirtyShare {
        let part = |share: Option<Share>| share.map(|share| share.0);
        DirtyShare { at_least: part(self.dirty_guarantee), at_most: part(self.dirty_limit) }
    }

    /// The most dirty blocks of an ordered volume in each of `shards` shards; `None` if the volume
    /// is not ordered.
    #[must_use]
    pub fn ordered_blocks(&self, shards: usize) -> Option<u64> {
        let blocks = self.ordered.0 / BLOCK_SIZE as u64 / shards.max(1) as u64;
        (self.ordered.0 > 0).then_some(blocks.max(1))
    }

    /// How destaging treats the volume's primary.
    #[must_use]
    pub fn pace(&self) -> Pace {
        let rate = Some(self.destage_rate.0).filter(|&rate| rate > 0);
        let stripe = self.stripe_size.map(|size| size.0);
        Pace { latency: self.latency_target.map(Latency::time), rate, stripe }
    }
}

/// Whether clients may or must use TLS.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum TlsPolicy {
    /// TLS is not offered.
    #[default]
    Off,
    /// The client decides.
    Allowed,
    /// Clients without TLS are refused.
    Required,
}

/// How the kernel passes on requests to the files of a FUSE mount.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum FuseTransport {
    /// Over io_uring if the kernel offers it, otherwise over `/dev/fuse`.
    #[default]
    Auto,
    /// Over io_uring; fail if the kernel does not offer it.
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
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The text is longer than any configuration.
    #[error(
        "configuration {path}: it has {bytes} bytes, and the limit is {limit}; leave out comments, \
         or name another file",
        limit = FILE_BYTES_MAX
    )]
    TooLong {
        /// Path of the file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// The file is not TOML, a key is unknown, or a value is unusable.
    #[error("configuration {path}, line {line}: {what}")]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The problem, and what would be valid.
        what: String,
    },
    /// Values conflict with each other.
    #[error("{key}: {what}; {hint}")]
    Invalid {
        /// The key, as in the file.
        key: String,
        /// The problem, with the value.
        what: String,
        /// The remedy.
        hint: String,
    },
}

fn invalid(key: impl Into<String>, what: impl Into<String>, hint: &str) -> ConfigError {
    ConfigError::Invalid { key: key.into(), what: what.into(), hint: hint.to_owned() }
}
