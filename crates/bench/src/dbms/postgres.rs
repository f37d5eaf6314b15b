//! A dedicated PostgreSQL: its data in a given directory, a Unix socket, no network. It reads its
//! files through the kernel's page cache, which would hold all of them, so a control group limits
//! its memory, page cache included. It refuses to run as root, so it runs as an ordinary user.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::dbms::{Dbms, PATIENCE, Setting};
use crate::rig::cleanup::{self, Held, Process, finish};

/// Debian's directory for the programs of each version.
const VERSIONS: &str = "/usr/lib/postgresql";
/// Users to run it as; the first existing one is used.
const USERS: [&str; 2] = ["postgres", "nobody"];
/// Memory of the server per connection in bytes, in addition to its buffers and the page cache.
const BACKEND: u64 = 4 << 20;
/// Fixed memory of the server's processes, in bytes.
const PROCESSES: u64 = 64 << 20;

/// The directory with the programs of the newest installed version.
///
/// # Errors
/// When none is installed.
pub fn programs() -> anyhow::Result<PathBuf> {
    let versions = fs::read_dir(VERSIONS).into_iter().flatten().flatten();
    let bins = versions.filter_map(|entry| {
        let number = entry.file_name().to_string_lossy().parse::<u32>().ok()?;
        Some((number, entry.path().join("bin")))
    });
    let whole = bins.filter(|(_, bin)| bin.join("postgres").exists());
    let newest = whole.max_by_key(|(number, _)| *number);
    let (_, bin) = newest.context(
        "postgres is not installed; on Debian: apt-get install postgresql (15 is known to work)",
    )?;
    Ok(bin)
}

/// The IDs of the user and its group.
fn user() -> anyhow::Result<(u32, u32)> {
    let text = fs::read_to_string("/etc/passwd").context("/etc/passwd")?;
    let numbers = |name: &&str| {
        let line = text.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut fields = line.split(':').skip(2).map(str::parse::<u32>);
        fields.next()?.ok().zip(fields.next()?.ok())
    };
    let found = USERS.iter().find_map(numbers);
    found.with_context(|| format!("there is no user {}: PostgreSQL needs one", USERS.join(" or ")))
}

/// A command that runs as that user.
fn as_user(program: &Path) -> anyhow::Result<Command> {
    let (user, group) = user()?;
    let mut command = Command::new("setpriv");
    command.arg(format!("--reuid={user}")).arg(format!("--regid={group}"));
    command.arg("--clear-groups").arg(program).env("LC_ALL", "C");
    Ok(command)
}

/// A running server.
pub struct Postgres {
    process: Process,
    run: PathBuf,
    _memory: Option<Held>,
}

impl Postgres {
    /// A command of one of its clients, with the address of the server.
    pub fn client(&self, name: &str) -> anyhow::Result<Command> {
        let mut command = Command::new(programs()?.join(name));
        command.args(["-U", "postgres", "-h"]).arg(&self.run).env("LC_ALL", "C");
        Ok(command)
    }

    /// The result of a query, one line per row.
    pub fn query(&self, text: &str) -> anyhow::Result<String> {
        let mut psql = self.client("psql")?;
        psql.args(["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", text, "postgres"]);
        Ok(finish(&mut psql)?.trim().to_owned())
    }

    /// The directory in which its clients may write.
    pub fn run(&self) -> &Path {
        &self.run
    }
}

impl Dbms for Postgres {
    const NAME: &'static str = "postgres";

    fn install(data: &Path) -> anyhow::Result<()> {
        let (user, group) = user()?;
        fs::create_dir_all(data)?;
        chown(data, Some(user), Some(group))?;
        let mut command = as_user(&programs()?.join("initdb"))?;
        command.args(["--username=postgres", "--auth=trust", "--data-checksums", "--no-sync"]);
        command.args(["--encoding=UTF8", "--locale=C", "-D"]).arg(data);
        finish(&mut command).map(drop)
    }

    fn start(data: &Path, run: &Path, setting: &Setting) -> anyhow::Result<Self> {
        fs::create_dir_all(run).with_context(|| format!("{}", run.display()))?;
        let (user, group) = user()?;
        chown(run, Some(user), Some(group))?;
        let mut command = as_user(&programs()?.join("postgres"))?;
        command.arg("-D").arg(data);
        for line in settings(run, setting) {
            command.arg("-c").arg(line);
        }
        let memory = setting.page_cache.map(|bytes| {
            let connections = u64::from(setting.connections);
            let all = bytes + setting.buffer_pool + PROCESSES + connections * BACKEND;
            cleanup::memory_group("forebay-bench", all)
        });
        let (command, memory) = match memory.transpose()? {
            Some((group, held)) => (group.enter(&command), Some(held)),
            None => (command, None),
        };
        let process = Process::start(command, &run.join("postgres.log"), false)?;
        Self { process, run: run.to_owned(), _memory: memory }.ready()
    }

    fn answers(&self) -> bool {
        self.query("SELECT 1").is_ok()
    }

    fn own_settings(setting: &Setting) -> String {
        let mib = |bytes: u64| bytes >> 20;
        let mut text = format!(
            "shared_buffers {} MiB, max_wal_size {} MiB, fsync, full_page_writes, checksums",
            mib(setting.buffer_pool),
            mib(setting.redo_log)
        );
        if let Some(bytes) = setting.page_cache {
            text += &format!(", page cache at most about {} MiB", mib(bytes));
        }
        text
    }

    fn process(&self) -> &Process {
        &self.process
    }

    fn kill(self) {
        // Its child processes notice and exit; unmounting waits for them.
        self.process.kill();
    }

    fn stop(self) -> anyhow::Result<()> {
        // SIGTERM waits for clients to disconnect; there are none.
        self.process.stop(PATIENCE)
    }
}

fn settings(run: &Path, setting: &Setting) -> Vec<String> {
    let on = |on: bool| if on { "on" } else { "off" };
    let mib = |bytes: u64| format!("{}MB", bytes >> 20);
    let mut lines = vec![
        "listen_addresses=".to_owned(),
        format!("unix_socket_directories={}", run.display()),
        format!("max_connections={}", setting.connections + 8),
        format!("shared_buffers={}", mib(setting.buffer_pool)),
        format!("max_wal_size={}", mib(setting.redo_log)),
        format!("min_wal_size={}", mib(setting.redo_log.min(80 << 20))),
        format!("fsync={}", on(setting.durable)),
        "huge_pages=off".to_owned(),
        "autovacuum_naptime=10s".to_owned(),
        "logging_collector=off".to_owned(),
    ];
    lines.extend(setting.more.iter().cloned());
    lines
}
