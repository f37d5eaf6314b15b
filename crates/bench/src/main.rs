//! `forebay-bench`: the parts that developers measure. What users run is `forebay bench`.

use std::process::ExitCode;

use clap::Parser;
use forebay_bench::developer::{self, Part};
use forebay_device::HugePages;

/// Measures what the parts of Forebay cost.
#[derive(Parser)]
#[command(name = "forebay-bench", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    part: Part,
}

/// The RAM tier and the tables beside it are looked at in random places.
#[global_allocator]
static ALLOCATOR: HugePages = HugePages;

fn main() -> ExitCode {
    match developer::run(&Cli::parse().part) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("forebay-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
