//! Drains as jobs: at most one runs, since the volumes of a pool share one log and so one drain.
//! A job ends when nothing is dirty, when it is cancelled, when the pool does not answer, or when
//! what is left cannot be destaged: it is lost, or its primary takes nothing. The last few that
//! ended are kept to be asked about.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use forebay_block::BLOCK_SIZE;
use forebay_engine::{DRAIN_PATIENCE, DrainProgress};

use crate::api::{Job, JobState};
use crate::error::{ControlError, ControlErrorKind};
use crate::pool::{PoolControl, PoolSnapshot};
use crate::units::Size;

/// Jobs that are remembered.
const KEPT: usize = 32;

/// The jobs of a server.
pub struct Jobs {
    pool: Arc<dyn PoolControl>,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    last: u64,
    /// Oldest first; only the newest may be running.
    jobs: VecDeque<(Job, Instant)>,
    /// How far the newest is.
    progress: DrainProgress,
}

impl Jobs {
    /// No jobs yet, on `pool`.
    pub fn new(pool: Arc<dyn PoolControl>) -> Self {
        Self { pool, entries: Mutex::default() }
    }

    /// Starts to drain, or joins the drain that is running.
    pub fn start(&self, volume: Option<&str>) -> Result<Job, ControlError> {
        let mut entries = self.lock();
        let snapshot = self.pool.snapshot()?;
        if let Some(name) = volume {
            snapshot.volume(name)?;
        }
        if let Some((job, _)) = entries.running() {
            return Ok(job.clone());
        }
        self.pool.set_drain(true)?;
        let dirty = snapshot.dirty_blocks() * BLOCK_SIZE as u64;
        entries.last += 1;
        let job = Job {
            id: entries.last,
            volume: volume.map(str::to_owned),
            state: JobState::Running,
            total_bytes: dirty,
            remaining_bytes: dirty,
            seconds: 0.0,
            error: None,
        };
        if entries.jobs.len() == KEPT {
            entries.jobs.pop_front();
        }
        entries.jobs.push_back((job.clone(), Instant::now()));
        entries.progress = DrainProgress::default();
        Ok(job)
    }

    /// Looks how far the running job is; whether one is running still.
    pub fn refresh(&self) -> bool {
        let mut entries = self.lock();
        let Entries { jobs, progress, .. } = &mut *entries;
        let Some((job, began)) = jobs.back_mut() else { return false };
        if job.state != JobState::Running {
            return false;
        }
        let time = began.elapsed();
        job.seconds = time.as_secs_f64();
        match self.pool.snapshot() {
            Ok(snapshot) => {
                job.remaining_bytes = snapshot.dirty_blocks() * BLOCK_SIZE as u64;
                job.total_bytes = job.total_bytes.max(job.remaining_bytes);
                // What cannot be read back is never destaged.
                let left = snapshot.dirty_blocks().saturating_sub(snapshot.lost_blocks());
                if left > 0 && !progress.is_stalled(time, left) {
                    return true;
                }
                (job.state, job.error) = match job.remaining_bytes {
                    0 => (JobState::Done, None),
                    _ => (JobState::Failed, Some(what_is_left(&snapshot))),
                };
                if let Err(error) = self.pool.set_drain(false) {
                    tracing::warn!(%error, "the drain is done but cannot be switched off");
                }
            }
            Err(error) => {
                job.state = JobState::Failed;
                job.error = Some(error.to_string());
            }
        }
        false
    }

    /// The job of that number.
    pub fn get(&self, id: u64) -> Result<Job, ControlError> {
        self.refresh();
        let entries = self.lock();
        let found = entries.jobs.iter().find(|(job, _)| job.id == id);
        found.map(|(job, _)| job.clone()).ok_or_else(|| no_job(id))
    }

    /// Ends the job of that number; nothing if it has ended.
    pub fn cancel(&self, id: u64) -> Result<Job, ControlError> {
        let mut entries = self.lock();
        let found = entries.jobs.iter_mut().find(|(job, _)| job.id == id);
        let (job, _) = found.ok_or_else(|| no_job(id))?;
        if job.state == JobState::Running {
            self.pool.set_drain(false)?;
            job.state = JobState::Cancelled;
        }
        Ok(job.clone())
    }

    /// Every job that is remembered, oldest first.
    pub fn list(&self) -> Vec<Job> {
        self.refresh();
        self.lock().jobs.iter().map(|(job, _)| job.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn running(&mut self) -> Option<(&mut Job, Instant)> {
        let (job, began) = self.jobs.back_mut()?;
        (job.state == JobState::Running).then_some((job, *began))
    }
}

/// What a drain leaves, and why.
fn what_is_left(snapshot: &PoolSnapshot) -> String {
    let size = |blocks: u64| Size(blocks * BLOCK_SIZE as u64);
    let lost = snapshot.lost_blocks();
    let left = snapshot.dirty_blocks().saturating_sub(lost);
    let mut all = Vec::new();
    if lost > 0 {
        all.push(format!(
            "{} are lost: the cache cannot read them back; write them again from a copy",
            size(lost)
        ));
    }
    if left > 0 {
        all.push(format!(
            "{} remain, and have not become less for {} s; see `forebay status` for the primary \
             that does not take them",
            size(left),
            DRAIN_PATIENCE.as_secs()
        ));
    }
    all.join("; ")
}

fn no_job(id: u64) -> ControlError {
    let hint = format!("the last {KEPT} are kept; list them with GET /v1/jobs");
    ControlError::new(ControlErrorKind::NotFound, format!("there is no job {id}"), hint)
}
