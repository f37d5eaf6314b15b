//! `forebay help`: short texts about topics, one screen each, and the help of every command.

use clap::{Args, CommandFactory};

use crate::WrongUsage;
use crate::cli::Cli;
use crate::output;

/// Every topic with its text, in the order in which they are listed.
const TOPICS: [(&str, &str); 8] = [
    ("first", include_str!("first.txt")),
    ("modes", include_str!("modes.txt")),
    ("sizes", include_str!("sizes.txt")),
    ("rules", include_str!("rules.txt")),
    ("devices", include_str!("devices.txt")),
    ("crash", include_str!("crash.txt")),
    ("upgrade", include_str!("upgrade.txt")),
    ("monitoring", include_str!("monitoring.txt")),
];

/// The end of `forebay --help`.
pub const AFTER: &str = "Topics: first, modes, sizes, rules, devices, crash, upgrade, \
monitoring (forebay help TOPIC)

Exit codes: 0 success; 1 failure, or something is wrong (`doctor`, `check`); 2 wrong usage

Environment:
  FOREBAY_CONTROL    path of the control socket
  FOREBAY_LOG        what `serve` logs: error, warn, info, debug, trace [default: info]
  FOREBAY_NO_KEEPER  any value: `serve` starts no keeper
  FOREBAY_BINARY     the program that the benchmarks start";

/// Arguments of `forebay help`.
#[derive(Args, Debug)]
pub struct HelpArgs {
    /// A topic (first, modes, sizes, rules, devices, crash, upgrade, monitoring), or a command
    words: Vec<String>,
}

/// Prints a topic, or the help of a command. `upgrade` and `rules` are both: `forebay upgrade
/// --help` has the command's.
pub fn run(args: &HelpArgs) -> anyhow::Result<()> {
    let topic = match &args.words[..] {
        [word] => TOPICS.iter().find(|(name, _)| name == word),
        _ => None,
    };
    if let Some((_, text)) = topic {
        return Ok(output::print(text)?);
    }
    let mut command = Cli::command();
    command.build();
    let mut found = &mut command;
    for word in &args.words {
        let unknown = || {
            let names: Vec<_> = TOPICS.iter().map(|(name, _)| *name).collect();
            let what = format!("there is no help on {word:?}");
            WrongUsage(format!("{what}; topics: {}; or name a command", names.join(", ")))
        };
        found = found.find_subcommand_mut(word).ok_or_else(unknown)?;
    }
    Ok(output::print(&found.render_long_help().to_string())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines and columns of a terminal.
    const SCREEN: (usize, usize) = (24, 80);

    #[test]
    fn a_topic_fits_on_one_screen() {
        for (name, text) in TOPICS {
            assert!(text.lines().count() < SCREEN.0, "{name}: {} lines", text.lines().count());
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(longest < Some(SCREEN.1 + 1), "{name}: {longest:?} columns");
        }
    }

    #[test]
    fn the_help_lists_every_topic() {
        let names: Vec<_> = TOPICS.iter().map(|(name, _)| *name).collect();
        assert!(AFTER.contains(&names.join(", ")));
    }
}
