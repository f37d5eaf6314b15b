//! Keeps the samples of the primaries on record while they are served: a thread that takes a
//! place off the record before the server changes it, and puts it on record again when it rests.

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

/// How long nothing may have changed a place before it goes on record again, at least.
const REST: Duration = Duration::from_secs(30);
/// Places of a primary that go on record at once: their changes wait for as long as that takes.
const AT_ONCE: usize = 8;

/// A primary whose samples are kept.
pub struct Kept {
    /// Its volume.
    pub id: VolumeId,
    /// The primary itself, below what watches it.
    pub primary: Arc<dyn BlockDevice>,
    /// What is on record of it, in the order of the table.
    pub watch: Arc<Watch>,
}

/// A primary that was away and may be used from now on.
pub struct Arrival {
    /// Its volume.
    pub id: VolumeId,
    /// The primary itself.
    pub primary: Arc<dyn BlockDevice>,
    /// What it holds, as it was found.
    pub samples: Vec<Sample>,
    /// What stood in for it.
    pub stand_in: Arc<AwayDevice>,
}

/// Where primaries come in that were away.
#[derive(Clone)]
pub struct Door {
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    keeper: Thread,
}

impl Door {
    /// Puts the primary behind its stand-in as soon as its samples are on record: before that the
    /// server must change nothing.
    pub fn let_in(&self, arrival: Arrival) {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).push(arrival);
        self.keeper.unpark();
    }
}

/// The thread; it ends with this.
pub struct Keeper {
    thread: Option<JoinHandle<Table>>,
    stop: Arc<AtomicBool>,
    door: Door,
}

struct Work {
    state: StateDir,
    table: Table,
    kept: Vec<Kept>,
    /// How often each place had been changed when it was last looked at, if it rested then.
    rested: Vec<Vec<Option<u64>>>,
    arrivals: Arc<Mutex<Vec<Arrival>>>,
}

impl Keeper {
    /// Keeps `table`, which is stored in `state` as it is.
    ///
    /// # Errors
    /// When there is no thread to be had.
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

    /// Where primaries come in that were away at the start.
    pub fn door(&self) -> Door {
        self.door.clone()
    }

    /// Ends the thread; the table as it is stored. The shards have stopped.
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

    /// Takes off the record what is about to be changed.
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

    /// Puts those on record that have come, and lets the shards use them.
    fn let_in(&mut self) {
        let mut all = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let all = std::mem::take(&mut *all);
        for Arrival { id, primary, samples, stand_in } in all {
            self.table.volumes.retain(|(one, _)| *one != id);
            self.table.volumes.push((id, samples));
            if !self.store() {
                // Nothing is on record then, so nothing waits.
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

    /// Puts on record what was not changed for a while.
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

    /// Places that have rested since the last time; changes of them wait from now on.
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

    /// Makes the table durable, or takes it away: then nothing is on record. Changes do not wait
    /// for a state directory that fails: the next start may then take them for somebody else's.
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
        let taken = samples::take(&*primary).expect("memory can be read");
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
        // The write is done, so the record was void before.
        assert_eq!(stored().of(id)[1].crc, None);
        assert_eq!(stored().of(id)[0], taken[0], "others stay");
        queue.flush().expect("it can be flushed");
        let table = keeper.stop().expect("it ends");
        assert_eq!(table, stored());
        // By hand, since the thread waits longer than a test should.
        let kept = vec![Kept { id, primary: Arc::clone(&primary), watch }];
        let rested = vec![vec![None; taken.len()]];
        let mut work = Work { state: state.clone(), table, kept, rested, arrivals: Arc::default() };
        work.put_on();
        assert_eq!(stored().of(id)[1].crc, None, "it may have been changed just now");
        work.put_on();
        assert_eq!(stored().of(id), samples::take(&*primary).expect("memory can be read"));
        std::fs::remove_dir_all(&dir).expect("it is ours");
    }
}
