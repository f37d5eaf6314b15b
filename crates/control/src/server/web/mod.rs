//! The read-only listener: metrics, status, statistics, events and the page, over TCP or a Unix
//! socket, on a thread of its own.
//!
//! It only answers GET. Over TCP every request but those of the page's files needs the token, and
//! names the server by an address or by a known name, so that a page of somebody else in the same
//! browser cannot read anything (DNS rebinding). Connections, their headers and their time are
//! limited.

mod guard;
mod listen;
mod page;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Json;
use axum::middleware;
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, get};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;

pub use guard::Token;
pub use listen::WebSocket;

use super::held::Held;
use super::{Answer, IDLE_MAX, Shared, clients, describe, events, job, jobs, metrics, no_method};
use super::{no_route, statistics, status, volume};
use crate::monitor::Monitor;
use crate::socket::{SocketError, SocketFile};
use guard::Guard;
use listen::{Accept, Stream};

/// Most connections at once; later ones wait.
const CONNECTIONS_MAX: usize = 64;
/// Most streams at once, so that they leave connections for others.
const STREAMS_MAX: usize = 32;
/// How long a client may take to send the head of a request, and how long a connection may be idle.
const HEAD_TIME: Duration = Duration::from_secs(15);
/// Most bytes of a head, and of an answer that waits for its client.
const BUFFER_BYTES_MAX: usize = 64 << 10;
/// Maximum time that requests in progress may delay the shutdown.
const FAREWELL: Duration = Duration::from_millis(500);
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The running listener. Dropping it stops it.
pub struct WebServer {
    file: Option<SocketFile>,
    /// Of a Unix socket.
    path: Option<PathBuf>,
    farewell: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl WebServer {
    /// Serves what `monitor` sees at `socket`: with a token over TCP, and for requests that name
    /// the server by an address, `localhost`, or one of `hosts`.
    ///
    /// # Errors
    /// When the thread or the runtime cannot be created.
    pub fn start(
        socket: WebSocket,
        monitor: Arc<Monitor>,
        token: Option<Token>,
        hosts: Vec<String>,
    ) -> Result<Self, SocketError> {
        let guard = Guard::new(socket.is_tcp(), token, hosts);
        let name = PathBuf::from(socket.address());
        let path = socket.path().map(Path::to_owned);
        let failed = |source| SocketError::Io { path: name.clone(), source };
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (listener, file) = {
            let _context = runtime.enter();
            socket.listener().map_err(failed)?
        };
        let streams = Arc::new(Semaphore::new(STREAMS_MAX));
        let pool = Arc::clone(monitor.pool());
        let router = routes(Shared { pool, monitor, streams }, guard);
        let (farewell, ending) = oneshot::channel();
        let body = move || {
            runtime.block_on(serve(listener, router, ending));
            runtime.shutdown_timeout(FAREWELL);
        };
        let thread = std::thread::Builder::new().name("web".to_owned()).spawn(body);
        let thread = Some(thread.map_err(failed)?);
        Ok(Self { file, path, farewell: Some(farewell), thread })
    }

    /// From now on a Unix socket's file goes with the server, also if an earlier one has left it.
    pub fn own_file(&mut self) {
        let path = self.path.as_deref();
        self.file = self.file.take().or_else(|| path.map(SocketFile::at));
    }

    /// Stops it, and leaves the socket to the next server.
    pub fn leave(mut self) {
        if let Some(file) = self.file.take() {
            std::mem::forget(file);
        }
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.file.take();
        if let Some(farewell) = self.farewell.take() {
            let _ = farewell.send(());
        }
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the web thread had failed");
        }
    }
}

/// Every path but those of the page's files.
fn data() -> [(&'static str, MethodRouter<Shared>); 11] {
    [
        ("/v1/status", get(status)),
        ("/v1/volumes/{name}", get(volume)),
        ("/v1/statistics", get(statistics::statistics)),
        ("/v1/clients", get(clients)),
        ("/v1/events", get(events::events)),
        ("/v1/events/stream", get(events::stream)),
        ("/v1/stream", get(events::everything)),
        ("/v1/jobs", get(jobs)),
        ("/v1/jobs/{id}", get(job)),
        ("/metrics", get(metrics)),
        ("/openapi.json", get(description)),
    ]
}

fn routes(shared: Shared, guard: Guard) -> axum::Router {
    let guard = Arc::new(guard);
    let open = page::routes();
    let data = data()
        .into_iter()
        .fold(axum::Router::new(), |router, (path, answer)| router.route(path, answer))
        .fallback(no_route)
        .layer(middleware::from_fn_with_state(Arc::clone(&guard), guard::token));
    open.merge(data)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn_with_state(guard, guard::request))
        .with_state(shared)
}

/// The OpenAPI description of what this listener answers.
async fn description() -> Answer<impl IntoResponse> {
    Ok(Json(described()?))
}

fn described() -> Answer<serde_json::Value> {
    let mut api = describe()?;
    let served = data().map(|(path, _)| path);
    if let Some(paths) = api["paths"].as_object_mut() {
        paths.retain(|path, _| served.contains(&path.as_str()));
        for item in paths.values_mut().filter_map(|item| item.as_object_mut()) {
            item.retain(|method, _| method == "get");
        }
    }
    Ok(api)
}

/// Accepts connections until told to end.
async fn serve(listener: Accept, router: axum::Router, mut ending: oneshot::Receiver<()>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    let (close, closing) = tokio::sync::watch::channel(false);
    loop {
        while connections.try_join_next().is_some() {}
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place.expect("the semaphore is never closed"), listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            _ = &mut ending => break,
            next = next => next,
        };
        match accepted {
            Ok(stream) => {
                let stream = Held::new(stream, IDLE_MAX, place);
                connections.spawn(connection(stream, router.clone(), closing.clone()));
            }
            Err(error) => {
                tracing::debug!(%error, "a connection of the web listener was not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    let _ = close.send(true);
    let all = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(FAREWELL, all).await;
}

async fn connection(
    stream: Held<Stream>,
    router: axum::Router,
    mut closing: tokio::sync::watch::Receiver<bool>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(BUFFER_BYTES_MAX);
    let serving = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut serving = std::pin::pin!(serving);
    // A client that goes away in the middle is its own business.
    tokio::select! {
        _ = &mut serving => return,
        _ = closing.wait_for(|closing| *closing) => serving.as_mut().graceful_shutdown(),
    }
    let _ = serving.await;
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// The description omitted `/v1/clients`.
    #[test]
    fn every_path_is_described_and_nothing_but_get() {
        let api = described().ok().expect("there is a description");
        let paths = api["paths"].as_object().expect("it has paths");
        for (path, _) in data() {
            assert!(paths.contains_key(path), "{path}");
        }
        assert_eq!(paths.len(), data().len());
        for (path, item) in paths {
            let methods: Vec<_> = item.as_object().expect("an item").keys().collect();
            assert_eq!(methods, ["get"], "{path}");
        }
    }

    /// Clients of a Unix socket that sent requests and took no answer kept all places.
    #[test]
    fn a_client_of_a_unix_socket_that_takes_no_answer_loses_its_place() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let (mut client, server) = UnixStream::pair().expect("two sockets");
            server.set_nonblocking(true).expect("it is a socket");
            let server = tokio::net::UnixStream::from_std(server).expect("it is a socket");
            let places = Arc::new(Semaphore::new(1));
            let place = Arc::clone(&places).acquire_owned().await.expect("it is free");
            let stream = Held::new(Stream::Unix(server), Duration::from_millis(100), place);
            let answer = "x".repeat(4 << 20);
            let router = axum::Router::new().route("/", get(|| async { answer }));
            client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").expect("it is sent");
            let (_close, closing) = tokio::sync::watch::channel(false);
            let serving = connection(stream, router, closing);
            tokio::time::timeout(Duration::from_secs(10), serving).await.expect("it ends");
            assert_eq!(places.available_permits(), 1);
        });
    }
}
