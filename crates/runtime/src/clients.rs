//! The connections of one thread, and on the first thread the listeners too.
//!
//! A new connection goes to the thread that has the fewest. A client for whom there is no place
//! (`places`) is told so if the protocol can, and its connection is closed. A client that takes too
//! long to choose a volume is disconnected; so is an idle one, if that is configured.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{CLIENTS_MAX, Endpoint, Instant, Io, Session, Slab};
use forebay_device::{Client, Done as RingDone, Op, Payload, Ring, RingFile};
use forebay_policy::{RequestRules, Sender};
use forebay_volume::{ClientKey, Done, Source};

use crate::connection::{Connection, Kind, LeftClient, Next, Patience};
use crate::listen::Listener;
use crate::memory::{Grant, Memory};
use crate::message::{ClientStats, End};
use crate::pace::Allowance;
use crate::places::{Places, Refusals, Seat, TOLD_MAX, Way};
use crate::sender;

/// Default for the number of clients served at once.
pub const CLIENTS: usize = 128;
/// Default for the time in which a client must choose a volume.
pub const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// Default for the time in which a client must take a byte of its answers.
pub const STALL_PATIENCE: Duration = Duration::from_secs(60);
/// Pause of a listener after a failed accept, caused by a lack of descriptors or memory.
const ACCEPT_REST: Duration = Duration::from_millis(100);

const _: () = {
    assert!(CLIENTS_MAX + TOLD_MAX < forebay_device::FILES_MAX as usize, "a ring's file each");
};
const _: () = assert!(CLIENTS <= CLIENTS_MAX);

/// Creates the sessions of new connections: one protocol with its settings.
pub trait SessionFactory: Send + Sync {
    /// Creates the session of a new connection.
    fn session(&self) -> Box<dyn Session>;

    /// Creates the session of a connection that another server has left, with what that had agreed
    /// on; `None` if that does not hold any more.
    fn resumed(&self, _agreed: &str) -> Option<Box<dyn Session>> {
        None
    }

    /// Creates a session that tells a client why it is refused; `None` if the protocol cannot.
    fn refusal(&self, _why: &'static str) -> Option<Box<dyn Session>> {
        None
    }
}

impl<F: Fn() -> Box<dyn Session> + Send + Sync> SessionFactory for F {
    fn session(&self) -> Box<dyn Session> {
        self()
    }
}

/// A connection on its way to the thread that will serve it.
pub struct Arrival {
    /// The thread that serves it.
    pub thread: usize,
    socket: OwnedFd,
    peer: String,
    sender: Sender,
    seat: Seat,
    session: MakeSession,
    /// Bytes that another server has received and not used.
    received: Vec<u8>,
}

/// Creates a session, on the thread that serves it.
type MakeSession = Box<dyn FnOnce() -> Option<Box<dyn Session>> + Send>;

/// The clients of one thread.
pub struct Clients {
    thread: usize,
    ring: Rc<Ring>,
    client: Client,
    places: Arc<Places>,
    memory: Arc<Memory>,
    refusals: Refusals,
    table: Slab<Connection>,
    /// Connections with work at the end of the turn.
    touched: Vec<u32>,
    listeners: Vec<Listening>,
    finished: Vec<RingDone>,
    patience: Patience,
    /// When the first client may be overdue.
    due: Option<Instant>,
    /// New connections are refused.
    shut: bool,
    /// The connections that another server can go on with.
    left: Vec<LeftClient>,
    chatter: Chatter,
    rules: Arc<RequestRules>,
}

/// Limits the lines about clients, so that clients that connect and disconnect constantly do not
/// flood the log.
#[derive(Default)]
struct Chatter {
    since: Instant,
    lines: u32,
    more: u64,
}

/// Lines about clients that a thread writes in each [`CHATTER_TIME`]; further ones are counted.
const CHATTER_LINES: u32 = 20;
const CHATTER_TIME: Duration = Duration::from_secs(10);

impl Chatter {
    /// Whether another line may be written.
    fn may_say(&mut self, now: Instant) -> bool {
        if now.since(self.since) >= CHATTER_TIME {
            if self.more > 0 {
                tracing::info!(more = self.more, "clients came and went unlogged");
            }
            *self = Self { since: now, ..Self::default() };
        }
        self.lines += 1;
        let quiet = self.lines <= CHATTER_LINES;
        self.more += u64::from(!quiet);
        quiet
    }
}

struct Listening {
    socket: Listener,
    file: RingFile,
    factory: Arc<dyn SessionFactory>,
    /// When it accepts again; `None` while it accepts.
    rests_until: Option<Instant>,
}

/// The kind of a token, in its low bits.
const ACCEPT: u64 = 0;
const RECEIVE: u64 = 1;
const SEND: u64 = 2;
const KIND_BITS: u32 = 2;

fn token(at: u32, kind: Kind) -> u64 {
    let kind = match kind {
        Kind::Receive => RECEIVE,
        Kind::Send => SEND,
    };
    u64::from(at) << KIND_BITS | kind
}

impl Clients {
    /// Creates the table, without clients.
    #[must_use]
    pub fn new(
        thread: usize,
        ring: &Rc<Ring>,
        (places, memory): (Arc<Places>, Arc<Memory>),
        patience: Patience,
    ) -> Self {
        Self {
            thread,
            ring: Rc::clone(ring),
            client: ring.client(),
            places,
            memory,
            refusals: Refusals::default(),
            table: Slab::new((CLIENTS_MAX + TOLD_MAX) as u32),
            touched: Vec::new(),
            listeners: Vec::new(),
            finished: Vec::new(),
            patience,
            due: None,
            shut: false,
            left: Vec::new(),
            chatter: Chatter::default(),
            rules: Arc::default(),
        }
    }

    /// Changes how long clients may take, for those that are there as well; the time for their
    /// handshake stays.
    pub fn set_patience(&mut self, now: Instant, stall: Duration, idle: Option<Duration>) {
        self.patience = Patience { stall, idle, ..self.patience };
        // Whoever is late now is found in this turn, and the time of the next one with it.
        self.due = Some(now);
    }

    /// Changes the rules for requests.
    pub fn set_rules(&mut self, rules: Arc<RequestRules>) {
        self.rules = rules;
        self.table.iter_mut().for_each(|(_, connection)| connection.rules = None);
    }

    /// Accepts connections on a listener from now on.
    ///
    /// # Errors
    /// If the ring has no room for its file, or new connections are refused.
    pub fn listen(&mut self, socket: Listener, factory: Arc<dyn SessionFactory>) -> io::Result<()> {
        if self.shut {
            return Err(io::Error::other("the pool is stopping"));
        }
        let file = self.ring.register(socket.as_fd())?;
        let rests_until = Some(Instant(0));
        self.listeners.push(Listening { socket, file, factory, rests_until });
        Ok(())
    }

    /// Closes the listeners, and reads no more input from any client.
    pub fn shut(&mut self, end: End) {
        self.shut = true;
        if end == End::HandOver {
            self.listeners.iter_mut().for_each(|listening| listening.socket.leave_file());
        }
        self.listeners.clear();
        for (at, connection) in self.table.iter_mut() {
            match end {
                End::Stop => connection.end_input(),
                End::HandOver => connection.hold(),
            }
            if !connection.touched {
                connection.touched = true;
                self.touched.push(at);
            }
        }
    }

    /// Closes every connection, even with replies unsent.
    pub fn cut_off(&mut self) {
        self.shut(End::Stop);
        for (_, connection) in self.table.iter_mut() {
            connection.close();
        }
    }

    /// Takes over connections that another server has left; those that are still valid go to
    /// `arrivals`.
    pub fn adopt(
        &self,
        left: Vec<LeftClient>,
        factory: &Arc<dyn SessionFactory>,
        arrivals: &mut Vec<Arrival>,
    ) {
        for LeftClient { socket, input: received, agreed, unix, peer } in left {
            let way = if unix { Way::Unix } else { Way::Tcp };
            let Some((thread, seat)) = self.places.take_over(way) else {
                tracing::warn!(peer, "there is no place for a client of the previous server");
                continue;
            };
            let factory = Arc::clone(factory);
            let session: MakeSession = Box::new(move || {
                let session = factory.resumed(&agreed);
                if session.is_none() {
                    tracing::warn!(agreed, "a client is disconnected: its volume has changed");
                }
                session
            });
            let sender = sender::of_socket(socket.as_fd());
            arrivals.push(Arrival { thread, socket, peer, sender, seat, session, received });
        }
    }

    /// The connections that another server can go on with.
    pub fn take_left(&mut self) -> Vec<LeftClient> {
        std::mem::take(&mut self.left)
    }

    /// Number of connections of this thread.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Takes over a connection.
    pub fn add(&mut self, now: Instant, arrival: Arrival) {
        let Arrival { seat, peer, sender, socket, session, received, .. } = arrival;
        let registered = self.ring.register(socket.as_fd());
        let file = match registered {
            Ok(file) if !self.table.is_full() && !self.shut => file,
            Ok(_) => return self.places.release(self.thread, seat),
            Err(error) => {
                tracing::warn!(%error, "a new connection was dropped");
                return self.places.release(self.thread, seat);
            }
        };
        let Some(session) = session() else { return self.places.release(self.thread, seat) };
        let sockets = (file, socket);
        let connection = Connection::new(session, sockets, now, (peer, sender, seat), &received);
        if seat != Seat::Told && self.chatter.may_say(now) {
            tracing::info!(peer = %connection.peer, "client connected");
        }
        let at = self.table.insert(connection);
        self.touch(at);
    }

    /// Processes the completions of the ring; new connections for any thread go to `arrivals`.
    pub fn reap(&mut self, now: Instant, arrivals: &mut Vec<Arrival>) {
        let mut finished = std::mem::take(&mut self.finished);
        self.client.reap(&mut finished);
        for done in finished.drain(..) {
            let at = u32::try_from(done.token >> KIND_BITS).expect("tokens are made here");
            let kind = match done.token & ((1 << KIND_BITS) - 1) {
                ACCEPT => {
                    self.accepted(now, at as usize, done, arrivals);
                    continue;
                }
                RECEIVE => Kind::Receive,
                _ => Kind::Send,
            };
            if let Some(connection) = self.table.get_mut(at) {
                connection.finish(now, kind, done);
                self.touch(at);
            }
        }
        self.finished = finished;
    }

    fn accepted(&mut self, now: Instant, at: usize, done: RingDone, arrivals: &mut Vec<Arrival>) {
        let Some(listening) = self.listeners.get_mut(at) else { return };
        if !done.more {
            // An error of one connection also ends the accept; it needs no pause, but a pause does
            // no harm.
            listening.rests_until = Some(now + ACCEPT_REST);
        }
        let Payload::Socket(socket) = done.payload else {
            if let Err(error) = done.result {
                tracing::warn!(%error, address = %listening.socket.address(), "accept failed");
            }
            return;
        };
        if listening.socket.prepare(socket.as_fd()).is_err() {
            return;
        }
        let unix = self.listeners.iter().any(|one| one.socket.way() == Way::Unix);
        let listening = &self.listeners[at];
        let factory = Arc::clone(&listening.factory);
        let peer = listening.socket.peer_of(socket.as_fd());
        let (thread, seat, session): (_, _, MakeSession) =
            match self.places.take(listening.socket.way(), unix) {
                Ok((thread, seat)) => (thread, seat, Box::new(move || Some(factory.session()))),
                Err(full) => {
                    if let Some(count) = self.refusals.count(now) {
                        let (limit, why) = (self.places.limit(), full.text());
                        tracing::warn!(limit, count, peer, why, "clients were refused");
                    }
                    let Some(seat) = self.places.tell() else { return };
                    (self.thread, seat, Box::new(move || factory.refusal(full.text())))
                }
            };
        let (sender, received) = (sender::of_socket(socket.as_fd()), Vec::new());
        arrivals.push(Arrival { thread, socket, peer, sender, seat, session, received });
    }

    /// Marks a connection for the end of the turn.
    fn touch(&mut self, at: u32) {
        if let Some(connection) = self.table.get_mut(at)
            && !connection.touched
        {
            connection.touched = true;
            self.touched.push(at);
        }
    }

    /// What each client has done so far.
    #[must_use]
    pub fn stats(&self, now: Instant) -> Vec<ClientStats> {
        let all = self.table.iter().map(|(_, connection)| connection);
        all.filter(|one| one.seat != Seat::Told).map(|one| one.stats(now)).collect()
    }

    /// Hands a completed request, which took this long, to its connection.
    pub fn complete(&mut self, done: Done, took: Duration) {
        let at = u32::try_from(done.client.0).expect("keys are made here");
        let connection = self.table.get_mut(at);
        let connection = connection.expect("it lives while it has requests");
        connection.complete(done, took);
        self.touch(at);
    }

    /// Takes memory that a client waited for.
    pub fn grant(&mut self, grant: Grant) {
        let connection = self.table.get_mut(grant.client);
        if !connection.is_some_and(|connection| connection.grant(grant)) {
            // The client continued without it, or is gone.
            self.memory.give_back(grant.bytes);
        }
        self.touch(grant.client);
    }

    /// Hands input to the sessions, and their requests to `submit`, which returns a request if
    /// there is no room for it. Returns false if a request was returned.
    pub fn feed(
        &mut self,
        now: Instant,
        mut submit: impl FnMut(Source, Endpoint, Io) -> Result<(), Io>,
    ) -> bool {
        let mut room = true;
        for &at in &self.touched {
            let connection = self.table.get_mut(at).expect("only the end of a turn drops one");
            let client = ClientKey(u64::from(at));
            let rules = connection.rules(&self.rules);
            connection.unpark(|arrived, endpoint, io| {
                submit(Source { client, rules, arrived }, endpoint, io)
            });
            connection.feed(&self.memory, (self.thread, at));
            // It may have chosen its volume just now.
            let rules = connection.rules(&self.rules);
            connection.submit(now, |arrived, endpoint, io| {
                submit(Source { client, rules, arrived }, endpoint, io)
            });
            room &= !connection.is_parked();
        }
        room
    }

    /// Ends the turn: starts sends and receives, drops connections that are over. Returns true if
    /// the next turn must start at once.
    pub fn advance(&mut self, now: Instant) -> bool {
        for (at, listening) in self.listeners.iter_mut().enumerate() {
            if listening.rests_until.is_some_and(|until| until <= now) {
                let token = (at as u64) << KIND_BITS | ACCEPT;
                if self.client.submit(&listening.file, token, Op::Accept).is_ok() {
                    listening.rests_until = None;
                }
            }
        }
        self.expire(now);
        let mut at_once = false;
        let mut allowance = Allowance::FULL;
        let mut touched = std::mem::take(&mut self.touched);
        touched.retain(|&at| {
            let connection = self.table.get_mut(at).expect("dropped below only");
            let next =
                connection.advance(now, &self.client, |kind| token(at, kind), &mut allowance);
            connection.give_back(&self.memory);
            if !connection.is_negotiating() {
                self.places.settle(&mut connection.seat);
            }
            if let Some(due) = connection.due(&self.patience) {
                self.due = Some(self.due.map_or(due, |first| first.min(due)));
            }
            let keep = matches!(next, Next::Again | Next::Feed);
            connection.touched = keep;
            at_once |= next == Next::Feed;
            if matches!(next, Next::Drop | Next::Leave) {
                if connection.seat != Seat::Told && self.chatter.may_say(now) {
                    let (received, sent) = connection.bytes;
                    let seconds = now.since(connection.accepted).as_secs_f64();
                    let (peer, why) = (&connection.peer, connection.why());
                    tracing::info!(%peer, seconds, received, sent, why, "client gone");
                }
                connection.leave(&self.memory);
                self.places.release(self.thread, connection.seat);
                let gone = self.table.remove(at).filter(|_| next == Next::Leave);
                self.left.extend(gone.and_then(Connection::left));
            }
            keep
        });
        self.touched = touched;
        at_once
    }

    fn expire(&mut self, now: Instant) {
        if self.due.is_none_or(|at| at > now) {
            return;
        }
        let mut next: Option<Instant> = None;
        let mut late = Vec::new();
        for (at, connection) in self.table.iter_mut() {
            let is_due = connection.due(&self.patience).is_some_and(|due| due <= now);
            let why =
                if is_due { connection.overdue(now, &self.patience, &self.memory) } else { None };
            let Some(why) = why else {
                let due = connection.due(&self.patience);
                next = next.into_iter().chain(due).min();
                continue;
            };
            connection.end_input();
            connection.close();
            if connection.seat != Seat::Told && self.chatter.may_say(now) {
                let (peer, why) = (&connection.peer, why.text());
                tracing::info!(%peer, why, "a client was disconnected");
            }
            late.push(at);
        }
        late.into_iter().for_each(|at| self.touch(at));
        self.due = next;
    }

    /// When [`Clients::advance`] must be called even if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let rests = self.listeners.iter().filter_map(|listening| listening.rests_until);
        rests.chain(self.due).min()
    }
}
