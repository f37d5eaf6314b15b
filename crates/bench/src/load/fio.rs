//! fio as a client: 4 KiB random reads for a fixed time.

use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

/// The parameters of a fio run.
pub struct RandomReads {
    /// The engine and the data, as fio arguments.
    pub place: Vec<String>,
    /// Requests in flight per job.
    pub depth: usize,
    /// Number of jobs.
    pub jobs: usize,
    /// Bytes that are read from.
    pub size: u64,
    /// Duration in seconds.
    pub seconds: u64,
}

impl RandomReads {
    /// Runs fio; returns reads per second.
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
        // Warnings may precede the JSON.
        let start = text.find('{').context("fio printed no JSON")?;
        let report: Value = serde_json::from_str(&text[start..])?;
        report["jobs"][0]["read"]["iops"].as_f64().context("fio told no rate")
    }
}

/// The median; of an even number of values, the upper of the two in the middle.
pub fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
