//! The read-only listener: its token, and its socket, which the keeper holds for the next server.

use std::os::fd::AsFd;
use std::sync::Arc;

use forebay_control::config::WebConfig;
use forebay_control::endpoint::Place;
use forebay_control::{Monitor, Token, WebServer, WebSocket};

use crate::busy;
use crate::server::kept::Kept;

/// The socket that is bound, and the token that is read.
pub struct Web {
    socket: WebSocket,
    token: Option<Token>,
    hosts: Vec<String>,
    /// The name under which the keeper holds it.
    name: String,
}

impl Web {
    /// Reads the token, and binds the socket unless an earlier server has left it; `None` without
    /// a listener in the configuration.
    pub fn open(config: &WebConfig, kept: &mut Kept) -> anyhow::Result<Option<Self>> {
        let Some(listen) = &config.listen else { return Ok(None) };
        let listen = &listen.0;
        let token = config.token_file.as_deref().map(Token::read).transpose();
        let token = token.map_err(crate::WrongUsage)?;
        let name = format!("web {}", listen.at);
        let socket = match kept.take(&name) {
            Some(left) => WebSocket::left(listen, left.descriptor)?,
            None => busy::bind(|| WebSocket::bind(listen))?,
        };
        if let Place::Tcp(host, _) = &listen.at
            && !socket.is_loopback()
        {
            tracing::warn!(
                host,
                "the web listener has no TLS: who sees its packets sees the token; use a loopback \
                 address, or a Unix socket behind a proxy"
            );
        }
        Ok(Some(Self { socket, token, hosts: config.hosts.clone(), name }))
    }

    /// Serves what the monitor sees.
    pub fn serve(self, monitor: &Arc<Monitor>, kept: &Kept) -> anyhow::Result<WebServer> {
        let Self { socket, token, hosts, name } = self;
        kept.hold(&name, "", socket.as_fd())?;
        tracing::info!(page = socket.address(), "web listener");
        Ok(WebServer::start(socket, Arc::clone(monitor), token, hosts)?)
    }
}
