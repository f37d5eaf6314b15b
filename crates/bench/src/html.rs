//! The page of a report: one file that needs nothing else, tables and charts.

use std::fmt::Write as _;

use crate::chart::{self, Line, colour, escape};
use crate::report::Table;
use crate::results::{BASELINE, Group, Measured, Point, Report};

/// Groups that get charts over time each; more of them are shown as families only.
const DETAILED: usize = 8;

const STYLE: &str = "\
body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;\
color:#222;background:#fff}\
table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums;font-size:14px}\
th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd}\
th:first-child,td:first-child{text-align:left}\
svg{width:100%;height:auto;font:11px system-ui,sans-serif;margin:.2rem 0 1rem}\
svg text{fill:#555}.g{stroke:#ddd}.r{fill:#f2f2f2}\
.key{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8em;height:.8em;\
margin-right:.3em}.met{color:#00704f}.missed{color:#b33600;font-weight:600}h3{margin-bottom:0}\
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}svg text{fill:#aaa}\
.g{stroke:#444}.r{fill:#252525}th,td{border-color:#444}.met{color:#4c9}.missed{color:#f96}}";

/// The whole page.
pub fn page(report: &Report, earlier: Option<&Report>) -> String {
    let title = escape(&format!("forebay bench {}", report.benchmark));
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\
         <style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<p>{}. Begun {}.</p>\n",
        escape(&report.title),
        escape(&report.when)
    );
    if !report.targets.is_empty() {
        out += "<h2>Targets</h2>\n";
        out += &table(&report.target_table());
    }
    out += "<h2>Figures</h2>\n";
    out += &table(&report.table());
    out += "<p>gain: against no-cache. hits: blocks read that came from the cache. CPU s: seconds \
            of processor time in the measured time, of all programs started for it. steady: the \
            worst interval of the measured time's second half against the median one.</p>\n";
    if report.groups.len() <= DETAILED {
        for group in &report.groups {
            out += &details(report, group);
        }
    }
    out += &families(report);
    if let Some(prices) = &report.prices {
        out += "<h2>Costs</h2>\n";
        out += &table(&report.cost_table(prices));
    }
    if let Some(earlier) = earlier {
        let _ = writeln!(out, "<h2>Beside the run of {}</h2>", escape(&earlier.when));
        for difference in report.differences(earlier) {
            let _ = writeln!(out, "<p>{}</p>", escape(&difference));
        }
        out += &table(&report.comparison(earlier));
    }
    out += "<h2>How it was measured</h2>\n<table>\n";
    for (name, value) in report.settings.iter().chain(&report.machine) {
        let _ = writeln!(out, "<tr><td>{}</td><td>{}</td></tr>", escape(name), escape(value));
    }
    out += "</table>\n";
    for note in &report.notes {
        let _ = writeln!(out, "<p>{}</p>", escape(note));
    }
    out + "</body></html>\n"
}

fn table(table: &Table) -> String {
    let mut out = "<table>\n".to_owned();
    for (i, row) in table.rows().iter().enumerate() {
        let cell = if i == 0 { "th" } else { "td" };
        out += "<tr>";
        for text in row {
            let class = match text.as_str() {
                "met" => " class=\"met\"",
                "MISSED" => " class=\"missed\"",
                _ => "",
            };
            let _ = write!(out, "<{cell}{class}>{}</{cell}>", escape(text));
        }
        out += "</tr>\n";
    }
    out + "</table>\n"
}

fn legend(names: &[&str]) -> String {
    let mut out = "<p>".to_owned();
    for (i, name) in names.iter().enumerate() {
        let _ = write!(
            out,
            "<span class=\"key\"><i style=\"background:{}\"></i>{}</span>",
            colour(i),
            escape(name)
        );
    }
    out + "</p>\n"
}

/// The charts of one load.
fn details(report: &Report, group: &Group) -> String {
    let mut out = format!("<h2>{}</h2>\n", escape(&group.name));
    let names: Vec<&str> = group.results.iter().map(|one| one.setup.as_str()).collect();
    out += &legend(&names);
    let ramp = group.results.iter().map(|one| one.ramp).max().unwrap_or(0) as f64;
    let throughput = |one: &Measured| {
        let len = one.interval() as f64;
        let means = one.intervals().into_iter().enumerate();
        means.map(|(i, mean)| ((i as f64 + 0.5) * len, Some(mean))).collect()
    };
    let len = group.results.iter().map(Measured::interval).max().unwrap_or(1);
    let title = format!("{}, means of {len} s; grey: ramp-up", report.unit);
    out += &over_time(&title, group, ramp, &throughput);
    let percentiles = latency_bars(group);
    if percentiles.iter().any(|(_, values)| values.iter().any(|value| *value > 0.0)) {
        out += "<h3>Latency, ms (logarithmic)</h3>\n";
        out += &chart::bars("latency in milliseconds", &percentiles);
    }
    type Pick = fn(&Point) -> Option<f64>;
    let observed: [(&str, Pick); 3] = [
        ("Hit ratio, % of blocks read", |point| point.hit_ratio.map(|ratio| ratio * 100.0)),
        ("Dirty, % of the limit", |point| point.dirty.map(|level| level * 100.0)),
        ("CPU, processors in use by all programs", |point| Some(point.cpu)),
    ];
    for (title, pick) in observed {
        let line = |one: &Measured| {
            let points = one.points.iter().enumerate();
            points.map(|(i, point)| (i as f64 + 1.0, pick(point))).collect()
        };
        if group.results.iter().flat_map(|one| &one.points).any(|point| pick(point).is_some()) {
            out += &over_time(title, group, ramp, &line);
        }
    }
    out
}

type Points = Vec<(f64, Option<f64>)>;

fn over_time(
    title: &str,
    group: &Group,
    ramp: f64,
    points: &dyn Fn(&Measured) -> Points,
) -> String {
    let line = |one: &Measured| Line { name: one.setup.clone(), points: points(one) };
    let lines: Vec<Line> = group.results.iter().map(line).collect();
    if lines.iter().all(|line| line.points.len() < 2) {
        return String::new();
    }
    format!("<h3>{}</h3>\n", escape(title)) + &chart::lines(title, "seconds", &lines, false, ramp)
}

fn latency_bars(group: &Group) -> Vec<(String, Vec<f64>)> {
    type Pick = fn(&Measured) -> f64;
    let picks: [(&str, Pick); 6] = [
        ("mean", |one| one.latency.mean_ms),
        ("50 %", |one| one.latency.p50_ms),
        ("95 %", |one| one.latency.p95_ms),
        ("99 %", |one| one.latency.p99_ms),
        ("99.9 %", |one| one.latency.p999_ms),
        ("max", |one| one.latency.max_ms),
    ];
    let bar = |(name, pick): (&str, Pick)| {
        (name.to_owned(), group.results.iter().map(pick).collect::<Vec<f64>>())
    };
    picks.map(bar).into()
}

/// A chart for each family of loads that differ in one number.
fn families(report: &Report) -> String {
    let mut out = String::new();
    let mut seen: Vec<&str> = Vec::new();
    for family in report.groups.iter().filter_map(|group| group.family.as_deref()) {
        if seen.contains(&family) {
            continue;
        }
        seen.push(family);
        let members: Vec<&Group> =
            report.groups.iter().filter(|group| group.family.as_deref() == Some(family)).collect();
        let Some(first) = members.first() else { continue };
        let names: Vec<&str> = first.results.iter().map(|one| one.setup.as_str()).collect();
        let _ = writeln!(out, "<h2>{}</h2>", escape(family));
        out += &legend(&names);
        type Pick = fn(&Measured) -> f64;
        let picks: [(&str, Pick); 2] = [
            (&report.unit, |one| one.rate),
            ("95 % of the response times, ms", |one| one.latency.p95_ms),
        ];
        for (title, pick) in picks {
            let line = |name: &&str| {
                let value = |group: &&Group| Some((group.x?, group.of(name).map(pick)));
                Line {
                    name: (*name).to_owned(),
                    points: members.iter().filter_map(value).collect(),
                }
            };
            let lines: Vec<Line> = names.iter().map(line).collect();
            let _ = writeln!(out, "<h3>{}</h3>", escape(title));
            out += &chart::lines(title, "threads", &lines, true, 0.0);
        }
    }
    if report.groups.len() > 1 {
        out += &gains(report);
    }
    out
}

/// The gain of each set-up under each load.
fn gains(report: &Report) -> String {
    let Some(first) = report.groups.first() else { return String::new() };
    let names: Vec<&str> = first.results.iter().map(|one| one.setup.as_str()).collect();
    let group = |group: &Group| {
        let gain = |name: &&str| group.ratio(name, BASELINE).unwrap_or(0.0);
        (group.name.clone(), names.iter().map(gain).collect::<Vec<f64>>())
    };
    let groups: Vec<_> = report.groups.iter().map(group).collect();
    if groups.len() > DETAILED || groups.iter().all(|(_, gains)| gains.iter().all(|g| *g == 0.0)) {
        return String::new();
    }
    "<h2>Gains (logarithmic)</h2>\n".to_owned() + &legend(&names) + &chart::bars("gain", &groups)
}
