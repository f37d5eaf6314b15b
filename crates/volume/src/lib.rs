//! Splits client requests to shards, joins their answers, fans out flushes.
//!
//! Every thread that has clients owns a [`Router`]. It knows no threads: a [`ShardPort`] carries
//! its requests to the shards, and the answers are handed back to it. The [`Registry`] is the
//! table of volumes that all of them are made from.

#![forbid(unsafe_code)]

mod flush_gate;
mod port;
mod record;
mod registry;
mod router;
mod stripes;

pub use flush_gate::{Ask, Asked, Ended, FailedFlushes, FlushGate};
pub use port::ShardPort;
pub use record::{RECORDED_MAX, Recorded};
pub use registry::{Registry, RegistryError, SEQUENTIAL_THRESHOLD, Volume};
pub use router::{
    ClientKey, DISCARD_MAX, Done, PIECES_MAX, REQUESTS_MAX, Router, RouterConfig, WAVE, origin_of,
};
pub use stripes::shard_of;
