//! Keeps the recorded samples of the primaries valid while they are served: a thread that voids the
//! record of a place before the server changes it, and renews it when the place is at rest.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use forebay_block::{ByteRange, IoResult, VolumeId};
use forebay_codec::crc32c;
use forebay_device::{AwayDevice, BlockDevice, Watch};
use forebay_runtime::{Blocking, StateDir};

use crate::server::primaries::samples::{Sample, Table};
use crate::server::primaries::watch_one;

/// Least time without changes before the sample of a place is recorded again.
const REST: Duration = Duration::from_secs(30);
/// Places of a primary that are recorded together: changes to them wait meanwhile.
const AT_ONCE: usize = 8;

/// A primary whose samples are kept.
pub struct Kept {
    /// Its volume.
    pub id: VolumeId,
    /// The primary itself, below the device that watches it.
    pub primary: Arc<dyn BlockDevice>,
    /// The watch over its recorded samples, in the order of the table.
    pub watch: Arc<Watch>,
}

/// A primary that was away and may be used from now on.
pub struct Arrival {
    /// Its volume.
    pub id: VolumeId,
    /// The primary itself.
    pub primary: Arc<dyn BlockDevice>,
    /// Samples of its content, as found.
    pub samples: Vec<Sample>,
    /// The device that stands in for it.
    pub stand_in: Arc<AwayDevice>,
}

/// The entrance for primaries that were away.
#[derive(Clone)]
pub struct Door {
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    keeper: Thread,
}

impl Door {
    /// Connects the primary to its stand-in as soon as its samples are recorded: before that the
    /// server must not change it.
    pub fn let_in(&self, arrival: Arrival) {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).push(arrival);
        self.keeper.unpark();
    }
}

/// The thread; dropping this ends it.
pub struct Keeper {
    thread: Option<JoinHandle<Table>>,
    stop: Arc<AtomicBool>,
    door: Door,
}

struct Work {
    state: StateDir,
    table: Table,
    kept: Vec<Kept>,
    /// For each place, the number of its changes at the last check, if it was at rest then.
    rested: Vec<Vec<Option<u64>>>,
    arrivals: Arc<Mutex<Vec<Arrival>>>,
}

impl Keeper {
    /// Keeps `table`, which is already stored in `state`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(state: StateDir, table: Table, kept: Vec<Kept>) -> io::Result<Self> {
        let rested = kept.iter().map(|one| vec![None; table.of(one.id).len()]).collect();
        let arrivals = Arc::<Mutex<Vec<Arrival>>>::default();
        let mut work = Work { state, table, kept, rested, arrivals: Arc::clone(&arrivals) };
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let builder = thread::Builder::new().name("samples".into());
        let thread = builder.spawn(move || {
            work.run(&told);
            work.table
        })?;
        let door = Door { arrivals, keeper: thread.thread().clone() };
        Ok(Self { thread: Some(thread), stop, door })
    }

    /// The entrance for primaries that were away at the start.
    pub fn door(&self) -> Door {
        self.door.clone()
    }

    /// Ends the thread; returns the table as stored. The shards must have stopped.
    pub fn stop(mut self) -> Option<Table> {
        self.end()
    }

    fn end(&mut self) -> Option<Table> {
        let thread = self.thread.take()?;
        self.stop.store(true, Ordering::Release);
        thread.thread().unpark();
        thread.join().ok()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

impl Work {
    fn run(&mut self, stop: &AtomicBool) {
        for one in &self.kept {
            one.watch.set_keeper(thread::current());
        }
        let mut next = Instant::now() + REST;
        while !stop.load(Ordering::Acquire) {
            self.take_off();
            self.let_in();
            let now = Instant::now();
            if now >= next {
                self.put_on();
                next = now + REST;
            } else {
                thread::park_timeout(next - now);
            }
        }
    }

    /// Voids the records of places that are about to be changed.
    fn take_off(&mut self) {
        let asked: Vec<Vec<usize>> = self.kept.iter().map(|one| one.watch.asked()).collect();
        if asked.iter().all(Vec::is_empty) {
            return;
        }
        for (volume, places) in asked.iter().enumerate() {
            places.iter().for_each(|&at| self.set(volume, at, None));
        }
        self.store();
        for (one, places) in self.kept.iter().zip(&asked) {
            places.iter().for_each(|&at| one.watch.release(at));
        }
    }

    /// Records the samples of returned primaries, and lets the shards use these.
    fn let_in(&mut self) {
        let mut all = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let all = std::mem::take(&mut *all);
        for Arrival { id, primary, samples, stand_in } in all {
            self.table.volumes.retain(|(one, _)| *one != id);
            self.table.volumes.push((id, samples));
            if !self.store() {
                // Nothing is recorded in this case, so no change has to wait.
                let samples = self.table.volumes.last_mut().map(|(_, samples)| samples);
                samples.into_iter().flatten().for_each(|sample| sample.crc = None);
            }
            let (device, kept) = watch_one(id, &primary, self.table.of(id));
            kept.watch.set_keeper(thread::current());
            self.rested.push(vec![None; self.table.of(id).len()]);
            self.kept.push(kept);
            stand_in.come(Arc::new(device));
        }
    }

    /// Records the samples of places that are at rest.
    fn put_on(&mut self) {
        for volume in 0..self.kept.len() {
            let rests = self.resting(volume);
            if rests.is_empty() {
                continue;
            }
            match self.read(volume, &rests) {
                Ok(found) => {
                    for (&at, crc) in rests.iter().zip(found) {
                        self.set(volume, at, Some(crc));
                    }
                    if self.store() {
                        continue;
                    }
                }
                Err(error) => {
                    let id = self.kept[volume].id;
                    tracing::debug!(%id, %error, "no samples of its primary for now");
                }
            }
            for at in rests {
                self.set(volume, at, None);
                self.kept[volume].watch.release(at);
            }
        }
    }

    /// Returns places that have been at rest since the last check; changes to them wait from now
    /// on.
    fn resting(&mut self, volume: usize) -> Vec<usize> {
        let watch = &self.kept[volume].watch;
        let mut found = Vec::new();
        for (at, before) in self.rested[volume].iter_mut().enumerate() {
            let now = watch.at_rest(at);
            let rested = now.is_some() && now == *before;
            *before = now;
            if rested && found.len() < AT_ONCE && watch.hold(at) {
                found.push(at);
            }
        }
        found
    }

    fn read(&self, volume: usize, places: &[usize]) -> IoResult<Vec<u32>> {
        let one = &self.kept[volume];
        let samples = self.table.of(one.id);
        let ranges: Vec<ByteRange> = places.iter().map(|&at| samples[at].range).collect();
        let mut queue = Blocking::open(&*one.primary).map_err(|error| {
            forebay_block::IoError::with_source(forebay_block::ErrorKind::DeviceGone, error)
        })?;
        Ok(queue.read_many(&ranges)?.iter().map(|bytes| crc32c(bytes)).collect())
    }

    fn set(&mut self, volume: usize, at: usize, crc: Option<u32>) {
        let id = self.kept[volume].id;
        let samples = self.table.volumes.iter_mut().find(|(one, _)| *one == id);
        if let Some(sample) = samples.and_then(|(_, samples)| samples.get_mut(at)) {
            sample.crc = crc;
        }
    }

    /// Makes the table durable, or removes it, so that nothing is recorded. Changes do not wait for
    /// a failing state directory: the next start may then take them for foreign changes.
    fn store(&self) -> bool {
        let Err(error) = self.table.store(&self.state) else { return true };
        match self.table.remove(&self.state) {
            Ok(()) => tracing::warn!(%error, "the samples of the primaries are not kept"),
            Err(_) => tracing::error!(
                %error,
                "the samples of the primaries are out of date; mend the state directory before \
                 the next start, or use --accept-primary then"
            ),
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::IoBuf;
    use forebay_device::{MemoryDevice, WatchedDevice};

    use super::*;
    use crate::server::primaries::samples;

    #[test]
    fn a_place_is_off_the_record_before_it_is_changed_and_on_again_when_it_rests() {
        let dir = std::env::temp_dir().join(format!("forebay-keeper-{}", std::process::id()));
        let state = StateDir::open(&dir).expect("a directory can be made");
        let primary: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(1 << 20));
        let id = VolumeId(2);
        let taken = samples::take(&*primary, &[]).expect("memory can be read");
        let uuid = [7; 16];
        let table = Table { uuid, epoch: 1, volumes: vec![(id, taken.clone())] };
        let places = taken.iter().map(|sample| sample.range).collect();
        let watch = Arc::new(Watch::new(places, &vec![true; taken.len()]));
        let kept = vec![Kept { id, primary: Arc::clone(&primary), watch: Arc::clone(&watch) }];
        let watched = WatchedDevice::new(Arc::clone(&primary), Arc::clone(&watch));
        let keeper = Keeper::start(state.clone(), table, kept).expect("a thread can be had");
        let stored = || Table::load(&state, uuid, 1).expect("it can be read").expect("it is there");
        let mut queue = Blocking::open(&watched).expect("memory can be opened");
        queue.write(4096, IoBuf::copy_of(&[1; 512])).expect("it can be written");
        // The write is complete, so the record was voided before.
        assert_eq!(stored().of(id)[1].crc, None);
        assert_eq!(stored().of(id)[0], taken[0], "others stay");
        queue.flush().expect("it can be flushed");
        let table = keeper.stop().expect("it ends");
        assert_eq!(table, stored());
        // Called directly, since the thread waits longer than a test should.
        let kept = vec![Kept { id, primary: Arc::clone(&primary), watch }];
        let rested = vec![vec![None; taken.len()]];
        let mut work = Work { state: state.clone(), table, kept, rested, arrivals: Arc::default() };
        work.put_on();
        assert_eq!(stored().of(id)[1].crc, None, "it may have been changed just now");
        work.put_on();
        assert_eq!(stored().of(id), samples::take(&*primary, &[]).expect("memory can be read"));
        std::fs::remove_dir_all(&dir).expect("it is ours");
    }
}
