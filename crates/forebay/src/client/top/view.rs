//! The picture of `forebay top`, for 80 columns and 24 rows or more: health, what is at risk, a
//! line for each volume, the chosen volume in detail, events, keys.

use forebay_control::api::{
    CacheStatus, LatencyFigures, PoolStatus, StatisticsStatus, VolumeFigures,
};
use forebay_control::statistics::Window;
use forebay_control::text;
use forebay_control::units::Size;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState, Wrap};

use super::model::Model;

/// Columns of the course of a hit ratio.
const COURSE: usize = 8;
/// Columns of the bar of dirty data.
const BAR: usize = 24;
/// Rows of the chosen volume.
const DETAIL_ROWS: u16 = 8;
/// Most rows of problems and of events.
const PROBLEM_ROWS: u16 = 3;
const EVENT_ROWS: u16 = 2;
/// The levels of a course.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

const GOOD: Style = Style::new().fg(Color::Green);
const BAD: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
const WARN: Style = Style::new().fg(Color::Yellow);
const SOFT: Style = Style::new().add_modifier(Modifier::DIM);
const HEAD: Style = Style::new().add_modifier(Modifier::BOLD);

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, model: &Model) {
    let (Some(status), Some(all)) = (&model.status, &model.statistics) else {
        return draw_lost(frame, frame.area(), model);
    };
    let problems = problem_lines(model, status);
    let problem_rows = u16::try_from(problems.len()).unwrap_or(PROBLEM_ROWS).min(PROBLEM_ROWS);
    let volumes = u16::try_from(all.volumes.len()).unwrap_or(u16::MAX);
    let rows = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(problem_rows),
        Constraint::Length(2),
        Constraint::Length(1),
        Constraint::Length(volumes.saturating_add(2)),
        Constraint::Min(DETAIL_ROWS),
        Constraint::Length(EVENT_ROWS),
        Constraint::Length(1),
    ]);
    let [title, health, risk, _, table, detail, events, keys] = rows.areas(frame.area());
    frame.render_widget(headline(status), title);
    frame.render_widget(Paragraph::new(problems).wrap(Wrap { trim: true }), health);
    frame.render_widget(Paragraph::new(risk_lines(&status.cache, all)), risk);
    draw_volumes(frame, table, model, all);
    if let Some(volume) = all.volumes.get(model.chosen()) {
        frame.render_widget(Paragraph::new(detail_lines(volume)), detail);
    }
    frame.render_widget(Paragraph::new(event_lines(model)), events);
    frame.render_widget(Paragraph::new(key_line(model, all)), keys);
}

fn draw_lost(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let text = model.lost.as_deref().unwrap_or("asking the server");
    frame.render_widget(Paragraph::new(text).style(BAD).wrap(Wrap { trim: true }), area);
}

fn headline(status: &PoolStatus) -> Line<'static> {
    Line::styled(
        format!(
            "forebay {}: {}, cache {}, up {}, {}",
            status.version,
            status.state,
            status.health,
            text::duration(status.uptime_seconds),
            text::count_of_clients(status.clients)
        ),
        HEAD,
    )
}

/// One sentence, or the problems.
fn problem_lines(model: &Model, status: &PoolStatus) -> Vec<Line<'static>> {
    if let Some(lost) = &model.lost {
        return vec![Line::styled(format!("the figures are old: {lost}"), BAD)];
    }
    if !status.problems.is_empty() {
        return status.problems.iter().map(|problem| Line::styled(problem.clone(), BAD)).collect();
    }
    vec![match model.events.len() {
        0 => Line::styled("All is well.", GOOD),
        count => {
            let events = if count == 1 { "event" } else { "events" };
            Line::styled(
                format!("All is well now; nobody has acknowledged {count} {events}."),
                WARN,
            )
        }
    }]
}

/// What is at risk, with its limit; and the wear.
fn risk_lines(cache: &CacheStatus, all: &StatisticsStatus) -> Vec<Line<'static>> {
    let (dirty, limit) = (cache.dirty_bytes, cache.dirty_limit_bytes);
    let share = if limit == 0 { 0.0 } else { dirty as f64 / limit as f64 };
    let style = if share > 0.9 { BAD } else { Style::new() };
    let filled = ((share * BAR as f64).round() as usize).min(BAR);
    let bar = format!("{}{}", "█".repeat(filled), "·".repeat(BAR - filled));
    let risk = Line::from(vec![
        Span::raw("at risk  "),
        Span::styled(bar, style),
        Span::raw(format!(
            "  {} of {}; oldest {:.1} s of {} s",
            Size(dirty),
            Size(limit),
            cache.oldest_dirty_seconds,
            cache.write_cache_depth_seconds
        )),
    ]);
    let per_second = all.cache.written_bytes_per_day / 86_400.0;
    let wear = Line::from(format!(
        "SSD      {}/s written, {} per day at this rate{}; holds {}",
        Size(per_second as u64),
        Size(all.cache.written_bytes_per_day as u64),
        cache.wear.as_ref().map_or_else(String::new, |wear| {
            let (budget, pressure) = (Size(wear.budget_bytes_per_day), wear.pressure_percent);
            format!(", budget {budget}, pressure {pressure} %")
        }),
        Size(cache.cached_bytes)
    ));
    vec![risk, wear]
}

fn draw_volumes(frame: &mut Frame<'_>, area: Rect, model: &Model, all: &StatisticsStatus) {
    let heads =
        ["VOLUME", "IOPS", "MB/s", "HIT %", "", "P50", "P99", "PRIM 50", "PRIM 99", "DIRTY"];
    let widths = [9, 8, 6, 5, COURSE as u16, 7, 7, 7, 7, 5];
    let right = |text: String| Cell::from(Line::from(text).right_aligned());
    let head = heads.iter().enumerate().map(|(column, head)| match column {
        0 => Cell::from(*head),
        _ => right((*head).to_owned()),
    });
    let rows = all.volumes.iter().map(|volume| {
        let rates = &volume.rates;
        let (read, primary) = (volume.latency("read"), volume.primary_latency("read"));
        let time = |figures: Option<&LatencyFigures>, of: fn(&LatencyFigures) -> f64| {
            right(figures.map_or("-".to_owned(), |figures| text::time(of(figures))))
        };
        let p50 = |figures: &LatencyFigures| figures.p50_micros;
        let p99 = |figures: &LatencyFigures| figures.p99_micros;
        let hit = volume.reads.full_hit_percent;
        Row::new(vec![
            Cell::from(volume.name.clone()),
            right(format!("{:.0}", rates.reads + rates.writes)),
            right(format!("{:.1}", (rates.read_bytes + rates.written_bytes) / 1e6)),
            right(hit.map_or("-".to_owned(), |share| format!("{share:.1}"))),
            right(course(&model.ratios(volume, COURSE))),
            time(read, p50),
            time(read, p99),
            time(primary, p50),
            time(primary, p99),
            dirty(volume),
        ])
    });
    let table = Table::new(rows, widths.map(Constraint::Length))
        .header(Row::new(head).style(HEAD))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(Some(model.chosen()));
    frame.render_stateful_widget(table, area, &mut state);
}

/// A volume's dirty data as a share of its limit.
fn dirty(volume: &VolumeFigures) -> Cell<'static> {
    if volume.dirty_limit_bytes == 0 {
        return Cell::from(Line::from("-").right_aligned());
    }
    let share = 100.0 * volume.dirty_bytes as f64 / volume.dirty_limit_bytes as f64;
    let style = if share > 90.0 { BAD } else { Style::new() };
    Cell::from(Line::styled(format!("{share:.0} %"), style).right_aligned())
}

/// Percentages as a line of bars; a space where there is none.
fn course(ratios: &[Option<f64>]) -> String {
    let bar = |share: &f64| {
        let level = (share / 100.0 * LEVELS.len() as f64) as usize;
        LEVELS[level.min(LEVELS.len() - 1)]
    };
    ratios.iter().map(|ratio| ratio.as_ref().map_or(' ', bar)).collect()
}

/// The chosen volume: blocks by where they came from, bypasses, and latencies.
fn detail_lines(volume: &VolumeFigures) -> Vec<Line<'static>> {
    let count = |name: &str| volume.counters.get(name).copied().unwrap_or(0);
    let (ram, ssd) = (count("ram_hit_blocks"), count("ssd_hit_blocks"));
    let primary = count("primary_read_blocks");
    let total = (ram + ssd + primary).max(1) as f64;
    let share = |blocks: u64| 100.0 * blocks as f64 / total;
    let why = volume.bypassed().filter(|&(_, count)| count > 0);
    let why: Vec<String> = why.map(|(reason, count)| format!("{reason} {count}")).collect();
    let why = if why.is_empty() { "none".to_owned() } else { why.join(", ") };
    let mut lines = vec![
        Line::from(vec![
            Span::styled(format!("{}: ", volume.name), HEAD),
            Span::raw(format!(
                "blocks read from RAM {:.1} %, SSD {:.1} %, primary {:.1} %",
                share(ram),
                share(ssd),
                share(primary)
            )),
        ]),
        Line::from(format!(
            "bypasses: {why}; destaged {}/s; dirty {} of {}",
            Size(volume.rates.destaged_bytes as u64),
            Size(volume.dirty_bytes),
            Size(volume.dirty_limit_bytes)
        )),
        Line::styled(
            format!(
                "{:8} {:12} {:>10} {:>8} {:>8} {:>8} {:>8}",
                "LATENCY", "OPERATION", "REQUESTS", "MEAN", "P50", "P99", "P99.9"
            ),
            HEAD,
        ),
    ];
    let clients = volume.latencies.iter().map(|figures| ("clients", figures));
    let tiers = volume.tiers.iter().map(|figures| (text::tier(figures), figures));
    let of_primary = volume.primary.iter().map(|figures| ("primary", figures));
    lines.extend(clients.chain(tiers).chain(of_primary).map(|(whose, figures)| {
        Line::from(format!(
            "{whose:8} {:12} {:>10} {:>8} {:>8} {:>8} {:>8}",
            figures.operation,
            figures.requests,
            text::time(figures.mean_micros),
            text::time(figures.p50_micros),
            text::time(figures.p99_micros),
            text::time(figures.p999_micros)
        ))
    }));
    lines
}

/// The newest events that nobody has acknowledged.
fn event_lines(model: &Model) -> Vec<Line<'static>> {
    let shown = model.events.iter().take(usize::from(EVENT_ROWS));
    let line = |event: &forebay_control::api::Event| {
        let volume = event.volume.as_ref().map_or(String::new(), |name| format!("{name}: "));
        let text = format!("event {}: {volume}{}", event.id, event.text);
        Line::styled(text, if text::severity(event.severity) == "error" { BAD } else { WARN })
    };
    shown.map(line).collect()
}

fn key_line(model: &Model, all: &StatisticsStatus) -> Line<'static> {
    let window = match model.window() {
        Window::Start => "since the start".to_owned(),
        window => format!("window {}", window.name()),
    };
    Line::styled(
        format!("{window} ({:.0} s)   w window   up/down volume   q quit", all.seconds),
        SOFT,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_course_shows_gaps_and_levels() {
        assert_eq!(course(&[Some(0.0), None, Some(50.0), Some(100.0)]), "▁ ▅█");
    }
}
