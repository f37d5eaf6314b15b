//! A server with a keeper, and a disk of it, for benchmarks that kill and upgrade the server while
//! programs use the disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::process::Signal;

use crate::rig::cleanup::{self, Held, children, send};
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting};

/// Time limit for another server to serve.
const PATIENCE: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_millis(10);
/// Directory of the mount in the place.
const VOLUMES: &str = "volumes";

/// The process that serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Serving {
    /// Its process ID.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Its program.
    pub program: PathBuf,
}

/// A server with a keeper, its mount, and its disk once that is attached.
pub struct Kept {
    disk: Option<(PathBuf, Held)>,
    mounted: Option<Held>,
    server: Server,
    log: PathBuf,
}

impl Kept {
    /// Starts a keeper with its server and a mount.
    pub fn start(binary: &Path, place: &Place, setting: &Setting) -> anyhow::Result<Self> {
        let mut setting = setting.clone();
        setting.more.push(format!("--fuse={}", place.text(VOLUMES)));
        Self::of(place, &setting.cache.0, || Server::with_keeper(binary, place, &setting))
    }

    /// The same with a configuration file, which has the mount at `volumes` in the place, and what
    /// [`Server::configured`] expects.
    pub fn configured(binary: &Path, place: &Place, config: &Path) -> anyhow::Result<Self> {
        Self::of(place, "cache", || Server::configured_with_keeper(binary, place, config))
    }

    /// Of a server whose log is named after its cache.
    fn of(
        place: &Place,
        cache: &str,
        start: impl FnOnce() -> anyhow::Result<Server>,
    ) -> anyhow::Result<Self> {
        let volumes = place.path(VOLUMES);
        fs::create_dir_all(&volumes)?;
        let server = start()?;
        let mounted = Some(cleanup::mounted(&volumes)?);
        Ok(Self { disk: None, mounted, server, log: place.path(&format!("{cache}.log")) })
    }

    /// Makes the volume a disk of this machine, and returns its path.
    pub fn attach(&mut self) -> anyhow::Result<PathBuf> {
        let device = PathBuf::from(self.server.ask(&["attach", "disk", "--via=fuse"])?.trim());
        self.disk = Some((device.clone(), cleanup::attached(&device)?));
        Ok(device)
    }

    /// The server to ask; it answers only while one serves.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// The keeper's process ID.
    pub fn keeper(&self) -> u32 {
        self.server.process().pid()
    }

    /// The log of the keeper and all its servers so far.
    pub fn log(&self) -> anyhow::Result<String> {
        let text = fs::read(&self.log).with_context(|| self.log.display().to_string())?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// The process that serves; `None` while there is none.
    pub fn serving(&self) -> Option<Serving> {
        let status = self.server.status().ok()?;
        let pid = u32::try_from(status.number("pid")?).ok()?;
        let program = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        let version = status.text("version").to_owned();
        (status.text("state") == "serving").then_some(Serving { pid, version, program })
    }

    /// Kills the keeper's children: the server, and during an upgrade one of two as `which` says.
    /// Returns false if there is none at the moment.
    pub fn strike(&self, which: usize) -> bool {
        let all = children(self.keeper());
        let Some(&pid) = all.get(which % all.len().max(1)) else { return false };
        send(pid, Signal::KILL).is_ok()
    }

    /// Waits until a server serves that is not `before`.
    pub fn wait_for_another(&self, before: Option<u32>) -> anyhow::Result<Serving> {
        let limit = Instant::now() + PATIENCE;
        loop {
            if let Some(serving) = self.serving()
                && Some(serving.pid) != before
            {
                return Ok(serving);
            }
            let ended = self.server.process().ended()?;
            ensure!(ended.is_none(), "the keeper ended: {}", self.server.process().said());
            ensure!(
                Instant::now() < limit,
                "no server serves {} s after a kill or an upgrade: {}",
                PATIENCE.as_secs(),
                self.server.process().said()
            );
            std::thread::sleep(STEP);
        }
    }

    /// Upgrades to another program, which must succeed.
    pub fn upgrade(&self, program: &Path) -> anyhow::Result<()> {
        self.server.ask(&["upgrade", &program.to_string_lossy()]).map(drop)
    }

    /// Detaches the disk and stops everything in order.
    pub fn stop(mut self) -> anyhow::Result<()> {
        if let Some((_, held)) = self.disk.take() {
            self.server.ask(&["detach", "disk"])?;
            drop(held);
        }
        self.server.stop()?;
        self.mounted.take();
        Ok(())
    }
}
