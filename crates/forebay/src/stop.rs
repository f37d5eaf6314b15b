//! `forebay stop`: asks the server to stop, and waits until it has.

use std::time::Duration;

use forebay_control::{Client, ClientError};

use crate::cli::StopArgs;
use crate::drain::bar;
use crate::output;

/// How often the server is looked at.
const PERIOD: Duration = Duration::from_millis(100);

/// Stops the server.
pub fn run(args: &StopArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    client.stop(args.drain)?;
    wait(&client);
    Ok(output::line("stopped")?)
}

/// Waits until nobody answers, showing what is still dirty.
fn wait(client: &Client) {
    let bar = bar(0);
    loop {
        match client.status() {
            Err(ClientError::NotRunning(_)) => break,
            // On its way out it may be too busy to answer, or hang up in the middle.
            Err(_) => {}
            Ok(status) => {
                let dirty = status.cache.dirty_bytes;
                let total = bar.length().unwrap_or(0).max(dirty);
                bar.set_length(total);
                bar.set_position(total - dirty);
            }
        }
        std::thread::sleep(PERIOD);
    }
    bar.finish_and_clear();
}
