//! The parts that developers measure, each a command of `forebay-bench`: a table, and the figures
//! as JSON in `target/bench`.

mod calm;
pub mod crash;
mod dirty_limit;
mod engine;
mod fairness;
mod fuse_hits;
mod hits;
mod nbd_hits;
mod rd;
mod restart;

use clap::Subcommand;

use crate::operator;
use crate::report::rows;
use crate::rig::cleanup;

/// Each part.
#[derive(Subcommand)]
pub enum Part {
    /// CPU time of the engine for each operation, without any device
    Engine(engine::Args),
    /// Hits in RAM through NBD, beside nbdkit's memory plugin
    NbdRam(nbd_hits::Args),
    /// Hits on the cache device through NBD, beside the same server without cache
    NbdSsd(nbd_hits::Args),
    /// Hits in RAM beside clients that read 32 MiB at a time
    Fairness(fairness::Args),
    /// Writes of a volume beside one whose primary is dead
    Away(calm::Args),
    /// Writes of one block again and again in write-through, beside distinct ones
    Rewrite(calm::Args),
    /// Hits in RAM through a loop device, beside qemu-storage-daemon's FUSE export
    Fuse(fuse_hits::Args),
    /// RD1 to RD4: gains over the primary alone, beside the published ones
    Rd(rd::Args),
    /// How long it takes to serve again after a kill, with a full cache
    Restart(restart::Args),
    /// Writes at the dirty limit second by second, and the drain beside sorted writes
    DirtyLimit(dirty_limit::Args),
    /// MariaDB under TPC-C on a mounted disk: server and cache killed together, again and again
    Crash(crash::Args),
    /// Real servers under a random operator, with clients that check everything
    Operator(operator::Args),
    /// Rows of the table of results, from the JSON that forebay bench leaves
    Report(rows::Args),
}

/// Runs one. Signals and panics undo what was made.
///
/// # Errors
/// When it fails, or cannot be done here.
pub fn run(part: &Part) -> anyhow::Result<()> {
    cleanup::protected(|| match part {
        Part::Engine(args) => engine::run(args),
        Part::NbdRam(args) => nbd_hits::ram(args),
        Part::NbdSsd(args) => nbd_hits::ssd(args),
        Part::Fairness(args) => fairness::run(args),
        Part::Away(args) => calm::away(args),
        Part::Rewrite(args) => calm::rewrite(args),
        Part::Fuse(args) => fuse_hits::run(args),
        Part::Rd(args) => rd::run(args),
        Part::Restart(args) => restart::run(args),
        Part::DirtyLimit(args) => dirty_limit::run(args),
        Part::Crash(args) => crash::run(args),
        Part::Operator(args) => operator::run(args),
        Part::Report(args) => rows::run(args),
    })
}
