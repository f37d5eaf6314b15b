//! TPC-C according to its specification, revision 5.11, against MariaDB: the tables and their
//! content (clauses 1 and 4.3), the five transactions with their mix (2 and 5.2.3), without keying
//! and think times, and the consistency conditions (3.3.2).
//!
//! Omitted: screens, think times, and the requirements of an audit. So the figures are not a
//! publishable tpmC, and are called tpmC only for short.

mod check;
mod driver;
mod load;
mod schema;
mod transaction;
mod values;

pub use check::{Journal, check_journal, conditions, conditions_after_load};
pub use driver::{Counts, Outcome, Plan, Watch, run, run_watched};
pub use load::load;
pub use schema::Scale;
