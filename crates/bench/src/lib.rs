//! Benchmarks: the published evaluations of caches like this one, repeated on the user's machine
//! with and without the cache ([`user`]), and the parts that developers measure ([`developer`]).
//!
//! Everything that is compared is measured in turns in one run with the same client: ratios carry
//! over to other machines, absolute figures hardly. Whatever is made is undone at the end, at an
//! error, a signal or a panic ([`rig::cleanup`]).
//!
//! A folder uses only folders above it in this list:
//!
//! | folder | holds |
//! |---|---|
//! | [`load`] | clients, what they write, and how long answers take |
//! | [`report`] | tables, JSON, charts, pages; progress |
//! | [`rig`] | directories, images, disks and servers that a benchmark makes and takes away |
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
