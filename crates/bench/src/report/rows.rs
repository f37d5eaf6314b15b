//! `forebay-bench report`: rows of the table in `docs/results.md`, from the JSON files of the
//! benchmarks.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::Value;

use crate::WrongUsage;
use crate::report::kept::{Kept, Row};
use crate::report::table::short;
use crate::report::{BASELINE, Group, Measured, Report};

/// Arguments of `forebay-bench report`.
#[derive(clap::Args)]
pub struct Args {
    /// JSON files of forebay bench (NAME-TIME.json) and of forebay-bench (target/bench/NAME.json)
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
        let run = read(path)?;
        run.lines(&args.machine, &args.commit).iter().for_each(|row| println!("{row}"));
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Kept> {
    let shown = path.display();
    let text = fs::read_to_string(path).with_context(|| shown.to_string())?;
    let user = serde_json::from_str::<Report>(&text).map(|report| kept(&report));
    user.or_else(|_| serde_json::from_str(&text)).map_err(|_| {
        let what = format!(
            "{shown}: not the figures of a benchmark; name a file NAME-TIME.json of the --out \
             directory of forebay bench, or target/bench/NAME.json of forebay-bench"
        );
        WrongUsage(what).into()
    })
}

impl Kept {
    /// The lines of the table.
    fn lines(&self, machine: &str, commit: &str) -> Vec<String> {
        let date = self.when.split('T').next().unwrap_or("-");
        let command = match self.command.as_str() {
            "" => "-".to_owned(),
            command => format!("`{command}`"),
        };
        let commands = std::iter::once(command.as_str()).chain(std::iter::repeat("the same"));
        let line = |(row, command): (&Row, &str)| {
            let Row { figure, result, target, met } = row;
            let target = target.as_deref().unwrap_or("-");
            let verdict = met.map_or("-", |met| if met { "met" } else { "**missed**" });
            format!(
                "| {figure} | {result} | {target} | {verdict} | {machine} | {commit} | {date} | \
                 {command} |"
            )
        };
        self.rows.iter().zip(commands).map(line).collect()
    }
}

/// A report of a benchmark for users: a row for each set-up of each group, then one for each
/// target.
fn kept(report: &Report) -> Kept {
    let mut rows = Vec::new();
    for group in &report.groups {
        for one in &group.results {
            let of = if report.groups.len() > 1 { &group.name } else { "" };
            let name = [report.benchmark.as_str(), of].join(" ");
            let figure = format!("{}: {}", name.trim_end(), one.setup);
            rows.push(Row::new(figure, result(report, group, one)));
        }
    }
    for target in &report.targets {
        let row = Row::new(format!("{}: {}", report.benchmark, target.what), short(target.found));
        rows.push(row.with_target(target.wanted_text(), target.is_met()));
    }
    let (when, command) = (report.when.clone(), report.command.clone());
    Kept { when, command, rows, figures: Value::Null }
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
        let found = kept(&report).lines("B", "a5a3120");
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
    #[test]
    fn figures_of_developers_are_rows_too() {
        let row = Row::new("restart after a kill", "0.5 s").with_target("< 1 s", true);
        let kept = Kept {
            when: "2026-01-31T12:00:00Z".to_owned(),
            command: "forebay-bench restart".to_owned(),
            rows: vec![row, Row::new("start", "0.1 s")],
            figures: serde_json::json!({ "seconds": [0.5, 0.1] }),
        };
        let place = tempfile();
        fs::write(&place, serde_json::to_string(&kept).expect("it is plain data"))
            .expect("written");
        let found = read(&place).expect("figures of a run").lines("B", "a5a3120");
        fs::remove_file(&place).expect("it is there");
        assert_eq!(
            found,
            [
                "| restart after a kill | 0.5 s | < 1 s | met | B | a5a3120 | 2026-01-31 | \
                 `forebay-bench restart` |",
                "| start | 0.1 s | - | - | B | a5a3120 | 2026-01-31 | the same |",
            ]
        );
    }

    fn tempfile() -> PathBuf {
        std::env::temp_dir().join(format!("forebay-rows-{}.json", std::process::id()))
    }
}
