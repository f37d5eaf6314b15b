//! The mount of `serve --fuse`: mounted, negotiated with the kernel, served, and unmounted.
//!
//! A stop must not surprise the users of a file. So `forebay stop` is refused while a file is in
//! use. A signal is not refused, but file systems on our disks are first synced while the server
//! can still take their data.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use forebay_block::VolumeId;
use forebay_control::api::{PoolStatus, VolumeStatus};
use forebay_control::config::FuseTransport;
use forebay_control::{ControlError, Monitor, PoolControl, exposition, text};
use forebay_frontend_fuse::{
    Agreement, FuseServer, KnownFile, Owner, REQUEST_BYTES, SharedFile, Topic, negotiate, notices,
    resend,
};
use forebay_runtime::{Mount, Pool};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use crate::disk::{block, loops, mounts};
use crate::server::kept::{Held, Kept};

const DEVICE: &str = "/dev/fuse";
/// The type of our mounts: a dead mount of this type may be unmounted.
const KIND: &str = "fuse.forebay";
const SOURCE: &str = "forebay";
/// The switch for FUSE over io_uring, and the list of possible processors.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
const PROCESSORS: &str = "/sys/devices/system/cpu/possible";
/// The name under which the keeper holds the mount.
const HELD: &str = "fuse";
/// How long the kernel may take to send its first message, and a file to answer first.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a file may stay busy after it was closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);
/// Most bytes for the slots of all queues; fewest and most slots of a queue.
const SLOT_BYTES: usize = 64 << 20;
const DEPTH: std::ops::RangeInclusive<usize> = 4..=32;

/// Unmounts even while in use, and aborts the connection between kernel and server: otherwise a
/// slot would stay with the kernel, and its ring would wait for it.
const CUT_OFF: UnmountFlags =
    UnmountFlags::FORCE.union(UnmountFlags::DETACH).union(UnmountFlags::NOFOLLOW);

/// A directory with the mount.
pub struct MountPoint {
    place: PathBuf,
    /// The keeper holds the mount: it outlives a server that dies or fails to start.
    lasts: AtomicBool,
    /// It is unmounted: what is mounted there now is another server's.
    left: AtomicBool,
}

/// What the keeper holds with the mount.
#[derive(Serialize, Deserialize)]
struct Note {
    place: PathBuf,
    version: (u32, u32),
    request_bytes: u32,
    /// The kernel knows the files by their numbers.
    files: Vec<(u8, String, u64)>,
    /// Numbers of files that are gone. A process may still have one open, so that its number must
    /// not become another file's.
    #[serde(default)]
    gone: Vec<u8>,
}

impl Note {
    /// All numbers of files so far.
    fn numbers(&self) -> impl Iterator<Item = u8> {
        self.files.iter().map(|&(number, ..)| number).chain(self.gone.iter().copied())
    }
}

impl MountPoint {
    fn new(place: PathBuf, lasts: bool) -> Self {
        Self { place, lasts: AtomicBool::new(lasts), left: AtomicBool::new(false) }
    }

    /// Its directory.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// The path of a volume's file.
    pub fn file(&self, volume: &str) -> String {
        self.place.join(volume).display().to_string()
    }

    /// Whether it outlives this server.
    pub fn lasts(&self) -> bool {
        self.lasts.load(Ordering::Relaxed)
    }

    /// Unmounts, unless a file is in use; the error names the users if they can be found.
    pub fn leave_unused(&self) -> Result<(), String> {
        match self.unmount_when_closed() {
            Ok(()) => Ok(()),
            Err(Errno::BUSY) => {
                let devices = self.devices();
                let place = self.place.display();
                Err(if devices.is_empty() {
                    format!(
                        "files under {place} are open, or it is the working directory of a process"
                    )
                } else {
                    format!("volumes are attached as {}", devices.join(", "))
                })
            }
            Err(error) => {
                tracing::warn!(%error, place = %self.place.display(), "not unmounted");
                Ok(())
            }
        }
    }

    /// Unmounts in any case. File systems on our disks are synced to the volumes first; later
    /// writes fail, as on a disk that is pulled.
    pub fn leave(&self) {
        let Err(what) = self.leave_unused() else { return };
        tracing::warn!("{what}: syncing their file systems, then they are cut off");
        let devices = self.devices();
        block::write_all_back(&devices);
        if let Err(error) = self.unmount(CUT_OFF) {
            tracing::warn!(%error, place = %self.place.display(), "not unmounted");
        }
    }

    /// A file that was just closed may be busy for a moment: a child process holds its parent's
    /// open files until it runs its own program.
    fn unmount_when_closed(&self) -> Result<(), Errno> {
        let limit = Instant::now() + CLOSE_PATIENCE;
        loop {
            let result = self.unmount(UnmountFlags::NOFOLLOW);
            if result != Err(Errno::BUSY) || !self.devices().is_empty() || Instant::now() >= limit {
                return result;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Success if it was already unmounted, by the server or by others.
    fn unmount(&self, flags: UnmountFlags) -> Result<(), Errno> {
        if self.left.load(Ordering::Relaxed) {
            return Ok(());
        }
        match mounts::at(&self.place) {
            Ok(Some(entry)) if entry.kind == KIND => rustix::mount::unmount(&self.place, flags)?,
            _ => {}
        }
        self.left.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The loop devices over its files.
    pub fn devices(&self) -> Vec<String> {
        loops::below(&self.place)
    }
}

/// A mount that is not served yet.
pub struct NewMount {
    pub point: Arc<MountPoint>,
    device: OwnedFd,
    ring: bool,
    resends: bool,
    version: (u32, u32),
    /// The note of the server before this one.
    left: Option<Note>,
}

/// A mount that this start has made. Dropping it unmounts: a failed start leaves none behind that
/// nobody serves, whoever else still has the [`MountPoint`], and though the keeper holds it.
pub struct Unserved(Option<Arc<MountPoint>>);

impl Unserved {
    /// The start has succeeded.
    pub fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Unserved {
    fn drop(&mut self) {
        if let Some(point) = &self.0
            && let Err(error) = point.unmount(CUT_OFF)
        {
            tracing::warn!(%error, place = %point.place.display(), "not unmounted");
        }
    }
}

impl NewMount {
    /// What must go if the start fails; `None` for a mount of the server before, whose users wait.
    pub fn unserved(&self) -> Option<Unserved> {
        self.left.is_none().then(|| Unserved(Some(Arc::clone(&self.point))))
    }
}

impl Drop for MountPoint {
    /// A failed start leaves no mount behind that nobody will serve.
    fn drop(&mut self) {
        if !self.lasts() {
            let _ = self.unmount(CUT_OFF);
        }
    }
}

/// A place for a mount.
pub enum Prepared {
    /// A directory.
    Empty(PathBuf),
    /// A directory with the mount of the server before this one.
    Left(NewMount),
}

/// Prepares the place before a start: the directory must be empty, or have a mount that the keeper
/// holds. The latter must not be looked at: nobody answers there yet.
pub fn prepare(place: &Path, kept: &mut Kept) -> anyhow::Result<Prepared> {
    let Some(Held { descriptor: device, note }) = kept.take(HELD) else {
        return Ok(Prepared::Empty(empty(place)?));
    };
    let note: Note = serde_json::from_str(&note).context("the mount that the keeper holds")?;
    // This asks no server, but the kernel's list.
    if mounts::at(&note.place)?.is_none_or(|entry| entry.kind != KIND) {
        tracing::warn!("{} was unmounted while it was served: mounting it again", place.display());
        return Ok(Prepared::Empty(empty(place)?));
    }
    if note.request_bytes != REQUEST_BYTES {
        bail!("--fuse {}: its requests have up to {} bytes", place.display(), note.request_bytes);
    }
    let point = Arc::new(MountPoint::new(note.place.clone(), true));
    let version = note.version;
    let (ring, resends, left) = (false, true, Some(note));
    Ok(Prepared::Left(NewMount { point, device, ring, resends, version, left }))
}

impl Prepared {
    /// The ids that volumes have, or had, as files of a mount that is left, with their names; no
    /// name if the volume is gone.
    pub fn held_ids(&self) -> Option<Vec<(VolumeId, String)>> {
        let Self::Left(NewMount { left: Some(note), .. }) = self else { return None };
        let files = note.files.iter().map(|(id, name, _)| (VolumeId(*id), name.clone()));
        let gone = note.gone.iter().map(|&id| (VolumeId(id), String::new()));
        Some(files.chain(gone).collect())
    }

    /// The directory.
    pub fn display(&self) -> std::path::Display<'_> {
        match self {
            Self::Empty(place) => place.display(),
            Self::Left(mount) => mount.point.place.display(),
        }
    }

    /// Mounts, if there is no mount yet. With `lasting`, requests come in the way that survives a
    /// server's death, unless another is demanded.
    pub fn mount(self, transport: FuseTransport, lasting: bool) -> anyhow::Result<NewMount> {
        match self {
            Self::Empty(place) => mount(&place, transport, lasting),
            Self::Left(mount) => Ok(mount),
        }
    }
}

/// Checks the directory before a start: it must exist, be empty, and not be a mount point. The
/// mount of a killed server is removed.
fn empty(place: &Path) -> anyhow::Result<PathBuf> {
    let shown = place.display();
    let place = std::path::absolute(place).with_context(|| format!("{shown}"))?;
    // Not its cached attributes: these outlive the server.
    if matches!(rustix::fs::statfs(&place), Err(Errno::NOTCONN | Errno::CONNABORTED)) {
        take_away(&place)?;
    }
    let place = match fs::canonicalize(&place) {
        Ok(place) => place,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("--fuse {shown}: there is no such directory; create it (mkdir -p {shown})");
        }
        Err(error) => bail!("--fuse {shown}: {error}"),
    };
    if mounts::at(&place)?.is_some_and(|entry| entry.kind == KIND) {
        bail!(
            "--fuse {shown}: another server has mounted its volumes there; name another directory"
        );
    }
    let mut entries = match fs::read_dir(&place) {
        Ok(entries) => entries,
        Err(error) => bail!("--fuse {shown}: {error}; name a directory"),
    };
    if entries.next().is_some() {
        bail!(
            "--fuse {shown}: the directory is not empty, and its content would be hidden; name an \
             empty one"
        );
    }
    Ok(place)
}

/// Removes the mount of a server that is gone, if it has our type.
fn take_away(place: &Path) -> anyhow::Result<()> {
    let shown = place.display();
    match mounts::at(place)? {
        Some(entry) if entry.kind == KIND => {
            rustix::mount::unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
                .with_context(|| format!("the mount that a killed server left at {shown}"))?;
            tracing::warn!("removed the mount that a killed server left at {shown}");
            Ok(())
        }
        Some(entry) => bail!(
            "--fuse {shown}: a mount of type {} is there whose server is gone; unmount it first \
             (umount -l {shown})",
            entry.kind
        ),
        None => bail!("--fuse {shown}: its server is gone; unmount it first (umount -l {shown})"),
    }
}

/// Mounts, and negotiates with the kernel how requests are transported.
fn mount(place: &Path, transport: FuseTransport, lasting: bool) -> anyhow::Result<NewMount> {
    let wanted = match transport {
        FuseTransport::Auto => !lasting,
        FuseTransport::IoUring => true,
        FuseTransport::Device => false,
    };
    let switched = wanted.then(switch_on);
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let device = match rustix::fs::open(DEVICE, flags, Mode::empty()) {
        Ok(device) => device,
        Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => {
            bail!(
                "there is no {DEVICE}: this kernel has no FUSE, or it is not loaded (modprobe fuse)"
            )
        }
        Err(error) => bail!("{DEVICE}: {error}"),
    };
    let options = format!(
        "fd={},rootmode=40755,user_id={},group_id={},max_read={REQUEST_BYTES},default_permissions",
        device.as_raw_fd(),
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let options = CString::new(options).context("mount options")?;
    let how = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    match rustix::mount::mount(SOURCE, place, KIND, how, options.as_c_str()) {
        Ok(()) => {}
        Err(Errno::PERM | Errno::ACCESS) => {
            bail!("--fuse {}: mounting needs root (CAP_SYS_ADMIN)", place.display())
        }
        Err(Errno::NODEV) => bail!("this kernel has no FUSE, or it is not loaded (modprobe fuse)"),
        Err(error) => bail!("--fuse {}: not mounted: {error}", place.display()),
    }
    let point = Arc::new(MountPoint::new(place.to_owned(), false));
    let Agreement { ring, resends, version, .. } = agree(&device, wanted)?;
    if wanted && !ring {
        let why = switched.and_then(Result::err);
        let why = why.unwrap_or_else(|| "the kernel does not offer it".to_owned());
        if transport == FuseTransport::IoUring {
            bail!("FUSE over io_uring: {why}; use --fuse-transport device");
        }
        tracing::warn!("requests come over {DEVICE}, not over io_uring: {why}");
    }
    Ok(NewMount { point, device, ring, resends, version, left: None })
}

/// Switches on FUSE over io_uring for the whole machine, or returns why it is off.
fn switch_on() -> Result<(), String> {
    match fs::read_to_string(SWITCH) {
        Ok(state) if state.trim() == "Y" => return Ok(()),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err("this kernel has none (Linux 6.14 with CONFIG_FUSE_IO_URING)".to_owned());
        }
        Err(error) => return Err(format!("{SWITCH}: {error}")),
    }
    match fs::write(SWITCH, "Y") {
        Ok(()) => {
            tracing::info!("switched on FUSE over io_uring: {SWITCH} is Y now");
            Ok(())
        }
        Err(error) => Err(format!("it is switched off, and {SWITCH} cannot be written: {error}")),
    }
}

/// Reads the kernel's first message and answers it.
fn agree(device: &OwnedFd, ring: bool) -> anyhow::Result<Agreement> {
    let mut message = vec![0; 8 << 10];
    let deadline = Instant::now() + PATIENCE;
    let length = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = rustix::time::Timespec::try_from(left).context("a short time")?;
        let mut fds = [PollFd::new(device, PollFlags::IN)];
        poll(&mut fds, Some(&timeout)).context(DEVICE)?;
        match rustix::io::read(device, &mut message) {
            Ok(length) => break length,
            Err(Errno::AGAIN | Errno::INTR) if !left.is_zero() => {}
            Err(error) => bail!("{DEVICE}: the kernel sends no first message: {error}"),
        }
    };
    let agreement = negotiate(&message[..length], ring)?;
    rustix::io::write(device, &agreement.reply).context("the kernel refuses the agreement")?;
    Ok(agreement)
}

/// Serves the mount, waits until its files answer, and leaves it with the keeper. First the kernel
/// sends again what a server before this one has left unanswered. Its files must be the same,
/// unless they `may_differ`, since a configuration was applied or has failed to be.
pub fn serve(
    mount: NewMount,
    pool: &Pool,
    topics: Arc<Topics>,
    kept: &Kept,
    may_differ: bool,
) -> anyhow::Result<()> {
    let NewMount { point, device, ring, resends, version, left } = mount;
    let volumes = pool.registry().volumes();
    let known = |(id, name, size)| KnownFile { id, name, size };
    let files = volumes.iter().map(|v| known((v.id.0, v.name.clone(), v.info.size)));
    let files: Vec<KnownFile> = files.collect();
    let (mut news, mut gone) = (Vec::new(), Vec::new());
    if let Some(left) = left {
        gone = left.numbers().filter(|id| files.iter().all(|file| file.id != *id)).collect();
        let left: Vec<KnownFile> = left.files.into_iter().map(known).collect();
        if !may_differ {
            check_same(&left, &files)?;
        }
        news = notices(&left, &files);
        rustix::io::write(&device, &resend()).context("the mount's requests")?;
    }
    let note = Note {
        place: point.place.clone(),
        version,
        request_bytes: REQUEST_BYTES,
        files: files.into_iter().map(|one| (one.id, one.name, one.size)).collect(),
        gone,
    };
    let device_for_keeper = device.try_clone()?;
    let files = volumes.iter().zip(pool.registry().exports());
    let files =
        files.map(|(volume, export)| SharedFile::of(volume.id, &export, volume.info.fast_zero));
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let owner = Owner {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        seconds: since.map_or(0, |since| since.as_secs()),
    };
    let server = FuseServer::new(files.collect(), owner)?;
    let rings = if ring { Some(queues()?) } else { None };
    let (major, minor) = version;
    let transport = if rings.is_some() { "io_uring" } else { DEVICE };
    let request_bytes = REQUEST_BYTES as usize;
    let mount = Mount { device, responder: Arc::new(server), request_bytes, rings };
    let names: Vec<String> = volumes.iter().map(|volume| volume.name.clone()).collect();
    pool.serve_mount(mount, move |topic| topics.describe(&names, Topic::of(topic)))?;
    for news in news {
        match rustix::io::write(&device_for_keeper, &news) {
            // It has not cached that.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error).context("the kernel takes no news of the mount"),
        }
    }
    for volume in volumes {
        await_file(point.file(&volume.name), volume.info.size)?;
        loops::resize(&point.file(&volume.name), volume.info.size);
    }
    let place = point.place.display();
    tracing::info!(%place, transport, "mounted; the kernel speaks FUSE {major}.{minor}");
    if kept.is_there() && resends {
        kept.hold(HELD, &serde_json::to_string(&note)?, device_for_keeper.as_fd())?;
        point.lasts.store(true, Ordering::Relaxed);
    } else {
        let why = match (kept.is_there(), ring) {
            (false, _) => "it has no keeper",
            (true, true) => "requests come over io_uring",
            (true, false) => "the kernel cannot send requests again (Linux 6.9)",
        };
        tracing::warn!("files and disks fail if the server dies: {why}");
    }
    Ok(())
}

/// Checks that the files are those of the server before this one: the kernel knows them by number.
fn check_same(left: &[KnownFile], now: &[KnownFile]) -> anyhow::Result<()> {
    let changed = left.iter().find(|file| !now.contains(file));
    let Some(KnownFile { name, size, .. }) = changed else { return Ok(()) };
    bail!("volume {name}: it is mounted with {size} bytes, and is gone or has another size now")
}

/// The number of the kernel's queues, one for each possible processor, and of slots in each.
fn queues() -> anyhow::Result<(u16, usize)> {
    let list = fs::read_to_string(PROCESSORS).context(PROCESSORS)?;
    let last = list.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<u16>().ok());
    let queues = last.with_context(|| format!("{PROCESSORS}: {list:?}"))? + 1;
    let depth = SLOT_BYTES / (usize::from(queues) * REQUEST_BYTES as usize);
    Ok((queues, depth.clamp(*DEPTH.start(), *DEPTH.end())))
}

/// Waits until a file exists with its size.
fn await_file(path: String, size: u64) -> anyhow::Result<()> {
    let (tell, hear) = mpsc::channel();
    let look = {
        let path = path.clone();
        move || drop(tell.send(fs::metadata(path).map(|found| found.len())))
    };
    std::thread::Builder::new().name("first-look".into()).spawn(look)?;
    match hear.recv_timeout(PATIENCE) {
        Ok(Ok(found)) if found == size => Ok(()),
        Ok(Ok(found)) => bail!("{path} has {found} bytes instead of {size}"),
        Ok(Err(error)) => bail!("{path}: {error}"),
        Err(_) => bail!(
            "{path}: the kernel hands over no requests; try --fuse-transport device, and see the \
             kernel's log"
        ),
    }
}

/// What the files below `.forebay` tell of.
pub struct Topics {
    pub pool: Arc<dyn PoolControl>,
    /// Set as soon as the pool is observed.
    pub monitor: OnceLock<Weak<Monitor>>,
}

impl Topics {
    /// The state of the pool, with what its past tells.
    fn status(&self) -> Result<PoolStatus, ControlError> {
        match self.monitor.get().and_then(Weak::upgrade) {
            Some(monitor) => monitor.status(),
            None => Ok(PoolStatus::of(&self.pool.snapshot()?)),
        }
    }

    /// The text of a file.
    fn describe(&self, volumes: &[String], topic: Topic) -> Vec<u8> {
        let told = (|| -> Result<String, ControlError> {
            Ok(match topic {
                Topic::Status => text::pool(&self.status()?),
                Topic::Json => {
                    let json = serde_json::to_string_pretty(&self.status()?);
                    json.unwrap_or_else(|error| error.to_string()) + "\n"
                }
                Topic::Metrics => exposition(&self.pool.snapshot()?),
                Topic::Volume(at) => {
                    let snapshot = self.pool.snapshot()?;
                    let volume = snapshot.volume(volumes.get(at).map_or("", |name| name))?;
                    text::volume(&VolumeStatus::of(&snapshot, volume))
                }
            })
        })();
        told.unwrap_or_else(|error| format!("{error}\n")).into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection of the kernel at `place`, on which nobody answers.
    fn mount_at(place: &Path) -> OwnedFd {
        let device = rustix::fs::open(DEVICE, OFlags::RDWR, Mode::empty()).expect("it is there");
        let options = format!("fd={},rootmode=40755,user_id=0,group_id=0", device.as_raw_fd());
        let options = CString::new(options).expect("no zero byte");
        rustix::mount::mount(SOURCE, place, KIND, MountFlags::empty(), options.as_c_str())
            .expect("root may mount");
        device
    }

    /// A server that had unmounted, and was still ending, took the mount of the next one away.
    #[test]
    fn a_mount_that_comes_after_ours_stays() {
        if !rustix::process::geteuid().is_root() || !Path::new(DEVICE).exists() {
            return;
        }
        let place = std::env::temp_dir().join(format!("forebay-mount-{}", std::process::id()));
        fs::create_dir(&place).expect("it is made");
        let is_mounted = || mounts::at(&place).expect("a list").is_some();
        for leaves in [true, false] {
            let _device = mount_at(&place);
            let point = MountPoint::new(place.clone(), false);
            if leaves {
                point.leave();
                assert!(!is_mounted());
                let _next = mount_at(&place);
                drop(point);
                assert!(is_mounted());
                rustix::mount::unmount(&place, CUT_OFF).expect("it is ours");
            } else {
                drop(point);
            }
            assert!(!is_mounted());
        }
        fs::remove_dir(&place).expect("it is empty");
    }
}
