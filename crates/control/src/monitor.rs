//! The server's own observation: a thread that takes a snapshot of the pool every second. From it
//! come the statistics of windows, the events, and what the page shows. Nothing of this is in the
//! path of a request: a snapshot is one message to each shard.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::api::{PageUpdate, PoolStatus, StatisticsStatus};
use crate::error::ControlError;
use crate::events::{Detector, EventLog};
use crate::job::Jobs;
use crate::pool::{PoolControl, PoolSnapshot};
use crate::statistics::{History, Sample, Window};

/// Time between two snapshots.
const PERIOD: Duration = Duration::from_secs(1);

/// The observed pool.
pub struct Monitor {
    pool: Arc<dyn PoolControl>,
    jobs: Jobs,
    history: Mutex<History>,
    events: Arc<EventLog>,
    detector: Mutex<Detector>,
    /// What the page shows, as JSON; only made while somebody looks.
    seen: watch::Sender<Arc<str>>,
    closing: watch::Sender<bool>,
}

impl Monitor {
    /// Begins to observe `pool`, and to tell `events` what happens.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(pool: Arc<dyn PoolControl>, events: Arc<EventLog>) -> std::io::Result<Arc<Self>> {
        let monitor = Arc::new(Self {
            jobs: Jobs::new(Arc::clone(&pool)),
            pool,
            history: Mutex::default(),
            events,
            detector: Mutex::default(),
            seen: watch::Sender::new(Arc::from("")),
            closing: watch::Sender::new(false),
        });
        // Whatever changes from here on differs from what this look has seen.
        monitor.look();
        let observed = Arc::downgrade(&monitor);
        let builder = std::thread::Builder::new().name("monitor".to_owned());
        // It ends when the monitor is gone.
        drop(builder.spawn(move || observe(&observed))?);
        Ok(monitor)
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<dyn PoolControl> {
        &self.pool
    }

    /// The drains.
    pub(crate) fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// The events.
    #[must_use]
    pub fn events(&self) -> &Arc<EventLog> {
        &self.events
    }

    /// What the page shows, from the next look on: a [`PageUpdate`] as JSON.
    pub(crate) fn seen(&self) -> watch::Receiver<Arc<str>> {
        let mut seen = self.seen.subscribe();
        seen.mark_unchanged();
        seen
    }

    /// Becomes true when streams must end.
    pub(crate) fn closing(&self) -> watch::Receiver<bool> {
        self.closing.subscribe()
    }

    /// Ends the streams: the server stops.
    pub fn close(&self) {
        self.closing.send_replace(true);
    }

    /// The statistics of a window that ends now.
    ///
    /// # Errors
    /// When a shard does not answer.
    pub fn statistics(&self, window: Window) -> Result<StatisticsStatus, ControlError> {
        let now = Sample::of(&self.pool.snapshot()?);
        Ok(StatisticsStatus::of(&locked(&self.history), window, &now))
    }

    /// The state of the pool.
    ///
    /// # Errors
    /// When a shard does not answer.
    pub fn status(&self) -> Result<PoolStatus, ControlError> {
        let snapshot = self.pool.snapshot()?;
        Ok(self.status_of(&snapshot, &Sample::of(&snapshot)))
    }

    fn status_of(&self, snapshot: &PoolSnapshot, now: &Sample) -> PoolStatus {
        let mut status = PoolStatus::of(snapshot);
        if let Some(wear) = &mut status.cache.wear {
            wear.look_back(&locked(&self.history), now);
        }
        status
    }

    /// One look at the pool.
    fn look(&self) {
        // A pool that is starting or stopping does not answer.
        let Ok(snapshot) = self.pool.observe() else { return };
        let sample = Arc::new(Sample::of(&snapshot));
        locked(&self.history).note(&sample);
        let jobs = self.jobs.list();
        let mut detector = locked(&self.detector);
        let upgrade = detector.upgrade(self.pool.last_upgrade().as_ref());
        let news = detector.look(&snapshot, &jobs);
        news.into_iter().chain(upgrade).for_each(|news| self.events.tell(news));
        if self.seen.receiver_count() > 0 {
            let statistics = StatisticsStatus::of(&locked(&self.history), Window::Now, &sample);
            let status = self.status_of(&snapshot, &sample);
            let update = PageUpdate { status, statistics, jobs };
            let text = serde_json::to_string(&update).expect("its keys are texts");
            self.seen.send_replace(Arc::from(text));
        }
    }
}

/// Looks at the pool every [`PERIOD`], until the monitor is gone.
fn observe(monitor: &Weak<Monitor>) {
    let mut next = Instant::now() + PERIOD;
    loop {
        let Some(monitor) = monitor.upgrade() else { return };
        let now = Instant::now();
        if now >= next {
            monitor.look();
            // Looks that could not be taken in time are left out.
            next = (next + PERIOD).max(now);
        }
        drop(monitor);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// The values behind these locks are replaced whole, so a panic leaves nothing half-changed.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
