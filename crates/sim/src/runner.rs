//! Runs seeds, sequentially or on several threads, and shrinks a failing one.

use std::cell::Cell;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::config::Setup;
use crate::failure::{Failure, Kind};
use crate::planted::{Bug, Mischief};
use crate::run::{Options, Report, run};
use crate::script::{Step, script};
use crate::shard::real;
use crate::tally::Tally;

thread_local! {
    /// The seed that this thread is running, for the message of a panic.
    static RUNNING: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The steps of a script to keep: all, or ranges of their numbers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Keep(pub Option<Vec<(usize, usize)>>);

impl std::str::FromStr for Keep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            text.parse().map_err(|_| format!("'{text}' is not a step: write for example 0-5,8"))
        };
        let range = |part: &str| match part.split_once('-') {
            Some((from, to)) => Ok((number(from)?, number(to)?)),
            None => number(part).map(|n| (n, n)),
        };
        text.split(',').map(range).collect::<Result<_, String>>().map(|ranges| Self(Some(ranges)))
    }
}

impl Keep {
    fn from_numbers(numbers: &[usize]) -> Self {
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for &n in numbers {
            match ranges.last_mut() {
                Some((_, to)) if *to + 1 == n => *to = n,
                _ => ranges.push((n, n)),
            }
        }
        Self(Some(ranges))
    }

    /// The steps of a script that are kept.
    #[must_use]
    pub fn of(&self, steps: Vec<Step>) -> Vec<Step> {
        let Some(ranges) = &self.0 else { return steps };
        let kept = |n: usize| ranges.iter().any(|&(from, to)| (from..=to).contains(&n));
        steps.into_iter().enumerate().filter(|&(n, _)| kept(n)).map(|(_, step)| step).collect()
    }
}

impl std::fmt::Display for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(ranges) = &self.0 else { return f.write_str("all") };
        for (i, (from, to)) in ranges.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            if from == to {
                write!(f, "{comma}{from}")?;
            } else {
                write!(f, "{comma}{from}-{to}")?;
            }
        }
        Ok(())
    }
}

/// Runs one seed with the real engine.
///
/// # Errors
/// The failure.
pub fn run_seed(
    seed: u64,
    keep: &Keep,
    bug: Option<Bug>,
    verbose: bool,
) -> Result<Report, Failure> {
    RUNNING.set(Some(seed));
    let setup = Setup::from_seed(seed);
    let steps = keep.of(script(&setup));
    let options = Options { verbose, ..Options::default() };
    let mischief = Mischief::planted(bug, &setup);
    let report = run(setup, &steps, real, mischief, options);
    RUNNING.set(None);
    report
}

/// Makes panics name the running seed and the command that replays it.
pub fn name_the_seed_in_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        usual(info);
        if let Some(seed) = RUNNING.get() {
            eprintln!("seed {seed} failed: forebay-sim replay {seed}");
        }
    }));
}

/// The results of many seeds.
#[derive(Debug, Default)]
pub struct Totals {
    /// Seeds that were run.
    pub seeds: u64,
    /// Sums of all counters.
    pub tally: Tally,
    /// Hashes of all seeds' events, and of their disks' content at the end. They are equal for
    /// equal seeds as long as the engine behaves the same.
    pub digests: [u64; 2],
    /// The failing seeds, with their failures.
    pub failures: Vec<(u64, Failure)>,
}

/// Runs these seeds on `jobs` threads, until `crashes` were simulated or `failures_max` seeds
/// failed. `progress` is called from time to time, and at each failure.
pub fn run_seeds(
    seeds: impl Iterator<Item = u64> + Send,
    jobs: usize,
    (crashes, failures_max): (u64, usize),
    progress: impl Fn(&Totals) + Sync,
) -> Totals {
    let seeds = Mutex::new(seeds);
    let totals = Mutex::new(Totals::default());
    let work = || loop {
        let next = seeds.lock().expect("no thread panics: that ends the process").next();
        let Some(seed) = next else { return };
        let result = run_seed(seed, &Keep::default(), None, false);
        let mut totals = totals.lock().expect("no thread panics: that ends the process");
        if totals.failures.len() >= failures_max || totals.tally.crashes >= crashes {
            return;
        }
        totals.seeds += 1;
        match result {
            Ok(report) => {
                totals.tally.add(&report.tally);
                // Addition makes the result independent of the order.
                for (sum, digest) in totals.digests.iter_mut().zip([report.hash, report.content]) {
                    *sum = sum.wrapping_add(digest.rotate_left(seed as u32 % 64));
                }
            }
            Err(failure) => {
                totals.failures.push((seed, failure));
                progress(&totals);
            }
        }
        if totals.seeds.is_multiple_of(500) {
            progress(&totals);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..jobs {
            scope.spawn(work);
        }
        work();
    });
    totals.into_inner().expect("no thread panics: that ends the process")
}

/// Drops steps from a failing seed's script as long as it still fails. Each attempt has its own
/// process, since a failure may be a panic.
///
/// # Errors
/// If the seed does not fail, or no process can be started.
pub fn shrink(seed: u64, keep: &Keep) -> Result<Keep, String> {
    let count = script(&Setup::from_seed(seed)).len();
    let mut kept: Vec<usize> = match &keep.0 {
        Some(ranges) => ranges.iter().flat_map(|&(from, to)| from..=to).collect(),
        None => (0..count).collect(),
    };
    let Some(how) = failing(seed, &Keep::from_numbers(&kept))? else {
        return Err(format!("seed {seed} does not fail: nothing to shrink"));
    };
    let same = |kept: &[usize]| {
        failing(seed, &Keep::from_numbers(kept)).map(|failing| failing == Some(how))
    };
    let mut chunk = kept.len().div_ceil(2);
    while chunk > 0 {
        let mut at = 0;
        let mut dropped = false;
        while at < kept.len() {
            let mut fewer = kept.clone();
            fewer.drain(at..(at + chunk).min(kept.len()));
            if !fewer.is_empty() && same(&fewer)? {
                kept = fewer;
                dropped = true;
            } else {
                at += chunk;
            }
        }
        if !dropped || chunk > 1 {
            chunk = if chunk == 1 { 0 } else { chunk.div_ceil(2).min(chunk - 1) };
        }
    }
    Ok(Keep::from_numbers(&kept))
}

/// How a seed fails, which must stay the same while its script shrinks: the outer `None` if it does
/// not fail, the inner one if the engine panics.
fn failing(seed: u64, keep: &Keep) -> Result<Option<Option<Kind>>, String> {
    let text = replay(seed, &["--keep", &keep.to_string()])?;
    Ok(text.map(|text| Kind::ALL.into_iter().find(|kind| text.contains(&kind.to_string()))))
}

/// Replays a seed in a separate process; returns its output if it failed.
fn replay(seed: u64, more: &[&str]) -> Result<Option<String>, String> {
    let program = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
    let output = Command::new(program)
        .args(["replay", &seed.to_string(), "--quiet"])
        .args(more)
        .stderr(Stdio::null())
        .output()
        .map_err(|e| format!("cannot start a process: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_string();
    Ok((!output.status.success()).then_some(text))
}

/// Looks for a seed, among the first `count` whose worlds can show the bug, that passes but fails
/// with the bug planted, by the kind of failure that it causes. Returns the seed and its failure.
///
/// # Errors
/// If no process can be started.
pub fn catch(bug: Bug, count: usize) -> Result<Option<(u64, String)>, String> {
    for seed in seeds_for(bug).take(count) {
        let text = replay(seed, &["--plant", &format!("{bug:?}"), "--caught"])?;
        if let Some(how) = text.filter(|text| !text.is_empty())
            && replay(seed, &[])?.is_none()
        {
            return Ok(Some((seed, how)));
        }
    }
    Ok(None)
}

/// The seeds whose worlds can show a bug.
pub fn seeds_for(bug: Bug) -> impl Iterator<Item = u64> {
    (bug.first_seed()..).filter(move |&seed| bug.fits(&Setup::from_seed(seed)))
}

/// Whether a failure proves that this bug is detected: it is of the bug's kind, and the clients had
/// begun to work.
#[must_use]
pub fn proves(bug: Bug, failure: &Failure) -> bool {
    failure.kind == bug.kind() && failure.step > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_to_keep_are_written_as_they_are_read() {
        for text in ["0", "0-5,8", "1,3-4,9-12"] {
            assert_eq!(text.parse::<Keep>().expect("valid").to_string(), text);
        }
        assert!("1-".parse::<Keep>().is_err());
        assert_eq!(Keep::from_numbers(&[0, 1, 2, 5]).to_string(), "0-2,5");
    }
}
