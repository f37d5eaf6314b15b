//! `forebay trace`: records what clients ask of a volume, replays it, and simulates policies
//! over it.

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
