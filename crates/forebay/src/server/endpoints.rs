//! The endpoints of NBD clients: their sockets, certificates, and servers.

use std::io::ErrorKind;
use std::net::ToSocketAddrs;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use forebay_block::{BufPool, Session};
use forebay_control::access::SocketMode;
use forebay_control::config::{Config, ServerConfig, TlsPolicy};
use forebay_control::endpoint::{Listen, Place};
use forebay_frontend_nbd::{Limits, NbdServer, Tls, TlsConfig};
use forebay_runtime::{Access, Address, Listener, Pool, SessionFactory};

use crate::busy;
use crate::server::kept::Kept;

/// Default permission bits of a Unix socket: owner and group.
const SOCKET_MODE: u32 = 0o660;

/// Sockets that are bound, and certificates that are loaded.
pub struct Endpoints {
    listeners: Vec<Bound>,
    tls: Option<TlsConfig>,
}

struct Bound {
    listener: Listener,
    policy: TlsPolicy,
    /// As configured: its port may be 0.
    asked: Address,
    /// The name under which the keeper holds it.
    name: String,
}

/// Sockets whose clients wait.
pub struct Doors {
    closed: Vec<(Listener, NbdServer)>,
    /// For the clients of a server before this one.
    left: Arc<dyn SessionFactory>,
}

impl Endpoints {
    /// Reads the certificates, and binds every endpoint that no earlier server has left.
    pub fn open(config: &Config, kept: &mut Kept) -> anyhow::Result<Self> {
        let server = &config.server;
        let tls = certificates(server)?;
        let mut listeners = Vec::<Bound>::new();
        for endpoint in &server.nbd {
            let policy = endpoint.tls_by(server.tls);
            for address in addresses(endpoint)? {
                // The order of a host's addresses may be another one at each start.
                let same = listeners.iter().filter(|bound| bound.asked == address).count();
                let name = format!("listener {same} {address}");
                let asked = address.clone();
                let listener = match kept.take(&name) {
                    Some(left) => Listener::left(address, left.descriptor).context(name.clone())?,
                    None => busy::bind(|| Listener::bind(&address)).map_err(no_listener)?,
                };
                warn_if_open(policy, listener.address());
                listeners.push(Bound { listener, policy, asked, name });
            }
        }
        Ok(Self { listeners, tls })
    }

    /// The addresses that clients connect to, with the ports that the kernel chose.
    pub fn addresses(&self) -> impl Iterator<Item = String> {
        self.listeners.iter().map(|bound| bound.listener.address().to_string())
    }

    /// Makes all ready to serve the pool's volumes. The keeper gets the sockets, so that clients
    /// can connect while there is no server.
    pub fn leave_with(self, kept: &Kept, pool: &Pool, buffers: &BufPool) -> anyhow::Result<Doors> {
        let mut closed = Vec::new();
        for Bound { listener, policy, name, .. } in self.listeners {
            kept.hold(&name, "", listener.as_fd())?;
            let tls = match (policy, &self.tls) {
                (TlsPolicy::Off, _) | (_, None) => Tls::Off,
                (TlsPolicy::Allowed, Some(tls)) => Tls::Allowed(tls.clone()),
                (TlsPolicy::Required, Some(tls)) => Tls::Required(tls.clone()),
            };
            let exports = pool.registry().exports();
            let server = NbdServer::new(exports, tls, Limits::default(), buffers.clone())?;
            closed.push((listener, server));
        }
        // Their handshake is over.
        let (exports, buffers) = (pool.registry().exports(), buffers.clone());
        let server = NbdServer::new(exports, Tls::Off, Limits::default(), buffers)?;
        Ok(Doors { closed, left: Arc::new(Sessions(server)) })
    }
}

impl Doors {
    /// Lets clients in; returns the door for those of a server before this one. From now on the
    /// files of the sockets go with this server.
    pub fn open(&mut self, pool: &Pool) -> anyhow::Result<Arc<dyn SessionFactory>> {
        for (mut listener, server) in self.closed.drain(..) {
            listener.own_file();
            pool.listen(vec![listener], Arc::new(Sessions(server)))?;
        }
        Ok(Arc::clone(&self.left))
    }
}

/// Creates the sessions of an endpoint's clients.
struct Sessions(NbdServer);

impl SessionFactory for Sessions {
    fn session(&self) -> Box<dyn Session> {
        self.0.session()
    }

    fn resumed(&self, agreed: &str) -> Option<Box<dyn Session>> {
        self.0.resumed(agreed)
    }

    fn refusal(&self, why: &'static str) -> Option<Box<dyn Session>> {
        Some(self.0.refusal(why))
    }
}

/// Warns if an endpoint lets the network read and write the volumes.
fn warn_if_open(policy: TlsPolicy, address: &Address) {
    if let Address::Tcp(at) = address
        && !at.ip().is_loopback()
        && policy == TlsPolicy::Off
    {
        tracing::warn!(
            "ANYBODY who reaches {address} may read and write all volumes, and so may anybody on \
             the network path: use TLS (tls = \"required\", docs/user/nbd.md), a loopback address, \
             or a Unix socket"
        );
    }
}

fn addresses(endpoint: &Listen) -> anyhow::Result<Vec<Address>> {
    match &endpoint.at {
        Place::Unix(path) => {
            let numbers = endpoint.access.numbers();
            let (owner, group) = numbers
                .map_err(|what| crate::WrongUsage(format!("endpoint {}: {what}", endpoint.at)))?;
            let mode = endpoint.access.mode.map_or(SOCKET_MODE, |SocketMode(mode)| mode);
            let access = Access { mode, owner, group };
            Ok(vec![Address::Unix { path: path.clone(), access }])
        }
        Place::Tcp(host, port) => {
            let found = (host.as_str(), *port).to_socket_addrs();
            let found = found.with_context(|| {
                let hint = "use a name that this host can resolve, or an address";
                format!("endpoint {}: host {host:?}; {hint}", endpoint.at)
            })?;
            Ok(found.map(Address::Tcp).collect())
        }
    }
}

/// Why an endpoint cannot be opened, and the remedy.
fn no_listener(error: std::io::Error) -> anyhow::Error {
    let hint = match error.kind() {
        ErrorKind::NotFound => "make its directory first",
        ErrorKind::PermissionDenied => "choose a path or a port that this user may use",
        ErrorKind::AddrNotAvailable => "use an address of this host, or 0.0.0.0 for all of them",
        ErrorKind::InvalidFilename => "the path of a Unix socket has 107 bytes at most",
        _ => return error.into(),
    };
    anyhow!("{error}; {hint}")
}

/// Reads the certificates.
pub fn certificates(server: &ServerConfig) -> anyhow::Result<Option<TlsConfig>> {
    let (Some(cert), Some(key)) = (&server.tls_cert, &server.tls_key) else {
        return Ok(None);
    };
    let ca = server.tls_ca.as_deref().map(read).transpose()?;
    Ok(Some(TlsConfig::from_pem(&read(cert)?, &read(key)?, ca.as_deref())?))
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| {
        anyhow!("{}: {error}; name a PEM file that the server may read", path.display())
    })
}
