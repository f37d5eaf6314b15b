//! Primaries that were absent at the start: searched for while the other volumes are served,
//! compared as at a start, and connected to their stand-ins.
//!
//! Each has its own thread, since a disk or a server that hangs must not keep another from
//! returning. A primary that is not the recorded one, or was changed, stays away: its cached blocks
//! may be used only in a start that knows of the change.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_block::VolumeId;
use forebay_device::{AwayDevice, BlockDevice, OpenError, open_primary};
use forebay_format::VolumeRecord;
use forebay_runtime::{Blocking, Witness};
use forebay_volume::pool::rejoin;

use crate::server::primaries::keeper::{Arrival, Door};
use crate::server::primaries::samples::{self, Sample};
use crate::server::primaries::{self, is_away};

/// Pause between two attempts to find an absent primary.
const PERIOD: Duration = Duration::from_secs(3);
/// Pause after a primary was found but refused.
const PERIOD_REFUSED: Duration = Duration::from_secs(15);
/// How long a primary that was found may take for an answer: nobody waits for it.
const PATIENCE: Duration = Blocking::PATIENCE;

/// A volume whose primary was not there at the start.
pub struct Missing {
    /// Its id.
    pub id: VolumeId,
    /// Its name.
    pub name: String,
    /// Its primary, as configured.
    pub uri: String,
    /// Whether it is configured as read-only.
    pub read_only: bool,
    /// Its record from before this start.
    pub record: VolumeRecord,
    /// Its recorded samples.
    pub samples: Vec<Sample>,
    /// The device that stands in for it.
    pub stand_in: Arc<AwayDevice>,
}

/// Parameters common to all volumes of the pool.
#[derive(Clone)]
pub struct Pool {
    /// The witnesses.
    pub witness: Witness,
    /// UUID of the pool.
    pub uuid: [u8; 16],
    /// Start count of the pool.
    pub epoch: u32,
    /// Number of shards, each of which uses every primary.
    pub shards: usize,
    /// The identity of each volume's primary.
    pub identities: Vec<(VolumeId, String)>,
}

/// The searching threads. Dropping this ends them as soon as their current operation allows.
pub struct Returns {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    stand_ins: Vec<(VolumeId, Arc<AwayDevice>)>,
}

impl Returns {
    /// Searches for the primaries of `missing`; returned ones enter through `door`.
    ///
    /// # Errors
    /// If the threads cannot be started.
    pub fn start(missing: Vec<Missing>, pool: &Pool, door: &Door) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let of = |one: &Missing| (one.id, Arc::clone(&one.stand_in));
        let stand_ins = missing.iter().map(of).collect();
        let mut all = Self { stop: Arc::clone(&stop), threads: Vec::new(), stand_ins };
        for missing in missing {
            let (pool, door, stop) = (pool.clone(), door.clone(), Arc::clone(&stop));
            let search = Search { missing, pool, door, tries: 0, said: None };
            let builder = thread::Builder::new().name("returns".into());
            all.threads.push(builder.spawn(move || search.run(&stop))?);
        }
        Ok(all)
    }

    /// Ends the search.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.threads.iter().for_each(|thread| thread.thread().unpark());
    }

    /// The primaries that have returned. The keeper, which lets them in, must have stopped.
    pub fn came(&self) -> impl Iterator<Item = (VolumeId, Arc<dyn BlockDevice>)> {
        self.stand_ins.iter().filter_map(|(id, one)| Some((*id, Arc::clone(one.real()?))))
    }
}

impl Drop for Returns {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Why a primary is not used.
enum Why {
    /// It is absent.
    Absent,
    /// It cannot be read; it is tried again as if it were absent.
    Unreadable(String),
    /// It is present, but may not be used.
    Refused(String),
}

struct Search {
    missing: Missing,
    pool: Pool,
    door: Door,
    /// Number of attempts without a result.
    tries: u64,
    /// The last refusal that was logged.
    said: Option<String>,
}

impl Search {
    fn run(mut self, stop: &AtomicBool) {
        let mut pause = PERIOD;
        loop {
            thread::park_timeout(pause);
            if stop.load(Ordering::Acquire) {
                return;
            }
            self.tries += 1;
            match self.look() {
                Ok(arrival) => {
                    let (name, tries) = (&self.missing.name, self.tries);
                    tracing::info!(
                        tries,
                        "volume {name}: its primary is back, and nothing shows that it was \
                         changed: it is used from now on"
                    );
                    self.door.let_in(arrival);
                    return;
                }
                Err(Why::Absent) => pause = PERIOD,
                Err(Why::Unreadable(why)) => {
                    pause = PERIOD;
                    self.say(why);
                }
                Err(Why::Refused(why)) => {
                    pause = PERIOD_REFUSED;
                    self.say(why);
                }
            }
        }
    }

    /// Logs a refusal, unless it is the last one logged.
    fn say(&mut self, why: String) {
        if self.said.as_ref() != Some(&why) {
            let name = &self.missing.name;
            tracing::error!("volume {name}: its primary is there again and is not used: {why}");
            self.said = Some(why);
        }
    }

    /// Tries once.
    fn look(&self) -> Result<Arrival, Why> {
        let Missing { id, name, uri, record, samples, stand_in, .. } = &self.missing;
        let primary = open_primary(uri).map_err(why)?;
        self.check(&*primary)?;
        let known = Some((record, samples.as_slice()));
        let spec = primaries::compared(name, &*primary, known, PATIENCE)
            .map_err(|error| unreadable(error.root_cause()))?;
        let refused = |error: &dyn std::fmt::Display| Why::Refused(error.to_string());
        let witness = self.pool.witness.load(self.pool.uuid).map_err(|error| refused(&error))?;
        let witness = witness.filter(|witness| witness.epoch == self.pool.epoch);
        rejoin(record, &spec, witness.as_ref()).map_err(|error| refused(&error))?;
        if stand_in.has_stragglers() {
            primary.await_stragglers();
        }
        let samples = samples::take(&*primary, samples, PATIENCE);
        let samples = samples.map_err(|error| unreadable(&error))?;
        // Last, since this makes the connections that the shards get.
        primary.prepare(self.pool.shards).map_err(|error| refused(&error))?;
        if let Some(remark) = primary.remark() {
            tracing::warn!("volume {name}: {remark}");
        }
        Ok(Arrival { id: *id, primary, samples, stand_in: Arc::clone(stand_in) })
    }

    /// Rejects a primary that a start would reject without reading it, or that differs from what
    /// clients were told.
    fn check(&self, primary: &dyn BlockDevice) -> Result<(), Why> {
        let info = primary.info();
        if info.read_only && !self.missing.read_only {
            let what = format!("{} is read-only now; make it writable, or start again", info.name);
            return Err(Why::Refused(what));
        }
        let mut others = self.pool.identities.iter().filter(|(id, _)| *id != self.missing.id);
        match others.find(|(_, identity)| *identity == info.identity) {
            Some(_) => Err(Why::Refused(format!("{} belongs to another volume", info.name))),
            None => Ok(()),
        }
    }
}

fn unreadable(error: &dyn std::error::Error) -> Why {
    Why::Unreadable(format!("it cannot be read: {error}"))
}

fn why(error: OpenError) -> Why {
    if is_away(&error) { Why::Absent } else { Why::Refused(error.to_string()) }
}
