//! Short scripts in which each request to a disk fails once, and in which all writes from each
//! request on fail: at the start, while serving, at mode switches, drains and orderly stops, during
//! recovery, and when a lost cache is replaced.

use forebay_block::{ByteRange, ErrorKind, IoOp, VolumeId};
use forebay_engine::{Mode, Target};

use crate::atlas::Scenario;
use crate::disk::{Fault, Rule};
use crate::planted::Mischief;
use crate::run::{Options, Report, run};
use crate::script::Step;
use crate::shard::Maker;
use crate::systematic::{flush, scripts, setup, write};
use crate::world::Failure;

/// A script's crash comes after some parts of all its events, of [`PARTS`]; the last one comes
/// after everything.
const PARTS: u64 = 4;
/// The disks whose requests fail.
const DISKS: [Target; 2] = [Target::Cache, Target::Primary(VolumeId(0))];
const READ: &[IoOp] = &[IoOp::Read];
const WRITE: &[IoOp] = &[IoOp::Write, IoOp::WriteZeroes];
const DISCARD: &[IoOp] = &[IoOp::Discard];
const FLUSH: &[IoOp] = &[IoOp::Flush];

/// An injected error that was handled wrongly.
#[derive(Debug)]
pub struct Found {
    case: String,
    /// The failure that it led to.
    pub failure: Failure,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.case, self.failure)
    }
}

/// Injects every error into every script, in every mode; reports each script and mode when it is
/// done. Returns the number of errors.
///
/// # Errors
/// The first error that was handled wrongly.
pub fn every_error(
    make: Maker,
    mut progress: impl FnMut(&str, Mode, u64),
) -> Result<u64, Box<Found>> {
    let mut errors = 0;
    for script in Script::all() {
        for (_, mode) in Mode::NAMES {
            let done = script.fail_everywhere(mode, make)?;
            progress(script.name, mode, done);
            errors += done;
        }
    }
    Ok(errors)
}

/// A script, with its circumstances besides the error.
#[derive(Debug)]
pub struct Script {
    name: &'static str,
    steps: Vec<Step>,
    scenario: Scenario,
}

impl Script {
    /// The scripts of the systematic crashes, one with a mode switch, and one that loses the cache.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let plain = |(name, steps)| Self { name, steps, scenario: Scenario::Crashes };
        let mut all: Vec<Self> = scripts().into_iter().map(plain).collect();
        let switch = |mode| Step::SetMode(0, mode);
        all.push(Self {
            name: "mode switched",
            steps: vec![
                write(0, 16384),
                Step::Settle,
                flush(),
                switch(Mode::WriteAround),
                write(4096, 8192),
                flush(),
                switch(Mode::WriteThrough),
                write(0, 4096),
                flush(),
                Step::Settle,
                switch(Mode::WriteBack),
                write(4096, 4096),
                flush(),
            ],
            scenario: Scenario::ModeSwitches,
        });
        all.push(Self {
            name: "cache lost and replaced",
            steps: vec![
                write(0, 16384),
                Step::Settle,
                flush(),
                Step::Settle,
                Step::Break(0),
                Step::Crash { after: 0, recoveries: Vec::new() },
                write(4096, 8192),
                flush(),
            ],
            scenario: Scenario::CacheLost,
        });
        all
    }

    /// Injects an error into every request, without a crash and with one at several times. Returns
    /// the number of errors.
    ///
    /// # Errors
    /// The first error that was handled wrongly.
    pub fn fail_everywhere(&self, mode: Mode, make: Maker) -> Result<u64, Box<Found>> {
        let mut errors = 0;
        let events = self.run(mode, make, &Case::default())?.tally.events;
        for part in 0..=PARTS {
            for disk in DISKS {
                let crash = (part > 0).then(|| match part {
                    PARTS => u64::MAX,
                    _ => events * part / PARTS,
                });
                let sound = Case { crash, disk, error: None };
                for (nth, op) in self.run(mode, make, &sound)?.asked.into_iter().enumerate() {
                    for error in Error::of(disk, op) {
                        let error = Some((nth, error));
                        let report = self.run(mode, make, &Case { crash, disk, error })?;
                        // An error changes how a run ends, so the request of a later one may never
                        // come.
                        errors += u64::from(report.tally.struck > 0);
                    }
                }
            }
        }
        Ok(errors)
    }

    fn run(&self, mode: Mode, make: Maker, case: &Case) -> Result<Report, Box<Found>> {
        let mut setup = setup(mode);
        setup.scenario = self.scenario;
        setup.also = case.error.as_ref().map(|(_, error)| error.scenario);
        let crash = case.crash.map(|after| Step::Crash { after, recoveries: Vec::new() });
        let steps: Vec<Step> = crash.into_iter().chain(self.steps.iter().cloned()).collect();
        let planned = case.error.as_ref().map(|(nth, error)| (*nth, error.rule.clone()));
        let options = Options { watch: Some((case.disk, planned)), ..Options::default() };
        let report = run(setup, &steps, make, Mischief::none(), options).map_err(|failure| {
            let case = format!("script '{}' in {}: {case:?}", self.name, mode.name());
            Box::new(Found { case, failure })
        })?;
        assert!(case.error.is_some() || report.tally.struck == 0, "an error came by itself");
        Ok(report)
    }
}

/// One run of a script.
#[derive(Debug)]
struct Case {
    /// Number of events before the crash.
    crash: Option<u64>,
    disk: Target,
    /// The request that fails, by disk and number, and its error.
    error: Option<(usize, Error)>,
}

impl Default for Case {
    fn default() -> Self {
        Self { crash: None, disk: Target::Cache, error: None }
    }
}

/// An error, and the scenario of the atlas that it is an instance of.
#[derive(Clone, Debug)]
struct Error {
    rule: Rule,
    scenario: Scenario,
}

impl Error {
    /// The errors that a request may meet.
    fn of(disk: Target, op: IoOp) -> Vec<Self> {
        let media = Fault::Error(ErrorKind::Media);
        let range = ByteRange::new(0, u64::MAX);
        let error = |fault, ops, times, of_cache, of_primary| Self {
            rule: Rule { fault, ops, range, times },
            scenario: if disk == Target::Cache { of_cache } else { of_primary },
        };
        let write = |fault, times, of_cache| {
            error(fault, WRITE, times, of_cache, Scenario::PrimaryWriteErrors)
        };
        match op {
            IoOp::Read => {
                let (cache, primary) = (Scenario::CacheReadErrors, Scenario::PrimaryReadErrors);
                vec![error(media, READ, 1, cache, primary)]
            }
            IoOp::Flush => {
                let (cache, primary) = (Scenario::CacheFlushErrors, Scenario::PrimaryFlushErrors);
                vec![error(media, FLUSH, 1, cache, primary)]
            }
            IoOp::Write | IoOp::WriteZeroes => vec![
                write(media, 1, Scenario::CacheWriteErrors),
                write(Fault::TornError, 1, Scenario::CacheWriteErrors),
                write(media, u32::MAX, Scenario::CacheWritesFail),
            ],
            IoOp::Prefetch => Vec::new(),
            IoOp::Discard => {
                let (cache, primary) = (Scenario::CacheWriteErrors, Scenario::PrimaryWriteErrors);
                vec![error(media, DISCARD, 1, cache, primary)]
            }
        }
    }
}
