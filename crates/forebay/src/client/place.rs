//! Places on a volume, as arguments: ranges, or the files that lie there.

use std::ops::Range;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use forebay_control::api::VolumeStatus;
use forebay_control::config::Pin;
use forebay_control::units::Size;
use forebay_policy::{range_text, read_range};

use crate::disk::extents;

/// Places on a volume.
#[derive(Args, Debug)]
pub struct Places {
    /// These bytes of the volume, as in 1GiB..2GiB; may be repeated
    #[arg(long = "range", value_name = "FROM..TO", value_parser = read_range)]
    pub ranges: Vec<Range<u64>>,
    /// The bytes that this file takes now, in a file system on the volume; may be repeated
    #[arg(long = "file", value_name = "PATH")]
    pub files: Vec<PathBuf>,
    /// The disk that is the volume, for files on a disk that `forebay attach` has not made
    #[arg(long, value_name = "PATH", requires = "files")]
    pub device: Option<PathBuf>,
}

impl Places {
    /// Whether none is given.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.files.is_empty()
    }

    /// The places on a volume: each file under its path, each range by itself. A range without an
    /// end goes to that of the volume.
    pub fn on(&self, volume: &VolumeStatus) -> anyhow::Result<Vec<Pin>> {
        let mut all = Vec::new();
        for range in &self.ranges {
            let end = if range.end == u64::MAX { volume.size } else { range.end };
            if range.start >= volume.size || end > volume.size {
                let (shown, name, size) = (range_text(range), &volume.name, Size(volume.size));
                bail!("--range {shown}: volume {name} ends at {size}; use a range up to there");
            }
            all.push(Pin { name: None, ranges: std::iter::once(range.start..end).collect() });
        }
        for path in &self.files {
            let ranges = extents::of_file(path, volume, self.device.as_deref())?;
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            all.push(Pin { name: Some(path.display().to_string()), ranges });
        }
        all.retain(|pin| !pin.ranges.is_empty());
        Ok(all)
    }
}
