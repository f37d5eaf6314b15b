//! How others see the server: the read-only listener, and the consumers of events.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::endpoint::{Listen, Place};
use crate::events::Webhook;

use super::{ConfigError, invalid};

/// The read-only listener for metrics and the page.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct WebConfig {
    /// Its address; there is no such listener when absent.
    pub listen: Option<WebListen>,
    /// The file with the token that clients over TCP must know.
    pub token_file: Option<PathBuf>,
    /// Names of this host that requests over TCP may use.
    pub hosts: Vec<String>,
}

/// The address of the read-only listener: `HOST:PORT`, or `unix:PATH` with permissions.
#[derive(Clone, PartialEq, Debug)]
pub struct WebListen(pub Listen);

impl FromStr for WebListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let has_kind = text.starts_with("unix:") || text.starts_with("tcp:");
        let listen = if has_kind { text.parse() } else { format!("tcp:{text}").parse() };
        let listen: Listen = listen?;
        if listen.tls.is_some() {
            let what = "it has no TLS; put a proxy in front of a Unix socket";
            return Err(format!("endpoint {text:?}: {what}"));
        }
        Ok(Self(listen))
    }
}

impl fmt::Display for WebListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The consumers of events.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EventsConfig {
    /// A program and its arguments; it gets each event as JSON on standard input.
    pub command: Vec<String>,
    /// The URL of a web server that gets each event as JSON with POST.
    pub webhook: Option<String>,
}

impl WebConfig {
    /// Checks that a listener over TCP has a token.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let tcp = self.listen.as_ref().filter(|listen| matches!(listen.0.at, Place::Tcp(..)));
        match tcp {
            Some(listen) if self.token_file.is_none() => {
                let what = format!("{listen} has no token_file");
                let hint = "name a file with a token, or listen at unix:PATH";
                Err(invalid("web.listen", what, hint))
            }
            _ => Ok(()),
        }
    }
}

impl EventsConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.command.first().is_some_and(|program| !program.starts_with('/')) {
            let what = format!("{:?} is not a whole path", self.command[0]);
            return Err(invalid("events.command", what, "name the program from the root"));
        }
        let webhook = self.webhook.as_deref().map(Webhook::parse).transpose();
        webhook.map(drop).map_err(|what| invalid("events.webhook", what, "give such a URL"))
    }
}
