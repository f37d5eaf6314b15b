//! Everything about all shards of a pool that needs no threads: client requests are split to shards
//! and their answers joined, flushes fanned out; a cache device is opened or refused as a whole
//! ([`pool`]), and examined without a server ([`offline`]).
//!
//! Every thread that has clients owns a [`Router`], which knows no threads: a [`ShardPort`] carries
//! its requests to the shards, and its owner hands the answers back. All routers are created from
//! the [`Registry`], the table of volumes.

#![forbid(unsafe_code)]

mod coming;
mod cut_gate;
mod flush_gate;
pub mod offline;
pub mod pool;
mod port;
mod record;
mod registry;
mod router;
mod stripes;

pub use coming::Coming;
pub use cut_gate::CutGate;
pub use flush_gate::{Ask, Asked, Ended, FailedFlushes, FlushGate};
pub use port::ShardPort;
pub use record::{RECORDED_MAX, Recorded};
pub use registry::{Registry, RegistryError, SEQUENTIAL_THRESHOLD, Volume};
pub use router::{
    ClientKey, DISCARD_MAX, Done, PIECES_MAX, REQUESTS_MAX, Router, RouterConfig, Source, WAVE,
    origin_of,
};
pub use stripes::shard_of;
