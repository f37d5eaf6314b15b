//! The arguments common to the benchmarks for users.

use std::path::PathBuf;

use anyhow::Context as _;
use forebay_device::Profile;

use crate::report::{Prices, Report};
use crate::rig::setup::SetUp;

fn model(text: &str) -> Result<String, String> {
    let known = Profile::from_name(text).map(|_| text.to_owned());
    known.ok_or_else(|| {
        let names = Profile::NAMES.map(|(name, _)| name);
        format!("{text:?} is not a disk model; use {}", names.join(", "))
    })
}

/// Arguments common to all benchmarks for users.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Shared {
    /// The set-ups to measure, in this order: no-cache, a mode of the cache (write-back,
    /// write-through, write-around, write-only), bare-ssd, nbdkit. To compare ways of storing
    /// blocks, in write-back: similar, also against similar blocks; independent, without deltas and
    /// shared payloads; raw, also without compression; one-log, in a cache without a store
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "no-cache,write-back,write-through,nbdkit,bare-ssd"
    )]
    pub setups: Vec<SetUp>,
    /// Directory for images, primaries and caches, on the SSD [default: forebay-bench in the
    /// directory for temporary files]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Directory for the figures and the report
    #[arg(long, value_name = "DIR", default_value = "forebay-bench")]
    pub out: PathBuf,
    /// The model of the slow disks: hdd, raid10x4, raid5x5, san, cloud
    #[arg(long, default_value = "raid10x4", value_parser = model)]
    pub model: String,
    /// Size of the cache, in percent of the data
    #[arg(long, value_name = "PERCENT", default_value_t = 25,
        value_parser = clap::value_parser!(u64).range(1..=400))]
    pub cache_percent: u64,
    /// MiB of the cache's RAM tier
    #[arg(long, value_name = "MIB", default_value_t = 64)]
    pub ram_mib: u64,
    /// Threads of the cache server
    #[arg(long, default_value_t = 1)]
    pub shards: u16,
    /// An additional flag for `forebay serve`, such as --serve=--dirty-limit=20%; may be repeated
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    pub serve: Vec<String>,
    /// Compare this run with an earlier one, given by its JSON file
    #[arg(long, value_name = "OLD.json")]
    pub compare: Option<PathBuf>,
    /// Prices for the cost table.
    #[command(flatten)]
    pub prices: Prices,
    /// The binary of Forebay [default: the one that runs this command]
    #[arg(long, value_name = "PATH", hide = true)]
    pub forebay: Option<PathBuf>,
}

impl Shared {
    /// The working directory; created if it does not exist.
    pub fn directory(&self) -> anyhow::Result<PathBuf> {
        let default = || std::env::temp_dir().join("forebay-bench");
        let path = self.dir.clone().unwrap_or_else(default);
        let shown = path.display().to_string();
        std::fs::create_dir_all(&path).with_context(|| format!("--dir {shown}"))?;
        std::fs::canonicalize(&path).with_context(|| format!("--dir {shown}"))
    }

    /// The binary of the server.
    pub fn binary(&self) -> anyhow::Result<PathBuf> {
        crate::rig::server::binary(self.forebay.as_deref())
    }

    /// The report of the earlier run to compare with.
    pub fn earlier(&self, benchmark: &str) -> anyhow::Result<Option<Report>> {
        self.compare.as_deref().map(|path| Report::read(path, benchmark)).transpose()
    }

    /// Whether a set-up is to be measured.
    pub fn has(&self, setup: SetUp) -> bool {
        self.setups.contains(&setup)
    }

    /// Adds the common settings to a report.
    pub fn describe(&self, report: &mut Report) {
        report.set("disk model", &self.model);
        report.set("RAM tier", format!("{} MiB", self.ram_mib));
        report.set("threads of the cache", self.shards);
        if !self.serve.is_empty() {
            report.set("flags", self.serve.join(" "));
        }
        report.prices = Some(self.prices);
    }
}
