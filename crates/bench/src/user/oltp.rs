//! `bench oltp`: sysbench's transactions (`oltp_read_write`) with rows chosen by the pareto
//! distribution, on MariaDB, on each set-up in turn. The chart over time shows whether there are
//! dips.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use mysql::prelude::Queryable as _;

use crate::dbms::mariadb::MariaDb;
use crate::dbms::{MARIADB, TOOLS};
use crate::load::sample::Histogram;
use crate::report::progress;
use crate::report::{Group, Report};
use crate::rig::cleanup::finish;
use crate::rig::needs;
use crate::rig::setup::SetUp;
use crate::user::database::{self, Args as Database, Loaded};
use crate::user::listen::{self, listen};

const DATABASE: &str = "sbtest";
/// Minimum gains; nine tenths of the bare SSD is also sufficient.
const GAINS: [(&str, f64); 2] = [("write-back", 8.0), ("write-through", 2.0)];
/// Minimum of the worst interval of the steady half, as a share of the median one.
const STEADY: f64 = 0.8;
/// Disk space in bytes per row, with its share of the index and some spare room.
const ROW: u64 = 330;
/// Fixed part of a disk's size, in bytes.
const BASE: u64 = 1200 << 20;
const NOTE: &str = "Rows are chosen by sysbench's pareto distribution. After each set-up the \
    database was killed, the cache drained, and the primary alone recovered and passed \
    CHECK TABLE.";

/// Arguments of the command.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[command(flatten)]
    pub database: Database,
    /// Number of tables
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub tables: u64,
    /// Rows per table, about 240 bytes each
    #[arg(long, default_value_t = 500_000, value_parser = clap::value_parser!(u64).range(1000..))]
    pub rows: u64,
    /// How rows are chosen: uniform, gaussian, special, pareto
    #[arg(long, default_value = "pareto",
        value_parser = ["uniform", "gaussian", "special", "pareto"])]
    pub access: String,
}

/// Runs the benchmark and reports; returns the path of the page.
pub fn run(args: &Args) -> anyhow::Result<PathBuf> {
    let (database, shared) = (&args.database, &args.database.shared);
    needs::tools(&[&MARIADB[..], &TOOLS, &[("sysbench", "sysbench")]].concat())?;
    needs::disk_can_be_made(&shared.setups)?;
    shared.binary()?;
    let earlier = shared.earlier("oltp")?;
    let Args { tables, rows, .. } = *args;
    let size = BASE + (database.redo_log_mib << 20) + tables * rows * ROW;
    needs::space(&shared.directory()?, size * 2)?;
    let made_of = format!("sysbench, {tables} tables of {rows} rows, form 2");
    let name = format!("oltp-{tables}x{rows}");
    let fill = |server: &MariaDb| fill(args, server);
    let image = database::prepare(database, &name, &made_of, size, fill)?;
    let title = format!("sysbench oltp_read_write, {tables} tables of {rows} rows on MariaDB");
    let mut report = Report::new("oltp", &title, "transactions/s");
    database.describe::<MariaDb>(&mut report, &image);
    report.set("tables", format!("{tables} of {rows} rows"));
    report.set("access", &args.access);
    let mut group = Group { name: "OLTP".to_owned(), ..Group::default() };
    for &setup in &shared.setups {
        let load = |server: &MariaDb| Ok((drive(args, server, setup)?, ()));
        let check = |server: &MariaDb, ()| sound(server, tables);
        group.results.push(database.measure(&image, setup, load, check)?);
    }
    progress("");
    let back = group.of("write-back").and_then(|one| one.steadiness());
    report.groups.push(group);
    database::targets(&mut report, GAINS);
    report.target("write-back, steady half: worst interval / median", back, STEADY);
    report.notes.push(NOTE.to_owned());
    report.finish(&shared.out, earlier.as_ref())
}

/// A sysbench command with the arguments common to all of its commands.
fn sysbench(args: &Args, server: &MariaDb, threads: u32) -> Command {
    let mut command = Command::new("sysbench");
    command
        .arg("oltp_read_write")
        .arg(format!("--mysql-socket={}", server.socket().display()))
        .args(["--mysql-user=root", "--db-driver=mysql", "--rand-seed=1"])
        .arg(format!("--mysql-db={DATABASE}"))
        .arg(format!("--tables={}", args.tables))
        .arg(format!("--table-size={}", args.rows))
        .arg(format!("--threads={threads}"));
    command
}

fn fill(args: &Args, server: &MariaDb) -> anyhow::Result<()> {
    server.create(DATABASE)?;
    progress(&format!("loading {} tables of {} rows", args.tables, args.rows));
    finish(sysbench(args, server, 2).arg("prepare")).map(drop)
}

/// Runs the load on one set-up, ramp-up first.
fn drive(args: &Args, server: &MariaDb, setup: SetUp) -> anyhow::Result<Loaded> {
    let run_for = |seconds, shown: &dyn Fn(usize, f64)| run_for(args, server, seconds, shown);
    let (warm, said) = args.database.in_parts(setup, run_for)?;
    let per_second = args.database.seconds_of(warm.per_second, said.per_second);
    Ok(Loaded {
        latency: said.times.summary(),
        per_second,
        figures: vec![("reads and writes/s".to_owned(), database::mean(&said.queries))],
    })
}

/// Runs sysbench for a while and parses its output, line by line.
fn run_for(
    args: &Args,
    server: &MariaDb,
    seconds: u64,
    shown: impl Fn(usize, f64),
) -> anyhow::Result<Said> {
    if seconds == 0 {
        return Ok(Said::default());
    }
    let mut command = sysbench(args, server, args.database.threads);
    command
        .arg(format!("--rand-type={}", args.access))
        .arg(format!("--time={seconds}"))
        .args(["--report-interval=1", "--histogram=on", "--percentile=99"])
        .arg("--mysql-ignore-errors=1213,1205,1020")
        .arg("run");
    let log = server.socket().with_file_name("sysbench.log");
    listen("sysbench", command, &log, seconds, shown)
}

/// The parsed output of sysbench.
#[derive(Default)]
struct Said {
    per_second: Vec<f64>,
    queries: Vec<f64>,
    times: Histogram,
    in_histogram: bool,
    last_error: String,
}

impl listen::Said for Said {
    // A line: `[ 3s ] thds: 32 tps: 85.9 qps: 1800.3 …`, a row of the histogram, or another line.
    fn line(&mut self, line: &str) {
        let number = |name: &str| {
            let rest = line.split(name).nth(1)?.trim_start();
            rest.split([' ', '(']).next()?.parse::<f64>().ok()
        };
        if line.starts_with('[')
            && let (Some(tps), Some(qps)) = (number("tps:"), number("qps:"))
        {
            self.per_second.push(tps);
            self.queries.push(qps);
            return;
        }
        if line.contains("FATAL") || line.contains("rror:") {
            self.last_error = line.to_owned();
        }
        self.in_histogram |= line.starts_with("Latency histogram");
        if !self.in_histogram {
            return;
        }
        let mut words = line.split_whitespace();
        let value = words.next().and_then(|word| word.parse::<f64>().ok());
        let count = words.next_back().and_then(|word| word.parse::<u64>().ok());
        if let Some((value, count)) = value.zip(count).filter(|_| line.contains('|')) {
            self.times.add_many(Duration::from_secs_f64(value / 1e3), count);
        }
    }

    fn per_second(&mut self) -> &mut Vec<f64> {
        &mut self.per_second
    }

    fn last_error(&self) -> &str {
        &self.last_error
    }
}

/// Checks that every table is sound.
fn sound(server: &MariaDb, tables: u64) -> anyhow::Result<()> {
    let mut conn = server.connect(DATABASE)?;
    for table in 1..=tables {
        let rows: Vec<(String, String, String, String)> =
            conn.query(format!("CHECK TABLE sbtest{table}")).context("CHECK TABLE")?;
        let good = rows.iter().any(|(.., kind, text)| kind == "status" && text == "OK");
        ensure!(good, "CHECK TABLE sbtest{table}: {rows:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use listen::Said as _;

    use super::*;

    #[test]
    fn the_lines_of_sysbench_are_understood() {
        let text = "[ 1s ] thds: 8 tps: 115.92 qps: 2414.36 (r/w/o: 1706.85/467.71/239.80) lat \
                    (ms,95%): 189.93 err/s: 0.00 reconn/s: 0.00\n\
                    Latency histogram (values are in milliseconds)\n\
                    \x20      value  ------------- distribution ------------- count\n\
                    \x20     10.090 |****                                     30\n\
                    \x20    100.000 |**                                       10\n\
                    SQL statistics:\n    queries performed:\n        read:    1718\n";
        let mut said = Said::default();
        text.lines().for_each(|line| said.line(line));
        assert_eq!((said.per_second, said.queries), (vec![115.92], vec![2414.36]));
        let latency = said.times.summary();
        assert_eq!((latency.count, latency.max_ms), (40, 100.0));
        assert!((10.0..11.0).contains(&latency.p50_ms), "{latency:?}");
    }
}
