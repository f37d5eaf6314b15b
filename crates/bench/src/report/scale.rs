//! Scales of charts: the position of a value between an axis's ends, and the round values to label.

/// Maximum number of ticks of a linear axis, not counting its start.
const TICKS: f64 = 5.0;
/// Maximum number of orders of magnitude of a logarithmic axis; smaller values lie at its start.
const MAGNITUDES: f64 = 6.0;
/// Maximum number of orders of magnitude with ticks at 2 and 5, in addition to powers of ten.
const MAGNITUDES_FINE: f64 = 2.1;

/// One axis.
pub struct Scale {
    low: f64,
    high: f64,
    logarithmic: bool,
    /// The labeled values.
    pub ticks: Vec<f64>,
}

impl Scale {
    /// A linear scale from 0 to the first tick not below `value`.
    pub fn up_to(value: f64) -> Self {
        let value = if value > 0.0 { value } else { 1.0 };
        let step = step(value);
        let count = (value / step - 1e-9).ceil().max(1.0);
        Self::linear(count * step, step)
    }

    /// A linear scale from 0 to `value`, which must be above 0 but need not be round.
    pub fn exactly(value: f64) -> Self {
        Self::linear(value, step(value))
    }

    fn linear(high: f64, step: f64) -> Self {
        let count = (high / step + 1e-9).floor() as u32;
        let ticks = (0..=count).map(|i| f64::from(i) * step).collect();
        Self { low: 0.0, high, logarithmic: false, ticks }
    }

    /// A logarithmic scale from the smallest value above 0 to the greatest, both rounded.
    pub fn logarithmic(values: impl Iterator<Item = f64> + Clone) -> Self {
        let values = values.filter(|value| *value > 0.0 && value.is_finite());
        let high = values.clone().fold(f64::MIN_POSITIVE, f64::max);
        let high = if high == f64::MIN_POSITIVE { 1.0 } else { high };
        let low = values.fold(high, f64::min).max(high / 10f64.powf(MAGNITUDES));
        let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let rounds = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|one| one * 10f64.powi(power)));
        let mut rounds: Vec<f64> = rounds.collect();
        let (near, far) = (1.0 - 1e-9, 1.0 + 1e-9);
        let first = rounds.iter().rposition(|round| *round <= low * far).unwrap_or(0);
        let last = rounds.iter().position(|round| *round >= high * near).unwrap_or(first);
        rounds = rounds.drain(first..=last.max(first + 1)).collect();
        let (low, high) = (rounds[0], rounds[rounds.len() - 1]);
        if (high / low).log10() > MAGNITUDES_FINE {
            rounds.retain(|round| (round.log10() - round.log10().round()).abs() < 1e-9);
        }
        Self { low, high, logarithmic: true, ticks: rounds }
    }

    /// A logarithmic scale with ticks at exactly these values.
    pub fn at_each(mut values: Vec<f64>) -> Self {
        values.retain(|value| *value > 0.0);
        values.sort_by(f64::total_cmp);
        values.dedup();
        let low = values.first().copied().unwrap_or(1.0);
        let high = values.last().copied().unwrap_or(1.0).max(low * 2.0);
        Self { low, high, logarithmic: true, ticks: values }
    }

    /// The position of a value: 0 is the start of the axis, 1 its end.
    pub fn at(&self, value: f64) -> f64 {
        let part = if self.logarithmic {
            (value.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        part.clamp(0.0, 1.0)
    }
}

/// A round distance for ticks, of which [`TICKS`] reach `value`.
fn step(value: f64) -> f64 {
    let least = value / TICKS;
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|one| one * power);
    steps.into_iter().find(|step| *step >= least * (1.0 - 1e-9)).unwrap_or(least)
}

/// The label of a value, with as many decimals as it needs, up to three.
pub fn label(value: f64) -> String {
    let (value, unit) = match value {
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e4 => (v / 1e3, "k"),
        v => (v, ""),
    };
    let text = format!("{value:.3}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &Scale) -> String {
        scale.ticks.iter().map(|tick| label(*tick)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ticks_are_round_and_what_is_written_is_where_it_lies() {
        for (value, wanted) in [
            (0.0, "0 0.2 0.4 0.6 0.8 1"),
            (0.93, "0 0.2 0.4 0.6 0.8 1"),
            (11_250.0, "0 2500 5000 7500 10k 12.5k"),
            (100.0, "0 20 40 60 80 100"),
            (0.07, "0 0.02 0.04 0.06 0.08"),
        ] {
            assert_eq!(labels(&Scale::up_to(value)), wanted, "{value}");
        }
        let time = Scale::exactly(213.0);
        assert_eq!(labels(&time), "0 50 100 150 200");
        assert!((time.at(106.5) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn magnitudes_begin_and_end_near_the_values() {
        let scale = |values: &[f64]| Scale::logarithmic(values.iter().copied());
        assert_eq!(labels(&scale(&[85.0, 10_402.0])), "100 1000 10k");
        assert_eq!(labels(&scale(&[0.0, 3.0, 41.0])), "2 5 10 20 50");
        assert_eq!(labels(&scale(&[])), "1 2");
        assert_eq!(scale(&[0.0, 3.0]).at(0.0), 0.0);
        assert_eq!(scale(&[1e-9, 1e3]).low, 1e-3);
        assert_eq!(labels(&Scale::at_each(vec![64.0, 1.0, 16.0, 1.0])), "1 16 64");
    }
}
