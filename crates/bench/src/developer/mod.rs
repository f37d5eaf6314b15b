//! The measurements for developers, each a command of `forebay-bench`: a table, and the figures as
//! JSON in `target/bench`.

mod backup;
mod calm;
pub mod crash;
mod dirty_limit;
mod drain;
mod engine;
mod fairness;
mod fuse_hits;
mod hits;
mod loaded;
mod lost_cache;
mod nbd_hits;
mod rd;
mod restart;
mod shards;
mod stripes;
pub mod survive;
mod watched;

use clap::Subcommand;

use crate::operator;
use crate::report::rows;
use crate::rig::cleanup;

/// The measurements.
#[derive(Subcommand)]
pub enum Part {
    /// CPU time of the engine for each operation, without any device
    Engine(engine::Args),
    /// The longest calls of the engine, without any device
    Steps(engine::steps::Args),
    /// Hits in RAM through NBD, compared with nbdkit's memory plugin
    NbdRam(nbd_hits::Args),
    /// Hits on the cache device through NBD, compared with the same server without cache
    NbdSsd(nbd_hits::Args),
    /// Hits in RAM during 32 MiB reads of other clients
    Fairness(fairness::Args),
    /// Hits of clients before and after a backup, with and without a rule for it; a pinned area
    Backup(backup::Args),
    /// Writes of a volume next to one whose primary is dead
    Away(calm::Args),
    /// Writes of one block over and over in write-through, compared with distinct ones
    Rewrite(calm::Args),
    /// Hits in RAM through a loop device, compared with qemu-storage-daemon's FUSE export
    Fuse(fuse_hits::Args),
    /// RD1 to RD4: gains over the primary alone, compared with the published ones
    Rd(rd::Args),
    /// Time until a killed server with a full cache serves again
    Restart(restart::Args),
    /// Bytes and CPU time of writes, by number of shards
    Shards(shards::Args),
    /// Writes at the dirty limit, second by second; the drain, compared with sorted writes
    DirtyLimit(dirty_limit::Args),
    /// Writes to an array with parity, with its stripes filled from the cache and without
    Stripes(stripes::Args),
    /// Reads before and during a drain
    Drain(drain::Args),
    /// MariaDB under TPC-C on a mounted disk: server and cache killed together, over and over
    Crash(crash::Args),
    /// The same on an ordered volume that loses its cache device, then on its primary alone
    LostCache(lost_cache::Args),
    /// Real programs on disks and volumes of a server that is killed and upgraded under them
    Survive(survive::Args),
    /// CPU time and memory of the server's statistics, events and page, with readers of its stream
    Watched(watched::Args),
    /// Real servers under a random operator, with clients that check everything
    Operator(operator::Args),
    /// Print rows of the table of results from the JSON of benchmarks
    Report(rows::Args),
}

/// Runs a command. A signal or panic removes all its resources.
///
/// # Errors
/// When the command fails, or is not possible here.
pub fn run(part: &Part) -> anyhow::Result<()> {
    cleanup::protected(|| match part {
        Part::Engine(args) => engine::run(args),
        Part::Steps(args) => engine::steps::run(args),
        Part::NbdRam(args) => nbd_hits::ram(args),
        Part::NbdSsd(args) => nbd_hits::ssd(args),
        Part::Fairness(args) => fairness::run(args),
        Part::Backup(args) => backup::run(args),
        Part::Away(args) => calm::away(args),
        Part::Rewrite(args) => calm::rewrite(args),
        Part::Fuse(args) => fuse_hits::run(args),
        Part::Rd(args) => rd::run(args),
        Part::Restart(args) => restart::run(args),
        Part::Shards(args) => shards::run(args),
        Part::DirtyLimit(args) => dirty_limit::run(args),
        Part::Stripes(args) => stripes::run(args),
        Part::Drain(args) => drain::run(args),
        Part::Crash(args) => crash::run(args),
        Part::LostCache(args) => lost_cache::run(args),
        Part::Survive(args) => survive::run(args),
        Part::Watched(args) => watched::run(args),
        Part::Operator(args) => operator::run(args),
        Part::Report(args) => rows::run(args),
    })
}
