//! fio as a client: 4 KiB random reads for a while.

use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

/// What fio is to do.
pub struct RandomReads {
    /// The engine, and where that finds the data, as fio's own arguments.
    pub place: Vec<String>,
    /// Requests in flight of each job, and jobs.
    pub depth: usize,
    /// See `depth`.
    pub jobs: usize,
    /// Bytes that are read from.
    pub size: u64,
    /// How long.
    pub seconds: u64,
}

impl RandomReads {
    /// Reads a second.
    pub fn run(&self) -> anyhow::Result<f64> {
        let output = Command::new("fio")
            .args(["--name=read", "--rw=randread", "--time_based=1", "--group_reporting=1"])
            .args(["--output-format=json", "--randrepeat=0", "--bs=4096"])
            .args(&self.place)
            .arg(format!("--iodepth={}", self.depth))
            .arg(format!("--numjobs={}", self.jobs))
            .arg(format!("--runtime={}", self.seconds))
            .arg(format!("--size={}", self.size))
            .output()
            .context("starting fio")?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
        // Warnings may come before.
        let start = text.find('{').context("fio printed no JSON")?;
        let report: Value = serde_json::from_str(&text[start..])?;
        report["jobs"][0]["read"]["iops"].as_f64().context("fio told no rate")
    }
}

/// The middle one; of an even number the higher of both in the middle.
pub fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
