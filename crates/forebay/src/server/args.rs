//! The arguments of `forebay serve`, and the configuration that they make. Defaults are those of
//! `control::config`, as for a file.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use forebay_block::NAME_BYTES_MAX;
use forebay_control::config::{
    CacheConfig, Config, ConfigError, ControlConfig, FuseTransport, MemoryConfig, ServerConfig,
    TlsPolicy, VolumeConfig, parse_content, parse_eviction, parse_fuse_transport, parse_mode,
    parse_tls_policy,
};
use forebay_control::endpoint::Listen;
use forebay_control::units::{Percent, Size, Time};
use forebay_engine::{ContentLocality, Eviction, Mode};

use crate::server::logging::LogFormat;

/// Arguments of `forebay serve`: a configuration file, or flags for one volume.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// Read everything from this TOML file; for several volumes
    #[arg(long, value_name = "FILE", conflicts_with = "flags")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub flags: ServeFlags,
    /// Discard what is in the cache and make it anew; refused while it holds dirty data
    #[arg(long)]
    pub reset_cache: bool,
    /// Serve although a part of the log is lost, and with it blocks of unknown places. With
    /// --reset-cache: discard dirty data too
    #[arg(long)]
    pub accept_data_loss: bool,
    /// Take the primary of this volume although it was changed, or is another, since the cache was
    /// used: the cache's dirty blocks are written to it, and the rest of the cache is discarded.
    /// May be repeated; for one start
    #[arg(long, value_name = "VOLUME")]
    pub accept_primary: Vec<String>,
    /// Remove this volume, which is not configured any more, although blocks of it are not on its
    /// primary: they are lost. May be given several times
    #[arg(long, value_name = "NAME")]
    pub forget_volume: Vec<String>,
    /// How the log on standard error is written
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// The configuration of one volume as flags.
#[derive(Args, Debug)]
#[group(id = "flags", multiple = true)]
pub struct ServeFlags {
    /// Where the data is: a path, file:PATH, nbd://HOST:PORT/EXPORT or
    /// nbd+unix:///EXPORT?socket=PATH; with ?emulate=PROFILE behind it, slowed down as a disk is
    #[arg(long, value_name = "URI", required_unless_present = "config")]
    primary: Option<String>,
    /// The cache device: a block device or a file, and how much of it to use
    #[arg(long, value_name = "PATH[,size=SIZE]", required_unless_present = "config")]
    cache: Option<CacheFlag>,
    /// Where NBD clients connect: unix:PATH or tcp:HOST:PORT; may be given several times. For this
    /// one alone, behind it: ,tls=POLICY; for Unix sockets ,mode=0660 ,owner=NAME ,group=NAME
    #[arg(long, value_name = "ENDPOINT", required_unless_present_any = ["config", "fuse"])]
    nbd: Vec<Listen>,
    /// Mount a file system here with a file for each volume; an empty directory. Needs root
    #[arg(long, value_name = "DIR")]
    fuse: Option<PathBuf>,
    /// How the kernel hands over requests to those files: auto, io-uring, device [default: auto]
    #[arg(long, value_name = "HOW", value_parser = parse_fuse_transport, requires = "fuse")]
    fuse_transport: Option<FuseTransport>,
    /// The volume's name [default: the last part of the primary's]
    #[arg(long)]
    name: Option<String>,
    /// What the cache does: write-back, write-through, write-around, write-only, pass-through
    /// [default: write-back]
    #[arg(long, value_parser = parse_mode)]
    mode: Option<Mode>,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Memory for recent blocks [default: 256MiB]
    #[arg(long, value_name = "SIZE")]
    ram: Option<Size>,
    /// Memory for the index of a new cache, which uses less of its device where that is short
    /// [default: half of the machine's]
    #[arg(long, value_name = "SIZE")]
    index: Option<Size>,
    /// Threads [default: what the cache was made with, or by the number of processors],
    /// at most 64
    #[arg(long, value_name = "N")]
    shards: Option<u16>,
    /// Let sequential streams pass by the cache after so many bytes; 0 is never [default: 512KiB]
    #[arg(long, value_name = "SIZE")]
    sequential_threshold: Option<Size>,
    /// The longest a dirty block may wait before it is on the primary [default: 30s]
    #[arg(long, value_name = "TIME")]
    write_cache_depth: Option<Time>,
    /// Share of the cache that may be dirty [default: 50%]
    #[arg(long, value_name = "PERCENT")]
    dirty_limit: Option<Percent>,
    /// How blocks are chosen to enter and to leave: frequency, lru, fifo [default: frequency]
    #[arg(long, value_name = "POLICY", value_parser = parse_eviction)]
    eviction: Option<Eviction>,
    /// How blocks are stored that equal or resemble what was written before: rewrite (as deltas,
    /// equal ones once), similar (also against other blocks), independent [default: rewrite]
    #[arg(long, value_name = "SETTING", value_parser = parse_content)]
    content: Option<ContentLocality>,
    /// Store blocks as they are
    #[arg(long)]
    no_compression: bool,
    /// Where the host remembers the state of the cache [default: /var/lib/forebay]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// The control socket [default: $FOREBAY_CONTROL, or /run/forebay/forebay.sock; if not
    /// root, $XDG_RUNTIME_DIR/forebay.sock]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Clients at once, at most 900 [default: 128]
    #[arg(long, value_name = "N")]
    max_clients: Option<u32>,
    /// Memory for what clients ask and are answered, all together [default: 256MiB]
    #[arg(long, value_name = "SIZE")]
    client_memory: Option<Size>,
    /// Disconnect clients that take nothing of their answers for so long [default: 60s]
    #[arg(long, value_name = "TIME")]
    client_stall_timeout: Option<Time>,
    /// Disconnect clients that have asked for nothing for so long [default: never]
    #[arg(long, value_name = "TIME")]
    idle_timeout: Option<Time>,
    /// Whether clients over TCP may or must use TLS: off, allowed, required
    /// [default: required when a certificate is given]
    #[arg(long, value_name = "POLICY", value_parser = parse_tls_policy)]
    tls: Option<TlsPolicy>,
    /// The server's certificates, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of the first certificate, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Who signs the clients' certificates, PEM; clients need one when this is given
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// Lock all memory, so that the server never waits for its own swap
    #[arg(long)]
    lock_memory: bool,
}

impl ServeArgs {
    /// The configuration that the file or the flags give.
    pub fn config(&self) -> anyhow::Result<Config> {
        let Some(path) = &self.config else {
            let config = self.flags.config();
            config.check().map_err(|error| crate::WrongUsage(error.to_string()))?;
            return Ok(config);
        };
        Config::read(path).map_err(|error| match error {
            ConfigError::Read { .. } => error.into(),
            _ => crate::WrongUsage(error.to_string()).into(),
        })
    }
}

impl ServeFlags {
    fn config(&self) -> Config {
        let cache = self.cache.clone().unwrap_or_default();
        let primary = self.primary.clone().unwrap_or_default();
        let name = self.name.clone().unwrap_or_else(|| name_of(&primary));
        let mut cache_config = CacheConfig { size: cache.size, ..CacheConfig::at(cache.path) };
        set(&mut cache_config.state_dir, &self.state);
        set(&mut cache_config.eviction, &self.eviction);
        set(&mut cache_config.dirty_limit, &self.dirty_limit);
        set(&mut cache_config.write_cache_depth, &self.write_cache_depth);
        set(&mut cache_config.content, &self.content);
        cache_config.compress = !self.no_compression;
        let mut volume = VolumeConfig::on(name, primary);
        set(&mut volume.mode, &self.mode);
        set(&mut volume.sequential_threshold, &self.sequential_threshold);
        volume.read_only = self.read_only;
        let mut memory = MemoryConfig { lock: self.lock_memory, ..MemoryConfig::default() };
        set(&mut memory.ram, &self.ram);
        memory.index = self.index;
        Config {
            cache: cache_config,
            memory,
            control: ControlConfig { socket: self.control.clone(), ..ControlConfig::default() },
            server: self.server(),
            volumes: vec![volume],
        }
    }

    fn server(&self) -> ServerConfig {
        let mut server = ServerConfig {
            shards: self.shards,
            nbd: self.nbd.clone(),
            fuse: self.fuse.clone(),
            tls_cert: self.tls_cert.clone(),
            tls_key: self.tls_key.clone(),
            tls_ca: self.tls_ca.clone(),
            ..ServerConfig::default()
        };
        if self.tls_cert.is_some() {
            server.tls = TlsPolicy::Required;
        }
        set(&mut server.tls, &self.tls);
        set(&mut server.fuse_transport, &self.fuse_transport);
        set(&mut server.max_clients, &self.max_clients);
        set(&mut server.client_memory, &self.client_memory);
        set(&mut server.client_stall_timeout, &self.client_stall_timeout);
        set(&mut server.idle_timeout, &self.idle_timeout);
        server
    }
}

fn set<T: Clone>(place: &mut T, value: &Option<T>) {
    if let Some(value) = value {
        *place = value.clone();
    }
}

/// The name of a volume when nobody gives one: the last part of its primary's, without what a
/// name may not hold.
fn name_of(primary: &str) -> String {
    let place = primary.split('?').next().unwrap_or(primary);
    let last = place.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or(place);
    let stem = last.strip_suffix(".img").or(last.strip_suffix(".raw")).unwrap_or(last);
    let known = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = stem.chars().take(NAME_BYTES_MAX).map(known).collect();
    if name.is_empty() { "volume".to_owned() } else { name }
}

/// `PATH[,size=SIZE]`.
#[derive(Clone, PartialEq, Debug, Default)]
struct CacheFlag {
    path: PathBuf,
    size: Option<Size>,
}

impl FromStr for CacheFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let path = PathBuf::from(parts.next().unwrap_or_default());
        let mut size = None;
        for part in parts {
            let value = part.strip_prefix("size=").ok_or_else(|| {
                format!("unknown option {part:?}; after the path only size=SIZE is known")
            })?;
            size = Some(value.parse::<Size>().map_err(|error| error.to_string())?);
        }
        Ok(Self { path, size })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Serve {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn config_of(arguments: &[&str]) -> Result<Config, String> {
        let parsed = Serve::try_parse_from([&["serve"], arguments].concat());
        let args = parsed.map_err(|error| error.to_string())?.args;
        args.config().map_err(|error| error.to_string())
    }

    #[test]
    fn few_flags_are_enough() {
        let config = config_of(&["--primary", "/tmp/a b.img", "--cache", "c", "--nbd", "unix:s"]);
        let config = config.expect("it is in order");
        let defaults = CacheConfig::at(PathBuf::from("c"));
        assert_eq!(config.cache, defaults);
        assert_eq!(config.volumes[0].name, "a-b");
        assert_eq!(config.volumes[0].mode, Mode::WriteBack);
        assert_eq!(config.server.tls, TlsPolicy::Off);
    }

    #[test]
    fn flags_reach_the_configuration() {
        let config = config_of(&[
            "--primary=nbd://san:10809/disk?emulate=hdd",
            "--cache=/dev/x,size=1GiB",
            "--nbd=unix:/run/s",
            "--nbd=tcp:0.0.0.0:10809",
            "--mode=write-through",
            "--ram=1GiB",
            "--shards=3",
            "--sequential-threshold=0",
            "--write-cache-depth=5s",
            "--dirty-limit=20%",
            "--eviction=fifo",
            "--no-compression",
            "--state=/tmp/state",
            "--control=/tmp/control",
            "--max-clients=7",
            "--idle-timeout=1h",
            "--client-memory=64MiB",
            "--client-stall-timeout=5s",
            "--tls-cert=c",
            "--tls-key=k",
        ]);
        let config = config.expect("it is in order");
        assert_eq!(config.cache.size, Some(Size(1 << 30)));
        assert_eq!(config.cache.dirty_limit, Percent(20));
        assert_eq!(config.cache.eviction, Eviction::Fifo);
        assert!(!config.cache.compress);
        assert_eq!(config.cache.state_dir, PathBuf::from("/tmp/state"));
        assert_eq!(config.control.socket, Some(PathBuf::from("/tmp/control")));
        assert_eq!((config.server.shards, config.server.max_clients), (Some(3), 7));
        let seconds = |count| Time(std::time::Duration::from_secs(count));
        assert_eq!(config.server.client_memory, Size(64 << 20));
        assert_eq!(config.server.client_stall_timeout, seconds(5));
        assert_eq!(config.server.idle_timeout, seconds(3600));
        assert_eq!(config.server.tls, TlsPolicy::Required);
        let volume = &config.volumes[0];
        assert_eq!((volume.name.as_str(), volume.mode), ("disk", Mode::WriteThrough));
        assert_eq!(volume.sequential_threshold, Size(0));
    }

    #[test]
    fn flags_that_do_not_go_together_are_refused() {
        let base = ["--primary=p", "--cache=c", "--nbd=unix:s"];
        let refused: [(&[&str], &str); 8] = [
            (&["--config=f"], "cannot be used with"),
            (&["--tls-cert=c"], "--tls-key"),
            (&["--tls=required"], "no endpoint uses it"),
            (&["--tls=required", "--nbd=tcp:h:1"], "needs a certificate"),
            (&["--mode=writeback"], "write-back"),
            (&["--ram=lots"], "a size"),
            (&["--shards=0"], "server.shards"),
            (&["--dirty-limit=100%"], "90%"),
        ];
        for (more, word) in refused {
            let message = config_of(&[&base, more].concat()).expect_err(word);
            assert!(message.contains(word), "{more:?}: {message}");
        }
        assert!(config_of(&["--primary=p"]).expect_err("no cache").contains("--cache"));
        let message = config_of(&["--primary=p", "--cache=c,sise=1", "--nbd=unix:s"]);
        assert!(message.expect_err("no such option").contains("size=SIZE"));
    }

    #[test]
    fn names_come_from_primaries() {
        for (primary, name) in [
            ("/dev/mapper/vg-data", "vg-data"),
            ("file:disk.img?emulate=san", "disk"),
            ("nbd+unix:///vm1?socket=/run/x.sock", "vm1"),
            ("nbd://host:10809", "10809"),
            ("/", "volume"),
        ] {
            assert_eq!(name_of(primary), name, "{primary}");
        }
    }
}
