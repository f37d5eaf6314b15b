//! The cache device of a server: opened or created, handed to the shards, and closed. The engine
//! makes the decisions (`pool::open`, `pool::closed`); this module carries them out.

pub mod foreign;
mod memory;
mod no_state;
mod once;
mod reset;
pub mod retired;
pub mod size;
pub mod stops;
pub mod superblocks;

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, bail};
use forebay_block::{Arena, BufPool, ByteRange, VOLUMES_MAX, VolumeId};
use forebay_control::config::{CacheConfig, Config};
use forebay_control::events::News;
use forebay_control::units::Size;
use forebay_device::{BlockDevice, Clock, OpenError, open_cache};
use forebay_engine::{DetachedStripe, Engine, Health, ShardConfig, Trust, VolumeConfig};
use forebay_format::{Superblock, VolumeRecord};
use forebay_runtime::detached::{DetachedList, OfShard};
use forebay_runtime::{Blocking, MakeShard, PoolConfig, Record, Shard, StateDir, Stopped, Witness};
use forebay_volume::offline;
use forebay_volume::pool::{
    Absent, Division, OpenRequest, Opened, VolumeSpec, absent, area_of, closed, device_for_index,
    index_blocks, open as decide,
};
use forebay_volume::{Registry, Volume};

use crate::busy;
use crate::server::applying::Applying;
use crate::server::args::ServeArgs;
use crate::server::control::locked;
use crate::server::events::Came;
use crate::server::primaries::addresses::{self, Addresses};
use crate::server::primaries::keeper::Keeper;
use crate::server::primaries::returns::{Missing, Returns};
use crate::server::primaries::samples::{Sample, Table};
use crate::server::primaries::store::Store;
use crate::server::primaries::users::Users;
use crate::server::primaries::{self, returns, samples};
use crate::server::primaries::{Gone, Known, Present};
use crate::server::settings::KeptSettings;
use crate::server::state_health::StateHealth;
pub use no_state::no_state;
use no_state::store_witness;
use stops::Stops;
use superblocks::{InUse, Superblocks};

/// Bytes of buffers shared by all threads.
const ARENA_BYTES: usize = 64 << 20;
/// Most shards of a new cache, unless configured.
const SHARDS_CHOSEN_MAX: usize = 4;
/// Destage writes in flight, over all shards.
const DESTAGE_DEPTH: usize = 64;
/// Fewest destage writes in flight of a shard.
const DESTAGE_DEPTH_MIN: usize = 8;

/// A cache device in use.
pub struct Cache {
    /// Files that this start has created, until it serves. First, so that the device is still ours
    /// when a failure takes its file away.
    made: Made,
    /// Usable size of the device, in bytes.
    device_bytes: u64,
    primaries: Vec<(VolumeId, Arc<dyn BlockDevice>)>,
    witness: Witness,
    /// The superblock of the start.
    superblock: Superblock,
    in_use: Arc<Mutex<InUse>>,
    health: Arc<StateHealth>,
    /// What the start has found, until it is told.
    news: Vec<News>,
    keeper: Keeper,
    returns: Returns,
    users: Users,
    state_dir: PathBuf,
    /// The loss that was accepted for this start.
    accepted: Option<String>,
    /// What was known of earlier stops.
    stops: Stops,
    /// Whether an operator has retired the device, and no start of an operator's has come since.
    retired: bool,
}

/// Files that a start has created. They are removed if it fails: a cache that has never served
/// holds nothing, and must not hinder the next start.
#[derive(Default)]
struct Made {
    cache: Option<PathBuf>,
    state: Option<StateDir>,
    witness: Option<(Witness, [u8; 16])>,
    users: Option<Users>,
}

impl Drop for Made {
    fn drop(&mut self) {
        let users = self.users.take().map(|users| users.end());
        let witness = self.witness.take().map(|(witness, uuid)| {
            let state = witness.state();
            witness
                .remove(uuid)
                .and(state.remove(&samples::file_name(uuid)))
                .and(addresses::remove(state, uuid))
        });
        let cache = self.cache.take().map(std::fs::remove_file);
        for error in [users, witness, cache].into_iter().flatten().filter_map(Result::err) {
            tracing::warn!(%error, "left behind by a start that failed");
        }
        if let Some(state) = self.state.take() {
            state.undo();
        }
    }
}

/// Whether nothing exists at the path.
fn is_absent(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// The circumstances of a start that the configuration does not tell.
#[derive(Clone, Copy)]
pub struct Start<'a> {
    /// The configuration was applied.
    pub applied: Option<&'a Applying>,
    /// The ids by which the kernel knows the volumes of a mount of a server before, with their
    /// names. `None` if there is no mount: nobody knows volumes by their ids.
    pub held: Option<&'a [(VolumeId, String)]>,
    /// How the server comes to serve.
    pub came: Came,
    /// Identities of primaries that have lost completed writes, which no client has been told.
    pub lost: &'a [String],
}

impl Start<'_> {
    /// The ids that a new cache takes over by name. An id without a name is no volume's any more.
    fn kept_ids(&self) -> Vec<(VolumeId, String)> {
        let staying = self.applied.map_or(&[][..], |applied| &applied.ids);
        let is_new = |id: VolumeId| staying.iter().all(|&(other, _)| other != id);
        let held = self.held.into_iter().flatten().filter(|&&(id, _)| is_new(id));
        // An applied configuration may use the name of a volume that it removes for another one.
        let name =
            |name: &String| if self.applied.is_some() { String::new() } else { name.clone() };
        let held = held.map(|(id, of)| (*id, name(of)));
        staying.iter().cloned().chain(held).collect()
    }

    /// Whether the server before ended while it applied this configuration, which takes a new
    /// cache: the cache may still be the one before.
    fn is_after_interruption(&self) -> bool {
        self.came != Came::TookOver && self.applied.is_some_and(|applied| applied.new_cache)
    }

    /// Whether volumes keep their sizes though their primaries have grown: clients of the server
    /// before know them.
    fn keeps_volume_sizes(&self) -> bool {
        self.came != Came::Started && self.applied.is_none()
    }

    /// Whether the cache keeps its size, whatever is configured.
    fn keeps_size(&self) -> bool {
        self.came == Came::Restarted || self.is_after_interruption()
    }
}

/// Opens the primaries, and opens or creates the cache; returns a pool that is ready to start.
/// Settings that were changed while serving are applied to `config`, unless it was `applied`.
pub fn open(
    args: &ServeArgs,
    config: &mut Config,
    start: Start<'_>,
) -> anyhow::Result<(Cache, PoolConfig, KeptSettings)> {
    let opened = primaries::open(config)?;
    let size = size::of(config, start)?;
    config.cache.size = size.map(Size);
    let absent = is_absent(&config.cache.path);
    let device = busy::open(|| open_cache(&config.cache.path, size))
        .map_err(|error| no_cache(&config.cache, error))?;
    if let Some(remark) = device.remark() {
        tracing::warn!("cache: {remark}");
    }
    // After the device, so that it is still ours when a failure takes its file away.
    let mut made = Made::default();
    made.cache = absent.then(|| config.cache.path.clone());
    let mut queue = Blocking::open(&*device).context("cache")?;
    let size = size.unwrap_or(u64::MAX).min(device.info().size);
    let found = Superblocks::read(&mut queue, size)?;
    let witness = Witness::open(&config.cache.state_dir).map_err(no_state)?;
    made.state = Some(witness.state().clone());
    let pool = found.newest().filter(|_| !args.reset_cache);
    let addresses = pool.map(|pool| Addresses::load(witness.state(), pool.uuid));
    let known = Known { pool, addresses: &addresses.unwrap_or_default() };
    let mut present = primaries::stand_in(config, opened, &known)?;
    reset::not_swapped(args, config, &present.primaries, found.newest(), start.applied)?;
    let applied = start.applied;
    let stops = found.newest().map(|pool| Stops::load(witness.state(), pool)).transpose();
    let stops = stops.map_err(no_state)?.unwrap_or_default();
    let allowed = reset::allowed(args, config, &mut queue, size, &stops)?;
    if !allowed.reset && allowed.accepted.is_none() {
        stops.check(&found.known)?;
    }
    let old = found.newest().filter(|_| !allowed.reset);
    let news = old.map_or(Vec::new(), |old| no_state::missing(old, &witness));
    news.iter().for_each(|news| tracing::warn!("{}; {}", news.text, news.remedy));
    let how = (args, allowed.reset, start, &stops);
    let (opened, unchanged) =
        decide_on(how, config, &mut present, &mut queue, (size, &found, &known), &witness)
            .map_err(|error| reset::explain(error, &mut queue, size))
            .map_err(|error| match start.is_after_interruption() {
                true => error.context(INTERRUPTED),
                false => error,
            })?;
    let Present { primaries, gone } = present;
    if let Some(applied) = applied.filter(|applied| applied.new_cache && !opened.fresh) {
        if start.came == Came::TookOver {
            bail!(
                "the cache could not be given up: a primary has not taken and flushed its last \
                 blocks in time; apply it once more"
            );
        }
        if opened.superblock.uuid == applied.cache {
            tracing::warn!(
                "the previous server ended while it applied this configuration, and the cache may \
                 still be the previous one: apply it once more"
            );
        }
    }
    opened.notes.iter().for_each(|note| tracing::warn!("{note}"));
    memory::check(config, &opened, ARENA_BYTES)?;
    let retired = stays_retired(witness.state(), &opened, &found, start).map_err(no_state)?;
    if let Err(error) = witness.state().sweep(opened.superblock.uuid) {
        tracing::warn!(%error, "left behind by a crash");
    }
    let mut settings = KeptSettings::of(witness.state(), &opened.superblock, old)?;
    if opened.fresh {
        // A new cache takes over those of the cache before, which may have to come back.
        settings.store().map_err(no_state)?;
    }
    if applied.is_some() {
        settings.forget();
    }
    settings.apply(config, &opened.ids)?;
    // Before the samples are taken, as this tells which primaries may still change.
    let uuid = opened.superblock.uuid;
    let users = Users::begin(witness.state(), uuid, &primaries).map_err(no_state)?;
    made.users = Some(users.clone());
    let before = (witness.state(), old);
    let mut table = primaries::sample(config, &opened, &primaries, &unchanged, before)?;
    let mut stops = if opened.fresh { Stops::default() } else { stops };
    let loss = allowed.accepted.is_some();
    // Without it the next start relies on the log alone.
    if let Err(error) = stops.begin(witness.state(), &opened.superblock, loss) {
        tracing::warn!(%error, "the last stop is not on record any more");
    }
    let health = Arc::new(StateHealth::new(witness.state().clone()));
    // The space of a file stays allocated, so that writes do not run out of it.
    let discards = config.cache.discard && device.info().discard && !device.keeps_space();
    // While clients wait, a discard of the whole device would take too long.
    let discarded = start.came != Came::TookOver;
    let made_by = (&*config, allowed.reset, discards, discarded);
    let on_host = (&witness, &*health);
    let (discard, on_record) = put_on_record(made_by, &opened, &table, on_host, queue, &mut made)?;
    if let Some(old) = old.filter(|old| retired && old.uuid != uuid) {
        // The new cache is marked.
        retired::forget(witness.state(), old.uuid).map_err(no_state)?;
    }
    let Opened { superblock, ids, witnesses, .. } = &opened;
    let own = witnesses.iter().find(|record| record.uuid == superblock.uuid);
    let record = own.expect("a start has a witness").clone();
    Addresses::of(&config.volumes, ids).keep(witness.state(), superblock.uuid);
    let registry = registry(config, &primaries, &opened)?;
    let clock = forebay_runtime::clock();
    let list = DetachedList::open(witness.state(), superblock.uuid);
    let (list, detached) = list.map_err(no_state)?;
    let shards = shards_of(
        (loss, &detached, &stops, start.lost),
        config,
        &opened,
        &registry,
        (device.info().volatile_cache, discard, discarded),
        clock,
    );
    let (watched, kept) = primaries::watch(&table, ids, &primaries);
    let missing = missing(config, &gone, ids, &table);
    let in_use = Arc::new(Mutex::new(InUse::new(Arc::clone(&device), &opened)));
    let superblocks = Arc::clone(&in_use);
    let new_generation = Box::new(move || locked(&superblocks).renew());
    let state = witness.state().clone();
    let mut store = Store::new(state, Arc::clone(&health), new_generation, on_record);
    if !on_record {
        store.put(&mut table);
    }
    let keeper = Keeper::start(store, table, kept)?;
    let returns = Returns::start(missing, &returns_to(superblock, &witness), &keeper.door())?;
    let mut plan = PoolConfig::new(registry, watched, shards, Arena::new(ARENA_BYTES));
    plan.cache = Some(Arc::clone(&device));
    plan.clock = clock;
    plan.witness = Some((witness.clone(), record, list));
    set_limits(&mut plan, config);
    let cache = Cache {
        made,
        device_bytes: size,
        primaries: ids.iter().copied().zip(primaries).collect(),
        witness,
        superblock: opened.superblock,
        in_use,
        health,
        news,
        keeper,
        returns,
        users,
        state_dir: config.cache.state_dir.clone(),
        accepted: allowed.accepted,
        stops,
        retired,
    };
    Ok((cache, plan, settings))
}

/// Whether the device that this start has found stays out of use; then it is marked under the id of
/// the cache that this start makes there, too.
fn stays_retired(
    state: &StateDir,
    opened: &Opened,
    found: &Superblocks,
    start: Start<'_>,
) -> std::io::Result<bool> {
    let Some(before) = found.newest() else { return Ok(false) };
    let stays = retired::stays(state, before.uuid, start)?;
    if stays {
        retired::mark(state, opened.superblock.uuid)?;
    }
    Ok(stays)
}

/// Makes a start durable, in an order in which a crash between any two steps does no harm. The
/// samples may fail: what is then on record of them is of an earlier superblock, and void. Returns
/// whether the device takes discards, and whether the samples are on record.
fn put_on_record(
    (config, reset, discards, all): (&Config, bool, bool, bool),
    opened: &Opened,
    table: &Table,
    (witness, health): (&Witness, &StateHealth),
    mut queue: Blocking,
    made: &mut Made,
) -> anyhow::Result<(bool, bool)> {
    let keep = || {
        let stored = table.store(witness.state());
        health.note(&stored);
        stored.is_ok()
    };
    // Recorded samples stay correct until the server changes the primary, so they are renewed
    // first. Samples of an accepted primary must not be recorded before the cache knows of it.
    let renewed = !opened.fresh && opened.trust == Trust::Full;
    let mut on_record = renewed && keep();
    let uuid = opened.superblock.uuid;
    let is_first = |record: &&Record| opened.fresh && record.uuid == uuid;
    if let Some(record) = opened.witnesses.iter().find(is_first) {
        made.witness = Some((witness.clone(), uuid));
        // Before the superblock, so that the next start knows that nothing was ever in this cache.
        let (epoch, dirty) = (Record::BEFORE_SERVING, false);
        store_witness(witness, &Record { epoch, dirty, ..record.clone() }, uuid)?;
    }
    if let Some(record) = &opened.distrust {
        store_witness(witness, record, uuid)?;
    }
    superblocks::write_all(&mut queue, opened)?;
    let discards = discards && (!all || superblocks::discard(&mut queue, opened)?);
    if reset {
        let note = "--reset-cache made this cache";
        once::mark(&config.cache.state_dir, uuid, once::RESET, note)?;
    }
    // After the superblock: a witness of a start that is unknown to the device would condemn it.
    for record in opened.witnesses.iter().filter(|record| !is_first(record)) {
        on_record &= store_witness(witness, record, uuid)?;
    }
    if !renewed {
        on_record = keep();
    }
    Ok((discards, on_record))
}

/// The parameters for primaries that return.
fn returns_to(superblock: &Superblock, witness: &Witness) -> returns::Pool {
    returns::Pool {
        witness: witness.clone(),
        uuid: superblock.uuid,
        epoch: superblock.epoch,
        shards: superblock.shards.len(),
        identities: superblock.volumes.iter().map(|one| (one.id, one.identity.clone())).collect(),
    }
}

/// Sets the limits for clients.
fn set_limits(plan: &mut PoolConfig, config: &Config) {
    plan.clients = config.server.max_clients as usize;
    plan.client_memory = config.server.client_memory.0;
    plan.stall = config.server.client_stall_timeout.0;
    plan.idle = config.server.idle();
}

impl Cache {
    /// Whether the device must be retired again before clients write.
    pub fn is_retired(&self) -> bool {
        self.retired
    }

    /// Size of the device in use, in bytes.
    pub fn bytes(&self) -> u64 {
        self.superblock.device_size
    }

    /// Records the accepted loss once the shards serve; it is accepted for this start only.
    pub fn note_accepted(&self) -> anyhow::Result<()> {
        let Some(loss) = &self.accepted else { return Ok(()) };
        for line in loss.lines() {
            tracing::error!("accepted, since --accept-data-loss was given: {line}");
        }
        Stops::forget(self.witness.state(), self.superblock.uuid)?;
        once::mark(&self.state_dir, self.superblock.uuid, once::ACCEPTED, loss)
    }

    /// Usable size of the device in bytes, including the part for which memory is too short.
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// The state directory.
    pub fn state(&self) -> &StateDir {
        self.witness.state()
    }

    /// Whether the state directory can be written.
    pub fn state_health(&self) -> Arc<StateHealth> {
        Arc::clone(&self.health)
    }

    /// What the start has found, for the events.
    pub fn take_news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    /// The cache's id.
    pub fn uuid(&self) -> [u8; 16] {
        self.superblock.uuid
    }

    /// How the device is divided. `config` names the division if it may be that one.
    pub fn division(&self, config: &Config) -> Division {
        wanted(config, self.superblock.shards.len() as u16).found_in(&self.superblock)
    }

    /// Keeps the files of this start even if it fails: clients may write from now on.
    ///
    /// # Errors
    /// If it cannot be put on record that a new cache may have dirty blocks.
    pub fn keep(&mut self) -> anyhow::Result<()> {
        if let Some((witness, uuid)) = &self.made.witness {
            let record = witness.load(*uuid)?.context("the witness of this start is gone")?;
            // A device that has failed already has a later one.
            if record.epoch == Record::BEFORE_SERVING {
                let epoch = self.superblock.epoch;
                store_witness(witness, &Record { epoch, dirty: true, ..record }, *uuid)?;
            }
        }
        let Made { cache, state, witness, users } = &mut self.made;
        (*cache, *state, *witness, *users) = (None, None, None, None);
        Ok(())
    }

    /// Records that the server has stopped in order, so that the next start can tell whether a
    /// primary was changed meanwhile, and whether dirty blocks are left. Does nothing if the device
    /// is out of use. With `gives_up`, a cache without dirty blocks is never used again. Primaries
    /// have `patience` to tell what they hold.
    pub fn close(
        self,
        health: Health,
        stopped: &Stopped,
        gives_up: bool,
        patience: Duration,
    ) -> anyhow::Result<()> {
        self.returns.stop();
        // Every request has ended.
        if let Err(error) = self.users.end() {
            tracing::warn!(%error, "the next start will wait for requests of this server");
        }
        let table = self.keeper.stop();
        let mut primaries = self.primaries;
        for (id, real) in self.returns.came() {
            primaries
                .iter_mut()
                .filter(|(one, _)| *one == id)
                .for_each(|(_, one)| *one = Arc::clone(&real));
        }
        let record = self.witness.load(self.superblock.uuid)?;
        let trusted = record.as_ref().is_none_or(|record| record.trust == Trust::Full);
        if health != Health::Good || !trusted {
            tracing::warn!("the cache device has failed; it is left as it is");
            return Ok(());
        }
        let (fingerprints, volumes) =
            primaries::leave(&self.superblock, &primaries, stopped, table.as_ref(), patience);
        let mut in_use = locked(&self.in_use);
        let superblock = closed(in_use.last().clone(), &fingerprints);
        if let Some(table) = table {
            // What is on record otherwise is of an earlier superblock, and void.
            let table = Table { volumes, generation: superblock.generation, ..table };
            if let Err(error) = table.store(self.witness.state()) {
                tracing::warn!(%error, "the next start has only fingerprints of the primaries");
            }
        }
        in_use
            .replace(superblock.clone())
            .context("the cache cannot be closed; the next start recovers as after a crash")?;
        // Without it the next start takes more for dirty than is.
        if let Err(error) = self.stops.end(self.witness.state(), &superblock, stopped) {
            tracing::warn!(%error, "the stop is not on record");
        }
        match record {
            Some(record) if stopped.dirty_blocks == 0 => {
                let trust = if gives_up { Trust::Nothing } else { record.trust };
                match self.witness.store(&Record { dirty: false, trust, ..record }) {
                    // The next server must not find a cache that is given up.
                    Err(error) if gives_up => Err(no_state(error)),
                    Err(error) => {
                        tracing::warn!(%error, "it is not on record that nothing is dirty");
                        Ok(())
                    }
                    Ok(()) => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

/// The remedy if a start after an interrupted hand-over to a new cache is refused.
const INTERRUPTED: &str = "the previous server ended while it applied this configuration: start \
                           with the previous configuration, which is the last \
                           configuration-*.toml in the state directory, and apply this one once \
                           more";

/// The remedy if the witness of the cache cannot be read.
const BAD_WITNESS: &str = "the witness, which tells whether the cache is out of date, cannot be \
                           used; restore the file from a copy of the state directory, or, if this \
                           cache was the last one that served its primaries and has not failed, \
                           move it away and start again: docs/user/refused-start.md";

/// Why there is no cache device, and the remedy if it is only absent.
fn no_cache(cache: &CacheConfig, error: OpenError) -> anyhow::Error {
    let is_absent = matches!(&error, OpenError::System { source, .. }
        if source.kind() == ErrorKind::NotFound);
    let path_of = &cache.path;
    let (path, directory) = (cache.path.display(), cache.path.parent().unwrap_or(Path::new("/")));
    if let Some((made, now)) = size::truncated(path_of) {
        return anyhow!(
            "cache {path}: the cache was made for {made} bytes, the file has {now}: it was \
             truncated; restore the file from a copy of that time, or discard the cache: remove \
             the file, and start once with --reset-cache"
        );
    }
    match cache.size {
        _ if !is_absent => anyhow::Error::new(error).context("cache"),
        None => anyhow!("cache {path}: it does not exist; to create a file, give it a size"),
        Some(_) => anyhow!(
            "cache {path}: the directory {} does not exist; create it, or name another file",
            directory.display()
        ),
    }
}

/// Reads for the offline tools.
pub fn read_at(
    queue: &mut Blocking,
    size: u64,
    offset: u64,
    bytes: &mut [u8],
) -> Result<(), offline::ReadError> {
    let range = ByteRange::checked(offset, bytes.len() as u64);
    let too_small = || format!("it has {size} bytes, too few for {} at {offset}", bytes.len());
    let range = range.filter(|range| range.end() <= size);
    let range = range.ok_or_else(|| offline::ReadError::Device(too_small()))?;
    let found = queue.read(range).map_err(|error| match error.kind() {
        forebay_block::ErrorKind::Media => offline::ReadError::Media(format!("{range}: {error}")),
        _ => offline::ReadError::Device(format!("{range}: {error}")),
    })?;
    bytes.copy_from_slice(&found);
    Ok(())
}

fn decide_on(
    (args, reset, start, stops): (&ServeArgs, bool, Start<'_>, &Stops),
    config: &Config,
    present: &mut Present,
    queue: &mut Blocking,
    (device_size, found, known): (u64, &Superblocks, &Known<'_>),
    witness: &Witness,
) -> anyhow::Result<(Opened, Vec<Vec<Sample>>)> {
    let Superblocks { copies, announcement, known: pools } = found;
    let witnesses = witness.load_all()?;
    for superblock in pools {
        // Unlike those of other caches, it must be readable.
        witness.load(superblock.uuid).context(BAD_WITNESS)?;
    }
    let newest = found.newest();
    let keeps_sizes = start.keeps_volume_sizes();
    let (specs, unchanged) =
        primaries::specs((args, keeps_sizes), config, present, (newest, known), witness.state())?;
    let absent = match newest {
        Some(pool) if !args.reset_cache => {
            gone((args, &stops.drained(pool)), queue, device_size, pool, &specs)?
        }
        _ => Vec::new(),
    };
    let forgotten = match newest {
        Some(pool) if start.held.is_none() && pool.volumes.len() == VOLUMES_MAX => {
            let mut read =
                |offset: u64, bytes: &mut [u8]| read_at(queue, device_size, offset, bytes);
            offline::examine(&mut read, false).map_err(|error| anyhow!(error))?.forgotten()
        }
        _ => Vec::new(),
    };
    let kept_ids = start.kept_ids();
    let there = pools.first().and_then(|superblock| u16::try_from(superblock.shards.len()).ok());
    let shards = config.server.shards.or(there).unwrap_or_else(shards_by_processors);
    let request = OpenRequest {
        device_size,
        copies: [&copies[0], &copies[1]],
        announcement,
        volumes: &specs,
        witnesses: &witnesses,
        absent: &absent,
        division: wanted(config, shards),
        kept_ids: &kept_ids,
        forgotten: &forgotten,
        reset,
        keeps_format: start.came == Came::TookOver,
        uuid: random_uuid().context("no random number")?,
        now_unix: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
    };
    Ok((within_memory(config, request)?, unchanged))
}

/// The division of a new cache.
fn wanted(config: &Config, shards: u16) -> Division {
    let CacheConfig { spare, log_share, .. } = &config.cache;
    Division { shards, spare_percent: spare.0, log_percent: log_share.0 }
}

/// Opens with an index for a new cache that takes no more memory than allowed.
fn within_memory(config: &Config, request: OpenRequest) -> anyhow::Result<Opened> {
    let cache = || format!("cache {}", config.cache.path.display());
    let mut opened = decide(&request).with_context(cache)?;
    let (wanted, budget) = (memory::index(&opened), memory::index_budget(config));
    if wanted <= budget {
        return Ok(opened);
    }
    let hint = "memory.index (--index) sets how much it may take";
    if !opened.fresh {
        opened.notes.push(format!(
            "the cache's index takes {} of memory, more than {}, and a cache keeps its size; \
             {hint} when the cache is made",
            Size(wanted),
            Size(budget)
        ));
        return Ok(opened);
    }
    let all = request.device_size;
    let least = OpenRequest {
        device_size: device_for_index(budget, config.cache.spare.0).min(all),
        ..request
    };
    let mut opened = decide(&least).with_context(cache).context(hint)?;
    opened.notes.push(format!(
        "{} of the cache device's {} are used: the index of all of it would take {} of memory, \
         and may take {}; {hint}",
        Size(opened.superblock.device_size),
        Size(all),
        Size(wanted),
        Size(budget)
    ));
    Ok(opened)
}

/// The cached data of volumes that are no longer configured. Nothing of those that are `drained` is
/// dirty.
fn gone(
    (args, drained): (&ServeArgs, &[VolumeId]),
    queue: &mut Blocking,
    size: u64,
    pool: &Superblock,
    specs: &[VolumeSpec],
) -> anyhow::Result<Vec<Absent>> {
    let gone = absent(pool, specs);
    if let Some(name) =
        args.forget_volume.iter().find(|name| gone.iter().all(|record| record.name != **name))
    {
        bail!(
            "--forget-volume {name}: the cache has no volume of that name that is not configured; \
             remove the flag"
        );
    }
    let absent = |record: &VolumeRecord, dirty| Absent {
        id: record.id,
        dirty,
        forget: args.forget_volume.contains(&record.name),
    };
    if gone.iter().all(|record| drained.contains(&record.id)) {
        return Ok(gone.into_iter().map(|record| absent(record, 0)).collect());
    }
    let mut read = |offset: u64, bytes: &mut [u8]| read_at(queue, size, offset, bytes);
    let report = offline::examine(&mut read, false).map_err(|error| anyhow!(error))?;
    // An unreadable part may belong to any volume.
    let damaged = report.problems.iter().filter(|problem| problem.dirty).count() as u64;
    let dirty = |record: &VolumeRecord| match drained.contains(&record.id) {
        true => 0,
        false => report.dirty_blocks(Some(record.id)) + damaged,
    };
    Ok(gone.into_iter().map(|record| absent(record, dirty(record))).collect())
}

/// The volumes whose primaries are absent, with their records.
fn missing(config: &Config, gone: &[Gone], ids: &[VolumeId], table: &Table) -> Vec<Missing> {
    let missing = gone.iter().map(|gone| {
        let (volume, id) = (&config.volumes[gone.at], ids[gone.at]);
        Missing {
            id,
            name: volume.name.clone(),
            uri: volume.primary.clone(),
            read_only: volume.read_only,
            record: gone.record.clone(),
            samples: table.of(id).to_vec(),
            stand_in: Arc::clone(&gone.stand_in),
        }
    });
    missing.collect()
}

/// Half of the processors: the clients run on the others. Few shards also keep a disk's heads in
/// one area, while destaging from several shards moves them back and forth.
fn shards_by_processors() -> u16 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from((processors / 2).clamp(1, SHARDS_CHOSEN_MAX)).expect("a small number")
}

fn random_uuid() -> std::io::Result<[u8; 16]> {
    let mut uuid = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut uuid)?;
    Ok(uuid)
}

fn registry(
    config: &Config,
    primaries: &[Arc<dyn BlockDevice>],
    opened: &Opened,
) -> anyhow::Result<Registry> {
    let volumes = config.volumes.iter().zip(primaries).zip(&opened.ids);
    let volumes = volumes.map(|((configured, primary), &id)| {
        let mut info = primary.info().clone();
        let record = opened.superblock.volumes.iter().find(|record| record.id == id);
        info.size = record.map_or(info.size, |record| record.size);
        let mut volume = Volume::new(id, configured.name.clone(), info);
        volume.read_only |= configured.read_only;
        volume.sequential_threshold = configured.sequential_threshold.0;
        volume
    });
    Ok(Registry::new(volumes.collect())?)
}

/// The recorded stripes of a shard that a failed cache has left.
pub fn of_shard(detached: &[OfShard], shard: usize) -> Vec<DetachedStripe> {
    detached.iter().filter(|(of, _)| *of == shard).map(|&(_, stripe)| stripe).collect()
}

/// The constructors of the shards, each with its share of the memory.
fn shards_of(
    (accept_loss, detached, stops, lost): (bool, &[OfShard], &Stops, &[String]),
    config: &Config,
    opened: &Opened,
    registry: &Registry,
    (cache_volatile, discard, discarded): (bool, bool, bool),
    clock: Clock,
) -> Vec<MakeShard> {
    let superblock = &opened.superblock;
    let volumes = config.volumes.iter().zip(registry.volumes());
    let volumes: Vec<VolumeConfig> = volumes
        .map(|(configured, volume)| VolumeConfig {
            id: volume.id,
            size: volume.info.size,
            mode: configured.mode,
            discard: volume.info.discard,
            rotational: volume.info.rotational,
            foreground: Arc::default(),
            optimal_io: volume.info.optimal_io,
            share: configured.share(),
            cache_share: configured.cache_share(),
            pace: configured.pace(),
            ordered: configured.ordered_blocks(superblock.shards.len()),
            suspect: opened.suspect.contains(&volume.id),
            lost: lost.contains(&volume.info.identity),
        })
        .collect();
    let count = superblock.shards.len();
    let depth = (DESTAGE_DEPTH / count).max(DESTAGE_DEPTH_MIN);
    let dirty_stripes = memory::dirty_stripes(config, opened, ARENA_BYTES);
    let make = |(shard, &area): (usize, &_)| {
        let mut volumes = volumes.clone();
        // A flush asks all shards, and one of them tells of it.
        volumes.iter_mut().for_each(|volume| volume.lost &= shard == 0);
        let config = ShardConfig {
            shard: u16::try_from(shard).expect("the superblock bounds the shards"),
            shards: u16::try_from(count).expect("the superblock bounds the shards"),
            pool: superblock.pool,
            area: area_of(area),
            segment_size: superblock.segment_size,
            log_segments: superblock.log_segments,
            unit_entries: superblock.unit_entries,
            volumes,
            ram_bytes: config.memory.ram.0 / count as u64,
            index_blocks: index_blocks(area),
            dirty_stripes,
            eviction: config.cache.eviction,
            write_cache_depth: config.cache.write_cache_depth.0,
            dirty_limit: config.cache.dirty_limit.0,
            dirty_target: config.cache.dirty_target.0,
            idle_destage: config.cache.idle_destage(),
            fill_rate: config.cache.fill_rate(),
            wear_budget: config.cache.wear_budget(),
            patience: config.server.patience.0,
            destage_depth: u32::try_from(depth).expect("the depth is small"),
            compress: config.cache.compress,
            compress_ram: config.cache.compress,
            content: config.cache.content,
            cache_volatile,
            discard,
            discarded,
            buffers: BufPool::default(),
            fresh: opened.fresh,
            trust: opened.trust,
            detached: of_shard(detached, shard),
            accept_loss,
            epoch: superblock.epoch,
            last_stop: stops.of_shard(shard),
        };
        let make: MakeShard = Box::new(move |buffers| -> Box<dyn Shard> {
            Box::new(Engine::new(ShardConfig { buffers, ..config }, clock.now()))
        });
        make
    };
    superblock.shards.iter().enumerate().map(make).collect()
}
