//! Block traces: the requests that clients sent for a volume, with their times.
//!
//! [`TraceReader`] reads the usual formats and Forebay's own, [`TraceWriter`] writes the latter,
//! and [`Simulator`] runs the cache's policies over the requests. The caller opens and stores the
//! files: this crate has no I/O, thread or clock. Untrusted input is read with bounded memory, and
//! an error names its place and value.

#![forbid(unsafe_code)]

mod error;
mod footprint;
mod formats;
mod reader;
mod request;
mod simulate;
mod textbook;

pub use error::TraceError;
pub use footprint::Footprint;
pub use formats::Format;
pub use formats::own::{TraceWriter, VOLUME_NAME_MAX};
pub use reader::TraceReader;
pub use request::TraceRequest;
pub use simulate::{
    Outcome, Simulate, SimulateConfig, Simulator, StoreConfig, StorePolicy, StoreSimulator,
};
pub use textbook::{Misses, References, Textbook, TooManyReferences};
