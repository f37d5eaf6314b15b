//! Resources that must be removed in every case: processes, mounts, loop devices, directories. Each
//! is registered here when it is created, and removed when its `Held` is dropped; the remaining
//! ones are removed at a signal or a panic, newest first.
//!
//! Invariant: a resource is created and registered under one lock, so that none can be created
//! after the final cleanup has begun. Only resources created here are touched: processes by their
//! handle, devices by their name while they are held.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Time limit for a device or a mount to disappear.
const PATIENCE: Duration = Duration::from_secs(20);
const STEP: Duration = Duration::from_millis(20);
/// Interval between checks of a starting program: some of the checks make a connection.
const READY_STEP: Duration = Duration::from_millis(50);
/// Ticks per second in which the kernel reports CPU time, on every machine.
const USER_HZ: u64 = 100;

/// How a resource is removed.
enum Undo {
    Kill(Arc<Mutex<Child>>),
    /// Kill a keeper and the processes that it has started.
    KillFamily(Arc<Mutex<Child>>),
    Unmount(PathBuf),
    Detach(Loop),
    /// Detach a loop device and free its number, which is ours too.
    DetachNumber(Loop),
    Remove(PathBuf),
    Disband(PathBuf),
}

/// A loop device, and what it is made of: another program may get its number as soon as it is free.
struct Loop {
    device: PathBuf,
    backing: String,
}

impl Loop {
    fn of(device: &Path) -> anyhow::Result<Self> {
        let backing = backing(device).with_context(|| format!("{}", device.display()))?;
        Ok(Self { device: device.to_owned(), backing })
    }

    fn is_attached(&self) -> bool {
        backing(&self.device).is_ok_and(|now| now == self.backing)
    }
}

/// The file that a loop device is made of, as the kernel shows it.
pub fn backing(device: &Path) -> std::io::Result<String> {
    let name = device.file_name().unwrap_or_default();
    fs::read_to_string(Path::new("/sys/block").join(name).join("loop/backing_file"))
}

struct State {
    closed: bool,
    next: u64,
    steps: Vec<(u64, Undo)>,
}

static STATE: Mutex<State> = Mutex::new(State { closed: false, next: 0, steps: Vec::new() });

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A registered resource, removed on drop.
#[must_use]
pub struct Held(u64);

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = lock(&STATE);
        if let Some(at) = state.steps.iter().position(|(id, _)| *id == self.0) {
            let (_, step) = state.steps.remove(at);
            undo(step);
        }
    }
}

/// Creates and registers a resource.
fn make<T>(action: impl FnOnce() -> anyhow::Result<(T, Undo)>) -> anyhow::Result<(T, Held)> {
    let mut state = lock(&STATE);
    ensure!(!state.closed, "interrupted");
    let (made, step) = action()?;
    let id = state.next;
    state.next += 1;
    state.steps.push((id, step));
    Ok((made, Held(id)))
}

/// From now on a signal or panic removes everything and ends the process with exit code 1.
pub fn protect() -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("catching signals")?;
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            eprintln!("\ninterrupted; cleaning up");
            all();
            std::process::exit(1);
        }
    });
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        // The panicking thread may hold the lock; leaving resources behind is then better than
        // hanging.
        if let Ok(mut state) = STATE.try_lock() {
            undo_all(&mut state);
        }
    }));
    Ok(())
}

/// Removes everything, newest first; nothing can be created afterwards. If another thread is
/// already doing so, waits for it.
pub fn all() {
    undo_all(&mut lock(&STATE));
}

fn undo_all(state: &mut State) {
    state.closed = true;
    while let Some((_, step)) = state.steps.pop() {
        undo(step);
    }
}

fn undo(step: Undo) {
    let outcome = match &step {
        Undo::Kill(child) => kill(&mut lock(child)),
        Undo::KillFamily(child) => kill_family(&mut lock(child)),
        Undo::Unmount(path) => leave(path),
        Undo::Detach(attached) => detach(attached),
        Undo::DetachNumber(attached) => detach(attached).map(|()| give_back(&attached.device)),
        Undo::Remove(path) if path.exists() => fs::remove_dir_all(path).map_err(Into::into),
        Undo::Remove(_) => Ok(()),
        Undo::Disband(group) => disband(group),
    };
    if let Err(error) = outcome {
        eprintln!("forebay-bench: left behind: {error:#}");
    }
}

fn kill(child: &mut Child) -> anyhow::Result<()> {
    child.kill()?;
    child.wait()?;
    Ok(())
}

/// A stopped keeper starts nothing and reaps nothing, so its children's numbers stay theirs. Their
/// files are closed when this returns.
fn kill_family(keeper: &mut Child) -> anyhow::Result<()> {
    if keeper.try_wait()?.is_some() {
        return Ok(());
    }
    send(keeper.id(), Signal::STOP)?;
    let children = children(keeper.id());
    for &child in &children {
        send(child, Signal::KILL)?;
    }
    let limit = Instant::now() + PATIENCE;
    for child in children {
        while !has_ended(child) {
            ensure!(Instant::now() < limit, "process {child} does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    kill(keeper)
}

/// Whether all threads of a process have ended, and only its parent does not know yet.
fn has_ended(pid: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let runs =
        state.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'));
    !runs && fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count) <= 1
}

/// Sends a signal to a process.
pub fn send(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    Ok(kill_process(pid.context("it has a process number")?, signal)?)
}

/// The children of a process with one thread that starts them, oldest first.
pub fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Unmounts a file system. If it stays busy after some retries, detaches it lazily.
fn leave(path: &Path) -> anyhow::Result<()> {
    let limit = Instant::now() + PATIENCE;
    loop {
        match unmount(path, UnmountFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => return Ok(()),
            Err(_) if Instant::now() < limit => std::thread::sleep(STEP),
            Err(_) => {
                let outcome = unmount(path, UnmountFlags::DETACH);
                return outcome.with_context(|| format!("unmounting {}", path.display()));
            }
        }
    }
}

/// Detaches a loop device and waits until it is gone: the command alone only requests that.
fn detach(attached: &Loop) -> anyhow::Result<()> {
    let limit = Instant::now() + PATIENCE;
    while attached.is_attached() {
        let output = tool("losetup").arg("-d").arg(&attached.device).output()?;
        if Instant::now() > limit {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{} is still attached: {said}", attached.device.display());
        }
        std::thread::sleep(STEP);
    }
    Ok(())
}

/// Removes the loop device's number from the kernel; one that is in use again stays.
fn give_back(device: &Path) {
    let remove = "import fcntl,os,sys\n\
        fcntl.ioctl(os.open('/dev/loop-control', os.O_RDWR), 0x4c81, int(sys.argv[1]))";
    let number = device.to_string_lossy().replace("/dev/loop", "");
    let _ = tool("python3").args(["-c", remove, &number]).output();
}

/// Removes a control group as soon as the last of its processes has ended.
fn disband(group: &Path) -> anyhow::Result<()> {
    let limit = Instant::now() + PATIENCE;
    loop {
        match fs::remove_dir(group) {
            Err(_) if group.exists() && Instant::now() < limit => std::thread::sleep(STEP),
            outcome => return outcome.with_context(|| format!("{}", group.display())),
        }
    }
}

/// A program, found also in directories that only root has in its PATH.
pub fn tool(name: &str) -> Command {
    let system = Path::new("/usr/sbin").join(name);
    if system.exists() { Command::new(system) } else { Command::new(name) }
}

/// Runs a command to completion. Returns its output; on failure, an error with its messages.
pub fn finish(command: &mut Command) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("starting {name}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {}: {}", output.status, said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Creates a directory that is removed with all its content.
pub fn directory(path: &Path) -> anyhow::Result<Held> {
    let (_, held) = make(|| {
        fs::create_dir_all(path).with_context(|| format!("{}", path.display()))?;
        Ok(((), Undo::Remove(path.to_owned())))
    })?;
    Ok(held)
}

/// Creates a loop device over a file, with direct I/O and 4 KiB sectors. Returns its path. Flushes
/// reach the file, even if the device was told before that it has no write cache.
pub fn loop_device(file: &Path) -> anyhow::Result<(PathBuf, Held)> {
    make(|| {
        let mut command = tool("losetup");
        command.args(["--find", "--show", "--direct-io=on", "--sector-size=4096"]).arg(file);
        let device = PathBuf::from(finish(&mut command)?.trim());
        let attached = Loop::of(&device)?;
        let name = device.file_name().unwrap_or_default();
        let switch = Path::new("/sys/block").join(name).join("queue/write_cache");
        if fs::read_to_string(&switch).is_ok_and(|state| state.trim() != "write back") {
            fs::write(&switch, "write back").with_context(|| format!("{}", switch.display()))?;
        }
        Ok((device, Undo::Detach(attached)))
    })
}

/// Registers a loop device made by one of our programs.
pub fn attached(device: &Path) -> anyhow::Result<Held> {
    let (_, held) = make(|| Ok(((), Undo::Detach(Loop::of(device)?))))?;
    Ok(held)
}

/// Creates a loop device with a given name, with 512-byte sectors.
pub fn loop_named(device: &Path, file: &Path) -> anyhow::Result<Held> {
    let (_, held) = make(|| {
        finish(tool("losetup").arg("--direct-io=on").arg(device).arg(file))?;
        Ok(((), Undo::DetachNumber(Loop::of(device)?)))
    })?;
    Ok(held)
}

/// Mounts the XFS file system on a device.
pub fn mount(device: &Path, at: &Path) -> anyhow::Result<Held> {
    mount_with(device, at, "noatime,nouuid")
}

/// Mounts the file system on a device with these options.
pub fn mount_with(device: &Path, at: &Path, options: &str) -> anyhow::Result<Held> {
    let (_, held) = make(|| {
        fs::create_dir_all(at)?;
        finish(tool("mount").args(["-o", options]).arg(device).arg(at))?;
        Ok(((), Undo::Unmount(at.to_owned())))
    })?;
    Ok(held)
}

/// A control group in which programs can be started.
pub struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Wraps a command so that it starts within the group.
    pub fn enter(&self, command: &Command) -> Command {
        let mut entering = Command::new("sh");
        entering.arg("-c").arg("echo $$ >\"$0\" && exec \"$@\"").arg(self.0.join("cgroup.procs"));
        entering.arg(command.get_program()).args(command.get_args());
        entering.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        entering
    }
}

/// Creates a control group, of version 1 or 2, that limits the total memory of its processes, page
/// cache included.
pub fn memory_group(name: &str, bytes: u64) -> anyhow::Result<(MemoryGroup, Held)> {
    let roots =
        [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
    make(|| {
        let mut why = String::new();
        for (root, limit) in roots {
            let group = Path::new(root).join(format!("{name}-{}", std::process::id()));
            let made = fs::create_dir(&group)
                .and_then(|()| fs::write(group.join(limit), bytes.to_string()));
            match made {
                Ok(()) => return Ok((MemoryGroup(group.clone()), Undo::Disband(group))),
                Err(error) => why = format!("{}: {error}", group.join(limit).display()),
            }
            let _ = fs::remove_dir(&group);
        }
        bail!("no control group can bound memory here: {why}")
    })
}

/// Registers a mount made by one of our programs.
pub fn mounted(at: &Path) -> anyhow::Result<Held> {
    let (_, held) = make(|| Ok(((), Undo::Unmount(at.to_owned()))))?;
    Ok(held)
}

/// A running program, in its own process group, so that a terminal's Ctrl-C does not end it before
/// the things that depend on it.
pub struct Process {
    child: Arc<Mutex<Child>>,
    pid: u32,
    log: PathBuf,
    name: String,
    held: Option<Held>,
}

impl Process {
    /// Starts the program. Its standard error, and its standard output unless `piped` says that the
    /// caller has redirected that, go to `log`.
    pub fn start(mut command: Command, log: &Path, piped: bool) -> anyhow::Result<Self> {
        // A server of ours is this process itself, not the child of a keeper.
        command.env("FOREBAY_NO_KEEPER", "1");
        Self::spawn(command, log, piped, Undo::Kill)
    }

    /// Starts a server with a keeper, which is the process. Its standard error goes to `log`.
    pub fn start_keeper(mut command: Command, log: &Path) -> anyhow::Result<Self> {
        command.env_remove("FOREBAY_NO_KEEPER");
        Self::spawn(command, log, true, Undo::KillFamily)
    }

    fn spawn(
        mut command: Command,
        log: &Path,
        piped: bool,
        end: fn(Arc<Mutex<Child>>) -> Undo,
    ) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let file = File::create(log).with_context(|| format!("{}", log.display()))?;
        let out = if piped { Stdio::piped() } else { file.try_clone()?.into() };
        command.process_group(0).stdin(Stdio::null()).stdout(out).stderr(file);
        let (child, held) = make(|| {
            let child = command.spawn().with_context(|| format!("starting {name}"))?;
            let child = Arc::new(Mutex::new(child));
            Ok((Arc::clone(&child), end(child)))
        })?;
        let pid = lock(&child).id();
        Ok(Self { child, pid, log: log.to_owned(), name, held: Some(held) })
    }

    /// Its piped standard output; available once.
    pub fn output(&self) -> anyhow::Result<std::process::ChildStdout> {
        lock(&self.child).stdout.take().context("its output was asked for, once")
    }

    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its exit status, if it has ended.
    pub fn ended(&self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(lock(&self.child).try_wait()?)
    }

    /// Sends SIGKILL without waiting, for killing several processes at once.
    pub fn strike(&self) -> anyhow::Result<()> {
        Ok(lock(&self.child).kill()?)
    }

    /// Kills it, as a power failure would.
    pub fn kill(mut self) {
        self.held.take();
    }

    /// Sends SIGTERM and waits for it to exit in order.
    pub fn stop(self, patience: Duration) -> anyhow::Result<()> {
        {
            let mut child = lock(&self.child);
            if child.try_wait()?.is_none() {
                send(self.pid, Signal::TERM)?;
            }
        }
        let status = self.wait(patience)?;
        ensure!(status.success(), "{} ended with {status}: {}", self.name, self.said());
        Ok(())
    }

    /// Waits for its end.
    pub fn wait(&self, patience: Duration) -> anyhow::Result<ExitStatus> {
        let limit = Instant::now() + patience;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            ensure!(Instant::now() < limit, "{} does not stop: {}", self.name, self.said());
            std::thread::sleep(STEP);
        }
    }

    /// Waits until it is ready. Errors refer to it as `name`, since another program may have
    /// started it.
    pub fn wait_until(
        &self,
        name: &str,
        patience: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> anyhow::Result<()> {
        let limit = Instant::now() + patience;
        while !ready() {
            if let Some(status) = self.ended()? {
                bail!("{name} ended with {status}: {}", self.said());
            }
            ensure!(Instant::now() < limit, "{name} does not start: {}", self.said());
            std::thread::sleep(READY_STEP);
        }
        Ok(())
    }

    /// CPU time used so far by all its threads; zero when it is gone.
    pub fn cpu(&self) -> Duration {
        cpu_of(self.pid).unwrap_or_default()
    }

    /// The most memory that it has taken so far, in bytes.
    pub fn peak_memory(&self) -> anyhow::Result<u64> {
        self.memory("VmHWM:")
    }

    /// The memory that it has allocated and touched, in bytes.
    pub fn anonymous_memory(&self) -> anyhow::Result<u64> {
        self.memory("RssAnon:")
    }

    /// A figure of `/proc/PID/status`, in bytes.
    fn memory(&self, name: &str) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        Ok(kib.with_context(|| format!("no {name} in /proc"))?.trim().parse::<u64>()? << 10)
    }

    /// The last lines of its log.
    pub fn said(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(3)..].join("; ")
    }
}

/// CPU time used by all threads of a process and of its children; `None` when it is gone. Of the
/// calling process only its own threads count: the programs that it started are watched themselves.
pub fn cpu_of(pid: u32) -> Option<Duration> {
    if pid == std::process::id() {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        return Some(Duration::new(time.tv_sec as u64, time.tv_nsec as u32));
    }
    let own = cpu_in(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    let children = children(pid).into_iter().filter_map(cpu_of);
    Some(own + children.sum())
}

/// CPU time of a process and its ended children, in the text of its `/proc/PID/stat`.
fn cpu_in(stat: &str) -> Option<Duration> {
    // Fields are counted from the end of the name, which is in parentheses: fields 14 to 17 are the
    // user and system time of the process, and those of its ended children.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields = rest.split_whitespace().skip(11).take(4).map(str::parse::<u64>);
    let ticks: u64 = fields.collect::<Result<Vec<_>, _>>().ok()?.iter().sum();
    Some(Duration::from_millis(ticks * 1000 / USER_HZ))
}

/// Runs `work`. Resources that it creates are removed at its end, at a signal and at a panic.
///
/// # Errors
/// The error of `work`.
pub fn protected(work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    protect()?;
    let outcome = work();
    crate::report::progress("");
    all();
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_time_is_without_that_of_programs_that_were_started() {
        let own = std::process::id();
        let before = cpu_of(own).expect("it runs");
        let busy = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; cat /proc/$$/stat";
        let ran = Command::new("sh").args(["-c", busy]).output().expect("there is a shell");
        let after = cpu_of(own).expect("it runs");
        let theirs = cpu_in(&String::from_utf8_lossy(&ran.stdout)).expect("a line of /proc");
        assert!(theirs > Duration::from_millis(50), "{theirs:?}");
        assert!(after - before < theirs / 2, "{before:?} {after:?} {theirs:?}");
    }
}
