//! Who sends requests: what the kernel knows of the processes and peers behind them, for rules.
//!
//! A process is looked up in `/proc`, at most every [`KNOWN_TIME`]: it may run another program by
//! then, or its number may belong to another process.

use std::collections::HashMap;
use std::fs;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_block::Instant;
use forebay_policy::{RequestRules, RuleSet, Sender};
use rustix::net::sockopt;

/// How long a looked-up process is believed to be the same.
const KNOWN_TIME: Duration = Duration::from_secs(10);
/// Most processes that a thread remembers.
const KNOWN_MAX: usize = 4096;

/// The sender at the other end of a socket, as of now: for a Unix socket the process that has
/// connected, for TCP its address.
#[must_use]
pub fn of_socket(socket: BorrowedFd<'_>) -> Sender {
    if let Ok(peer) = sockopt::socket_peercred(socket)
        && let Ok(pid) = u32::try_from(peer.pid.as_raw_nonzero().get())
    {
        return Sender { user: Some(peer.uid.as_raw()), ..of_process(Path::new("/proc"), pid) };
    }
    let address = rustix::net::getpeername(socket).ok().flatten();
    let address = address.and_then(|any| std::net::SocketAddr::try_from(any).ok());
    let address: Option<IpAddr> = address.map(|at| at.ip());
    Sender { address, ..Sender::default() }
}

/// What `proc`, usually `/proc`, says of the process that thread `id` belongs to. All of it is
/// unknown if there is no such thread.
fn of_process(proc: &Path, id: u32) -> Sender {
    let read = |path: PathBuf| fs::read_to_string(path).ok();
    let status = read(proc.join(id.to_string()).join("status")).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|values| values.split_whitespace().next()?.parse::<u32>().ok())
    };
    let Some(process) = field("Tgid:") else { return Sender::default() };
    let process = proc.join(process.to_string());
    let cgroups = read(process.join("cgroup")).unwrap_or_default();
    // The line of version 2, else that of systemd in version 1.
    let cgroup = |of: &str| cgroups.lines().find_map(|line| line.split_once(of).map(|(_, at)| at));
    Sender {
        process: read(process.join("comm")).map(|name| name.trim_end_matches('\n').to_owned()),
        executable: fs::read_link(process.join("exe")).ok().map(executable),
        cgroup: cgroup("0::").or_else(|| cgroup(":name=systemd:")).map(str::to_owned),
        user: field("Uid:"),
        ..Sender::default()
    }
}

/// The path of a program, also if its file has been replaced since it was started.
fn executable(path: PathBuf) -> String {
    let path = path.to_string_lossy();
    path.strip_suffix(" (deleted)").unwrap_or(&path).to_owned()
}

/// The rules for each process that sends requests through the kernel.
#[derive(Default)]
pub struct Processes {
    rules: Arc<RequestRules>,
    /// Whether the rules ask for more than the user.
    look_up: bool,
    /// By number of the thread and its user: the rules, and since when they are known.
    known: HashMap<(u32, u32), (RuleSet, Instant)>,
}

impl Processes {
    /// Changes the rules.
    pub fn set_rules(&mut self, rules: &Arc<RequestRules>) {
        self.look_up = rules.ask_for_process();
        self.rules = Arc::clone(rules);
        self.known.clear();
    }

    /// The rules that may match requests of this thread, 0 if the kernel did not say which, and
    /// user.
    pub fn rules_of(&mut self, now: Instant, thread: u32, user: u32) -> RuleSet {
        if self.rules.rules().is_empty() {
            return RuleSet::default();
        }
        // Without a need to know them apart, all threads of a user are one.
        let key = (if self.look_up { thread } else { 0 }, user);
        if let Some(&(rules, since)) = self.known.get(&key)
            && now.since(since) < KNOWN_TIME
        {
            return rules;
        }
        let mut sender = Sender { user: Some(user), ..Sender::default() };
        if self.look_up && thread != 0 {
            sender = Sender { user: Some(user), ..of_process(Path::new("/proc"), thread) };
        }
        let rules = self.rules.of(&sender);
        if self.known.len() >= KNOWN_MAX {
            self.known.clear();
        }
        self.known.insert(key, (rules, now));
        rules
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use forebay_block::{ByteRange, VolumeId};
    use forebay_policy::Direction;

    use super::*;
    use crate::testing::TempDir;

    fn rules(text: &str) -> Arc<RequestRules> {
        let rule = text.parse().unwrap();
        Arc::new(RequestRules::new(&[rule], |_| None, |_| None))
    }

    fn matches(rules: &RequestRules, set: RuleSet) -> bool {
        let range = ByteRange::new(0, 4096);
        rules.decide(set, VolumeId(0), Direction::Read, range).is_some()
    }

    #[test]
    fn this_process_is_known_by_its_socket_and_its_threads() {
        let (one, _other) = UnixStream::pair().unwrap();
        let own = of_socket(one.as_fd());
        let name = fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!(own.process.as_deref(), Some(name.trim_end()));
        let program = std::env::current_exe().unwrap();
        assert_eq!(own.executable.as_deref(), program.to_str());
        assert_eq!(own.user, Some(rustix::process::geteuid().as_raw()));
        // A thread has its own name, and is the same process.
        let thread = std::thread::Builder::new().name("other".to_owned());
        let of_thread = thread.spawn(|| {
            let id = rustix::thread::gettid().as_raw_nonzero().get();
            of_process(Path::new("/proc"), id as u32)
        });
        assert_eq!(of_thread.unwrap().join().unwrap(), own);
    }

    #[test]
    fn addresses_are_known() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let found = of_socket(stream.as_fd());
        assert_eq!(found.address, Some("127.0.0.1".parse().unwrap()));
        assert_eq!((found.process, found.user), (None, None));
    }

    #[test]
    fn both_versions_of_control_groups_are_read() {
        let dir = TempDir::new();
        let proc = dir.path("");
        fs::create_dir(proc.join("7")).unwrap();
        fs::write(proc.join("7/status"), "Name:\tx\nTgid:\t7\nUid:\t34\t0\t0\t0\n").unwrap();
        fs::write(proc.join("7/cgroup"), "1:name=systemd:/a.slice\n0::/b.slice/c\n").unwrap();
        let found = of_process(&proc, 7);
        assert_eq!((found.cgroup.as_deref(), found.user), (Some("/b.slice/c"), Some(34)));
        fs::write(proc.join("7/cgroup"), "12:cpu:/x\n1:name=systemd:/a.slice\n").unwrap();
        assert_eq!(of_process(&proc, 7).cgroup.as_deref(), Some("/a.slice"));
        assert_eq!(of_process(&proc, 8), Sender::default());
        assert_eq!(executable("/usr/bin/x (deleted)".into()), "/usr/bin/x");
    }

    #[test]
    fn a_process_is_looked_up_again_after_a_while() {
        let (rules, own) = (rules("bypass process=*"), std::process::id());
        let mut known = Processes::default();
        let at = |known: &mut Processes, seconds, thread| {
            let now = Instant::default() + Duration::from_secs(seconds);
            matches(&rules, known.rules_of(now, thread, 0))
        };
        assert!(!at(&mut known, 0, own), "there are no rules yet");
        known.set_rules(&rules);
        assert!(at(&mut known, 0, own));
        assert!(!at(&mut known, 0, 0), "the kernel itself has no name");
        let gone = std::process::Command::new("true").spawn().unwrap();
        let id = gone.id();
        assert!(at(&mut known, 0, id));
        gone.wait_with_output().unwrap();
        assert!(at(&mut known, 9, id));
        assert!(!at(&mut known, 10, id));
    }

    #[test]
    fn by_user_alone_nothing_is_looked_up() {
        let rules = rules("bypass user=34");
        let mut known = Processes::default();
        known.set_rules(&rules);
        for thread in 1..100 {
            assert!(matches(&rules, known.rules_of(Instant::default(), thread, 34)));
            assert!(!matches(&rules, known.rules_of(Instant::default(), thread, 35)));
        }
        assert_eq!(known.known.len(), 2);
    }
}
