//! The rules of the workspace that neither the compiler nor clippy knows, as two checks: `cargo
//! xtask layers` (dependencies between crates, and between the rooms of the engine) and `cargo
//! xtask style` (the form of source files and documents). Each prints the violations and how to fix
//! them, and exits with 1 if there are any. `cargo xtask rooms` prints which rooms of the engine
//! each room imports; `cargo xtask settings` and `cargo xtask statistics` write the tables of the
//! code to the manual.

mod docs;
mod layers;
mod markdown;
mod rooms;
mod scan;
mod style;
mod tables;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let found = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["layers"] => layers::workspace(&root()).and_then(|mut report| {
            let rooms = rooms::workspace(&root())?;
            report.problems.extend(rooms.problems);
            report.summary = format!("{}\n{}", report.summary, rooms.summary);
            Ok(report)
        }),
        ["rooms"] => rooms::graph(&root()),
        ["style"] => style::workspace(&root()),
        ["settings"] => tables::SETTINGS.write(&root()),
        ["statistics"] => tables::STATISTICS.write(&root()),
        _ => {
            eprintln!("usage: cargo xtask layers | rooms | style | settings | statistics");
            return ExitCode::from(2);
        }
    };
    match found {
        Ok(report) if report.problems.is_empty() => {
            println!("{}", report.summary);
            ExitCode::SUCCESS
        }
        Ok(report) => {
            for problem in &report.problems {
                eprintln!("{problem}");
            }
            ExitCode::from(1)
        }
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(1)
        }
    }
}

/// The result of a check.
struct Report {
    /// One line for each violation; none when all is well.
    problems: Vec<String>,
    /// One line on the files or crates checked, for people.
    summary: String,
}

/// The workspace's directory.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("this crate lies two directories deep").to_owned()
}
