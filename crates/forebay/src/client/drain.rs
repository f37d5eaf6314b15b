//! `forebay drain`: starts a job in the server and shows how far it is.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use forebay_control::Client;
use forebay_control::api::{Job, JobState};
use forebay_control::units::Size;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};

use crate::cli::DrainArgs;
use crate::output;

/// How long to wait before the progress is asked for again: a share of the time so far, so that the
/// end is seen late by 2 % at most, within bounds.
const PERIOD_SHARE: u32 = 50;
const PERIOD_MIN: Duration = Duration::from_millis(5);
const PERIOD_MAX: Duration = Duration::from_millis(200);

/// Drains, or asks about drains.
pub fn run(args: &DrainArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    if args.list {
        return client.jobs()?.iter().try_for_each(|job| say(args, job));
    }
    if let Some(id) = args.job {
        let job = if args.cancel { client.cancel(id)? } else { client.job(id)? };
        say(args, &job)?;
        ensure!(job.state != JobState::Failed, "job {} failed", job.id);
        return Ok(());
    }
    let job = client.drain(args.volume.as_deref())?;
    if args.background {
        return say(args, &job);
    }
    let job = follow(&client, job)?;
    if args.json || job.state == JobState::Done {
        say(args, &job)?;
    }
    match job.state {
        JobState::Done => Ok(()),
        JobState::Cancelled => bail!("job {} was cancelled; {} left", job.id, left(&job)),
        _ => bail!("job {} failed: {}", job.id, job.error.as_deref().unwrap_or("see the log")),
    }
}

fn say(args: &DrainArgs, job: &Job) -> anyhow::Result<()> {
    match args.json {
        true => Ok(output::line(&serde_json::to_string(job)?)?),
        false => Ok(output::line(&line(job))?),
    }
}

/// Shows the job's progress until it ends.
fn follow(client: &Client, mut job: Job) -> anyhow::Result<Job> {
    let bar = bar(job.total_bytes);
    let began = Instant::now();
    while job.state == JobState::Running {
        bar.set_length(job.total_bytes);
        bar.set_position(job.total_bytes - job.remaining_bytes.min(job.total_bytes));
        std::thread::sleep((began.elapsed() / PERIOD_SHARE).clamp(PERIOD_MIN, PERIOD_MAX));
        job = client.job(job.id)?;
    }
    bar.finish_and_clear();
    Ok(job)
}

/// A progress bar over bytes, on standard error; nothing where that is not a terminal.
pub fn bar(total: u64) -> ProgressBar {
    let template = "{bar:40} {done} of {all}, {pace}/s, {eta} left";
    let style = ProgressStyle::with_template(template).expect("the template is sound");
    let size = |value: u64, out: &mut dyn Write| {
        // A terminal that takes no text shows none.
        let _ = write!(out, "{}", Size(value));
    };
    let style = style
        .with_key("done", move |state: &ProgressState, out: &mut dyn Write| size(state.pos(), out))
        .with_key("all", move |state: &ProgressState, out: &mut dyn Write| {
            size(state.len().unwrap_or_default(), out);
        })
        .with_key("pace", move |state: &ProgressState, out: &mut dyn Write| {
            size(state.per_sec() as u64, out);
        });
    ProgressBar::new(total).with_style(style)
}

fn left(job: &Job) -> String {
    format!("{} are still dirty", Size(job.remaining_bytes))
}

/// A job in one line.
fn line(job: &Job) -> String {
    let done = Size(job.total_bytes - job.remaining_bytes.min(job.total_bytes));
    let (id, total) = (job.id, Size(job.total_bytes));
    let of = job.volume.as_ref().map_or("all volumes".to_owned(), |name| format!("volume {name}"));
    match job.state {
        JobState::Running => format!("job {id} running: {of}, {done} of {total} written"),
        JobState::Done => format!("job {id} done: {of}, {total} written in {:.1} s", job.seconds),
        JobState::Cancelled => format!("job {id} cancelled: {of}, {}", left(job)),
        JobState::Failed => {
            let why = job.error.as_deref().unwrap_or("see the log");
            format!("job {id} failed: {of}, {why}")
        }
    }
}
