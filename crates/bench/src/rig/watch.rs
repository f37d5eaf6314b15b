//! Observations made each second while a load runs: CPU time of every program, and the cache's
//! statistics.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::report::{Measured, Point};
use crate::rig::cleanup::cpu_of;
use crate::rig::server::Server;

/// One observation; counters are cumulative from the start of the programs.
#[derive(Clone, Debug, Default)]
struct Moment {
    cpu: Vec<f64>,
    hits: u64,
    reads: u64,
    dirty: Option<f64>,
    counters: Vec<u64>,
    levels: Vec<u64>,
}

/// Counters of the cache that are included in the figures.
const KEPT: [&str; 26] = [
    "ram_hit_blocks",
    "ssd_hit_blocks",
    "primary_read_blocks",
    "admitted_blocks",
    "evicted_blocks",
    "destaged_blocks",
    "destage_writes",
    "log_bytes",
    "log_blocks",
    "store_bytes",
    "stored_blocks",
    "copied_blocks",
    "delta_blocks",
    "delta_bytes",
    "duplicate_blocks",
    "dense_blocks",
    "delta_tries",
    "similar_written",
    "ram_compressed_hit_blocks",
    "rebased_blocks",
    "cpu_nanos",
    "write_bytes",
    "flushes",
    "cache_flushes",
    "primary_flushes",
    "throttled_nanos",
];

/// Levels of the cache whose final values are included.
const LEVELS: [&str; 7] = [
    "cached_blocks",
    "log_used_bytes",
    "store_used_bytes",
    "associate_blocks",
    "similar_blocks",
    "ram_blocks",
    "ram_bytes",
];

/// The observations of a load.
pub struct Observed {
    names: Vec<String>,
    moments: Vec<Moment>,
}

/// Runs a load, and observes programs and cache each second. Programs with the same name are
/// counted together.
pub fn watch<T>(
    programs: &[(&str, u32)],
    cache: Option<&Server>,
    load: impl FnOnce() -> T,
) -> (T, Observed) {
    let done = AtomicBool::new(false);
    let begin = Instant::now();
    let look = || {
        let cpu = programs.iter().map(|(_, pid)| cpu_of(*pid).unwrap_or_default().as_secs_f64());
        let mut moment = Moment { cpu: cpu.collect(), ..Moment::default() };
        let Some(status) = cache.and_then(|server| server.status().ok()) else { return moment };
        let count = |name: &str| status.counter(name);
        moment.hits = count("ram_hit_blocks") + count("ssd_hit_blocks");
        moment.reads = moment.hits + count("primary_read_blocks");
        let limit = count("dirty_limit_blocks");
        moment.dirty = (limit > 0).then(|| count("dirty_blocks") as f64 / limit as f64);
        moment.counters = KEPT.map(count).to_vec();
        moment.levels = LEVELS.map(count).to_vec();
        moment
    };
    let (outcome, moments) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut moments = vec![look()];
            while !done.load(Relaxed) {
                let next = begin + Duration::from_secs(moments.len() as u64);
                let left = next.saturating_duration_since(Instant::now());
                std::thread::sleep(left.min(Duration::from_millis(50)));
                if left.is_zero() {
                    moments.push(look());
                }
            }
            moments.push(look());
            moments
        });
        let outcome = load();
        done.store(true, Relaxed);
        (outcome, watcher.join().unwrap_or_default())
    });
    let names = programs.iter().map(|(name, _)| (*name).to_owned()).collect();
    (outcome, Observed { names, moments })
}

impl Observed {
    /// Adds the observations to a result, whose `ramp` says which seconds do not count.
    pub fn enter(&self, measured: &mut Measured) {
        // The last observation was made at the end, after less than a second.
        let whole = &self.moments[..self.moments.len().saturating_sub(1)];
        measured.points = whole.windows(2).map(|two| point(&two[0], &two[1])).collect();
        let last = self.moments.last();
        let Some((first, last)) = self.moments.get(measured.ramp).or(last).zip(last) else {
            return;
        };
        for (i, name) in self.names.iter().enumerate() {
            *measured.cpu.entry(name.clone()).or_default() += last.cpu[i] - first.cpu[i];
        }
        let reads = last.reads.saturating_sub(first.reads);
        if reads > 0 {
            let hits = last.hits.saturating_sub(first.hits);
            measured.hit_ratio = Some(hits as f64 / reads as f64);
        }
        for ((name, first), last) in KEPT.iter().zip(&first.counters).zip(&last.counters) {
            measured.figures.insert((*name).to_owned(), last.saturating_sub(*first) as f64);
        }
        for (name, level) in LEVELS.iter().zip(&last.levels) {
            measured.figures.insert((*name).to_owned(), *level as f64);
        }
    }
}

fn point(before: &Moment, after: &Moment) -> Point {
    let sum = |moment: &Moment| moment.cpu.iter().sum::<f64>();
    let reads = after.reads.saturating_sub(before.reads);
    let hits = after.hits.saturating_sub(before.hits);
    Point {
        hit_ratio: (reads > 0).then(|| hits as f64 / reads as f64),
        dirty: after.dirty,
        cpu: sum(after) - sum(before),
    }
}
