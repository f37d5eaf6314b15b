//! An export of an NBD server as a device: the SAN of a small installation, or of a test.
//!
//! Each queue has its own connection. A server that does not announce that several connections may
//! share an export (`CAN_MULTI_CONN`) is used by one thread only. Even if it does, each connection
//! is flushed separately: a flush on one covers all only as long as all reach the same server
//! process, which a connection cannot know of the others ([`debts`]).
//!
//! When a connection breaks, everything in flight fails with `DeviceGone`, and so does every new
//! request until it is back; a separate thread parts with the server and connects again. Changes
//! that the server had completed but not flushed may be lost, so the first flush afterwards fails.
//!
//! Stragglers are changes that the server received and did not answer: those of a broken
//! connection, or of a user that was killed. They may still be carried out for a time, so new
//! changes wait.

mod covered;
mod debts;
mod handshake;
mod line;
mod queue;
mod recognize;
mod reconnect;
mod session;
mod terms;

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use forebay_block::{DeviceInfo, IoQueue};
use forebay_nbd_wire::TransmissionFlags;

use crate::device::BlockDevice;
use crate::error::OpenError;
use crate::layer::watch::Watch;
use crate::ring::Ring;
pub use debts::{Debts, Ledger};
pub use handshake::HANDSHAKE_PATIENCE;
pub(crate) use handshake::{Address, Peer};
use handshake::{Connection, connect};
pub use line::{Line, Parting, STRAGGLE_MAX};
use queue::NbdQueue;
pub use terms::Terms;

/// Unit of offsets and lengths of an export, in bytes.
const SECTOR: u32 = 512;
/// Maximum plausible preferred unit, in bytes.
const PREFERRED_MAX: u32 = 16 << 20;
/// Minimum acceptable value of a server's payload limit, in bytes.
const PAYLOAD_LEAST: u32 = 4096;

/// An export of an NBD server.
pub struct NbdDevice {
    shared: Arc<Shared>,
    /// Connections for future queues: the one made by opening, and those made by [`Self::prepare`].
    spare: Mutex<Vec<Connection>>,
}

/// State shared by queues and reconnecting threads.
struct Shared {
    address: Address,
    terms: Terms,
    info: DeviceInfo,
    /// Unflushed changes of its connections.
    debts: Arc<Mutex<Debts>>,
    /// Until when stragglers may be carried out.
    stragglers: Mutex<Option<Instant>>,
    /// Number of broken connections on which a server has not hung up, and that were not replaced.
    unparted: AtomicU32,
    /// What is on record of the export's content.
    record: OnceLock<Arc<Watch>>,
}

impl NbdDevice {
    /// Connects to the server and selects the export, in at most this time.
    ///
    /// # Errors
    /// When no server answers, it does not have the export, or the export is unsuitable.
    pub(crate) fn open(address: Address, patience: Duration) -> Result<Self, OpenError> {
        let connection = connect(&address, patience)?;
        let terms = connection.terms;
        check_terms(&address.uri, &terms)?;
        let info = info(&address, &terms);
        let (debts, stragglers, unparted, record) = Default::default();
        let shared = Shared { address, terms, info, debts, stragglers, unparted, record };
        let shared = Arc::new(shared);
        Ok(Self { shared, spare: Mutex::new(vec![connection]) })
    }
}

impl BlockDevice for NbdDevice {
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    /// The connections of the former user have ended with it, but the server may have requests
    /// received on them. It has as long for them as for those of a broken connection.
    fn await_stragglers(&self) {
        if !self.has_stragglers() {
            let (primary, seconds) = (&self.shared.info.identity, STRAGGLE_MAX.as_secs());
            tracing::warn!(
                %primary, seconds,
                "changes of the last server may still arrive: ours wait"
            );
            self.shared.expect_stragglers(STRAGGLE_MAX);
        }
    }

    fn has_stragglers(&self) -> bool {
        let is_unparted = self.shared.unparted.load(Ordering::Relaxed) > 0;
        is_unparted || !self.shared.straggle_time().is_zero()
    }

    fn recognize_by(&self, record: &Arc<Watch>) {
        // The first one counts.
        let _ = self.shared.record.set(Arc::clone(record));
    }

    fn prepare(&self, queues: usize) -> io::Result<()> {
        self.shared.check_sharing(queues)?;
        loop {
            // Connects without holding the lock, since that takes as long as the server takes.
            if self.spare.lock().unwrap_or_else(PoisonError::into_inner).len() >= queues {
                return Ok(());
            }
            let connection = self.shared.connect_again().map_err(io::Error::other)?;
            self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        }
    }

    fn open_queue(&self, ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        let ledger = Ledger::open(&self.shared.debts);
        self.shared.check_sharing(ledger.holders())?;
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let connection = match spare {
            Some(connection) => connection,
            None => self.shared.find_again().map_err(io::Error::other)?,
        };
        let mut line = Line::new(self.shared.info.clone(), ledger);
        let time = self.shared.straggle_time();
        if !time.is_zero() {
            line.hold_changes(time);
        }
        let queue = NbdQueue::new(&self.shared, line, ring, connection)?;
        Ok(Box::new(queue))
    }
}

impl Shared {
    /// Records that stragglers may be carried out for this time from now on.
    fn expect_stragglers(&self, time: Duration) {
        let mut until = self.stragglers.lock().unwrap_or_else(PoisonError::into_inner);
        *until = (*until).max(Some(Instant::now() + time));
    }

    /// For how long stragglers may still be carried out.
    fn straggle_time(&self) -> Duration {
        let until = self.stragglers.lock().unwrap_or_else(PoisonError::into_inner);
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Refuses several concurrent connections if the server does not allow them.
    fn check_sharing(&self, connections: usize) -> io::Result<()> {
        if connections > 1 && !self.terms.flags.has(TransmissionFlags::CAN_MULTI_CONN) {
            return Err(io::Error::other(format!(
                "{}: the server does not let several connections share an export; use one shard",
                self.address.uri
            )));
        }
        Ok(())
    }

    /// Connects once more, and makes sure that the export has the content on record.
    fn find_again(&self) -> Result<Connection, OpenError> {
        let connection = self.connect_again()?;
        if let Some(record) = self.record.get() {
            recognize::recognize(&self.address.uri, &connection, record)?;
        }
        Ok(connection)
    }

    /// Connects once more; the device must still have the properties it had when it was opened.
    fn connect_again(&self) -> Result<Connection, OpenError> {
        let connection = connect(&self.address, HANDSHAKE_PATIENCE)?;
        let terms = connection.terms;
        let lost = self.terms.flags.without(terms.flags);
        let uri = &self.address.uri;
        check_terms(uri, &terms)?;
        if terms.size < self.terms.size {
            let reason = format!("shrank from {} bytes to {}", self.terms.size, terms.size);
            return Err(OpenError::unfit(uri, reason));
        }
        let read_only = TransmissionFlags::READ_ONLY;
        let locked = terms.flags.has(read_only) && !self.info.read_only;
        if lost.without(read_only) != TransmissionFlags::NONE || locked {
            return Err(OpenError::unfit(uri, "can do less than when it was opened"));
        }
        Ok(connection)
    }
}

fn check_terms(uri: &str, terms: &Terms) -> Result<(), OpenError> {
    let Terms { size, minimum, maximum, .. } = *terms;
    let unfit = |reason: String| Err(OpenError::unfit(uri, reason));
    if size == 0 || !size.is_multiple_of(u64::from(SECTOR)) {
        return unfit(format!("has {size} bytes, which is not a positive multiple of {SECTOR}"));
    }
    if minimum == 0 || !minimum.is_power_of_two() || minimum > SECTOR {
        return unfit(format!("takes requests in units of {minimum} bytes, not of {SECTOR}"));
    }
    if maximum < PAYLOAD_LEAST {
        return unfit(format!("takes payloads of {maximum} bytes only"));
    }
    Ok(())
}

fn info(address: &Address, terms: &Terms) -> DeviceInfo {
    let can = |flag| terms.flags.has(flag);
    DeviceInfo {
        size: terms.size,
        logical_block: SECTOR,
        optimal_io: terms.preferred.clamp(SECTOR, PREFERRED_MAX),
        volatile_cache: can(TransmissionFlags::SEND_FLUSH),
        discard: can(TransmissionFlags::SEND_TRIM),
        fast_zero: can(TransmissionFlags::SEND_FAST_ZERO),
        rotational: can(TransmissionFlags::ROTATIONAL),
        read_only: can(TransmissionFlags::READ_ONLY),
        flush_by_queue: true,
        identity: address.identity(),
        name: address.uri.clone(),
    }
}

#[cfg(test)]
mod tests;
