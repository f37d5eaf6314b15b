//! `forebay completions`: the script by which a shell completes commands, flags and values, made
//! from their declarations.

use clap::{Args, CommandFactory, ValueEnum};
use clap_complete::generate;
use clap_complete::shells::{Bash, Fish, Zsh};

use crate::cli::Cli;
use crate::output;

/// Arguments of `forebay completions`.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// The shells that have a script.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Prints the script.
pub fn run(args: &CompletionsArgs) -> anyhow::Result<()> {
    let (mut command, mut script) = (Cli::command(), Vec::new());
    match args.shell {
        Shell::Bash => generate(Bash, &mut command, "forebay", &mut script),
        Shell::Zsh => generate(Zsh, &mut command, "forebay", &mut script),
        Shell::Fish => generate(Fish, &mut command, "forebay", &mut script),
    }
    Ok(output::print(&String::from_utf8(script)?)?)
}
