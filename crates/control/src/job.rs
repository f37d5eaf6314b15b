//! Drains as jobs, of one volume or of all. Asking again for what a running job does joins it; so
//! at most one runs for each volume, and one for all. A job ends when nothing of it is dirty, when
//! it is cancelled, when the pool does not answer, or when what is left cannot be destaged: it is
//! lost, or its primary takes nothing. A volume is drained as long as a job of it runs. The last
//! few jobs that ended are kept to be asked about.

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
    /// Oldest first.
    all: VecDeque<Entry>,
}

struct Entry {
    job: Job,
    began: Instant,
    /// The volumes that it drains.
    volumes: Vec<String>,
    progress: DrainProgress,
}

/// Blocks that a job has to do with.
#[derive(Clone, Copy)]
struct Left {
    dirty: u64,
    /// Of these, those that cannot be read back, and so are never destaged.
    lost: u64,
}

impl Left {
    /// Those of a volume, or of all.
    fn of(snapshot: &PoolSnapshot, volume: Option<&str>) -> Result<Self, ControlError> {
        let Some(name) = volume else {
            return Ok(Self { dirty: snapshot.dirty_blocks(), lost: snapshot.lost_blocks() });
        };
        let state = &snapshot.volume(name)?.state;
        Ok(Self { dirty: state.dirty_blocks, lost: state.lost_blocks })
    }

    fn whole(self) -> u64 {
        self.dirty.saturating_sub(self.lost)
    }

    fn bytes(self) -> u64 {
        self.dirty * BLOCK_SIZE as u64
    }
}

impl Jobs {
    /// No jobs yet, on `pool`.
    pub fn new(pool: Arc<dyn PoolControl>) -> Self {
        Self { pool, entries: Mutex::default() }
    }

    /// Starts to drain a volume, or all; or joins the job that does just that.
    pub fn start(&self, volume: Option<&str>) -> Result<Job, ControlError> {
        let mut entries = self.lock();
        let snapshot = self.pool.snapshot()?;
        let left = Left::of(&snapshot, volume)?;
        let same = |entry: &&Entry| entry.is_running() && entry.job.volume.as_deref() == volume;
        if let Some(entry) = entries.all.iter().find(same) {
            return Ok(entry.job.clone());
        }
        let names = snapshot.volumes.iter().map(|one| one.name.clone());
        let volumes: Vec<String> =
            names.filter(|name| volume.is_none_or(|one| one == name)).collect();
        volumes.iter().try_for_each(|name| self.pool.set_drain(name, true))?;
        entries.last += 1;
        let job = Job {
            id: entries.last,
            volume: volume.map(str::to_owned),
            state: JobState::Running,
            total_bytes: left.bytes(),
            remaining_bytes: left.bytes(),
            seconds: 0.0,
            error: None,
        };
        entries.make_room();
        let (began, progress) = (Instant::now(), DrainProgress::default());
        entries.all.push_back(Entry { job: job.clone(), began, volumes, progress });
        Ok(job)
    }

    /// Looks how far the running jobs are.
    pub fn refresh(&self) {
        let mut entries = self.lock();
        if !entries.all.iter().any(Entry::is_running) {
            return;
        }
        let snapshot = self.pool.snapshot();
        for at in 0..entries.all.len() {
            let entry = &mut entries.all[at];
            if entry.is_running() && entry.has_ended(snapshot.as_ref()) {
                self.switch_off(&entries, at);
            }
        }
    }

    /// Ends the drain of what only this job, which has ended, was draining.
    fn switch_off(&self, entries: &Entries, ended: usize) {
        let drained = |name: &String| {
            let mut running = entries.all.iter().filter(|entry| entry.is_running());
            running.any(|entry| entry.volumes.contains(name))
        };
        for name in entries.all[ended].volumes.iter().filter(|name| !drained(name)) {
            if let Err(error) = self.pool.set_drain(name, false) {
                tracing::warn!(%error, "a drain has ended but cannot be switched off");
            }
        }
    }

    /// The job of that number.
    pub fn get(&self, id: u64) -> Result<Job, ControlError> {
        self.refresh();
        let entries = self.lock();
        let found = entries.all.iter().find(|entry| entry.job.id == id);
        found.map(|entry| entry.job.clone()).ok_or_else(|| no_job(id))
    }

    /// Ends the job of that number; nothing if it has ended.
    pub fn cancel(&self, id: u64) -> Result<Job, ControlError> {
        let mut entries = self.lock();
        let at = entries.all.iter().position(|entry| entry.job.id == id);
        let at = at.ok_or_else(|| no_job(id))?;
        if entries.all[at].is_running() {
            entries.all[at].job.state = JobState::Cancelled;
            self.switch_off(&entries, at);
        }
        Ok(entries.all[at].job.clone())
    }

    /// Every job that is remembered, oldest first.
    pub fn list(&self) -> Vec<Job> {
        self.refresh();
        self.lock().all.iter().map(|entry| entry.job.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    /// Forgets the oldest job that has ended, if there are too many. Those that run are few: one
    /// for each volume, and one for all.
    fn make_room(&mut self) {
        if self.all.len() >= KEPT
            && let Some(oldest) = self.all.iter().position(|entry| !entry.is_running())
        {
            self.all.remove(oldest);
        }
    }
}

impl Entry {
    fn is_running(&self) -> bool {
        self.job.state == JobState::Running
    }

    /// Takes note of how the pool stands; whether the job has ended with that.
    fn has_ended(&mut self, snapshot: Result<&PoolSnapshot, &ControlError>) -> bool {
        let Self { job, began, progress, .. } = self;
        let time = began.elapsed();
        job.seconds = time.as_secs_f64();
        let left = match snapshot {
            Ok(snapshot) => Left::of(snapshot, job.volume.as_deref()).map_err(|e| e.to_string()),
            Err(error) => Err(error.to_string()),
        };
        (job.state, job.error) = match left {
            Ok(left) => {
                job.remaining_bytes = left.bytes();
                job.total_bytes = job.total_bytes.max(job.remaining_bytes);
                if left.whole() > 0 && !progress.is_stalled(time, left.whole()) {
                    return false;
                }
                match left.dirty {
                    0 => (JobState::Done, None),
                    _ => (JobState::Failed, Some(what_is_left(left))),
                }
            }
            Err(error) => (JobState::Failed, Some(error)),
        };
        true
    }
}

/// What a drain leaves, and why.
fn what_is_left(left: Left) -> String {
    let size = |blocks: u64| Size(blocks * BLOCK_SIZE as u64);
    let (lost, left) = (left.lost, left.whole());
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
