//! The server and its commands: each is parsed here and runs in the file of its name. Exit code 0:
//! success; 1: failure; 2: wrong usage. An error is one line: the problem, the value, the remedy.

mod analyze;
mod bench;
mod busy;
mod cli;
mod client;
mod completions;
mod disk;
mod doctor;
mod help;
mod host;
mod keeper;
mod man;
mod offline;
mod output;
mod removal;
mod server;
mod setup;
mod trace;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::Parser;
use forebay_device::{HugePages, OpenError};

use cli::{Cli, Command};
use keeper::Ended;

/// The command line or the configuration is invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WrongUsage(String);

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// The RAM tier and its tables are accessed at random.
#[global_allocator]
static ALLOCATOR: HugePages = HugePages;

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Serve(args) => server::serve::run(*args),
        Command::Status(args) => client::status::run(&args),
        Command::Top(args) => client::top::run(&args),
        Command::Events(args) => client::events::run(&args),
        Command::Clients(args) => client::clients::run(&args),
        Command::Drain(args) => client::drain::run(&args),
        Command::Stop(args) => client::stop::run(&args),
        Command::Set(args) => client::set::run(&args),
        Command::Retire(args) => client::retire::run(&args),
        Command::Pin(args) => client::pin::run(&args),
        Command::Prefetch(args) => client::prefetch::run(&args),
        Command::Rules(args) => client::rules::run(&args),
        Command::Apply(args) => client::apply::run(&args),
        Command::Config(args) => client::config::run(&args),
        Command::Upgrade(args) => client::upgrade::run(&args),
        Command::Attach(args) => disk::attach::run(&args),
        Command::Detach(args) => disk::detach::run(&args),
        Command::Analyze(args) => analyze::run(&args),
        Command::Check(args) => offline::check::run(&args),
        Command::Dump(args) => offline::dump::run(&args),
        Command::Salvage(args) => offline::salvage::run(&args),
        Command::Bench(args) => bench::run("bench", &args),
        Command::Demo(args) => bench::run("demo", &args),
        Command::Completions(args) => completions::run(&args),
        Command::ManPages(args) => man::run(&args),
        Command::MayRemove(args) => removal::run(&args),
        Command::Setup(args) => setup::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Help(args) => help::run(&args),
        Command::Trace(command) => trace::run(&command),
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    if let Some(&Ended(code)) = error.downcast_ref() {
        return ExitCode::from(code);
    }
    output::say(&format!("forebay: {}", explained(&error)));
    ExitCode::from(if is_usage(&error) { 2 } else { 1 })
}

/// An error with its causes and the remedy, in one line. A cause that repeats earlier text is
/// omitted.
fn explained(error: &anyhow::Error) -> String {
    let said = error.chain().fold(String::new(), |said, cause| {
        let text = cause.to_string();
        match () {
            () if said.is_empty() => text,
            () if said.contains(&text) => said,
            () => format!("{said}: {text}"),
        }
    });
    let root = error.root_cause().downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    let hint = match root.filter(|_| !said.contains(';')) {
        Some(ErrorKind::NotFound) => "; name one that is there",
        Some(ErrorKind::PermissionDenied) => "; run this as a user who may",
        _ => "",
    };
    said + hint
}

/// Whether the command line or the configuration caused the error.
fn is_usage(error: &anyhow::Error) -> bool {
    let uri = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(OpenError::BadUri { .. }))
    };
    error.is::<WrongUsage>() || error.chain().any(uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_twice() {
        let cause = std::io::Error::other("no");
        let error = anyhow::Error::new(cause).context("a: no; do b").context("volume x");
        assert_eq!(explained(&error), "volume x: a: no; do b");
        assert_eq!(explained(&error.context("more")), "more: volume x: a: no; do b");
        assert!(!is_usage(&anyhow::anyhow!("failed")));
        assert!(is_usage(&WrongUsage("wrong".to_owned()).into()));
    }
}
