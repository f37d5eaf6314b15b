//! Brings a configuration into force that the shards cannot take up: the server hands over to its
//! own program, which starts with it. Clients wait for a moment, as in an upgrade.
//!
//! What must not be left in the cache is written to the primaries first: the blocks of a volume
//! that goes, or all blocks before a new cache is made. Meanwhile writes to these volumes go around
//! the cache, so that the drain ends whatever the clients do.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_block::{BLOCK_SIZE, VolumeId};
use forebay_control::config::{Config, location};
use forebay_control::settings::{Differences, VolumeChange, VolumeDifference, Way};
use forebay_control::units::Size;
use forebay_control::{ControlError, ControlErrorKind, UpgradeSnapshot, Wanted};
use forebay_device::OpenError;
use forebay_engine::{DrainProgress, Mode, Setting};
use forebay_runtime::{Pool, StateDir, VolumeStats};

use crate::disk::loops;
use crate::host::own_disks::OwnDisks;
use crate::host::{Host, overlap};
use crate::server::applying::{self, Applying};
use crate::server::cache::size;
use crate::server::control::locked;
use crate::server::disks::Disks;
use crate::server::mount::MountPoint;
use crate::server::upgrades::Upgrades;
use crate::server::warm_up::WarmUp;

/// Interval at which a drain is checked.
const STEP: Duration = Duration::from_millis(20);
/// How long primaries that are away may take to come back.
const PRIMARY_PATIENCE: Duration = Duration::from_secs(10);
/// The program of this process, also after its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// Why there are no statistics.
const NO_ANSWER: &str = "the server is stopping, or a thread of it does not answer";

/// The parts of a server that a hand-over to itself needs.
pub struct Reconfiguration {
    pub pool: Pool,
    pub disks: Arc<Disks>,
    pub mount: Option<Arc<MountPoint>>,
    pub upgrades: Arc<Upgrades>,
    pub state: StateDir,
    /// The cache in use.
    pub cache: [u8; 16],
    /// Size of the cache device in use, in bytes.
    pub cache_bytes: u64,
    /// The configuration file of the start.
    pub source: Option<PathBuf>,
    /// The settings in force.
    pub in_force: Arc<Mutex<Config>>,
    /// Whether the cache is given up when the server leaves: the next one makes a new one.
    pub gives_up_cache: AtomicBool,
    /// The volumes that leave the cache in a hand-over for another configuration, while one is
    /// under way.
    pub leaving: Mutex<Option<Vec<Leaving>>>,
}

/// A volume whose blocks leave the cache: its index in the registry, and its id.
pub type Leaving = (usize, VolumeId);

fn conflict(what: String, hint: &str) -> ControlError {
    ControlError::new(ControlErrorKind::Conflict, what, hint)
}

impl Reconfiguration {
    /// Refuses a change while a hand-over for another configuration is under way.
    ///
    /// # Errors
    /// If one is.
    pub fn refuse_under_way(&self) -> Result<(), ControlError> {
        if locked(&self.leaving).is_none() {
            return Ok(());
        }
        let what = "another configuration is being brought into force".to_owned();
        Err(conflict(what, "wait until it is"))
    }

    /// The volumes that a hand-over under way removes from the cache.
    pub fn leaving(&self) -> Vec<VolumeId> {
        locked(&self.leaving).iter().flatten().map(|&(_, volume)| volume).collect()
    }

    /// The mode that a volume is in, by its index in the registry, if `configured` is in force.
    pub fn mode(&self, place: usize, configured: Mode) -> Mode {
        let leaves = |leaving: &Vec<Leaving>| leaving.iter().any(|&(at, _)| at == place);
        match locked(&self.leaving).as_ref().is_some_and(leaves) {
            true => while_leaving(configured),
            false => configured,
        }
    }

    /// The volumes that have become larger; `sizes` are those of their primaries now.
    pub fn grown(
        &self,
        wanted: &Config,
        differences: &Differences,
        sizes: &[Result<u64, OpenError>],
    ) -> Vec<VolumeDifference> {
        let volumes = wanted.volumes.iter().zip(sizes);
        let grown = volumes.filter_map(|(volume, size)| {
            let place = self.place(differences.before(&volume.name)?)?;
            let before = self.pool.registry().volumes()[place].info.size;
            let now = size.as_ref().ok().copied().filter(|&now| now > before)?;
            let change = VolumeChange::Grown(before, now);
            Some(VolumeDifference { volume: volume.name.clone(), change })
        });
        grown.collect()
    }

    /// Checks whether this server, whose configuration is `in_force`, can hand over to itself for
    /// these differences.
    ///
    /// # Errors
    /// What hinders it.
    pub fn check(
        &self,
        in_force: &Config,
        wanted: &Wanted,
        differences: &Differences,
        way: &Way,
    ) -> Result<(), ControlError> {
        self.check_source(wanted)?;
        let invalid = |error: anyhow::Error| {
            let (what, hint) = (format!("{error:#}"), "nothing was changed");
            ControlError::new(ControlErrorKind::Invalid, what, hint)
        };
        overlap::check(&wanted.config).map_err(invalid)?;
        self.own_disks().check(&Host::default(), &wanted.config).map_err(invalid)?;
        if matches!(way, Way::NewCache) {
            size::check(&wanted.config).map_err(invalid)?;
        }
        self.upgrades.check()?;
        if self.mount.as_ref().is_some_and(|mount| !mount.lasts()) {
            let what = "the requests of the mount cannot be handed over".to_owned();
            return Err(conflict(what, "see the log for the reason; restart the server"));
        }
        let new_cache = matches!(way, Way::NewCache);
        self.check_primaries((in_force, &wanted.config), differences, new_cache)?;
        self.check_attached(differences)
    }

    /// The files and disks that this server makes of its volumes.
    fn own_disks(&self) -> OwnDisks {
        let mount = self.mount.as_ref();
        let loops = mount.map(|mount| mount.devices()).unwrap_or_default();
        OwnDisks {
            files: mount.map(|mount| mount.place().to_owned()),
            disks: self.disks.devices().into_iter().chain(loops).collect(),
        }
    }

    /// Checks that no volume gets another primary together with a `new_cache`, which knows nothing
    /// of what the primary before held, or under a disk by ublk, whose requests name it.
    fn check_primaries(
        &self,
        (in_force, wanted): (&Config, &Config),
        differences: &Differences,
        new_cache: bool,
    ) -> Result<(), ControlError> {
        for volume in &wanted.volumes {
            let place = differences.before(&volume.name).and_then(|name| self.place(name));
            let Some(place) = place else { continue };
            if location(&in_force.volumes[place].primary) == location(&volume.primary) {
                continue;
            }
            let name = &volume.name;
            if new_cache {
                let what = format!("volume {name} gets another primary, and the cache is replaced");
                return Err(conflict(what, "apply one after the other; nothing was changed"));
            }
            if let Some(device) = self.disks.device(place) {
                let what =
                    format!("volume {name} gets another primary, and is attached as {device}");
                return Err(conflict(what, "detach it first; nothing was changed"));
            }
        }
        Ok(())
    }

    /// Checks that no volume is attached as a disk that cannot follow.
    fn check_attached(&self, differences: &Differences) -> Result<(), ControlError> {
        for VolumeDifference { volume, change } in &differences.volumes {
            let name = match change {
                VolumeChange::Removed => Some(volume.as_str()),
                _ => differences.before(volume),
            };
            let Some((name, place)) = name.and_then(|name| Some((name, self.place(name)?))) else {
                continue;
            };
            let by_ublk = self.disks.device(place);
            let by_fuse = || {
                let file = self.mount.as_ref().map(|mount| mount.file(name));
                file.map(|file| loops::over_path(&file)).unwrap_or_default().pop()
            };
            let device = match change {
                VolumeChange::Added => None,
                VolumeChange::Removed => by_ublk.or_else(by_fuse),
                // The kernel names the file of a loop device.
                VolumeChange::Renamed(_) => by_fuse(),
                // Not every kernel can change the size of a disk by ublk.
                VolumeChange::Grown(..) => by_ublk,
            };
            if let Some(device) = device {
                let what = format!("volume {name} is attached as {device}");
                return Err(conflict(what, "detach it first; nothing was changed"));
            }
        }
        Ok(())
    }

    /// The next server reads the file of the start, so that must be the wanted configuration.
    fn check_source(&self, wanted: &Wanted) -> Result<(), ControlError> {
        let invalid =
            |what: String, hint: &str| ControlError::new(ControlErrorKind::Invalid, what, hint);
        let Some(source) = &self.source else {
            let what = "these differences take a server that has a configuration file".to_owned();
            return Err(invalid(what, "this one has flags: stop it, and start it with others"));
        };
        match std::fs::read_to_string(source) {
            Ok(text) if text == wanted.text => Ok(()),
            Ok(_) => {
                let (source, wanted) = (source.display(), wanted.path.display());
                let what = format!(
                    "these differences take a hand-over, which reads {source}, and that differs \
                     from {wanted}"
                );
                Err(invalid(what, "nothing was changed; put the configuration there"))
            }
            Err(error) => {
                let what = format!("{}: {error}", source.display());
                Err(invalid(what, "nothing was changed; see to the file"))
            }
        }
    }

    /// Whether the next server finds this text in the file of the start.
    pub fn will_read(&self, text: &str) -> bool {
        let found = self.source.as_ref().and_then(|source| std::fs::read_to_string(source).ok());
        found.as_deref() == Some(text)
    }

    /// Begins to hand over, and returns at once.
    ///
    /// # Errors
    /// If another one or an upgrade is under way.
    pub fn begin(
        self: &Arc<Self>,
        wanted: &Wanted,
        differences: &Differences,
        way: &Way,
    ) -> Result<UpgradeSnapshot, ControlError> {
        let shown = std::env::current_exe().unwrap_or_else(|_| OWN_PROGRAM.into());
        let begun = self.upgrades.reserve(Path::new(OWN_PROGRAM), &shown, true)?;
        let all = self.pool.registry().volumes().iter().enumerate();
        let goes = |name: &String| {
            let removed =
                |one: &VolumeDifference| one.volume == *name && one.change == VolumeChange::Removed;
            differences.volumes.iter().any(removed)
        };
        let new_cache = matches!(way, Way::NewCache);
        // The previous server could not serve what clients have written to a volume that it does
        // not know, or to a cache; and a primary that was released may be in other use.
        let stays = new_cache || !differences.volumes.is_empty();
        let leaving: Vec<Leaving> = all
            .filter(|(_, volume)| new_cache || goes(&volume.name))
            .map(|(place, volume)| (place, volume.id))
            .collect();
        let ids = self.ids(&wanted.config, differences);
        let differences = differences.clone();
        let primaries: Vec<String> =
            wanted.config.volumes.iter().map(|volume| location(&volume.primary)).collect();
        let source = self.source.as_deref().map(applying::source).unwrap_or_default();
        let text = wanted.text.clone();
        let applying = Applying { cache: self.cache, source, text, new_cache, ids };
        tracing::info!(
            volumes = differences.volumes.len(),
            settings = differences.settings.len(),
            new_cache,
            "a hand-over begins, for another configuration"
        );
        let (this, id, all) = (Arc::clone(self), begun.id, leaving.clone());
        let work = move || {
            let outcome = this.prepare(id, &all, (&primaries, &differences), &applying);
            let go = |()| this.upgrades.go(id, stays).map_err(|error| error.to_string());
            match outcome.and_then(go) {
                Ok(()) => this.await_failure(id),
                Err(why) => this.upgrades.fail(id, why),
            }
            this.go_on(&all);
            this.upgrades.restored(id);
        };
        *locked(&self.leaving) = Some(leaving);
        if let Err(error) = std::thread::Builder::new().name("hand-over".into()).spawn(work) {
            *locked(&self.leaving) = None;
            self.upgrades.fail(id, error.to_string());
            self.upgrades.restored(id);
        }
        Ok(begun)
    }

    /// The ids of the volumes that stay, with their names in the new configuration.
    fn ids(&self, wanted: &Config, differences: &Differences) -> Vec<(VolumeId, String)> {
        let volumes = wanted.volumes.iter().filter_map(|volume| {
            let place = self.place(differences.before(&volume.name)?)?;
            Some((self.pool.registry().volumes()[place].id, volume.name.clone()))
        });
        volumes.collect()
    }

    /// The volumes whose primaries are at none of these places.
    fn elsewhere(&self, places: &[String]) -> Vec<VolumeId> {
        let in_force = locked(&self.in_force);
        let volumes = in_force.volumes.iter().zip(self.pool.registry().volumes());
        let gone = volumes.filter(|(volume, _)| !places.contains(&location(&volume.primary)));
        gone.map(|(_, volume)| volume.id).collect()
    }

    /// Everything before the next server may be started, whose primaries are at these places.
    fn prepare(
        &self,
        id: u64,
        leaving: &[Leaving],
        (primaries, differences): (&[String], &Differences),
        applying: &Applying,
    ) -> Result<(), String> {
        for &(place, volume) in leaving {
            let mode = while_leaving(locked(&self.in_force).volumes[place].mode);
            self.pool.set(Setting::Mode(volume, mode));
        }
        if applying.new_cache {
            // The drain may take hours. If the server ends meanwhile, the next one finds this file
            // and the previous cache, and serves that.
            applying.store(&self.state).map_err(|error| error.to_string())?;
        }
        self.drained(id, leaving)?;
        self.primaries_answer(&self.elsewhere(primaries))?;
        if applying.new_cache {
            self.list_blocks(&applying.ids);
        }
        // The drain may have taken long.
        if !self.will_read(&applying.text) {
            return Err("the configuration file was changed while it was applied; apply it once \
                        more"
                .to_owned());
        }
        // One may have been attached by the kernel's own means, or was being attached at the start.
        self.check_attached(differences).map_err(|error| error.to_string())?;
        self.gives_up_cache.store(applying.new_cache, Ordering::SeqCst);
        applying.store(&self.state).map_err(|error| error.to_string())
    }

    /// Puts the cached blocks of the volumes that stay on record, for the next cache.
    fn list_blocks(&self, ids: &[(VolumeId, String)]) {
        let Some(list) = WarmUp::of(&self.pool, self.cache_bytes, ids) else { return };
        if let Err(error) = list.store(&self.state, self.cache) {
            tracing::warn!(%error, "the next cache begins empty");
        }
    }

    /// Waits until nothing of these volumes is dirty.
    fn drained(&self, id: u64, leaving: &[Leaving]) -> Result<(), String> {
        if leaving.is_empty() {
            return Ok(());
        }
        let (began, mut progress) = (Instant::now(), DrainProgress::default());
        while self.upgrades.runs(id) {
            let stats = self.pool.stats().ok_or(NO_ANSWER)?;
            let of = |id: VolumeId| stats.volumes.iter().find(|volume| volume.id == id);
            let states = || leaving.iter().filter_map(|&(_, id)| of(id));
            let dirty: u64 = states().map(|volume| volume.state.dirty_blocks).sum();
            let lost: u64 = states().map(|volume| volume.state.lost_blocks).sum();
            if dirty == 0 {
                return Ok(());
            }
            let left = Size(dirty * BLOCK_SIZE as u64);
            if dirty == lost {
                return Err(format!("{left} of dirty data cannot be read back from the cache"));
            }
            if progress.is_stalled(began.elapsed(), dirty - lost) {
                return Err(format!("{left} of dirty data could not be written to the primaries"));
            }
            self.upgrades.set_to_drain(id, dirty * BLOCK_SIZE as u64);
            // Again and again: a drain that somebody else began may end.
            leaving.iter().for_each(|&(_, volume)| self.pool.set_drain(volume, true));
            std::thread::sleep(STEP);
        }
        Err("it was ended during the drain".to_owned())
    }

    /// Waits until no primary is away: a request that waits for one cannot be handed over, so that
    /// its client would be cut off. Nobody waits for a primary that is not used any more.
    fn primaries_answer(&self, without: &[VolumeId]) -> Result<(), String> {
        let limit = Instant::now() + PRIMARY_PATIENCE;
        loop {
            let stats = self.pool.stats().ok_or(NO_ANSWER)?;
            let away = |volume: &&VolumeStats| {
                volume.state.primary.away_since.is_some() && !without.contains(&volume.id)
            };
            let Some(volume) = stats.volumes.iter().find(away) else { return Ok(()) };
            if Instant::now() > limit {
                return Err(format!("the primary of volume {} does not answer", volume.name));
            }
            std::thread::sleep(STEP);
        }
    }

    /// Waits until the hand-over has failed. If it succeeds, this process ends first.
    fn await_failure(&self, id: u64) {
        while self.upgrades.runs(id) {
            std::thread::sleep(STEP);
        }
    }

    /// Serves on as before. A server that stops does not: the next one must know what was begun.
    fn go_on(&self, leaving: &[Leaving]) {
        if self.upgrades.is_stopping() {
            return;
        }
        self.gives_up_cache.store(false, Ordering::SeqCst);
        if let Err(error) = Applying::end(&self.state, self.cache, None, None) {
            tracing::warn!(%error, "left behind by a hand-over that failed");
        }
        let in_force = locked(&self.in_force);
        for &(place, volume) in leaving {
            self.pool.set(Setting::Mode(volume, in_force.volumes[place].mode));
            self.pool.set_drain(volume, false);
        }
        *locked(&self.leaving) = None;
    }

    fn place(&self, name: &str) -> Option<usize> {
        self.pool.registry().volumes().iter().position(|volume| volume.name == name)
    }
}

/// The mode of a volume whose blocks leave the cache, in which nothing becomes dirty, instead of
/// another one.
fn while_leaving(mode: Mode) -> Mode {
    match mode {
        Mode::WriteBack | Mode::WriteOnly | Mode::WriteThrough => Mode::WriteAround,
        Mode::WriteAround | Mode::PassThrough => mode,
    }
}
