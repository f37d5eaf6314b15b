//! What must be undone whatever happens: processes, mounts, loop devices, directories. Each is
//! entered here when it is made and undone when its `Held` is dropped; what is still there at a
//! signal or a panic is undone then, newest first.
//!
//! Invariant: making a thing and entering it happen under one lock, so that nothing can be made
//! after the end has begun. Only what was made here is touched: processes by their handle,
//! devices by their name while they are held.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// How long a device or a mount may take to go.
const PATIENCE: Duration = Duration::from_secs(20);
const STEP: Duration = Duration::from_millis(20);
/// Time between two looks at a program that starts: some of these looks make a connection.
const READY_STEP: Duration = Duration::from_millis(50);
/// Ticks of a second in which the kernel counts CPU time for programs, on every machine.
const USER_HZ: u64 = 100;

/// How one thing is undone.
enum Undo {
    Kill(Arc<Mutex<Child>>),
    Unmount(PathBuf),
    Detach(PathBuf),
    /// A loop device whose number is ours, too.
    DetachNumber(PathBuf),
    Remove(PathBuf),
    Disband(PathBuf),
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

/// Something that is undone when this is dropped.
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

/// Makes a thing and enters how it is undone.
fn make<T>(action: impl FnOnce() -> anyhow::Result<(T, Undo)>) -> anyhow::Result<(T, Held)> {
    let mut state = lock(&STATE);
    ensure!(!state.closed, "interrupted");
    let (made, step) = action()?;
    let id = state.next;
    state.next += 1;
    state.steps.push((id, step));
    Ok((made, Held(id)))
}

/// From now on signals and panics undo everything and end the process with exit code 1.
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
        // Whoever panics may hold the lock; then the rest is left, which is better than to hang.
        if let Ok(mut state) = STATE.try_lock() {
            undo_all(&mut state);
        }
    }));
    Ok(())
}

/// Undoes everything, newest first; nothing can be made afterwards. Waits for whoever does so
/// already.
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
        Undo::Unmount(path) => leave(path),
        Undo::Detach(device) => detach(device),
        Undo::DetachNumber(device) => detach(device).map(|()| give_back(device)),
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

/// Unmounts; what is busy is tried again, and at last taken out of sight.
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

/// Detaches a loop device and waits until it is gone: the command alone only asks for it.
fn detach(device: &Path) -> anyhow::Result<()> {
    let name = device.file_name().context("a device has a name")?;
    let backing = Path::new("/sys/block").join(name).join("loop/backing_file");
    let limit = Instant::now() + PATIENCE;
    while backing.exists() {
        let output = tool("losetup").arg("-d").arg(device).output()?;
        if Instant::now() > limit {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{} is still attached: {said}", device.display());
        }
        std::thread::sleep(STEP);
    }
    Ok(())
}

/// Gives the number of a loop device back to the kernel; one that is in use again stays.
fn give_back(device: &Path) {
    let remove = "import fcntl,os,sys\n\
        fcntl.ioctl(os.open('/dev/loop-control', os.O_RDWR), 0x4c81, int(sys.argv[1]))";
    let number = device.to_string_lossy().replace("/dev/loop", "");
    let _ = tool("python3").args(["-c", remove, &number]).output();
}

/// Removes a control group, as soon as the last of its processes has ended.
fn disband(group: &Path) -> anyhow::Result<()> {
    let limit = Instant::now() + PATIENCE;
    loop {
        match fs::remove_dir(group) {
            Err(_) if group.exists() && Instant::now() < limit => std::thread::sleep(STEP),
            outcome => return outcome.with_context(|| format!("{}", group.display())),
        }
    }
}

/// A program, also where only root has its directory among those searched.
pub fn tool(name: &str) -> Command {
    let system = Path::new("/usr/sbin").join(name);
    if system.exists() { Command::new(system) } else { Command::new(name) }
}

/// Runs a command to its end; its output, or what it said when it failed.
pub fn finish(command: &mut Command) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("starting {name}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {}: {}", output.status, said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A directory that is removed with everything in it.
pub fn directory(path: &Path) -> anyhow::Result<Held> {
    let (_, held) = make(|| {
        fs::create_dir_all(path).with_context(|| format!("{}", path.display()))?;
        Ok(((), Undo::Remove(path.to_owned())))
    })?;
    Ok(held)
}

/// A loop device over a file, with direct I/O and sectors of 4 KiB, and its path.
pub fn loop_device(file: &Path) -> anyhow::Result<(PathBuf, Held)> {
    make(|| {
        let mut command = tool("losetup");
        command.args(["--find", "--show", "--direct-io=on", "--sector-size=4096"]).arg(file);
        let device = PathBuf::from(finish(&mut command)?.trim());
        Ok((device.clone(), Undo::Detach(device)))
    })
}

/// The same under a name of the caller's choice, with sectors of 512 bytes.
pub fn loop_named(device: &Path, file: &Path) -> anyhow::Result<Held> {
    let (_, held) = make(|| {
        finish(tool("losetup").arg("--direct-io=on").arg(device).arg(file))?;
        Ok(((), Undo::DetachNumber(device.to_owned())))
    })?;
    Ok(held)
}

/// Mounts the file system on a device.
pub fn mount(device: &Path, at: &Path) -> anyhow::Result<Held> {
    let (_, held) = make(|| {
        fs::create_dir_all(at)?;
        finish(tool("mount").args(["-o", "noatime,nouuid"]).arg(device).arg(at))?;
        Ok(((), Undo::Unmount(at.to_owned())))
    })?;
    Ok(held)
}

/// A control group for programs to be started in.
pub struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// The command, to be started within the group.
    pub fn enter(&self, command: &Command) -> Command {
        let mut entering = Command::new("sh");
        entering.arg("-c").arg("echo $$ >\"$0\" && exec \"$@\"").arg(self.0.join("cgroup.procs"));
        entering.arg(command.get_program()).args(command.get_args());
        entering.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        entering
    }
}

/// A control group, of either version, whose processes have at most so much memory together, page
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

/// A mount that a program of ours has made.
pub fn mounted(at: &Path) -> anyhow::Result<Held> {
    let (_, held) = make(|| Ok(((), Undo::Unmount(at.to_owned()))))?;
    Ok(held)
}

/// A running program: in a process group of its own, so that a terminal's Ctrl-C does not end it
/// before what stands on it.
pub struct Process {
    child: Arc<Mutex<Child>>,
    pid: u32,
    log: PathBuf,
    name: String,
    held: Option<Held>,
}

impl Process {
    /// Starts it; what it says on standard error, and on standard output unless that was set to
    /// something by the caller with `piped`, goes to `log`.
    pub fn start(mut command: Command, log: &Path, piped: bool) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let file = File::create(log).with_context(|| format!("{}", log.display()))?;
        let out = if piped { Stdio::piped() } else { file.try_clone()?.into() };
        command.process_group(0).stdin(Stdio::null()).stdout(out).stderr(file);
        let (child, held) = make(|| {
            let child = command.spawn().with_context(|| format!("starting {name}"))?;
            let child = Arc::new(Mutex::new(child));
            Ok((Arc::clone(&child), Undo::Kill(child)))
        })?;
        let pid = lock(&child).id();
        Ok(Self { child, pid, log: log.to_owned(), name, held: Some(held) })
    }

    /// Its standard output, when it was asked for; once.
    pub fn output(&self) -> anyhow::Result<std::process::ChildStdout> {
        lock(&self.child).stdout.take().context("its output was asked for, once")
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How it ended, if it has.
    pub fn ended(&self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(lock(&self.child).try_wait()?)
    }

    /// Sends SIGKILL and does not wait: for killing several things at once.
    pub fn strike(&self) -> anyhow::Result<()> {
        Ok(lock(&self.child).kill()?)
    }

    /// Ends it as a power failure would.
    pub fn kill(mut self) {
        self.held.take();
    }

    /// Sends SIGTERM and waits for an end in order.
    pub fn stop(self, patience: Duration) -> anyhow::Result<()> {
        {
            let mut child = lock(&self.child);
            if child.try_wait()?.is_none() {
                let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
                kill_process(pid.context("it has a process number")?, Signal::TERM)?;
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

    /// Waits until it is ready. Errors call it by `name`: another program may have started it.
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

    /// CPU time that it has used, all threads; nothing when it is gone.
    pub fn cpu(&self) -> Duration {
        cpu_of(self.pid).unwrap_or_default()
    }

    /// The last lines that it said.
    pub fn said(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(3)..].join("; ")
    }
}

/// CPU time that a process has used, all threads, and its children with it.
pub fn cpu_of(pid: u32) -> Option<Duration> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields are counted from behind the name, which is in brackets: user and system time, and the
    // same of the children that have ended, are the 14th to 17th of all.
    let (_, rest) = text.rsplit_once(')')?;
    let fields = rest.split_whitespace().skip(11).take(4).map(str::parse::<u64>);
    let ticks: u64 = fields.collect::<Result<Vec<_>, _>>().ok()?.iter().sum();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| cpu_of(child.parse().ok()?));
    Some(Duration::from_millis(ticks * 1000 / USER_HZ) + children.sum())
}

/// Runs `work`. What it makes is undone at its end, at a signal and at a panic.
///
/// # Errors
/// Those of `work`.
pub fn protected(work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    protect()?;
    let outcome = work();
    crate::report::progress("");
    all();
    outcome
}
