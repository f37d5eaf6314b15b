//! `forebay may-remove`: whether the programs can be removed from this host without harm. Packages
//! ask before they remove them. Reads only.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use forebay_control::ClientError;
use forebay_control::api::PoolStatus;
use forebay_control::config::STATE_DIR;
use forebay_control::units::Size;
use forebay_engine::Trust;
use forebay_runtime::{Record, Witness};

use crate::client::Daemon;
use crate::output;

/// Arguments of `forebay may-remove`.
#[derive(Args, Debug)]
pub struct RemovalArgs {
    /// The state directory of the servers of this host
    #[arg(long, value_name = "DIR", default_value = STATE_DIR)]
    state: PathBuf,
    #[command(flatten)]
    daemon: Daemon,
}

/// Fails, with the command to run, while a server serves or data is only in a cache.
pub fn run(args: &RemovalArgs) -> anyhow::Result<()> {
    match args.daemon.client().status() {
        Ok(status) => bail!("{}", in_service(&status)),
        Err(ClientError::NotRunning(_)) => {}
        Err(error) => return Err(error).context("it is unknown whether a server runs"),
    }
    if let Some(left) = left_in(&args.state)? {
        bail!("{left}");
    }
    Ok(output::line("no server runs, and every primary is complete")?)
}

/// The refusal while a server serves.
fn in_service(status: &PoolStatus) -> String {
    let names = |volumes: Vec<&str>| volumes.join(", ");
    let all = names(status.volumes.iter().map(|volume| volume.name.as_str()).collect());
    let dirty: u64 = status.volumes.iter().map(|volume| volume.dirty_bytes).sum();
    let attached = status.volumes.iter().filter(|volume| !volume.devices.is_empty());
    let detach: String =
        attached.map(|volume| format!("forebay detach {} && ", volume.name)).collect();
    let risk = match dirty {
        0 => String::new(),
        dirty => format!(", and {} are not on their primaries yet", Size(dirty)),
    };
    format!("a server serves {all}{risk}; first: {detach}forebay stop --drain")
}

/// The refusal because of dirty data in a cache that is not served.
fn left_in(state: &Path) -> anyhow::Result<Option<String>> {
    if !state.exists() {
        return Ok(None);
    }
    let context = || format!("state directory {}", state.display());
    let records =
        Witness::open(state).and_then(|witness| witness.load_all()).with_context(context)?;
    let is_left = |record: &&Record| record.dirty && record.trust != Trust::Nothing;
    let Some(record) = records.iter().find(is_left) else { return Ok(None) };
    let primaries = record.primaries.as_deref().unwrap_or_default().join(", ");
    Ok(Some(format!(
        "a cache holds data that is not on its primaries ({primaries}); first: start the server, \
         then forebay stop --drain; if the cache is lost for good, remove {}/{:032x}.witness",
        state.display(),
        u128::from_be_bytes(record.uuid),
    )))
}
