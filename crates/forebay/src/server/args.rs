//! The arguments of `forebay serve`.

use std::path::PathBuf;

use clap::Args;
use forebay_control::config::{Config, ConfigError};

use crate::server::flags::{GROUP, ServeFlags};
use crate::server::logging::LogFormat;

/// Arguments of `forebay serve`: a configuration file, or flags for one volume.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// Read everything from this TOML file; for several volumes
    #[arg(long, value_name = "FILE", conflicts_with = GROUP)]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub flags: ServeFlags,
    /// Discard the content of the cache and start with an empty one; refused while it holds dirty
    /// data
    #[arg(long)]
    pub reset_cache: bool,
    /// Serve although a part of the log is lost, and it is unknown which blocks were in it. With
    /// --reset-cache: discard dirty data too
    #[arg(long)]
    pub accept_data_loss: bool,
    /// Accept the primary of this volume although it was changed or replaced since the cache was
    /// used: the cache's dirty blocks are written to it, and its other blocks are discarded. May be
    /// repeated; valid for one start
    #[arg(long, value_name = "VOLUME")]
    pub accept_primary: Vec<String>,
    /// Remove this volume, which is no longer configured, and lose its dirty blocks. May be
    /// repeated
    #[arg(long, value_name = "NAME")]
    pub forget_volume: Vec<String>,
    /// Format of the log on standard error
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

impl ServeArgs {
    /// The configuration given by the file or the flags.
    pub fn config(&self) -> anyhow::Result<Config> {
        let Some(path) = &self.config else {
            let config = self.flags.config().map_err(crate::WrongUsage)?;
            config.check().map_err(|error| crate::WrongUsage(error.to_string()))?;
            return Ok(config);
        };
        Config::read(path).map_err(|error| match error {
            ConfigError::Read { .. } => error.into(),
            _ => crate::WrongUsage(error.to_string()).into(),
        })
    }
}
