//! `bench pgbench`: pgbench's transactions, which are TPC-B's, on PostgreSQL, on each set-up in
//! turn. After each, the primary alone must hold a sound database with every transaction that
//! pgbench saw committed, and the balances must add up.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::dbms::TOOLS;
use crate::dbms::postgres::{self, Postgres};
use crate::load::sample::Histogram;
use crate::report::progress;
use crate::report::{Group, Report};
use crate::rig::cleanup::finish;
use crate::rig::needs;
use crate::rig::setup::SetUp;
use crate::user::database::{self, Args as Database, Loaded};
use crate::user::listen::{self, listen};

/// Disk space in bytes per branch, with its 100,000 accounts, their index, and an hour's history.
const BRANCH: u64 = 20 << 20;
/// Fixed part of a disk's size, in bytes.
const BASE: u64 = 1200 << 20;
const NOTE: &str = "TPC-B as pgbench has it. After each set-up the database was killed, the cache \
    drained, and the primary alone recovered: every transaction that pgbench saw committed was \
    there, balances added up, page checksums and pg_amcheck were clean.";
/// TPC-B without the choice of the account, which the access distribution inserts.
const SCRIPT: &str = "\\set bid random(1, 1 * :scale)\n\
    \\set tid random(1, 10 * :scale)\n\
    \\set delta random(-5000, 5000)\n\
    BEGIN;\n\
    UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;\n\
    SELECT abalance FROM pgbench_accounts WHERE aid = :aid;\n\
    UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;\n\
    UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = :bid;\n\
    INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) \
    VALUES (:tid, :bid, :aid, :delta, CURRENT_TIMESTAMP);\n\
    END;\n";
/// Distributions of account access; frequent accounts are anywhere in the table.
const ACCESS: [(&str, &str); 2] = [
    (
        "zipfian",
        "\\set n 100000 * :scale\n\
         \\set aid 1 + permute(random_zipfian(1, :n, 1.05) - 1, :n)\n",
    ),
    ("uniform", "\\set aid random(1, 100000 * :scale)\n"),
];
/// Sums that must be equal.
const SUMS: &str = "SELECT (SELECT coalesce(sum(delta), 0) FROM pgbench_history), \
    (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers), \
    (SELECT sum(bbalance) FROM pgbench_branches)";

/// Arguments of the command.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(flatten)]
    pub database: Database,
    /// Branches, each with 100,000 accounts and about 15 MiB
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub scale: u64,
    /// How accounts are chosen: zipfian (exponent 1.05) or uniform
    #[arg(long, default_value = "zipfian", value_parser = ACCESS.map(|(name, _)| name))]
    pub access: String,
}

/// Runs the benchmark and reports; returns the path of the page.
pub fn run(args: &Args) -> anyhow::Result<PathBuf> {
    let (database, shared) = (&args.database, &args.database.shared);
    needs::tools(&[&TOOLS[..], &[("setpriv", "util-linux")]].concat())?;
    postgres::programs()?;
    needs::disk_can_be_made(&shared.setups)?;
    shared.binary()?;
    let earlier = shared.earlier("pgbench")?;
    let scale = args.scale;
    let size = BASE + (database.redo_log_mib << 20) + scale * BRANCH;
    needs::space(&shared.directory()?, size * 2)?;
    let made_of = format!("pgbench, scale {scale}, form 1");
    let fill = |server: &Postgres| fill(scale, server);
    let image = database::prepare(database, &format!("pgbench-{scale}"), &made_of, size, fill)?;
    let title = format!("pgbench, scale {scale} on PostgreSQL");
    let mut report = Report::new("pgbench", &title, "transactions/s");
    database.describe::<Postgres>(&mut report, &image);
    report.set("scale", scale);
    report.set("access", &args.access);
    let mut group = Group { name: "TPC-B".to_owned(), ..Group::default() };
    for &setup in &shared.setups {
        let load = |server: &Postgres| drive(args, server, setup);
        group.results.push(database.measure(&image, setup, load, sound)?);
    }
    progress("");
    report.groups.push(group);
    report.notes.push(NOTE.to_owned());
    report.finish(&shared.out, earlier.as_ref())
}

fn fill(scale: u64, server: &Postgres) -> anyhow::Result<()> {
    progress(&format!("loading {scale} branches"));
    let mut command = server.client("pgbench")?;
    command.args(["--initialize", "--quiet", "--scale", &scale.to_string(), "postgres"]);
    finish(&mut command).map(drop)
}

/// Runs the load on one set-up, ramp-up first. Also returns the number of committed transactions.
fn drive(args: &Args, server: &Postgres, setup: SetUp) -> anyhow::Result<(Loaded, u64)> {
    let run_for = |seconds, shown: &dyn Fn(usize, f64)| run_for(args, server, seconds, shown);
    let (warm, said) = args.database.in_parts(setup, run_for)?;
    let committed = warm.committed + said.committed;
    let per_second = args.database.seconds_of(warm.per_second, said.per_second);
    Ok((Loaded { latency: said.times.summary(), per_second, figures: Vec::new() }, committed))
}

/// Runs pgbench for a while and parses its output, line by line.
fn run_for(
    args: &Args,
    server: &Postgres,
    seconds: u64,
    shown: impl Fn(usize, f64),
) -> anyhow::Result<Said> {
    if seconds == 0 {
        return Ok(Said::default());
    }
    let (_, account) =
        ACCESS.iter().find(|(name, _)| *name == args.access).context("the access")?;
    let (script, prefix) = (server.run().join("script.sql"), server.run().join("times"));
    fs::write(&script, format!("{account}{SCRIPT}"))?;
    let threads = args.database.threads;
    let mut pgbench = server.client("pgbench")?;
    pgbench
        .args(["--no-vacuum", "--progress=1", "--random-seed=1", "--log"])
        .arg(format!("--jobs={}", threads.min(2)))
        .arg(format!("--client={threads}"))
        .arg(format!("--time={seconds}"))
        .arg(format!("--scale={}", args.scale))
        .arg(format!("--log-prefix={}", prefix.display()))
        .arg(format!("--file={}", script.display()))
        .arg("postgres");
    // pgbench reports progress on standard error.
    let mut command = Command::new("sh");
    command.arg("-c").arg("exec \"$0\" \"$@\" 2>&1").arg(pgbench.get_program());
    command.args(pgbench.get_args()).env("LC_ALL", "C");
    let log = server.run().join("pgbench.log");
    let mut said: Said = listen("pgbench", command, &log, seconds, shown)?;
    said.read_times(&prefix)?;
    Ok(said)
}

/// The parsed output of pgbench.
#[derive(Default)]
struct Said {
    per_second: Vec<f64>,
    times: Histogram,
    committed: u64,
    last_error: String,
}

impl listen::Said for Said {
    // A line: `progress: 1.0 s, 4095.9 tps, lat 7.744 ms …`, the number of transactions, or
    // another line.
    fn line(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("progress: ") {
            let tps = rest.split(", ").nth(1).and_then(|word| word.strip_suffix(" tps"));
            self.per_second.extend(tps.and_then(|word| word.parse::<f64>().ok()));
        } else if let Some(rest) = line.strip_prefix("number of transactions actually processed: ")
        {
            self.committed = rest.split('/').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        } else if line.contains("error") || line.contains("FATAL") {
            self.last_error = line.to_owned();
        }
    }

    fn per_second(&mut self) -> &mut Vec<f64> {
        &mut self.per_second
    }

    fn last_error(&self) -> &str {
        &self.last_error
    }
}

impl Said {
    /// Reads and removes the transaction times, which each thread of pgbench has written to a
    /// separate file: `client number microseconds …`.
    fn read_times(&mut self, prefix: &Path) -> anyhow::Result<()> {
        let name = prefix.file_name().context("a file's name")?.to_string_lossy().into_owned();
        for entry in fs::read_dir(prefix.parent().context("a directory")?)? {
            let path = entry?.path();
            let is_log = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&name));
            if !is_log {
                continue;
            }
            for line in BufReader::new(fs::File::open(&path)?).lines() {
                let line = line?;
                let micros = line.split(' ').nth(2).and_then(|word| word.parse::<u64>().ok());
                self.times.add_many(Duration::from_micros(micros.unwrap_or(0)), 1);
            }
            fs::remove_file(&path)?;
        }
        Ok(())
    }
}

/// Checks that the committed transactions are there, the balances add up, and pages and indexes are
/// sound.
fn sound(server: &Postgres, committed: u64) -> anyhow::Result<()> {
    let found: u64 = server.query("SELECT count(*) FROM pgbench_history")?.parse()?;
    ensure!(found >= committed, "{committed} transactions were committed, {found} are there");
    let sums = server.query(SUMS)?;
    let mut each = sums.split('|');
    let first = each.next();
    ensure!(each.all(|sum| Some(sum) == first), "history, accounts, tellers, branches: {sums}");
    let mut command = server.client("pg_amcheck")?;
    command.args(["--install-missing", "--heapallindexed", "postgres"]);
    finish(&mut command).map(drop)
}

#[cfg(test)]
mod tests {
    use listen::Said as _;

    use super::*;

    #[test]
    fn what_pgbench_says_is_understood() {
        let mut said = Said::default();
        for line in [
            "pgbench (15.18 (Debian 15.18-0+deb12u1))",
            "progress: 1.0 s, 4095.9 tps, lat 7.744 ms stddev 3.901, 0 failed",
            "progress: 2.0 s, 11.0 tps, lat 7.744 ms stddev 3.901, 0 failed",
            "number of transactions actually processed: 8123",
            "pgbench: error: client 3 aborted",
        ] {
            said.line(line);
        }
        assert_eq!((&said.per_second[..], said.committed), (&[4095.9, 11.0][..], 8123));
        assert_eq!(said.last_error, "pgbench: error: client 3 aborted");
    }

    #[test]
    fn times_are_read_from_the_files_of_all_threads() {
        let dir = std::env::temp_dir().join(format!("forebay-pgbench-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        fs::write(dir.join("times.77"), "0 1 1500 0 1700000000 1\n").expect("a file");
        fs::write(dir.join("times.77.1"), "1 1 2500 0 1700000000 1\n").expect("a file");
        fs::write(dir.join("script.sql"), "").expect("a file");
        let mut said = Said::default();
        said.read_times(&dir.join("times")).expect("they can be read");
        assert_eq!(said.times.summary().count, 2);
        assert_eq!(fs::read_dir(&dir).expect("a directory").count(), 1);
        fs::remove_dir_all(&dir).expect("it was there");
    }
}
