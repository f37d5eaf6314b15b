//! One shard thread: its ring, its shard, its router and its clients, turned by one loop.
//!
//! The steps of a turn: completions of devices go to the shard; messages of other threads are
//! processed; bytes of clients go to their sessions, and the requests in them through the router to
//! the shards; answers return the same way; the shard does its own work (it closes the records of
//! this turn); then everything outgoing is sent at once, and the thread sleeps until something
//! happens. Large requests get only their share of each turn (`pace`), however many wait. A request
//! for a block of the thread's own shard never leaves the thread.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use forebay_block::sync::Mutex;
use forebay_block::{Arena, BufPool, Instant, IoOp, VolumeId};
use forebay_device::{BlockDevice, Clock, Ring};
use forebay_engine::{
    CutReport, Effects, Reply, Request, Shard, State, Stats, Target, Trust, VolumeState,
};
use forebay_volume::{Coming, CutGate, Done, Registry, Router, RouterConfig, ShardPort, origin_of};

use crate::channel::{Caller, Channels, FuseChannel, Prefetch, UblkChannel};
use crate::clients::{Arrival, Clients};
use crate::connection::LeftClient;
use crate::connection::Patience;
use crate::devices::{Devices, Gates, locked};
use crate::events::EventSink;
use crate::mailbox::{CREDIT, Mailbox};
use crate::memory::Memory;
use crate::message::{
    Command, Latencies, Message, Snapshot, TierLatencies, count_latency, count_tier,
};
use crate::pace::{Allowance, LARGE};
use crate::places::Places;
use crate::pool::Untold;
use crate::record::Taps;
use crate::rest::{Rest, thread_cpu};
use crate::witness::Asked;

/// Submissions that a ring accepts between two turns.
const RING_ENTRIES: u32 = 1024;
/// Requests that the shard sees ahead of time.
const AHEAD: usize = 32;

/// A time that is long, compared with the rest of a turn after its last look at the clock.
const FAR: Duration = Duration::from_micros(500);

/// Reason why a failure of the ring is not handled.
const RING_WORKS: &str = "the ring of a shard thread works";

/// The parts of a thread. Everything in it may cross to the thread; the rest is created there.
pub struct Plan {
    /// Index of the thread and its shard.
    pub index: usize,
    /// The pool's clock.
    pub clock: Clock,
    /// Memory for buffers.
    pub arena: Arc<Arena>,
    /// The cache device.
    pub cache: Option<Arc<dyn BlockDevice>>,
    /// The primary of each volume.
    pub primaries: Vec<(VolumeId, Arc<dyn BlockDevice>)>,
    /// The gates of the devices.
    pub gates: Gates,
    /// The volumes.
    pub registry: Arc<Registry>,
    /// All threads' mailboxes.
    pub mailboxes: Arc<[Mailbox<Message>]>,
    /// The clients' places.
    pub places: Arc<Places>,
    /// The clients' memory.
    pub memory: Arc<Memory>,
    /// How long clients may take.
    pub patience: Patience,
    /// Creates the shard.
    pub shard: Box<dyn FnOnce(BufPool) -> Box<dyn Shard> + Send>,
    /// Whether the kernel's requests may come over the ring.
    pub wide: bool,
    /// Receives facts that must be recorded outside of the cache device.
    pub witness: Sender<(usize, Asked)>,
    /// Receives the shard's events.
    pub events: EventSink,
    /// Told of losses.
    pub untold: Option<Untold>,
}

/// The outcome of a thread's start.
#[derive(Debug)]
pub enum Started {
    /// Its shard serves.
    Serving,
    /// Its ring or a queue could not be opened.
    Failed(io::Error),
    /// Its shard cannot use the cache; the reason.
    Refused(String),
}

/// Runs a shard until it is stopped; reports its start to `started`.
pub fn run(plan: Plan, started: Sender<(usize, Started)>) {
    let index = plan.index;
    let mailboxes = Arc::clone(&plan.mailboxes);
    match Thread::new(plan) {
        Ok(mut thread) => {
            thread.begin(started);
            while !thread.over {
                thread.turn();
            }
        }
        Err(error) => {
            let _ = started.send((index, Started::Failed(error)));
        }
    }
    mailboxes[index].close();
}

struct Thread {
    rest: Rest,
    clock: Clock,
    /// The last look at the clock.
    looked: Instant,
    ring: Rc<Ring>,
    devices: Devices,
    router: Router,
    registry: Arc<Registry>,
    clients: Clients,
    channels: Channels,
    buffers: BufPool,
    mailboxes: Arc<[Mailbox<Message>]>,
    shards: Shards,
    /// For each volume ID, the gate of its cuts.
    cuts: Arc<[Mutex<CutGate>]>,
    witness: Sender<(usize, Asked)>,
    events: EventSink,
    /// The losses that no flush has been told of, as `tell_untold` knows them.
    untold: u64,
    tell_untold: Option<Untold>,
    /// The trust that the witness was last asked to record.
    wanted: Option<Trust>,
    inbox: Vec<Message>,
    arrivals: Vec<Arrival>,
    done: Vec<Done>,
    /// Index in the registry by volume id.
    places: Vec<usize>,
    latencies: Vec<Latencies>,
    tier_latencies: Vec<TierLatencies>,
    taps: Taps,
    duties: Duties,
    /// Whether client input waits for the next turn.
    at_once: bool,
    over: bool,
}

/// Senders to notify when this thread reaches a state.
#[derive(Default)]
struct Duties {
    started: Option<Sender<(usize, Started)>>,
    quiesced: Option<Sender<Vec<LeftClient>>>,
    /// Whether the clients that were not quiet in time are cut off.
    is_cut_off: bool,
    stopped: Option<Sender<Snapshot>>,
}

/// A line of long requests, of which each turn takes only as many bytes as it has time for.
struct Paced {
    waiting: VecDeque<Request>,
    /// The bytes left in this turn.
    allowance: Allowance,
}

impl Paced {
    fn new() -> Self {
        Self { waiting: VecDeque::new(), allowance: Allowance::FULL }
    }

    /// The next request, if this turn has time for it.
    fn next(&mut self) -> Option<Request> {
        let request = self.allowance.is_left().then(|| self.waiting.pop_front()).flatten()?;
        self.allowance.spend(usize::try_from(request.range.len).unwrap_or(usize::MAX));
        Some(request)
    }
}

/// Connections to all shards: the thread's own one directly, the others through mailboxes.
struct Shards {
    own: usize,
    now: Instant,
    shard: Box<dyn Shard>,
    fx: Effects,
    /// When the own shard needs to be polled.
    deadline: Option<Instant>,
    /// Whether the own shard received anything since its last poll.
    unpolled: bool,
    /// Small requests for the own shard.
    incoming: Vec<Request>,
    /// Large requests for the own shard, which smaller ones may pass.
    large: Paced,
    /// Long ones without data, such as pieces of a discard: each costs time for its blocks.
    bare: Paced,
    /// Messages for each other thread.
    outgoing: Vec<Vec<Message>>,
    /// For each other thread, the requests that it has from this one.
    lent: Vec<u32>,
    /// The clients' flushes on their way to other threads.
    coming: Coming,
    /// Those from other threads that this turn has read.
    flushes_read: u64,
    /// Whether the own shard has something to flush, as the other threads know it.
    unflushed: bool,
}

impl ShardPort for Shards {
    fn submit(&mut self, shard: usize, request: Request) -> Result<(), Request> {
        if shard == self.own {
            self.take(request);
            return Ok(());
        }
        if self.lent[shard] == CREDIT {
            return Err(request);
        }
        self.lent[shard] += 1;
        if request.op == IoOp::Flush {
            self.coming.send(shard);
        }
        self.outgoing[shard].push(Message::Request(request));
        Ok(())
    }
}

impl Shards {
    fn take(&mut self, request: Request) {
        if request.range.len <= LARGE as u64 {
            self.incoming.push(request);
        } else if request.buf.is_empty() {
            self.bare.waiting.push_back(request);
        } else {
            self.large.waiting.push_back(request);
        }
    }

    /// Whether requests wait for the next turn.
    fn has_more(&self) -> bool {
        !self.large.waiting.is_empty() || !self.bare.waiting.is_empty()
    }

    /// Hands the own shard its requests: all small ones, and the others as far as the turn has time
    /// for them; each kind in order of arrival.
    fn serve(&mut self) {
        self.serve_small();
        while let Some(request) = self.bare.next().or_else(|| self.large.next()) {
            self.unpolled = true;
            self.shard.submit(self.now, request, &mut self.fx);
        }
    }

    /// Hands the own shard all its requests.
    fn serve_all(&mut self) {
        self.serve_small();
        let bare = mem::take(&mut self.bare.waiting);
        for request in bare.into_iter().chain(mem::take(&mut self.large.waiting)) {
            self.unpolled = true;
            self.shard.submit(self.now, request, &mut self.fx);
        }
    }

    fn serve_small(&mut self) {
        self.unpolled |= !self.incoming.is_empty();
        let mut rest = self.incoming.drain(..);
        while !rest.as_slice().is_empty() {
            let count = rest.len().min(AHEAD);
            self.shard.warm(&rest.as_slice()[..count]);
            for request in rest.by_ref().take(count) {
                self.shard.submit(self.now, request, &mut self.fx);
            }
        }
    }
}

impl Thread {
    fn new(plan: Plan) -> io::Result<Self> {
        let arena = Some(Arc::clone(&plan.arena));
        let make = if plan.wide { Ring::wide } else { Ring::new };
        let ring = make(RING_ENTRIES, arena)?;
        plan.mailboxes[plan.index].own(ring.waker());
        let primaries: Vec<_> = plan.primaries.iter().map(|(id, d)| (*id, &**d)).collect();
        let coming = plan.gates.coming.clone();
        let cuts = Arc::clone(&plan.gates.cuts);
        let gates = (plan.index, plan.gates);
        let devices = Devices::open(&ring, plan.cache.as_deref(), &primaries, gates)?;
        let buffers = BufPool::new(plan.arena);
        let threads = plan.mailboxes.len();
        let mut router = Router::new(RouterConfig {
            origin: u16::try_from(plan.index).expect("at most 64 shards"),
            shards: threads,
            registry: &plan.registry,
            buffers: buffers.clone(),
        });
        let volumes = plan.registry.volumes();
        let last = volumes.iter().map(|volume| usize::from(volume.id.0)).max().unwrap_or(0);
        let mut places = vec![0; last + 1];
        for (place, volume) in volumes.iter().enumerate() {
            places[usize::from(volume.id.0)] = place;
            router.watch_flushes(volume.id, devices.failed_flushes(volume.id));
        }
        let shards = Shards {
            own: plan.index,
            now: plan.clock.now(),
            shard: (plan.shard)(buffers.clone()),
            fx: Effects::default(),
            deadline: None,
            unpolled: true,
            incoming: Vec::new(),
            large: Paced::new(),
            bare: Paced::new(),
            outgoing: (0..threads).map(|_| Vec::new()).collect(),
            lent: vec![0; threads],
            coming,
            flushes_read: 0,
            unflushed: true,
        };
        Ok(Self {
            clients: Clients::new(plan.index, &ring, (plan.places, plan.memory), plan.patience),
            channels: Channels::default(),
            buffers,
            latencies: volumes.iter().map(|_| Latencies::default()).collect(),
            tier_latencies: volumes.iter().map(|_| TierLatencies::default()).collect(),
            rest: Rest::since(plan.clock.now()),
            clock: plan.clock,
            looked: Instant::default(),
            ring,
            devices,
            router,
            registry: plan.registry,
            mailboxes: plan.mailboxes,
            shards,
            cuts,
            witness: plan.witness,
            events: plan.events,
            untold: 0,
            tell_untold: plan.untold,
            wanted: None,
            inbox: Vec::new(),
            arrivals: Vec::new(),
            done: Vec::new(),
            places,
            taps: Taps::default(),
            duties: Duties::default(),
            at_once: false,
            over: false,
        })
    }

    fn begin(&mut self, started: Sender<(usize, Started)>) {
        self.shards.now = self.clock.now();
        self.shards.shard.start(self.shards.now, &mut self.shards.fx);
        self.duties.started = Some(started);
    }

    fn turn(&mut self) {
        let now = self.clock.now();
        (self.shards.now, self.looked) = (now, now);
        self.shards.large.allowance = Allowance::FULL;
        self.shards.bare.allowance = Allowance::FULL;
        if let Some(rest) = self.rest.look(now) {
            self.shards.shard.rested(rest);
        }
        self.poll_devices();
        self.read_mail();
        self.clients.reap(now, &mut self.arrivals);
        self.channels.reap();
        self.place_arrivals();
        self.exchange();
        self.poll_shard();
        self.exchange();
        self.note_flushes();
        self.at_once = self.clients.advance(now);
        self.at_once |= self.channels.advance();
        self.taps.pump(now, &mut self.router);
        self.report();
        self.send_mail();
        if !self.over {
            // Without its ring the thread can neither answer nor stop in order. The log is made for
            // this case: the next start finds all flushed data.
            self.ring.wait_for(|| self.patience()).expect(RING_WORKS);
        }
    }

    /// Hands the own shard the completions of its devices.
    fn poll_devices(&mut self) {
        let Shards { now, shard, fx, unpolled, outgoing, .. } = &mut self.shards;
        self.devices.poll(*now, outgoing, |target, done| {
            *unpolled = true;
            shard.complete(*now, target, done, fx);
        });
    }

    /// Processes the completions of devices up to this moment. A failure that another thread
    /// reports may have lost these writes, and the shard must not think that they are newer than
    /// the failure. Returns true if this may have consumed a wake-up, so that the mailbox must be
    /// checked again.
    fn catch_up(&mut self) -> bool {
        self.ring.wait(&self.clock, Some(self.shards.now)).expect(RING_WORKS);
        self.poll_devices();
        true
    }

    /// Passes requests down and answers up until there are none left.
    fn exchange(&mut self) {
        loop {
            let Self { router, clients, channels, shards, done, registry, .. } = self;
            router.pump(shards);
            let now = shards.now;
            let mut submit = |from, endpoint, io| {
                let volume = registry.volume_of(endpoint);
                router.submit(now, (from, volume), io, shards, done)
            };
            clients.feed(now, &mut submit);
            channels.feed(now, &mut submit);
            self.shards.serve();
            self.apply_effects();
            if self.done.is_empty() {
                return;
            }
            let now = self.clock.now();
            self.looked = now;
            for done in self.done.drain(..) {
                let place = self.places[usize::from(done.volume.0)];
                let took = now.since(done.started);
                count_latency(&mut self.latencies[place], done.op, took);
                if let Some(tier) = done.tier {
                    count_tier(&mut self.tier_latencies[place], done.op, tier, took);
                }
                if Channels::own(done.client) {
                    self.channels.complete(done.client, done.completion);
                } else {
                    self.clients.complete(done, took);
                }
            }
        }
    }

    /// Lets the own shard work, if it received anything or its deadline has come. Many turns only
    /// send data that earlier turns made.
    fn poll_shard(&mut self) {
        let shards = &mut self.shards;
        if !shards.unpolled && shards.deadline.is_none_or(|at| at > shards.now) {
            return;
        }
        shards.fx.deadline = None;
        shards.shard.poll(shards.now, &mut shards.fx);
        shards.deadline = shards.fx.deadline.take();
        shards.unpolled = false;
    }

    /// Tells the other threads that this one has seen the flushes in its mail, and whether it will
    /// have to flush something for the next.
    fn note_flushes(&mut self) {
        let Shards { own, now, shard, outgoing, coming, flushes_read, unflushed, .. } =
            &mut self.shards;
        if mem::replace(unflushed, shard.has_unflushed()) != *unflushed {
            coming.note_unflushed(*own, *unflushed);
        }
        let count = mem::take(flushes_read);
        if count > 0 {
            self.devices.seen(*now, count, outgoing);
        }
    }

    /// Carries out the effects of the own shard.
    fn apply_effects(&mut self) {
        let Shards { own, now, fx, outgoing, .. } = &mut self.shards;
        for (target, io) in fx.ios.drain(..) {
            self.devices.submit(*now, target, io);
        }
        for reply in fx.replies.drain(..) {
            let origin = origin_of(reply.id);
            if origin == *own {
                self.router.reply(reply, &mut self.done);
            } else {
                outgoing[origin].push(Message::Reply { shard: *own, reply });
            }
        }
        for volume in fx.changed.drain(..) {
            for messages in outgoing.iter_mut() {
                messages.push(Message::Changed(volume));
            }
        }
        for CutReport { volume, news } in fx.cuts.drain(..) {
            let mut gate = locked(&self.cuts[usize::from(volume.0)]);
            if let Some(order) = gate.take(*own, news) {
                // Sent under the lock: every thread gets the orders of all threads in one order.
                for mailbox in self.mailboxes.iter() {
                    mailbox.send_one(Message::Cut(volume, order));
                }
            }
        }
        for event in fx.events.drain(..) {
            self.events.tell(*own, event);
        }
        // A shard repeats this effect until the trust is recorded.
        if let Some(trust) = fx.record_trust.take()
            && self.wanted != Some(trust)
        {
            self.wanted = Some(trust);
            // Without a witness the shard waits forever, as it must without a record.
            let _ = self.witness.send((*own, Asked::Trust(trust)));
        }
        if !fx.detach.is_empty() {
            let _ = self.witness.send((*own, Asked::Detached(mem::take(&mut fx.detach))));
        }
        let untold = self.shards.shard.untold();
        if mem::replace(&mut self.untold, untold) != untold
            && let Some(tell) = &self.tell_untold
        {
            tell(self.shards.own, untold);
        }
    }

    fn read_mail(&mut self) {
        let mut inbox = mem::take(&mut self.inbox);
        self.mailboxes[self.shards.own].take(&mut inbox);
        let mut caught_up = false;
        for message in inbox.drain(..) {
            match message {
                Message::Request(request) => {
                    self.shards.flushes_read += u64::from(request.op == IoOp::Flush);
                    self.shards.take(request);
                }
                Message::Reply { shard, reply } => self.take_reply(shard, reply),
                Message::Arrival(arrival) => self.clients.add(self.shards.now, arrival),
                Message::Memory(grant) => self.clients.grant(grant),
                Message::Told { place, key, text } => self.channels.told(place, key, text),
                Message::TrustRecorded(trust) => {
                    let Shards { shard, now, fx, unpolled, .. } = &mut self.shards;
                    *unpolled = true;
                    shard.trust_recorded(*now, trust, fx);
                }
                Message::Detached(stripes) => {
                    let Shards { shard, now, fx, unpolled, .. } = &mut self.shards;
                    *unpolled = true;
                    shard.detached(*now, &stripes, fx);
                }
                Message::Cut(volume, order) => {
                    let Shards { shard, now, fx, unpolled, .. } = &mut self.shards;
                    *unpolled = true;
                    shard.cut(*now, volume, order, fx);
                }
                Message::Changed(volume) => {
                    self.shards.unpolled = true;
                    self.shards.shard.distrust(volume);
                }
                Message::Flushed(target, tag, result) => {
                    caught_up |= result.is_err() && self.catch_up();
                    let done = self.devices.flushed(target, tag, result);
                    let Shards { shard, now, fx, unpolled, .. } = &mut self.shards;
                    *unpolled = true;
                    shard.complete(*now, target, done, fx);
                }
                Message::SendFlush(target) => self.devices.send_flush(self.shards.now, target),
                Message::FlushFailed(target, error) => {
                    caught_up |= self.catch_up();
                    let Shards { shard, now, fx, unpolled, .. } = &mut self.shards;
                    *unpolled = true;
                    shard.flush_failed(*now, target, &error, fx);
                    self.devices.told(target);
                }
                Message::Command(command) => self.obey(command),
            }
        }
        self.inbox = inbox;
        if caught_up {
            self.read_mail();
        }
    }

    fn take_reply(&mut self, shard: usize, reply: Reply) {
        self.shards.lent[shard] -= 1;
        self.router.reply(reply, &mut self.done);
    }

    fn obey(&mut self, command: Command) {
        // A command sees all requests served that came before it, except for large ones that wait
        // for their turn.
        self.shards.serve_small();
        // Some commands change the work that the shard wants to do next.
        self.shards.unpolled = true;
        match command {
            Command::Listen(listeners, factory, answer) => {
                let mut all = listeners.into_iter();
                let result = all.try_for_each(|one| self.clients.listen(one, Arc::clone(&factory)));
                let _ = answer.send(result);
            }
            Command::Mount(config, asks, answer) => {
                let threads = (self.shards.own, self.mailboxes.len());
                let buffers = self.buffers.clone();
                let place = self.channels.vacant();
                let ring = (&self.ring, self.clock);
                let opened = FuseChannel::open(threads, place, ring, buffers, config, asks);
                let _ = answer.send(opened.map(|channel| self.channels.add(channel)));
            }
            Command::Disk(disk, answer) => {
                let threads = (self.shards.own, self.mailboxes.len());
                let buffers = self.buffers.clone();
                let opened = UblkChannel::open(threads, &self.ring, buffers, disk);
                let _ = answer.send(opened.map(|channel| {
                    channel.into_iter().for_each(|channel| self.channels.add(channel));
                }));
            }
            Command::Read(endpoint, range, answer) => {
                self.channels.add(Caller::new(endpoint, range, answer));
            }
            Command::Prefetch(endpoint, ranges, rate, progress) => {
                self.channels.add(Prefetch::new(endpoint, self.clock, ranges, rate, progress));
            }
            Command::Pin(volume, blocks) => self.shards.shard.pin(volume, &blocks),
            Command::List(from, answer) => {
                let _ = answer.send(self.shards.shard.list(from));
            }
            Command::Snapshot(answer) => {
                let _ = answer.send(self.snapshot());
            }
            Command::Clients(answer) => {
                let _ = answer.send(self.clients.stats(self.shards.now));
            }
            Command::Drain(on) => self.shards.shard.set_drain(on),
            Command::DrainVolume(volume, on) => self.shards.shard.drain_volume(volume, on),
            Command::Retire => self.shards.shard.retire(),
            Command::Set(setting) => self.shards.shard.set(setting),
            Command::SetSequentialThreshold(volume, bytes) => {
                self.router.set_sequential_threshold(volume, bytes);
            }
            Command::SetPatience { stall, idle } => {
                self.clients.set_patience(self.shards.now, stall, idle);
            }
            Command::SetRules(rules) => {
                self.router.set_rules(Arc::clone(&rules));
                self.clients.set_rules(Arc::clone(&rules));
                self.channels.set_rules(rules);
            }
            Command::Record(volume, sink) => self.taps.set(&mut self.router, volume, sink),
            Command::Adopt(left, factory) => {
                self.clients.adopt(left, &factory, &mut self.arrivals);
            }
            Command::Quiesce(end, answer) => {
                self.clients.shut(end);
                self.channels.shut(end);
                self.duties.quiesced = Some(answer);
            }
            Command::CutOff => {
                self.clients.cut_off();
                self.duties.is_cut_off = true;
            }
            Command::Stop(answer) => {
                self.shards.serve_all();
                self.shards.shard.stop(self.shards.now, &mut self.shards.fx);
                self.duties.stopped = Some(answer);
            }
        }
    }

    /// Notifies the senders whose state this thread has reached.
    fn report(&mut self) {
        let own = self.shards.own;
        let state = self.shards.shard.state();
        if let Some(started) = &self.duties.started {
            let how = match state {
                State::Refused(why) => Some(Started::Refused(why.clone())),
                State::Recovering => None,
                _ => Some(Started::Serving),
            };
            if let Some(how) = how {
                let _ = started.send((own, how));
                self.duties.started = None;
            }
        }
        let is_quiet = self.clients.len() == 0 && self.channels.in_flight() == 0;
        // What was cut off stays until its requests have ended: others do not wait for it.
        if self.duties.quiesced.is_some() && (is_quiet || self.duties.is_cut_off) {
            debug_assert!(self.duties.is_cut_off || self.router.unanswered() == 0);
            let answer = self.duties.quiesced.take();
            let _ = answer.expect("seen just now").send(self.clients.take_left());
        }
        let stopped = matches!(self.shards.shard.state(), State::Stopped | State::Refused(_));
        if self.duties.stopped.is_some() && stopped && self.devices.in_flight() == 0 {
            let answer = self.duties.stopped.take();
            let _ = answer.expect("seen just now").send(self.snapshot());
            self.over = true;
        }
    }

    fn place_arrivals(&mut self) {
        for arrival in self.arrivals.drain(..) {
            if arrival.thread == self.shards.own {
                self.clients.add(self.shards.now, arrival);
            } else {
                self.shards.outgoing[arrival.thread].push(Message::Arrival(arrival));
            }
        }
    }

    fn send_mail(&mut self) {
        for (mailbox, batch) in self.mailboxes.iter().zip(&mut self.shards.outgoing) {
            mailbox.send(batch);
        }
    }

    /// How long the thread may sleep. The time since the last look at the clock matters only if
    /// that sleep is short: to look again takes a system call on some machines.
    fn patience(&self) -> Option<Duration> {
        let until = self.wake_time()?;
        let rest = until.since(self.looked);
        let is_near = Duration::ZERO < rest && rest < FAR;
        Some(if is_near { until.since(self.clock.now()) } else { rest })
    }

    /// When the next turn must begin even if nothing happens: at once if the shard has work that it
    /// has not been polled for, or if large requests wait for their turn.
    fn wake_time(&self) -> Option<Instant> {
        if self.shards.unpolled || self.at_once || self.shards.has_more() {
            return Some(self.shards.now);
        }
        let deadlines = [
            self.shards.deadline,
            self.devices.deadline(),
            self.clients.deadline(),
            self.taps.deadline(),
            self.channels.deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    fn snapshot(&self) -> Snapshot {
        let Shards { own, now, shard, .. } = &self.shards;
        let cpu_nanos = thread_cpu().as_nanos() as u64;
        let mut primary_latencies = vec![Latencies::default(); self.latencies.len()];
        for (volume, latencies) in self.devices.primary_latencies() {
            primary_latencies[self.places[usize::from(volume.0)]] = latencies.clone();
        }
        // Shards do not count flushes: one of the device serves several.
        let cache_flushes = self.devices.flushes(Target::Cache);
        let mut volumes = shard.volumes(*now);
        for VolumeState { id, stats, .. } in &mut volumes {
            stats.primary_flushes = self.devices.flushes(Target::Primary(*id));
        }
        let primary_flushes = volumes.iter().map(|volume| volume.stats.primary_flushes).sum();
        Snapshot {
            shard: *own,
            state: shard.state().clone(),
            health: shard.health(),
            stats: Stats { cpu_nanos, cache_flushes, primary_flushes, ..shard.stats(*now) },
            log_end: shard.log_end(),
            dirty_blocks: shard.dirty_blocks(),
            volumes,
            latencies: self.latencies.clone(),
            tier_latencies: self.tier_latencies.clone(),
            primary_latencies,
            connections: self.clients.len(),
            rules: Arc::clone(self.router.rules()),
            rule_counts: self.router.rule_counts().to_vec(),
        }
    }
}
