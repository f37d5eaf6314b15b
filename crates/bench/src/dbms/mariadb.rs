//! A dedicated MariaDB: its data in a given directory, a Unix socket, no network, independent of
//! the machine's configuration.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use mysql::prelude::Queryable as _;
use mysql::{Conn, OptsBuilder};

use crate::dbms::{Dbms, PATIENCE, Setting};
use crate::rig::cleanup::{Process, finish, tool};

/// Number of prepared statements that a connection caches.
const STATEMENTS: usize = 100;

/// The configuration file.
fn file(setting: &Setting, data: &Path, run: &Path) -> String {
    let mut text = format!(
        "[mariadbd]\nuser=root\ndatadir={}\nsocket={}\npid-file={}\ntmpdir={}\n\
         skip-networking\nskip-log-bin\nskip-name-resolve\nlocal-infile=1\n\
         max-connections={}\ntable-open-cache=4000\nperformance-schema=OFF\n\
         innodb-flush-method=O_DIRECT\ninnodb-doublewrite=1\ninnodb-use-native-aio=1\n\
         innodb-buffer-pool-size={}\ninnodb-log-file-size={}\ninnodb-lru-scan-depth={}\n\
         innodb-purge-threads={}\n\
         innodb-flush-log-at-trx-commit={}\ninnodb-buffer-pool-load-at-startup=0\n\
         innodb-buffer-pool-dump-at-shutdown=0\n",
        data.display(),
        run.join("mariadb.sock").display(),
        run.join("mariadb.pid").display(),
        run.display(),
        setting.connections + 8,
        setting.buffer_pool,
        setting.redo_log,
        lru_scan_depth(setting.buffer_pool),
        purge_threads(),
        u8::from(setting.durable),
    );
    for line in &setting.more {
        text += line;
        text.push('\n');
    }
    text
}

/// Number of pages that the server tries to keep free. The default of 1536 exceeds a small pool:
/// the server would flush endlessly, and stall for seconds without any request in progress.
fn lru_scan_depth(buffer_pool: u64) -> u64 {
    const PAGE: u64 = 16 << 10;
    (buffer_pool / PAGE / 16).clamp(100, 1536)
}

/// Number of threads that purge old versions of rows. They share a pool of two threads for each
/// processor with the ends of asynchronous I/O. If the default of 4 fill it, each waiting for a
/// page on its way, nothing ends that I/O until a timer notices: the server stalls for seconds
/// without any request in progress.
fn purge_threads() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / 2).clamp(1, 4)
}

/// A running server.
pub struct MariaDb {
    process: Process,
    socket: PathBuf,
}

impl Dbms for MariaDb {
    const NAME: &'static str = "mariadbd";

    fn install(data: &Path) -> anyhow::Result<()> {
        let mut command = Command::new("mariadb-install-db");
        command.args(["--no-defaults", "--auth-root-authentication-method=normal"]);
        command.args(["--skip-test-db", "--user=root"]);
        command.arg(format!("--datadir={}", data.display()));
        finish(&mut command).map(drop)
    }

    fn start(data: &Path, run: &Path, setting: &Setting) -> anyhow::Result<Self> {
        fs::create_dir_all(run).with_context(|| format!("{}", run.display()))?;
        let configuration = run.join("mariadb.cnf");
        fs::write(&configuration, file(setting, data, run))?;
        let socket = run.join("mariadb.sock");
        let _ = fs::remove_file(&socket);
        let mut command = tool("mariadbd");
        command.arg(format!("--defaults-file={}", configuration.display()));
        let process = Process::start(command, &run.join("mariadb.log"), false)?;
        Self { process, socket }.ready()
    }

    fn answers(&self) -> bool {
        self.connect("").is_ok()
    }

    fn own_settings(setting: &Setting) -> String {
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        format!(
            "buffer pool {}, {} pages of it to be kept free, redo log {}, purge threads: {}, \
             O_DIRECT, flush at each commit, doublewrite",
            mib(setting.buffer_pool),
            lru_scan_depth(setting.buffer_pool),
            mib(setting.redo_log),
            purge_threads(),
        )
    }

    fn process(&self) -> &Process {
        &self.process
    }

    fn kill(self) {
        self.process.kill();
    }

    fn stop(self) -> anyhow::Result<()> {
        self.process.stop(PATIENCE)
    }
}

impl MariaDb {
    /// Connects to the server; selects a database unless its name is empty.
    pub fn connect(&self, database: &str) -> anyhow::Result<Conn> {
        let name = (!database.is_empty()).then(|| database.to_owned());
        let options = OptsBuilder::new()
            .socket(Some(self.socket.to_string_lossy()))
            .user(Some("root"))
            .stmt_cache_size(STATEMENTS)
            .db_name(name);
        Conn::new(options).context("connecting to mariadbd")
    }

    /// Creates a database.
    pub fn create(&self, database: &str) -> anyhow::Result<()> {
        let statement = format!("CREATE DATABASE {database} CHARACTER SET latin1");
        Ok(self.connect("")?.query_drop(statement)?)
    }

    /// A numeric status variable.
    pub fn variable(&self, name: &str) -> anyhow::Result<u64> {
        let found: Option<(String, u64)> =
            self.connect("")?.exec_first("SHOW GLOBAL STATUS LIKE ?", (name,))?;
        Ok(found.with_context(|| format!("mariadbd has no variable {name}"))?.1)
    }

    /// The socket for clients.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}
