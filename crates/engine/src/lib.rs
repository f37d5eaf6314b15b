//! The cache of one shard, as a state machine without I/O.
//!
//! [`Engine`] takes requests, completions and the time, and says in [`Effects`] what is to be
//! done. The same code runs over io_uring and in the simulator.

mod alike;
mod alone;
mod api;
mod append;
mod associate;
mod bases;
mod builder;
mod compare;
mod dense;
mod destage;
mod detach;
mod dirty;
mod duplicates;
mod durable;
mod engine;
mod event;
mod fault;
mod fetch;
mod flow;
mod flush;
mod index;
mod limits;
mod locks;
mod log;
mod merge;
pub mod offline;
mod op;
mod overflow;
mod pace;
mod packed;
pub mod pool;
mod primary;
mod ram;
mod read;
mod reclaim;
mod recover;
mod resume;
pub mod salvage;
mod scan;
mod shard;
mod similar;
mod slab;
mod split;
mod stats;
mod stop;
mod survey;
mod tries;
mod write;

pub use alike::{Alike, Sketch};
pub use api::{
    Bypass, ContentLocality, DirtyShare, Effects, Eviction, Health, Mode, Reply, Request,
    RequestId, Setting, ShardConfig, State, Target, Trust, VolumeConfig,
};
pub use detach::DetachedStripe;
pub use engine::Engine;
pub use event::{EVENTS_PER_TURN_MAX, Event, Recovered};
pub use forebay_policy::{DRAIN_PATIENCE, DrainProgress};
pub use index::Key;
pub use primary::{LOST_RANGES_MAX, Lookups, Primary, PrimaryErrors, VolumeState};
pub use shard::Shard;
pub use similar::similar_max;
pub use stats::{DELTA_SIZES, Stats};
