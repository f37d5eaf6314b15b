//! `forebay-bench report`: rows of the table in `docs/results.md`, from the JSON files of the
//! benchmarks for users.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::WrongUsage;
use crate::report::table::short;
use crate::report::{BASELINE, Group, Measured, Report};

/// Arguments of `forebay-bench report`.
#[derive(clap::Args)]
pub struct Args {
    /// JSON files of forebay bench: NAME-TIME.json
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// The letter of the machine in the table
    #[arg(long, default_value = "-")]
    machine: String,
    /// The commit of the build that was measured
    #[arg(long, default_value = "-")]
    commit: String,
}

/// Prints the rows of every file.
///
/// # Errors
/// When a file cannot be read, or is not a report.
pub fn run(args: &Args) -> anyhow::Result<()> {
    for path in &args.files {
        let report = read(path)?;
        rows(&report, &args.machine, &args.commit).iter().for_each(|row| println!("{row}"));
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Report> {
    let shown = path.display();
    let text = fs::read_to_string(path).with_context(|| shown.to_string())?;
    serde_json::from_str(&text).map_err(|_| {
        let what = format!(
            "{shown}: not the figures of a forebay bench run; name a file NAME-TIME.json of its \
             --out directory"
        );
        WrongUsage(what).into()
    })
}

/// A row for each set-up of each group, then one for each target.
fn rows(report: &Report, machine: &str, commit: &str) -> Vec<String> {
    let mut cells = Vec::new();
    for group in &report.groups {
        for one in &group.results {
            let of = if report.groups.len() > 1 { &group.name } else { "" };
            let name = [report.benchmark.as_str(), of].join(" ");
            let figure = format!("{}: {}", name.trim_end(), one.setup);
            cells.push([figure, result(report, group, one), "-".to_owned(), "-".to_owned()]);
        }
    }
    for target in &report.targets {
        let verdict = if target.is_met() { "met" } else { "**missed**" };
        let figure = format!("{}: {}", report.benchmark, target.what);
        cells.push([figure, short(target.found), target.wanted_text(), verdict.to_owned()]);
    }
    let date = report.when.split('T').next().unwrap_or("-");
    let command = match report.command.as_str() {
        "" => "-".to_owned(),
        command => format!("`{command}`"),
    };
    let commands = std::iter::once(command.as_str()).chain(std::iter::repeat("the same"));
    let row = |(cells, command): ([String; 4], &str)| {
        format!("| {} | {machine} | {commit} | {date} | {command} |", cells.join(" | "))
    };
    cells.into_iter().zip(commands).map(row).collect()
}

/// The results of a set-up: rate, gain, and other figures.
fn result(report: &Report, group: &Group, one: &Measured) -> String {
    let mut parts = vec![format!("{} {}", short(one.rate), report.unit)];
    if one.setup != BASELINE
        && let Some(gain) = group.ratio(&one.setup, BASELINE)
    {
        parts.push(format!("{} times", short(gain)));
    }
    if one.latency.count > 0 {
        parts.push(format!("99 % {} ms", short(one.latency.p99_ms)));
    }
    let hits = one.hit_ratio.map(|ratio| format!("hits {:.1} %", ratio * 100.0));
    let bytes = one.written_per_byte().map(|bytes| format!("{bytes:.2} SSD bytes per byte"));
    let steady = one.steadiness().map(|share| format!("steady {}", short(share)));
    parts.extend([hits, bytes, steady].into_iter().flatten());
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Target;

    #[test]
    fn set_ups_and_targets_are_rows_of_eight_cells() {
        let one =
            |setup: &str, rate| Measured { setup: setup.to_owned(), rate, ..Measured::default() };
        let group = Group {
            results: vec![one(BASELINE, 10.0), one("write-back", 85.0)],
            ..Group::default()
        };
        let target =
            |what: &str, found| Target { what: what.to_owned(), found, wanted: 8.0, or: None };
        let report = Report {
            benchmark: "oltp".to_owned(),
            when: "2026-01-31T12:00:00Z".to_owned(),
            unit: "transactions/s".to_owned(),
            command: "forebay bench oltp".to_owned(),
            groups: vec![group],
            targets: vec![target("gain", 8.5), target("other", 7.0)],
            ..Report::default()
        };
        let found = rows(&report, "B", "a5a3120");
        assert_eq!(
            found,
            [
                "| oltp: no-cache | 10.0 transactions/s | - | - | B | a5a3120 | 2026-01-31 | \
                 `forebay bench oltp` |",
                "| oltp: write-back | 85.0 transactions/s, 8.50 times | - | - | B | a5a3120 | \
                 2026-01-31 | the same |",
                "| oltp: gain | 8.50 | >= 8.00 | met | B | a5a3120 | 2026-01-31 | the same |",
                "| oltp: other | 7.00 | >= 8.00 | **missed** | B | a5a3120 | 2026-01-31 | \
                 the same |",
            ]
        );
    }
}
