//! Benchmarks: published evaluations of similar caches, repeated on the user's machine with and
//! without the cache ([`user`]), and measurements for developers ([`developer`]).
//!
//! Everything that is compared is measured in turns in one run with the same client: ratios carry
//! over to other machines, absolute figures hardly. All resources are removed at the end, at an
//! error, a signal or a panic ([`rig::cleanup`]).
//!
//! A folder uses only folders above it in this list:
//!
//! | folder | holds |
//! |---|---|
//! | [`load`] | clients, the content of writes, and latencies |
//! | [`report`] | tables, JSON, charts, pages; progress |
//! | [`rig`] | directories, images, disks and servers that a benchmark creates and removes |
//! | [`tpcc`], [`dbms`], [`operator`] | TPC-C; MariaDB and PostgreSQL; a random operator |
//! | [`user`], [`developer`] | the benchmarks |

pub mod dbms;
pub mod developer;
mod load;
pub mod operator;
pub mod report;
pub mod rig;
pub mod tpcc;
mod usage;
pub mod user;

pub use usage::WrongUsage;
