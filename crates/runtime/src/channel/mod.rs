//! Channels to the kernel: clients without a connection. The kernel puts requests into memory that
//! a thread has lent to it, and takes the answers from there.
//!
//! A connection is a stream of bytes with a session; a [`Channel`] has its own way to the kernel,
//! on the thread's ring, and hands complete requests to the volumes. Each thread has its own part
//! of a mount or disk.

mod caller;
mod fuse;
mod prefetch;
mod ublk;

pub use caller::Caller;
pub use fuse::{Ask, FuseChannel, Mount};
pub use prefetch::{Prefetch, PrefetchProgress, Ranges};
pub use ublk::{Disk, UblkChannel};

use std::sync::Arc;

use forebay_block::{Completion, Endpoint, Instant, Io};
use forebay_policy::{RequestRules, RuleSet};
use forebay_volume::{ClientKey, Source};

use crate::message::End;

/// Marks the key of a channel, to tell it from the keys of the thread's connections; the other bits
/// are the channel's place.
const OURS: u64 = 1 << 63;

/// Takes a request for a volume, with the rules that may match it; returns it if there is no room
/// for it.
pub type Submit<'a> = dyn FnMut(RuleSet, Endpoint, Io) -> Result<(), Io> + 'a;

/// One thread's part of a way to the kernel. The thread calls the methods in the order of their
/// declaration, once or more in each turn. The tag of a request is the channel's own.
pub trait Channel {
    /// Processes the completions of the ring.
    fn reap(&mut self);

    /// Hands the requests for the volumes to `submit`, as far as there is room.
    fn feed(&mut self, submit: &mut Submit<'_>);

    /// Takes the completion of a request to a volume.
    fn complete(&mut self, done: Completion);

    /// Changes the rules for requests.
    fn set_rules(&mut self, _rules: &Arc<RequestRules>) {}

    /// Takes a text that it has asked for.
    fn told(&mut self, _key: u64, _text: Vec<u8>) {}

    /// Ends the turn: hands answers to the kernel. Returns true if the next turn must start at
    /// once.
    fn advance(&mut self) -> bool;

    /// When the next turn must come even if nothing happens.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Number of requests taken and not answered yet.
    fn in_flight(&self) -> usize;

    /// Takes no more requests from now on.
    fn shut(&mut self, end: End);

    /// Whether no request can come any more, so that it may be dropped.
    fn is_over(&self) -> bool {
        false
    }
}

/// The channels of one thread.
#[derive(Default)]
pub struct Channels {
    places: Vec<Option<Box<dyn Channel>>>,
    rules: Arc<RequestRules>,
}

impl Channels {
    /// The place of the channel that is added next.
    #[must_use]
    pub fn vacant(&self) -> usize {
        self.places.iter().position(Option::is_none).unwrap_or(self.places.len())
    }

    /// Adds a channel.
    pub fn add(&mut self, mut channel: impl Channel + 'static) {
        channel.set_rules(&self.rules);
        let place = self.vacant();
        if place == self.places.len() {
            self.places.push(None);
        }
        self.places[place] = Some(Box::new(channel));
    }

    /// Changes the rules for requests.
    pub fn set_rules(&mut self, rules: Arc<RequestRules>) {
        self.all().for_each(|channel| channel.set_rules(&rules));
        self.rules = rules;
    }

    /// Whether a key is a channel's.
    #[must_use]
    pub fn own(key: ClientKey) -> bool {
        key.0 & OURS != 0
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Box<dyn Channel>> {
        self.places.iter_mut().flatten()
    }

    /// Processes the completions of the ring.
    pub fn reap(&mut self) {
        self.all().for_each(|channel| channel.reap());
    }

    /// Hands requests for the volumes to `submit`, which returns one if there is no room for it.
    pub fn feed(
        &mut self,
        now: Instant,
        mut submit: impl FnMut(Source, Endpoint, Io) -> Result<(), Io>,
    ) {
        for (place, channel) in self.places.iter_mut().enumerate() {
            let Some(channel) = channel else { continue };
            let client = ClientKey(OURS | place as u64);
            let source = |rules| Source { client, rules, arrived: now };
            channel.feed(&mut |rules, endpoint, io| submit(source(rules), endpoint, io));
        }
    }

    /// Hands a completed request to its channel.
    pub fn complete(&mut self, key: ClientKey, done: Completion) {
        let channel = self.places[(key.0 & !OURS) as usize].as_mut();
        channel.expect("a channel lives while it has requests").complete(done);
    }

    /// Hands a text to the channel that asked for it.
    pub fn told(&mut self, place: usize, key: u64, text: Vec<u8>) {
        if let Some(channel) = &mut self.places[place] {
            channel.told(key, text);
        }
    }

    /// Ends the turn, and drops the channels that are over. Returns true if the next turn must
    /// start at once.
    pub fn advance(&mut self) -> bool {
        let at_once = self.all().fold(false, |at_once, channel| channel.advance() | at_once);
        for place in &mut self.places {
            place.take_if(|channel| channel.is_over() && channel.in_flight() == 0);
        }
        at_once
    }

    /// When the next turn must come even if nothing happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.places.iter().flatten().filter_map(|channel| channel.deadline()).min()
    }

    /// Number of requests not answered yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.places.iter().flatten().map(|channel| channel.in_flight()).sum()
    }

    /// Takes no more requests from now on.
    pub fn shut(&mut self, end: End) {
        self.all().for_each(|channel| channel.shut(end));
    }
}
