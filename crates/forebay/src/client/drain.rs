//! `forebay drain`: starts a job in the server and shows its progress.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use clap::Args;
use forebay_control::Client;
use forebay_control::api::{Job, JobState};
use forebay_control::units::Size;

use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay drain`.
#[derive(Args, Debug)]
pub struct DrainArgs {
    /// The volume to drain [default: all of them]
    #[arg(conflicts_with_all = ["job", "list"])]
    pub volume: Option<String>,
    /// Return at once and print the job's id
    #[arg(long, conflicts_with_all = ["job", "list"])]
    pub background: bool,
    /// List the drains that the server remembers, oldest first
    #[arg(long, conflicts_with = "job")]
    pub list: bool,
    /// Show a drain that was started earlier
    #[arg(long, value_name = "NUMBER")]
    pub job: Option<u64>,
    /// Cancel it; data already written stays written
    #[arg(long, requires = "job")]
    pub cancel: bool,
    /// Print JSON: an object on one line for each job
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Interval between two queries for the progress: the time so far divided by this, within bounds,
/// so that the end is noticed at most 2 % late.
const PERIOD_SHARE: u32 = 50;
const PERIOD_MIN: Duration = Duration::from_millis(5);
const PERIOD_MAX: Duration = Duration::from_millis(200);

/// Starts, lists, shows or cancels drains.
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
    let bar = output::bar(job.total_bytes);
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
