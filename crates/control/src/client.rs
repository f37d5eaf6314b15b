//! The client that commands use: one request at a time over the control socket of a running server,
//! with a time limit, on the caller's thread.

mod follow;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::api::{
    Accepted, Acknowledgement, Applied, ApplyRequest, ClientStatus, DiskRequest, DiskStatus,
    ErrorBody, Event, EventList, InForce, Job, PoolStatus, PrefetchRequest, PrefetchStatus,
    StatisticsStatus, StopRequest, StopStatus, TraceRequest, TraceStatus, UpgradeRequest,
    UpgradeStatus, VolumeStatus,
};
use crate::config::PinEdit;
use crate::socket::{PATH_BYTES_MAX, too_long};
use crate::statistics::Window;

pub use follow::Followed;

/// Time limit for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for a change, which may wait for primaries or for the kernel.
const CHANGE_PATIENCE: Duration = Duration::from_secs(60);
/// Maximum length of an answer, in bytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No server listens.
    #[error("no server answers at {0}; start one with `forebay serve`, or use --control PATH")]
    NotRunning(PathBuf),
    /// This user may not use the socket.
    #[error("control socket {0}: permission denied; run this as the user who runs the server")]
    Denied(PathBuf),
    /// No socket can have this path.
    #[error(
        "control socket {path}: its path has {bytes} bytes, and the limit of Unix sockets is \
         {limit}; use --control PATH with a shorter one",
        limit = PATH_BYTES_MAX
    )]
    TooLong {
        /// Path of the socket.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// The connection failed.
    #[error("control socket {path}: {source}; the server may have ended: its log says so")]
    Io {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The answer took too long.
    #[error("the server at {path} has not answered in {after:?}; see its log")]
    Timeout {
        /// Path of the socket.
        path: PathBuf,
        /// The time limit.
        after: Duration,
    },
    /// The answer is not the expected one.
    #[error("the server at {path} is not a Forebay server of this version: {what}")]
    Unexpected {
        /// Path of the socket.
        path: PathBuf,
        /// Description of the answer.
        what: String,
    },
    /// The server refused the request.
    #[error("{error}; {hint}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The problem.
        error: String,
        /// The remedy.
        hint: String,
    },
}

/// A connection target: one server.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl ClientError {
    /// Whether the server or its machine can never do this.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Refused { status: 501, .. })
    }
}

impl Client {
    /// A client of the server at `socket`. Sends nothing yet.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Its control socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The status of the pool.
    ///
    /// # Errors
    /// As for every request: when no server answers, or it refuses.
    pub fn status(&self) -> Result<PoolStatus, ClientError> {
        self.ask("GET", "/v1/status", None::<&()>)
    }

    /// The statistics of a window.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn statistics(&self, window: Window) -> Result<StatisticsStatus, ClientError> {
        self.ask("GET", &format!("/v1/statistics?window={}", window.name()), None::<&()>)
    }

    /// The remembered events, oldest first.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn events(&self) -> Result<EventList, ClientError> {
        self.ask("GET", "/v1/events", None::<&()>)
    }

    /// Acknowledges an event in the name `by`.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn acknowledge(&self, id: u64, by: &str) -> Result<Event, ClientError> {
        let body = Acknowledgement { by: by.to_owned() };
        self.ask("POST", &format!("/v1/events/{id}/ack"), Some(&body))
    }

    /// The status of one volume.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn volume(&self, name: &str) -> Result<VolumeStatus, ClientError> {
        self.ask("GET", &format!("/v1/volumes/{}", escaped(name)), None::<&()>)
    }

    /// Starts to drain a volume, or all volumes.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn drain(&self, volume: Option<&str>) -> Result<Job, ClientError> {
        let path = volume.map(|name| format!("/v1/volumes/{}/drain", escaped(name)));
        self.ask("POST", path.as_deref().unwrap_or("/v1/drain"), None::<&()>)
    }

    /// The jobs that the server remembers, oldest first.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn jobs(&self) -> Result<Vec<Job>, ClientError> {
        self.ask("GET", "/v1/jobs", None::<&()>)
    }

    /// The state of a job.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn job(&self, id: u64) -> Result<Job, ClientError> {
        self.ask("GET", &format!("/v1/jobs/{id}"), None::<&()>)
    }

    /// Cancels a job.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn cancel(&self, id: u64) -> Result<Job, ClientError> {
        self.ask("DELETE", &format!("/v1/jobs/{id}"), None::<&()>)
    }

    /// Changes settings by name: those of a volume and of the cache, or without a volume those of
    /// the cache only. Returns the settings then in force.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn set(
        &self,
        volume: Option<&str>,
        to: &BTreeMap<String, String>,
    ) -> Result<InForce, ClientError> {
        let path = volume.map(|name| format!("/v1/volumes/{}/set", escaped(name)));
        self.ask("POST", path.as_deref().unwrap_or("/v1/set"), Some(to))
    }

    /// Changes the pins of a volume. Returns the settings then in force.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn pin(&self, volume: &str, edit: &PinEdit) -> Result<InForce, ClientError> {
        self.ask("POST", &format!("/v1/volumes/{}/pins", escaped(volume)), Some(edit))
    }

    /// Gives every setting the value that it has in a configuration, or changes nothing.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn apply(&self, request: &ApplyRequest) -> Result<Applied, ClientError> {
        self.ask("POST", "/v1/apply", Some(request))
    }

    /// Starts recording clients' requests to a volume.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn start_trace(
        &self,
        volume: &str,
        request: &TraceRequest,
    ) -> Result<TraceStatus, ClientError> {
        self.ask("POST", &format!("/v1/volumes/{}/trace", escaped(volume)), Some(request))
    }

    /// The state of the volume's recording.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn trace(&self, volume: &str) -> Result<TraceStatus, ClientError> {
        self.ask("GET", &format!("/v1/volumes/{}/trace", escaped(volume)), None::<&()>)
    }

    /// Ends the volume's recording.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn stop_trace(&self, volume: &str) -> Result<TraceStatus, ClientError> {
        self.ask("DELETE", &format!("/v1/volumes/{}/trace", escaped(volume)), None::<&()>)
    }

    /// Begins to bring ranges of a volume into the cache.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn prefetch(
        &self,
        volume: &str,
        request: &PrefetchRequest,
    ) -> Result<PrefetchStatus, ClientError> {
        self.ask("POST", &format!("/v1/volumes/{}/prefetch", escaped(volume)), Some(request))
    }

    /// How far the volume's prefetch is.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn prefetched(&self, volume: &str) -> Result<PrefetchStatus, ClientError> {
        self.ask("GET", &format!("/v1/volumes/{}/prefetch", escaped(volume)), None::<&()>)
    }

    /// Ends the volume's prefetch.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn stop_prefetch(&self, volume: &str) -> Result<PrefetchStatus, ClientError> {
        self.ask("DELETE", &format!("/v1/volumes/{}/prefetch", escaped(volume)), None::<&()>)
    }

    /// Lets another program take over from the server; [`Client::last_upgrade`] tells the outcome.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn upgrade(&self, program: &Path) -> Result<UpgradeStatus, ClientError> {
        let program = program.display().to_string();
        self.ask("POST", "/v1/upgrade", Some(&UpgradeRequest { program }))
    }

    /// The last upgrade.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn last_upgrade(&self) -> Result<UpgradeStatus, ClientError> {
        self.ask("GET", "/v1/upgrade", None::<&()>)
    }

    /// The clients of sockets, the longest connected first.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn clients(&self) -> Result<Vec<ClientStatus>, ClientError> {
        self.ask("GET", "/v1/clients", None::<&()>)
    }

    /// The disks made by ublk.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn disks(&self) -> Result<Vec<DiskStatus>, ClientError> {
        self.ask("GET", "/v1/disks", None::<&()>)
    }

    /// Makes a volume a disk of the server's machine, by ublk.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn attach(
        &self,
        volume: &str,
        sector_size: Option<u32>,
    ) -> Result<DiskStatus, ClientError> {
        let path = format!("/v1/volumes/{}/disk", escaped(volume));
        self.ask("POST", &path, Some(&DiskRequest { sector_size }))
    }

    /// Removes the disk.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn detach(&self, volume: &str) -> Result<DiskStatus, ClientError> {
        self.ask("DELETE", &format!("/v1/volumes/{}/disk", escaped(volume)), None::<&()>)
    }

    /// Tells the server to give up its cache device; `health` in the status tells how far it is.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn retire(&self) -> Result<Accepted, ClientError> {
        self.ask("POST", "/v1/retire", None::<&()>)
    }

    /// Tells the server to stop. It has stopped when its socket is gone.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn stop(&self, drain: bool) -> Result<Accepted, ClientError> {
        self.ask("POST", "/v1/stop", Some(&StopRequest { drain }))
    }

    /// What a stop has left in the cache.
    ///
    /// # Errors
    /// As for [`Client::status`]; also until the server has stopped.
    pub fn left(&self) -> Result<StopStatus, ClientError> {
        self.ask("GET", "/v1/stop", None::<&()>)
    }

    /// Sends a request, with a JSON body if given, and parses the JSON answer.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn ask<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let (status, bytes) = self.exchange(method, path, body)?;
        if (200..300).contains(&status) {
            return serde_json::from_slice(&bytes).map_err(|error| self.unexpected(error));
        }
        let refused: Result<ErrorBody, _> = serde_json::from_slice(&bytes);
        let ErrorBody { error, hint } = refused.map_err(|error| self.unexpected(error))?;
        Err(ClientError::Refused { status, error, hint })
    }

    /// Sends a request and returns the answer's status and body.
    ///
    /// # Errors
    /// When no server answers.
    pub fn exchange(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<(u16, Bytes), ClientError> {
        let body = body.map(serde_json::to_vec).transpose();
        let body = body.map_err(|error| self.unexpected(error))?.unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "forebay")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| self.unexpected(error))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|source| self.io(source))?;
        let after = if method == "GET" { PATIENCE } else { CHANGE_PATIENCE };
        let talk = async { tokio::time::timeout(after, self.talk(request)).await };
        let late = || ClientError::Timeout { path: self.socket.clone(), after };
        runtime.block_on(talk).unwrap_or_else(|_| Err(late()))
    }

    async fn talk(&self, request: Request<Full<Bytes>>) -> Result<(u16, Bytes), ClientError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|source| self.io(source))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.io(io::Error::other(error)))?;
        tokio::spawn(connection);
        let answer = sender.send_request(request).await;
        let answer = answer.map_err(|error| self.io(io::Error::other(error)))?;
        let status = answer.status().as_u16();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| self.unexpected(error))?;
        Ok((status, body.to_bytes()))
    }

    fn io(&self, source: io::Error) -> ClientError {
        if let Some(bytes) = too_long(&self.socket) {
            return ClientError::TooLong { path: self.socket.clone(), bytes };
        }
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ClientError::NotRunning(self.socket.clone())
            }
            io::ErrorKind::PermissionDenied => ClientError::Denied(self.socket.clone()),
            _ => ClientError::Io { path: self.socket.clone(), source },
        }
    }

    fn unexpected(&self, what: impl std::fmt::Display) -> ClientError {
        ClientError::Unexpected { path: self.socket.clone(), what: what.to_string() }
    }
}

/// `text`, percent-encoded as one segment of a path.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}
