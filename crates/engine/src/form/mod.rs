//! How a block is stored: whole, compressed, as a delta, against a similar one, or by the payload
//! of an equal one.

pub(crate) mod alike;
pub(crate) mod delta;
pub(crate) mod delta_read;
pub(crate) mod dense;
pub(crate) mod duplicates;
pub(crate) mod payload;
pub(crate) mod similar;
