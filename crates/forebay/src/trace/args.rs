//! The arguments of `forebay trace`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use forebay_control::units::Size;
use forebay_trace::Format;

use crate::client::Daemon;

/// The subcommands.
#[derive(Subcommand, Debug)]
pub enum TraceCommand {
    /// Record the requests of a served volume: times, kinds, ranges; no data
    ///
    /// The server creates the file and writes it. Ctrl-C ends the recording. Clients never wait for
    /// it: if the file is too slow, requests are left out and counted.
    #[command(after_help = "Example:\n  \
            forebay trace record db --out /var/lib/forebay/db.trace --seconds 60")]
    Record(RecordArgs),
    /// Send the requests of a trace to a volume, and measure
    ///
    /// The data written is noise. A trace with writes is refused unless --write or --reads-only is
    /// given.
    #[command(after_help = "Examples:\n  \
        forebay trace replay db.trace nbd://127.0.0.1:10809/test --write --speed 2\n  \
        forebay trace replay web_0.csv.zst /dev/sdb --reads-only --past-end wrap --speed max")]
    Replay(ReplayArgs),
    /// Run eviction policies over a trace: miss ratios, and bytes written to the cache device
    ///
    /// The policies and the log are those of the server; policies of papers are beside them. Sizes
    /// are absolute, or a share of the blocks that the trace touches.
    #[command(after_help = "Examples:\n  \
        forebay trace simulate db.trace --size 5%,10%,25%\n  \
        forebay trace simulate db.trace --size 10% --layout log,journal-store --ram 28%\n  \
        forebay trace simulate web_0.csv.zst --size 1GiB --policy lru,frequency --json")]
    Simulate(SimulateArgs),
}

/// A trace.
#[derive(Args, Debug)]
pub struct TraceInput {
    /// The trace; may be compressed by zstd
    pub trace: PathBuf,
    /// Its format [default: detected]: forebay, csv (t_us,rwbs,sector,nsect), msr, cloudphysics,
    /// vscsi1, vscsi2, blkparse, iolog
    #[arg(long, value_parser = parse_format)]
    pub format: Option<Format>,
}

/// Arguments of `record`.
#[derive(Args, Debug)]
pub struct RecordArgs {
    /// The volume
    pub volume: String,
    /// The new file for the trace, on the server's host
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Stop automatically after this many seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    pub seconds: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Arguments of `replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    #[command(flatten)]
    pub input: TraceInput,
    /// The volume: a path, nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH
    #[arg(value_name = "VOLUME")]
    pub volume: String,
    /// Overwrite and discard data of the volume as the trace does
    #[arg(long, conflicts_with = "reads_only")]
    pub write: bool,
    /// Leave out requests that change data
    #[arg(long)]
    pub reads_only: bool,
    /// Speed: 1 as recorded, 2 twice as fast, ..., or max
    #[arg(long, value_name = "FACTOR|max", default_value = "1")]
    pub speed: Speed,
    /// Most requests in flight
    #[arg(long, value_name = "N", default_value = "128",
        value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub depth: u16,
    /// How to treat requests past the end of the volume
    #[arg(long, value_name = "WHAT", default_value = "refuse")]
    pub past_end: PastEnd,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How to treat requests past the end of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum PastEnd {
    /// Refuse the replay
    Refuse,
    /// Leave them out
    Skip,
    /// Wrap their offset around the end of the volume
    Wrap,
}

/// Speed of a replay.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Speed {
    /// A multiple of the recorded speed.
    Times(f64),
    /// As fast as the volume answers.
    Max,
}

impl FromStr for Speed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            Ok(times) if times > 0.0 && times.is_finite() => Ok(Self::Times(times)),
            _ if text == "max" => Ok(Self::Max),
            _ => Err(format!("{text:?} is neither a factor above 0 nor max")),
        }
    }
}

/// Arguments of `simulate`.
#[derive(Args, Debug)]
pub struct SimulateArgs {
    #[command(flatten)]
    pub input: TraceInput,
    /// Sizes of the cache: bytes, or percent of the blocks that the trace touches
    #[arg(long, value_name = "SIZE|PERCENT", value_delimiter = ',',
        default_values = ["1%", "5%", "10%", "25%"])]
    pub size: Vec<CacheSize>,
    /// Layouts of the cache device
    #[arg(long, value_name = "LAYOUT", value_delimiter = ',', default_value = "log")]
    pub layout: Vec<Layout>,
    /// The policies: fifo, lru, frequency of the log; adaptive, lru, frequency of the store
    /// [default: all]
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    pub policy: Vec<String>,
    /// Leave out the policies of papers, which need four bytes of memory for each block read or
    /// written
    #[arg(long)]
    pub no_textbook: bool,
    /// Share of the cache device for the journal of layout journal-store, in percent
    #[arg(long, value_name = "PERCENT", default_value = "8", value_parser = parse_journal)]
    pub journal: f64,
    /// How many times smaller blocks become by compression, in layout journal-store
    #[arg(long, value_name = "RATIO", default_value = "1", value_parser = parse_ratio)]
    pub compress: f64,
    /// The RAM tier: bytes, or percent of the cache
    #[arg(long, value_name = "SIZE|PERCENT", default_value = "1%")]
    pub ram: CacheSize,
    /// Let sequential streams bypass the cache after this many bytes; 0 is never
    #[arg(long, value_name = "SIZE", default_value = "512KiB")]
    pub sequential_threshold: Size,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A layout of the cache device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Layout {
    /// One circular log
    Log,
    /// A circular journal for writes, and a store of slots, each of which can be freed
    JournalStore,
}

fn parse_journal(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 90.0 => Ok(percent),
        _ => Err(format!("{text:?} is not a share above 0 and up to 90 percent")),
    }
}

fn parse_ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if (1.0..=16.0).contains(&ratio) => Ok(ratio),
        _ => Err(format!("{text:?} is not a ratio from 1 to 16")),
    }
}

/// A format by name.
fn parse_format(name: &str) -> Result<Format, String> {
    Format::from_name(name).ok_or_else(|| {
        let known = Format::NAMES.map(|(name, _)| name).join(", ");
        format!("unknown format {name:?}; use one of: {known}")
    })
}

/// A size in bytes, or a share of another size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum CacheSize {
    /// A number of bytes.
    Bytes(u64),
    /// A percentage.
    Percent(f64),
}

impl CacheSize {
    /// The size in bytes, for a whole of `whole` bytes.
    pub fn of(self, whole: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (whole as f64 * percent / 100.0) as u64,
        }
    }
}

impl FromStr for CacheSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(percent) = text.strip_suffix('%') else {
            let size = text.parse::<Size>().map_err(|error| error.to_string())?;
            return Ok(Self::Bytes(size.0));
        };
        match percent.trim().parse::<f64>() {
            Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Self::Percent(percent)),
            _ => Err(format!("{text:?} is not a share above 0% and up to 100%")),
        }
    }
}
