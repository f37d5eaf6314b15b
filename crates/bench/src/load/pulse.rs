//! When answers came, in slots of a millisecond: added by many threads without locks, and searched
//! afterwards for gaps and rates around a moment.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The answers of a client since it began.
pub struct Pulse {
    start: Instant,
    slots: Vec<AtomicU32>,
}

impl Pulse {
    /// A record for this time from now on; later answers are not recorded.
    pub fn new(time: Duration) -> Self {
        let slots = (0..=time.as_millis()).map(|_| AtomicU32::new(0)).collect();
        Self { start: Instant::now(), slots }
    }

    /// Records an answer, now.
    pub fn beat(&self) {
        if let Some(slot) = self.slots.get(self.slot(Instant::now())) {
            slot.fetch_add(1, Relaxed);
        }
    }

    /// Number of answers.
    pub fn count(&self) -> u64 {
        self.slots.iter().map(|slot| u64::from(slot.load(Relaxed))).sum()
    }

    /// The longest time without an answer of which a part lies within these moments. It may begin
    /// before and end after them.
    pub fn longest_gap(&self, from: Instant, to: Instant) -> Duration {
        let (from, to) = (self.slot(from), self.slot(to).min(self.slots.len()));
        let has = |slot: &usize| self.slots[*slot].load(Relaxed) > 0;
        let mut last = (0..from.min(self.slots.len())).rev().find(has).unwrap_or(0);
        let mut longest = 0;
        for slot in (from..self.slots.len()).filter(has) {
            longest = longest.max(slot - last);
            last = slot;
            if slot >= to {
                break;
            }
        }
        // Answers that never came are a gap to the end.
        let open = to.saturating_sub(last);
        Duration::from_millis(longest.max(open) as u64)
    }

    /// Answers per second within these moments.
    pub fn rate(&self, from: Instant, to: Instant) -> f64 {
        let (from, to) = (self.slot(from), self.slot(to).min(self.slots.len()));
        let slots = self.slots.get(from..to).unwrap_or_default();
        let sum: u64 = slots.iter().map(|slot| u64::from(slot.load(Relaxed))).sum();
        sum as f64 * 1e3 / slots.len().max(1) as f64
    }

    fn slot(&self, at: Instant) -> usize {
        at.saturating_duration_since(self.start).as_millis() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pulse(beats: &[usize]) -> Pulse {
        let pulse = Pulse::new(Duration::from_millis(1000));
        for &slot in beats {
            pulse.slots[slot].fetch_add(1, Relaxed);
        }
        pulse
    }

    fn gap(pulse: &Pulse, from: u64, to: u64) -> u128 {
        let at = |millis| pulse.start + Duration::from_millis(millis);
        pulse.longest_gap(at(from), at(to)).as_millis()
    }

    #[test]
    fn a_gap_counts_whole_where_a_part_of_it_lies_within() {
        let pulse = pulse(&[10, 20, 30, 400, 410, 500, 510]);
        assert_eq!(gap(&pulse, 0, 25), 10);
        assert_eq!(gap(&pulse, 0, 40), 370);
        assert_eq!(gap(&pulse, 100, 200), 370);
        assert_eq!(gap(&pulse, 405, 505), 90);
    }

    #[test]
    fn answers_that_never_come_are_a_gap() {
        assert_eq!(gap(&pulse(&[10, 20]), 15, 900), 880);
        assert_eq!(gap(&pulse(&[]), 100, 5000), 1001);
    }

    #[test]
    fn rates_are_per_second() {
        let pulse = pulse(&[100, 100, 101, 199, 200]);
        let at = |millis| pulse.start + Duration::from_millis(millis);
        assert_eq!(pulse.rate(at(100), at(200)), 40.0);
        assert_eq!(pulse.count(), 5);
    }
}
