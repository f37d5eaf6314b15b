//! The benchmarks for users, and the demonstration. Each benchmark measures set-ups in turn, prints
//! a table, and leaves the figures as JSON and a report as a page.

mod burst;
pub mod database;
mod demo;
mod fileio;
mod listen;
mod oltp;
pub mod options;
mod own;
mod pgbench;
mod tpcc;
mod vdbench;

use std::path::PathBuf;

use clap::Subcommand;

use crate::rig::cleanup;

/// The benchmarks for users.
#[derive(Subcommand, Clone, Debug)]
pub enum Command {
    /// TPC-C on MariaDB: new orders a minute
    #[command(after_help = "Examples:\n  forebay bench tpcc\n  \
        forebay bench tpcc --warehouses 20 --seconds 120 --dir /ssd/work\n  \
        forebay bench tpcc --warehouses 4200 --threads 96 --ramp 6000 --seconds 6000")]
    Tpcc(Box<tpcc::Args>),
    /// sysbench's OLTP on MariaDB, rows by the pareto distribution: transactions a second, and dips
    #[command(after_help = "Examples:\n  forebay bench oltp\n  \
        forebay bench oltp --setups no-cache,write-back --seconds 300\n  \
        forebay bench oltp --tables 32 --rows 10000000 --ramp 3600 --seconds 3600")]
    Oltp(Box<oltp::Args>),
    /// pgbench's TPC-B on PostgreSQL: transactions a second
    #[command(after_help = "Examples:\n  forebay bench pgbench\n  \
        forebay bench pgbench --setups write-back,independent,raw --access uniform\n  \
        forebay bench pgbench --scale 1000 --ramp 600 --seconds 600")]
    Pgbench(Box<pgbench::Args>),
    /// Random requests with a share of reads and of hits: RD1 to RD4 and RD6, through NBD
    #[command(after_help = "Examples:\n  forebay bench vdbench\n  \
        forebay bench vdbench --runs RD3 --setups no-cache,write-back\n  \
        forebay bench vdbench --mib 409600 --seconds 1200 --baseline-seconds 1200")]
    Vdbench(Box<vdbench::Args>),
    /// Random and sequential reads and writes at many numbers of threads, with fio
    #[command(after_help = "Examples:\n  forebay bench fileio\n  \
        forebay bench fileio --threads 1,2,4,8,16,32,64,128,256,512,1024 --async-seconds 7200")]
    Fileio(Box<fileio::Args>),
    /// A burst of small writes: absorbed and drained, compared with writing it directly
    #[command(after_help = "Example:\n  forebay bench burst --burst-mib 512 --mib 8192")]
    Burst(Box<burst::Args>),
    /// Your own volume, which is only read: without a cache, and with an empty and a warm one
    #[command(after_help = "Examples:\n  forebay bench own --primary /dev/sdb --dir /ssd/work\n  \
        forebay bench own --volume db")]
    Own(Box<own::Args>),
}

/// The commands that `forebay` passes to this program.
#[derive(Subcommand)]
pub enum Asked {
    /// Repeat published evaluations of caches on this machine, and chart the results
    ///
    /// Each set-up is measured in turn in one run: the primary alone, the modes of the cache, the
    /// bare SSD, another cache. The results are a table, the figures as JSON, and a report page.
    #[command(after_help = "Examples:\n  forebay bench tpcc\n  \
        forebay bench tpcc --compare forebay-bench/tpcc-20260131T120000Z.json")]
    Bench {
        /// The benchmark.
        #[command(subcommand)]
        benchmark: Command,
    },
    /// See it work in a few minutes, without any disk: gains, a kill, a database
    #[command(after_help = "Examples:\n  forebay demo\n  forebay demo --dir /ssd/work --seconds 0")]
    Demo(demo::Args),
}

/// Runs a command. A signal or panic undoes all set-ups.
///
/// # Errors
/// [`WrongUsage`](crate::WrongUsage) for an invalid combination of arguments; any other error is a
/// failure.
pub fn run(asked: &Asked) -> anyhow::Result<()> {
    cleanup::protected(|| match asked {
        Asked::Bench { benchmark } => dispatch(benchmark).map(drop),
        Asked::Demo(args) => demo::run(args),
    })
}

/// Runs a benchmark; returns the path of its page.
fn dispatch(command: &Command) -> anyhow::Result<PathBuf> {
    match command {
        Command::Tpcc(args) => tpcc::run(args),
        Command::Oltp(args) => oltp::run(args),
        Command::Pgbench(args) => pgbench::run(args),
        Command::Vdbench(args) => vdbench::run(args),
        Command::Fileio(args) => fileio::run(args),
        Command::Burst(args) => burst::run(args),
        Command::Own(args) => own::run(args),
    }
}
