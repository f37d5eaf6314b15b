//! Keeps the recorded samples of the primaries valid while they are served: a thread that voids the
//! record of a place before the server changes it, and renews it when the place is at rest. Changes
//! of all volumes wait for this thread, so others read for it: a primary may hang.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use forebay_block::{ByteRange, ErrorKind, IoError, IoResult, VolumeId};
use forebay_codec::crc32c;
use forebay_device::{AwayDevice, BlockDevice, Watch};
use forebay_runtime::Blocking;

use crate::server::primaries::samples::{Sample, Table};
use crate::server::primaries::store::Store;
use crate::server::primaries::watch_one;

/// Least time without changes before the sample of a place is recorded again.
const REST: Duration = Duration::from_secs(30);
/// Time until samples that could not be stored are stored again.
const AGAIN: Duration = Duration::from_secs(5);
/// Places of a primary that are read and recorded together.
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
    store: Store,
    table: Table,
    volumes: Vec<Volume>,
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    /// Where the reading threads put what they have found, by the index of its volume.
    found: (Sender<OfVolume>, Receiver<OfVolume>),
}

/// A volume of which places are recorded.
struct Volume {
    kept: Kept,
    /// For each place, the number of its changes at the last check, if it was at rest then.
    rested: Vec<Option<u64>>,
    /// While a thread reads places: those that are to be recorded then. A change takes a place out.
    held: Option<Vec<usize>>,
}

/// Places that were read, with their checksums.
type Found = IoResult<Vec<(usize, u32)>>;
/// The same with the index of the volume.
type OfVolume = (usize, Found);

impl Keeper {
    /// Keeps `table` in `store`, where it is, or nothing.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(store: Store, table: Table, kept: Vec<Kept>) -> io::Result<Self> {
        let arrivals = Arc::<Mutex<Vec<Arrival>>>::default();
        let mut work = Work::new(store, table, kept, Arc::clone(&arrivals));
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

impl Volume {
    fn new(kept: Kept, samples: &[Sample]) -> Self {
        Self { kept, rested: vec![None; samples.len()], held: None }
    }

    /// Places that have been at rest since the last check, held from now on.
    fn resting(&mut self) -> Vec<usize> {
        let watch = &self.kept.watch;
        let mut found = Vec::new();
        for (at, before) in self.rested.iter_mut().enumerate() {
            let now = watch.at_rest(at);
            let rested = now.is_some() && now == *before;
            *before = now;
            if rested && found.len() < AT_ONCE && watch.hold(at) {
                found.push(at);
            }
        }
        found
    }
}

/// Reads these places of a primary. One that cannot be read is left out: it stays held, and so is
/// not read again, until it is changed.
fn read(primary: &dyn BlockDevice, places: &[(usize, ByteRange)]) -> Found {
    let mut queue = Blocking::open(primary)
        .map_err(|error| IoError::with_source(ErrorKind::DeviceGone, error))?;
    let ranges: Vec<ByteRange> = places.iter().map(|&(_, range)| range).collect();
    let found = queue.read_many(&ranges)?;
    let read = places.iter().zip(&found);
    Ok(read.filter_map(|(&(at, _), bytes)| Some((at, crc32c(bytes.as_ref()?)))).collect())
}

impl Work {
    fn new(
        store: Store,
        table: Table,
        kept: Vec<Kept>,
        arrivals: Arc<Mutex<Vec<Arrival>>>,
    ) -> Self {
        let volume = |one: Kept| {
            let samples = table.of(one.id);
            Volume::new(one, samples)
        };
        let volumes = kept.into_iter().map(volume).collect();
        Self { store, table, volumes, arrivals, found: channel() }
    }

    fn run(&mut self, stop: &AtomicBool) {
        for volume in &self.volumes {
            volume.kept.watch.set_keeper(thread::current());
        }
        let (mut next, mut again) = (Instant::now() + REST, Instant::now() + AGAIN);
        while !stop.load(Ordering::Acquire) {
            self.take_off();
            self.let_in();
            self.put_on();
            if Instant::now() >= next {
                self.look_for_rest();
                next = Instant::now() + REST;
            }
            if Instant::now() >= again {
                self.store_again();
                again = Instant::now() + AGAIN;
            }
            let until = if self.store.is_on_record() { next } else { next.min(again) };
            thread::park_timeout(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Voids the records of places that are about to be changed.
    fn take_off(&mut self) {
        let asked: Vec<_> = self.volumes.iter().map(|volume| volume.kept.watch.asked()).collect();
        if asked.iter().all(Vec::is_empty) {
            return;
        }
        for (volume, places) in asked.iter().enumerate() {
            places.iter().for_each(|&at| self.set(volume, at, None));
        }
        // What is not on record need not be taken off.
        if self.store.is_on_record() {
            self.store();
        }
        for (volume, places) in self.volumes.iter_mut().zip(&asked) {
            // What is being read of them does not count.
            volume.held.iter_mut().for_each(|held| held.retain(|at| !places.contains(at)));
            places.iter().for_each(|&at| volume.kept.watch.release(at));
        }
    }

    /// Records the samples of returned primaries, and lets the shards use these.
    fn let_in(&mut self) {
        let all = self.arrivals.lock().map(|mut all| std::mem::take(&mut *all));
        let all = all.unwrap_or_else(|poisoned| std::mem::take(&mut *poisoned.into_inner()));
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
            self.volumes.push(Volume::new(kept, self.table.of(id)));
            stand_in.come(Arc::new(device));
        }
    }

    /// Has the places that are at rest read, by a thread for each volume.
    fn look_for_rest(&mut self) {
        for at in 0..self.volumes.len() {
            let volume = &mut self.volumes[at];
            if volume.held.is_some() {
                continue;
            }
            let rests = volume.resting();
            if rests.is_empty() {
                continue;
            }
            let samples = self.table.of(volume.kept.id);
            let places: Vec<_> = rests.iter().map(|&at| (at, samples[at].range)).collect();
            volume.held = Some(rests);
            let primary = Arc::clone(&volume.kept.primary);
            let (found, keeper) = (self.found.0.clone(), thread::current());
            let builder = thread::Builder::new().name("samples-read".into());
            let started = builder.spawn(move || {
                // The keeper may have ended meanwhile.
                let _ = found.send((at, read(&*primary, &places)));
                keeper.unpark();
            });
            if let Err(error) = started {
                self.record(at, Err(IoError::with_source(ErrorKind::DeviceGone, error)));
            }
        }
    }

    /// Records the samples of places that were read.
    fn put_on(&mut self) {
        while let Ok((volume, found)) = self.found.1.try_recv() {
            self.record(volume, found);
        }
    }

    fn record(&mut self, volume: usize, found: Found) {
        let held = self.volumes[volume].held.take().unwrap_or_default();
        match found {
            Ok(found) => {
                for (at, crc) in found.into_iter().filter(|(at, _)| held.contains(at)) {
                    self.set(volume, at, Some(crc));
                    self.volumes[volume].kept.watch.note(at, crc);
                }
                if self.store() {
                    return;
                }
            }
            Err(error) => {
                let id = self.volumes[volume].kept.id;
                tracing::debug!(%id, %error, "no samples of its primary for now");
            }
        }
        for at in held {
            self.set(volume, at, None);
            self.volumes[volume].kept.watch.release(at);
        }
    }

    fn set(&mut self, volume: usize, at: usize, crc: Option<u32>) {
        let id = self.volumes[volume].kept.id;
        let samples = self.table.volumes.iter_mut().find(|(one, _)| *one == id);
        if let Some(sample) = samples.and_then(|(_, samples)| samples.get_mut(at)) {
            sample.crc = crc;
        }
    }

    /// Makes the table durable, or nothing is recorded.
    fn store(&mut self) -> bool {
        self.store.put(&mut self.table)
    }

    /// Tries again to store what could not be stored.
    fn store_again(&mut self) {
        if !self.store.is_on_record() {
            self.store();
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::IoBuf;
    use forebay_device::{MemoryDevice, WatchedDevice, open_primary};
    use forebay_runtime::StateDir;

    use super::*;
    use crate::server::primaries::samples;
    use crate::server::state_health::StateHealth;

    fn store_in(state: &StateDir) -> Store {
        let health = Arc::new(StateHealth::new(state.clone()));
        let never = Box::new(|| anyhow::bail!("not in this test"));
        Store::new(state.clone(), health, never, true)
    }

    #[test]
    fn a_place_is_off_the_record_before_it_is_changed_and_on_again_when_it_rests() {
        let dir = std::env::temp_dir().join(format!("forebay-keeper-{}", std::process::id()));
        let state = StateDir::open(&dir).expect("a directory can be made");
        let primary: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(1 << 20));
        let id = VolumeId(2);
        let taken = samples::take(&*primary, &[], Blocking::PATIENCE).expect("memory can be read");
        let uuid = [7; 16];
        let volumes = vec![(id, taken.clone())];
        let table = Table { uuid, epoch: 1, generation: 1, volumes };
        let places = taken.iter().map(|sample| sample.range).collect();
        let sums: Vec<_> = taken.iter().map(|sample| sample.crc).collect();
        let watch = Arc::new(Watch::new(places, &sums));
        let kept = vec![Kept { id, primary: Arc::clone(&primary), watch: Arc::clone(&watch) }];
        let watched = WatchedDevice::new(Arc::clone(&primary), Arc::clone(&watch));
        let keeper = Keeper::start(store_in(&state), table, kept).expect("a thread can be had");
        let stored = || Table::read(&state, uuid).expect("it can be read").expect("it is there");
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
        let mut work = Work::new(store_in(&state), table, kept, Arc::default());
        work.look_for_rest();
        assert_eq!(work.volumes[0].held, None, "it may have been changed just now");
        work.look_for_rest();
        while work.volumes[0].held.is_some() {
            work.put_on();
        }
        assert_eq!(
            stored().of(id),
            samples::take(&*primary, &[], Blocking::PATIENCE).expect("memory can be read")
        );
        std::fs::remove_dir_all(&dir).expect("it is ours");
    }

    /// The first primary takes long to read. Meanwhile changes of the other volume go on, and so do
    /// changes of the places that are being read, which are not recorded then.
    #[test]
    fn a_primary_that_hangs_delays_no_change() {
        const READ: Duration = Duration::from_secs(3);
        let dir = std::env::temp_dir().join(format!("forebay-hangs-{}", std::process::id()));
        let state = StateDir::open(&dir).expect("a directory can be made");
        let file = dir.join("slow.img");
        std::fs::File::create(&file)
            .and_then(|file| file.set_len(1 << 20))
            .expect("it can be made");
        let slow = format!("{}?delay={}s", file.display(), READ.as_secs());
        let slow = open_primary(&slow).expect("it is a file");
        let other: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(1 << 20));
        let samples = [
            samples::unknown(&*slow),
            samples::take(&*other, &[], Blocking::PATIENCE).expect("memory"),
        ];
        let ids = [VolumeId(0), VolumeId(1)];
        let volumes = ids.into_iter().zip(samples).collect();
        let table = Table { uuid: [7; 16], epoch: 1, generation: 1, volumes };
        let (_, first) = watch_one(ids[0], &slow, table.of(ids[0]));
        let (device, second) = watch_one(ids[1], &other, table.of(ids[1]));
        let watch = Arc::clone(&first.watch);
        let mut work = Work::new(store_in(&state), table, vec![first, second], Arc::default());
        let began = Instant::now();
        work.look_for_rest();
        work.look_for_rest();
        assert!(work.volumes[0].held.as_ref().is_some_and(|held| held.contains(&1)));
        let write = |device: &dyn BlockDevice| {
            let mut queue = Blocking::open(device).expect("it can be opened");
            queue.write(4096, IoBuf::copy_of(&[1; 512])).expect("it can be written");
        };
        thread::scope(|scope| {
            let change = scope.spawn(|| write(&device));
            while !change.is_finished() {
                work.take_off();
            }
        });
        let quick = WatchedDevice::new(Arc::new(MemoryDevice::new(1 << 20)), watch);
        thread::scope(|scope| {
            let change = scope.spawn(|| write(&quick));
            while !change.is_finished() {
                work.take_off();
            }
        });
        assert!(began.elapsed() < READ, "it took {:?}", began.elapsed());
        while work.volumes[0].held.is_some() {
            work.put_on();
        }
        assert!(began.elapsed() >= READ, "it was read");
        let recorded = work.table.of(ids[0]);
        assert!(recorded[0].crc.is_some() && recorded[1].crc.is_none());
        std::fs::remove_dir_all(&dir).expect("it is ours");
    }
}
