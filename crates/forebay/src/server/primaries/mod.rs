//! The primaries of a server: compared with their records at the start, watched while they are
//! served, and recorded at the end.

pub mod addresses;
mod fingerprint;
pub mod keeper;
pub mod returns;
pub mod samples;
pub mod store;
pub mod users;

use std::io;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use forebay_block::{ErrorKind, IoResult, VolumeId};
use forebay_control::config::{Config, VolumeConfig};
use forebay_control::units::Size;
use forebay_device::{
    AwayDevice, BlockDevice, HANDSHAKE_PATIENCE, OpenError, Watch, WatchedDevice, open_primary,
    open_primary_within, primary_path, primary_size,
};
use forebay_format::{Superblock, VolumeRecord};
use forebay_runtime::{Blocking, StateDir, Stopped};
use forebay_volume::pool::{Opened, VolumeSpec};

use crate::busy;
use crate::server::args::ServeArgs;
use addresses::Addresses;
use fingerprint::Fingerprint;
use keeper::Kept;
use samples::{Sample, Table};

/// The fingerprint of each primary that could be recorded.
type Fingerprints = Vec<(VolumeId, Option<u64>)>;

/// The primary of each volume, in the order of the configuration.
type Primaries = Vec<Arc<dyn BlockDevice>>;

/// A primary, or why it is absent.
type Found = Result<Arc<dyn BlockDevice>, OpenError>;

/// Time in which a server on a network must answer at a start that others wait for.
const ANSWER_PATIENCE: Duration = Duration::from_secs(3);
/// The same for a file or a disk of this host, which may have to spin up first.
pub const DISK_PATIENCE: Duration = Duration::from_secs(30);

/// Opens every primary, all at once. For an absent one, which may return later, the result holds
/// the error; one that does not answer soon counts as absent, and does not delay the others.
///
/// # Errors
/// If a device cannot be a primary or is in use, or if no primary is present.
pub fn open(config: &Config) -> anyhow::Result<Vec<Found>> {
    let mut opened = open_all(config, ANSWER_PATIENCE)?;
    let late = |(volume, opened)| is_remote(volume) && is_late(opened);
    if opened.iter().all(Result::is_err) && config.volumes.iter().zip(&opened).any(late) {
        // Nobody waits for another volume.
        opened = open_all(config, HANDSHAKE_PATIENCE)?;
    }
    if opened.iter().all(Result::is_err) {
        for (volume, opened) in config.volumes.iter().zip(opened) {
            opened.with_context(|| format!("volume {}", volume.name))?;
        }
        anyhow::bail!("no volume is configured");
    }
    Ok(opened)
}

fn open_all(config: &Config, patience: Duration) -> anyhow::Result<Vec<Found>> {
    let open = move |uri: &str| busy::open(|| open_primary_within(uri, patience));
    let opened = of_each_uri(config, DISK_PATIENCE, open)?;
    let fit = |(volume, opened): (&VolumeConfig, Found)| match opened {
        Err(error) if !is_away(&error) => {
            Err(anyhow::Error::new(error).context(format!("volume {}", volume.name)))
        }
        opened => Ok(opened),
    };
    config.volumes.iter().zip(opened).map(fit).collect()
}

/// The size of each primary, whoever is using it, or why it cannot be told. Takes
/// [`ANSWER_PATIENCE`] at most.
///
/// # Errors
/// If a thread cannot be started.
pub fn sizes(config: &Config) -> anyhow::Result<Vec<Result<u64, OpenError>>> {
    of_each_uri(config, ANSWER_PATIENCE, |uri| match primary_size(uri)? {
        Some(size) => Ok(size),
        // A server on a network: it says so when a connection begins.
        None => Ok(open_primary_within(uri, ANSWER_PATIENCE)?.info().size),
    })
}

/// Does `what` with the URI of each volume's primary, all at once: one that does not answer in time
/// does not delay another.
///
/// # Errors
/// If a thread cannot be started.
fn of_each_uri<T: Send + 'static>(
    config: &Config,
    patience: Duration,
    what: impl Fn(&str) -> Result<T, OpenError> + Clone + Send + 'static,
) -> anyhow::Result<Vec<Result<T, OpenError>>> {
    let begin = |volume: &VolumeConfig| {
        let (tell, hear) = mpsc::channel();
        let (uri, what) = (volume.primary.clone(), what.clone());
        // Nobody may hear it any more.
        let work = move || drop(tell.send(what(&uri)));
        thread::Builder::new().name("open".into()).spawn(work).map(|_| hear)
    };
    // All must have begun before the first is waited for.
    let begun = config.volumes.iter().map(begin).collect::<io::Result<Vec<_>>>();
    let limit = Instant::now() + patience;
    let late = |volume: &VolumeConfig| OpenError::System {
        what: format!("cannot open {}", volume.primary),
        source: io::Error::from(io::ErrorKind::TimedOut),
    };
    let wait = |(volume, hear): (&VolumeConfig, mpsc::Receiver<Result<T, OpenError>>)| {
        // The system may let an open hang, and the thread with it.
        let done = hear.recv_timeout(limit.saturating_duration_since(Instant::now()));
        done.unwrap_or_else(|_| Err(late(volume)))
    };
    Ok(config.volumes.iter().zip(begun.context("a thread to open")?).map(wait).collect())
}

/// Whether a primary is behind a server on a network, which may take its time with a connection.
fn is_remote(volume: &VolumeConfig) -> bool {
    primary_path(&volume.primary).is_ok_and(|path| path.is_none())
}

/// Whether a primary did not answer in time.
fn is_late(opened: &Found) -> bool {
    let Err(OpenError::System { source, .. }) = opened else { return false };
    source.kind() == std::io::ErrorKind::TimedOut
}

/// Whether a device is absent, such as a disk or a server that does not answer.
pub fn is_away(error: &OpenError) -> bool {
    use std::io::ErrorKind::{
        ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable,
        NotFound, TimedOut,
    };
    let OpenError::System { source, .. } = error else { return false };
    let kinds = [
        ConnectionAborted,
        ConnectionRefused,
        ConnectionReset,
        HostUnreachable,
        NetworkUnreachable,
        NotFound,
        TimedOut,
    ];
    // No such device, no medium, or an error of the device.
    kinds.contains(&source.kind()) || matches!(source.raw_os_error(), Some(5 | 6 | 19 | 123))
}

/// The primaries that a start uses.
pub struct Present {
    /// The primary of each volume, or its stand-in, in the order of the configuration.
    pub primaries: Primaries,
    /// Those that are absent.
    pub gone: Vec<Gone>,
}

/// An absent primary, and its record.
pub struct Gone {
    /// Its index in the configuration.
    pub at: usize,
    /// Its record from before this start.
    pub record: VolumeRecord,
    /// The device that stands in for it.
    pub stand_in: Arc<AwayDevice>,
}

/// What a start knows of the primaries from those before.
pub struct Known<'a> {
    /// The newest superblock; `None` if there is none, or a new cache is made whatever it says.
    pub pool: Option<&'a Superblock>,
    /// Where the primaries were.
    pub addresses: &'a Addresses,
}

impl<'a> Known<'a> {
    /// The record of a volume, of whose absent primary a stand-in can take the place.
    ///
    /// # Errors
    /// If the cache has a volume of this name with another primary.
    fn record_of(&self, volume: &VolumeConfig) -> anyhow::Result<Option<&'a VolumeRecord>> {
        self.pool.map_or(Ok(None), |pool| self.addresses.record_of(pool, volume))
    }
}

/// An absent primary does not keep the others from being served: its volume gets a stand-in that
/// fails every request, so that its blocks stay in the cache.
///
/// # Errors
/// If there is no record of an absent primary.
pub fn stand_in(config: &Config, opened: Vec<Found>, known: &Known<'_>) -> anyhow::Result<Present> {
    let (mut primaries, mut gone) = (Primaries::new(), Vec::new());
    for (at, (volume, opened)) in config.volumes.iter().zip(opened).enumerate() {
        let name = &volume.name;
        let record = known.record_of(volume);
        // Nothing can stand in for a volume without a record, so it gets more time.
        let opened = match opened {
            late if !matches!(record, Ok(Some(_))) && is_remote(volume) && is_late(&late) => {
                open_primary(&volume.primary)
            }
            opened => opened,
        };
        let primary = match (opened, record) {
            (Ok(primary), _) => primary,
            (Err(error), Ok(None)) => {
                return Err(anyhow::Error::new(error).context(format!("volume {name}")));
            }
            (Err(error), Err(other)) => return Err(other.context(error.to_string())),
            (Err(error), Ok(Some(record))) => {
                gone.push(Gone::new(at, volume, record, &format!("cannot be opened: {error}")));
                let stand_in = &gone.last().expect("it was put there").stand_in;
                Arc::clone(stand_in) as Arc<dyn BlockDevice>
            }
        };
        if let Some(remark) = primary.remark() {
            tracing::warn!("volume {name}: {remark}");
        }
        primaries.push(primary);
    }
    Ok(Present { primaries, gone })
}

impl Gone {
    fn new(at: usize, volume: &VolumeConfig, record: &VolumeRecord, what: &str) -> Self {
        let why = format!(
            "its primary {what}. The other volumes are served. Its cached blocks are served, its \
             other requests fail, and its dirty blocks stay in the cache. The primary is used as \
             soon as it is back"
        );
        let device = AwayDevice::new(record.size, &record.identity, &volume.primary, why);
        Self { at, record: record.clone(), stand_in: Arc::new(device) }
    }
}

/// A volume as a start finds it, and the samples on record if its primary equals them.
type Compared = (VolumeSpec, Vec<Sample>);

/// The volumes with the present state of their primaries, compared with the records in the newest
/// superblock and in the state directory; and of each primary the samples on record, if it equals
/// them. A primary that cannot be read, or does not answer, counts as absent, and is replaced in
/// `present`. `how` has the arguments, and whether a volume whose primary has grown keeps its size:
/// the clients of the server before know it.
///
/// # Errors
/// If a primary cannot be read and there is no record of its volume, or if none can be read.
pub fn specs(
    how: (&ServeArgs, bool),
    config: &Config,
    present: &mut Present,
    (newest, known): (Option<&Superblock>, &Known<'_>),
    state: &StateDir,
) -> anyhow::Result<(Vec<VolumeSpec>, Vec<Vec<Sample>>)> {
    let record = newest.map(|newest| (newest, samples_of(newest, state)));
    let compare_all = |primaries: &Primaries, patience: fn(&VolumeConfig) -> Duration| {
        of_each(primaries, |at, primary| {
            let volume = &config.volumes[at];
            spec_of(how, volume, primary, record.as_ref(), patience(volume))
        })
    };
    let is_any_read = |primaries: &Primaries, found: &[anyhow::Result<Compared>]| {
        primaries.iter().zip(found).any(|(primary, found)| found.is_ok() && !primary.is_away())
    };
    let mut found = compare_all(&present.primaries, patience_of)?;
    if !is_any_read(&present.primaries, &found) {
        // Nobody waits for another volume.
        found = compare_all(&present.primaries, |_| Blocking::PATIENCE)?;
    }
    let must = !is_any_read(&present.primaries, &found);
    let mut specs = Vec::new();
    for (at, (volume, found)) in config.volumes.iter().zip(found).enumerate() {
        let record = if must { Ok(None) } else { known.record_of(volume) };
        let (spec, samples) = match (found, record) {
            (Ok(spec), _) => spec,
            (Err(error), Ok(None)) => return Err(error),
            (Err(error), Err(other)) => return Err(other.context(error.to_string())),
            (Err(error), Ok(Some(record))) => {
                let error = error.root_cause();
                let gone = Gone::new(at, volume, record, &format!("cannot be read: {error}"));
                tracing::warn!("volume {}: {}", volume.name, gone.stand_in.remark().unwrap_or(""));
                present.primaries[at] = Arc::clone(&gone.stand_in) as Arc<dyn BlockDevice>;
                present.gone.push(gone);
                spec_of(how, volume, &*present.primaries[at], None, Duration::ZERO)?
            }
        };
        let was_here = known.addresses.at(&volume.primary);
        specs.push((VolumeSpec { was_here, ..spec }, samples));
    }
    Ok(specs.into_iter().unzip())
}

/// How long a primary may take for an answer at a start that others wait for.
fn patience_of(volume: &VolumeConfig) -> Duration {
    if is_remote(volume) { ANSWER_PATIENCE } else { DISK_PATIENCE }
}

/// Does `what` with each primary and its index, all at once: one that hangs does not delay another.
///
/// # Errors
/// If a thread cannot be started.
fn of_each<T: Send>(
    primaries: &[Arc<dyn BlockDevice>],
    what: impl Fn(usize, &dyn BlockDevice) -> T + Sync,
) -> anyhow::Result<Vec<T>> {
    let what = &what;
    thread::scope(|scope| {
        let begin = |(at, primary): (usize, &Arc<dyn BlockDevice>)| {
            let primary = Arc::clone(primary);
            let builder = thread::Builder::new().name("primary".into());
            builder.spawn_scoped(scope, move || what(at, &*primary))
        };
        let begun = primaries.iter().enumerate().map(begin);
        let begun = begun.collect::<io::Result<Vec<_>>>().context("a thread for a primary")?;
        let ended = begun.into_iter().map(|one| one.join().expect("a panic ends the process"));
        Ok(ended.collect())
    })
}

/// The samples that the last start kept, if they exist and are valid.
fn samples_of(newest: &Superblock, state: &StateDir) -> Option<Table> {
    let found = Table::load(state, newest);
    found.unwrap_or_else(|error| {
        tracing::warn!(%error, "the samples of the primaries cannot be read, and are ignored");
        None
    })
}

/// Whether there are samples that were not kept up to date: the state directory could not be
/// written.
pub fn has_old_samples(newest: &Superblock, state: &StateDir) -> bool {
    let found = Table::read(state, newest.uuid).ok().flatten();
    found.is_some_and(|table| !table.is_valid_for(newest))
}

/// The samples of every primary, for the start that `opened` describes. `unchanged` has those with
/// which each one has just been compared; other places are read. `newest` is the superblock that
/// the start found.
///
/// # Errors
/// If a thread cannot be started.
pub fn sample(
    config: &Config,
    opened: &Opened,
    primaries: &[Arc<dyn BlockDevice>],
    unchanged: &[Vec<Sample>],
    (state, newest): (&StateDir, Option<&Superblock>),
) -> anyhow::Result<Table> {
    let Superblock { uuid, epoch, generation, .. } = opened.superblock;
    let newest = newest.filter(|newest| newest.uuid == uuid);
    let take = |at: usize, primary: &dyn BlockDevice| {
        let (volume, id) = (&config.volumes[at], opened.ids[at]);
        if primary.is_away() {
            // Keeps the earlier record of an absent primary.
            let before = newest.and_then(|newest| Table::load(state, newest).ok().flatten());
            return (id, before.map_or(Vec::new(), |table| table.of(id).to_vec()));
        }
        let taken = samples::take(primary, &unchanged[at], patience_of(volume));
        let found = taken.unwrap_or_else(|error| {
            tracing::warn!(volume = volume.name, %error, "no further samples of its primary");
            samples::on_record(primary, &unchanged[at])
        });
        (id, found)
    };
    let volumes = of_each(primaries, take)?;
    Ok(Table { uuid, epoch, generation, volumes })
}

/// The name of a volume, for messages.
fn name_of(superblock: &Superblock, id: VolumeId) -> &str {
    let found = superblock.volumes.iter().find(|volume| volume.id == id);
    found.map_or("?", |volume| &volume.name)
}

/// The primaries as the shards use them: changes to recorded samples are watched.
pub fn watch(
    table: &Table,
    ids: &[VolumeId],
    primaries: &[Arc<dyn BlockDevice>],
) -> (Vec<Arc<dyn BlockDevice>>, Vec<Kept>) {
    let (mut watched, mut kept) = (Vec::<Arc<dyn BlockDevice>>::new(), Vec::new());
    for (&id, primary) in ids.iter().zip(primaries) {
        if primary.is_away() {
            watched.push(Arc::clone(primary));
            continue;
        }
        let (device, one) = watch_one(id, primary, table.of(id));
        watched.push(Arc::new(device));
        kept.push(one);
    }
    (watched, kept)
}

/// Watches one primary with these recorded samples.
pub fn watch_one(
    id: VolumeId,
    primary: &Arc<dyn BlockDevice>,
    samples: &[Sample],
) -> (WatchedDevice, Kept) {
    let sums: Vec<Option<u32>> = samples.iter().map(|sample| sample.crc).collect();
    let places = samples.iter().map(|sample| sample.range).collect();
    let watch = Arc::new(Watch::new(places, &sums));
    primary.recognize_by(&watch);
    let device = WatchedDevice::new(Arc::clone(primary), Arc::clone(&watch));
    (device, Kept { id, primary: Arc::clone(primary), watch })
}

/// A volume with the present state of its primary, compared with its record; and the samples on
/// record, if the primary equals them.
fn spec_of(
    (args, keeps_sizes): (&ServeArgs, bool),
    volume: &VolumeConfig,
    primary: &dyn BlockDevice,
    recorded: Option<&(&Superblock, Option<Table>)>,
    patience: Duration,
) -> anyhow::Result<Compared> {
    let (name, info) = (&volume.name, primary.info());
    if info.identity.starts_with("name:") {
        tracing::warn!(
            volume = name,
            "primary {} has no permanent identity, only a name: a start recognizes it by its size \
             and samples of its content; see docs/user/primaries.md",
            info.name
        );
    }
    let record = recorded.and_then(|(superblock, table)| {
        let mut records = superblock.volumes.iter();
        let lasting = !info.identity.starts_with("name:");
        let same = records.clone().find(|one| lasting && one.identity == info.identity);
        let record = same.or_else(|| records.find(|one| one.name == *name))?;
        Some((record, table.as_ref().map_or(&[][..], |table| table.of(record.id))))
    });
    let accepted = args.accept_primary.contains(name);
    let record = record.filter(|_| !primary.is_away());
    let mut spec = VolumeSpec { accepted, ..compared(name, primary, record, patience)? };
    if let Some((record, _)) = record.filter(|(record, _)| keeps_sizes && record.size < spec.size) {
        let (now, before) = (Size(spec.size), Size(record.size));
        tracing::warn!(
            "volume {name}: its primary has grown to {now}; {before} are served until forebay apply"
        );
        spec.size = record.size;
    }
    let unchanged = record.filter(|_| spec.sampled == Some(None));
    Ok((spec, unchanged.map_or(Vec::new(), |(_, samples)| samples.to_vec())))
}

/// The volume `name` with the present state of its primary, compared with the record and, if there
/// are any, the samples. No change is accepted.
///
/// # Errors
/// If the primary cannot be read, or has not answered for as long as `patience`.
pub fn compared(
    name: &str,
    primary: &dyn BlockDevice,
    record: Option<(&VolumeRecord, &[Sample])>,
    patience: Duration,
) -> anyhow::Result<VolumeSpec> {
    let info = primary.info();
    let (mut print, mut compared) = (None, None);
    if let Some((record, samples)) = record {
        let failed = || format!("volume {name}: primary");
        if record.fingerprint.is_some() {
            print = Some(fingerprint::of(primary, record.size, patience).with_context(failed)?);
        }
        compared = samples::compare(primary, samples, patience).with_context(failed)?;
    }
    let blanks = [print.map(|print| print.blank), compared.map(|compared| compared.blank)];
    Ok(VolumeSpec {
        name: name.to_owned(),
        size: info.size,
        identity: info.identity.clone(),
        path: info.name.clone(),
        fingerprint: print.and_then(|print| print.digest),
        blank: blanks.iter().flatten().all(|&blank| blank) && blanks != [None, None],
        sampled: compared.map(|compared| compared.changed),
        accepted: false,
        was_here: None,
    })
}

/// Fingerprints and samples of the primaries after an orderly stop, of durable content only, so
/// that they match even after a power failure. Samples in `table`, which the keeper has left, are
/// not taken again. Of a primary that is away, or may still change, nothing else is taken; nor of
/// one that has not answered after `patience`.
pub fn leave(
    superblock: &Superblock,
    primaries: &[(VolumeId, Arc<dyn BlockDevice>)],
    stopped: &Stopped,
    table: Option<&Table>,
    patience: Duration,
) -> (Fingerprints, Vec<(VolumeId, Vec<Sample>)>) {
    let (mut fingerprints, mut volumes) = (Vec::new(), Vec::new());
    let limit = Instant::now() + patience;
    // All must have begun before the first is waited for.
    let mut begun = Vec::new();
    for (id, primary) in primaries {
        // A primary that returned while the volume was served may be larger than the volume.
        let size = superblock.volumes.iter().find(|volume| volume.id == *id);
        let size = size.map_or(primary.info().size, |volume| volume.size);
        let known = table.map_or(Vec::new(), |table| table.of(*id).to_vec());
        let is_left = primary.is_away() || primary.has_stragglers();
        let found = (!is_left).then(|| at_rest(Arc::clone(primary), size, known.clone()));
        begun.push((*id, primary, known, found));
    }
    for (id, primary, known, found) in begun {
        let Some(found) = found else {
            volumes.push((id, known));
            continue;
        };
        let mut sampled = samples::unknown(&**primary);
        let found = found.recv_timeout(limit.saturating_duration_since(Instant::now()));
        match found.unwrap_or_else(|_| Err(ErrorKind::Timeout.into())) {
            // Its next flush may succeed although the data that it shows is lost.
            _ if stopped.doubtful.contains(&id) => {
                let volume = name_of(superblock, id);
                tracing::warn!(volume, "no fingerprint of its primary, since a flush of it failed");
            }
            Ok((print, found)) => {
                sampled = found;
                fingerprints.push((id, print.digest));
            }
            Err(error) => {
                let volume = name_of(superblock, id);
                tracing::warn!(volume, %error, "no fingerprint of its primary");
            }
        }
        volumes.push((id, sampled));
    }
    (fingerprints, volumes)
}

/// Flushes a primary, and takes its fingerprint and samples. A thread of its own waits for that,
/// since a primary may hang.
fn at_rest(
    primary: Arc<dyn BlockDevice>,
    size: u64,
    known: Vec<Sample>,
) -> mpsc::Receiver<IoResult<(Fingerprint, Vec<Sample>)>> {
    let (tell, hear) = mpsc::channel();
    let take = move || {
        let patience = Blocking::PATIENCE;
        let found = samples::flush(&*primary, patience)
            .and_then(|()| samples::take(&*primary, &known, patience))
            .and_then(|found| Ok((fingerprint::of(&*primary, size, patience)?, found)));
        // Let go of before anybody goes on: the next server may want to lock it.
        drop(primary);
        let _ = tell.send(found);
    };
    if let Err(error) = thread::Builder::new().name("at-rest".into()).spawn(take) {
        tracing::warn!(%error, "no thread to take a fingerprint");
    }
    hear
}
