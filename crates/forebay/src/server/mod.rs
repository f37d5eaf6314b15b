//! `forebay serve`: [`serve`] starts and stops everything else here. The cache device is opened in
//! [`cache`], the primaries in [`primaries`]; clients come through [`endpoints`] and [`mount`], the
//! operator through [`control`].

pub mod args;
pub mod cache;
mod control;
mod endpoints;
mod flags;
mod logging;
mod mount;
mod primaries;
mod process;
mod recording;
pub mod serve;
mod settings;
