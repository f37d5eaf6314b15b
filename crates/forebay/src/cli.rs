//! The command line: one declaration of a flag is its parsing, its help and its documentation.
//! What a flag of `serve` leaves out is decided by `control::config`, as for a file.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use forebay_control::config::{Config, ConfigError, STATE_DIR};
use forebay_control::settings::Spec;
use forebay_control::units::Size;
use forebay_control::{Client, default_socket};

use crate::flags::{GROUP, ServeFlags};
use crate::trace::args::TraceCommand;

/// An SSD cache in front of slow storage, served to NBD clients.
#[derive(Parser, Debug)]
#[command(name = "forebay", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// Every command.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Put a cache in front of one or more primaries and serve them
    ///
    /// Prints one line `ready` and the endpoints when clients may connect. SIGTERM or SIGINT stop
    /// it in order; SIGHUP is ignored.
    #[command(override_usage = "forebay serve --primary <URI> --cache <PATH[,size=SIZE]> \
        --nbd <ENDPOINT> [OPTIONS]\n       \
        forebay serve --primary <URI> --cache <PATH[,size=SIZE]> --fuse <DIR> [OPTIONS]\n       \
        forebay serve --config <FILE> [OPTIONS]")]
    #[command(after_help = "Examples:\n  \
        forebay serve --primary /dev/sdb --cache /dev/nvme0n1 --nbd unix:/run/forebay/nbd.sock\n  \
        forebay serve --primary disk.img --cache cache.img,size=1GiB --nbd tcp:127.0.0.1:10809\n  \
        forebay serve --primary /dev/sdb --cache /dev/nvme0n1 --fuse /mnt/forebay\n  \
        forebay serve --config /etc/forebay.toml")]
    Serve(Box<ServeArgs>),
    /// Show what is served, how much is cached and what is at risk
    #[command(after_help = "Example:\n  forebay status db --json")]
    Status(StatusArgs),
    /// Write all that is dirty of a volume, or of all, to the primary
    ///
    /// The server goes on serving, and goes on draining when this command is interrupted.
    #[command(after_help = "Examples:\n  forebay drain db\n  forebay drain\n  \
        forebay drain db --background\n  forebay drain --list\n  \
        forebay drain --job 1 --cancel")]
    Drain(DrainArgs),
    /// Stop the server in order
    ///
    /// Clients are disconnected and the cache is closed so that the next start finds all of it.
    /// Without --drain what is dirty stays in the cache.
    #[command(after_help = "Example:\n  forebay stop --drain")]
    Stop(StopArgs),
    /// Change settings of a volume or of the whole cache while it serves
    ///
    /// A change is kept for the next starts, until the configuration's own value changes. The value
    /// `default` returns to the configured value.
    #[command(override_usage = "forebay set [OPTIONS] [VOLUME] <KEY=VALUE>...")]
    #[command(after_help = "Examples:\n  forebay set db mode=write-through\n  \
        forebay set eviction=lru\n  forebay set db mode=default")]
    Set(SetArgs),
    /// Make a volume a disk of this machine, and mount it if asked
    ///
    /// A loop device over the volume's file, which `serve --fuse` mounts. Prints the device.
    #[command(after_help = "Examples:\n  forebay attach db\n  \
        forebay attach db --mount /srv/db")]
    Attach(AttachArgs),
    /// Unmount an attached volume, and take its disk away
    ///
    /// Everything written is made durable. Refused while somebody uses the disk.
    #[command(after_help = "Example:\n  forebay detach db")]
    Detach(DetachArgs),
    /// Predict what a cache would hold of a device or file, by the kinds of its blocks
    ///
    /// Reads it, and writes nothing. With an older version of the same beside it: how long the
    /// deltas would be that store the difference.
    #[command(after_help = "Examples:\n  forebay analyze /dev/sdb\n  \
        forebay analyze today.img --older yesterday.img --json")]
    Analyze(AnalyzeArgs),
    /// Verify a cache device that no server uses: superblocks, log, checksums of all data
    #[command(after_help = "Example:\n  forebay check /dev/nvme0n1")]
    Check(CheckArgs),
    /// List what is in a cache device that no server uses
    #[command(after_help = "Example:\n  forebay dump /dev/nvme0n1 --blocks")]
    Dump(DumpArgs),
    /// Write what only a cache device has to a primary, without a server
    ///
    /// For a cache that cannot be served, or whose host is gone. Nothing is written to the cache
    /// device, so it can be repeated. Lists what is lost, and ends with 1 if anything is.
    #[command(after_help = "Examples:\n  forebay salvage /dev/nvme0n1 --list\n  \
        forebay salvage /dev/nvme0n1 --to /dev/sdb\n  \
        forebay salvage /dev/nvme0n1 --volume db --to copy-of-db.img --force")]
    Salvage(SalvageArgs),
    /// Block traces: record, replay, simulate eviction policies over them
    #[command(subcommand, after_help = "Example:\n  forebay trace simulate db.trace --size 10%")]
    Trace(TraceCommand),
    /// Repeat the published evaluations of caches on this machine, and draw them
    ///
    /// Each set-up is measured in turn in one run: the primary alone, the modes of the cache, the
    /// bare SSD, another cache. Then: a table, the figures as JSON, and a report as a page.
    #[command(after_help = "Examples:\n  forebay bench tpcc\n  \
        forebay bench tpcc --compare forebay-bench/tpcc-20260131T120000Z.json")]
    Bench(BenchArgs),
    /// See it work in some minutes, no disk needed: gains, a kill, a database
    #[command(after_help = "Examples:\n  forebay demo\n  forebay demo --dir /ssd/work --seconds 0")]
    Demo(forebay_bench::DemoArgs),
}

/// What `serve` is asked: a file, or flags for one volume.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// Read everything from this TOML file; for several volumes
    #[arg(long, value_name = "FILE", conflicts_with = GROUP)]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub flags: ServeFlags,
    /// Discard what is in the cache and make it anew; refused while it holds dirty data
    #[arg(long)]
    pub reset_cache: bool,
    /// Serve although a part of the log is lost, and with it blocks of unknown places. With
    /// --reset-cache: discard dirty data too
    #[arg(long)]
    pub accept_data_loss: bool,
    /// Take the primary of this volume although it was changed, or is another, since the cache was
    /// used: the cache's dirty blocks are written to it, and the rest of the cache is discarded.
    /// May be repeated; for one start
    #[arg(long, value_name = "VOLUME")]
    pub accept_primary: Vec<String>,
    /// Remove this volume, which is not configured any more, although blocks of it are not on its
    /// primary: they are lost. May be given several times
    #[arg(long, value_name = "NAME")]
    pub forget_volume: Vec<String>,
    /// How the log on standard error is written
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

impl ServeArgs {
    /// The configuration that the file or the flags give.
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

/// Which server a command talks to.
#[derive(Args, Debug, Clone)]
pub struct Daemon {
    /// The server's control socket [default: $FOREBAY_CONTROL, or /run/forebay/forebay.sock; if
    /// not root, $XDG_RUNTIME_DIR/forebay.sock]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl Daemon {
    /// The way to it.
    pub fn client(&self) -> Client {
        Client::new(self.control.clone().unwrap_or_else(default_socket))
    }
}

/// What `status` is asked.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Only this volume
    pub volume: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// What `drain` is asked.
#[derive(Args, Debug)]
pub struct DrainArgs {
    /// The volume to drain [default: all of them]
    #[arg(conflicts_with_all = ["job", "list"])]
    pub volume: Option<String>,
    /// Return at once and print the job's number
    #[arg(long, conflicts_with_all = ["job", "list"])]
    pub background: bool,
    /// List the drains that the server remembers, oldest first
    #[arg(long, conflicts_with = "job")]
    pub list: bool,
    /// Show a drain that was started before
    #[arg(long, value_name = "NUMBER")]
    pub job: Option<u64>,
    /// End it; what it has written stays written
    #[arg(long, requires = "job")]
    pub cancel: bool,
    /// Print JSON: an object on one line for each job
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// What `stop` is asked.
#[derive(Args, Debug)]
pub struct StopArgs {
    /// First write everything dirty to the primaries
    #[arg(long)]
    pub drain: bool,
    /// Print what is left as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// What `set` is asked.
#[derive(Args, Debug)]
pub struct SetArgs {
    #[arg(required = true, value_name = "[VOLUME] KEY=VALUE", help = settings_help())]
    pub words: Vec<String>,
    /// Print what is in force now as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// The settings of `set`, with the values of each.
fn settings_help() -> String {
    let one = |spec: &Spec| {
        let volume = if spec.is_of_volume() { ", of a volume" } else { "" };
        let values = spec.kind.names().join(", ");
        format!("\n- {}{volume}: {values}{}", spec.key, spec.kind.range().unwrap_or_default())
    };
    let known: Vec<&str> = Spec::online().map(|spec| spec.key).collect();
    let each: String = Spec::online().map(one).collect();
    format!("The settings; known: {}{each}", known.join(", "))
}

/// What `attach` is asked.
#[derive(Args, Debug)]
pub struct AttachArgs {
    /// The volume
    pub volume: String,
    /// Mount the file system on it here
    #[arg(long, value_name = "DIR")]
    pub mount: Option<PathBuf>,
    /// Bytes in a sector of the disk: 512 or 4096 [default: what is on the volume decides; 4096
    /// if nothing does]
    #[arg(long, value_name = "BYTES", value_parser = sector_size)]
    pub sector_size: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// What `detach` is asked.
#[derive(Args, Debug)]
pub struct DetachArgs {
    /// The volume
    pub volume: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

fn sector_size(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" => Ok(4096),
        _ => Err("a sector has 512 or 4096 bytes".to_owned()),
    }
}

/// What `check` is asked.
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

/// What `salvage` is asked.
#[derive(Args, Debug)]
pub struct SalvageArgs {
    /// The cache device
    pub cache: PathBuf,
    /// Where to write a volume's blocks: as serve's --primary
    #[arg(long, value_name = "PRIMARY", required_unless_present = "list")]
    pub to: Vec<String>,
    /// Which volume that is; needed if the cache holds several, once for each --to
    #[arg(long, value_name = "NAME")]
    pub volume: Vec<String>,
    /// Only list what would be written, and what is lost
    #[arg(long, conflicts_with_all = ["to", "volume", "force"])]
    pub list: bool,
    /// Write to another primary than the one that the blocks belong to
    #[arg(long)]
    pub force: bool,
    /// Where the host remembers the state of the cache: blocks that were written past a failed
    /// cache are left out
    #[arg(long, value_name = "DIR", default_value = STATE_DIR)]
    pub state: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What `analyze` is asked.
#[derive(Args, Debug)]
pub struct AnalyzeArgs {
    /// The device or file
    pub path: PathBuf,
    /// An older version of it
    #[arg(long, value_name = "PATH")]
    pub older: Option<PathBuf>,
    /// Read at most so much, in pieces of 1 MiB spread evenly; 0 for all of it
    #[arg(long, value_name = "SIZE", default_value = "16GiB")]
    pub limit: Size,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What `dump` is asked.
#[derive(Args, Debug)]
pub struct DumpArgs {
    /// The cache device
    pub cache: PathBuf,
    /// List every block
    #[arg(long)]
    pub blocks: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What `bench` is asked.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub benchmark: forebay_bench::Command,
}

/// How the log is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_declaration_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let call = format!("forebay {}", command.get_name());
            assert!(help.contains(&call), "{}: {help:?}", command.get_name());
        }
    }
}
