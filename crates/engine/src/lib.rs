//! The cache of one shard, as a state machine without I/O.
//!
//! [`Engine`] takes requests, completions and the time, and says in [`Effects`] what is to be
//! done. The same code runs over io_uring and in the simulator.

mod admission;
mod api;
mod contents;
mod destage;
mod engine;
mod event;
mod form;
mod key;
mod life;
mod limits;
mod locks;
mod log;
pub mod offline;
mod op;
mod out;
mod pace;
pub mod pool;
mod primary;
mod ram;
mod reclaim;
mod recovery;
mod request;
mod shard;
mod slab;
mod stats;
mod tries;
mod turn;
mod volume;

pub use api::{
    Bypass, ContentLocality, DirtyShare, Effects, Eviction, Health, Mode, Reply, Request,
    RequestId, ShardConfig, State, Target, Trust, VolumeConfig,
};
pub use engine::Engine;
pub use event::{EVENTS_PER_TURN_MAX, Event, Recovered};
pub use forebay_policy::{DRAIN_PATIENCE, DrainProgress};
pub use form::alike::{Alike, Sketch};
pub use form::similar_max;
pub use key::Key;
pub use life::detach::DetachedStripe;
pub use primary::{LOST_RANGES_MAX, Lookups, Primary, PrimaryErrors, VolumeState};
pub use recovery::salvage;
pub use shard::Shard;
pub use stats::{DELTA_SIZES, Stats};
