//! State shared by all connections: the exports, the limits and the buffers.

use std::sync::Arc;

use forebay_block::{BufPool, Export, REQUEST_MAX, Session};
use forebay_nbd_wire::{PAYLOAD_MAX, STRING_MAX};

use crate::Tls;
use crate::session::NbdSession;

const _: () = assert!(REQUEST_MAX == PAYLOAD_MAX as u64, "a payload is one request");

/// Limits of one connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Maximum number of requests in flight.
    pub requests: usize,
    /// Maximum bytes of data in flight; one request is always accepted.
    pub bytes: u64,
    /// Maximum number of options in one handshake.
    pub options: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { requests: 256, bytes: REQUEST_MAX, options: 128 }
    }
}

/// Why a server cannot be created.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ServerError {
    /// There is no volume to serve.
    #[error("no export to serve: name at least one volume")]
    NoExport,
    /// Clients could not request the name.
    #[error("export name {0:?} does not fit the protocol: at most 4096 bytes, none of them NUL")]
    BadName(String),
    /// The description is too long, or contains NUL.
    #[error("the description of export {0:?} does not fit the protocol: at most 4096 bytes")]
    BadDescription(String),
    /// Two exports have the same name.
    #[error("two exports are named {0:?}: names must differ")]
    SameName(String),
    /// A limit is zero, so that nothing could be served.
    #[error("the limits on requests and options must not be zero")]
    ZeroLimit,
}

/// The exports, ready to be served to any number of clients by any number of threads.
#[derive(Clone, Debug)]
pub struct NbdServer {
    shared: Arc<Shared>,
    pool: BufPool,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub exports: Vec<Export>,
    pub tls: Tls,
    pub limits: Limits,
}

impl NbdServer {
    /// A server of `exports`. The first one is also served under the empty name, unless another has
    /// that name. Buffers for requests come from `pool`.
    ///
    /// # Errors
    /// When a name, description or limit is invalid.
    pub fn new(
        exports: Vec<Export>,
        tls: Tls,
        limits: Limits,
        pool: BufPool,
    ) -> Result<Self, ServerError> {
        if exports.is_empty() {
            return Err(ServerError::NoExport);
        }
        if limits.requests == 0 || limits.options == 0 {
            return Err(ServerError::ZeroLimit);
        }
        for (i, export) in exports.iter().enumerate() {
            check(export)?;
            if exports[..i].iter().any(|other| other.name == export.name) {
                return Err(ServerError::SameName(export.name.clone()));
            }
        }
        Ok(Self { shared: Arc::new(Shared { exports, tls, limits }), pool })
    }

    /// The exports, in the order of their `Endpoint` indices.
    #[must_use]
    pub fn exports(&self) -> &[Export] {
        &self.shared.exports
    }

    /// The state machine of a new connection.
    #[must_use]
    pub fn session(&self) -> Box<dyn Session> {
        self.session_on(self.pool.clone())
    }

    /// The state machine of a new connection that takes its buffers from `pool`.
    #[must_use]
    pub fn session_on(&self, pool: BufPool) -> Box<dyn Session> {
        Box::new(NbdSession::new(Arc::clone(&self.shared), pool))
    }

    /// The state machine of a connection that another server has left, with what that had agreed on
    /// ([`Session::agreed`]); `None` if the export is no longer as the client knows it.
    #[must_use]
    pub fn resumed(&self, agreed: &str) -> Option<Box<dyn Session>> {
        let session = NbdSession::resumed(Arc::clone(&self.shared), self.pool.clone(), agreed)?;
        Some(Box::new(session))
    }

    /// The state machine of a connection that is refused: every option is answered with `why`.
    #[must_use]
    pub fn refusal(&self, why: &'static str) -> Box<dyn Session> {
        Box::new(NbdSession::refusing(Arc::clone(&self.shared), self.pool.clone(), why))
    }
}

fn check(export: &Export) -> Result<(), ServerError> {
    let bad = |text: &str| text.len() > STRING_MAX || text.contains('\0');
    if bad(&export.name) {
        return Err(ServerError::BadName(export.name.chars().take(64).collect()));
    }
    if bad(&export.description) {
        return Err(ServerError::BadDescription(export.name.clone()));
    }
    Ok(())
}

impl Shared {
    /// Index of the export that clients request as `name`.
    pub fn find(&self, name: &str) -> Option<usize> {
        let named = self.exports.iter().position(|export| export.name == name);
        named.or(name.is_empty().then_some(0))
    }
}
