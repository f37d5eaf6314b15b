//! What every benchmark for users is asked, and what must be there before it begins: programs,
//! root, FUSE, space. Whatever is missing is said at once, with what to do.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, bail, ensure};

use crate::cleanup::tool;
use crate::results::{Prices, Report};

/// The command line cannot be used as it is: exit code 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongUsage(pub String);

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// The modes that can be measured.
const MODES: [&str; 4] = ["write-back", "write-through", "write-around", "write-only"];
/// The disk models.
const MODELS: [&str; 4] = ["hdd", "raid10x4", "san", "cloud"];

/// What a load is put on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetUp {
    /// The modelled disks alone, by the same way: Forebay passes everything through.
    NoCache,
    /// The same with Forebay in a mode.
    Mode(&'static str),
    /// Write-back that stores blocks in a simpler way, for comparison.
    Stored(&'static Stored),
    /// The SSD alone: the ceiling.
    BareSsd,
    /// The modelled disks behind nbdkit's cache filter, in write-through.
    Nbdkit,
}

/// Another way to store blocks.
#[derive(PartialEq, Eq, Debug)]
pub struct Stored {
    name: &'static str,
    flags: &'static [&'static str],
}

/// Every one: also against others that are like it; each block by itself, compressed or not.
const STORED: [Stored; 3] = [
    Stored { name: "similar", flags: &["--content=similar"] },
    Stored { name: "independent", flags: &["--content=independent"] },
    Stored { name: "raw", flags: &["--content=independent", "--no-compression"] },
];

impl SetUp {
    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoCache => crate::results::BASELINE,
            Self::Mode(mode) => mode,
            Self::Stored(stored) => stored.name,
            Self::BareSsd => "bare-ssd",
            Self::Nbdkit => "nbdkit",
        }
    }

    /// The mode of Forebay's cache, where there is one.
    pub fn mode(self) -> Option<&'static str> {
        match self {
            Self::Mode(mode) => Some(mode),
            Self::Stored(_) => Some("write-back"),
            Self::NoCache | Self::BareSsd | Self::Nbdkit => None,
        }
    }

    /// Flags of its own for the server.
    pub fn flags(self) -> impl Iterator<Item = String> {
        let flags = if let Self::Stored(stored) = self { stored.flags } else { &[] };
        flags.iter().map(|&flag| flag.to_owned())
    }
}

impl FromStr for SetUp {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::NoCache, Self::BareSsd, Self::Nbdkit].into_iter();
        let all = all.chain(MODES.map(Self::Mode)).chain(STORED.iter().map(Self::Stored));
        let found = all.clone().find(|setup| setup.name() == text);
        let names: Vec<&str> = all.map(Self::name).collect();
        found.ok_or_else(|| format!("{text:?} is no set-up; use {}", names.join(", ")))
    }
}

fn model(text: &str) -> Result<String, String> {
    let known = MODELS.contains(&text).then(|| text.to_owned());
    known.ok_or_else(|| format!("{text:?} is no disk model; use {}", MODELS.join(", ")))
}

/// Asked of every benchmark.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Shared {
    /// What to measure, in this order: no-cache, a mode of the cache (write-back, write-through,
    /// write-around, write-only), bare-ssd, nbdkit; to compare how blocks are stored, in
    /// write-back: similar, also against others that are like them; independent, without deltas
    /// and shared payloads; raw, without compression too
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "no-cache,write-back,write-through,nbdkit,bare-ssd"
    )]
    pub setups: Vec<SetUp>,
    /// Where images, primaries and caches are made: a directory on the SSD
    /// [default: forebay-bench in the directory for temporary files]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Where the figures and the report go
    #[arg(long, value_name = "DIR", default_value = "forebay-bench")]
    pub out: PathBuf,
    /// The model of the slow disks: hdd, raid10x4, san, cloud
    #[arg(long, default_value = "raid10x4", value_parser = model)]
    pub model: String,
    /// The cache, in percent of the data
    #[arg(long, value_name = "PERCENT", default_value_t = 25,
        value_parser = clap::value_parser!(u64).range(1..=400))]
    pub cache_percent: u64,
    /// MiB of the cache's RAM tier
    #[arg(long, value_name = "MIB", default_value_t = 64)]
    pub ram_mib: u64,
    /// Threads of the cache
    #[arg(long, default_value_t = 1)]
    pub shards: u16,
    /// A further flag for `forebay serve`, as --serve=--dirty-limit=20%; may be repeated
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    pub serve: Vec<String>,
    /// Show this run beside an earlier one, by its figures
    #[arg(long, value_name = "OLD.json")]
    pub compare: Option<PathBuf>,
    /// For the cost table.
    #[command(flatten)]
    pub prices: Prices,
    /// The binary of Forebay [default: this one, or the one beside this program]
    #[arg(long, value_name = "PATH", hide = true)]
    pub forebay: Option<PathBuf>,
}

impl Shared {
    /// Where things are made; it exists afterwards.
    pub fn directory(&self) -> anyhow::Result<PathBuf> {
        let default = || std::env::temp_dir().join("forebay-bench");
        let path = self.dir.clone().unwrap_or_else(default);
        let shown = path.display().to_string();
        std::fs::create_dir_all(&path).with_context(|| format!("--dir {shown}"))?;
        std::fs::canonicalize(&path).with_context(|| format!("--dir {shown}"))
    }

    /// The binary that serves.
    pub fn binary(&self) -> anyhow::Result<PathBuf> {
        crate::server::binary(self.forebay.as_deref())
    }

    /// The earlier run to compare with.
    pub fn earlier(&self, benchmark: &str) -> anyhow::Result<Option<Report>> {
        self.compare.as_deref().map(|path| Report::read(path, benchmark)).transpose()
    }

    /// Whether a set-up is measured.
    pub fn has(&self, setup: SetUp) -> bool {
        self.setups.contains(&setup)
    }

    /// Enters what is common in a report.
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

/// Programs, each with the package of Debian that holds it.
pub fn tools(needed: &[(&str, &str)]) -> anyhow::Result<()> {
    let exists = |name: &str| {
        let command = tool(name);
        let program = Path::new(command.get_program());
        let paths = std::env::var_os("PATH").unwrap_or_default();
        program.is_absolute() || std::env::split_paths(&paths).any(|dir| dir.join(name).is_file())
    };
    let missing: Vec<_> = needed.iter().filter(|(name, _)| !exists(name)).collect();
    let Some((name, _)) = missing.first() else { return Ok(()) };
    let mut packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    packages.dedup();
    bail!("{name} is not installed; on Debian: apt-get install {}", packages.join(" "))
}

/// What a disk needs that the kernel's clients see.
pub fn disk_can_be_made(setups: &[SetUp]) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "not root: loop devices and mounts need it; run it as root, or choose vdbench or burst"
    );
    let open = |path: &str| OpenOptions::new().read(true).write(true).open(path);
    open("/dev/loop-control")
        .context("/dev/loop-control: there are no loop devices here; modprobe loop")?;
    if setups.iter().any(|setup| *setup != SetUp::BareSsd) {
        open("/dev/fuse").context("/dev/fuse: there is no FUSE here; modprobe fuse")?;
    }
    Ok(())
}

/// Room for so many more bytes in a directory.
pub fn space(dir: &Path, bytes: u64) -> anyhow::Result<()> {
    let found = rustix::fs::statvfs(dir).with_context(|| format!("{}", dir.display()))?;
    let free = found.f_bavail * found.f_frsize;
    ensure!(
        free >= bytes,
        "{}: {} MiB are free, {} MiB are needed; give another --dir, or make it smaller",
        dir.display(),
        free >> 20,
        bytes >> 20
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_ups_have_one_name_each() {
        for name in ["no-cache", "write-back", "write-through", "bare-ssd", "nbdkit", "raw"] {
            assert_eq!(name.parse::<SetUp>().map(SetUp::name), Ok(name));
        }
        let raw = "raw".parse::<SetUp>().expect("it is one");
        assert_eq!((raw.mode(), raw.flags().count()), (Some("write-back"), 2));
        let message = "writeback".parse::<SetUp>().expect_err("no such set-up");
        assert!(message.contains("write-back") && message.contains("\"writeback\""), "{message}");
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = tools(&[("ls", "coreutils"), ("no-such-tool", "the-package")]);
        let error = error.expect_err("it is not there").to_string();
        assert!(error.contains("no-such-tool") && error.contains("install the-package"), "{error}");
        assert!(tools(&[("ls", "coreutils")]).is_ok());
        let error = space(Path::new("/"), u64::MAX).expect_err("no disk has so much").to_string();
        assert!(error.contains("MiB are free") && error.contains("--dir"), "{error}");
    }
}
