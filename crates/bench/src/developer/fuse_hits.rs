//! Reads of 4 KiB at depth 32 that hit RAM, through a loop device over a file of Forebay's mount:
//! with a keeper, as by default, so that requests come over `/dev/fuse` and survive the server; and
//! without one, over io_uring. Both are compared with one over the FUSE export of
//! qemu-storage-daemon, whose data is a file in memory.
//!
//! All run all the time and are measured in turns by fio; ratios are those of the medians.

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
use crate::rig::kept::Kept;
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
}

/// Runs the comparison.
pub fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "this needs root: it mounts and makes disks");
    let parent = args.hits.common.dir.as_deref();
    let (place, kept_place) = (Place::new(parent)?, Place::new(parent)?);
    let size = args.hits.size();
    let binary = binary(args.hits.common.forebay.as_deref())?;
    let setting = args.hits.setting(&kept_place, args.shards, size * 2)?;
    let mut kept = Kept::start(&binary, &kept_place, &setting)?;
    let volumes = place.path("volumes");
    fs::create_dir_all(&volumes)?;
    let mut setting = args.hits.setting(&place, args.shards, size * 2)?;
    setting.more.push(format!("--fuse={}", volumes.display()));
    let alone = Server::forebay(&binary, &place, &setting)?;
    for server in [kept.server(), &alone] {
        server.load(&hits::fill(size), |_| {})?;
        server.drain()?;
    }
    let qemu = Qemu::start(&place, size)?;
    let kept_disk = kept.attach()?;
    let (alone_disk, alone_hold) = cleanup::loop_device(&volumes.join(alone.export))?;
    let (qemu_disk, qemu_hold) = cleanup::loop_device(&qemu.file)?;
    let before = [kept.server().status()?, alone.status()?];
    let all = [
        (kept.server().process(), kept_disk.as_path()),
        (alone.process(), alone_disk.as_path()),
        (&qemu.process, qemu_disk.as_path()),
    ];
    let figures = compare(args, all, size)?;
    for (server, before) in [kept.server(), &alone].into_iter().zip(&before) {
        hits::ensure_ram(server, before)?;
    }
    drop((alone_hold, qemu_hold));
    alone.stop()?;
    kept.stop()?;
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

/// The columns, in order.
const NAMES: [&str; 3] = ["with keeper", "without", "qemu-storage-daemon"];

/// Rates and costs of the three.
struct Figures {
    rates: [f64; 3],
    costs: [f64; 3],
    turns: Value,
}

/// Measures all in turns.
fn compare(args: &Args, all: [(&Process, &Path); 3], size: u64) -> anyhow::Result<Figures> {
    let Turns { rates, costs } = args.hits.in_turns("fio", |which, _| {
        let (process, disk) = all[which];
        let before = process.cpu();
        let rate = fio(args, disk, size)?;
        Ok((rate, process.cpu() - before))
    })?;
    let turns = json!({ "names": NAMES, "rates": rates, "cpu_us": costs });
    Ok(Figures { rates: rates.map(median), costs: costs.map(median), turns })
}

fn fio(args: &Args, device: &Path, size: u64) -> anyhow::Result<f64> {
    let file = format!("--filename={}", device.display());
    let place = vec!["--ioengine=io_uring".to_owned(), "--direct=1".to_owned(), file];
    RandomReads { place, depth: DEPTH, jobs: 1, size, seconds: args.hits.seconds }.run()
}

fn present(setting: &Setting, figures: &Figures) -> anyhow::Result<()> {
    let Figures { rates, costs, turns } = figures;
    let [kept, alone, qemu] = *rates;
    let ratios = rates.map(|rate| rate / qemu);
    let what = "4 KiB random reads through a loop device, 32 in flight";
    let mut table = Table::new(&[what, NAMES[0], NAMES[1], NAMES[2], "target", ""]);
    let mut row = |name: &str, cells: [String; 3], target: String, met: String| {
        table.row([name.to_owned()].into_iter().chain(cells).chain([target, met]));
    };
    row("IOPS", rates.map(|rate| format!("{rate:.0}")), String::new(), String::new());
    let met = ratios[0].min(ratios[1]) >= TARGET;
    let cells = ratios.map(|ratio| format!("{ratio:.2}"));
    row("ratio", cells, format!(">= {TARGET:.1}"), verdict(met));
    let cells = costs.map(|cost| format!("{cost:.2}"));
    let cheap = costs[1] <= CPU_TARGET;
    row("CPU µs of the daemon, each", cells, format!("<= {CPU_TARGET:.1} without"), verdict(cheap));
    println!("{}", setting.describe());
    table.print();
    let hits = "RAM hits through a loop device, over qemu-storage-daemon";
    let ratio =
        |of: usize| format!("{:.0} / {qemu:.0} reads/s, ratio {:.2}", rates[of], ratios[of]);
    let rows = vec![
        Row::new(format!("{hits}: with a keeper"), ratio(0))
            .with_target(format!(">= {TARGET:.1}"), ratios[0] >= TARGET),
        Row::new("the same without a keeper", ratio(1))
            .with_target(format!(">= {TARGET:.1}"), ratios[1] >= TARGET),
        Row::new(
            "the same, CPU of the daemon per read: with / without a keeper",
            format!("{:.2} / {:.2} µs ({:.2})", costs[0], costs[1], costs[2]),
        )
        .with_target(format!("<= {CPU_TARGET:.1} without"), cheap),
    ];
    let figures = json!({
        "setting": setting.describe(), "with_keeper": kept, "without": alone, "other": qemu,
        "ratios": ratios, "cpu_us": costs, "turns": turns,
    });
    keep("fuse", rows, figures)
}
