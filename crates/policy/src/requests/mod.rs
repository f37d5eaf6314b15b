//! Rules of an administrator: which requests are cached, by who sent them, where they go and how
//! long they are. The first rule that matches decides; without one the cache decides by itself.
//!
//! What a rule asks of the sender is looked up once for each sender ([`RequestRules::of`]), what it
//! asks of the request for each request ([`RequestRules::decide`]).

mod sender;
mod text;

use std::ops::{Add, Range, RangeInclusive};

use forebay_block::{ByteRange, VolumeId};

pub use sender::{Network, Sender, SenderTest, UserId};
pub use text::{range_text, read_range, size_text};

/// Most rules of a cache.
pub const RULES_MAX: usize = 64;

/// What happens to a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Treatment {
    /// It is cached, even if it belongs to a sequential stream.
    Cache,
    /// It passes the cache: blocks that are cached are used, no others enter.
    Bypass,
}

/// One rule: a treatment, and the conditions that must all hold.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RequestRule {
    /// What happens to requests that match.
    pub treatment: Treatment,
    /// What is asked of the sender.
    pub sender: Vec<SenderTest>,
    /// The name of the volume; any when `None`.
    pub volume: Option<String>,
    /// Only reads, or only writes.
    pub direction: Option<Direction>,
    /// Where the request lies on the volume: it begins in these bytes.
    pub range: Option<Range<u64>>,
    /// Length of the request in bytes.
    pub size: Option<RangeInclusive<u64>>,
}

/// Reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// Reads.
    Read,
    /// Writes.
    Write,
}

/// The rules that ask nothing of a sender that it does not have, as a bitmap.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct RuleSet(u64);

/// The requests that a rule has decided on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RuleCount {
    /// Their number.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Add for RuleCount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { requests: self.requests + other.requests, bytes: self.bytes + other.bytes }
    }
}

/// Rules in their order, ready for use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RequestRules {
    rules: Vec<RequestRule>,
    /// The volumes of each rule.
    scopes: Vec<Scope>,
}

/// The volumes of a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scope {
    All,
    One(VolumeId),
    /// There is no volume with its name.
    None,
}

impl Scope {
    fn contains(self, volume: VolumeId) -> bool {
        match self {
            Self::All => true,
            Self::One(of) => of == volume,
            Self::None => false,
        }
    }
}

impl RequestRules {
    /// Rules whose volumes and users are known by name to `volume` and `user`. A rule with another
    /// volume never matches, nor does one with another user.
    ///
    /// # Panics
    /// If there are more than [`RULES_MAX`].
    #[must_use]
    pub fn new(
        rules: &[RequestRule],
        volume: impl Fn(&str) -> Option<VolumeId>,
        user: impl Fn(&str) -> Option<u32>,
    ) -> Self {
        assert!(rules.len() <= RULES_MAX, "{} rules, {RULES_MAX} at most", rules.len());
        let scope = |rule: &RequestRule| match rule.volume.as_deref().map(&volume) {
            None => Scope::All,
            Some(found) => found.map_or(Scope::None, Scope::One),
        };
        let scopes = rules.iter().map(scope).collect();
        let mut rules = rules.to_vec();
        let tests = rules.iter_mut().flat_map(|rule| &mut rule.sender);
        tests.for_each(|test| test.resolve(&user));
        Self { rules, scopes }
    }

    /// The rules, in their order.
    #[must_use]
    pub fn rules(&self) -> &[RequestRule] {
        &self.rules
    }

    /// Whether a rule asks for the process of a sender, or for what is known by it.
    #[must_use]
    pub fn ask_for_process(&self) -> bool {
        self.rules.iter().flat_map(|rule| &rule.sender).any(SenderTest::asks_for_process)
    }

    /// The rules that may match requests of a sender.
    #[must_use]
    pub fn of(&self, sender: &Sender) -> RuleSet {
        let hold = |rule: &RequestRule| rule.sender.iter().all(|test| test.holds(sender));
        let holding = self.rules.iter().enumerate().filter(|(_, rule)| hold(rule));
        RuleSet(holding.fold(0, |set, (at, _)| set | 1 << at))
    }

    /// The first of the rules in `set` that matches a request, and what it says.
    #[must_use]
    pub fn decide(
        &self,
        RuleSet(mut set): RuleSet,
        volume: VolumeId,
        direction: Direction,
        range: ByteRange,
    ) -> Option<(usize, Treatment)> {
        while set != 0 {
            let at = set.trailing_zeros() as usize;
            set &= set - 1;
            let rule = &self.rules[at];
            let matches = self.scopes[at].contains(volume)
                && rule.direction.is_none_or(|of| of == direction)
                && rule.range.as_ref().is_none_or(|of| of.contains(&range.offset))
                && rule.size.as_ref().is_none_or(|of| of.contains(&range.len));
            if matches {
                return Some((at, rule.treatment));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
