//! Several shards, each with its own connection to one NBD server, through the real sessions,
//! lines, debts, gates and devices of the runtime. The server loses power, links break, old
//! requests and answers arrive late, threads are held up, and the process with the shards is killed
//! and starts again.
//!
//! The promise: writes that a shard had completed when it requested a flush that then succeeded are
//! never lost, whatever happens afterwards: neither by a server that had them in its cache, nor by
//! an older request that lands on top of them. Once the troubles end, everything is written and
//! flushed soon.

mod net;
mod queue;
mod shard;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use forebay_block::{DeviceInfo, Instant, SECTOR_SIZE};
use forebay_device::{Debts, Ledger, Line, STRAGGLE_MAX, Terms};
use forebay_nbd_wire::TransmissionFlags;
use forebay_runtime::{Devices, Gates, Message, gates};

use forebay_volume::Coming;

use crate::rng::Rng;
use net::{Event, MS, Net};
use queue::SimQueue;
use shard::{SECTORS, Shard, TARGET};

/// Virtual time in which troubles occur.
const ROUGH: u64 = 30_000 * MS;
/// Virtual time after which everything must be safe again: a silent server alone takes a minute.
const CALM: u64 = 120_000 * MS;
/// Longest time between two troubles.
const PAUSE_MAX: u64 = 4_000 * MS;
/// Shortest time between two turns of a thread that only a deadline wakes.
const TURN: u64 = MS / 100;
/// One seed in this many has a process that is killed.
const KILLS_IN: u64 = 4;
/// Failed flushes that a shard may meet after the troubles: those of breaks that are noticed late,
/// and for each of them one more for the changes then in flight.
const AFTERMATH: u64 = 10;

/// A deliberate mistake that must be detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slip {
    /// A flush over any connection covers all of them, but each connection keeps its own debts.
    DebtsApart,
    /// A flush over any connection covers all of them.
    FlushElsewhere,
    /// A broken connection's requests are not waited for.
    NoParting,
    /// A shard is not told of the failed flushes of others.
    Deaf,
    /// Requests of a process that was killed are not waited for.
    ChangesNotHeld,
}

impl Slip {
    /// Every slip.
    pub const ALL: [Self; 5] =
        [Self::DebtsApart, Self::FlushElsewhere, Self::NoParting, Self::Deaf, Self::ChangesNotHeld];
}

/// Counters of runs.
#[derive(Clone, Copy, Default, Debug)]
pub struct Tally {
    /// Number of runs.
    pub seeds: u64,
    /// Power failures, broken links, failed flushes on the server, processes killed.
    pub troubles: [u64; 4],
    /// Shards' flushes that succeeded, and that failed.
    pub flushes: [u64; 2],
}

impl Tally {
    /// Adds the counters of another run.
    pub fn add(&mut self, other: &Self) {
        self.seeds += other.seeds;
        for i in 0..4 {
            self.troubles[i] += other.troubles[i];
        }
        for i in 0..2 {
            self.flushes[i] += other.flushes[i];
        }
    }
}

struct World {
    net: Rc<RefCell<Net>>,
    terms: Terms,
    shards: Vec<Shard>,
    /// For each shard, when its devices next need a turn, if that is scheduled.
    due: Vec<u64>,
    rng: Rng,
    /// Whether the process with the shards is killed now and then.
    kills: bool,
    slip: Option<Slip>,
}

/// Runs one seed.
///
/// # Errors
/// A description of the broken promise.
pub fn run(seed: u64, slip: Option<Slip>) -> Result<Tally, String> {
    let mut world = World::new(seed, slip);
    world.play(ROUGH, false)?;
    world.net.borrow_mut().heal();
    let failures: Vec<u64> = world.shards.iter().map(|shard| shard.failures).collect();
    world.play(ROUGH + CALM, true)?;
    for (i, shard) in world.shards.iter().enumerate() {
        let more = shard.failures - failures[i];
        if more > AFTERMATH {
            return Err(format!("shard {i}: {more} failed flushes when all was well"));
        }
    }
    world.net.borrow_mut().cut_power();
    world.check()?;
    let mut tally = Tally { seeds: 1, ..Tally::default() };
    tally.troubles = world.net.borrow().troubles;
    for shard in &world.shards {
        tally.flushes[0] += shard.flushes[0];
        tally.flushes[1] += shard.flushes[1];
    }
    Ok(tally)
}

impl World {
    fn new(seed: u64, slip: Option<Slip>) -> Self {
        let mut rng = Rng::new(seed);
        let count = 2 + rng.below(3);
        let size = count * SECTORS * SECTOR_SIZE as u64;
        let net = Rc::new(RefCell::new(Net::new(size, rng.fork())));
        let flags = TransmissionFlags::HAS_FLAGS
            .with(TransmissionFlags::SEND_FLUSH)
            .with(TransmissionFlags::CAN_MULTI_CONN);
        let (minimum, preferred, maximum) = (1, 4096, 1 << 20);
        let terms = Terms { size, flags, structured: false, minimum, preferred, maximum };
        let opened = open(&net, terms, count as usize, (slip, false));
        let shards = opened
            .enumerate()
            .map(|(shard, (devices, coming))| Shard::new(devices, coming, shard as u64 * SECTORS));
        let shards: Vec<Shard> = shards.collect();
        for shard in 0..shards.len() {
            net.borrow_mut().at(0, Event::Tick(shard));
        }
        net.borrow_mut().at(rng.below(PAUSE_MAX), Event::Trouble);
        let due = vec![u64::MAX; shards.len()];
        Self { net, terms, shards, due, rng, kills: seed.is_multiple_of(KILLS_IN), slip }
    }

    /// Processes events until a time; if `settling`, until everything is safe.
    fn play(&mut self, until: u64, settling: bool) -> Result<(), String> {
        let mut settled = vec![false; self.shards.len()];
        loop {
            let event = self.net.borrow_mut().next();
            let now = self.net.borrow().now;
            match event {
                _ if now > until && settling => {
                    let states: Vec<_> = self.shards.iter().map(Shard::state).collect();
                    return Err(format!("long after the last trouble not all is safe: {states:?}"));
                }
                None => return Err("nothing happens any more".to_owned()),
                Some(Event::Trouble) if !settling => self.trouble()?,
                Some(event @ (Event::Turn(shard) | Event::Tick(shard))) => {
                    let tick = matches!(event, Event::Tick(_));
                    let safe = self.turn(shard, tick, settling);
                    if tick {
                        settled[shard] = safe;
                        let pause = if settling { 100 * MS } else { 20 * MS };
                        let at = now + 1 + self.rng.below(pause);
                        self.net.borrow_mut().at(at, Event::Tick(shard));
                    }
                    if settling && settled.iter().all(|&done| done) {
                        return Ok(());
                    }
                }
                Some(_) => {}
            }
            if now > until {
                return Ok(());
            }
        }
    }

    /// Kills the process with the shards, which starts again.
    fn kill(&mut self) {
        self.net.borrow_mut().kill_client();
        let opened = open(&self.net, self.terms, self.shards.len(), (self.slip, true));
        for (shard, (devices, coming)) in self.shards.iter_mut().zip(opened) {
            shard.start_again(devices, coming);
        }
    }

    fn trouble(&mut self) -> Result<(), String> {
        if self.kills && self.rng.percent(20) {
            self.kill();
        }
        let size = self.shards.len() as u64 * SECTORS * SECTOR_SIZE as u64;
        let (power, at) = {
            let mut net = self.net.borrow_mut();
            let before = net.troubles[0];
            net.trouble(0..size);
            (net.troubles[0] > before, net.now + self.rng.below(PAUSE_MAX))
        };
        self.net.borrow_mut().at(at, Event::Trouble);
        if power { self.check() } else { Ok(()) }
    }

    /// Checks after a power failure that all safe data, or newer data, is there.
    fn check(&self) -> Result<(), String> {
        let net = self.net.borrow();
        for (i, shard) in self.shards.iter().enumerate() {
            for (at, sector) in shard.sectors.iter().enumerate() {
                let found = net.stamp(shard.first + at as u64);
                if found < sector.safe {
                    return Err(format!(
                        "shard {i}, sector {at}: {} was flushed, {found} is there after a power \
                         failure at {} ms",
                        sector.safe,
                        net.now / MS
                    ));
                }
            }
        }
        Ok(())
    }

    /// Runs a shard's turn; if `settling`, returns whether all its data is safe.
    fn turn(&mut self, shard: usize, tick: bool, settling: bool) -> bool {
        let now = Instant(self.net.borrow().now);
        let mut outgoing: Vec<Vec<Message>> = self.shards.iter().map(|_| Vec::new()).collect();
        let wants = if tick && !settling { self.rng.below(4) as usize } else { 0 };
        let deaf = self.slip == Some(Slip::Deaf);
        self.shards[shard].turn(now, (wants, deaf), &mut self.rng, &mut outgoing);
        let settled = settling && tick && self.shards[shard].settle(now);
        for (to, messages) in outgoing.into_iter().enumerate() {
            if !messages.is_empty() {
                self.shards[to].inbox.extend(messages);
                let at = now.0 + 1 + self.rng.below(MS / 2);
                self.net.borrow_mut().at(at, Event::Turn(to));
            }
        }
        if self.due[shard] <= now.0 {
            self.due[shard] = u64::MAX;
        }
        if let Some(at) = self.shards[shard].devices.deadline() {
            let at = at.0.max(now.0 + TURN);
            if at < self.due[shard] {
                self.due[shard] = at;
                self.net.borrow_mut().at(at, Event::Turn(shard));
            }
        }
        settled
    }
}

/// The devices of a process with `count` shards, which follows one that was killed or is the first.
fn open(
    net: &Rc<RefCell<Net>>,
    terms: Terms,
    count: usize,
    (slip, follows): (Option<Slip>, bool),
) -> impl Iterator<Item = (Devices, Coming)> {
    let elsewhere = matches!(slip, Some(Slip::DebtsApart | Slip::FlushElsewhere));
    let plain = DeviceInfo::plain(terms.size, "simulated");
    let info = DeviceInfo { flush_by_queue: !elsewhere, ..plain };
    let gates: Gates = gates([&info].into_iter(), count);
    let debts: Arc<Mutex<Debts>> = Arc::default();
    let net = Rc::clone(net);
    (0..count).map(move |shard| {
        let apart = slip == Some(Slip::DebtsApart);
        let debts = if apart { Arc::default() } else { Arc::clone(&debts) };
        let mut line = Line::new(info.clone(), Ledger::open(&debts));
        if follows && slip != Some(Slip::ChangesNotHeld) {
            line.hold_changes(STRAGGLE_MAX);
        }
        let waits = slip != Some(Slip::NoParting);
        let queue = SimQueue::new(&net, shard, line, terms, waits);
        let devices = Devices::over(vec![(TARGET, Box::new(queue))], (shard, gates.clone()));
        (devices, gates.coming.clone())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most seeds in which a slip may stay hidden.
    const SLIP_SEEDS: u64 = 4000;

    #[test]
    fn nothing_that_was_flushed_is_lost_to_servers_and_links() {
        let mut total = Tally::default();
        for seed in 0..300 {
            let tally = run(seed, None).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
            total.add(&tally);
        }
        assert!(total.troubles.iter().all(|&count| count > 150), "{total:?}");
        assert!(total.flushes.iter().all(|&count| count > 3000), "{total:?}");
    }

    #[test]
    fn slips_lose_what_was_flushed() {
        for slip in Slip::ALL {
            let mut failures = (0..SLIP_SEEDS).filter_map(|seed| run(seed, Some(slip)).err());
            assert!(failures.any(|why| why.contains("was flushed")), "{slip:?} was not found");
        }
    }
}
