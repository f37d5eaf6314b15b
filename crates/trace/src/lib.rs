//! Block traces: what clients asked of a volume, and when.
//!
//! [`TraceReader`] reads the usual formats and Forebay's own, [`TraceWriter`] makes the latter, and
//! [`Simulator`] runs the cache's policies over the requests. Bytes come from whoever opened the
//! file and go to whoever keeps it: no I/O, thread or clock here. What comes from outside is read
//! with bounded memory, and what is wrong in it is named with its place and value.

#![forbid(unsafe_code)]

mod error;
mod footprint;
mod formats;
mod reader;
mod request;
mod simulate;

pub use error::TraceError;
pub use footprint::Footprint;
pub use formats::Format;
pub use formats::own::{TraceWriter, VOLUME_NAME_MAX};
pub use reader::TraceReader;
pub use request::TraceRequest;
pub use simulate::{Outcome, SimulateConfig, Simulator};
