//! What a pause consists of: the server of a full cache is killed while a client writes to its
//! disk, and the times of log lines divide the client's pause.
//!
//! | part | from | to |
//! |---|---|---|
//! | noticed | SIGKILL | the keeper says that the server died: all its memory is freed |
//! | started | that | the next server begins to open the cache |
//! | recovered | that | it is ready for clients |
//! | answered | that | the first answer after the pause |

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::developer::survive::pauses::Pauses;
use crate::developer::survive::probe;
use crate::load::content::Content;
use crate::load::pulse::Pulse;
use crate::load::{Load, Pattern};
use crate::report::kept::{Row, keep};
use crate::report::progress;
use crate::report::table::{Table, verdict};
use crate::rig::cleanup::{self, finish, tool};
use crate::rig::kept::Kept;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};
use crate::rig::{Common, full_cache, needs, setup::SetUp};

/// Maximum length of a pause, in seconds.
const TARGET: f64 = 0.6;
/// Time between two kills: the client must be at work again.
const INTERVAL: Duration = Duration::from_secs(3);
/// Time limit of one round.
const ROUND: Duration = Duration::from_secs(70);
/// Time limit for loading a cache.
const PATIENCE: Duration = Duration::from_secs(300);

/// Seconds of a day.
const DAY: f64 = 86_400.0;

/// Names of the parts, and the log lines that end them; the last ends with an answer.
const PARTS: [(&str, &str); 4] = [
    ("noticed", "the server was killed by"),
    ("started", "opening"),
    ("recovered", "serving endpoints="),
    ("answered", ""),
];

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// GiB of the cache, one measurement each
    #[arg(long, value_delimiter = ',', default_value = "1,10")]
    gib: Vec<u64>,
    /// Number of kills of each
    #[arg(long, default_value_t = 10)]
    kills: u32,
    /// Threads of Forebay
    #[arg(long, default_value_t = 2)]
    shards: u16,
    /// Fill the cache with entries only
    #[arg(long)]
    synthetic: bool,
}

/// Runs the part; an error if a pause at the largest cache is too long.
pub fn run(args: &Args) -> anyhow::Result<()> {
    needs::tools(&[("mkfs.xfs", "xfsprogs"), ("losetup", "mount")])?;
    needs::disk_can_be_made(&[SetUp::Mode("write-back")])?;
    ensure!(args.kills > 0 && !args.gib.is_empty(), "--kills and --gib must be at least 1");
    let mut rows = Vec::new();
    let mut figures = Vec::new();
    let mut met = true;
    for &gib in &args.gib {
        let (setting, cached, all) = measure(args, gib << 30)?;
        println!("{}, {:.1} GiB cached", setting.describe(), cached as f64 / f64::from(1 << 30));
        let mut table = Table::new(&["part of the pause", "median, s", "longest, s", "target", ""]);
        let part = |which: usize| Pauses::from(all.iter().map(|pause| pause[which]));
        for (which, (name, _)) in PARTS.iter().enumerate() {
            let (median, longest) = (part(which).median(), part(which).longest());
            let cells = [format!("{median:.3}"), format!("{longest:.3}"), String::new()];
            table.row([(*name).to_owned()].into_iter().chain(cells).chain([String::new()]));
        }
        let whole = part(PARTS.len());
        let good = whole.longest() < TARGET;
        met &= good;
        table.row([
            "the client's pause".to_owned(),
            format!("{:.3}", whole.median()),
            format!("{:.3}", whole.longest()),
            format!("< {TARGET:.1}"),
            verdict(good),
        ]);
        table.print();
        let parts: Vec<String> =
            (0..PARTS.len()).map(|which| format!("{:.2}", part(which).median())).collect();
        rows.push(
            Row::new(
                format!(
                    "pause of a disk after a kill, {:.1} GiB cached: median / longest of {}; parts \
                     noticed, started, recovered, answered",
                    cached as f64 / f64::from(1 << 30),
                    whole.count()
                ),
                format!("{}; {} s", whole.show(), parts.join(", ")),
            )
            .with_target(format!("< {TARGET} s"), good),
        );
        figures.push(json!({
            "setting": setting.describe(), "cached_bytes": cached, "whole": whole.json(),
            "kills": all,
        }));
    }
    keep("survive-pause", rows, Value::from(figures))?;
    ensure!(met, "a pause was longer than {TARGET} s");
    Ok(())
}

/// Kills the server of a full cache again and again. Returns the bytes cached, and for each kill
/// the seconds of each part, and of the client's pause.
fn measure(args: &Args, size: u64) -> anyhow::Result<(Setting, u64, Vec<[f64; 5]>)> {
    let place = Place::new(args.common.dir.as_deref())?;
    let binary = binary(args.common.forebay.as_deref())?;
    needs::space(&place.path(""), if args.synthetic { size / 8 } else { 2 * size })?;
    place.sparse("primary", size + (1 << 30))?;
    let setting = Setting {
        primary: place.text("primary"),
        cache: ("cache".to_owned(), size),
        mode: "write-back",
        ram: 64 << 20,
        shards: args.shards,
        more: vec!["--sequential-threshold=0".to_owned()],
    };
    fill(args, &binary, &place, &setting)?;
    let mut kept = Kept::start(&binary, &place, &setting)?;
    wait_until_loaded(kept.server())?;
    let cached = kept.server().status()?.counter("cached_blocks") * 4096;
    let device = kept.attach()?;
    finish(tool("mkfs.xfs").args(["-q", "-f", "-K"]).arg(&device))?;
    let mounted = cleanup::mount(&device, &place.path("mnt"))?;
    let pulse = Pulse::new(ROUND * args.kills);
    let stop = AtomicBool::new(false);
    let (all, probed) = std::thread::scope(|scope| {
        let client = scope.spawn(|| probe::run(&place.path("mnt/probe"), &pulse, &stop));
        let all = kill(args, &kept, &pulse, &stop);
        stop.store(true, Relaxed);
        (all, client.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the client panicked"))))
    });
    probed?;
    let all = all?;
    drop(mounted);
    kept.stop()?;
    Ok((setting, cached, all))
}

/// Fills the cache.
fn fill(args: &Args, binary: &Path, place: &Place, setting: &Setting) -> anyhow::Result<()> {
    let (name, size) = &setting.cache;
    progress("filling the cache");
    if args.synthetic {
        // The server would allocate all of an empty file.
        place.sparse(name, *size)?;
        Server::forebay(binary, place, setting)?.stop()?;
        return full_cache::fill(&place.path(name)).map(drop);
    }
    let server = Server::forebay(binary, place, setting)?;
    let load = Load {
        loops: 16,
        connections: 1,
        block: 64 << 10,
        pattern: Pattern::Sequential { read: false, start: 1 << 30, end: size + (1 << 30) },
        time: Duration::from_secs(7200),
        seed: 1,
        content: Content::Random,
    };
    server.load(&load, |done| {
        let done = done.ops * load.block * 100 / size;
        progress(&format!("filling the cache: {done} %"));
    })?;
    server.stop()
}

fn wait_until_loaded(server: &Server) -> anyhow::Result<()> {
    let limit = Instant::now() + PATIENCE;
    while server.status()?.counter("unloaded_segments") > 0 {
        ensure!(Instant::now() < limit, "the cache is not loaded after {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Kills the server, and divides each pause.
fn kill(
    args: &Args,
    kept: &Kept,
    pulse: &Pulse,
    stop: &AtomicBool,
) -> anyhow::Result<Vec<[f64; 5]>> {
    let mut all = Vec::new();
    for round in 0..args.kills {
        std::thread::sleep(INTERVAL);
        wait_until_loaded(kept.server())?;
        progress(&format!("kill {} of {}", round + 1, args.kills));
        let before = kept.wait_for_another(None)?;
        let known = kept.log()?.len();
        let (wall, begin) = (SystemTime::now(), Instant::now());
        ensure!(kept.strike(0), "there is no server to kill");
        kept.wait_for_another(Some(before.pid))?;
        std::thread::sleep(INTERVAL);
        ensure!(!stop.load(Relaxed), "the client ended");
        let log = kept.log()?;
        let answer = pulse.longest_gap(begin, begin + INTERVAL).as_secs_f64();
        all.push(divide(&log[known..], wall, answer)?);
    }
    Ok(all)
}

/// The seconds of each part by the log since the kill at `begin`, then the client's pause. That
/// begins with the last answer before the kill, so it may be longer than the sum.
fn divide(log: &str, begin: SystemTime, pause: f64) -> anyhow::Result<[f64; 5]> {
    let begin = begin.duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64() % DAY;
    let mut last = 0.0;
    let mut parts = [0.0, 0.0, 0.0, 0.0, pause];
    for (part, (name, line)) in parts.iter_mut().zip(PARTS) {
        let end = match line {
            "" => pause,
            line => {
                let found = log.lines().find(|found| found.contains(line));
                let found =
                    found.with_context(|| format!("{name}: no line {line:?} in the log"))?;
                let time = seconds_of(found).with_context(|| format!("no time in {found:?}"))?;
                (time - begin).rem_euclid(DAY)
            }
        };
        *part = (end - last).max(0.0);
        last = end;
    }
    Ok(parts)
}

/// The time of a log line, in seconds since midnight.
fn seconds_of(line: &str) -> Option<f64> {
    let (_, clock) = line.split_whitespace().next()?.strip_suffix('Z')?.split_once('T')?;
    let mut parts = clock.split(':').map(|part| part.parse::<f64>().ok());
    let (hours, minutes, seconds) = (parts.next()??, parts.next()??, parts.next()??);
    Some(hours * 3_600.0 + minutes * 60.0 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_divided_by_the_times_of_lines() {
        let log = "2026-11-25T21:00:00.250000Z ERROR the server was killed by SIGKILL: clients\n\
                   2026-11-25T21:00:00.300000Z  INFO opening control=/x\n\
                   2026-11-25T21:00:00.700000Z  INFO serving endpoints=\"unix:/y\"\n";
        let begin = SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_640_400);
        let parts = divide(log, begin, 0.75).expect("all lines are there");
        for (found, wanted) in parts.iter().zip([0.25, 0.05, 0.4, 0.05, 0.75]) {
            assert!((found - wanted).abs() < 1e-5, "{parts:?}");
        }
        assert!(divide("", begin, 1.0).is_err());
    }
}
