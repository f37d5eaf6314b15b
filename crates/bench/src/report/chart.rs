//! Charts as inline SVG: lines over time, and bars. No scripts, no external resources; the colors
//! are distinguishable for color-blind readers (Okabe and Ito).

use std::fmt::Write as _;

use crate::report::scale::{Scale, label};
use crate::report::table::short;

const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888"];
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 18.0;
const BOTTOM: f64 = 38.0;
/// Maximum number of points of a line that is drawn with dots.
const DOTTED: usize = 16;
/// Maximum width of a bar, and minimum width of one with its value above it.
const BAR_MAX: f64 = 60.0;
const BAR_NAMED: f64 = 34.0;

/// A line of a chart; `None` leaves a gap.
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// The points of the line.
    pub points: Vec<(f64, Option<f64>)>,
}

impl Line {
    /// The mean of the points that have a value.
    pub fn mean(&self) -> Option<f64> {
        let values: Vec<f64> = self.points.iter().filter_map(|(_, y)| *y).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }
}

/// Text escaped for a page.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The color of the set-up with this number.
pub fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()]
}

/// The axes and labels of a line chart.
pub struct Axes<'a> {
    /// The title, also for screen readers.
    pub title: &'a str,
    /// The label below the chart.
    pub below: &'a str,
    pub x: Scale,
    pub y: Scale,
    /// The end of a gray area that starts at the left.
    pub ramp: f64,
}

fn across(scale: &Scale, value: f64) -> f64 {
    LEFT + (WIDTH - LEFT - RIGHT) * scale.at(value)
}

fn up(scale: &Scale, value: f64) -> f64 {
    TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - scale.at(value))
}

fn open(title: &str) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
        escape(title)
    )
}

fn text_at(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let text = escape(text);
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

/// The ticks of the vertical axis, each with a horizontal line.
fn grid(svg: &mut String, scale: &Scale) {
    for &tick in &scale.ticks {
        let (y, x2) = (up(scale, tick), WIDTH - RIGHT);
        let _ = writeln!(
            svg,
            "<line class=\"g\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{x2}\" y2=\"{y:.1}\"/>"
        );
        text_at(svg, LEFT - 6.0, y + 4.0, "end", &label(tick));
    }
}

/// Draws lines over a common axis.
pub fn lines(axes: &Axes<'_>, lines: &[Line]) -> String {
    let mut svg = open(axes.title);
    if axes.ramp > 0.0 {
        let (width, height) = (across(&axes.x, axes.ramp) - LEFT, HEIGHT - TOP - BOTTOM);
        let _ = writeln!(
            svg,
            "<rect class=\"r\" x=\"{LEFT}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\"/>"
        );
    }
    grid(&mut svg, &axes.y);
    text_at(&mut svg, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 4.0, "middle", axes.below);
    for &tick in &axes.x.ticks {
        let y = HEIGHT - BOTTOM + 15.0;
        text_at(&mut svg, across(&axes.x, tick), y, "middle", &label(tick));
    }
    for (i, line) in lines.iter().enumerate() {
        one_line(&mut svg, axes, line, colour(i));
    }
    svg + "</svg>\n"
}

fn one_line(svg: &mut String, axes: &Axes<'_>, line: &Line, colour: &str) {
    let mut path = String::new();
    let mut dots = String::new();
    let mut pen = 'M';
    for (x, y) in &line.points {
        let Some(y) = y else {
            pen = 'M';
            continue;
        };
        let (x, y) = (across(&axes.x, *x), up(&axes.y, *y));
        let _ = write!(path, "{pen}{x:.1} {y:.1}");
        pen = 'L';
        if line.points.len() <= DOTTED {
            let _ = write!(dots, "<circle fill=\"{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
        }
    }
    let _ = writeln!(
        svg,
        "<g><title>{}</title><path fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\" \
         stroke-linejoin=\"round\" d=\"{path}\"/>{dots}</g>",
        escape(&line.name)
    );
}

/// Draws bars, grouped side by side, one for each name; on a logarithmic scale, since they differ
/// by orders of magnitude. Wide ones have their value above them.
pub fn bars(title: &str, names: &[&str], groups: &[(String, Vec<f64>)]) -> String {
    // The scale starts low enough that every bar is visible.
    let all = groups.iter().flat_map(|(_, values)| values).copied();
    let smallest = all.clone().filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min);
    let scale = Scale::logarithmic(all.chain([smallest / 1.5]));
    let mut svg = open(title);
    grid(&mut svg, &scale);
    let step = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
    for (i, (group, values)) in groups.iter().enumerate() {
        let width = (step * 0.8 / values.len().max(1) as f64).min(BAR_MAX);
        let middle = LEFT + step * (i as f64 + 0.5);
        let left = middle - width * values.len() as f64 / 2.0;
        for (k, value) in values.iter().enumerate().filter(|(_, value)| **value > 0.0) {
            let (x, y) = (left + width * (k as f64 + 0.05), up(&scale, *value));
            let shown = short(*value);
            let _ = writeln!(
                svg,
                "<rect fill=\"{}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\">\
                 <title>{}, {}: {shown}</title></rect>",
                colour(k),
                width * 0.9,
                HEIGHT - BOTTOM - y,
                escape(names.get(k).unwrap_or(&"")),
                escape(group),
            );
            if width >= BAR_NAMED {
                text_at(&mut svg, x + width * 0.45, y - 3.0, "middle", &shown);
            }
        }
        text_at(&mut svg, middle, HEIGHT - BOTTOM + 15.0, "middle", group);
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes() -> Axes<'static> {
        let (x, y) = (Scale::exactly(3.0), Scale::up_to(1.0));
        Axes { title: "t", below: "s", x, y, ramp: 1.0 }
    }

    #[test]
    fn a_hole_interrupts_its_line() {
        let points = vec![(0.0, Some(1.0)), (1.0, None), (2.0, Some(1.0)), (3.0, Some(0.0))];
        let svg = lines(&axes(), &[Line { name: "a<b".to_owned(), points }]);
        assert_eq!((svg.matches('M').count(), svg.matches('L').count()), (2, 1), "{svg}");
        assert!(svg.contains("a&lt;b") && !svg.contains("a<b"));
    }

    #[test]
    fn nothing_to_show_is_no_disaster() {
        assert!(lines(&axes(), &[]).ends_with("</svg>\n"));
        for groups in [vec![("p50".to_owned(), vec![0.0])], Vec::new()] {
            let svg = bars("t", &["a"], &groups);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
