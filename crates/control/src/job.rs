//! Drains as jobs, of one volume or of all. A second request for a running drain joins its job, so
//! at most one job runs for each volume, and one for all. A job ends when nothing of its volumes is
//! dirty, when it is cancelled, when the pool does not answer, or when the remaining blocks cannot
//! be destaged: they are lost, or their primary accepts no writes. A volume is drained as long as
//! one of its jobs runs. The last few ended jobs are kept for inquiries.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use forebay_block::BLOCK_SIZE;
use forebay_engine::{DRAIN_PATIENCE, DrainProgress};

use crate::api::{Job, JobState};
use crate::error::{ControlError, ControlErrorKind};
use crate::pool::{PoolControl, PoolSnapshot, VolumeSnapshot};
use crate::units::Size;

/// Maximum number of remembered jobs.
const KEPT: usize = 32;

/// The jobs of a server.
pub struct Jobs {
    pool: Arc<dyn PoolControl>,
    entries: Mutex<Entries>,
}

struct Entries {
    /// The number of the last job.
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

/// Blocks that a job still has to destage.
#[derive(Clone, Copy)]
struct Left {
    dirty: u64,
    /// Lost blocks among them, which can never be destaged because they cannot be read back.
    lost: u64,
}

impl Left {
    /// The remaining blocks of `volume`, or of all volumes.
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
    /// A list without jobs, for `pool`.
    pub fn new(pool: Arc<dyn PoolControl>) -> Self {
        // Numbers of an earlier server must not mean other drains now.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let last = u64::try_from(since.as_millis()).unwrap_or_default();
        Self { pool, entries: Mutex::new(Entries { last, all: VecDeque::new() }) }
    }

    /// Starts to drain a volume, or all volumes; or joins the running job that does exactly that.
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

    /// Updates the running jobs from the state of the pool.
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

    /// Stops the drain of those volumes that no other job still drains, after job `ended` has
    /// ended.
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

    /// The job with this number.
    pub fn get(&self, id: u64) -> Result<Job, ControlError> {
        self.refresh();
        let entries = self.lock();
        let found = entries.all.iter().find(|entry| entry.job.id == id);
        found.map(|entry| entry.job.clone()).ok_or_else(|| no_job(id))
    }

    /// Cancels the job with this number; no effect if it has ended.
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

    /// All remembered jobs, oldest first.
    pub fn list(&self) -> Vec<Job> {
        self.refresh();
        self.lock().all.iter().map(|entry| entry.job.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    /// Forgets the oldest ended job if there are too many. Running jobs are few: one for each
    /// volume, and one for all.
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

    /// Updates the job from the state of the pool. Returns whether it has ended.
    fn has_ended(&mut self, snapshot: Result<&PoolSnapshot, &ControlError>) -> bool {
        let Self { job, began, progress, .. } = self;
        let time = began.elapsed();
        job.seconds = time.as_secs_f64();
        let left = match snapshot {
            Ok(snapshot) => match Left::of(snapshot, job.volume.as_deref()) {
                Ok(left) => Ok((left, snapshot)),
                Err(error) => Err(error.to_string()),
            },
            Err(error) => Err(error.to_string()),
        };
        (job.state, job.error) = match left {
            Ok((left, snapshot)) => {
                job.remaining_bytes = left.bytes();
                job.total_bytes = job.total_bytes.max(job.remaining_bytes);
                if left.whole() > 0 && !progress.is_stalled(time, left.whole()) {
                    return false;
                }
                match left.dirty {
                    0 => (JobState::Done, None),
                    _ => {
                        let why = hindrance(snapshot, job.volume.as_deref());
                        (JobState::Failed, Some(what_is_left(left, &why)))
                    }
                }
            }
            Err(error) => (JobState::Failed, Some(error)),
        };
        true
    }
}

/// Why the blocks of `volume`, or of all volumes, do not become fewer, and the remedy: a primary
/// does not take them, or clients write as fast as it does.
fn hindrance(snapshot: &PoolSnapshot, volume: Option<&str>) -> String {
    let wanted = snapshot.volumes.iter().filter(|one| volume.is_none_or(|name| one.name == name));
    let dirty: Vec<_> =
        wanted.filter(|one| one.state.dirty_blocks > one.state.lost_blocks).collect();
    let is_ill = |one: &&&VolumeSnapshot| one.primary_health.name() != "good";
    match (dirty.iter().find(is_ill), dirty.first()) {
        (None, Some(VolumeSnapshot { name, .. })) => format!(
            "clients write to volume {name} as fast as its primary takes it; drain again after: \
             forebay set {name} mode=write-around"
        ),
        (Some(VolumeSnapshot { name, .. }), _) => {
            format!("the primary of volume {name} does not take them; see forebay status {name}")
        }
        (None, None) => "see forebay status".to_owned(),
    }
}

/// The message of a drain that left dirty blocks: how many, and why.
fn what_is_left(left: Left, why: &str) -> String {
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
            "{} remain, without progress for {} s: {why}",
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::events::detect::tests::pool;
    use crate::pool::PrimaryHealth;

    use super::*;

    /// Regression: a drain of a busy volume blamed a primary that was well.
    #[test]
    fn a_drain_that_stalls_names_its_hindrance() {
        let mut pool = pool();
        pool.volumes[0].state.dirty_blocks = 7;
        let other = VolumeSnapshot { name: "log".to_owned(), ..pool.volumes[0].clone() };
        pool.volumes.push(other);
        let remedy = "clients write to volume db as fast as its primary takes it; drain again \
                      after: forebay set db mode=write-around";
        assert_eq!(hindrance(&pool, Some("db")), remedy);
        assert_eq!(hindrance(&pool, None), remedy);
        let away = Some(Duration::from_secs(1));
        pool.volumes[1].primary_health = PrimaryHealth { away, ..PrimaryHealth::default() };
        assert_eq!(hindrance(&pool, Some("db")), remedy);
        for volume in [None, Some("log")] {
            let why = hindrance(&pool, volume);
            assert_eq!(why, "the primary of volume log does not take them; see forebay status log");
        }
        // Lost blocks wait for no primary.
        pool.volumes[1].state.lost_blocks = 7;
        assert_eq!(hindrance(&pool, None), remedy);
    }
}
