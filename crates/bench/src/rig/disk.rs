//! A block device over each set-up: a loop device with direct I/O over a file in a FUSE mount, or
//! over a plain file for the bare SSD. Forebay provides the mount itself; nbdkit's export is
//! mounted by nbdfuse.
//!
//! Dropping it removes everything, the device first and the servers last.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::rig::cleanup::{self, Held, Process};
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting};
use crate::rig::setup::SetUp;

/// Name of the mount point for FUSE.
const FUSE: &str = "fuse";
const PATIENCE: Duration = Duration::from_secs(30);

/// The components of a disk.
#[derive(Clone, Debug)]
pub struct Medium {
    /// The server's binary.
    pub binary: PathBuf,
    /// Name of the file in the place that holds the data.
    pub primary: String,
    /// The disk model that determines its timing.
    pub model: String,
    /// Size of the cache, in bytes.
    pub cache: u64,
    /// Size of the cache's RAM tier, in bytes.
    pub ram: u64,
    /// Number of the cache's threads.
    pub shards: u16,
    /// Additional flags for the server.
    pub more: Vec<String>,
}

impl Medium {
    fn setting(&self, place: &Place, mode: &'static str, model: bool) -> Setting {
        let emulate = if model { format!("?emulate={}", self.model) } else { String::new() };
        let cached = mode != "pass-through";
        Setting {
            primary: format!("{}{emulate}", place.text(&self.primary)),
            cache: if cached { ("cache".into(), self.cache) } else { ("unused".into(), 64 << 20) },
            mode,
            ram: self.ram,
            shards: self.shards,
            more: if cached { self.more.clone() } else { Vec::new() },
        }
    }

    /// Drains the cache of a server that has ended to the primary, at the speed of the SSD.
    pub fn drain(&self, place: &Place, mode: &'static str) -> anyhow::Result<()> {
        let server = Server::forebay(&self.binary, place, &self.setting(place, mode, false))?;
        server.drain()?;
        server.stop()
    }
}

/// A block device over a set-up.
pub struct Disk {
    device: PathBuf,
    attached: Option<Held>,
    mounted: Option<Held>,
    fuse: Option<Process>,
    peer: Option<Server>,
    server: Option<Server>,
}

impl Disk {
    /// Creates the device from the files in the place.
    pub fn start(place: &Place, setup: SetUp, medium: &Medium) -> anyhow::Result<Self> {
        let shown = place.path(FUSE);
        std::fs::create_dir_all(&shown)?;
        let serve = |mode| {
            let mut setting = medium.setting(place, mode, true);
            setting.more.extend(setup.flags());
            if setup != SetUp::Nbdkit {
                setting.more.push(format!("--fuse={}", shown.display()));
            }
            Server::forebay(&medium.binary, place, &setting).map(Some)
        };
        let server = match setup {
            SetUp::BareSsd => None,
            _ => serve(setup.mode().unwrap_or("pass-through"))?,
        };
        let peer = match &server {
            Some(server) if setup == SetUp::Nbdkit => {
                Some(Server::nbdkit_cache(place, server, medium.cache)?)
            }
            _ => None,
        };
        let mut disk = Self {
            device: PathBuf::new(),
            attached: None,
            mounted: None,
            fuse: None,
            peer,
            server,
        };
        let file = disk.show(place, medium)?;
        let (device, held) = cleanup::loop_device(&file)?;
        disk.device = device;
        disk.attached = Some(held);
        Ok(disk)
    }

    /// Starts the servers; returns the file for the loop device.
    fn show(&mut self, place: &Place, medium: &Medium) -> anyhow::Result<PathBuf> {
        let directory = place.path(FUSE);
        match (&self.server, &self.peer) {
            (None, _) => Ok(place.path(&medium.primary)),
            (Some(server), None) => {
                // A server that stops in order unmounts it; after a kill it stays mounted.
                self.mounted = Some(cleanup::mounted(&directory)?);
                Ok(directory.join(server.export))
            }
            (Some(_), Some(peer)) => {
                let file = directory.join("disk");
                let mut command = Command::new("nbdfuse");
                command.arg(&file).arg(peer.uri());
                let process = Process::start(command, &place.path("nbdfuse.log"), false)?;
                self.mounted = Some(cleanup::mounted(&directory)?);
                let limit = Instant::now() + PATIENCE;
                while !file.exists() {
                    let ended = process.ended()?.is_some();
                    ensure!(!ended && Instant::now() < limit, "nbdfuse: {}", process.said());
                    std::thread::sleep(Duration::from_millis(10));
                }
                self.fuse = Some(process);
                Ok(file)
            }
        }
    }

    /// The block device.
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// The Forebay server to ask for statistics; `None` for a set-up without cache.
    pub fn cache(&self) -> Option<&Server> {
        self.server.as_ref().filter(|_| self.peer.is_none())
    }

    /// The processes of the set-up, by name.
    pub fn processes(&self) -> Vec<(&'static str, &Process)> {
        let mut all = Vec::new();
        all.extend(self.server.iter().map(|server| ("forebay", server.process())));
        all.extend(self.peer.iter().map(|server| ("nbdkit", server.process())));
        all.extend(self.fuse.iter().map(|process| ("nbdfuse", process)));
        all
    }

    /// Removes the device and stops the servers in order.
    pub fn stop(mut self) -> anyhow::Result<()> {
        self.attached.take();
        if self.peer.is_some() {
            self.mounted.take();
        }
        self.fuse.take();
        if let Some(peer) = self.peer.take() {
            peer.stop()?;
        }
        self.server.take().map_or(Ok(()), Server::stop)?;
        self.mounted.take();
        Ok(())
    }
}
