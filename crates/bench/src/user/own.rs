//! `bench own`: the user's own volume, read only, without and with a cache.
//!
//! Nothing can write to the primary: fio opens it with `--readonly`, and the cache's server sees it
//! through nbdkit, which opens it read-only. A volume that is served already is read at its running
//! server, and its primary beside it.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::report::progress;
use crate::report::{BASELINE, Group, Measured, Report};
use crate::rig::cleanup::finish;
use crate::rig::needs;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};
use crate::user::fileio;

/// The loads: name, and fio arguments.
const LOADS: [(&str, &[&str]); 2] = [
    ("random read, 4 KiB, 1 thread", &["--bs=4k", "--numjobs=1"]),
    ("random read, 16 KiB, 16 threads", &["--bs=16k", "--numjobs=16"]),
];
/// The set-ups with a cache: each load twice, so that the second finds what the first has read.
const PASSES: [&str; 2] = ["cache, first pass", "cache, second pass"];
/// Space beside the cache: sockets, logs, state.
const SPARE: u64 = 64 << 20;
const NOTE: &str = "Only reads, at positions by Zipf's distribution, the same in each set-up. \
    no-cache: the primary with direct I/O. The first pass starts with an empty cache, unless the \
    volume was served before.";

/// Arguments of the command.
#[derive(clap::Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["primary", "volume"])))]
pub struct Args {
    /// The primary: a device or a file, which no server uses
    #[arg(long, value_name = "PATH")]
    pub primary: Option<PathBuf>,
    /// A volume of the running server
    #[arg(long, value_name = "NAME")]
    pub volume: Option<String>,
    /// Directory for the cache, on the SSD [default: the directory for temporary files]
    #[arg(long, value_name = "DIR", conflicts_with = "volume")]
    pub dir: Option<PathBuf>,
    /// MiB of the cache [default: a quarter of what is read]
    #[arg(long, value_name = "MIB", conflicts_with = "volume",
        value_parser = clap::value_parser!(u64).range(64..))]
    pub cache_mib: Option<u64>,
    /// MiB of the cache's RAM tier
    #[arg(long, value_name = "MIB", default_value_t = 64, conflicts_with = "volume")]
    pub ram_mib: u64,
    /// Read only the first MiB of the volume [default: all of it, at most 8 GiB]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(16..))]
    pub mib: Option<u64>,
    /// Seconds of each load
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: u64,
    /// Directory for the figures and the report
    #[arg(long, value_name = "DIR", default_value = "forebay-bench")]
    pub out: PathBuf,
    /// The server's control socket
    #[arg(long, value_name = "PATH", requires = "volume")]
    pub control: Option<PathBuf>,
    /// The binary of Forebay [default: the one that runs this command]
    #[arg(long, value_name = "PATH", hide = true)]
    pub forebay: Option<PathBuf>,
}

/// Most MiB that are read by default.
const MIB_MAX_DEFAULT: u64 = 8192;

/// What is read without and with a cache.
struct Target {
    primary: PathBuf,
    /// The volume, for NBD clients.
    uri: String,
    /// The servers of the cache and of the primary, if they were started for this.
    servers: Option<(Server, Server)>,
    name: String,
    cache: String,
}

/// Runs the benchmark and reports; returns the path of the page.
pub fn run(args: &Args) -> anyhow::Result<PathBuf> {
    needs::tools(&[("fio", "fio")])?;
    let binary = binary(args.forebay.as_deref())?;
    let place = Place::new(args.dir.as_deref())?;
    let (path, served) = match (&args.primary, &args.volume) {
        (Some(path), _) => (path.clone(), None),
        (None, volume) => {
            let (path, uri, cache) = running(&binary, args, volume.as_deref().unwrap_or_default())?;
            (path, Some((uri, cache)))
        }
    };
    let mut file = File::open(&path).with_context(|| path.display().to_string())?;
    let size = file.seek(SeekFrom::End(0)).with_context(|| path.display().to_string())?;
    let read = args.mib.unwrap_or((size >> 20).min(MIB_MAX_DEFAULT)) << 20;
    ensure!(read > 0 && read <= size, "{}: {} MiB are less than --mib", path.display(), size >> 20);
    let target = match served {
        Some((uri, cache)) => {
            let name = args.volume.clone().unwrap_or_default();
            Target { primary: path, uri, servers: None, name, cache }
        }
        None => start(args, &binary, &place, &path, read)?,
    };
    let mut report = Report::new("own", "your own volume, read only", "IOPS");
    report.set("volume", &target.name);
    report.set("read", format!("{} MiB of {} MiB", read >> 20, size >> 20));
    report.set("cache", &target.cache);
    report.set("time", format!("{} s", args.seconds));
    report.notes.push(NOTE.to_owned());
    report.groups =
        LOADS.iter().map(|load| measure(args, &target, read, load)).collect::<Result<_, _>>()?;
    if let Some((cache, primary)) = target.servers {
        cache.stop()?;
        primary.stop()?;
    }
    progress("");
    report.finish(&args.out, None)
}

/// The primary, the URI and the cache of a volume of the running server.
fn running(binary: &Path, args: &Args, volume: &str) -> anyhow::Result<(PathBuf, String, String)> {
    let mut command = Command::new(binary);
    command.args(["status", "--json"]);
    command.args(args.control.iter().map(|path| format!("--control={}", path.display())));
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    let status: Value = serde_json::from_slice(&output.stdout)?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let volumes = status["volumes"].as_array().cloned().unwrap_or_default();
    let names: Vec<String> = volumes.iter().map(|one| text(&one["name"])).collect();
    let found = volumes.iter().find(|one| one["name"] == volume);
    let found =
        found.with_context(|| format!("no volume {volume:?}; served: {}", names.join(", ")))?;
    let primary = text(&found["primary"]);
    ensure!(
        !primary.contains("://") && !primary.contains('?'),
        "{primary}: only a primary that is a device or a file can be read beside its server"
    );
    let endpoints = status["endpoints"].as_array().cloned().unwrap_or_default();
    let socket =
        endpoints.iter().map(text).find_map(|one| one.strip_prefix("unix:").map(str::to_owned));
    let socket =
        socket.context("the server has no NBD endpoint unix:PATH; add one to [server] nbd")?;
    let uri = format!("nbd+unix:///{volume}?socket={socket}");
    let cache = format!("{} ({})", text(&status["cache"]["path"]), text(&found["mode"]));
    Ok((PathBuf::from(primary.trim_start_matches("file:")), uri, cache))
}

/// Starts a server with an empty cache over the primary, which only nbdkit opens, for reading.
fn start(
    args: &Args,
    binary: &Path,
    place: &Place,
    path: &Path,
    read: u64,
) -> anyhow::Result<Target> {
    needs::tools(&[("nbdkit", "nbdkit")])?;
    let cache = args.cache_mib.unwrap_or((read >> 22).max(64)) << 20;
    needs::space(&place.path(""), cache + SPARE)?;
    let whole = path.canonicalize().with_context(|| path.display().to_string())?;
    let primary = Server::nbdkit_file(place, &whole)?;
    let setting = Setting {
        primary: primary.uri(),
        cache: ("cache".to_owned(), cache),
        mode: "write-through",
        ram: args.ram_mib << 20,
        shards: 1,
        more: vec!["--read-only".to_owned()],
    };
    let server = Server::forebay(binary, place, &setting)?;
    let uri = server.uri();
    let name = whole.display().to_string();
    let cache = format!("{} MiB, RAM {} MiB", cache >> 20, args.ram_mib);
    Ok(Target { primary: whole, uri, servers: Some((server, primary)), name, cache })
}

fn measure(
    args: &Args,
    target: &Target,
    read: u64,
    &(name, flags): &(&str, &[&str]),
) -> anyhow::Result<Group> {
    let mut group = Group { name: name.to_owned(), ..Group::default() };
    let direct = format!("--filename={}", target.primary.display());
    let uri = format!("--uri={}", target.uri);
    let bare: [&str; 3] = ["--ioengine=psync", "--direct=1", &direct];
    let cached: [&str; 2] = ["--ioengine=nbd", &uri];
    let setups = [(BASELINE, &bare[..]), (PASSES[0], &cached[..]), (PASSES[1], &cached[..])];
    for (setup, place) in setups {
        progress(&format!("{setup}: {name}"));
        let mut fio = Command::new("fio");
        fio.args(["--name=own", "--readonly", "--rw=randread", "--thread", "--group_reporting"]);
        fio.args(["--time_based", "--norandommap", "--unified_rw_reporting=1", "--randrepeat=1"]);
        fio.args(["--random_distribution=zipf:1.1", "--output-format=json"]);
        fio.arg("--percentile_list=50:95:99:99.9").args(flags).args(place);
        fio.arg(format!("--runtime={}", args.seconds)).arg(format!("--size={read}"));
        let mut measured: Measured = fileio::read(&finish(&mut fio)?).context(setup.to_owned())?;
        measured.setup = setup.to_owned();
        group.results.push(measured);
    }
    Ok(group)
}
