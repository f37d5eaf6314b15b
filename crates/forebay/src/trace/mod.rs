//! `forebay trace`: records the requests of a volume, replays them, and simulates policies over
//! them.

pub mod args;
mod input;
mod record;
mod replay;
mod simulate;

use args::TraceCommand;

/// Runs the command.
pub fn run(command: &TraceCommand) -> anyhow::Result<()> {
    match command {
        TraceCommand::Record(args) => record::run(args),
        TraceCommand::Replay(args) => replay::run(args),
        TraceCommand::Simulate(args) => simulate::run(args),
    }
}
