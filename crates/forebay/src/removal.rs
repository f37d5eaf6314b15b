//! `forebay may-remove`: whether the programs can be removed from this host without harm. Packages
//! ask before they remove them. Reads only.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use forebay_control::api::PoolStatus;
use forebay_control::config::{Config, STATE_DIR};
use forebay_control::units::Size;
use forebay_control::{Client, ClientError};
use forebay_engine::Trust;
use forebay_runtime::{Record, Witness};

use crate::client::Daemon;
use crate::output;
use crate::setup::CONFIG;

/// Arguments of `forebay may-remove`.
#[derive(Args, Debug)]
pub struct RemovalArgs {
    /// The configuration of the service, which may name another control socket and state directory
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// The state directory of the servers of this host
    #[arg(long, value_name = "DIR", default_value = STATE_DIR)]
    state: PathBuf,
    #[command(flatten)]
    daemon: Daemon,
}

/// Fails, with the command to run, while a server serves or data is only in a cache.
pub fn run(args: &RemovalArgs) -> anyhow::Result<()> {
    let config = configured(&args.config)?;
    let socket = config.as_ref().and_then(|config| config.control.socket.clone());
    let named = socket.map(|socket| {
        let flag = format!(" --control {}", socket.display());
        (Client::new(socket), flag)
    });
    for (client, flag) in named.into_iter().chain([(args.daemon.client(), String::new())]) {
        match client.status() {
            Ok(status) => bail!("{}", in_service(&status, &flag)),
            Err(ClientError::NotRunning(_)) => {}
            Err(error) => return Err(error).context("it is unknown whether a server runs"),
        }
    }
    for state in config.iter().map(|config| &config.cache.state_dir).chain([&args.state]) {
        if let Some(left) = left_in(state)? {
            bail!("{left}");
        }
    }
    Ok(output::line("no server runs, and every primary is complete")?)
}

/// The configuration of the service, if there is one.
fn configured(path: &Path) -> anyhow::Result<Option<Config>> {
    if !path.try_exists().with_context(|| path.display().to_string())? {
        return Ok(None);
    }
    let config = Config::text(path).and_then(|text| Config::parse(path, &text));
    Ok(Some(config.context("it is unknown where the state of the cache is")?))
}

/// The refusal while a server serves; commands reach it with `flag`.
fn in_service(status: &PoolStatus, flag: &str) -> String {
    let names = |volumes: Vec<&str>| volumes.join(", ");
    let all = names(status.volumes.iter().map(|volume| volume.name.as_str()).collect());
    let dirty: u64 = status.volumes.iter().map(|volume| volume.dirty_bytes).sum();
    let attached = status.volumes.iter().filter(|volume| !volume.devices.is_empty());
    let detach: String =
        attached.map(|volume| format!("forebay detach {}{flag} && ", volume.name)).collect();
    let risk = match dirty {
        0 => String::new(),
        dirty => format!(", and {} are not on their primaries yet", Size(dirty)),
    };
    format!("a server serves {all}{risk}; first: {detach}forebay stop --drain{flag}")
}

/// The refusal because of dirty data in a cache that is not served.
fn left_in(state: &Path) -> anyhow::Result<Option<String>> {
    let context = || format!("state directory {}", state.display());
    if !state.try_exists().with_context(context)? {
        return Ok(None);
    }
    let witness = Witness::open(state).with_context(context)?;
    let load = |pool| {
        witness.load(pool).map_err(|error| {
            anyhow!(
                "{error}; it is unknown whether the cache holds data that is not on its primaries: \
                 restore the file, or remove it if the cache is lost for good"
            )
        })
    };
    let pools = witness.pools().with_context(context)?.into_iter();
    let records = pools.map(load).collect::<anyhow::Result<Vec<_>>>().with_context(context)?;
    let is_left = |record: &&Record| record.dirty && record.trust != Trust::Nothing;
    let Some(record) = records.iter().flatten().find(is_left) else { return Ok(None) };
    let primaries = record.primaries.as_deref().unwrap_or_default().join(", ");
    Ok(Some(format!(
        "a cache holds data that is not on its primaries ({primaries}); first: start the server, \
         then forebay stop --drain; if the cache is lost for good, remove {}/{:032x}.witness",
        state.display(),
        u128::from_be_bytes(record.uuid),
    )))
}
