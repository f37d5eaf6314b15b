//! A MariaDB of one's own: its data in a directory given, a Unix socket, no network, nothing of
//! the machine's own configuration.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use mysql::prelude::Queryable as _;
use mysql::{Conn, OptsBuilder};

use crate::cleanup::{Process, finish, tool};

/// How long it may take to start; recovery on a slow disk is part of it.
const PATIENCE: Duration = Duration::from_secs(600);
/// Prepared statements that a connection keeps.
const STATEMENTS: usize = 100;

/// The settings that a benchmark chooses.
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
    /// Further lines `key=value`.
    pub more: Vec<String>,
}

impl Setting {
    fn file(&self, data: &Path, run: &Path) -> String {
        let mut text = format!(
            "[mariadbd]\nuser=root\ndatadir={}\nsocket={}\npid-file={}\ntmpdir={}\n\
             skip-networking\nskip-log-bin\nskip-name-resolve\nlocal-infile=1\n\
             max-connections={}\ntable-open-cache=4000\nperformance-schema=OFF\n\
             innodb-flush-method=O_DIRECT\ninnodb-doublewrite=1\ninnodb-use-native-aio=1\n\
             innodb-buffer-pool-size={}\ninnodb-log-file-size={}\n\
             innodb-flush-log-at-trx-commit={}\ninnodb-buffer-pool-load-at-startup=0\n\
             innodb-buffer-pool-dump-at-shutdown=0\n",
            data.display(),
            run.join("mariadb.sock").display(),
            run.join("mariadb.pid").display(),
            run.display(),
            self.connections + 8,
            self.buffer_pool,
            self.redo_log,
            u8::from(self.durable),
        );
        for line in &self.more {
            text += line;
            text.push('\n');
        }
        text
    }

    /// The settings in one line.
    pub fn describe(&self) -> String {
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        let mut text = format!(
            "buffer pool {}, redo log {}, O_DIRECT, flush at each commit, doublewrite",
            mib(self.buffer_pool),
            mib(self.redo_log)
        );
        for line in &self.more {
            text += ", ";
            text += line;
        }
        text
    }
}

/// Makes an empty data directory.
pub fn install(data: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("mariadb-install-db");
    command.args(["--no-defaults", "--auth-root-authentication-method=normal"]);
    command.args(["--skip-test-db", "--user=root"]).arg(format!("--datadir={}", data.display()));
    finish(&mut command).map(drop)
}

/// A running server.
pub struct MariaDb {
    process: Process,
    socket: PathBuf,
}

impl MariaDb {
    /// Starts it on `data` and waits until it answers; sockets and logs are kept in `run`, whose
    /// path must be short.
    pub fn start(data: &Path, run: &Path, setting: &Setting) -> anyhow::Result<Self> {
        fs::create_dir_all(run).with_context(|| format!("{}", run.display()))?;
        let file = run.join("mariadb.cnf");
        fs::write(&file, setting.file(data, run))?;
        let socket = run.join("mariadb.sock");
        let _ = fs::remove_file(&socket);
        let mut command = tool("mariadbd");
        command.arg(format!("--defaults-file={}", file.display()));
        let process = Process::start(command, &run.join("mariadb.log"), false)?;
        let server = Self { process, socket };
        let limit = Instant::now() + PATIENCE;
        loop {
            if server.connect("").is_ok() {
                return Ok(server);
            }
            if let Some(status) = server.process.ended()? {
                bail!("mariadbd ended with {status}: {}", server.process.said());
            }
            ensure!(Instant::now() < limit, "mariadbd does not start: {}", server.process.said());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A connection, in a database unless its name is empty.
    pub fn connect(&self, database: &str) -> anyhow::Result<Conn> {
        let name = (!database.is_empty()).then(|| database.to_owned());
        let options = OptsBuilder::new()
            .socket(Some(self.socket.to_string_lossy()))
            .user(Some("root"))
            .stmt_cache_size(STATEMENTS)
            .db_name(name);
        Conn::new(options).context("connecting to mariadbd")
    }

    /// Makes a database.
    pub fn create(&self, database: &str) -> anyhow::Result<()> {
        let statement = format!("CREATE DATABASE {database} CHARACTER SET latin1");
        Ok(self.connect("")?.query_drop(statement)?)
    }

    /// A status variable, as a number.
    pub fn variable(&self, name: &str) -> anyhow::Result<u64> {
        let found: Option<(String, u64)> =
            self.connect("")?.exec_first("SHOW GLOBAL STATUS LIKE ?", (name,))?;
        Ok(found.with_context(|| format!("mariadbd has no variable {name}"))?.1)
    }

    /// Where clients connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Ends it as a power failure would.
    pub fn kill(self) {
        self.process.kill();
    }

    /// Stops it in order.
    pub fn stop(self) -> anyhow::Result<()> {
        self.process.stop(PATIENCE)
    }
}
