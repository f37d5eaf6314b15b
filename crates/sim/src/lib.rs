//! The deterministic simulator: the real volume and engine over simulated disks.
//!
//! A seed makes a [`config::Setup`] and a [`script`]; [`run::run`] runs them in a [`world`] of
//! simulated [`disk`]s and compares every answer with the reference model. Crashes come between
//! any two events, also during recovery.

pub mod atlas;
pub mod away;
mod boot;
mod checks;
mod client;
pub mod config;
mod dealer;
pub mod disk;
pub mod errors;
pub mod failure;
mod faults;
mod forge;
mod ledger;
pub mod links;
mod order;
pub mod pages;
pub mod planted;
pub mod rest;
pub mod rng;
pub mod run;
pub mod runner;
pub mod script;
pub mod server;
pub mod shard;
pub mod steer;
pub mod systematic;
mod takeover;
pub mod tally;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod toy;
pub mod trace;
mod units;
pub mod world;
