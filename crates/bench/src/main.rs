//! `forebay-bench`: measurements for developers, and the benchmarks for users, which `forebay
//! bench` and `forebay demo` call. Exit code 0: done; 1: failed; 2: wrong usage.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser};
use clap_mangen::generate_to;
use forebay_bench::WrongUsage;
use forebay_bench::developer::{self, Part};
use forebay_bench::user::{self, Asked};
use forebay_device::HugePages;

/// Measures the costs of Forebay's parts.
#[derive(Parser)]
#[command(name = "forebay-bench", version, max_term_width = 100)]
#[command(after_help = "The benchmarks for users are forebay bench and forebay demo.")]
struct Cli {
    #[command(subcommand)]
    part: Part,
}

/// `forebay bench` and `forebay demo`, under the name that users know.
#[derive(Parser)]
#[command(name = "forebay", bin_name = "forebay", version, max_term_width = 100)]
struct User {
    #[command(subcommand)]
    asked: Asked,
}

/// The RAM tier and its tables are accessed at random places.
#[global_allocator]
static ALLOCATOR: HugePages = HugePages;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let (name, outcome) = match arguments.get(1).and_then(|word| word.to_str()) {
        Some("bench" | "demo") => ("forebay", user::run(&User::parse_from(arguments).asked)),
        Some("man-pages") => ("forebay-bench", man_pages(&arguments[2..])),
        _ => ("forebay-bench", developer::run(&Cli::parse_from(arguments).part)),
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    eprintln!("{name}: {error:#}");
    ExitCode::from(if error.is::<WrongUsage>() { 2 } else { 1 })
}

/// Writes the manual pages of `forebay bench` and `forebay demo`, as `forebay man-pages` writes the
/// others.
fn man_pages(arguments: &[OsString]) -> anyhow::Result<()> {
    let [directory] = arguments else {
        return Err(WrongUsage("use forebay-bench man-pages DIRECTORY".to_owned()).into());
    };
    let pages = Path::new(directory).join("man1");
    std::fs::create_dir_all(&pages)?;
    let mut forebay = User::command().disable_help_subcommand(true);
    forebay.build();
    for command in forebay.get_subcommands() {
        generate_to(command.clone(), &pages)?;
    }
    Ok(())
}
