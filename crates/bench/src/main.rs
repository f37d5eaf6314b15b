//! `forebay-bench`: measurements for developers, and the benchmarks for users, which `forebay
//! bench` and `forebay demo` call. Exit code 0: done; 1: failed; 2: wrong usage.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
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
    let (name, outcome) = if arguments.get(1).is_some_and(|word| word == "bench" || word == "demo")
    {
        ("forebay", user::run(&User::parse_from(arguments).asked))
    } else {
        ("forebay-bench", developer::run(&Cli::parse_from(arguments).part))
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    eprintln!("{name}: {error:#}");
    ExitCode::from(if error.is::<WrongUsage>() { 2 } else { 1 })
}
