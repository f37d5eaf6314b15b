//! Changes that a server has answered and no flush has covered, for all connections of a device.
//!
//! A connection that stays up from a change to the answer of a flush had the same server process
//! behind it throughout, so that flush covers the change. No other flush does: another connection
//! may have reached a restarted server, which has lost the change, before this connection noticed.
//! So each connection has its own account, and only its own flush settles it.
//!
//! If a connection breaks with changes on its account, the device may have lost data: the next
//! flush, on any connection, fails. A flush that fails, for this or another reason, settles all
//! accounts: the caller must treat a failed flush as the loss of every completed and unflushed
//! change, on all connections.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The accounts of a device's connections.
#[derive(Debug, Default)]
pub struct Debts {
    accounts: Vec<Option<Account>>,
    /// Whether a server may have lost changes that no failed flush has reported yet.
    lost: bool,
    /// Number of flushes that the server failed.
    failures: u64,
}

/// Numbers of one connection's completed changes.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    changed: u64,
    flushed: u64,
}

impl Account {
    fn is_open(self) -> bool {
        self.changed > self.flushed
    }
}

/// A connection's access to its account, which is closed on drop.
#[derive(Debug)]
pub struct Ledger {
    debts: Arc<Mutex<Debts>>,
    place: usize,
}

impl Ledger {
    /// Opens an account.
    #[must_use]
    pub fn open(debts: &Arc<Mutex<Debts>>) -> Self {
        let mut all = locked(debts);
        let free = all.accounts.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            all.accounts.push(None);
            all.accounts.len() - 1
        });
        all.accounts[place] = Some(Account::default());
        drop(all);
        Self { debts: Arc::clone(debts), place }
    }

    /// Number of open accounts, including this one.
    #[must_use]
    pub fn holders(&self) -> usize {
        locked(&self.debts).accounts.iter().flatten().count()
    }

    /// Records that a change was answered; `failures` is the count when it was sent. If the server
    /// failed a flush in between, that failure may have discarded the change: the server may have
    /// performed it before the flush and answered late. So the next flush fails once more.
    pub(super) fn changed(&self, failures: u64) {
        self.with(|account| account.changed += 1);
        let mut all = locked(&self.debts);
        all.lost |= all.failures != failures;
    }

    /// Number of flushes that a server has failed so far.
    pub(super) fn failures(&self) -> u64 {
        locked(&self.debts).failures
    }

    /// Number of changes that a flush sent now will cover.
    pub(super) fn covered(&self) -> u64 {
        let mut changed = 0;
        self.with(|account| changed = account.changed);
        changed
    }

    /// Records that a flush was answered that covers the first `covered` changes.
    pub(super) fn flushed(&self, covered: u64) {
        self.with(|account| account.flushed = account.flushed.max(covered));
    }

    /// Records that the connection broke.
    pub(super) fn broke(&self) {
        let mut all = locked(&self.debts);
        let account = all.accounts[self.place].expect("it is open while its ledger lives");
        all.lost |= account.is_open();
    }

    /// Whether the next flush must fail.
    pub(super) fn is_lost(&self) -> bool {
        locked(&self.debts).lost
    }

    /// Records that a server failed a flush.
    pub(super) fn failed(&self) {
        locked(&self.debts).failures += 1;
        self.told();
    }

    /// Records that a failed flush was reported to the caller.
    pub(super) fn told(&self) {
        let mut all = locked(&self.debts);
        all.lost = false;
        for account in all.accounts.iter_mut().flatten() {
            account.flushed = account.changed;
        }
    }

    fn with(&self, act: impl FnOnce(&mut Account)) {
        let mut all = locked(&self.debts);
        act(all.accounts[self.place].as_mut().expect("it is open while its ledger lives"));
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        locked(&self.debts).accounts[self.place] = None;
    }
}

fn locked(debts: &Mutex<Debts>) -> MutexGuard<'_, Debts> {
    // Poisoning is ignored: the numbers are consistent after each statement.
    debts.lock().unwrap_or_else(PoisonError::into_inner)
}
