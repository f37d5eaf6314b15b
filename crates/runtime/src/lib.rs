//! Shard threads: one ring, one mailbox, one clock each.
//!
//! Each thread owns a shard of the blocks, with its cache engine and its queues to the devices, and
//! some of the client connections, with a router for their requests. On the path of a request
//! nothing is shared but the clients' memory budget, for clients with much data in flight. Threads
//! communicate through mailboxes, and so does the pool's owner.

#![forbid(unsafe_code)]

mod blocking;
mod channel;
mod clients;
mod connection;
pub mod detached;
mod devices;
mod error;
mod events;
mod histogram;
mod listen;
mod mailbox;
mod memory;
mod message;
#[cfg(all(test, loom))]
mod models;
mod pace;
mod places;
mod pool;
mod record;
mod rest;
mod sender;
mod state;
mod tenure;
#[cfg(test)]
mod testing;
mod thread;
mod uncached;
mod witness;

pub use forebay_engine::Shard;

pub use blocking::{Blocking, clock};
pub use channel::{Disk, Mount, PrefetchProgress, Ranges};
pub use clients::{CLIENTS, HANDSHAKE_PATIENCE, STALL_PATIENCE, SessionFactory};
pub use connection::LeftClient;
pub use devices::{Devices, Gates, gates};
pub use error::StartError;
pub use histogram::Histogram;
pub use listen::{Access, Address, Listener};
pub use memory::{CLIENT_MEMORY, client_memory_max};
pub use message::{
    ClientStats, Latencies, Message, OPERATIONS, Served, Snapshot, TIERS, TierLatencies,
};
pub use pool::{
    FAREWELL_PATIENCE, Left, MakeShard, Pool, PoolConfig, PoolStats, Stopped, Untold, VolumeStats,
};
pub use record::{Recording, RecordingStatus};
pub use state::{StateDir, file_of, is_full, sealed, unsealed};
pub use uncached::Uncached;
pub use witness::{Record, Witness};
