//! `forebay trace record`: tells the server to record, shows the progress, and ends it.

use std::path::absolute;
use std::time::Duration;

use anyhow::{Context, bail};
use forebay_control::Client;
use forebay_control::api::{TraceRequest, TraceStatus};
use forebay_control::units::Size;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::args::RecordArgs;
use crate::output;

/// Interval between two queries of the progress.
const PERIOD: Duration = Duration::from_millis(200);

/// Records until the time is over, the server ends it, or Ctrl-C.
pub fn run(args: &RecordArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    let path = absolute(&args.out).with_context(|| format!("{}", args.out.display()))?;
    let path = path.to_str().map(str::to_owned);
    let path = path.with_context(|| format!("{}: not UTF-8", args.out.display()))?;
    // From here on Ctrl-C ends the recording, not only this command.
    let mut wait = Wait::new()?;
    client.start_trace(&args.volume, &TraceRequest { path, seconds: args.seconds })?;
    let status = follow(&client, args, &mut wait)?;
    match args.json {
        true => output::line(&serde_json::to_string_pretty(&status)?)?,
        false => output::line(&line(&status))?,
    }
    match &status.error {
        Some(error) => bail!("the recording failed: {error}; {} is not whole", status.path),
        None => Ok(()),
    }
}

fn follow(client: &Client, args: &RecordArgs, wait: &mut Wait) -> anyhow::Result<TraceStatus> {
    let style = ProgressStyle::with_template("{spinner} {msg}").expect("the template is sound");
    let bar = ProgressBar::new_spinner().with_style(style);
    let status = loop {
        if wait.interrupted() {
            break client.stop_trace(&args.volume)?;
        }
        let status = client.trace(&args.volume)?;
        bar.set_message(line(&status));
        bar.tick();
        if status.state != "running" {
            break status;
        }
    };
    bar.finish_and_clear();
    Ok(status)
}

fn line(status: &TraceStatus) -> String {
    let (requests, bytes) = (status.requests, Size(status.bytes));
    let dropped = match status.dropped {
        0 => String::new(),
        dropped => format!("; {dropped} more were dropped, since the file was too slow"),
    };
    format!("{}: {requests} requests, {bytes}, in {:.1} s{dropped}", status.path, status.seconds)
}

/// Waits for a while, or for Ctrl-C.
struct Wait {
    runtime: tokio::runtime::Runtime,
    interrupt: Signal,
    terminate: Signal,
}

impl Wait {
    fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let _context = runtime.enter();
        let interrupt = signal(SignalKind::interrupt())?;
        let terminate = signal(SignalKind::terminate())?;
        drop(_context);
        Ok(Self { runtime, interrupt, terminate })
    }

    /// Waits a period; true when it was interrupted.
    fn interrupted(&mut self) -> bool {
        let Self { runtime, interrupt, terminate } = self;
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => true,
                _ = terminate.recv() => true,
                () = tokio::time::sleep(PERIOD) => false,
            }
        })
    }
}
