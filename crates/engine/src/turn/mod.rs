//! What the rooms do together in a turn: the engine passes on what one room has for another.

mod append;
mod associate;
mod durable;
mod send;
mod tell;
