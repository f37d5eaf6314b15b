//! Work of a turn that involves several rooms: the engine passes results from one to another.

mod associate;
mod cut;
mod durable;
mod fault;
mod log;
mod primary;
