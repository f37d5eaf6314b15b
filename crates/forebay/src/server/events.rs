//! The events of a cache: kept in `UUID.events` of the state directory, and told to the configured
//! consumers. A cache that replaced another one in a hand-over begins with the events of that one,
//! whose numbers the clients know.

use std::io;
use std::sync::Arc;

use forebay_control::api::Severity;
use forebay_control::config::EventsConfig;
use forebay_control::events::{Consumer, EventLog, EventStore, News, STORED_BYTES_MAX};
use forebay_runtime::{StateDir, file_of, sealed, unsealed};

/// Longest file that is read, in bytes: the text, and its checksum.
const BYTES_MAX: u64 = STORED_BYTES_MAX as u64 + (4 << 10);

/// How the server came to serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Came {
    /// By a start.
    Started,
    /// By its keeper, after the server before was gone.
    Restarted,
    /// By an upgrade.
    TookOver,
}

/// Opens the events of the cache `uuid`, which may have replaced another one, and notes that the
/// server serves.
pub fn open(
    state: &StateDir,
    (uuid, replaced): ([u8; 16], Option<[u8; 16]>),
    config: &EventsConfig,
    came: Came,
) -> io::Result<Arc<EventLog>> {
    let name = |uuid| file_of(uuid, "events");
    let mut consumers = Vec::new();
    if !config.command.is_empty() {
        consumers.push(Consumer::command(config.command.clone())?);
    }
    if let Some(url) = &config.webhook {
        consumers.push(Consumer::webhook(url)?);
    }
    let file = File { state: state.clone(), name: name(uuid), replaced: replaced.map(name) };
    let log = EventLog::start(Some(Box::new(file)), consumers)?;
    let version = env!("CARGO_PKG_VERSION");
    match came {
        Came::Started => {
            let text = format!("forebay {version} was started");
            log.tell(News::new("server-started", Severity::Info, text, ""));
        }
        Came::Restarted => {
            let text = "the keeper started the server again, since it had died".to_owned();
            let remedy = "clients saw a pause; send the log from before this to the developers";
            log.tell(News::new("server-restarted", Severity::Error, text, remedy));
        }
        // The end of the upgrade is an event of its own.
        Came::TookOver => {}
    }
    Ok(log)
}

/// A file of the state directory, with a checksum.
struct File {
    state: StateDir,
    name: String,
    /// The file to begin with.
    replaced: Option<String>,
}

impl EventStore for File {
    fn load(&self) -> io::Result<Option<String>> {
        for name in [Some(&self.name), self.replaced.as_ref()].into_iter().flatten() {
            let Some(text) = self.state.read(name, BYTES_MAX)? else { continue };
            let body = unsealed(&text).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, format!("{name} is damaged"))
            })?;
            return Ok(Some(body.to_owned()));
        }
        Ok(None)
    }

    fn save(&self, text: &str) -> io::Result<()> {
        self.state.replace(&self.name, &sealed(&format!("{text}\n")))
    }
}
