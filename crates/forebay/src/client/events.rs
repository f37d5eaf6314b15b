//! `forebay events`: what an operator must know, now or as it happens, and its acknowledgement.

use std::time::Duration;

use clap::{Args, Subcommand};
use forebay_control::api::Event;
use forebay_control::{Client, ClientError, Followed, text};

use crate::client::Daemon;
use crate::output;

/// Pause before a server that has gone is looked for again.
const PAUSE: Duration = Duration::from_secs(1);

/// Arguments of `forebay events`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct EventsArgs {
    #[command(subcommand)]
    command: Option<EventsCommand>,
    /// Go on with new events as they happen, also those of the next server
    #[arg(long, short)]
    follow: bool,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// What to do with an event.
#[derive(Subcommand, Debug)]
enum EventsCommand {
    /// Acknowledge an event, so that others see that somebody knows of it
    #[command(after_help = "Example:\n  forebay events ack 12 --by night-shift")]
    Ack(AckArgs),
}

/// Arguments of `forebay events ack`.
#[derive(Args, Debug)]
struct AckArgs {
    /// Its number
    id: u64,
    /// Who acknowledges it [default: $USER]
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
    /// Print the event as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Lists or follows the events, or acknowledges one.
pub fn run(args: &EventsArgs) -> anyhow::Result<()> {
    if let Some(EventsCommand::Ack(args)) = &args.command {
        return acknowledge(args);
    }
    let client = args.daemon.client();
    if args.follow {
        return follow(&client, args.json);
    }
    let events = client.events()?.events;
    if args.json {
        return events.iter().try_for_each(|event| show(event, true));
    }
    Ok(output::print(&text::events(&events))?)
}

fn acknowledge(args: &AckArgs) -> anyhow::Result<()> {
    let user = || std::env::var("USER").ok().filter(|user| !user.is_empty());
    let by = args
        .by
        .clone()
        .or_else(user)
        .unwrap_or_else(|| format!("user {}", rustix::process::getuid().as_raw()));
    let event = args.daemon.client().acknowledge(args.id, &by)?;
    show(&event, args.json)
}

fn show(event: &Event, json: bool) -> anyhow::Result<()> {
    let shown = if json { serde_json::to_string(event)? + "\n" } else { text::event(event) };
    Ok(output::print(&shown)?)
}

/// Shows the remembered events, then new ones. Only an interruption ends it.
fn follow(client: &Client, json: bool) -> anyhow::Result<()> {
    let (mut last, mut failed, mut is_there) = (0, None, false);
    loop {
        let ended = client.follow(last, |followed| {
            is_there = true;
            let outcome = match followed {
                Followed::Event(event) => {
                    last = event.id;
                    show(&event, json)
                }
                Followed::Acknowledged(who) if json => serde_json::to_string(&who)
                    .map_err(anyhow::Error::new)
                    .and_then(|line| Ok(output::line(&line)?)),
                Followed::Acknowledged(who) => {
                    let line = format!("{:>4}  acknowledged by {}", who.id, who.by);
                    output::line(&line).map_err(anyhow::Error::new)
                }
            };
            failed = outcome.err();
            failed.is_none()
        });
        if let Some(error) = failed {
            return Err(error);
        }
        match ended {
            Err(error @ ClientError::Refused { .. }) => return Err(error.into()),
            Err(error) if !is_there => return Err(error.into()),
            _ => std::thread::sleep(PAUSE),
        }
    }
}
