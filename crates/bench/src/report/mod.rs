//! The results of a benchmark, in the form of the JSON file: groups of set-ups measured under the
//! same load, and the values derived from them: gains, intervals, costs, the comparison with an
//! earlier run.

mod chart;
pub mod html;
pub mod kept;
mod progress;
pub mod rows;
mod scale;
pub mod table;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use crate::WrongUsage;
use crate::load::sample::Latency;
use table::{Table, optional, short, verdict};

pub use progress::progress;

/// The version of the JSON file.
const VERSION: u32 = 1;
/// The set-up that others are compared with.
pub const BASELINE: &str = "no-cache";

/// Name of the figure with the maximum possible gain.
pub const BOUND: &str = "bound of the gain";

/// The report of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The version of the JSON format.
    pub version: u32,
    /// The benchmark's name, as on the command line.
    pub benchmark: String,
    /// A description, one line.
    pub title: String,
    /// Start time, UTC.
    pub when: String,
    /// The command line; empty in files of earlier versions.
    #[serde(default)]
    pub command: String,
    /// Properties of the machine and versions of programs.
    pub machine: BTreeMap<String, String>,
    /// Sizes, times, modes: settings that must be equal for two runs to be comparable.
    pub settings: BTreeMap<String, String>,
    /// The unit of rates.
    pub unit: String,
    /// The results.
    pub groups: Vec<Group>,
    /// The targets.
    pub targets: Vec<Target>,
    /// Remarks for readers.
    pub notes: Vec<String>,
    /// The prices for the cost table.
    pub prices: Option<Prices>,
}

/// Set-ups under one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// The name of the load.
    pub name: String,
    /// The family of the group; groups of one family differ only in `x`.
    pub family: Option<String>,
    /// The number that differs within the family, such as threads.
    pub x: Option<f64>,
    /// The results, one for each set-up.
    pub results: Vec<Measured>,
}

/// One set-up under one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The set-up's name.
    pub setup: String,
    /// The mean rate over the measured time, in the report's unit.
    pub rate: f64,
    /// Number of initial seconds of `per_second` that do not count.
    pub ramp: usize,
    /// The rate in each second, ramp-up included, in the report's unit.
    pub per_second: Vec<f64>,
    /// Latencies of the operations.
    pub latency: Latency,
    /// The observations of each second.
    pub points: Vec<Point>,
    /// Share of blocks read that came from the cache, in the measured time.
    pub hit_ratio: Option<f64>,
    /// CPU seconds in the measured time, by program.
    pub cpu: BTreeMap<String, f64>,
    /// Additional figures, by name.
    pub figures: BTreeMap<String, f64>,
}

/// The observations of one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Share of blocks read that came from the cache.
    pub hit_ratio: Option<f64>,
    /// Dirty blocks as a share of the limit.
    pub dirty: Option<f64>,
    /// Number of processors in use, by all programs started for the run.
    pub cpu: f64,
}

/// A target, and the value found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// The measured quantity.
    pub what: String,
    /// The value found.
    pub found: f64,
    /// The minimum value.
    pub wanted: f64,
    /// An alternative way to meet the target: its description, the value found, and the minimum
    /// value.
    pub or: Option<(String, f64, f64)>,
}

impl Target {
    /// Whether the target is met.
    pub fn is_met(&self) -> bool {
        let other = self.or.as_ref().is_some_and(|(_, found, wanted)| found >= wanted);
        self.found >= self.wanted || other
    }

    fn wanted_text(&self) -> String {
        match &self.or {
            Some((what, found, wanted)) => {
                let (first, second) = (short(self.wanted), short(*wanted));
                format!(">= {first}, or >= {second} {what} (found {})", short(*found))
            }
            None => format!(">= {}", short(self.wanted)),
        }
    }
}

/// Prices, in any currency.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[group(skip)]
pub struct Prices {
    /// Price of the storage behind the cache, for the cost table
    #[arg(long = "price-storage", value_name = "PRICE", default_value_t = 30_000.0)]
    pub storage: f64,
    /// Price of the SSD
    #[arg(long = "price-ssd", value_name = "PRICE", default_value_t = 9_000.0)]
    pub ssd: f64,
    /// Price of the caching software
    #[arg(long = "price-software", value_name = "PRICE", default_value_t = 0.0)]
    pub software: f64,
}

/// A row of the cost table.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// The name of the set-up.
    pub setup: String,
    /// Total price.
    pub total: f64,
    /// Price per unit of rate.
    pub per_rate: f64,
    /// Price of SSD and software per unit of gain; `None` for the baseline.
    pub per_gain: Option<f64>,
}

impl Measured {
    /// Seconds per interval in the charts and the steadiness: ten, or fewer in short runs.
    pub fn interval(&self) -> usize {
        match self.per_second.len().saturating_sub(self.ramp) {
            0..30 => 1,
            30..100 => 5,
            _ => 10,
        }
    }

    /// The mean rate in each whole interval, ramp-up included.
    pub fn intervals(&self) -> Vec<f64> {
        let len = self.interval();
        self.per_second
            .chunks_exact(len)
            .map(|part| part.iter().sum::<f64>() / len as f64)
            .collect()
    }

    /// The worst interval of the second half of the measured time, as a share of the median one.
    pub fn steadiness(&self) -> Option<f64> {
        let measured = self.per_second.get(self.ramp..)?;
        let len = self.interval();
        let half = &measured[measured.len() / 2..];
        let mut means: Vec<f64> = half.chunks_exact(len).map(|part| part.iter().sum()).collect();
        means.sort_by(f64::total_cmp);
        let median = means.get(means.len() / 2).copied().filter(|median| *median > 0.0)?;
        Some(means.first()? / median)
    }

    /// Bytes written to the SSD per byte that clients wrote to the cache.
    pub fn written_per_byte(&self) -> Option<f64> {
        let figure = |name: &str| self.figures.get(name).copied();
        let written = figure("write_bytes").filter(|bytes| *bytes > 0.0)?;
        // Earlier builds have no store.
        let store = figure("store_bytes").unwrap_or(0.0);
        Some((figure("log_bytes")? + store) / written)
    }

    /// Bytes of blocks per byte of the SSD in use at the end, headers and garbage included.
    pub fn held_per_byte(&self) -> Option<f64> {
        let figure = |name: &str| self.figures.get(name).copied();
        let store = figure("store_used_bytes").unwrap_or(0.0);
        let used = Some(figure("log_used_bytes")? + store).filter(|bytes| *bytes > 0.0)?;
        Some(figure("cached_blocks")? * 4096.0 / used)
    }

    /// CPU seconds of all programs, if they were observed.
    pub fn cpu_total(&self) -> Option<f64> {
        (!self.cpu.is_empty()).then(|| self.cpu.values().sum())
    }
}

impl Group {
    /// The result of the set-up with this name.
    pub fn of(&self, setup: &str) -> Option<&Measured> {
        self.results.iter().find(|result| result.setup == setup)
    }

    /// A set-up's rate divided by another's.
    pub fn ratio(&self, setup: &str, other: &str) -> Option<f64> {
        let other = self.of(other)?.rate;
        Some(self.of(setup)?.rate / other).filter(|ratio| ratio.is_finite())
    }

    /// The costs of each set-up.
    pub fn costs(&self, prices: &Prices) -> Vec<Cost> {
        let cost = |result: &Measured| {
            let (extra, storage) = match result.setup.as_str() {
                BASELINE => (0.0, prices.storage),
                "bare-ssd" => return None,
                "nbdkit" => (prices.ssd, prices.storage),
                _ => (prices.ssd + prices.software, prices.storage),
            };
            let gain = self.ratio(&result.setup, BASELINE)?;
            Some(Cost {
                setup: result.setup.clone(),
                total: storage + extra,
                per_rate: (storage + extra) / result.rate,
                per_gain: (result.setup != BASELINE).then_some(extra / gain),
            })
        };
        self.results.iter().filter_map(cost).collect()
    }
}

impl Report {
    /// An empty report that starts now.
    pub fn new(benchmark: &str, title: &str, unit: &str) -> Self {
        Self {
            version: VERSION,
            benchmark: benchmark.to_owned(),
            title: title.to_owned(),
            unit: unit.to_owned(),
            when: utc(SystemTime::now()),
            command: command("forebay"),
            machine: machine(),
            ..Self::default()
        }
    }

    /// Adds a setting.
    pub fn set(&mut self, name: &str, value: impl ToString) {
        self.settings.insert(name.to_owned(), value.to_string());
    }

    /// Adds a target if there is a value for it.
    pub fn target(&mut self, what: &str, found: Option<f64>, wanted: f64) {
        if let Some(found) = found {
            self.targets.push(Target { what: what.to_owned(), found, wanted, or: None });
        }
    }

    /// Reads an earlier report of the same benchmark.
    pub fn read(path: &Path, benchmark: &str) -> anyhow::Result<Self> {
        let at = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("--compare {at}"))?;
        let report: Self = serde_json::from_str(&text)
            .map_err(|error| WrongUsage(format!("--compare {at}: not a report: {error}")))?;
        if report.version != VERSION || report.benchmark != benchmark {
            let (name, version) = (&report.benchmark, report.version);
            let what = format!("a report of {name}, version {version}; needed: {benchmark}");
            return Err(WrongUsage(format!("--compare {at}: {what}")).into());
        }
        Ok(report)
    }

    /// Prints the tables.
    pub fn print(&self, earlier: Option<&Self>) {
        println!("\n{}: {}", self.benchmark, self.title);
        for (name, value) in &self.settings {
            println!("  {name}: {value}");
        }
        println!();
        self.table().print();
        if let Some(prices) = &self.prices {
            println!();
            self.cost_table(prices).print();
        }
        if let Some(earlier) = earlier {
            println!("\ncompared with the run of {}", earlier.when);
            for difference in self.differences(earlier) {
                println!("  {difference}");
            }
            self.comparison(earlier).print();
        }
        if !self.targets.is_empty() {
            println!();
            self.target_table().print();
        }
        for note in &self.notes {
            println!("note: {note}");
        }
    }

    /// The table of all set-ups of all groups.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&[
            "load", "set-up", &self.unit, "gain", "mean ms", "95 %", "99 %", "max", "hits",
            "SSD/byte", "held", "CPU s", "steady", "bound",
        ]);
        for group in &self.groups {
            for one in &group.results {
                let gain = group.ratio(&one.setup, BASELINE);
                let latency = Some(one.latency).filter(|latency| latency.count > 0);
                let millis =
                    |pick: fn(&Latency) -> f64| optional(latency.as_ref().map(pick), short);
                table.row([
                    group.name.clone(),
                    one.setup.clone(),
                    short(one.rate),
                    optional(gain, short),
                    millis(|latency| latency.mean_ms),
                    millis(|latency| latency.p95_ms),
                    millis(|latency| latency.p99_ms),
                    millis(|latency| latency.max_ms),
                    optional(one.hit_ratio, |ratio| format!("{:.1} %", ratio * 100.0)),
                    optional(one.written_per_byte(), |bytes| format!("{bytes:.2}")),
                    optional(one.held_per_byte(), |bytes| format!("{bytes:.2}")),
                    optional(one.cpu_total(), short),
                    optional(one.steadiness(), short),
                    optional(one.figures.get(BOUND).copied(), short),
                ]);
            }
        }
        table.drop_empty();
        table
    }

    /// The costs of each set-up of the first group.
    pub fn cost_table(&self, prices: &Prices) -> Table {
        let per = format!("per {}", self.unit);
        let mut table = Table::new(&["cost", "total", &per, "SSD and software per unit of gain"]);
        for cost in self.groups.first().into_iter().flat_map(|group| group.costs(prices)) {
            let per_gain = optional(cost.per_gain, |cost| format!("{cost:.2}"));
            let (total, per_rate) = (format!("{:.0}", cost.total), format!("{:.2}", cost.per_rate));
            table.row([cost.setup, total, per_rate, per_gain]);
        }
        table
    }

    /// The table of targets.
    pub fn target_table(&self) -> Table {
        let mut table = Table::new(&["target", "found", "wanted", ""]);
        for target in &self.targets {
            let (found, met) = (short(target.found), verdict(target.is_met()));
            table.row([target.what.clone(), found, target.wanted_text(), met]);
        }
        table
    }

    /// The settings that differ from an earlier run, in words.
    pub fn differences(&self, earlier: &Self) -> Vec<String> {
        let names = self.settings.keys().chain(earlier.settings.keys());
        let mut names: Vec<&String> = names.collect();
        names.sort();
        names.dedup();
        let shown = |report: &Self, name: &str| {
            report.settings.get(name).cloned().unwrap_or_else(|| "nothing".to_owned())
        };
        names.retain(|name| self.settings.get(*name) != earlier.settings.get(*name));
        let differ = |name: &&String| {
            format!("differs: {name}: {} before, {} now", shown(earlier, name), shown(self, name))
        };
        names.iter().map(differ).collect()
    }

    /// The table of results that both runs have.
    pub fn comparison(&self, earlier: &Self) -> Table {
        let mut table =
            Table::new(&["load", "set-up", "before", "now", "ratio", "gain before", "gain now"]);
        for group in &self.groups {
            let Some(before) = earlier.groups.iter().find(|one| one.name == group.name) else {
                continue;
            };
            for now in &group.results {
                let Some(then) = before.of(&now.setup) else { continue };
                table.row([
                    group.name.clone(),
                    now.setup.clone(),
                    short(then.rate),
                    short(now.rate),
                    short(now.rate / then.rate),
                    optional(before.ratio(&now.setup, BASELINE), short),
                    optional(group.ratio(&now.setup, BASELINE), short),
                ]);
            }
        }
        table
    }

    /// Writes the JSON file and the page into a directory; returns the paths of both.
    pub fn save(&self, out: &Path, earlier: Option<&Self>) -> anyhow::Result<(PathBuf, PathBuf)> {
        fs::create_dir_all(out).with_context(|| format!("{}", out.display()))?;
        let stamp: String = self.when.chars().filter(char::is_ascii_alphanumeric).collect();
        let path = |extension: &str| out.join(format!("{}-{stamp}.{extension}", self.benchmark));
        let (json, page) = (path("json"), path("html"));
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(&json, text).with_context(|| format!("{}", json.display()))?;
        let text = html::page(self, earlier);
        fs::write(&page, text).with_context(|| format!("{}", page.display()))?;
        Ok((json, page))
    }

    /// Prints and saves the report, and prints the paths.
    ///
    /// # Errors
    /// When the files cannot be written, or nothing was measured.
    pub fn finish(&self, out: &Path, earlier: Option<&Self>) -> anyhow::Result<PathBuf> {
        ensure!(!self.groups.is_empty(), "nothing was measured");
        self.print(earlier);
        let (json, page) = self.save(out, earlier)?;
        println!("\nfigures: {}\nreport:  {}", json.display(), page.display());
        Ok(page)
    }
}

/// The command line of this process, as one of `program`.
fn command(program: &str) -> String {
    std::iter::once(program.to_owned())
        .chain(std::env::args().skip(1))
        .collect::<Vec<_>>()
        .join(" ")
}

/// A time in the form `2026-01-31T23:59:59Z`, by Hinnant's algorithm for civil calendars.
fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// The properties of the machine.
fn machine() -> BTreeMap<String, String> {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split(':').nth(1)).unwrap_or("unknown").trim().to_owned()
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = format!("{processors} x {}", field(&text("/proc/cpuinfo"), "model name"));
    let kernel = text("/proc/sys/kernel/osrelease").trim().to_owned();
    let load = text("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" ");
    let memory = field(&text("/proc/meminfo"), "MemTotal");
    let kib: f64 = memory.trim_end_matches(" kB").parse().unwrap_or(f64::NAN);
    [
        ("processors", cpu),
        ("memory", format!("{} GiB", short(kib / 1048576.0))),
        ("kernel", kernel),
        ("load at the start", load),
        ("forebay", env!("CARGO_PKG_VERSION").to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, wanted) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
        ] {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), wanted);
        }
    }

    #[test]
    fn costs_are_those_of_the_published_example() {
        let result = |setup: &str, rate: f64| Measured {
            setup: setup.to_owned(),
            rate,
            ..Measured::default()
        };
        let group = Group {
            results: vec![result(BASELINE, 430.0), result("write-back", 3_449.0)],
            ..Group::default()
        };
        let prices = Prices { storage: 30_000.0, ssd: 9_000.0, software: 2_500.0 };
        let costs = group.costs(&prices);
        assert_eq!(format!("{:.2}", costs[1].per_rate), "12.03");
        assert_eq!(costs[1].per_gain.map(|cost| cost.round()), Some(1_434.0));
        assert_eq!((costs[0].total, costs[0].per_gain), (30_000.0, None));
    }

    #[test]
    fn a_dip_in_the_second_half_shows_and_one_before_does_not() {
        let mut one = Measured { ramp: 10, per_second: vec![100.0; 210], ..Measured::default() };
        one.per_second[..100].fill(1.0);
        assert_eq!(one.steadiness(), Some(1.0));
        one.per_second[150..160].fill(50.0);
        assert_eq!(one.interval(), 10);
        assert_eq!(one.steadiness(), Some(0.5));
    }

    #[test]
    fn a_target_may_be_met_in_a_second_way() {
        let mut target = Target { what: "gain".to_owned(), found: 5.0, wanted: 8.0, or: None };
        assert!(!target.is_met());
        target.or = Some(("of the bare SSD".to_owned(), 0.95, 0.9));
        assert!(target.is_met());
    }
}
