//! `forebay check`: verifies a cache device that no server uses: its superblocks, its log, the
//! checksums of all data, and whether its dirty blocks can be read.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use forebay_device::open_cache_read_only;
use forebay_runtime::Blocking;
use forebay_volume::offline::Report;

use crate::offline::report::{blocks, read, summary, text};
use crate::offline::salvage;
use crate::{busy, output};

/// Arguments of `forebay check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// The cache device
    pub cache: PathBuf,
    /// Verify structures only, not the data
    #[arg(long)]
    pub fast: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Verifies a cache device; fails if there is any problem.
pub fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let report = read(&args.cache, !args.fast)?;
    let outcome = if args.fast { None } else { Some(salvageable(&args.cache)?) };
    let lost = outcome.as_ref().is_some_and(|outcome| !outcome.is_whole());
    if args.json {
        let mut value = summary(&report, outcome.as_ref());
        if let Some(outcome) = &outcome {
            (value["lost"], value["lost_records"]) = outcome.losses_json();
        }
        value["good"] = (!lost && report.problems.is_empty()).into();
        output::line(&format!("{value:#}"))?;
    } else {
        let losses = outcome.as_ref().map(salvage::Outcome::losses).unwrap_or_default();
        output::print(&(text(&report, outcome.as_ref()) + &losses))?;
    }
    let count = report.problems.len();
    let dirty = report.problems.iter().filter(|problem| problem.dirty).count();
    match (count, dirty) {
        _ if lost => bail!(
            "{}: a part of the data that only this device holds is lost, listed above; start the \
             server to serve and destage the rest, or write it to a primary with `forebay salvage`",
            args.cache.display()
        ),
        (0, _) => say_good(args, &report),
        (_, 0) => bail!(
            "{}: {count} problems, none of them in dirty data; the blocks concerned are read \
             from the primary again",
            args.cache.display()
        ),
        _ => bail!(
            "{}: {count} problems, {dirty} of them in dirty data that only this device holds; \
             start the server to destage what can be read, and check the volume",
            args.cache.display()
        ),
    }
}

/// Reports a cache without problems.
fn say_good(args: &CheckArgs, report: &Report) -> anyhow::Result<()> {
    if args.json {
        return Ok(());
    }
    let dirty = blocks(report.dirty_blocks(None));
    let what = if args.fast {
        format!("its structures are sound, {dirty} dirty; its data was not read")
    } else {
        format!("sound, {dirty} dirty, all of it readable")
    };
    Ok(output::line(&format!("good: {what}"))?)
}

/// The dirty blocks that can be read, and those that are lost.
fn salvageable(path: &Path) -> anyhow::Result<salvage::Outcome> {
    let device = busy::open(|| open_cache_read_only(path))?;
    let mut queue = Blocking::open(&*device).with_context(|| path.display().to_string())?;
    salvage::survey(path, &mut queue)
}
