//! A volume and its primary, of any kind, also when no server runs: its content, changes without
//! the cache, and the errors that are allowed while it is served.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::model::{BLOCK, Model, content};
use crate::rig::cleanup::{self, Held};
use crate::rig::place::Place;
use crate::rig::san::San;
use forebay_block::testing::Numbers;
use forebay_device::STRAGGLE_MAX;

/// Number of blocks of each primary.
pub const BLOCKS: u64 = 2048;
/// Size of each primary, in bytes.
pub const BYTES: u64 = BLOCKS * BLOCK as u64;
/// Time limit for the server to use a primary again after it is back.
pub const RECOVERY: Duration = Duration::from_secs(45);
/// How long errors may still occur after the first success: there is a connection for each shard.
const ECHO: Duration = Duration::from_secs(5);

/// How long requests may fail after a start that follows a kill: the time for which changes wait,
/// the patience of the server, and as much again.
const HELD: Duration = STRAGGLE_MAX.saturating_add(Duration::from_secs(4));

/// The kind of primary.
pub enum Primary {
    /// A file.
    File(PathBuf),
    /// An NBD server.
    San(San, PathBuf),
    /// A disk, paired with another one with which it can swap names.
    Disk(Pair),
}

/// Two disks under two names.
pub struct Pair {
    files: [PathBuf; 2],
    names: [PathBuf; 2],
    swapped: bool,
    held: Vec<Held>,
}

impl Pair {
    /// Device numbers that are free; each is used once per process.
    fn new(place: &Place, number: u32) -> anyhow::Result<Self> {
        let files = [place.sparse("disk.img", BYTES)?, place.sparse("other.img", BYTES)?];
        let names = [0, 1].map(|more| PathBuf::from(format!("/dev/loop{}", number + more)));
        let mut pair = Self { files, names, swapped: false, held: Vec::new() };
        pair.attach()?;
        Ok(pair)
    }

    fn attach(&mut self) -> anyhow::Result<()> {
        let first = usize::from(self.swapped);
        for (name, file) in [(first, 0), (1 - first, 1)] {
            self.held.push(cleanup::loop_named(&self.names[name], &self.files[file])?);
        }
        Ok(())
    }

    /// Swaps the names of the disks; returns the former name of ours.
    pub fn swap(&mut self) -> anyhow::Result<PathBuf> {
        let former = self.name();
        self.held.clear();
        self.swapped = !self.swapped;
        self.attach()?;
        Ok(former)
    }

    fn name(&self) -> PathBuf {
        self.names[usize::from(self.swapped)].clone()
    }

    /// Whether the other disk is still blank.
    pub fn other_is_blank(&self) -> anyhow::Result<bool> {
        Ok(fs::read(&self.files[1])?.iter().all(|&byte| byte == 0))
    }
}

/// Notices from the operator to the clients that use the volume.
#[derive(Default)]
pub struct Notice(Mutex<State>);

#[derive(Default, Clone)]
struct State {
    /// The mode in force; `None` while it is being changed.
    mode: Option<String>,
    /// Number of mode changes.
    modes: u64,
    /// Whether the cache is out of use, so that no write is logged.
    without_cache: bool,
    /// Until when requests may fail because the server waits for those of one that was killed.
    held_until: Option<Instant>,
    fault: Fault,
}

/// Whether requests may fail.
#[derive(Default, Clone, Copy, PartialEq, Debug)]
enum Fault {
    #[default]
    None,
    On,
    /// The fault ended at this time, and requests should soon succeed again.
    Over(Instant),
    /// The first request succeeded again at this time.
    Better(Instant),
}

impl Notice {
    fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.0.lock().expect("nobody panics with it"))
    }

    /// Sets the mode in force; `None` if it is unknown from now on.
    pub fn set_mode(&self, mode: Option<&str>) {
        self.with(|state| {
            state.mode = mode.map(str::to_owned);
            state.modes += 1;
        });
    }

    /// Notes whether the cache is out of use: then no write is logged, whatever the mode says.
    pub fn set_without_cache(&self, without: bool) {
        self.with(|state| {
            state.without_cache = without;
            state.modes += 1;
        });
    }

    /// The mode, if it is known and the cache is in use, and the number of mode changes.
    pub fn mode(&self) -> (Option<String>, u64) {
        self.with(|state| (state.mode.clone().filter(|_| !state.without_cache), state.modes))
    }

    /// Records that changes wait for those of a server that was killed, and may fail for that.
    pub fn hold(&self) {
        self.with(|state| state.held_until = Some(Instant::now() + HELD));
    }

    /// Records that a fault begins.
    pub fn fault(&self) {
        self.with(|state| state.fault = Fault::On);
    }

    /// Records that the fault ends.
    pub fn heal(&self) {
        self.with(|state| {
            if state.fault == Fault::On {
                state.fault = Fault::Over(Instant::now());
            }
        });
    }

    /// Resets the fault for a new server.
    pub fn forget(&self) {
        self.with(|state| state.fault = Fault::None);
    }

    /// Records that a request failed; an error if no request may fail.
    pub fn failed(&self) -> anyhow::Result<()> {
        self.with(|state| match state.fault {
            _ if state.held_until.is_some_and(|until| Instant::now() < until) => Ok(()),
            Fault::None => Err(anyhow::anyhow!("no fault is on")),
            Fault::Over(when) if when.elapsed() > RECOVERY => {
                Err(anyhow::anyhow!("the fault ended {} s ago", when.elapsed().as_secs()))
            }
            Fault::Better(when) if when.elapsed() > ECHO => {
                Err(anyhow::anyhow!("it was well again for {:.1} s", when.elapsed().as_secs_f64()))
            }
            _ => Ok(()),
        })
    }

    /// Records that a FLUSH succeeded.
    pub fn succeeded(&self) {
        self.with(|state| match state.fault {
            Fault::Over(_) => state.fault = Fault::Better(Instant::now()),
            Fault::Better(when) if when.elapsed() > ECHO => state.fault = Fault::None,
            _ => {}
        });
    }

    /// Whether a fault is present, or was until recently.
    pub fn is_troubled(&self) -> bool {
        self.with(|state| state.fault != Fault::None)
    }
}

/// A volume.
pub struct Volume {
    /// Its name in the configuration.
    pub name: String,
    /// Its primary.
    pub primary: Primary,
    /// Its possible contents.
    pub model: Model,
    /// Notices to its clients.
    pub notice: Arc<Notice>,
    /// Its mode in the configuration.
    pub configured: &'static str,
    /// The mode changed by `set`, which must stay in force.
    pub set: Option<&'static str>,
    /// Its sequential threshold.
    pub threshold: &'static str,
    /// Whether it is in the configuration.
    pub served: bool,
    /// Whether the cache knows it by its name, so that `set` is in force.
    pub is_known: bool,
    /// A disk that the configuration names instead of the volume's own.
    aimed: Option<PathBuf>,
}

impl Volume {
    /// A blank volume on a primary of kind `kind`: 0 a file, 1 an NBD server, 2 a disk.
    pub fn new(place: &Place, kind: u64, salt: u64) -> anyhow::Result<Self> {
        let (name, primary) = match kind {
            0 => ("file", Primary::File(place.sparse("file.img", BYTES)?)),
            1 => {
                let socket = place.path("san.sock");
                ("san", Primary::San(San::start(&socket, BYTES as usize), socket))
            }
            _ => {
                static NEXT: AtomicU32 = AtomicU32::new(0);
                let own = NEXT.fetch_add(1, Ordering::Relaxed) % 16 * 2;
                let number = (1 << 18) + std::process::id() % 8192 * 32 + own;
                ("disk", Primary::Disk(Pair::new(place, number)?))
            }
        };
        Ok(Self {
            name: name.to_owned(),
            primary,
            model: Model::new(salt, BLOCKS),
            notice: Arc::default(),
            configured: "write-back",
            set: None,
            threshold: "0",
            served: true,
            is_known: true,
            aimed: None,
        })
    }

    /// The mode that must be in force after a start.
    pub fn mode(&self) -> &'static str {
        self.set.unwrap_or(self.configured)
    }

    /// The primary's name in the configuration.
    pub fn uri(&self) -> String {
        match &self.primary {
            Primary::File(path) => path.display().to_string(),
            Primary::San(_, socket) => format!("nbd+unix:///?socket={}", socket.display()),
            Primary::Disk(pair) => {
                self.aimed.as_ref().unwrap_or(&pair.name()).display().to_string()
            }
        }
    }

    /// Its table in the configuration.
    pub fn table(&self) -> String {
        self.table_as(&self.name)
    }

    /// Its table in the configuration under another name.
    pub fn table_as(&self, name: &str) -> String {
        format!(
            "[[volume]]\nname = \"{name}\"\nprimary = \"{}\"\nmode = \"{}\"\n\
             sequential_threshold = \"{}\"\n",
            self.uri(),
            self.configured,
            self.threshold,
        )
    }

    /// Makes the configuration name this disk; returns the previous one.
    pub fn aim(&mut self, at: Option<PathBuf>) -> Option<PathBuf> {
        std::mem::replace(&mut self.aimed, at)
    }

    /// Marks the volume as new or renamed: the cache does not know it by its name.
    pub fn be_new(&mut self) {
        self.set = None;
        self.is_known = false;
    }

    /// The NBD server of the primary, if it is one.
    pub fn san(&self) -> Option<&San> {
        match &self.primary {
            Primary::San(san, _) => Some(san),
            _ => None,
        }
    }

    /// Number of times that the primary has lost unflushed writes.
    pub fn losses(&self) -> u64 {
        self.san().map_or(0, San::cuts)
    }

    /// Writes to some blocks of the primary while no cache is in front of it.
    pub fn use_alone(&mut self, numbers: &mut Numbers) -> anyhow::Result<()> {
        for block in [0, 1, numbers.below(BLOCKS), BLOCKS - 1] {
            let version = self.model.version();
            self.change(block, &content(self.model.salt, block, version))?;
            self.model.changed(block, version, true);
        }
        Ok(())
    }

    /// Changes a block of the primary without the cache.
    pub fn change(&self, block: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let offset = block * BLOCK as u64;
        let write = |path: &Path| {
            let file = File::options().write(true).open(path)?;
            file.write_all_at(bytes, offset)?;
            file.sync_all()
        };
        match &self.primary {
            Primary::File(path) => write(path)?,
            Primary::San(san, _) => san.change(offset, bytes),
            Primary::Disk(pair) => write(&pair.name())?,
        }
        Ok(())
    }

    /// The content of the primary as its own client would see it.
    pub fn alone(&self) -> anyhow::Result<Vec<u8>> {
        match &self.primary {
            Primary::File(path) => Ok(fs::read(path)?),
            Primary::San(san, _) => Ok(san.shown(0, BYTES as usize)),
            // The device's page cache does not show what the server wrote with direct I/O, so read
            // the file.
            Primary::Disk(pair) => {
                Ok(fs::read(&pair.files[0]).context("the file behind the disk")?)
            }
        }
    }

    /// Checks that the primary alone is complete.
    pub fn check_alone(&self) -> anyhow::Result<()> {
        let found = self.alone()?;
        let outcome = self.model.check_all(0, &found);
        outcome.with_context(|| format!("the primary of {} alone", self.name))?;
        if let Primary::Disk(pair) = &self.primary {
            ensure!(pair.other_is_blank()?, "the disk beside that of {} was written", self.name);
        }
        if let Primary::San(san, _) = &self.primary {
            let durable = san.durable(0, BYTES as usize);
            let lacks = (0..BLOCKS).find(|&block| {
                let range = block as usize * BLOCK..(block as usize + 1) * BLOCK;
                durable[range.clone()] != found[range.clone()] && self.model.is_settled(block)
            });
            ensure!(
                lacks.is_none(),
                "block {} of {} is on its primary, but not durable there",
                lacks.unwrap_or_default(),
                self.name
            );
        }
        Ok(())
    }

    /// Checks that flushed data is on the primary, in a mode that promises that.
    pub fn check_direct(&self) -> anyhow::Result<u64> {
        let found = self.alone()?;
        let blocks: Vec<_> = (0..BLOCKS).filter(|&block| self.model.is_direct(block)).collect();
        for &block in &blocks {
            let outcome = self.model.check(block, &found[block as usize * BLOCK..][..BLOCK]);
            outcome.with_context(|| {
                format!("the primary of {} alone, after a FLUSH in {}", self.name, self.mode())
            })?;
        }
        Ok(blocks.len() as u64)
    }
}
