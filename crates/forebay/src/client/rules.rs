//! `forebay rules`: which rules there are, and on how much each has decided.

use clap::Args;
use forebay_control::text;

use crate::client::Daemon;
use crate::client::status::print;

/// Arguments of `forebay rules`.
#[derive(Args, Debug)]
pub struct RulesArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Shows the rules.
pub fn run(args: &RulesArgs) -> anyhow::Result<()> {
    let rules = args.daemon.client().status()?.rules;
    print(args.json, &rules, || text::rules(&rules))
}
