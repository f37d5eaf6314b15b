//! Files, block devices, memory and NBD exports behind one trait, and layers that stack.
//!
//! A [`BlockDevice`] is the control side, shared by threads; each thread opens its own queue on its
//! [`Ring`]. `unsafe` is confined to the ring, one question about sockets, and the
//! programs' allocator.

mod away;
mod clock;
mod device;
mod emulate;
mod error;
mod file;
mod huge;
mod layer;
mod memory;
mod nbd;
mod random;
mod ring;
mod socket;
#[cfg(test)]
mod testing;
pub mod uri;

pub use away::AwayDevice;
pub use clock::Clock;
pub use device::BlockDevice;
pub use emulate::{EmulatedDevice, Profile};
pub use error::OpenError;
pub use file::{Direct, FileDevice, OpenMode};
pub use huge::{HugePages, populate};
pub use layer::watch::{Watch, WatchedDevice};
pub use memory::MemoryDevice;
pub use nbd::{Debts, HANDSHAKE_PATIENCE, Ledger, Line, NbdDevice, Parting, STRAGGLE_MAX, Terms};
#[cfg(loom)]
pub use ring::Alarm;
pub use ring::{
    Client, ControlCall, Done, FILES_MAX, FuseSlot, Op, Payload, Returned, Ring, RingFile, Setup,
    UblkControl, UblkQueue, UblkSlot, Waker,
};
pub use socket::{has_hung_up, untaken};
pub use uri::{
    network_identity, open_cache, open_cache_read_only, open_primary, open_primary_within,
    primary_path, primary_size,
};
