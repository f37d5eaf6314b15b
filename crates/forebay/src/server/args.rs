//! The arguments of `forebay serve`.

use std::path::PathBuf;

use clap::Args;
use forebay_control::config::{Config, ConfigError};

use crate::server::flags::{GROUP, ServeFlags};
use crate::server::kept::Kept;
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
    /// Do not start a keeper, which starts the server again if it dies, without an error for its
    /// clients. FOREBAY_NO_KEEPER in the environment, with any value, does
    /// the same
    #[arg(long)]
    pub no_keeper: bool,
    /// There is a keeper, at the other end of standard input
    #[arg(long, hide = true)]
    pub kept: bool,
    /// Format of the log on standard error
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// The variable that stands for `--no-keeper`.
const NO_KEEPER: &str = "FOREBAY_NO_KEEPER";

impl ServeArgs {
    /// Whether this process is to be the keeper of a server.
    pub fn wants_keeper(&self) -> bool {
        let without = std::env::var_os(NO_KEEPER).is_some_and(|text| !text.is_empty());
        !self.kept && !self.no_keeper && !without
    }

    /// The configuration given by the file or the flags, and the text of the file.
    ///
    /// A restart has the configuration of the server that died, and nothing that is valid for one
    /// start. A server that takes over reads the file again.
    pub fn config(&mut self, kept: &mut Kept) -> anyhow::Result<(Config, Option<String>)> {
        if kept.is_restart() || kept.is_successor() {
            (self.reset_cache, self.accept_data_loss) = (false, false);
            self.accept_primary.clear();
            self.forget_volume.clear();
        }
        let Some(path) = &self.config else {
            let config = self.flags.config().map_err(crate::WrongUsage)?;
            config.check().map_err(|error| crate::WrongUsage(error.to_string()))?;
            return Ok((config, None));
        };
        let usage = |error: ConfigError| match error {
            ConfigError::Read { .. } => anyhow::Error::from(error),
            _ => crate::WrongUsage(error.to_string()).into(),
        };
        let text = match kept.configuration()? {
            Some(text) => text,
            None => Config::text(path).map_err(usage)?,
        };
        Ok((Config::parse(path, &text).map_err(usage)?, Some(text)))
    }
}
