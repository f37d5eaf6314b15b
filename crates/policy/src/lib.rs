//! Pure decisions: eviction, recency, reading around misses, sequential detection, destage pacing,
//! write throttling, shares of the dirty limit and of the room, wear, the end of drains, rules for
//! requests.
//!
//! Each file is one decision. Nothing here does I/O, reads a clock or draws a random number: time
//! is passed in as [`forebay_block::Instant`], so that a run can be repeated exactly and the trace
//! simulator can use the same policies as the engine.

#![forbid(unsafe_code)]

mod adaptive;
mod around;
mod cache_shares;
mod chunk;
mod counts;
mod destage;
mod drain;
mod eviction;
mod frequency;
mod learned;
mod part;
mod random;
mod rate;
mod recent;
mod requests;
mod rule;
mod sequential;
mod shadow;
mod shares;
mod sketch;
mod stored;
mod throttle;
mod wear;
mod window;

pub use adaptive::{Adaptive, StoreCandidate};
pub use around::ReadAround;
pub use cache_shares::{CacheShare, CacheShares, GUARANTEED_MAX_PERCENT};
pub use destage::{
    DestageCause, DestagePacer, DestageState, DrainRate, Foreground, LATENCY_OF_DISKS,
    LATENCY_OF_SSDS, QUIET,
};
pub use drain::{DRAIN_PATIENCE, DrainProgress};
pub use eviction::{
    COPY_SHARE_MAX_PERCENT, Candidate, Eviction, EvictionPolicy, Fifo, Lru, META_MAX,
    copy_bytes_max, free_segments_wanted,
};
pub use frequency::Frequency;
pub use learned::{LastTouch, Touch};
pub use part::{Part, Whole};
pub use rate::RateBound;
pub use recent::{KeyHash, KeyHasher, Recent, Standing};
pub use requests::{
    Direction, Network, RULES_MAX, RequestRule, RequestRules, RuleCount, RuleSet, Sender,
    SenderTest, Treatment, UserId, range_text, read_range, size_text,
};
pub use sequential::SequentialDetector;
pub use shares::{DirtyShare, DirtyShares};
pub use sketch::Sketch;
pub use throttle::{DELAY_MAX, WriteThrottle, free_blocks};
pub use wear::{WEAR_BANK, WearBudget};
pub use window::Window;
