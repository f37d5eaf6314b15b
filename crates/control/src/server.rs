//! The HTTP API: its own thread with one async runtime, a Unix socket, and routes that call the
//! pool. A call to the pool may wait for a shard, so it runs on a thread that may block.

mod events;
mod held;
mod statistics;
pub mod web;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Json;
use axum::extract::connect_info::Connected;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path as Segment, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::IncomingStream;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, oneshot};
use utoipa::OpenApi;

use crate::access::SocketAccess;
use crate::api::{
    Accepted, Applied, ApplyRequest, CacheSettings, ClientStatus, DiskRequest, DiskStatus,
    ErrorBody, InForce, Job, PoolStatus, PrefetchRequest, PrefetchStatus, StopRequest, StopStatus,
    TraceRequest, TraceStatus, UpgradeRequest, UpgradeStatus, VolumeInForce, VolumeSettings,
    VolumeStatus,
};
use crate::config::{Config, ConfigError, FILE_BYTES_MAX, PinEdit};
use crate::error::{ControlError, ControlErrorKind};
use crate::metrics::exposition;
use crate::monitor::Monitor;
use crate::peer::{self, Changers, ChangesBy, Peer};
use crate::pool::{LeftSnapshot, PoolControl, PoolSnapshot, PrefetchTarget, TraceTarget, Wanted};
use crate::settings::Change;
use crate::socket::{SocketError, SocketFile, listen};
use held::Held;

/// Maximum length of a request body, in bytes.
const BODY_BYTES_MAX: usize = 256 << 10;
/// The same for one with a configuration, of which JSON makes two bytes of one at most.
const APPLY_BYTES_MAX: usize = 2 * FILE_BYTES_MAX as usize + BODY_BYTES_MAX;
/// Maximum number of concurrent connections; later ones wait.
const CONNECTIONS_MAX: usize = 32;
/// How long a connection may be idle, or take nothing of its answer. Every answer but a stream's
/// comes sooner, and a stream says that it is alive.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// Maximum number of streams, so that they leave connections for commands.
const STREAMS_MAX: usize = 8;
/// Interval at which running jobs are checked.
const JOB_PERIOD: Duration = Duration::from_millis(100);
/// Maximum time that requests in progress may delay the shutdown.
const FAREWELL: Duration = Duration::from_secs(2);

/// The bound control socket: commands may connect, and wait until they are served. It is bound
/// early, so that a server that could not be controlled fails before it touches a device.
pub struct ControlSocket {
    listener: std::os::unix::net::UnixListener,
    path: PathBuf,
    /// `None` if it is not to be removed.
    file: Option<SocketFile>,
    changes: ChangesBy,
}

impl ControlSocket {
    /// Binds the socket at `path` with the permissions `access`.
    ///
    /// # Errors
    /// When another server holds the path, or the socket cannot be created.
    pub fn bind(path: &Path, access: &SocketAccess) -> Result<Self, SocketError> {
        let listener = listen(path, access)?;
        let file = Some(SocketFile::at(path));
        Ok(Self { listener, path: path.to_owned(), file, changes: ChangesBy::default() })
    }

    /// The socket that an earlier server has left, bound to `path`. Its file stays until
    /// [`Server::own_file`].
    #[must_use]
    pub fn left(path: &Path, socket: OwnedFd) -> Self {
        let changes = ChangesBy::default();
        Self { listener: socket.into(), path: path.to_owned(), file: None, changes }
    }

    /// Sets who may change something; without this, only [`ChangesBy::Owner`].
    #[must_use]
    pub fn changed_by(self, changes: ChangesBy) -> Self {
        Self { changes, ..self }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// The running API. Dropping it stops it and removes the socket, unless that is one that an earlier
/// server has left.
pub struct Server {
    path: PathBuf,
    file: Option<SocketFile>,
    monitor: Arc<Monitor>,
    farewell: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the pool that `monitor` observes at `socket`.
    ///
    /// # Errors
    /// When the thread or the runtime cannot be created.
    pub fn start(socket: ControlSocket, monitor: Arc<Monitor>) -> Result<Self, SocketError> {
        let ControlSocket { listener, path, file, changes } = socket;
        let changers = Changers::of(changes, &path);
        let failed = |source| SocketError::Io { path: path.clone(), source };
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let listener = {
            let _context = runtime.enter();
            UnixListener::from_std(listener).map_err(failed)?
        };
        let (farewell, ending) = oneshot::channel();
        let observed = Arc::clone(&monitor);
        let body = move || {
            runtime.block_on(run(listener, changers, observed, ending));
            runtime.shutdown_timeout(FAREWELL);
        };
        let thread = std::thread::Builder::new().name("control".to_owned()).spawn(body);
        let thread = Some(thread.map_err(failed)?);
        Ok(Self { path, file, monitor, farewell: Some(farewell), thread })
    }

    /// From now on the socket's file goes with the server, also if an earlier one has left it.
    pub fn own_file(&mut self) {
        self.file.get_or_insert_with(|| SocketFile::at(&self.path));
    }

    /// Stops the API, and leaves the socket to the next server.
    pub fn leave(mut self) {
        if let Some(file) = self.file.take() {
            std::mem::forget(file);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.file.take();
        self.monitor.close();
        if let Some(farewell) = self.farewell.take() {
            let _ = farewell.send(());
        }
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the control thread had failed");
        }
    }
}

/// State shared by all routes.
#[derive(Clone)]
struct Shared {
    pool: Arc<dyn PoolControl>,
    monitor: Arc<Monitor>,
    /// A permit for each stream.
    streams: Arc<Semaphore>,
}

async fn run(
    listener: UnixListener,
    changers: Changers,
    monitor: Arc<Monitor>,
    ending: oneshot::Receiver<()>,
) {
    let pool = Arc::clone(monitor.pool());
    let streams = Arc::new(Semaphore::new(STREAMS_MAX));
    let watched = Arc::clone(&monitor);
    let watcher = tokio::spawn(async move {
        loop {
            tokio::time::sleep(JOB_PERIOD).await;
            let monitor = Arc::clone(&watched);
            let _ = tokio::task::spawn_blocking(move || monitor.jobs().refresh()).await;
        }
    });
    let listener = Bounded { listener, places: Arc::new(Semaphore::new(CONNECTIONS_MAX)) };
    let (ended, end) = oneshot::channel();
    let signal = async move {
        let _ = ending.await;
        let _ = ended.send(());
    };
    let routes = routes(Shared { pool, monitor, streams });
    let routes = routes.layer(axum::middleware::from_fn_with_state(changers, peer::check));
    let service = routes.into_make_service_with_connect_info::<Peer>();
    let serving = axum::serve(listener, service).with_graceful_shutdown(signal);
    let patience = async move {
        let _ = end.await;
        tokio::time::sleep(FAREWELL).await;
    };
    tokio::select! {
        served = serving.into_future() => {
            if let Err(error) = served {
                tracing::error!(%error, "the control socket failed");
            }
        }
        () = patience => {}
    }
    watcher.abort();
}

/// A listener that accepts a limited number of concurrent connections.
struct Bounded {
    listener: UnixListener,
    places: Arc<Semaphore>,
}

impl axum::serve::Listener for Bounded {
    type Io = Held<UnixStream>;
    type Addr = tokio::net::unix::SocketAddr;

    async fn accept(&mut self) -> (Held<UnixStream>, Self::Addr) {
        let places = Arc::clone(&self.places);
        let place = places.acquire_owned().await.expect("the semaphore is never closed");
        let (stream, address) = axum::serve::Listener::accept(&mut self.listener).await;
        (Held::new(stream, IDLE_MAX, place), address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

impl Connected<IncomingStream<'_, Bounded>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded>) -> Self {
        Self::of(stream.io().stream())
    }
}

/// The OpenAPI description.
#[derive(OpenApi)]
#[openapi(
    info(title = "Forebay", description = "Control of a running Forebay server."),
    paths(
        status,
        volume,
        drain,
        drain_volume,
        jobs,
        job,
        cancel,
        set,
        set_volume,
        pin,
        apply,
        retire,
        start_trace,
        trace,
        stop_trace,
        prefetch,
        prefetched,
        stop_prefetch,
        upgrade,
        last_upgrade,
        clients,
        disks,
        attach,
        detach,
        stop,
        left,
        statistics::statistics,
        events::events,
        events::stream,
        events::everything,
        events::acknowledge,
        metrics,
        description
    )
)]
struct Description;

fn routes(shared: Shared) -> axum::Router {
    axum::Router::new()
        .route("/v1/status", get(status))
        .route("/v1/volumes/{name}", get(volume))
        .route("/v1/volumes/{name}/drain", post(drain_volume))
        .route("/v1/set", post(set))
        .route("/v1/apply", post(apply).layer(DefaultBodyLimit::max(APPLY_BYTES_MAX)))
        .route("/v1/retire", post(retire))
        .route("/v1/volumes/{name}/set", post(set_volume))
        .route("/v1/volumes/{name}/pins", post(pin))
        .route("/v1/volumes/{name}/trace", get(trace).post(start_trace).delete(stop_trace))
        .route("/v1/volumes/{name}/prefetch", get(prefetched).post(prefetch).delete(stop_prefetch))
        .route("/v1/volumes/{name}/disk", post(attach).delete(detach))
        .route("/v1/clients", get(clients))
        .route("/v1/disks", get(disks))
        .route("/v1/drain", post(drain))
        .route("/v1/jobs", get(jobs))
        .route("/v1/jobs/{id}", get(job).delete(cancel))
        .route("/v1/upgrade", get(last_upgrade).post(upgrade))
        .route("/v1/stop", get(left).post(stop))
        .route("/v1/events", get(events::events))
        .route("/v1/events/stream", get(events::stream))
        .route("/v1/events/{id}/ack", post(events::acknowledge))
        .route("/v1/stream", get(events::everything))
        .route("/v1/statistics", get(statistics::statistics))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(description))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(shared)
}

/// An error answer.
struct Refusal(StatusCode, ErrorBody);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}

impl From<ControlError> for Refusal {
    fn from(error: ControlError) -> Self {
        let status = match error.kind {
            ControlErrorKind::NotFound => StatusCode::NOT_FOUND,
            ControlErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ControlErrorKind::Conflict => StatusCode::CONFLICT,
            ControlErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ControlErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
        };
        Self(status, ErrorBody { error: error.what, hint: error.hint })
    }
}

impl From<JsonRejection> for Refusal {
    fn from(rejection: JsonRejection) -> Self {
        let hint = "send JSON with content-type application/json; see /openapi.json".to_owned();
        Self(rejection.status(), ErrorBody { error: rejection.body_text(), hint })
    }
}

impl From<QueryRejection> for Refusal {
    fn from(rejection: QueryRejection) -> Self {
        let hint = "see /openapi.json for what may stand after the ?".to_owned();
        Self(rejection.status(), ErrorBody { error: rejection.body_text(), hint })
    }
}

type Answer<T> = Result<T, Refusal>;

/// Runs `ask` on a thread that may block.
async fn ask<T: Send + 'static>(
    ask: impl FnOnce() -> Result<T, ControlError> + Send + 'static,
) -> Answer<T> {
    match tokio::task::spawn_blocking(ask).await {
        Ok(answer) => Ok(answer?),
        Err(_) => {
            let what = "the request was given up because the server stops";
            let kind = ControlErrorKind::Unavailable;
            Err(ControlError::new(kind, what, "ask again when it serves").into())
        }
    }
}

/// The status of the pool.
#[utoipa::path(get, path = "/v1/status", responses(
    (status = 200, body = PoolStatus), (status = 503, body = ErrorBody)))]
async fn status(State(shared): State<Shared>) -> Answer<Json<PoolStatus>> {
    ask(move || Ok(Json(shared.monitor.status()?))).await
}

fn status_of(pool: &dyn PoolControl, name: &str) -> Result<Json<VolumeStatus>, ControlError> {
    let snapshot = pool.snapshot()?;
    Ok(Json(VolumeStatus::of(&snapshot, snapshot.volume(name)?)))
}

/// The status of one volume.
#[utoipa::path(get, path = "/v1/volumes/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = VolumeStatus), (status = 404, body = ErrorBody)))]
async fn volume(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
) -> Answer<Json<VolumeStatus>> {
    ask(move || status_of(&*shared.pool, &name)).await
}

/// Starts a job that writes all dirty data to the primaries, and returns the job.
#[utoipa::path(post, path = "/v1/drain", responses(
    (status = 202, body = Job), (status = 503, body = ErrorBody)))]
async fn drain(State(shared): State<Shared>) -> Answer<(StatusCode, Json<Job>)> {
    let job = ask(move || shared.monitor.jobs().start(None)).await?;
    Ok((StatusCode::ACCEPTED, Json(job)))
}

/// Starts a job that writes all dirty data of a volume to its primary, and returns the job.
#[utoipa::path(post, path = "/v1/volumes/{name}/drain", params(("name" = String, Path)),
    responses((status = 202, body = Job), (status = 404, body = ErrorBody)))]
async fn drain_volume(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
) -> Answer<(StatusCode, Json<Job>)> {
    let job = ask(move || shared.monitor.jobs().start(Some(&name))).await?;
    Ok((StatusCode::ACCEPTED, Json(job)))
}

/// The remembered jobs, oldest first.
#[utoipa::path(get, path = "/v1/jobs", responses((status = 200, body = [Job])))]
async fn jobs(State(shared): State<Shared>) -> Answer<Json<Vec<Job>>> {
    ask(move || Ok(Json(shared.monitor.jobs().list()))).await
}

/// One job.
#[utoipa::path(get, path = "/v1/jobs/{id}", params(("id" = u64, Path)), responses(
    (status = 200, body = Job), (status = 404, body = ErrorBody)))]
async fn job(State(shared): State<Shared>, Segment(id): Segment<String>) -> Answer<Json<Job>> {
    let id = job_number(&id)?;
    ask(move || Ok(Json(shared.monitor.jobs().get(id)?))).await
}

/// Cancels a job; data that it has destaged stays destaged.
#[utoipa::path(delete, path = "/v1/jobs/{id}", params(("id" = u64, Path)), responses(
    (status = 200, body = Job), (status = 404, body = ErrorBody)))]
async fn cancel(State(shared): State<Shared>, Segment(id): Segment<String>) -> Answer<Json<Job>> {
    let id = job_number(&id)?;
    ask(move || Ok(Json(shared.monitor.jobs().cancel(id)?))).await
}

fn job_number(text: &str) -> Result<u64, ControlError> {
    text.parse().map_err(|_| {
        let what = format!("{text:?} is not a job number");
        ControlError::new(ControlErrorKind::Invalid, what, "list them with GET /v1/jobs")
    })
}

/// Changes settings of the whole cache while it serves, also for later starts.
#[utoipa::path(post, path = "/v1/set", request_body = CacheSettings, responses(
    (status = 200, body = InForce), (status = 400, body = ErrorBody),
    (status = 503, body = ErrorBody)))]
async fn set(
    State(shared): State<Shared>,
    settings: Result<Json<CacheSettings>, JsonRejection>,
) -> Answer<Json<InForce>> {
    let Json(CacheSettings(settings)) = settings?;
    ask(move || Ok(Json(InForce::of(&change(&*shared.pool, None, &settings)?, None)))).await
}

/// Changes settings of a volume, and of the whole cache, while it serves, also for later starts.
#[utoipa::path(post, path = "/v1/volumes/{name}/set", params(("name" = String, Path)),
    request_body = VolumeSettings, responses((status = 200, body = VolumeInForce),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 503, body = ErrorBody)))]
async fn set_volume(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
    settings: Result<Json<VolumeSettings>, JsonRejection>,
) -> Answer<Json<VolumeInForce>> {
    let Json(VolumeSettings(settings)) = settings?;
    ask(move || {
        shared.pool.snapshot()?.volume(&name)?;
        in_force_of(&change(&*shared.pool, Some(&name), &settings)?, &name)
    })
    .await
}

/// Pins bytes of a volume, or unpins what has a name, and leaves its other pins, also for later
/// starts.
#[utoipa::path(post, path = "/v1/volumes/{name}/pins", params(("name" = String, Path)),
    request_body = PinEdit, responses((status = 200, body = VolumeInForce),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 503, body = ErrorBody)))]
async fn pin(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
    edit: Result<Json<PinEdit>, JsonRejection>,
) -> Answer<Json<VolumeInForce>> {
    let Json(edit) = edit?;
    ask(move || {
        shared.pool.pin(&name, &edit)?;
        in_force_of(&shared.pool.snapshot()?, &name)
    })
    .await
}

/// A volume with its settings in force.
fn in_force_of(pool: &PoolSnapshot, name: &str) -> Result<Json<VolumeInForce>, ControlError> {
    let InForce { settings } = InForce::of(pool, Some(name));
    Ok(Json(VolumeInForce { volume: VolumeStatus::of(pool, pool.volume(name)?), settings }))
}

/// Brings a configuration into force, or changes nothing.
#[utoipa::path(post, path = "/v1/apply", request_body = ApplyRequest, responses(
    (status = 200, body = Applied), (status = 400, body = ErrorBody),
    (status = 409, body = ErrorBody), (status = 503, body = ErrorBody)))]
async fn apply(
    State(shared): State<Shared>,
    request: Result<Json<ApplyRequest>, JsonRejection>,
) -> Answer<Json<Applied>> {
    let Json(ApplyRequest { config, path, dry_run }) = request?;
    ask(move || {
        let invalid = |error: ConfigError| {
            ControlError::new(ControlErrorKind::Invalid, error.to_string(), "nothing was changed")
        };
        let (path, text) = (PathBuf::from(path), config);
        let config = Config::parse(&path, &text).map_err(invalid)?;
        let application = shared.pool.apply(&Wanted { path, text, config }, dry_run)?;
        Ok(Json(Applied::of(application, dry_run)))
    })
    .await
}

/// Changes settings, and returns the pool with the settings then in force. All changes are parsed
/// before any is applied.
fn change(
    pool: &dyn PoolControl,
    volume: Option<&str>,
    settings: &BTreeMap<String, Option<String>>,
) -> Result<PoolSnapshot, ControlError> {
    let invalid = |what| ControlError::new(ControlErrorKind::Invalid, what, "nothing was changed");
    let given = settings.iter().filter_map(|(key, text)| Some((key, text.as_ref()?)));
    let changes = given.map(|(key, text)| Change::parse(volume, key, text));
    let changes = changes.collect::<Result<Vec<_>, _>>().map_err(invalid)?;
    if changes.is_empty() {
        return Err(invalid("no setting is given".to_owned()));
    }
    pool.set(&changes)?;
    pool.snapshot()
}

/// Starts recording clients' requests to a volume. The server creates the file with mode 0600.
#[utoipa::path(post, path = "/v1/volumes/{name}/trace", params(("name" = String, Path)),
    request_body = TraceRequest, responses((status = 201, body = TraceStatus),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
async fn start_trace(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
    request: Result<Json<TraceRequest>, JsonRejection>,
) -> Answer<(StatusCode, Json<TraceStatus>)> {
    let Json(TraceRequest { path, seconds }) = request?;
    let to = TraceTarget { path: absolute(path)?, limit: seconds.map(Duration::from_secs) };
    let status = ask(move || {
        shared.pool.start_trace(&name, &to)?;
        recording(&*shared.pool, &name)
    });
    Ok((StatusCode::CREATED, Json(status.await?)))
}

/// Begins to bring ranges of a volume into the cache. One at a time for each volume.
#[utoipa::path(post, path = "/v1/volumes/{name}/prefetch", params(("name" = String, Path)),
    request_body = PrefetchRequest, responses((status = 202, body = PrefetchStatus),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
async fn prefetch(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
    request: Result<Json<PrefetchRequest>, JsonRejection>,
) -> Answer<(StatusCode, Json<PrefetchStatus>)> {
    let Json(PrefetchRequest { ranges, rate }) = request?;
    let ranges = ranges.into_iter().map(|[from, to]| from..to).collect();
    let target = PrefetchTarget { ranges, rate };
    let status = ask(move || {
        shared.pool.start_prefetch(&name, &target)?;
        prefetch_of(&*shared.pool, &name)
    });
    Ok((StatusCode::ACCEPTED, Json(status.await?)))
}

fn prefetch_of(pool: &dyn PoolControl, name: &str) -> Result<PrefetchStatus, ControlError> {
    let found = pool.prefetch(name)?.ok_or_else(|| {
        let what = format!("nothing of volume {name:?} has been prefetched");
        ControlError::new(ControlErrorKind::NotFound, what, "start with `forebay prefetch`")
    })?;
    Ok(PrefetchStatus::of(&found))
}

/// The volume's prefetch: the running or the last one.
#[utoipa::path(get, path = "/v1/volumes/{name}/prefetch", params(("name" = String, Path)),
    responses((status = 200, body = PrefetchStatus), (status = 404, body = ErrorBody)))]
async fn prefetched(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
) -> Answer<Json<PrefetchStatus>> {
    Ok(Json(ask(move || prefetch_of(&*shared.pool, &name)).await?))
}

/// Ends the volume's prefetch; blocks that it brought in stay.
#[utoipa::path(delete, path = "/v1/volumes/{name}/prefetch", params(("name" = String, Path)),
    responses((status = 200, body = PrefetchStatus), (status = 404, body = ErrorBody)))]
async fn stop_prefetch(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
) -> Answer<Json<PrefetchStatus>> {
    let status = ask(move || {
        shared.pool.stop_prefetch(&name)?;
        prefetch_of(&*shared.pool, &name)
    });
    Ok(Json(status.await?))
}

/// A path on the server's host.
fn absolute(path: String) -> Result<PathBuf, ControlError> {
    let path = PathBuf::from(path);
    if path.is_absolute() {
        return Ok(path);
    }
    let what = format!("{} is not a whole path", path.display());
    let hint = "name the file from the root of the server's host";
    Err(ControlError::new(ControlErrorKind::Invalid, what, hint))
}

/// The volume's recording: the running or the last one.
#[utoipa::path(get, path = "/v1/volumes/{name}/trace", params(("name" = String, Path)),
    responses((status = 200, body = TraceStatus), (status = 404, body = ErrorBody)))]
async fn trace(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
) -> Answer<Json<TraceStatus>> {
    Ok(Json(ask(move || recording(&*shared.pool, &name)).await?))
}

/// Ends the volume's recording after all requests received so far are written.
#[utoipa::path(delete, path = "/v1/volumes/{name}/trace", params(("name" = String, Path)),
    responses((status = 200, body = TraceStatus), (status = 404, body = ErrorBody)))]
async fn stop_trace(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
) -> Answer<Json<TraceStatus>> {
    let status = ask(move || Ok(TraceStatus::of(&name, &shared.pool.stop_trace(&name)?)));
    Ok(Json(status.await?))
}

fn recording(pool: &dyn PoolControl, volume: &str) -> Result<TraceStatus, ControlError> {
    let trace = pool.trace(volume)?;
    let trace = trace.ok_or_else(|| ControlError::no_trace(volume))?;
    Ok(TraceStatus::of(volume, &trace))
}

/// Lets another program take over from the server. The answer comes at once; GET tells the outcome,
/// also that of the server that comes next.
#[utoipa::path(post, path = "/v1/upgrade", request_body = UpgradeRequest, responses(
    (status = 202, body = UpgradeStatus), (status = 400, body = ErrorBody),
    (status = 409, body = ErrorBody)))]
async fn upgrade(
    State(shared): State<Shared>,
    request: Result<Json<UpgradeRequest>, JsonRejection>,
) -> Answer<(StatusCode, Json<UpgradeStatus>)> {
    let Json(UpgradeRequest { program }) = request?;
    let program = absolute(program)?;
    let begun = ask(move || shared.pool.upgrade(&program)).await?;
    Ok((StatusCode::ACCEPTED, Json(UpgradeStatus::of(Some(&begun)))))
}

/// The last upgrade.
#[utoipa::path(get, path = "/v1/upgrade", responses((status = 200, body = UpgradeStatus)))]
async fn last_upgrade(State(shared): State<Shared>) -> Answer<Json<UpgradeStatus>> {
    ask(move || Ok(Json(UpgradeStatus::of(shared.pool.last_upgrade().as_ref())))).await
}

/// The clients of sockets, the longest connected first.
#[utoipa::path(get, path = "/v1/clients", responses((status = 200, body = [ClientStatus]),
    (status = 503, body = ErrorBody)))]
async fn clients(State(shared): State<Shared>) -> Answer<Json<Vec<ClientStatus>>> {
    ask(move || Ok(Json(shared.pool.clients()?.into_iter().map(ClientStatus::of).collect()))).await
}

/// The disks of the server's machine that ublk has made over its volumes, and those that wait for a
/// volume of this server's state directory.
#[utoipa::path(get, path = "/v1/disks", responses((status = 200, body = [DiskStatus]),
    (status = 503, body = ErrorBody)))]
async fn disks(State(shared): State<Shared>) -> Answer<Json<Vec<DiskStatus>>> {
    let disks = ask(move || shared.pool.disks()).await?;
    Ok(Json(disks.into_iter().map(DiskStatus::of).collect()))
}

/// Makes a volume a disk of the server's machine, by ublk.
#[utoipa::path(post, path = "/v1/volumes/{name}/disk", params(("name" = String, Path)),
    request_body = DiskRequest, responses((status = 201, body = DiskStatus),
    (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody), (status = 501, body = ErrorBody),
    (status = 503, body = ErrorBody)))]
async fn attach(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
    request: Result<Json<DiskRequest>, JsonRejection>,
) -> Answer<(StatusCode, Json<DiskStatus>)> {
    let Json(DiskRequest { sector_size }) = request?;
    let disk = ask(move || shared.pool.attach(&name, sector_size)).await?;
    Ok((StatusCode::CREATED, Json(DiskStatus::of(disk))))
}

/// Removes the volume's disk, unless it is in use. One that waits is removed even so.
#[utoipa::path(delete, path = "/v1/volumes/{name}/disk", params(("name" = String, Path)),
    responses((status = 200, body = DiskStatus), (status = 404, body = ErrorBody),
    (status = 409, body = ErrorBody), (status = 503, body = ErrorBody)))]
async fn detach(
    State(shared): State<Shared>,
    Segment(name): Segment<String>,
) -> Answer<Json<DiskStatus>> {
    Ok(Json(DiskStatus::of(ask(move || shared.pool.detach(&name)).await?)))
}

/// Begins to give up the cache device: its dirty data goes to the primaries, which are then used
/// without it. The answer comes at once; `health` in the status tells how far it is.
#[utoipa::path(post, path = "/v1/retire", responses((status = 202, body = Accepted),
    (status = 409, body = ErrorBody), (status = 503, body = ErrorBody)))]
async fn retire(State(shared): State<Shared>) -> Answer<(StatusCode, Json<Accepted>)> {
    ask(move || shared.pool.retire()).await?;
    Ok((StatusCode::ACCEPTED, Json(Accepted { accepted: true })))
}

/// Stops the server in order. The answer comes at once; the socket is gone once it has stopped.
#[utoipa::path(post, path = "/v1/stop", request_body = StopRequest, responses(
    (status = 202, body = Accepted), (status = 409, body = ErrorBody)))]
async fn stop(
    State(shared): State<Shared>,
    request: Result<Json<StopRequest>, JsonRejection>,
) -> Answer<(StatusCode, Json<Accepted>)> {
    let Json(StopRequest { drain }) = request?;
    ask(move || shared.pool.stop(drain)).await?;
    Ok((StatusCode::ACCEPTED, Json(Accepted { accepted: true })))
}

/// What a stop has left in the cache. The server is gone soon after this answer.
#[utoipa::path(get, path = "/v1/stop", responses((status = 200, body = StopStatus),
    (status = 409, body = ErrorBody)))]
async fn left(State(shared): State<Shared>) -> Answer<Json<StopStatus>> {
    ask(move || {
        let left = shared.pool.left().ok_or_else(|| {
            let kind = ControlErrorKind::Conflict;
            ControlError::new(kind, "the server has not stopped", "ask again after POST /v1/stop")
        })?;
        let LeftSnapshot { dirty_bytes, lost_bytes } = left;
        Ok(Json(StopStatus { dirty_bytes, lost_bytes }))
    })
    .await
}

/// Every counter, in the Prometheus text format.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String,
    content_type = "text/plain")))]
async fn metrics(State(shared): State<Shared>) -> Answer<impl IntoResponse> {
    let text = ask(move || Ok(exposition(&shared.pool.snapshot()?))).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}

/// This OpenAPI description.
#[utoipa::path(get, path = "/openapi.json", responses((status = 200)))]
async fn description() -> Answer<impl IntoResponse> {
    Ok(Json(describe()?))
}

/// The description as JSON.
fn describe() -> Result<serde_json::Value, ControlError> {
    let unreadable = |error: serde_json::Error| {
        let kind = ControlErrorKind::Unavailable;
        ControlError::new(kind, error.to_string(), "report it")
    };
    let mut api = serde_json::to_value(Description::openapi()).map_err(unreadable)?;
    describe_responses(&mut api);
    Ok(api)
}

/// Describes the statuses of every response, as OpenAPI requires.
fn describe_responses(api: &mut serde_json::Value) {
    let items = api["paths"].as_object_mut().into_iter().flat_map(|paths| paths.values_mut());
    let operations = items.filter_map(|item| item.as_object_mut()).flat_map(|o| o.values_mut());
    let responses = operations.filter_map(|operation| operation.get_mut("responses"));
    let responses = responses.filter_map(|responses| responses.as_object_mut());
    for (status, response) in responses.flatten() {
        let meaning = match status.as_str() {
            "200" => "Done; the result is in the body.",
            "201" => "Started.",
            "202" => "Accepted; it is in progress.",
            "400" => "Something in the request cannot be used.",
            "403" => "This user may only read.",
            "404" => "Not found.",
            "409" => "It conflicts with the current state.",
            "501" => "This machine cannot do it.",
            "503" => "The server cannot answer: it is starting, stopping, or stuck.",
            _ => "See the body.",
        };
        response["description"] = meaning.into();
    }
}

async fn no_route(uri: axum::http::Uri) -> Refusal {
    let what = format!("there is nothing at {}", uri.path());
    ControlError::new(ControlErrorKind::NotFound, what, "see /openapi.json").into()
}

async fn no_method(method: axum::http::Method, uri: axum::http::Uri) -> Refusal {
    let error = format!("{} cannot be asked with {method}", uri.path());
    let hint = "see /openapi.json".to_owned();
    Refusal(StatusCode::METHOD_NOT_ALLOWED, ErrorBody { error, hint })
}
