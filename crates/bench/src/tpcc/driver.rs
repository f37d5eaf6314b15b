//! Terminals that run transactions as fast as they are answered, and the results.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mysql::prelude::Queryable as _;
use mysql::{Conn, Error};
use serde::{Deserialize, Serialize};

use super::check::Journal;
use super::schema::Scale;
use super::transaction::{Kind, Order, Terminal};
use super::values::Values;
use crate::load::pulse::Pulse;
use crate::load::sample::{Latency, Recorder};

/// Whether a transaction must be repeated: after a deadlock, or a lock timeout.
pub fn is_to_repeat(error: &Error) -> bool {
    matches!(error, Error::MySqlError(error) if [1213, 1205].contains(&error.code))
}

/// The deck of cards of clause 5.2.4.2: 43.5 % payments, 4.3 % of each rarer transaction, the rest
/// new orders.
const DECK: [(Kind, usize); 5] = [
    (Kind::NewOrder, 10),
    (Kind::Payment, 10),
    (Kind::OrderStatus, 1),
    (Kind::Delivery, 1),
    (Kind::StockLevel, 1),
];

/// A load.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The size of the database.
    pub scale: Scale,
    /// Number of terminals, each with one connection.
    pub terminals: u32,
    /// Duration of the ramp-up, which does not count.
    pub ramp: Duration,
    /// Duration of the measurement.
    pub measured: Duration,
    /// Seed of the random values.
    pub seed: u64,
}

/// Number of completed transactions of each kind, ramp-up included.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Counts {
    /// New orders, including those that are rolled back as specified.
    pub new_order: u64,
    /// New orders that were rolled back as specified.
    pub rolled_back: u64,
    /// Payments.
    pub payment: u64,
    /// Order status.
    pub order_status: u64,
    /// Deliveries.
    pub delivery: u64,
    /// Stock level.
    pub stock_level: u64,
    /// Attempts aborted because of a conflict, and repeated.
    pub again: u64,
}

/// The results of a load.
#[derive(Debug)]
pub struct Outcome {
    /// New orders in each second, ramp-up included.
    pub per_second: Vec<f64>,
    /// Latency of new orders, without the ramp-up.
    pub latency: Latency,
    /// Number of transactions by kind.
    pub counts: Counts,
    /// Every order that was committed.
    pub journal: Journal,
    /// Why the load ended early: the server went away.
    pub broken: Option<String>,
}

/// For an observer of a load while it runs.
pub struct Watch {
    /// Every completed transaction.
    pub pulse: Pulse,
    /// Whether the load shall end before its time.
    pub stop: AtomicBool,
}

impl Watch {
    /// For a load of at most this time.
    pub fn new(time: Duration) -> Self {
        Self { pulse: Pulse::new(time), stop: AtomicBool::new(false) }
    }
}

/// State shared by all terminals.
struct Shared<'a> {
    recorder: Recorder,
    counts: [AtomicU64; 7],
    watch: &'a Watch,
    broken: Mutex<Option<String>>,
}

impl Shared<'_> {
    fn is_over(&self) -> bool {
        self.watch.stop.load(Relaxed) || self.recorder.is_over()
    }
}

/// Runs a load to its end, or until the server goes away. Every second, calls `progress` with the
/// number of seconds passed and of new orders in the last second.
///
/// # Errors
/// When it cannot begin. Later failures are in the outcome.
pub fn run(
    connect: impl Fn() -> anyhow::Result<Conn>,
    plan: Plan,
    progress: impl FnMut(usize, f64),
) -> anyhow::Result<Outcome> {
    run_watched(connect, plan, &Watch::new(Duration::ZERO), progress)
}

/// The same, with an observer.
///
/// # Errors
/// As [`run`].
pub fn run_watched(
    connect: impl Fn() -> anyhow::Result<Conn>,
    plan: Plan,
    watch: &Watch,
    mut progress: impl FnMut(usize, f64),
) -> anyhow::Result<Outcome> {
    let mut terminals = Vec::new();
    for number in 0..plan.terminals {
        terminals.push(Terminal {
            conn: connect().with_context(|| format!("terminal {number}"))?,
            scale: plan.scale,
            warehouse: number % plan.scale.warehouses + 1,
            values: Values::new(plan.seed + u64::from(number)),
        });
    }
    let shared = Shared {
        recorder: Recorder::new(plan.ramp, plan.measured),
        counts: Default::default(),
        watch,
        broken: Mutex::new(None),
    };
    let journals = std::thread::scope(|scope| {
        let shared = &shared;
        let work = |terminal| scope.spawn(move || work(terminal, shared));
        let threads: Vec<_> = terminals.into_iter().map(work).collect();
        let mut told = 0;
        while threads.iter().any(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
            let second = shared.recorder.start().elapsed().as_secs() as usize;
            let line = shared.recorder.per_second();
            if second > told && second <= line.len() {
                told = second;
                progress(second, line[second - 1]);
            }
        }
        threads.into_iter().map(|thread| thread.join().expect("no terminal panics")).collect()
    });
    let counts = shared.counts.map(AtomicU64::into_inner);
    let [new_order, rolled_back, payment, order_status, delivery, stock_level, again] = counts;
    let counts =
        Counts { new_order, rolled_back, payment, order_status, delivery, stock_level, again };
    Ok(Outcome {
        per_second: shared.recorder.per_second(),
        latency: shared.recorder.latency(),
        counts,
        journal: Journal::join(journals),
        broken: shared.broken.into_inner().unwrap_or_default(),
    })
}

/// Runs one terminal until the time is over or the connection breaks. Returns its committed orders.
fn work(mut terminal: Terminal, shared: &Shared<'_>) -> Vec<Order> {
    let mut deck: Vec<Kind> = DECK.iter().flat_map(|&(kind, count)| vec![kind; count]).collect();
    let mut journal = Vec::new();
    loop {
        terminal.values.shuffle(&mut deck);
        for &kind in &deck {
            if shared.is_over() {
                return journal;
            }
            if let Err(error) = once(&mut terminal, kind, shared, &mut journal) {
                shared.watch.stop.store(true, Relaxed);
                if let Ok(mut broken) = shared.broken.lock() {
                    broken.get_or_insert(format!("{kind:?}: {error}"));
                }
                return journal;
            }
        }
    }
}

/// Repeats one transaction until it completes.
fn once(
    terminal: &mut Terminal,
    kind: Kind,
    shared: &Shared<'_>,
    journal: &mut Vec<Order>,
) -> Result<(), Error> {
    let begin = Instant::now();
    let order = loop {
        match terminal.run(kind) {
            Ok(order) => break order,
            Err(error) if is_to_repeat(&error) => {
                terminal.conn.query_drop("ROLLBACK")?;
                shared.counts[6].fetch_add(1, Relaxed);
                if shared.is_over() {
                    return Ok(());
                }
            }
            Err(error) => return Err(error),
        }
    };
    journal.extend(order);
    let at = match kind {
        Kind::NewOrder => {
            shared.recorder.add(begin);
            shared.counts[1].fetch_add(u64::from(order.is_none()), Relaxed);
            0
        }
        Kind::Payment => 2,
        Kind::OrderStatus => 3,
        Kind::Delivery => 4,
        Kind::StockLevel => 5,
    };
    shared.counts[at].fetch_add(1, Relaxed);
    shared.watch.pulse.beat();
    Ok(())
}
