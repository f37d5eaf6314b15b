//! The configuration of a server: one struct, whether it comes from a TOML file or from flags.
//!
//! Reading refuses every key that it does not know and names the line. [`Config::check`] then
//! looks at what only the whole can tell. No device is opened here; that a path can be read, or
//! that a device is large enough, is found by those who open it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_block::{CLIENTS_MAX, NAME_BYTES_MAX, SHARDS_MAX, VOLUMES_MAX};
use forebay_engine::{ContentLocality, DirtyShare, Eviction, Mode};
use serde::{Deserialize, Deserializer};

use crate::access::{SocketAccess, SocketMode};
use crate::endpoint::Listen;
use crate::units::{Percent, Size, Time};

/// Where the host remembers the state of its caches, unless configured otherwise: the unit's
/// `StateDirectory=`.
pub const STATE_DIR: &str = "/var/lib/forebay";
/// Bytes in the longest configuration file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The smallest sequential threshold: below it every request would be a stream.
const THRESHOLD_MIN: u64 = 64 << 10;
/// The shortest time that a client or a device is given.
const TIMEOUT_MIN: Duration = Duration::from_secs(1);
/// The least memory for clients: below it the largest request would not fit half.
const CLIENT_MEMORY_MIN: Size = Size(16 << 20);
/// The dirty limit must leave room for clean blocks and for reclaim.
const DIRTY_LIMIT: std::ops::RangeInclusive<u8> = 1..=90;

/// Everything that `serve` needs to know.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The cache device and how it is used.
    pub cache: CacheConfig,
    /// Memory.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// The control socket.
    #[serde(default)]
    pub control: ControlConfig,
    /// Threads, endpoints and clients.
    #[serde(default)]
    pub server: ServerConfig,
    /// The volumes that share the cache.
    #[serde(default, rename = "volume")]
    pub volumes: Vec<VolumeConfig>,
}

/// The cache device and how it is used.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheConfig {
    /// A block device or a file.
    pub path: PathBuf,
    /// Bytes of it to use; all of it when absent. A file that is not there is made this long.
    pub size: Option<Size>,
    /// Where the host keeps what it must know about the cache should the device fail.
    #[serde(default = "default_state_dir")]
    pub state_dir: PathBuf,
    /// How clean blocks are chosen to leave.
    #[serde(default, deserialize_with = "eviction")]
    pub eviction: Eviction,
    /// Share of the cache that may be dirty.
    #[serde(default = "default_dirty_limit")]
    pub dirty_limit: Percent,
    /// The longest a dirty block may wait before it is on the primary.
    #[serde(default = "default_write_cache_depth")]
    pub write_cache_depth: Time,
    /// Whether blocks are compressed.
    #[serde(default = "default_compress")]
    pub compress: bool,
    /// How rewritten blocks are stored.
    #[serde(default, deserialize_with = "content")]
    pub content: ContentLocality,
}

impl CacheConfig {
    /// The cache at `path`, everything else by default.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        Self {
            path,
            size: None,
            state_dir: default_state_dir(),
            eviction: Eviction::default(),
            dirty_limit: default_dirty_limit(),
            write_cache_depth: default_write_cache_depth(),
            compress: default_compress(),
            content: ContentLocality::default(),
        }
    }
}

fn default_state_dir() -> PathBuf {
    PathBuf::from(STATE_DIR)
}

fn default_dirty_limit() -> Percent {
    Percent(50)
}

fn default_write_cache_depth() -> Time {
    Time(Duration::from_secs(30))
}

fn default_compress() -> bool {
    true
}

/// Memory.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// Bytes of RAM for recent blocks; the index comes on top.
    pub ram: Size,
    /// Bytes that the index of a new cache may take; half of the machine's when absent.
    pub index: Option<Size>,
    /// Whether all memory is locked, so that the server never waits for its own swap.
    pub lock: bool,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self { ram: Size(256 << 20), index: None, lock: false }
    }
}

/// The control socket.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
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
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
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
    #[serde(deserialize_with = "fuse_transport")]
    pub fuse_transport: FuseTransport,
    /// Whether clients over TCP may or must use TLS; an endpoint may say otherwise.
    #[serde(deserialize_with = "tls_policy")]
    pub tls: TlsPolicy,
    /// The server's certificates, PEM.
    pub tls_cert: Option<PathBuf>,
    /// The key of the first certificate, PEM.
    pub tls_key: Option<PathBuf>,
    /// Who signs the clients' certificates, PEM; clients need one when this is given.
    pub tls_ca: Option<PathBuf>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            shards: None,
            max_clients: 128,
            client_memory: Size(256 << 20),
            client_stall_timeout: Time(Duration::from_secs(60)),
            idle_timeout: Time(Duration::ZERO),
            patience: Time(Duration::from_secs(30)),
            nbd: Vec::new(),
            fuse: None,
            fuse_transport: FuseTransport::default(),
            tls: TlsPolicy::Off,
            tls_cert: None,
            tls_key: None,
            tls_ca: None,
        }
    }
}

/// One volume: a primary seen through the cache.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeConfig {
    /// What clients and commands call it.
    pub name: String,
    /// Where its data is: a path or a URI.
    pub primary: String,
    /// What the cache does for it.
    #[serde(default, deserialize_with = "mode")]
    pub mode: Mode,
    /// Bytes after which a sequential stream goes past the cache; 0 is never.
    #[serde(default = "default_threshold")]
    pub sequential_threshold: Size,
    /// Whether writes are refused.
    #[serde(default)]
    pub read_only: bool,
    /// Share of the cache's dirty limit that no other volume can take.
    pub dirty_guarantee: Option<Percent>,
    /// Share of the cache's dirty limit at which the writes of this volume wait.
    pub dirty_limit: Option<Percent>,
}

impl VolumeConfig {
    /// The volume `name` on `primary`, everything else by default.
    #[must_use]
    pub fn on(name: String, primary: String) -> Self {
        let sequential_threshold = default_threshold();
        Self {
            name,
            primary,
            mode: Mode::default(),
            sequential_threshold,
            read_only: false,
            dirty_guarantee: None,
            dirty_limit: None,
        }
    }

    /// Its part of the dirty limit.
    #[must_use]
    pub fn share(&self) -> DirtyShare {
        let percent = |share: Option<Percent>| share.map(|percent| percent.0);
        DirtyShare { at_least: percent(self.dirty_guarantee), at_most: percent(self.dirty_limit) }
    }
}

fn default_threshold() -> Size {
    Size(512 << 10)
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

/// Names of TLS policies, of eviction policies: in files, flags and messages.
const TLS_POLICIES: [(&str, TlsPolicy); 3] =
    [("off", TlsPolicy::Off), ("allowed", TlsPolicy::Allowed), ("required", TlsPolicy::Required)];
const FUSE_TRANSPORTS: [(&str, FuseTransport); 3] = [
    ("auto", FuseTransport::Auto),
    ("io-uring", FuseTransport::IoUring),
    ("device", FuseTransport::Device),
];

/// The mode of that name, or what to say.
pub fn parse_mode(name: &str) -> Result<Mode, String> {
    one_of("mode", name, &Mode::NAMES)
}

/// The eviction policy of that name, or what to say.
pub fn parse_eviction(name: &str) -> Result<Eviction, String> {
    one_of("eviction policy", name, &Eviction::NAMES)
}

/// The content setting of that name, or what to say.
pub fn parse_content(name: &str) -> Result<ContentLocality, String> {
    one_of("content setting", name, &ContentLocality::NAMES)
}

/// The TLS policy of that name, or what to say.
pub fn parse_tls_policy(name: &str) -> Result<TlsPolicy, String> {
    one_of("TLS policy", name, &TLS_POLICIES)
}

/// The FUSE transport of that name, or what to say.
pub fn parse_fuse_transport(name: &str) -> Result<FuseTransport, String> {
    one_of("FUSE transport", name, &FUSE_TRANSPORTS)
}

fn one_of<T: Copy>(noun: &str, name: &str, known: &[(&str, T)]) -> Result<T, String> {
    let found = known.iter().find(|(text, _)| *text == name).map(|&(_, value)| value);
    found.ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|&(text, _)| text).collect();
        format!("unknown {noun} {name:?}; use one of: {}", names.join(", "))
    })
}

fn mode<'de, D: Deserializer<'de>>(from: D) -> Result<Mode, D::Error> {
    parse_mode(&String::deserialize(from)?).map_err(serde::de::Error::custom)
}

fn eviction<'de, D: Deserializer<'de>>(from: D) -> Result<Eviction, D::Error> {
    parse_eviction(&String::deserialize(from)?).map_err(serde::de::Error::custom)
}

fn content<'de, D: Deserializer<'de>>(from: D) -> Result<ContentLocality, D::Error> {
    parse_content(&String::deserialize(from)?).map_err(serde::de::Error::custom)
}

fn fuse_transport<'de, D: Deserializer<'de>>(from: D) -> Result<FuseTransport, D::Error> {
    parse_fuse_transport(&String::deserialize(from)?).map_err(serde::de::Error::custom)
}

fn tls_policy<'de, D: Deserializer<'de>>(from: D) -> Result<TlsPolicy, D::Error> {
    parse_tls_policy(&String::deserialize(from)?).map_err(serde::de::Error::custom)
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
    /// It is not TOML, or a key or value is not known.
    #[error("configuration {path}, line {line}: {what}")]
    Syntax {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it and what would be right.
        what: String,
    },
    /// A value, or several together, cannot be used.
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

impl Config {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// When it cannot be read, has a key that is not known, or does not make sense.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError::Read { path: path.to_owned(), source };
        let length = std::fs::metadata(path).map_err(failed)?.len();
        if length > FILE_BYTES_MAX {
            let what = format!("{length} bytes are more than {FILE_BYTES_MAX}");
            return Err(failed(std::io::Error::other(what)));
        }
        Self::parse(path, &std::fs::read_to_string(path).map_err(failed)?)
    }

    /// Reads and checks `text`; `path` is for messages.
    ///
    /// # Errors
    /// When a key is not known, or the whole does not make sense.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start.min(text.len()));
            let line = 1 + text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count();
            let mut what = plain(error.message());
            let written = text.lines().nth(line - 1).unwrap_or_default();
            if written.trim_start().starts_with("[volume]") {
                what = "[volume] is one section; write [[volume]], there may be several".to_owned();
            }
            ConfigError::Syntax { path: path.to_owned(), line, what }
        })?;
        config.check()?;
        Ok(config)
    }

    /// Checks what only the whole can tell.
    ///
    /// # Errors
    /// Names the first key that does not go with the others.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_guarantees()?;
        self.check_cache()?;
        self.check_server()?;
        let count = self.volumes.len();
        if !(1..=VOLUMES_MAX).contains(&count) {
            let hint = format!("give 1 to {VOLUMES_MAX} [[volume]] sections");
            return Err(invalid("volume", format!("{count} volumes"), &hint));
        }
        let mut names = BTreeSet::new();
        let mut primaries = BTreeSet::from([location(&self.cache.path.to_string_lossy())]);
        let cache = primaries.clone();
        for volume in &self.volumes {
            volume.check()?;
            let name = &volume.name;
            if !names.insert(name) {
                let what = format!("two volumes are named {name:?}");
                return Err(invalid("volume.name", what, "give each its own name"));
            }
            let place = location(&volume.primary);
            if cache.contains(&place) {
                let what = format!("{:?} is the cache device", volume.primary);
                let hint = "the cache would overwrite the data; name two different devices";
                return Err(invalid(format!("volume {name:?}: primary"), what, hint));
            }
            if !primaries.insert(place) {
                let what = format!("{:?} is already the primary of a volume", volume.primary);
                let hint = "serve it once; several clients may share a volume";
                return Err(invalid(format!("volume {name:?}: primary"), what, hint));
            }
        }
        Ok(())
    }

    fn check_cache(&self) -> Result<(), ConfigError> {
        let cache = &self.cache;
        if cache.path.as_os_str().is_empty() {
            return Err(invalid("cache.path", "is empty", "name a block device or a file"));
        }
        if !DIRTY_LIMIT.contains(&cache.dirty_limit.0) {
            let what = format!("{} is out of range", cache.dirty_limit);
            return Err(invalid("cache.dirty_limit", what, "use 1% to 90%"));
        }
        if cache.write_cache_depth.0.is_zero() {
            let what = format!("{} is too short", cache.write_cache_depth);
            let hint = "use 1s or more, or mode = \"write-through\" for none at all";
            return Err(invalid("cache.write_cache_depth", what, hint));
        }
        if cache.size == Some(Size(0)) {
            let hint = "leave the key out to use all of the device";
            return Err(invalid("cache.size", "0 is too small", hint));
        }
        Ok(())
    }

    /// Shares of the dirty limit that are guaranteed cannot be more than there is.
    fn check_guarantees(&self) -> Result<(), ConfigError> {
        let all = self.volumes.iter().filter_map(|volume| volume.dirty_guarantee);
        let sum: u32 = all.map(|share| u32::from(share.0)).sum();
        if sum > 100 {
            let what = format!("all of them together are {sum}%");
            let hint = "guarantee 100% of the dirty limit at most";
            return Err(invalid("volume.dirty_guarantee", what, hint));
        }
        Ok(())
    }

    fn check_server(&self) -> Result<(), ConfigError> {
        let server = &self.server;
        if let Some(shards) = server.shards
            && !(1..=SHARDS_MAX).contains(&usize::from(shards))
        {
            let hint = format!("use 1 to {SHARDS_MAX}, at most one for each processor");
            return Err(invalid("server.shards", format!("{shards} is out of range"), &hint));
        }
        server.check_clients()?;
        if server.patience.0 < TIMEOUT_MIN {
            let what = format!("{} is too short", server.patience);
            return Err(invalid("server.patience", what, "use 1s or more"));
        }
        if server.nbd.is_empty() && server.fuse.is_none() {
            let hint = "name at least one, as in nbd = [\"unix:/run/forebay/nbd.sock\"], or a \
                        directory, as in fuse = \"/mnt/forebay\"";
            return Err(invalid("server.nbd", "no endpoint for clients", hint));
        }
        if server.fuse.as_ref().is_some_and(|dir| dir.as_os_str().is_empty()) {
            return Err(invalid("server.fuse", "is empty", "name a directory"));
        }
        let distinct: BTreeSet<_> = server.nbd.iter().map(|listen| &listen.at).collect();
        if distinct.len() != server.nbd.len() {
            let what = "the same endpoint stands there twice";
            return Err(invalid("server.nbd", what, "name each once"));
        }
        server.check_tls()
    }
}

impl ServerConfig {
    /// Certificates are there if an endpoint uses them, and only then.
    fn check_tls(&self) -> Result<(), ConfigError> {
        let (cert, key) = (self.tls_cert.is_some(), self.tls_key.is_some());
        let user = self.nbd.iter().find(|listen| listen.tls_by(self.tls) != TlsPolicy::Off);
        if let Some(listen) = user
            && !(cert && key)
        {
            let what = format!("TLS at {} needs a certificate and its key", listen.at);
            return Err(invalid("server.tls", what, "give both tls_cert and tls_key"));
        }
        if user.is_some() {
            return Ok(());
        }
        if self.tls != TlsPolicy::Off {
            let hint = "it is for tcp: endpoints; a Unix socket has it with unix:PATH,tls=required";
            return Err(invalid("server.tls", "no endpoint uses it", hint));
        }
        if cert || key || self.tls_ca.is_some() {
            let what = "certificates are given, but TLS is off";
            return Err(invalid("server.tls", what, "use \"required\" or \"allowed\""));
        }
        Ok(())
    }

    /// The limits on clients.
    fn check_clients(&self) -> Result<(), ConfigError> {
        if !(1..=CLIENTS_MAX).contains(&(self.max_clients as usize)) {
            let what = format!("{} is out of range", self.max_clients);
            return Err(invalid("server.max_clients", what, &format!("use 1 to {CLIENTS_MAX}")));
        }
        if self.client_memory < CLIENT_MEMORY_MIN {
            let what = format!("{} is too small", self.client_memory);
            let hint = format!("use {CLIENT_MEMORY_MIN} or more");
            return Err(invalid("server.client_memory", what, &hint));
        }
        if self.client_stall_timeout.0 < TIMEOUT_MIN {
            let what = format!("{} is too short", self.client_stall_timeout);
            return Err(invalid("server.client_stall_timeout", what, "use 1s or more"));
        }
        if !self.idle_timeout.0.is_zero() && self.idle_timeout.0 < TIMEOUT_MIN {
            let what = format!("{} is too short", self.idle_timeout);
            return Err(invalid("server.idle_timeout", what, "use 1s or more, or 0s for never"));
        }
        Ok(())
    }
}

impl VolumeConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let name = &self.name;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let special = [".", "..", ".forebay"].contains(&name.as_str());
        if special || name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(plain) {
            let what = format!("{name:?} cannot be used");
            let hint = format!(
                "use 1 to {NAME_BYTES_MAX} of a-z, A-Z, 0-9, '-', '_', '.', and not '.forebay'"
            );
            return Err(invalid("volume.name", what, &hint));
        }
        if self.primary.is_empty() {
            let key = format!("volume {name:?}: primary");
            return Err(invalid(key, "is empty", "name a path or a URI"));
        }
        if (1..THRESHOLD_MIN).contains(&self.sequential_threshold.0) {
            let key = format!("volume {name:?}: sequential_threshold");
            let what = format!("{} is too small", self.sequential_threshold);
            return Err(invalid(key, what, "use 64KiB or more, or 0 to cache streams too"));
        }
        if self.dirty_limit == Some(Percent(0)) {
            let hint = "use 1% or more, or mode = \"write-around\" for no dirty blocks";
            let key = format!("volume {name:?}: dirty_limit");
            return Err(invalid(key, "0% is too small", hint));
        }
        if self.dirty_guarantee.zip(self.dirty_limit).is_some_and(|(least, most)| least.0 > most.0)
        {
            let what = "is more than the volume's dirty_limit";
            let key = format!("volume {name:?}: dirty_guarantee");
            return Err(invalid(key, what, "use a share up to dirty_limit"));
        }
        Ok(())
    }
}

/// Where a primary is, so far as its text tells: the path behind links, or the URI without its
/// parameters for emulation. Two that are equal are the same device.
fn location(primary: &str) -> String {
    if primary.starts_with("nbd") && primary.contains("://") {
        let (place, query) = primary.split_once('?').unwrap_or((primary, ""));
        let socket = query.split('&').find(|pair| pair.starts_with("socket="));
        return format!("{place}?{}", socket.unwrap_or_default());
    }
    let path = primary.strip_prefix("file:").unwrap_or(primary);
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    let path = Path::new(path);
    let real = std::fs::canonicalize(path).or_else(|_| {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = std::fs::canonicalize(parent.unwrap_or(Path::new(".")))?;
        Ok::<_, std::io::Error>(parent.join(path.file_name().unwrap_or_default()))
    });
    real.unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned()
}

/// The reader's message in this project's words.
fn plain(message: &str) -> String {
    let message = message.trim().replace('\n', " ");
    if let Some(rest) = message.strip_prefix("unknown field") {
        return format!("unknown key{}", rest.replacen(", expected", "; known here:", 1));
    }
    message.replacen("missing field", "missing key", 1)
}
