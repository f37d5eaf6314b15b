//! Listening Unix sockets and TCP ports, to which clients connect.
//!
//! The file of a Unix socket may be left over from a server that died. It is removed only if it is
//! a socket and nobody answers on it. Its permissions are set before it listens, so that nobody can
//! connect too early.

use std::fmt;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, lchown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::places::Way;

/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 128;
/// Idle time on a TCP connection before the kernel probes it, the time between probes, and their
/// number: a peer that is silent for two minutes is considered gone.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_COUNT: u32 = 6;

/// Who may connect to a Unix socket: its file's permission bits, owner and group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Access {
    /// Permission bits; write permission allows connecting.
    pub mode: u32,
    /// Numeric owner; the server's own when `None`.
    pub owner: Option<u32>,
    /// Numeric group; the server's own when `None`.
    pub group: Option<u32>,
}

impl Access {
    /// These permission bits, with the server's own user and group.
    #[must_use]
    pub fn mode(mode: u32) -> Self {
        Self { mode, owner: None, group: None }
    }

    fn apply(self, path: &Path) -> io::Result<()> {
        if self.owner.is_some() || self.group.is_some() {
            lchown(path, self.owner, self.group).map_err(|error| {
                let what = "its owner and group cannot be set";
                let hint = "only root gives files away; others may choose a group of their own";
                io::Error::new(error.kind(), format!("{what}: {error}; {hint}"))
            })?;
        }
        fs::set_permissions(path, fs::Permissions::from_mode(self.mode))
    }
}

/// An address that clients connect to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Address {
    /// A Unix socket.
    Unix {
        /// Path of the socket file.
        path: PathBuf,
        /// Who may connect.
        access: Access,
    },
    /// A TCP port; port 0 lets the kernel choose.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix { path, .. } => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// A bound, listening socket. Dropping it removes the file of a Unix socket.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    address: Address,
    /// Device and inode of the socket's file.
    file: Option<(u64, u64)>,
}

impl Listener {
    /// Binds the address and listens.
    ///
    /// # Errors
    /// If the address is in use, or may not be used; the message names it.
    pub fn bind(address: &Address) -> io::Result<Self> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot listen on {address}: {error}"))
        };
        match address {
            Address::Unix { path, access } => Self::bind_unix(path, *access).map_err(named),
            Address::Tcp(at) => Self::bind_tcp(*at).map_err(named),
        }
    }

    fn bind_unix(path: &Path, access: Access) -> io::Result<Self> {
        remove_stale(path)?;
        let name = SocketAddrUnix::new(path)?;
        let kind = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(kind.0, kind.1, kind.2, None)?;
        rustix::net::bind(&socket, &name)?;
        let applied = access.apply(path);
        let file = file_at(path);
        let address = Address::Unix { path: path.into(), access };
        let listener = Self { socket, address, file };
        applied?;
        // Up to this point nobody can connect.
        rustix::net::listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    fn bind_tcp(at: SocketAddr) -> io::Result<Self> {
        Self::tcp(TcpListener::bind(at)?)
    }

    fn tcp(listener: TcpListener) -> io::Result<Self> {
        let address = Address::Tcp(listener.local_addr()?);
        Ok(Self { socket: listener.into(), address, file: None })
    }

    /// A socket that an earlier server has left, which was bound to `address`. The file of a Unix
    /// socket is not removed until [`Listener::own_file`].
    ///
    /// # Errors
    /// If it is no such socket.
    pub fn left(address: Address, socket: OwnedFd) -> io::Result<Self> {
        match address {
            Address::Tcp(_) => Self::tcp(socket.into()),
            Address::Unix { .. } => Ok(Self { socket, address, file: None }),
        }
    }

    /// From now on the file of a Unix socket goes with the listener, if it is still there. It gets
    /// the listener's permissions, which may be others than those of the server before.
    pub fn own_file(&mut self) {
        if let Address::Unix { path, access } = &self.address {
            self.file = file_at(path);
            if self.file.is_some()
                && let Err(error) = access.apply(path)
            {
                tracing::warn!(path = %path.display(), %error, "a socket keeps its permissions");
            }
        }
    }

    /// The file of a Unix socket stays when this is dropped: the next server has the socket.
    pub fn leave_file(&mut self) {
        self.file = None;
    }

    /// The address it listens on, with the port that the kernel chose.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// How its clients connect.
    #[must_use]
    pub fn way(&self) -> Way {
        match self.address {
            Address::Unix { .. } => Way::Unix,
            Address::Tcp(_) => Way::Tcp,
        }
    }

    /// Prepares an accepted connection: small answers are sent at once, and a vanished peer is
    /// noticed.
    ///
    /// # Errors
    /// If the connection is already gone.
    pub fn prepare(&self, connection: BorrowedFd<'_>) -> io::Result<()> {
        if matches!(self.address, Address::Tcp(_)) {
            sockopt::set_tcp_nodelay(connection, true)?;
            sockopt::set_socket_keepalive(connection, true)?;
            sockopt::set_tcp_keepidle(connection, KEEPALIVE_IDLE)?;
            sockopt::set_tcp_keepintvl(connection, KEEPALIVE_INTERVAL)?;
            sockopt::set_tcp_keepcnt(connection, KEEPALIVE_COUNT)?;
        }
        Ok(())
    }

    /// The peer of an accepted connection, for the log.
    #[must_use]
    pub fn peer_of(&self, connection: BorrowedFd<'_>) -> String {
        let unknown = || "unknown".to_owned();
        match &self.address {
            Address::Tcp(_) => {
                let peer = connection.try_clone_to_owned();
                let peer = peer.and_then(|socket| TcpStream::from(socket).peer_addr());
                peer.map_or_else(|_| unknown(), |peer| peer.to_string())
            }
            Address::Unix { .. } => {
                let peer = sockopt::socket_peercred(connection);
                peer.map_or_else(
                    |_| unknown(),
                    |peer| {
                        format!(
                            "process {} of user {}",
                            peer.pid.as_raw_nonzero(),
                            peer.uid.as_raw()
                        )
                    },
                )
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Address::Unix { path, .. } = &self.address else { return };
        let found = file_at(path);
        if found.is_some() && found == self.file {
            // If the file cannot be removed here, the next server removes it.
            let _ = fs::remove_file(path);
        }
    }
}

/// Device and inode of the file at `path`, if there is one.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Removes the socket file of a server that is gone.
fn remove_stale(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !found.file_type().is_socket() {
        let what = "a file is in its place that is not a socket: remove it or choose another path";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, "another server listens there already"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempDir;

    fn unix(path: &Path) -> Address {
        Address::Unix { path: path.into(), access: Access::mode(0o600) }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = TempDir::new();
        let path = dir.path("s");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&unix(&path)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = Listener::bind(&unix(&path)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains("another server"), "{error}");
        assert!(UnixStream::connect(&path).is_ok());
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_belongs_to_whom_it_is_given() {
        let dir = TempDir::new();
        let path = dir.path("s");
        let own = fs::metadata(dir.path("")).unwrap();
        let access = Access { mode: 0o606, owner: Some(own.uid()), group: Some(own.gid()) };
        let listener = Listener::bind(&Address::Unix { path: path.clone(), access }).unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!(found.permissions().mode() & 0o777, 0o606);
        assert_eq!((found.uid(), found.gid()), (own.uid(), own.gid()));
        drop(listener);
        if own.uid() == 0 {
            let access = Access { owner: Some(65534), group: Some(65533), ..access };
            let _given = Listener::bind(&Address::Unix { path: path.clone(), access }).unwrap();
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.uid(), found.gid()), (65534, 65533));
        } else {
            let access = Access { owner: Some(0), ..access };
            let error = Listener::bind(&Address::Unix { path: path.clone(), access }).unwrap_err();
            assert!(error.to_string().contains("only root"), "{error}");
            assert!(!path.exists(), "nothing is left behind");
        }
    }

    #[test]
    fn a_file_that_is_no_socket_stays() {
        let dir = TempDir::new();
        let path = dir.path("f");
        fs::write(&path, "precious").unwrap();
        let error = Listener::bind(&unix(&path)).unwrap_err();
        assert!(error.to_string().contains("not a socket"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_socket_that_was_replaced_is_not_removed() {
        let dir = TempDir::new();
        let path = dir.path("s");
        let first = Listener::bind(&unix(&path)).unwrap();
        fs::remove_file(&path).unwrap();
        let second = Listener::bind(&unix(&path)).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn peers_that_are_gone_are_noticed() {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let Address::Tcp(at) = *listener.address() else { panic!("a TCP address") };
        let client = TcpStream::connect(at).unwrap();
        listener.prepare(client.as_fd()).unwrap();
        assert!(sockopt::socket_keepalive(&client).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&client).unwrap(), KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepintvl(&client).unwrap(), KEEPALIVE_INTERVAL);
        assert_eq!(sockopt::tcp_keepcnt(&client).unwrap(), KEEPALIVE_COUNT);
    }

    #[test]
    fn the_chosen_port_is_told() {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let Address::Tcp(at) = listener.address() else { panic!("a TCP address") };
        assert_ne!(at.port(), 0);
        let error = Listener::bind(listener.address()).unwrap_err();
        assert!(error.to_string().contains(&at.to_string()), "{error}");
    }
}
