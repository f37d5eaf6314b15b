//! The socket of the read-only listener: TCP or Unix.

use std::io;
use std::net::ToSocketAddrs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::endpoint::{Listen, Place};
use crate::socket::{SocketError, SocketFile, listen};

/// How long a TCP client may leave what it was sent unacknowledged, or take none of it.
const STALL: Duration = Duration::from_secs(30);

/// The bound socket.
pub struct WebSocket {
    bound: Bound,
    /// `None` if the file of a Unix socket is not to be removed.
    file: Option<SocketFile>,
    address: String,
}

enum Bound {
    Tcp(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener),
}

impl WebSocket {
    /// Binds the socket.
    ///
    /// # Errors
    /// When the address is not to be had; of kind `AddrInUse` if it is in use.
    pub fn bind(at: &Listen) -> io::Result<Self> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("web listener {}: {error}", at.at))
        };
        match &at.at {
            Place::Unix(path) => {
                let listener = listen(path, &at.access).map_err(|error| match error {
                    SocketError::Taken(_) => io::Error::new(io::ErrorKind::AddrInUse, error),
                    error => io::Error::other(error),
                });
                Ok(Self::unix(listener.map_err(named)?, path, true))
            }
            Place::Tcp(host, port) => {
                let mut found = (host.as_str(), *port).to_socket_addrs().map_err(named)?;
                let address = found.next().ok_or_else(|| {
                    named(io::Error::other("the host has no address; use one of this host"))
                })?;
                Self::tcp(std::net::TcpListener::bind(address).map_err(named)?).map_err(named)
            }
        }
    }

    /// The socket that an earlier server has left.
    ///
    /// # Errors
    /// When it is none.
    pub fn left(at: &Listen, socket: OwnedFd) -> io::Result<Self> {
        match &at.at {
            Place::Unix(path) => Ok(Self::unix(socket.into(), path, false)),
            Place::Tcp(..) => Self::tcp(socket.into()),
        }
    }

    fn unix(listener: std::os::unix::net::UnixListener, path: &Path, own: bool) -> Self {
        let file = own.then(|| SocketFile::at(path));
        Self { bound: Bound::Unix(listener), file, address: format!("unix:{}", path.display()) }
    }

    fn tcp(listener: std::net::TcpListener) -> io::Result<Self> {
        let address = format!("http://{}", listener.local_addr()?);
        Ok(Self { bound: Bound::Tcp(listener), file: None, address })
    }

    /// The URL of the page, with the port that the kernel chose; or `unix:PATH`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The path of a Unix socket.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.address.strip_prefix("unix:").map(Path::new)
    }

    /// Whether only this host reaches it.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        match &self.bound {
            Bound::Tcp(listener) => listener.local_addr().is_ok_and(|at| at.ip().is_loopback()),
            Bound::Unix(_) => true,
        }
    }

    /// Whether it is reached over TCP.
    #[must_use]
    pub fn is_tcp(&self) -> bool {
        matches!(self.bound, Bound::Tcp(_))
    }

    /// For the runtime of the calling thread.
    pub(super) fn listener(self) -> io::Result<(Accept, Option<SocketFile>)> {
        let accept = match self.bound {
            Bound::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                Accept::Tcp(TcpListener::from_std(listener)?)
            }
            Bound::Unix(listener) => {
                listener.set_nonblocking(true)?;
                Accept::Unix(UnixListener::from_std(listener)?)
            }
        };
        Ok((accept, self.file))
    }
}

impl AsFd for WebSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.bound {
            Bound::Tcp(listener) => listener.as_fd(),
            Bound::Unix(listener) => listener.as_fd(),
        }
    }
}

/// A listener of the runtime.
pub(super) enum Accept {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Accept {
    pub async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                let millis = u32::try_from(STALL.as_millis()).expect("it is short");
                rustix::net::sockopt::set_tcp_user_timeout(&stream, millis)?;
                Ok(Stream::Tcp(stream))
            }
            Self::Unix(listener) => Ok(Stream::Unix(listener.accept().await?.0)),
        }
    }
}

/// A connection.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Calls a method of the stream inside.
macro_rules! forward {
    ($this:expr, $method:ident $(, $argument:expr)*) => {
        match $this.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).$method($($argument),*),
            Self::Unix(stream) => Pin::new(stream).$method($($argument),*),
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        forward!(self, poll_read, context, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        forward!(self, poll_write, context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, poll_flush, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, poll_shutdown, context)
    }
}
