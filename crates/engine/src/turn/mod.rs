//! What the rooms do together in a turn: the engine passes on what one room has for another.

mod associate;
mod durable;
mod fault;
mod log;
mod primary;
