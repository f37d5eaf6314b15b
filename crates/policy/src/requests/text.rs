//! Rules as text: the treatment, then conditions as `key=value`, as in
//! `bypass process=restic operation=read`.

use std::fmt;
use std::mem::discriminant;
use std::net::IpAddr;
use std::ops::{Range, RangeInclusive};
use std::str::FromStr;

use super::{Direction, Network, RequestRule, SenderTest, Treatment, UserId};

/// The conditions, for messages.
const KEYS: &str = "process, executable, cgroup, user, client, certificate, volume, operation, \
                    range, size";

/// Maximum length of a rule, in bytes.
const TEXT_MAX: usize = 1024;

impl FromStr for RequestRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() > TEXT_MAX {
            return Err(format!("the rule {:.40}... is longer than {TEXT_MAX} bytes", text));
        }
        let mut words = words(text)?.into_iter();
        let treatment = match words.next().as_deref() {
            Some("cache") => Treatment::Cache,
            Some("bypass") => Treatment::Bypass,
            _ => {
                let how = "a rule begins with cache or bypass, as in \"bypass process=restic\"";
                return Err(format!("{text:?} is not a rule: {how}"));
            }
        };
        let (volume, direction, range, size) = (None, None, None, None);
        let mut rule = Self { treatment, sender: Vec::new(), volume, direction, range, size };
        for word in words {
            let Some((key, value)) = word.split_once('=').filter(|(_, value)| !value.is_empty())
            else {
                return Err(format!("{word:?} is not a condition; write KEY=VALUE"));
            };
            rule.add(key, value).map_err(|what| format!("{word:?}: {what}"))?;
        }
        Ok(rule)
    }
}

impl RequestRule {
    fn add(&mut self, key: &str, value: &str) -> Result<(), String> {
        let own = || value.to_owned();
        let test = match key {
            "process" => SenderTest::Process(own()),
            "executable" => SenderTest::Executable(own()),
            "cgroup" => SenderTest::Cgroup(own()),
            "user" => SenderTest::User(UserId { text: own(), number: None }),
            "client" => SenderTest::Client(network(value)?),
            "certificate" => SenderTest::Certificate(own()),
            "volume" => return once(&mut self.volume, own()),
            "operation" => return once(&mut self.direction, direction(value)?),
            "range" => return once(&mut self.range, read_range(value)?),
            "size" => return once(&mut self.size, sizes(value)?),
            _ => return Err(format!("there is no condition {key:?}; use one of: {KEYS}")),
        };
        if self.sender.iter().any(|known| discriminant(known) == discriminant(&test)) {
            return Err(TWICE.to_owned());
        }
        self.sender.push(test);
        Ok(())
    }
}

const TWICE: &str = "it is given twice; write a rule for each value";

fn once<T>(place: &mut Option<T>, value: T) -> Result<(), String> {
    if place.replace(value).is_some() { Err(TWICE.to_owned()) } else { Ok(()) }
}

/// The words of a rule, separated by spaces. Quotes keep spaces together, and are removed.
fn words(text: &str) -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    let (mut word, mut quoted) = (None::<String>, false);
    for c in text.chars() {
        match c {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            ';' => return Err(format!("{text:?} has a semicolon; it separates rules")),
            c if c.is_control() => return Err(format!("{text:?} has a control character")),
            ' ' if !quoted => all.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    if quoted {
        return Err(format!("{text:?} lacks a closing quote"));
    }
    all.extend(word);
    Ok(all)
}

fn direction(text: &str) -> Result<Direction, String> {
    match text {
        "read" => Ok(Direction::Read),
        "write" => Ok(Direction::Write),
        _ => Err("use read or write".to_owned()),
    }
}

fn network(text: &str) -> Result<Network, String> {
    let wrong = || "use an address or a network, as in 10.0.0.0/8 or fd00::/8".to_owned();
    let (address, bits) = text.split_once('/').map_or((text, None), |(a, b)| (a, Some(b)));
    let address: IpAddr = address.parse().map_err(|_| wrong())?;
    let width = if address.is_ipv4() { 32 } else { 128 };
    let bits = bits.map_or(Ok(width), |bits| bits.parse().map_err(|_| wrong()))?;
    if bits > width { Err(wrong()) } else { Ok(Network { address, bits }) }
}

/// The bytes from one place to another, as in `1GiB..2GiB`, `..1GiB` or `2GiB..`.
///
/// # Errors
/// When it is malformed or empty; the message says how to write it.
pub fn read_range(text: &str) -> Result<Range<u64>, String> {
    let wrong = || "use two places on the volume, as in 1GiB..2GiB, ..1GiB or 2GiB..".to_owned();
    let bounds = text.split_once("..").and_then(bounds);
    let (from, to) = bounds.ok_or_else(wrong)?;
    if from < to { Ok(from..to) } else { Err("it ends before it begins".to_owned()) }
}

/// Sizes as in `4KiB`, which is that size, `..4KiB`, which includes it, or `64KiB..128KiB`.
fn sizes(text: &str) -> Result<RangeInclusive<u64>, String> {
    let wrong = || "use sizes, as in 4KiB, ..4KiB, 64KiB..128KiB or 1MiB..".to_owned();
    let found = match text.split_once("..") {
        None => bytes(text).map(|size| (size, size)),
        Some(both) => bounds(both),
    };
    let (from, to) = found.ok_or_else(wrong)?;
    if from <= to { Ok(from..=to) } else { Err("the first size is the larger one".to_owned()) }
}

/// Two bounds, of which the first may be absent for 0, and the second for no bound.
fn bounds((from, to): (&str, &str)) -> Option<(u64, u64)> {
    let bound = |text: &str, open| if text.is_empty() { Some(open) } else { bytes(text) };
    Some((bound(from, 0)?, bound(to, u64::MAX)?))
}

const UNITS: [(&str, u32); 5] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("", 0)];

fn bytes(text: &str) -> Option<u64> {
    let mut units = UNITS.iter();
    let (number, bits) = units.find_map(|&(unit, bits)| Some((text.strip_suffix(unit)?, bits)))?;
    number.parse::<u64>().ok()?.checked_mul(1 << bits)
}

/// A size as text: in the largest unit that is exact.
pub fn size_text(bytes: u64) -> impl fmt::Display + use<> {
    Exact(bytes)
}

struct Exact(u64);

impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits =
            |&&(_, bits): &&(&str, u32)| bits == 0 || self.0 > 0 && self.0.trailing_zeros() >= bits;
        let &(unit, bits) = UNITS.iter().find(fits).expect("the last fits all");
        write!(f, "{}{unit}", self.0 >> bits)
    }
}

impl fmt::Display for RequestRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.treatment {
            Treatment::Cache => "cache",
            Treatment::Bypass => "bypass",
        })?;
        for test in &self.sender {
            match test {
                SenderTest::Process(name) => pair(f, "process", name)?,
                SenderTest::Executable(path) => pair(f, "executable", path)?,
                SenderTest::Cgroup(path) => pair(f, "cgroup", path)?,
                SenderTest::User(user) => pair(f, "user", &user.text)?,
                SenderTest::Client(Network { address, bits }) => {
                    write!(f, " client={address}/{bits}")?;
                }
                SenderTest::Certificate(name) => pair(f, "certificate", name)?,
            }
        }
        if let Some(volume) = &self.volume {
            pair(f, "volume", volume)?;
        }
        match self.direction {
            Some(Direction::Read) => f.write_str(" operation=read")?,
            Some(Direction::Write) => f.write_str(" operation=write")?,
            None => {}
        }
        if let Some(range) = &self.range {
            write!(f, " range={}", range_text(range))?;
        }
        match &self.size {
            Some(size) if size.start() == size.end() => write!(f, " size={}", Exact(*size.start())),
            Some(size) => write!(f, " size={}", Bounds(*size.start(), *size.end())),
            None => Ok(()),
        }
    }
}

fn pair(f: &mut fmt::Formatter<'_>, key: &str, value: &str) -> fmt::Result {
    let quote = if value.contains(' ') { "\"" } else { "" };
    write!(f, " {key}={quote}{value}{quote}")
}

/// A range as [`read_range`] reads it.
pub fn range_text(range: &Range<u64>) -> impl fmt::Display + use<> {
    Bounds(range.start, range.end)
}

/// Two bounds; 0 and the largest number are left out.
struct Bounds(u64, u64);

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > 0 {
            write!(f, "{}", Exact(self.0))?;
        }
        f.write_str("..")?;
        if self.1 < u64::MAX {
            write!(f, "{}", Exact(self.1))?;
        }
        Ok(())
    }
}
