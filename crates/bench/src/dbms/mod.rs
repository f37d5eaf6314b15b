//! Dedicated database servers for a benchmark, as processes: installed, started, killed and stopped
//! in a uniform way.

pub mod mariadb;
pub mod postgres;

use std::path::Path;
use std::time::Duration;

use crate::rig::cleanup::Process;

/// The programs of MariaDB, with their packages.
pub const MARIADB: [(&str, &str); 3] = [
    ("mariadbd", "mariadb-server-core"),
    ("mariadb-install-db", "mariadb-server-core"),
    ("my_print_defaults", "mariadb-client-core"),
];
/// The programs that every database benchmark needs, with their packages.
pub const TOOLS: [(&str, &str); 4] = [
    ("mkfs.xfs", "xfsprogs"),
    ("losetup", "mount"),
    ("nbdkit", "nbdkit"),
    ("nbdfuse", "libnbd-bin"),
];

/// Time limit for a server to start, including recovery on a slow disk.
const PATIENCE: Duration = Duration::from_secs(600);

/// The server settings chosen by a benchmark.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Size of the buffer pool, in bytes.
    pub buffer_pool: u64,
    /// Size of the redo log, in bytes.
    pub redo_log: u64,
    /// Whether each commit is made durable; off only while loading.
    pub durable: bool,
    /// Maximum number of connections.
    pub connections: u32,
    /// Limit of the kernel's page cache in bytes, for a server that reads through it; `None` while
    /// loading.
    pub page_cache: Option<u64>,
    /// Additional lines `key=value`.
    pub more: Vec<String>,
}

/// A dedicated database server.
pub trait Dbms: Sized {
    /// Its name in reports.
    const NAME: &'static str;

    /// Creates an empty data directory.
    fn install(data: &Path) -> anyhow::Result<()>;

    /// Starts the server on `data` and waits until it answers. Sockets and logs are in `run`, whose
    /// path must be short.
    fn start(data: &Path, run: &Path, setting: &Setting) -> anyhow::Result<Self>;

    /// Whether it answers a client.
    fn answers(&self) -> bool;

    /// Waits until it answers; an error if it exits, or takes too long.
    fn ready(self) -> anyhow::Result<Self> {
        self.process().wait_until(Self::NAME, PATIENCE, || self.answers())?;
        Ok(self)
    }

    /// The settings that it always has, and those of [`Setting`] but for `more`, in one line.
    fn own_settings(setting: &Setting) -> String;

    /// All settings in one line.
    fn describe(setting: &Setting) -> String {
        let own = [Self::own_settings(setting)];
        own.iter().chain(&setting.more).cloned().collect::<Vec<_>>().join(", ")
    }

    /// Its process.
    fn process(&self) -> &Process;

    /// Kills it, as a power failure would.
    fn kill(self);

    /// Stops it in order.
    fn stop(self) -> anyhow::Result<()>;
}
