//! What a shard may still do: faults of the cache device, doubts about a primary, the stop.

pub(crate) mod compare;
pub(crate) mod detach;
pub(crate) mod fault;
pub(crate) mod stop;
