//! The NBD server: protocol to `Io` and back, no caching knowledge.
//!
//! [`NbdServer`] knows the exports and is shared by all threads; each connection is a
//! [`Session`](forebay_block::Session) from [`NbdServer::session`], a state machine that does no
//! I/O and reads no clock. The event loop owns the sockets, accepts connections, and limits the
//! number of clients and the duration of a handshake.
//!
//! ```text
//! bytes -> NbdSession -> (TLS) -> Protocol: Handshake, then Transmission -> Io
//! ```
//!
//! Supported: fixed newstyle, every option and command of the base specification, structured
//! replies, the metadata context `base:allocation`, TLS by certificate. Extended headers are not.
//! `docs/internals/nbd.md` says what is implemented.

#![forbid(unsafe_code)]

mod agreed;
mod errors;
mod handshake;
mod in_flight;
mod reply;
mod saying;
mod server;
mod session;
mod tls;
mod transmission;

pub use server::{Limits, NbdServer, ServerError};
pub use tls::{Tls, TlsConfig, TlsError};
