//! The recording of a volume as the control API sees it: a new file, and its progress.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use forebay_block::VolumeId;
use forebay_control::{ControlError, ControlErrorKind, TraceSnapshot, TraceTarget};
use forebay_runtime::{Pool, Recording};

/// A recording, running or ended.
pub struct Trace {
    path: PathBuf,
    recording: Recording,
    began: Instant,
    /// Its duration, once it has ended.
    took: Mutex<Option<Duration>>,
}

impl Trace {
    /// Creates the file and begins to record.
    pub fn start(pool: &Pool, volume: VolumeId, to: &TraceTarget) -> Result<Self, ControlError> {
        let cannot = |error: io::Error| {
            let hint = match error.kind() {
                io::ErrorKind::AlreadyExists => "name a file that does not exist",
                _ => "name a file that the server may make",
            };
            let what = format!("cannot record to {}: {error}", to.path.display());
            ControlError::new(ControlErrorKind::Invalid, what, hint)
        };
        let file = create(&to.path).map_err(cannot)?;
        let recording = pool.record(volume, to.limit, Box::new(BufWriter::new(file)));
        let recording = recording.map_err(cannot)?;
        let (path, began) = (to.path.clone(), Instant::now());
        Ok(Self { path, recording, began, took: Mutex::new(None) })
    }

    /// The state of the recording.
    pub fn snapshot(&self) -> TraceSnapshot {
        let status = self.recording.status();
        let mut took = self.took.lock().unwrap_or_else(PoisonError::into_inner);
        let time = took.unwrap_or_else(|| self.began.elapsed());
        if !status.running {
            took.get_or_insert(time);
        }
        TraceSnapshot {
            path: self.path.clone(),
            running: status.running,
            time,
            requests: status.requests,
            bytes: status.bytes,
            dropped: status.dropped,
            error: status.error,
        }
    }

    /// Ends the recording, if it is still running.
    pub fn stop(&mut self, pool: &Pool, volume: VolumeId) {
        if self.recording.status().running {
            pool.stop_recording(volume, &mut self.recording);
        }
    }
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}
