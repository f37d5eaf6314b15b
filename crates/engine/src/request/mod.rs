//! What clients ask for: reads, writes and flushes, from their arrival to their answer.

pub(crate) mod fetch;
pub(crate) mod flush;
pub(crate) mod locks;
pub(crate) mod merge;
pub(crate) mod read;
pub(crate) mod write;
