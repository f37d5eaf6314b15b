//! Database servers of a benchmark's own, as processes: both are installed, started, killed and
//! stopped in the same way.

pub mod mariadb;
pub mod postgres;

use std::path::Path;
use std::time::Duration;

use crate::rig::cleanup::Process;

/// The programs that MariaDB needs, with their packages.
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

/// How long a server may take to start; recovery on a slow disk is part of it.
const PATIENCE: Duration = Duration::from_secs(600);

/// The settings of a server that a benchmark chooses.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Bytes of the buffer pool.
    pub buffer_pool: u64,
    /// Bytes of the redo log.
    pub redo_log: u64,
    /// Whether each commit is made durable. Off only to load.
    pub durable: bool,
    /// Connections at once.
    pub connections: u32,
    /// Bytes of the kernel's page cache at most, where the server reads through it; all that there
    /// is while loading.
    pub page_cache: Option<u64>,
    /// Further lines `key=value`.
    pub more: Vec<String>,
}

/// A database server of one's own.
pub trait Dbms: Sized {
    /// Its name in reports.
    const NAME: &'static str;

    /// Makes an empty data directory.
    fn install(data: &Path) -> anyhow::Result<()>;

    /// Starts it on `data` and waits until it answers; sockets and logs are kept in `run`, whose
    /// path must be short.
    fn start(data: &Path, run: &Path, setting: &Setting) -> anyhow::Result<Self>;

    /// Whether it answers a client.
    fn answers(&self) -> bool;

    /// Waits until it answers; an error if it ends before, or takes too long.
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

    /// Ends it as a power failure would.
    fn kill(self);

    /// Stops it in order.
    fn stop(self) -> anyhow::Result<()>;
}
