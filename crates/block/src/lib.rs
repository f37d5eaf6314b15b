//! The vocabulary of block I/O, shared by every layer: ranges, buffers, requests, errors, time, and
//! the contract of a queue. No I/O happens here.

mod addr;
mod buf;
mod error;
mod export;
mod io;
mod limits;
mod prefetch;
mod queue;
mod respond;
mod slab;
pub mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod time;

pub use addr::{
    BLOCK_SIZE, BlockRange, ByteRange, REQUEST_MAX, SECTOR_SIZE, STRIPE_BLOCKS, STRIPE_SIZE,
    VolumeId,
};
pub use buf::{Arena, BufPool, IoBuf};
pub use error::{ErrorKind, IoError, IoResult};
pub use export::{Endpoint, Export, Outbox, SLICE, Session};
pub use io::{Completion, Io, IoFlags, IoOp, IoTag};
pub use limits::{CLIENTS_MAX, NAME_BYTES_MAX, SHARDS_MAX, VOLUMES_MAX};
pub use prefetch::prefetch;
pub use queue::{DeviceInfo, IoQueue};
pub use respond::{Answer, Body, Parts, Responder, Step, Ticket};
pub use slab::Slab;
pub use time::Instant;
