//! Splits client requests to shards, joins their answers, fans out flushes.
//!
//! Every thread that has clients owns a [`Router`], which knows no threads: a [`ShardPort`] carries
//! its requests to the shards, and its owner hands the answers back. All routers are created from
//! the [`Registry`], the table of volumes.

#![forbid(unsafe_code)]

mod flush_gate;
mod port;
mod record;
mod registry;
mod router;
mod split;

pub use flush_gate::{Ask, Asked, Ended, FailedFlushes, FlushGate};
pub use port::ShardPort;
pub use record::{RECORDED_MAX, Recorded};
pub use registry::{Registry, RegistryError, SEQUENTIAL_THRESHOLD, Volume};
pub use router::{
    ClientKey, DISCARD_MAX, Done, PIECES_MAX, REQUESTS_MAX, Router, RouterConfig, WAVE, origin_of,
};
pub use split::{next_piece, shard_of};
