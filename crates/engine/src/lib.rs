//! The cache of one shard, as a state machine without I/O.
//!
//! [`Engine`] takes requests, completions and the time, and returns the actions to carry out in
//! [`Effects`]. The same code runs over io_uring and in the simulator.

mod api;
mod cache;
mod contents;
mod destage;
mod engine;
mod flow;
mod form;
mod key;
mod left;
mod life;
mod limits;
mod locks;
mod log;
mod losses;
mod note;
mod order;
mod out;
mod pace;
mod ram;
mod reclaim;
mod recovery;
mod request;
mod shard;
mod slab;
mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod ticket;
mod tries;
mod turn;
mod volume;

pub use api::cut::{CutNews, CutOrder, CutReport};
pub use api::event::{EVENTS_PER_TURN_MAX, Event, Recovered};
pub use api::listing::{ListedBlock, Listing};
pub use api::primary::{LOST_RANGES_MAX, Primary, PrimaryErrors, VolumeState};
pub use api::stats::{Kind, STATISTICS, Shape, Statistic, Stats, Unit};
pub use api::{
    Bypass, CacheShare, ContentLocality, DIRTY_MAX_PERCENT, DestageReason, DetachedStripe,
    DirtyShare, Effects, Eviction, Foreground, Health, LastStop, Mode, Pace, Part, Refusal, Reply,
    Request, RequestId, Setting, ShardConfig, State, Target, Tier, Trust, VolumeConfig,
};
pub use contents::{DIRTY_STRIPE_BYTES, SEGMENT_BYTES_MAX, SEGMENTS_MAX, blocks_in, bytes_for};
pub use engine::Engine;
pub use forebay_format::Lsn;
pub use forebay_policy::{DRAIN_PATIENCE, DrainProgress, GUARANTEED_MAX_PERCENT};
pub use form::alike::{Alike, Sketch};
pub use form::similar_max;
pub use key::Key;
pub use limits::{SEGMENT_BYTES_MIN, SEGMENTS_MIN};
pub use losses::{Known, Losses};
pub use recovery::{salvage, survey};
pub use shard::Shard;
