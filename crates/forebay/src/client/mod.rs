//! The commands that ask a running server through its control socket.

pub mod drain;
pub mod set;
pub mod status;
pub mod stop;
