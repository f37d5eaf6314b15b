//! The commands over a cache device that no server uses. None of them writes to it.

pub mod check;
pub mod dump;
mod report;
pub mod salvage;
