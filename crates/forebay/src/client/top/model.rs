//! What `forebay top` shows: the last answers of the server, the choices of the reader, and the
//! recent hit ratios.

use std::collections::{BTreeMap, VecDeque};

use forebay_control::api::{Event, PoolStatus, Severity, StatisticsStatus, VolumeFigures};
use forebay_control::statistics::Window;
use forebay_control::{Client, ClientError};

/// Most hit ratios kept for a volume.
const RATIOS_MAX: usize = 60;

/// The answers and the choices.
#[derive(Default)]
pub struct Model {
    pub status: Option<PoolStatus>,
    pub statistics: Option<StatisticsStatus>,
    /// Warnings and errors that nobody has acknowledged, newest first.
    pub events: Vec<Event>,
    /// Why the server cannot be asked, if it cannot.
    pub lost: Option<String>,
    window: usize,
    volume: usize,
    /// By volume: the hit ratio of each look, in percent; `None` without reads.
    ratios: BTreeMap<String, VecDeque<Option<f64>>>,
}

impl Model {
    /// Asks the server.
    pub fn look(&mut self, client: &Client) {
        match self.ask(client) {
            Ok(()) => self.lost = None,
            Err(error) => self.lost = Some(error.to_string()),
        }
    }

    fn ask(&mut self, client: &Client) -> Result<(), ClientError> {
        let status = client.status()?;
        let statistics = client.statistics(self.window())?;
        let mut events = client.events()?.events;
        events.retain(|event| event.severity != Severity::Info && event.acknowledged.is_empty());
        events.reverse();
        if self.window() == Window::Now {
            self.note_ratios(&statistics);
        }
        self.volume = self.volume.min(statistics.volumes.len().saturating_sub(1));
        (self.status, self.statistics, self.events) = (Some(status), Some(statistics), events);
        Ok(())
    }

    fn note_ratios(&mut self, statistics: &StatisticsStatus) {
        for volume in &statistics.volumes {
            let ratios = self.ratios.entry(volume.name.clone()).or_default();
            ratios.push_back(volume.reads.full_hit_percent);
            if ratios.len() > RATIOS_MAX {
                ratios.pop_front();
            }
        }
    }

    /// The window that the reader has chosen.
    pub fn window(&self) -> Window {
        Window::ALL[self.window]
    }

    pub fn choose_window(&mut self, by: isize) {
        self.window = step(self.window, by, Window::ALL.len());
    }

    /// The place of the chosen volume.
    pub fn chosen(&self) -> usize {
        self.volume
    }

    pub fn choose_volume(&mut self, by: isize) {
        let count = self.statistics.as_ref().map_or(0, |all| all.volumes.len());
        self.volume = step(self.volume, by, count);
    }

    /// The course of a volume's hit ratio, oldest first, at most `most` values.
    pub fn ratios(&self, volume: &VolumeFigures, most: usize) -> Vec<Option<f64>> {
        let all: Vec<Option<f64>> = match self.window() {
            Window::Now => self.ratios.get(&volume.name).into_iter().flatten().copied().collect(),
            _ => volume.points.iter().map(|point| point.full_hit_percent).collect(),
        };
        all[all.len().saturating_sub(most)..].to_vec()
    }
}

/// The place `by` further, of `count` in a circle.
fn step(place: usize, by: isize, count: usize) -> usize {
    match count {
        0 => 0,
        _ => (place + count).wrapping_add_signed(by) % count,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_go_round() {
        assert_eq!((step(0, -1, 3), step(2, 1, 3), step(0, 1, 0)), (2, 0, 0));
        let mut model = Model::default();
        model.choose_window(-1);
        assert_eq!(model.window(), Window::Start);
        model.choose_window(1);
        assert_eq!(model.window(), Window::Now);
    }
}
