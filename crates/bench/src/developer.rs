//! The parts that developers measure, each a command of `forebay-bench`: a table, and the figures
//! as JSON in `target/bench`.

use clap::Subcommand;

use crate::{calm, crash, engine, fairness, fuse, limit, nbd, operator, rd, restart};

/// Each part.
#[derive(Subcommand)]
pub enum Part {
    /// CPU time of the engine for each operation, without any device
    Engine(engine::Args),
    /// Hits in RAM through NBD, beside nbdkit's memory plugin
    NbdRam(nbd::Args),
    /// Hits on the cache device through NBD, beside the same server without cache
    NbdSsd(nbd::Args),
    /// Hits in RAM beside clients that read 32 MiB at a time
    Fairness(fairness::Args),
    /// Writes of a volume beside one whose primary is dead
    Away(calm::Args),
    /// Writes of one block again and again in write-through, beside distinct ones
    Rewrite(calm::Args),
    /// Hits in RAM through a loop device, beside qemu-storage-daemon's FUSE export
    Fuse(fuse::Args),
    /// RD1 to RD4: gains over the primary alone, beside the published ones
    Rd(rd::Args),
    /// How long it takes to serve again after a kill, with a full cache
    Restart(restart::Args),
    /// Writes at the dirty limit second by second, and the drain beside sorted writes
    DirtyLimit(limit::Args),
    /// MariaDB under TPC-C on a mounted disk: server and cache killed together, again and again
    Crash(crash::Args),
    /// Real servers under a random operator, with clients that check everything
    Operator(operator::Args),
}

/// Runs one. Signals and panics undo what was made.
///
/// # Errors
/// When it fails, or cannot be done here.
pub fn run(part: &Part) -> anyhow::Result<()> {
    crate::protected(|| match part {
        Part::Engine(args) => engine::run(args),
        Part::NbdRam(args) => nbd::ram(args),
        Part::NbdSsd(args) => nbd::ssd(args),
        Part::Fairness(args) => fairness::run(args),
        Part::Away(args) => calm::away(args),
        Part::Rewrite(args) => calm::rewrite(args),
        Part::Fuse(args) => fuse::run(args),
        Part::Rd(args) => rd::run(args),
        Part::Restart(args) => restart::run(args),
        Part::DirtyLimit(args) => limit::run(args),
        Part::Crash(args) => crash::run(args),
        Part::Operator(args) => operator::run(args),
    })
}
