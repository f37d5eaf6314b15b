//! Who sends requests, and what a rule asks of it.

use std::net::IpAddr;

/// The sender of requests, as far as it is known.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sender {
    /// Name of its process: at most 15 bytes, as in `/proc/PID/comm`.
    pub process: Option<String>,
    /// Path of the program that the process runs.
    pub executable: Option<String>,
    /// Path of its control group, as in `/proc/PID/cgroup`: it begins with a slash.
    pub cgroup: Option<String>,
    /// Its user.
    pub user: Option<u32>,
    /// The address that it connected from.
    pub address: Option<IpAddr>,
    /// The names in its certificate.
    pub certificate: Vec<String>,
}

/// A user, by name or by number. A rule with a name that nobody has never matches.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct UserId {
    /// As it was written.
    pub text: String,
    /// Its number, once it is known.
    pub number: Option<u32>,
}

/// The addresses of a network.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Network {
    /// An address of the network.
    pub address: IpAddr,
    /// The number of leading bits that are the same for all.
    pub bits: u8,
}

impl Network {
    /// Whether an address belongs to it. An IPv4 address in the form of IPv6 counts as IPv4.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let [own, other] = [self.address, address].map(|address| address.to_canonical());
        let (own, other, width) = match (own, other) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                (u128::from(own.to_bits()), u128::from(other.to_bits()), 32)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits(), other.to_bits(), 128),
            _ => return false,
        };
        let free = u32::from(width - self.bits.min(width));
        (own ^ other).checked_shr(free).is_none_or(|differing| differing == 0)
    }
}

/// A condition on a sender. A sender of which the asked value is unknown does not meet it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum SenderTest {
    /// The name of its process. A `*` at the end stands for any rest, here and below.
    Process(String),
    /// The path of its program.
    Executable(String),
    /// Its control group, or one above it.
    Cgroup(String),
    /// Its user.
    User(UserId),
    /// Where it connects from.
    Client(Network),
    /// A name in its certificate.
    Certificate(String),
}

impl SenderTest {
    /// Looks up the number of a user.
    pub(super) fn resolve(&mut self, find: impl Fn(&str) -> Option<u32>) {
        if let Self::User(user) = self {
            user.number = user.text.parse().ok().or_else(|| find(&user.text));
        }
    }

    pub(super) fn asks_for_process(&self) -> bool {
        matches!(self, Self::Process(_) | Self::Executable(_) | Self::Cgroup(_))
    }

    pub(super) fn holds(&self, sender: &Sender) -> bool {
        let is = |found: &Option<String>, wanted: &str| {
            found.as_deref().is_some_and(|found| is_like(found, wanted))
        };
        match self {
            Self::Process(name) => is(&sender.process, name),
            Self::Executable(path) => is(&sender.executable, path),
            Self::Cgroup(path) => {
                sender.cgroup.as_deref().is_some_and(|found| is_below(found, path))
            }
            Self::User(user) => user.number.is_some() && user.number == sender.user,
            Self::Client(network) => sender.address.is_some_and(|at| network.contains(at)),
            Self::Certificate(name) => sender.certificate.iter().any(|own| is_like(own, name)),
        }
    }
}

fn is_like(found: &str, wanted: &str) -> bool {
    match wanted.strip_suffix('*') {
        Some(start) => found.starts_with(start),
        None => found == wanted,
    }
}

/// Whether a control group is the one at `path`, or below it.
fn is_below(found: &str, path: &str) -> bool {
    let [found, path] = [found, path].map(|path| path.trim_matches('/'));
    if path.ends_with('*') {
        return is_like(found, path);
    }
    let rest = found.strip_prefix(path);
    rest.is_some_and(|rest| rest.is_empty() || path.is_empty() || rest.starts_with('/'))
}
