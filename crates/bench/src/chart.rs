//! Charts as SVG text that stands in a page: lines over time, and bars. No script, nothing from
//! outside; colours are chosen to differ for the colour-blind too (Okabe and Ito).

use std::fmt::Write as _;

const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555"];
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 38.0;

/// A line of a chart; `None` leaves a hole.
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// Where it goes.
    pub points: Vec<(f64, Option<f64>)>,
}

/// Text as it may stand in a page.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The colour of the set-up of this number.
pub fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()]
}

/// A round number not below `value`.
fn round_up(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];
    steps.map(|step| step * power).into_iter().find(|step| *step >= value).unwrap_or(value)
}

fn number(value: f64) -> String {
    match value {
        v if v >= 10_000.0 => format!("{:.0}k", v / 1e3),
        v if v >= 10.0 || v == 0.0 => format!("{v:.0}"),
        v if v >= 1.0 => format!("{v:.1}"),
        v => format!("{v:.3}").trim_end_matches('0').to_owned(),
    }
}

fn open(title: &str) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
        escape(title)
    )
}

fn grid(svg: &mut String, top: f64, label: &str) {
    for i in 0..=4 {
        let y = TOP + (HEIGHT - TOP - BOTTOM) * f64::from(4 - i) / 4.0;
        let (x2, text) = (WIDTH - RIGHT, number(top * f64::from(i) / 4.0));
        let _ = writeln!(
            svg,
            "<line class=\"g\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{x2}\" y2=\"{y:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            LEFT - 6.0,
            y + 4.0
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 4.0,
        escape(label)
    );
}

/// Lines over a common axis; with `log`, its steps are doublings. A grey area ends at `ramp`.
pub fn lines(title: &str, axis: &str, lines: &[Line], log: bool, ramp: f64) -> String {
    let scale = |x: f64| if log { x.max(1.0).log2() } else { x };
    let points = || lines.iter().flat_map(|line| &line.points);
    let last = points().map(|(x, _)| scale(*x)).fold(0.0, f64::max).max(1.0);
    let top = round_up(points().filter_map(|(_, y)| *y).fold(0.0, f64::max));
    let place_x = |x: f64| LEFT + (WIDTH - LEFT - RIGHT) * scale(x) / last;
    let place_y = |y: f64| TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - y / top);
    let mut svg = open(title);
    if ramp > 0.0 {
        let (width, height) = (place_x(ramp) - LEFT, HEIGHT - TOP - BOTTOM);
        let _ = writeln!(
            svg,
            "<rect class=\"r\" x=\"{LEFT}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\"/>"
        );
    }
    grid(&mut svg, top, axis);
    for i in 0..=5 {
        let at = last * f64::from(i) / 5.0;
        let shown = if log { 2f64.powf(at.round()) } else { at };
        let x = place_x(shown);
        let y = HEIGHT - BOTTOM + 15.0;
        let text = number(shown.round());
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{text}</text>");
    }
    for (i, line) in lines.iter().enumerate() {
        let mut path = String::new();
        let mut pen = 'M';
        for (x, y) in &line.points {
            match y {
                Some(y) => {
                    let _ = write!(path, "{pen}{:.1} {:.1}", place_x(*x), place_y(*y));
                    pen = 'L';
                }
                None => pen = 'M',
            }
        }
        let _ = writeln!(
            svg,
            "<path fill=\"none\" stroke=\"{}\" stroke-width=\"2\" d=\"{path}\"><title>{}</title>\
             </path>",
            colour(i),
            escape(&line.name)
        );
    }
    svg + "</svg>\n"
}

/// Bars, those of each group side by side; on a logarithmic scale, since they differ by powers.
pub fn bars(title: &str, groups: &[(String, Vec<f64>)]) -> String {
    let all = || groups.iter().flat_map(|(_, values)| values).copied().filter(|v| *v > 0.0);
    let high = all().fold(f64::MIN_POSITIVE, f64::max).log10().ceil();
    let low = all().fold(f64::MAX, f64::min).log10().floor().min(high - 1.0);
    let plot = HEIGHT - TOP - BOTTOM;
    let place = |value: f64| plot * ((value.log10() - low) / (high - low)).clamp(0.0, 1.0);
    let mut svg = open(title);
    let (mut power, x2) = (low, WIDTH - RIGHT);
    while power <= high {
        let y = TOP + plot * (1.0 - (power - low) / (high - low));
        let _ = writeln!(
            svg,
            "<line class=\"g\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{x2}\" y2=\"{y:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y + 4.0,
            number(10f64.powf(power))
        );
        power += 1.0;
    }
    let step = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
    for (i, (name, values)) in groups.iter().enumerate() {
        let width = step * 0.8 / values.len().max(1) as f64;
        let left = LEFT + step * (i as f64 + 0.1);
        for (k, value) in values.iter().enumerate().filter(|(_, value)| **value > 0.0) {
            let (x, height) = (left + width * k as f64, place(*value).max(1.0));
            let _ = writeln!(
                svg,
                "<rect fill=\"{}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{height:.1}\">\
                 <title>{}: {}</title></rect>",
                colour(k),
                TOP + plot - height,
                width * 0.9,
                escape(name),
                number(*value)
            );
        }
        let (x, y) = (left + step * 0.4, HEIGHT - BOTTOM + 15.0);
        let text = escape(name);
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{text}</text>");
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_end_at_round_numbers() {
        for (value, wanted) in [(0.0, 1.0), (0.93, 1.0), (7.1, 8.0), (101.0, 150.0)] {
            assert!((round_up(value) - wanted).abs() < 1e-9, "{value}");
        }
    }

    #[test]
    fn a_hole_interrupts_its_line() {
        let points = vec![(0.0, Some(1.0)), (1.0, None), (2.0, Some(1.0)), (3.0, Some(0.0))];
        let svg = lines("t", "s", &[Line { name: "a<b".to_owned(), points }], false, 1.0);
        assert_eq!((svg.matches('M').count(), svg.matches('L').count()), (2, 1), "{svg}");
        assert!(svg.contains("a&lt;b") && !svg.contains("a<b"));
    }

    #[test]
    fn nothing_to_show_is_no_disaster() {
        assert!(lines("t", "s", &[], false, 0.0).ends_with("</svg>\n"));
        assert!(!bars("t", &[("p50".to_owned(), vec![0.0])]).contains("NaN"));
        assert!(!bars("t", &[]).contains("NaN"));
    }
}
