//! Programs that are told of each event: a command, or a web server. Each has a thread, a bounded
//! queue, and a limit on the time for an event. What does not fit is left out, and the log says how
//! many.

use std::io::{self, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::api::Event;

/// Most events that wait for a consumer.
const QUEUE: usize = 64;
/// How long a consumer may take for an event.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pauses before an event is sent to a web server again.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
/// How often the end of a command is looked for.
const STEP: Duration = Duration::from_millis(20);

/// A consumer of events.
pub struct Consumer {
    queue: SyncSender<Event>,
    left_out: Arc<AtomicU64>,
}

/// The address of a web server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Webhook {
    host: String,
    path: String,
}

impl Webhook {
    /// Parses `http://HOST[:PORT]/PATH`.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn parse(url: &str) -> Result<Self, String> {
        let rest = url.strip_prefix("http://").ok_or_else(|| {
            format!("{url:?} is not http://HOST[:PORT]/PATH; for TLS, use a command such as curl")
        })?;
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let named = !host.is_empty() && host.parse::<axum::http::uri::Authority>().is_ok();
        let path = format!("/{path}");
        if !named || path.parse::<axum::http::Uri>().is_err() {
            return Err(format!("{url:?} is not http://HOST[:PORT]/PATH"));
        }
        Ok(Self { host: host.to_owned(), path })
    }

    /// The address to connect to.
    fn address(&self) -> String {
        let has_port =
            self.host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if has_port { self.host.clone() } else { format!("{}:80", self.host) }
    }
}

impl Consumer {
    /// A command, with its arguments. It gets the event as JSON on standard input.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn command(words: Vec<String>) -> io::Result<Self> {
        Self::start("events-command", move |event| run(&words, event))
    }

    /// A web server, at `http://HOST[:PORT]/PATH`. It gets the event as JSON with POST.
    ///
    /// # Errors
    /// If the URL cannot be used, or the thread cannot be started.
    pub fn webhook(url: &str) -> io::Result<Self> {
        let hook = Webhook::parse(url).map_err(io::Error::other)?;
        Self::start("events-webhook", move |event| post_again(&hook, event))
    }

    fn start(
        name: &str,
        deliver: impl Fn(&Event) -> Result<(), String> + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, events) = sync_channel(QUEUE);
        let left_out = Arc::<AtomicU64>::default();
        let (counted, named) = (Arc::clone(&left_out), name.to_owned());
        let serve = move || serve(&named, &events, &counted, deliver);
        std::thread::Builder::new().name(name.to_owned()).spawn(serve)?;
        Ok(Self { queue, left_out })
    }

    /// Puts an event into the queue. Never waits.
    pub fn tell(&self, event: &Event) {
        if self.queue.try_send(event.clone()).is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn serve(
    name: &str,
    events: &Receiver<Event>,
    left_out: &AtomicU64,
    deliver: impl Fn(&Event) -> Result<(), String>,
) {
    for event in events {
        if let Err(error) = deliver(&event) {
            tracing::warn!(event = event.id, "{name} did not take it: {error}");
        }
        let missed = left_out.swap(0, Ordering::Relaxed);
        if missed > 0 {
            tracing::warn!("{name} is too slow: {missed} events were left out");
        }
    }
}

fn json(event: &Event) -> Result<Vec<u8>, String> {
    serde_json::to_vec(event).map_err(|error| error.to_string())
}

/// Runs a command for an event; kills it if it takes too long.
fn run(words: &[String], event: &Event) -> Result<(), String> {
    let [program, arguments @ ..] = words else { return Err("no command is given".to_owned()) };
    let failed = |error: io::Error| format!("{program}: {error}");
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.map_err(failed)?;
    if let Some(mut input) = child.stdin.take() {
        let bytes = json(event)?;
        // A command may ignore it, and a long event does not fit into a pipe.
        std::thread::spawn(move || drop(input.write_all(&bytes)));
    }
    let ended = wait(&mut child).map_err(failed);
    if !matches!(ended, Ok(Some(_))) {
        let _ = child.kill();
        let _ = child.wait();
    }
    match ended? {
        None => Err(format!("{program} was killed after {PATIENCE:?}")),
        Some(true) => Ok(()),
        Some(false) => Err(format!("{program} failed")),
    }
}

/// Waits for the end of a command: whether it succeeded; `None` if it takes too long.
fn wait(child: &mut Child) -> io::Result<Option<bool>> {
    let limit = Instant::now() + PATIENCE;
    while Instant::now() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        std::thread::sleep(STEP);
    }
    Ok(None)
}

/// Sends an event to a web server, up to three times.
fn post_again(hook: &Webhook, event: &Event) -> Result<(), String> {
    let body = json(event)?;
    for pause in PAUSES {
        if post(hook, body.clone()).is_ok() {
            return Ok(());
        }
        std::thread::sleep(pause);
    }
    post(hook, body)
}

fn post(hook: &Webhook, body: Vec<u8>) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let sent = runtime.block_on(async { tokio::time::timeout(PATIENCE, send(hook, body)).await });
    runtime.shutdown_background();
    sent.unwrap_or_else(|_| Err(format!("{} has not answered in {PATIENCE:?}", hook.host)))
}

async fn send(hook: &Webhook, body: Vec<u8>) -> Result<(), String> {
    let said = |error: &dyn std::fmt::Display| format!("{}: {error}", hook.host);
    let request = Request::post(&hook.path)
        .header("host", &hook.host)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| said(&error))?;
    let stream = TcpStream::connect(hook.address()).await.map_err(|error| said(&error))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| said(&error))?;
    tokio::spawn(connection);
    let answer = sender.send_request(request).await.map_err(|error| said(&error))?;
    match answer.status() {
        status if status.is_success() => Ok(()),
        status => Err(format!("{} answered {status}", hook.host)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_plain_http() {
        let hook = Webhook::parse("http://alerts.lan:9000/a/b?c=d").expect("it is one");
        assert_eq!((hook.address().as_str(), hook.path.as_str()), ("alerts.lan:9000", "/a/b?c=d"));
        assert_eq!(Webhook::parse("http://[::1]").expect("it is one").address(), "[::1]:80");
        for url in ["https://a/b", "a/b", "http:///b", "http://a b/c", "http://a/b c"] {
            let error = Webhook::parse(url).expect_err(url);
            assert!(error.contains(url), "{error}");
        }
    }
}
