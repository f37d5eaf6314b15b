//! Disks of this machine that the kernel's ublk makes over volumes: made and removed on request,
//! and taken over from a server that was killed or stopped.
//!
//! A disk outlives its server. While there is none, its requests wait in the kernel, together with
//! those that the server had not answered; the next server continues with all of them. `record.rs`
//! says how it knows the disks, `kernel.rs` talks to the kernel, and the runtime serves the
//! requests.

mod kernel;
mod record;

use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_block::{ByteRange, DeviceInfo, Endpoint};
use forebay_control::{ControlError, ControlErrorKind, DiskSnapshot};
use forebay_runtime::{Disk as ServedDisk, Pool, StateDir};
use forebay_ublk_wire::{DevInfo, Params, State, flags};
use rustix::io::Errno;

use crate::disk::{block, sectors};
use crate::server::process;
use kernel::{Kernel, Refusal, block_path};
use record::Record;

pub use kernel::exists;

/// Most bytes of data in a request.
const REQUEST_BYTES: u32 = 256 << 10;
/// Slots of a queue: its requests in flight.
const DEPTH: u16 = 64;
/// Most slots of all disks in one thread: each is an operation in flight on its ring, which takes
/// 4096 and needs most of them for other things.
const SLOTS_MAX: usize = 2048;

/// The disks of one server.
pub struct Disks {
    pool: Pool,
    state: StateDir,
    /// Held while a disk is made or removed.
    busy: Mutex<()>,
    table: Mutex<Vec<Disk>>,
}

/// A disk of a volume of this server.
#[derive(Clone)]
struct Disk {
    record: Record,
    /// Index of the volume in the registry.
    place: usize,
    info: DevInfo,
    /// Whether its requests are answered; if not, it could not be taken over.
    served: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn error(kind: ControlErrorKind, what: impl ToString, hint: &str) -> ControlError {
    ControlError::new(kind, what.to_string(), hint)
}

/// The error where the kernel fails.
fn failed(what: impl ToString) -> ControlError {
    error(ControlErrorKind::Unavailable, what, "nothing was changed")
}

impl Disks {
    /// The disks of `pool`'s volumes, none yet; their records are in `state`.
    pub fn new(pool: Pool, state: StateDir) -> Self {
        Self { pool, state, busy: Mutex::default(), table: Mutex::default() }
    }

    /// Takes over the disks that an earlier server has left: their users have waited since it
    /// ended. Whatever fails is logged, and keeps no other volume from being served.
    pub fn take_over(&self) {
        match Record::all(&self.state) {
            Ok(records) if records.is_empty() => {}
            Ok(records) => self.take_all(records),
            Err(error) => tracing::error!(%error, "disks are not taken over"),
        }
    }

    fn take_all(&self, records: Vec<Record>) {
        let mut kernel = match Kernel::open() {
            Ok(kernel) => kernel,
            Err(why) => {
                return tracing::warn!("disks of an earlier server are not taken over: {why}");
            }
        };
        let devices = kernel.devices();
        for record in records {
            let device = devices.known.iter().find(|device| device.mark == record.mark);
            match (device, self.place_of(&record.primary)) {
                (Some(info), Some(place)) => self.take(&mut kernel, record, place, *info),
                // The machine was restarted, or the disk was removed by other means.
                (None, Some(_)) if devices.complete => record.remove(&self.state),
                (None, Some(_)) => tracing::warn!(
                    "the disk of volume {} is not found, and not all devices are known: the next \
                     start looks for it again",
                    record.volume
                ),
                (Some(info), None) if info.state() == State::Quiesced => tracing::warn!(
                    "{} waits for volume {}, which this server does not have; serve it again, or \
                     remove the disk (forebay detach {})",
                    block_path(info.number),
                    record.volume,
                    record.volume
                ),
                // Perhaps another server's with the same state directory.
                (_, None) => {}
            }
        }
    }

    fn take(&self, kernel: &mut Kernel, record: Record, place: usize, info: DevInfo) {
        let path = block_path(info.number);
        if info.state() == State::Dead {
            // A server was killed while it made or removed this disk: nobody has used it since.
            match kernel.remove(info.number) {
                Ok(()) => record.remove(&self.state),
                Err(error) => tracing::error!(%error, "an unfinished disk stays"),
            }
            return;
        }
        let taken = self.recover(kernel, &record, place, &info);
        let volume = &self.pool.registry().volumes()[place].name;
        match &taken {
            Ok(()) => tracing::info!(%volume, device = path, "took over the disk"),
            Err(why) => tracing::error!(
                %volume,
                device = path,
                "the disk is not taken over, and its requests wait: {why}; if a restart of \
                 the server does not help, remove the disk (forebay detach {volume})"
            ),
        }
        locked(&self.table).push(Disk { record, place, info, served: taken.is_ok() });
    }

    fn recover(
        &self,
        kernel: &mut Kernel,
        record: &Record,
        place: usize,
        info: &DevInfo,
    ) -> Result<(), String> {
        self.check_slots(info)?;
        if info.flags & flags::NEEDED != flags::NEEDED {
            return Err(format!("it lacks features: it has {:#x}", info.flags));
        }
        let begun = record.has_begun(&self.state).map_err(|error| error.to_string())?;
        if begun && !kernel.repeats_recovery() {
            return Err(
                "a server ended while it took the disk over, and this kernel cannot repeat \
                        that (Linux 6.16 can)"
                    .to_owned(),
            );
        }
        record.begin(&self.state).map_err(|error| error.to_string())?;
        kernel.start_recovery(info.number).map_err(|error| {
            record.end(&self.state);
            error.to_string()
        })?;
        self.serve(info, place)?;
        kernel.end_recovery(info.number).map_err(|error| error.to_string())?;
        record.end(&self.state);
        Ok(())
    }

    /// Serves a device's queues on the pool's threads.
    fn serve(&self, info: &DevInfo, place: usize) -> Result<(), String> {
        process::lock_or_warn();
        let disk = ServedDisk {
            device: kernel::open_device(info.number)?,
            endpoint: Endpoint(place),
            queues: info.queues,
            depth: info.depth,
            request_bytes: info.request_bytes as usize,
        };
        self.pool.serve_disk(&disk).map_err(|error| error.to_string())
    }

    /// Fails if the threads' rings have no room for another disk.
    fn check_slots(&self, info: &DevInfo) -> Result<(), String> {
        let threads = self.pool.threads();
        let slots =
            |info: &DevInfo| usize::from(info.queues).div_ceil(threads) * usize::from(info.depth);
        let used: usize = locked(&self.table).iter().map(|disk| slots(&disk.info)).sum();
        if used + slots(info) > SLOTS_MAX {
            return Err(format!(
                "the disks would need {} slots in a thread, and {SLOTS_MAX} are possible; detach \
                 another one, or serve with more shards than {threads}",
                used + slots(info)
            ));
        }
        Ok(())
    }

    fn place_of(&self, primary: &str) -> Option<usize> {
        let volumes = self.pool.registry().volumes();
        volumes.iter().position(|volume| volume.info.identity == primary)
    }

    fn find(&self, place: usize) -> Option<Disk> {
        locked(&self.table).iter().find(|disk| disk.place == place).cloned()
    }

    fn shown(&self, disk: &Disk) -> DiskSnapshot {
        DiskSnapshot {
            volume: self.pool.registry().volumes()[disk.place].name.clone(),
            device: block_path(disk.info.number),
            sector_size: disk.record.sector_size,
            served: disk.served,
        }
    }

    /// The path of a volume's disk, by the volume's index in the registry.
    pub fn device(&self, place: usize) -> Option<String> {
        self.find(place).map(|disk| block_path(disk.info.number))
    }

    /// The paths of all disks of this server.
    pub fn devices(&self) -> Vec<String> {
        locked(&self.table).iter().map(|disk| block_path(disk.info.number)).collect()
    }

    /// The paths of those whose requests are answered.
    pub fn served(&self) -> Vec<String> {
        let table = locked(&self.table);
        let served = table.iter().filter(|disk| disk.served);
        served.map(|disk| block_path(disk.info.number)).collect()
    }

    /// This server's disks, and those that wait for a volume that no server has.
    pub fn all(&self) -> Result<Vec<DiskSnapshot>, ControlError> {
        let mut all: Vec<_> = locked(&self.table).iter().map(|disk| self.shown(disk)).collect();
        all.extend(self.waiting()?.into_iter().map(|(record, info)| DiskSnapshot {
            volume: record.volume,
            device: block_path(info.number),
            sector_size: record.sector_size,
            served: false,
        }));
        Ok(all)
    }

    /// The disks in the state directory whose volume is not this server's, and that have no server.
    fn waiting(&self) -> Result<Vec<(Record, DevInfo)>, ControlError> {
        let mut records = Record::all(&self.state).map_err(failed)?;
        records.retain(|record| self.place_of(&record.primary).is_none());
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let Ok(mut kernel) = Kernel::open() else { return Ok(Vec::new()) };
        let mut devices = kernel.devices().known;
        devices.retain(|info| info.state() == State::Quiesced);
        let device = |mark| devices.iter().find(|info| info.mark == mark).copied();
        Ok(records
            .into_iter()
            .filter_map(|record| device(record.mark).map(|info| (record, info)))
            .collect())
    }

    /// Makes the disk of a volume, by the volume's index in the registry.
    pub fn attach(
        &self,
        place: usize,
        sector_size: Option<u32>,
    ) -> Result<DiskSnapshot, ControlError> {
        let _one = locked(&self.busy);
        let volume = &self.pool.registry().volumes()[place];
        let name = &volume.name;
        if let Some(disk) = self.find(place) {
            let what = format!("volume {name} is attached already: {}", self.shown(&disk).device);
            return Err(error(ControlErrorKind::Conflict, what, "detach it first"));
        }
        let mut kernel = Kernel::open().map_err(|why| {
            error(ControlErrorKind::Unsupported, format!("ublk: {why}"), "use --via fuse")
        })?;
        let info = DeviceInfo { read_only: volume.read_only, ..volume.info.clone() };
        let sector_size = self.sector_size(place, sector_size)?;
        let record = Record::new(name, &info.identity, sector_size).map_err(failed)?;
        let disk = self.make(&mut kernel, place, &info, &record)?;
        let shown = self.shown(&disk);
        tracing::info!(volume = %name, device = shown.device, sector_size, "attached");
        locked(&self.table).push(disk);
        Ok(shown)
    }

    /// The sector size to use: the one given, or that of the volume's content.
    fn sector_size(&self, place: usize, given: Option<u32>) -> Result<u32, ControlError> {
        let volume = &self.pool.registry().volumes()[place];
        let (name, size) = (&volume.name, volume.info.size);
        match given {
            Some(bytes @ (512 | 4096)) if size.is_multiple_of(bytes.into()) => Ok(bytes),
            Some(bytes @ (512 | 4096)) => {
                let what = format!("volume {name} has {size} bytes: not whole sectors of {bytes}");
                Err(error(ControlErrorKind::Invalid, what, "use sectors of 512 bytes"))
            }
            Some(bytes) => {
                let what = format!("a sector has 512 or 4096 bytes, not {bytes}");
                Err(error(ControlErrorKind::Invalid, what, "give one of these"))
            }
            None => {
                let range = ByteRange::new(0, size.min(sectors::LOOKED_AT as u64));
                let start = self.pool.read(Endpoint(place), range);
                let start = start.map_err(|why| failed(format!("volume {name}: {why}")))?;
                Ok(sectors::fitting(&start, size))
            }
        }
    }

    /// Makes a disk. If that fails, its record goes only with the device: the next start removes an
    /// unfinished one by its record.
    fn make(
        &self,
        kernel: &mut Kernel,
        place: usize,
        volume: &DeviceInfo,
        record: &Record,
    ) -> Result<Disk, ControlError> {
        let queues = u16::try_from(self.pool.threads()).expect("at most 64 shards");
        let wanted = DevInfo::new(queues, DEPTH, REQUEST_BYTES, record.mark);
        self.check_slots(&wanted).map_err(failed)?;
        record.store(&self.state).map_err(failed)?;
        let info = kernel.add(wanted).map_err(|refusal| {
            // Without an answer in time, the kernel may make the device later.
            if refusal.error != Errno::TIMEDOUT {
                record.remove(&self.state);
            }
            match refusal.error {
                Errno::PERM => {
                    let what = "ublk: the server may not make disks that outlive it";
                    error(ControlErrorKind::Unsupported, what, "it needs root (CAP_SYS_ADMIN)")
                }
                _ => failed(refusal),
            }
        })?;
        let params = Params::new(volume, record.sector_size, info.request_bytes);
        let mut start = || {
            kernel.set_params(info.number, &params).map_err(|error| error.to_string())?;
            self.serve(&info, place)?;
            kernel.start(info.number).map_err(|error| error.to_string())
        };
        if let Err(why) = start() {
            match kernel.remove(info.number) {
                Ok(()) => record.remove(&self.state),
                Err(error) => tracing::error!(%error, "an unfinished disk stays"),
            }
            return Err(failed(why));
        }
        Ok(Disk { record: record.clone(), place, info, served: true })
    }

    /// Removes a volume's disk: by the volume's index in the registry, or by its former name.
    pub fn detach(&self, place: Option<usize>, name: &str) -> Result<DiskSnapshot, ControlError> {
        let _one = locked(&self.busy);
        let none = || {
            let what = format!("volume {name} has no disk made by ublk");
            error(ControlErrorKind::NotFound, what, "see forebay status")
        };
        let mut kernel = Kernel::open().map_err(|why| failed(format!("ublk: {why}")))?;
        let (shown, record, removed) = match place.map(|place| self.find(place).ok_or_else(none)) {
            Some(disk) => {
                let disk = disk?;
                let (shown, number) = (self.shown(&disk), disk.info.number);
                let there = kernel.has(number, disk.record.mark).map_err(failed)?;
                let removed = if !there {
                    // It was removed by other means, or a removal has ended late.
                    Ok(())
                } else if disk.served {
                    block::alone(&shown.device).map_err(|why| {
                        error(
                            ControlErrorKind::Conflict,
                            format!("{why:#}"),
                            "stop its users first",
                        )
                    })?;
                    kernel.remove(number)
                } else {
                    kernel.abandon(number)
                };
                (shown, disk.record, removed)
            }
            None => {
                let waiting = self.waiting()?.into_iter().find(|(record, _)| record.volume == name);
                let (record, info) = waiting.ok_or_else(none)?;
                let (device, sector_size) = (block_path(info.number), record.sector_size);
                let volume = record.volume.clone();
                let shown = DiskSnapshot { volume, device, sector_size, served: false };
                (shown, record, kernel.abandon(info.number))
            }
        };
        removed.map_err(|refusal| self.unremoved(record.mark, refusal))?;
        record.remove(&self.state);
        locked(&self.table).retain(|disk| disk.record.mark != record.mark);
        tracing::info!(volume = %name, device = shown.device, "detached");
        Ok(shown)
    }

    /// The error of a removal that was not done. If the disk has ended all the same, it is no
    /// longer served, and another `detach` removes the rest.
    fn unremoved(&self, mark: u64, refusal: Refusal) -> ControlError {
        if !refusal.has_ended_the_disk() {
            return failed(refusal);
        }
        let mut table = locked(&self.table);
        if let Some(disk) = table.iter_mut().find(|disk| disk.record.mark == mark) {
            disk.served = false;
        }
        let hint = "the disk has ended, and its users get errors; detach it again";
        error(ControlErrorKind::Unavailable, refusal, hint)
    }
}
