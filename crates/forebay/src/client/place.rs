//! Places on a volume, as arguments: ranges, or the files that lie there.

use std::ops::Range;
use std::path::PathBuf;

use clap::Args;
use forebay_control::api::VolumeStatus;
use forebay_control::config::Pin;
use forebay_policy::read_range;

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

    /// The places on a volume: each file under its path, each range by itself.
    pub fn on(&self, volume: &VolumeStatus) -> anyhow::Result<Vec<Pin>> {
        let end = |range: &Range<u64>| range.start..range.end.min(volume.size);
        let ranges = self.ranges.iter().map(end).filter(|range| !range.is_empty());
        let mut all: Vec<Pin> =
            ranges.map(|range| Pin { name: None, ranges: vec![range] }).collect();
        for path in &self.files {
            let ranges = extents::of_file(path, volume, self.device.as_deref())?;
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            all.push(Pin { name: Some(path.display().to_string()), ranges });
        }
        all.retain(|pin| !pin.ranges.is_empty());
        Ok(all)
    }
}
