//! What a server has answered and no flush has covered, for all connections of a device.
//!
//! A connection that stays up from a change to the answer of a flush had one and the same server
//! behind it, so that flush covers the change. Nothing else does: another connection may have
//! reached a server that was started again, and that has lost the change, before this one
//! noticed. So each connection has an account of its own, and only its own flush pays for it.
//!
//! A connection that breaks with something on its account is a loss of the device: the next
//! flush, on whichever connection, fails. A flush that fails, for that or another reason, settles
//! all accounts: whoever asks for flushes must take a failed one as a failure of everything that
//! was completed and not flushed, on all connections.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The accounts of a device's connections.
#[derive(Debug, Default)]
pub struct Debts {
    accounts: Vec<Option<Account>>,
    /// A server may have lost changes, and no flush has said so yet.
    lost: bool,
    /// Flushes that a server failed.
    failures: u64,
}

/// Completed changes of one connection, in numbers of changes.
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

/// A connection's way to its account, which is closed with it.
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

    /// Accounts that are open, this one among them.
    #[must_use]
    pub fn holders(&self) -> usize {
        locked(&self.debts).accounts.iter().flatten().count()
    }

    /// A change was answered; `failures` is the count when it was sent. A flush that the server
    /// failed meanwhile may have given the change up: the server may have carried it out before,
    /// and this answer came late. So the next flush fails once more.
    pub(super) fn changed(&self, failures: u64) {
        self.with(|account| account.changed += 1);
        let mut all = locked(&self.debts);
        all.lost |= all.failures != failures;
    }

    /// Flushes that a server has failed so far.
    pub(super) fn failures(&self) -> u64 {
        locked(&self.debts).failures
    }

    /// What a flush that is sent now will cover.
    pub(super) fn covered(&self) -> u64 {
        let mut changed = 0;
        self.with(|account| changed = account.changed);
        changed
    }

    /// A flush was answered that covers the first `covered` changes.
    pub(super) fn flushed(&self, covered: u64) {
        self.with(|account| account.flushed = account.flushed.max(covered));
    }

    /// The connection broke.
    pub(super) fn broke(&self) {
        let mut all = locked(&self.debts);
        let account = all.accounts[self.place].expect("it is open while its ledger lives");
        all.lost |= account.is_open();
    }

    /// Whether the next flush must fail.
    pub(super) fn is_lost(&self) -> bool {
        locked(&self.debts).lost
    }

    /// A server has failed a flush.
    pub(super) fn failed(&self) {
        locked(&self.debts).failures += 1;
        self.told();
    }

    /// A flush has failed.
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
    // Numbers that are right after each statement.
    debts.lock().unwrap_or_else(PoisonError::into_inner)
}
