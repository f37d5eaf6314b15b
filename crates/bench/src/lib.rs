//! Benchmarks: the published evaluations of caches like this one on the user's machine, baseline
//! beside cached (`forebay bench`, [`Command`]), and the parts that developers measure
//! (`forebay-bench`, [`developer`]).
//!
//! What is compared is measured in turns in one run with the same client: ratios mean something
//! elsewhere, absolute figures little. Whatever is made is undone at the end, at an error, a
//! signal or a panic ([`cleanup`]).

mod burst;
mod calm;
mod chart;
pub mod cleanup;
mod client;
mod content;
pub mod crash;
pub mod database;
mod demo;
pub mod developer;
pub mod disk;
mod engine;
mod fairness;
mod fileio;
mod fio;
mod fuse;
mod html;
pub mod image;
mod limit;
mod load;
pub mod mariadb;
mod nbd;
mod oltp;
pub mod operator;
pub mod options;
mod pgbench;
pub mod place;
mod postgres;
mod random;
mod rd;
pub mod report;
mod restart;
pub mod results;
pub mod sample;
mod scale;
pub mod server;
pub mod tpcc;
mod tpcc_bench;
mod vdbench;
mod watch;

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;

use clap::Subcommand;

pub use demo::Args as DemoArgs;
pub use options::WrongUsage;

/// The JSON of a report as it would be shown: its page.
pub use html::page;

/// The benchmarks for users.
#[derive(Subcommand, Clone, Debug)]
pub enum Command {
    /// TPC-C on MariaDB: new orders a minute
    #[command(after_help = "Examples:\n  forebay bench tpcc\n  \
        forebay bench tpcc --warehouses 20 --seconds 120 --dir /ssd/work\n  \
        forebay bench tpcc --warehouses 4200 --threads 96 --ramp 6000 --seconds 6000")]
    Tpcc(Box<tpcc_bench::Args>),
    /// sysbench's OLTP on MariaDB, rows by the pareto distribution: transactions a second, no dips
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
    /// A burst of small writes: absorbed and drained, beside the same written directly
    #[command(after_help = "Example:\n  forebay bench burst --burst-mib 512 --mib 8192")]
    Burst(Box<burst::Args>),
}

/// Runs one. Signals and panics undo what was made.
///
/// # Errors
/// [`WrongUsage`] when it cannot be asked like that; anything else when it failed.
pub fn run(command: &Command) -> anyhow::Result<()> {
    protected(|| dispatch(command).map(drop))
}

/// Runs the demonstration in the same way.
///
/// # Errors
/// When it failed.
pub fn demo(args: &DemoArgs) -> anyhow::Result<()> {
    protected(|| demo::run(args))
}

fn protected(work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    cleanup::protect()?;
    let outcome = work();
    progress("");
    cleanup::all();
    outcome
}

/// Runs a benchmark; its page.
fn dispatch(command: &Command) -> anyhow::Result<PathBuf> {
    match command {
        Command::Tpcc(args) => tpcc_bench::run(args),
        Command::Oltp(args) => oltp::run(args),
        Command::Pgbench(args) => pgbench::run(args),
        Command::Vdbench(args) => vdbench::run(args),
        Command::Fileio(args) => fileio::run(args),
        Command::Burst(args) => burst::run(args),
    }
}

/// What every command with a server is asked.
#[derive(clap::Args, Clone)]
#[group(skip)]
pub struct Common {
    /// The binary of Forebay [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    forebay: Option<PathBuf>,
    /// Where files are made [default: the system's directory for temporary files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Shows what is being done, in place of what was shown before; on a terminal only.
fn progress(text: &str) {
    let mut out = std::io::stderr();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[K{text}");
        let _ = out.flush();
    }
}
