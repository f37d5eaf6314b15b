//! `forebay-sim`: runs the simulator from the command line.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use forebay_sim::atlas::Scenario;
use forebay_sim::away;
use forebay_sim::config::Setup;
use forebay_sim::errors;
use forebay_sim::links::{self, Slip};
use forebay_sim::planted::{Bug, Mischief};
use forebay_sim::rest;
use forebay_sim::run::{Options, Report, run};
use forebay_sim::runner::{
    Keep, Totals, catch, name_the_seed_in_panics, proves, run_seed, run_seeds, shrink,
};
use forebay_sim::script::{Step, script};
use forebay_sim::shard::real;
use forebay_sim::systematic;

/// Most seeds in which a planted bug may stay hidden.
const PLANTED_SEEDS: usize = 4000;

#[derive(Parser)]
#[command(name = "forebay-sim", about = "Crashes the cache in a simulated world.")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run many seeds: forebay-sim run --seeds 0..1000
    Run {
        /// First seed, and the one after the last.
        #[arg(long, default_value = "0..1000", value_parser = seeds)]
        seeds: (u64, u64),
        /// Threads.
        #[arg(long, default_value_t = 1)]
        jobs: usize,
        /// Stop after this many simulated crashes.
        #[arg(long, default_value_t = u64::MAX)]
        crashes: u64,
        /// Stop after this many failing seeds.
        #[arg(long, default_value_t = 10)]
        failures: usize,
        /// Only seeds that meet this scenario, such as PrimaryFlushErrors.
        #[arg(long, value_parser = scenario)]
        scenario: Option<Scenario>,
    },
    /// Run one seed and print its events: forebay-sim replay 42
    Replay {
        /// The seed.
        seed: u64,
        /// Steps of the script to keep, such as 0-5,8.
        #[arg(long, default_value = "0-1000000")]
        keep: Keep,
        /// Print the result only.
        #[arg(long)]
        quiet: bool,
        /// Print setup and script too.
        #[arg(long)]
        script: bool,
        /// Plant this bug.
        #[arg(long, value_parser = bug)]
        plant: Option<Bug>,
        /// Fail only by the kind of failure that the planted bug causes.
        #[arg(long, requires = "plant")]
        caught: bool,
    },
    /// Drop steps from a failing seed as long as it fails: forebay-sim shrink 42
    Shrink {
        /// The seed.
        seed: u64,
        /// Steps of the script to begin with.
        #[arg(long)]
        keep: Option<Keep>,
    },
    /// Crash short scripts after every event with every outcome: forebay-sim systematic
    Systematic,
    /// Let every request to a disk fail, one after the other, in short scripts: forebay-sim errors
    Errors,
    /// Damage the cache device while nobody uses it: forebay-sim damage --seeds 0..1000
    Damage {
        /// First seed, and the one after the last.
        #[arg(long, default_value = "0..1000", value_parser = seeds)]
        seeds: (u64, u64),
        /// Print what happens.
        #[arg(long)]
        verbose: bool,
    },
    /// Let the primary of one volume of several go away: forebay-sim away --seeds 0..1000
    Away {
        /// First seed, and the one after the last.
        #[arg(long, default_value = "0..1000", value_parser = seeds)]
        seeds: (u64, u64),
        /// Print what happens.
        #[arg(long)]
        verbose: bool,
    },
    /// Plant each bug and look for a seed that finds it: forebay-sim planted
    Planted,
    /// Many seeds of links and servers that break: forebay-sim links --seeds 0..1000
    Links {
        /// First seed, and the one after the last.
        #[arg(long, default_value = "0..1000", value_parser = seeds)]
        seeds: (u64, u64),
        /// Plant this mistake.
        #[arg(long, value_parser = slip)]
        plant: Option<Slip>,
    },
}

fn seeds(text: &str) -> Result<(u64, u64), String> {
    let hint = || format!("'{text}' is not a range of seeds: write for example 0..1000");
    let (from, to) = text.split_once("..").ok_or_else(hint)?;
    Ok((from.parse().map_err(|_| hint())?, to.parse().map_err(|_| hint())?))
}

fn bug(text: &str) -> Result<Bug, String> {
    Bug::ALL
        .into_iter()
        .find(|bug| format!("{bug:?}") == text)
        .ok_or_else(|| format!("'{text}' is not a planted bug; there are {:?}", Bug::ALL))
}

fn slip(text: &str) -> Result<Slip, String> {
    Slip::ALL
        .into_iter()
        .find(|slip| format!("{slip:?}") == text)
        .ok_or_else(|| format!("'{text}' is not a mistake to plant; there are {:?}", Slip::ALL))
}

fn scenario(text: &str) -> Result<Scenario, String> {
    let mut all = Scenario::ALL.into_iter().map(|(scenario, _)| scenario);
    all.find(|scenario| format!("{scenario:?}") == text).ok_or_else(|| {
        let names = Scenario::ALL.map(|(scenario, _)| scenario);
        format!("'{text}' is not a scenario; there are {names:?}")
    })
}

fn main() -> ExitCode {
    name_the_seed_in_panics();
    let good = match Arguments::parse().command {
        Command::Run { seeds, jobs, crashes, failures, scenario } => {
            let wanted = |seed| scenario.is_none_or(|s| Setup::from_seed(seed).scenario == s);
            let seeds = (seeds.0..seeds.1).filter(|&seed| wanted(seed));
            let totals = run_seeds(seeds, jobs, (crashes, failures), |totals| {
                eprintln!("{}", line(totals));
                if let Some((seed, failure)) = totals.failures.last() {
                    eprintln!("  last failing seed {seed}: {failure}");
                }
            });
            println!("{}", line(&totals));
            for (seed, failure) in &totals.failures {
                println!("seed {seed} failed {failure}\n  forebay-sim replay {seed}");
            }
            totals.failures.is_empty()
        }
        Command::Replay { seed, keep, quiet, script: show, plant, caught } => {
            if show {
                print_script(seed, &keep);
            }
            replay(seed, &keep, plant, (!quiet, caught))
        }
        Command::Shrink { seed, keep } => {
            let shrunk = shrink(seed, &keep.unwrap_or_default());
            said(shrunk.map(|keep| format!("forebay-sim replay {seed} --script --keep {keep}")))
        }
        Command::Systematic => {
            let crashes = systematic::every_crash(real, |script, mode, crashes| {
                println!("{script}, {}: {crashes} crashes", mode.name());
            });
            said(crashes.map(|crashes| format!("{crashes} crashes, none went wrong")))
        }
        Command::Errors => {
            let runs = errors::every_error(real, |script, mode, runs| {
                println!("{script}, {}: {runs} errors", mode.name());
            });
            said(runs.map(|runs| format!("{runs} errors, none went wrong")))
        }
        Command::Planted => planted(),
        Command::Links { seeds, plant } => run_links(seeds, plant),
        Command::Damage { seeds, verbose } => run_worlds("damage", rest::world, seeds, verbose),
        Command::Away { seeds, verbose } => run_worlds("away", away::world, seeds, verbose),
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints a result or what went wrong; whether it went well.
fn said<E: std::fmt::Display>(outcome: Result<String, E>) -> bool {
    match &outcome {
        Ok(text) => println!("{text}"),
        Err(why) => eprintln!("{why}"),
    }
    outcome.is_ok()
}

fn line(totals: &Totals) -> String {
    let t = &totals.tally;
    format!(
        "{} seeds, {} crashes ({} during recovery), {} requests ({} while loading, {} taken over, \
         {} failed), \
         {} faults, {} changes, {} refused starts, {} stripes left, \
         {} primaries judged alone ({} of the past, up to {} ms old; {} not promised), \
         {} MiB checked, \
         {} deltas ({} written whole again), {} duplicates, \
         {} stored, {} dense, {} similar, {} read around misses, {} filling stripes, \
         {} compressed in RAM ({} found there), {} events, digests {:016x} {:016x}, \
         {} failing seeds",
        totals.seeds,
        t.crashes,
        t.recovery_crashes,
        t.requests,
        t.while_loading,
        t.taken_over,
        t.failed,
        t.struck,
        t.changes,
        t.refusals,
        t.detached,
        t.ends[0],
        t.ends[1],
        t.oldest / 1_000_000,
        t.ends[2],
        t.checked >> 20,
        t.deltas,
        t.rebased,
        t.duplicates,
        t.stored,
        t.dense,
        t.similar,
        t.around,
        t.filling,
        t.packed,
        t.unpacked,
        t.events,
        totals.digests[0],
        totals.digests[1],
        totals.failures.len()
    )
}

fn print_script(seed: u64, keep: &Keep) {
    let setup = Setup::from_seed(seed);
    println!("{setup:#?}");
    for (i, step) in keep.of(script(&setup)).iter().enumerate() {
        println!("{i:>4}  {step:?}");
    }
}

fn replay(seed: u64, keep: &Keep, plant: Option<Bug>, (verbose, caught): (bool, bool)) -> bool {
    let result = run_seed(seed, keep, plant, verbose);
    match result {
        Err(failure) if caught && !plant.is_some_and(|bug| proves(bug, &failure)) => true,
        Ok(report) => {
            println!("seed {seed} holds; trace {:016x}; {:?}", report.hash, report.tally);
            true
        }
        Err(failure) => {
            println!("seed {seed} failed {failure}");
            false
        }
    }
}

fn planted() -> bool {
    let mut good = true;
    for bug in Bug::ALL {
        match catch(bug, PLANTED_SEEDS) {
            Ok(Some((seed, how))) => println!("{bug:?}: caught by seed {seed}: {how}"),
            Ok(None) => {
                println!("{bug:?}: NOT caught by {PLANTED_SEEDS} seeds");
                good = false;
            }
            Err(why) => {
                eprintln!("{why}");
                return false;
            }
        }
    }
    good
}

/// Runs worlds of one kind, which `command` names; whether all hold.
fn run_worlds(
    command: &str,
    world: fn(u64) -> (Setup, Vec<Step>),
    (from, to): (u64, u64),
    verbose: bool,
) -> bool {
    let (mut crashes, mut pages, mut failed, mut refusals, mut failing) = (0, 0, 0, 0, 0);
    for seed in from..to {
        let (setup, steps) = world(seed);
        let options = Options { verbose, ..Options::default() };
        match run(setup, &steps, real, Mischief::none(), options) {
            Ok(Report { tally, .. }) => {
                crashes += tally.crashes;
                pages += tally.struck;
                failed += tally.failed;
                refusals += tally.refusals;
            }
            Err(failure) => {
                let next = seed + 1;
                println!(
                    "seed {seed} failed {failure}\n  forebay-sim {command} --seeds {seed}..{next}"
                );
                failing += 1;
            }
        }
    }
    println!(
        "{} seeds: {crashes} crashes, {pages} pages damaged, {failed} requests failed, {refusals} \
         starts refused; {failing} failing seeds",
        to - from
    );
    failing == 0
}

/// Runs the seeds of the world of links; whether all hold.
fn run_links((from, to): (u64, u64), plant: Option<Slip>) -> bool {
    let mut total = links::Tally::default();
    let mut failing = 0;
    for seed in from..to {
        match links::run(seed, plant) {
            Ok(tally) => total.add(&tally),
            Err(why) => {
                println!(
                    "seed {seed} failed: {why}\n  forebay-sim links --seeds {seed}..{}",
                    seed + 1
                );
                failing += 1;
            }
        }
    }
    let [power, links, flushes, kills] = total.troubles;
    let [good, failed] = total.flushes;
    println!(
        "{} seeds hold: {power} power failures, {links} broken links, {flushes} failed flushes of \
         the server, {kills} killed processes; {good} flushes ended well and {failed} failed; \
         {failing} failing seeds",
        total.seeds
    );
    failing == 0
}
