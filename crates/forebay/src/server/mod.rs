//! `forebay serve`: [`serve`] starts and stops all parts. [`cache`] opens the cache device and
//! [`primaries`] the primaries; clients connect through [`endpoints`], [`mount`] and [`disks`], the
//! operator through [`control`].

mod applying;
pub mod args;
pub mod cache;
mod control;
mod disks;
mod endpoints;
mod events;
pub mod flags;
mod history;
pub mod kept;
mod last_word;
mod left_clients;
mod logging;
mod mount;
mod prefetch;
pub mod primaries;
pub mod process;
mod reconfigure;
mod recording;
mod rules;
pub mod serve;
mod settings;
mod state_health;
mod takeover;
mod untold;
mod upgrades;
mod warm_up;
mod web;
