//! Reads of 4 KiB at depth 32 that hit RAM, through a loop device over a file of Forebay's mount,
//! compared with one over the FUSE export of qemu-storage-daemon, whose data is a file in memory.
//!
//! Both run all the time and are measured in turns by fio; the ratio is that of the medians.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::developer::hits::{self, DEPTH, Hits, Turns};
use crate::load::content::Content;
use crate::load::fio::{RandomReads, median};
use crate::report::kept::{Row, keep};
use crate::report::table::{Table, verdict};
use crate::rig::cleanup::{self, Process};
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};

/// Minimum ratio to qemu-storage-daemon.
const TARGET: f64 = 2.0;
/// Maximum CPU time of the daemon per request, in microseconds.
const CPU_TARGET: f64 = 3.0;
/// Time limit for a file or process to appear or disappear.
const PATIENCE: Duration = Duration::from_secs(20);
/// A directory in memory.
const MEMORY: &str = "/dev/shm";

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    hits: Hits,
    /// Threads of Forebay
    #[arg(long, default_value_t = 1)]
    shards: u16,
    /// How the kernel passes on requests: auto, io-uring, device
    #[arg(long, default_value = "auto")]
    fuse_transport: String,
}

/// Runs the comparison.
pub fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "this needs root: it mounts and makes disks");
    let place = Place::new(args.hits.common.dir.as_deref())?;
    let size = args.hits.size();
    let volumes = place.path("volumes");
    fs::create_dir_all(&volumes)?;
    let mut setting = args.hits.setting(&place, args.shards, size * 2)?;
    setting.more.push(format!("--fuse={}", volumes.display()));
    setting.more.push(format!("--fuse-transport={}", args.fuse_transport));
    let forebay = Server::forebay(&binary(args.hits.common.forebay.as_deref())?, &place, &setting)?;
    forebay.load(&hits::fill(size), |_| {})?;
    forebay.drain()?;
    let qemu = Qemu::start(&place, size)?;
    let (ours, our_hold) = cleanup::loop_device(&volumes.join(forebay.export))?;
    let (theirs, their_hold) = cleanup::loop_device(&qemu.file)?;
    let before = forebay.status()?;
    let both = [(forebay.process(), ours.as_path()), (&qemu.process, theirs.as_path())];
    let figures = compare(args, both, size)?;
    hits::ensure_ram(&forebay, &before)?;
    drop((our_hold, their_hold));
    forebay.stop()?;
    present(&setting, &figures)
}

/// qemu-storage-daemon with a FUSE export of a file in memory; ended on drop.
struct Qemu {
    process: Process,
    /// The exported file.
    file: PathBuf,
    /// The file in memory.
    data: PathBuf,
}

impl Qemu {
    fn start(place: &Place, size: u64) -> anyhow::Result<Self> {
        let data = Path::new(MEMORY).join(format!("forebay-bench-{}", std::process::id()));
        fs::write(&data, Content::Random.bytes(usize::try_from(size)?))
            .with_context(|| format!("{}", data.display()))?;
        let file = place.sparse("exported", 0)?;
        let log = place.path("qemu.log");
        let mut command = Command::new("qemu-storage-daemon");
        command
            .arg("--blockdev")
            .arg(format!("driver=file,node-name=data,filename={}", data.display()))
            .arg("--export")
            .arg(format!(
                "type=fuse,id=export,node-name=data,mountpoint={},writable=on",
                file.display()
            ));
        let process = Process::start(command, &log, false)?;
        let qemu = Self { process, file, data };
        let limit = Instant::now() + PATIENCE;
        while fs::metadata(&qemu.file).map_or(0, |found| found.len()) != size {
            let said = fs::read_to_string(&log).unwrap_or_default();
            ensure!(Instant::now() < limit, "qemu-storage-daemon did not start: {said}");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(qemu)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.file).output();
        let _ = fs::remove_file(&self.data);
    }
}

/// Measures both in turns.
fn compare(args: &Args, both: [(&Process, &Path); 2], size: u64) -> anyhow::Result<Value> {
    let Turns { rates, costs } = args.hits.in_turns("fio", |which, _| {
        let (process, disk) = both[which];
        let before = process.cpu();
        let rate = fio(args, disk, size)?;
        Ok((rate, process.cpu() - before))
    })?;
    let turns = json!({ "ours": rates[0], "other": rates[1] });
    let ([ours, other], [cost, other_cost]) = (rates.map(median), costs.map(median));
    Ok(json!({
        "ours": ours, "other": other, "ratio": ours / other, "cpu_us": cost,
        "other_cpu_us": other_cost, "turns": turns,
    }))
}

fn fio(args: &Args, device: &Path, size: u64) -> anyhow::Result<f64> {
    let file = format!("--filename={}", device.display());
    let place = vec!["--ioengine=io_uring".to_owned(), "--direct=1".to_owned(), file];
    RandomReads { place, depth: DEPTH, jobs: 1, size, seconds: args.hits.seconds }.run()
}

fn present(setting: &Setting, figures: &Value) -> anyhow::Result<()> {
    let number = |name: &str| figures[name].as_f64().unwrap_or(f64::NAN);
    let mut table = Table::new(&[
        "4 KiB random reads through a loop device, 32 in flight",
        "Forebay",
        "qemu-storage-daemon",
        "target",
        "",
    ]);
    table.row([
        "IOPS".to_owned(),
        format!("{:.0}", number("ours")),
        format!("{:.0}", number("other")),
        String::new(),
        String::new(),
    ]);
    let ratio = number("ratio");
    table.row([
        "ratio".to_owned(),
        format!("{ratio:.2}"),
        "1".to_owned(),
        format!(">= {TARGET:.1}"),
        verdict(ratio >= TARGET),
    ]);
    let cost = number("cpu_us");
    table.row([
        "CPU µs of the daemon, each".to_owned(),
        format!("{cost:.2}"),
        format!("{:.2}", number("other_cpu_us")),
        format!("<= {CPU_TARGET:.1}"),
        verdict(cost <= CPU_TARGET),
    ]);
    println!("{}", setting.describe());
    table.print();
    let mut figures = figures.clone();
    figures["setting"] = json!(setting.describe());
    let (ours, other) = (number("ours"), number("other"));
    let hits = "RAM hits through a loop device, over qemu-storage-daemon";
    let rows = vec![
        Row::new(hits, format!("{ours:.0} / {other:.0} reads/s, ratio {ratio:.2}"))
            .with_target(format!(">= {TARGET:.1}"), ratio >= TARGET),
        Row::new(
            "the same, CPU of the daemon per read",
            format!("{cost:.2} µs ({:.2})", number("other_cpu_us")),
        )
        .with_target(format!("<= {CPU_TARGET:.1}"), cost <= CPU_TARGET),
    ];
    keep("fuse", rows, figures)
}
