//! The page of a report: one self-contained file with tables and charts.

use std::fmt::Write as _;

use crate::report::chart::{self, Axes, Line, colour, escape};
use crate::report::scale::Scale;
use crate::report::table::Table;
use crate::report::{BASELINE, Group, Measured, Point, Report};

/// Maximum number of groups with charts over time; more groups are shown as families only.
const DETAILED: usize = 12;
/// Maximum number of groups of bars next to each other.
const BARS_MAX: usize = 12;
/// Lines are drawn on a logarithmic scale if one's mean is this many times another's.
const LOGARITHMIC_FROM: f64 = 8.0;

const STYLE: &str = "\
body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;\
color:#222;background:#fff}\
table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums;font-size:14px}\
th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd}\
th:first-child,td:first-child,.t{text-align:left}th{vertical-align:bottom}\
.wide{overflow-x:auto}\
svg{width:100%;height:auto;font:11px system-ui,sans-serif;margin:.2rem 0 1rem}\
svg text{fill:#555}.g{stroke:#ddd}.r{fill:#f0f0f0}\
.legend{position:sticky;top:0;margin:0;padding:.3rem 0;background:#fff}\
.key{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8em;height:.8em;\
margin-right:.3em}.met{color:#00704f}.missed{color:#b33600;font-weight:600}h3{margin-bottom:0}\
@media(prefers-color-scheme:dark){:root{color-scheme:dark}\
body{color:#ddd;background:#181818}.legend{background:#181818}svg text{fill:#aaa}\
.g{stroke:#444}.r{fill:#272727}th,td{border-color:#444}.met{color:#4c9}.missed{color:#f96}}";

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
    out += "<p>gain: against no-cache. hits: blocks read that came from the cache. SSD/byte: \
            bytes written to the SSD for each byte that was written to the disk. held: bytes of \
            blocks for each byte of the SSD in use, at the end. CPU s: seconds of processor time \
            in the measured time, of all programs started for it. steady: the worst interval of \
            the measured time's second half against the median one.</p>\n";
    out += &gains(report);
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
        let _ = writeln!(out, "<h2>Compared with the run of {}</h2>", escape(&earlier.when));
        for difference in report.differences(earlier) {
            let _ = writeln!(out, "<p>{}</p>", escape(&difference));
        }
        out += &table(&report.comparison(earlier));
    }
    out += "<h2>How it was measured</h2>\n<table>\n";
    for (name, value) in report.settings.iter().chain(&report.machine) {
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=\"t\">{}</td></tr>",
            escape(name),
            escape(value)
        );
    }
    out += "</table>\n";
    for note in &report.notes {
        let _ = writeln!(out, "<p>{}</p>", escape(note));
    }
    out + "</body></html>\n"
}

fn table(table: &Table) -> String {
    let rows = table.rows();
    let is_text = |column: usize| {
        let cells = rows.iter().skip(1).filter_map(|row| row.get(column));
        cells.clone().any(|cell| cell.starts_with(|c: char| c.is_alphabetic() || c == '>'))
    };
    let columns = rows.first().map_or(0, Vec::len);
    let texts: Vec<bool> = (0..columns).map(is_text).collect();
    let mut out = "<div class=\"wide\"><table>\n".to_owned();
    for (i, row) in rows.iter().enumerate() {
        let cell = if i == 0 { "th" } else { "td" };
        out += "<tr>";
        for (text, is_text) in row.iter().zip(&texts) {
            let class = match text.as_str() {
                "met" => " class=\"t met\"",
                "MISSED" => " class=\"t missed\"",
                _ if *is_text => " class=\"t\"",
                _ => "",
            };
            let _ = write!(out, "<{cell}{class}>{}</{cell}>", escape(text));
        }
        out += "</tr>\n";
    }
    out + "</table></div>\n"
}

fn setups(group: &Group) -> Vec<&str> {
    group.results.iter().map(|one| one.setup.as_str()).collect()
}

/// The colors of set-ups; stays visible while their charts are.
fn legend(names: &[&str]) -> String {
    let mut out = "<p class=\"legend\">".to_owned();
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

/// The vertical scale of lines, and a suffix for their title. It is logarithmic for rates if some
/// would otherwise lie on the axis.
fn vertical(lines: &[Line], rates: bool) -> (Scale, &'static str) {
    let values = lines.iter().flat_map(|line| &line.points).filter_map(|(_, y)| *y);
    let means = lines.iter().filter_map(Line::mean).filter(|mean| *mean > 0.0);
    let (least, most) = means
        .fold((f64::INFINITY, 0.0f64), |(least, most), mean| (mean.min(least), mean.max(most)));
    if rates && most > least * LOGARITHMIC_FROM {
        (Scale::logarithmic(values), " (logarithmic)")
    } else {
        (Scale::up_to(values.fold(0.0, f64::max)), "")
    }
}

/// A chart of lines under a heading; empty without lines.
fn chart(axes: &Axes<'_>, lines: &[Line]) -> String {
    if lines.iter().all(|line| line.points.len() < 2) {
        return String::new();
    }
    format!("<h3>{}</h3>\n{}", escape(axes.title), chart::lines(axes, lines))
}

/// The charts of one load.
fn details(report: &Report, group: &Group) -> String {
    let mut out = format!("<section><h2>{}</h2>\n", escape(&group.name));
    out += &legend(&setups(group));
    let throughput = |one: &Measured| {
        let len = one.interval() as f64;
        let means = one.intervals().into_iter().enumerate();
        means.map(|(i, mean)| ((i as f64 + 0.5) * len, Some(mean))).collect()
    };
    let len = group.results.iter().map(Measured::interval).max().unwrap_or(1);
    let ramped = if ramp(group) > 0.0 { "; grey: ramp-up" } else { "" };
    let title = format!("{}, means of {len} s{ramped}", report.unit);
    out += &over_time(&title, group, true, &throughput);
    let percentiles = latency_bars(group);
    if percentiles.iter().any(|(_, values)| values.iter().any(|value| *value > 0.0)) {
        out += "<h3>Response times, ms (logarithmic)</h3>\n";
        out += &chart::bars("response times in milliseconds", &setups(group), &percentiles);
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
            out += &over_time(title, group, false, &line);
        }
    }
    out + "</section>\n"
}

type Points = Vec<(f64, Option<f64>)>;

fn ramp(group: &Group) -> f64 {
    group.results.iter().map(|one| one.ramp).max().unwrap_or(0) as f64
}

/// Lines over the seconds, with the same axis in every chart of a group.
fn over_time(
    title: &str,
    group: &Group,
    rates: bool,
    points: &dyn Fn(&Measured) -> Points,
) -> String {
    let line = |one: &Measured| Line { name: one.setup.clone(), points: points(one) };
    let lines: Vec<Line> = group.results.iter().map(line).collect();
    let seconds = group.results.iter().map(|one| one.per_second.len().max(one.points.len()));
    let x = Scale::exactly(seconds.max().unwrap_or(0).max(1) as f64);
    let (y, note) = vertical(&lines, rates);
    let title = format!("{title}{note}");
    chart(&Axes { title: &title, below: "seconds", x, y, ramp: ramp(group) }, &lines)
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

/// Charts for each family of loads that differ in one number.
fn families(report: &Report) -> String {
    let mut out = String::new();
    let mut seen: Vec<&str> = Vec::new();
    for family in report.groups.iter().filter_map(|group| group.family.as_deref()) {
        if !seen.contains(&family) {
            seen.push(family);
            out += &one_family(report, family);
        }
    }
    out
}

fn one_family(report: &Report, family: &str) -> String {
    let members: Vec<&Group> =
        report.groups.iter().filter(|group| group.family.as_deref() == Some(family)).collect();
    let Some(first) = members.first() else { return String::new() };
    let names = setups(first);
    let mut out = format!("<section><h2>{}</h2>\n{}", escape(family), legend(&names));
    type Pick = fn(&Measured) -> f64;
    let picks: [(&str, Pick); 2] = [
        (&report.unit, |one| one.rate),
        ("95 % of the response times, ms", |one| one.latency.p95_ms),
    ];
    for (title, pick) in picks {
        let line = |name: &&str| {
            let value = |group: &&Group| Some((group.x?, group.of(name).map(pick)));
            Line { name: (*name).to_owned(), points: members.iter().filter_map(value).collect() }
        };
        let lines: Vec<Line> = names.iter().map(line).collect();
        let x = Scale::at_each(members.iter().filter_map(|group| group.x).collect());
        let (y, note) = vertical(&lines, true);
        let title = format!("{title}{note}");
        out += &chart(&Axes { title: &title, below: "threads", x, y, ramp: 0.0 }, &lines);
    }
    out + "</section>\n"
}

/// The gain of each set-up under each load that has no family chart.
fn gains(report: &Report) -> String {
    let groups = || report.groups.iter().filter(|group| group.family.is_none());
    let Some(first) = groups().next() else { return String::new() };
    let names = setups(first);
    let group = |group: &Group| {
        let gain = |name: &&str| group.ratio(name, BASELINE).unwrap_or(0.0);
        (group.name.clone(), names.iter().map(gain).collect::<Vec<f64>>())
    };
    let bars: Vec<_> = groups().map(group).collect();
    if bars.len() > BARS_MAX || bars.iter().all(|(_, gains)| gains.iter().all(|g| *g == 0.0)) {
        return String::new();
    }
    format!(
        "<section><h2>Gains (logarithmic)</h2>\n{}{}</section>\n",
        legend(&names),
        chart::bars("gain", &names, &bars)
    )
}
