//! The table of statistics: every row of it is in the manual, with the name that metrics and JSON
//! have for it.

mod support;

use std::fmt::Write as _;

use forebay_control::exposed_name;
use forebay_engine::{Kind, STATISTICS, Shape, Statistic};

/// A row as a line of the manual.
fn line(row: &Statistic) -> String {
    let names: Vec<String> = row.fields().iter().map(|field| format!("`{field}`")).collect();
    let unit = row.unit.name();
    let kind = match row.kind {
        Kind::Counter => None,
        Kind::Level => Some("level"),
        Kind::Greatest => Some("level, maximum"),
    };
    let whose = row.by_volume.then_some("by volume");
    let kind = kind.into_iter().chain(whose).collect::<Vec<_>>().join(", ");
    let metric = match row.shape {
        Shape::One => String::new(),
        Shape::Labeled { label, .. } => {
            format!(" In Prometheus `{}`, by `{label}`.", exposed_name(row))
        }
        Shape::Buckets { .. } => {
            format!(" In Prometheus the histogram `{}`.", exposed_name(row))
        }
    };
    let details = Some(row.details()).filter(|details| !details.is_empty());
    let details = details.map_or_else(String::new, |details| format!(" {details}"));
    format!("| {} | {unit} | {kind} | {}{details}{metric} |", names.join(", "), row.help())
}

#[test]
fn the_manual_has_the_table() {
    let mut tables: Vec<(&str, String)> = Vec::new();
    for row in STATISTICS {
        if tables.last().is_none_or(|(section, _)| *section != row.section) {
            let head = "| counter | unit | level | meaning |\n|---|---|---|---|\n";
            tables.push((row.section, head.to_owned()));
        }
        let (_, table) = tables.last_mut().expect("one was put there");
        writeln!(table, "{}", line(row)).expect("a text takes every line");
    }
    support::compare("docs/user/statistics.md", "statistics", tables.into_iter());
}
