//! The control socket's file: its place, its permissions, and its replacement if its server is dead
//! but not if it is alive.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, lchown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::access::{SocketAccess, SocketMode};

/// Default permissions: the owner only, since every client can stop the server.
const MODE: u32 = 0o600;
/// Pending connections that the kernel queues.
const BACKLOG: i32 = 128;

/// Longest path of a Unix socket that can be bound or connected to, in bytes (unix(7)).
pub const PATH_BYTES_MAX: usize = 107;

/// The length of a path if it is too long for a Unix socket, in bytes.
pub fn too_long(path: &Path) -> Option<usize> {
    Some(path.as_os_str().len()).filter(|&bytes| bytes > PATH_BYTES_MAX)
}

/// Why the control socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another server answers there.
    #[error("control socket {0}: another server answers there; stop it, or use --control PATH")]
    Taken(PathBuf),
    /// The path is longer than that of any socket.
    #[error(
        "socket {path}: its path has {bytes} bytes, and the limit of Unix sockets is {limit}; use \
         a shorter one (--control PATH)",
        limit = PATH_BYTES_MAX
    )]
    TooLong {
        /// Path of the socket.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// The existing file is not a socket.
    #[error("control socket {0}: a file that is not a socket is there; use --control PATH")]
    NotSocket(PathBuf),
    /// The owner or group is unknown on this host.
    #[error("control socket {path}: {what}")]
    Access {
        /// Path of the socket.
        path: PathBuf,
        /// The problem.
        what: String,
    },
    /// The operating system refused.
    #[error("control socket {path}: {source}; use --control PATH with a path that you may write")]
    Io {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Runtime directory of the system service: the unit's `RuntimeDirectory=`.
const SYSTEM_DIRECTORY: &str = "/run/forebay";

/// The environment variable with the path of the socket.
pub const CONTROL_VARIABLE: &str = "FOREBAY_CONTROL";

/// Default path of the socket: the value of [`CONTROL_VARIABLE`] if set. Otherwise root's service
/// and root's login use the same path, whatever else is in the environment; other users get one in
/// their runtime directory, if they have one.
#[must_use]
pub fn default_socket() -> PathBuf {
    if let Some(path) = std::env::var_os(CONTROL_VARIABLE).filter(|path| !path.is_empty()) {
        return PathBuf::from(path);
    }
    let directory = std::env::var_os("XDG_RUNTIME_DIR").filter(|text| !text.is_empty());
    default_for(rustix::process::geteuid().is_root(), directory.map(PathBuf::from))
}

fn default_for(is_root: bool, runtime_directory: Option<PathBuf>) -> PathBuf {
    let own = runtime_directory.filter(|_| !is_root);
    own.unwrap_or_else(|| PathBuf::from(SYSTEM_DIRECTORY)).join("forebay.sock")
}

/// Creates the directory of the default socket if no unit has done so.
fn make_directory(path: &Path) -> io::Result<()> {
    let directory = Path::new(SYSTEM_DIRECTORY);
    if path.parent() != Some(directory) || directory.exists() {
        return Ok(());
    }
    std::fs::DirBuilder::new().mode(0o755).create(directory)
}

/// Listens at `path`.
pub fn listen(path: &Path, access: &SocketAccess) -> Result<UnixListener, SocketError> {
    let failed = |source| SocketError::Io { path: path.to_owned(), source };
    if let Some(bytes) = too_long(path) {
        return Err(SocketError::TooLong { path: path.to_owned(), bytes });
    }
    let (owner, group) =
        access.numbers().map_err(|what| SocketError::Access { path: path.to_owned(), what })?;
    let mode = access.mode.map_or(MODE, |SocketMode(mode)| mode);
    make_directory(path).map_err(failed)?;
    clear(path)?;
    // Nobody can connect before `listen`, and permissions are set before that. The socket is
    // created under another name, then linked to its place: a link never replaces a file.
    let mut hash = DefaultHasher::new();
    path.file_name().hash(&mut hash);
    // Servers in other containers may have the same process id.
    let name = format!(".new-{}-{:x}", std::process::id(), hash.finish());
    let beside = path.with_file_name(&name);
    let _ = std::fs::remove_file(&beside);
    let bound = || -> io::Result<UnixListener> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        // By way of its directory, since that name may be too long for a socket.
        let place = path.parent().filter(|place| !place.as_os_str().is_empty());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let place = rustix::fs::open(place.unwrap_or(Path::new(".")), flags, Mode::empty())?;
        let short = format!("/proc/self/fd/{}/{name}", place.as_raw_fd());
        rustix::net::bind(&socket, &SocketAddrUnix::new(short)?)?;
        if owner.is_some() || group.is_some() {
            lchown(&beside, owner, group)?;
        }
        std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(mode))?;
        rustix::net::listen(&socket, BACKLOG)?;
        std::fs::hard_link(&beside, path)?;
        Ok(socket.into())
    };
    let bound = bound();
    let _ = std::fs::remove_file(&beside);
    bound.map_err(failed)
}

/// The file of a listening socket. Dropping it removes the file, unless another socket has taken
/// its place.
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    file: Option<(u64, u64)>,
}

impl SocketFile {
    /// The file that is at `path` now.
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), file: file_at(path) }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.file.is_some() && self.file == file_at(&self.path) {
            // If it cannot be removed here, the next server removes it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Device and inode of the file at `path`, if there is one.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Removes the socket of a dead server.
fn clear(path: &Path) -> Result<(), SocketError> {
    let failed = |source| SocketError::Io { path: path.to_owned(), source };
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if !found.file_type().is_socket() {
        return Err(SocketError::NotSocket(path.to_owned()));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(SocketError::Taken(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(failed)
        }
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_and_login_of_root_agree_with_the_unit() {
        let login = Some(PathBuf::from("/run/user/0"));
        let service = default_for(true, None);
        assert_eq!(default_for(true, login), service);
        let user = Some(PathBuf::from("/run/user/7"));
        assert_eq!(default_for(false, user), PathBuf::from("/run/user/7/forebay.sock"));
        let unit = include_str!("../../../contrib/forebay.service");
        let setting = |name: &str| {
            let found = unit.lines().find_map(|line| line.strip_prefix(name));
            PathBuf::from(found.expect("the unit has it"))
        };
        let runtime = Path::new("/run").join(setting("RuntimeDirectory="));
        assert_eq!(service.parent(), Some(&*runtime), "ProtectSystem= leaves only this writable");
        let state = Path::new("/var/lib").join(setting("StateDirectory="));
        assert_eq!(crate::config::STATE_DIR, state.to_str().expect("it is text"));
    }

    #[test]
    fn the_file_of_another_socket_stays() {
        let directory = std::env::temp_dir().join(format!("forebay-file-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a temporary directory can be made");
        let path = directory.join("control.sock");
        let any = SocketAccess::default();
        let _first = listen(&path, &any).expect("nothing is there");
        let file = SocketFile::at(&path);
        std::fs::remove_file(&path).expect("it is ours");
        let _second = listen(&path, &any).expect("nothing is there");
        drop(file);
        assert!(path.exists());
        drop(SocketFile::at(&path));
        assert!(!path.exists());
        std::fs::remove_dir(&directory).expect("it is empty");
    }

    /// The path was refused with a text that named no limit, and with fewer than 107 bytes.
    #[test]
    fn a_path_of_107_bytes_is_the_longest() {
        let directory = std::env::temp_dir().join(format!("forebay-long-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a temporary directory can be made");
        let any = SocketAccess::default();
        let path = |bytes: usize| {
            let name = bytes - directory.as_os_str().len() - 1;
            directory.join("x".repeat(name))
        };
        let longest = path(PATH_BYTES_MAX);
        let _listener = listen(&longest, &any).expect("it is not too long");
        UnixStream::connect(&longest).expect("it listens");
        let error = listen(&path(PATH_BYTES_MAX + 1), &any).expect_err("too long").to_string();
        assert!(error.contains("has 108 bytes, and the limit of Unix sockets is 107"), "{error}");
        let client = crate::Client::new(path(PATH_BYTES_MAX + 1));
        let error = client.status().expect_err("too long").to_string();
        assert!(error.contains("has 108 bytes, and the limit of Unix sockets is 107"), "{error}");
        std::fs::remove_dir_all(&directory).expect("the temporary directory can be removed");
    }

    #[test]
    fn a_dead_socket_is_replaced_and_a_living_one_is_not() {
        let directory = std::env::temp_dir().join(format!("forebay-socket-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a temporary directory can be made");
        let path = directory.join("control.sock");

        let any = SocketAccess::default();
        let first = listen(&path, &any).expect("nothing is there");
        let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, MODE);
        assert!(matches!(listen(&path, &any), Err(SocketError::Taken(_))));
        drop(first);
        drop(listen(&path, &any).expect("the first is gone"));

        let mode = Some(SocketMode(0o660));
        let group = listen(&path, &SocketAccess { mode, ..any.clone() }).expect("nobody is there");
        let found = std::fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(found & 0o777, 0o660);
        drop(group);
        let nobody = SocketAccess { group: Some("no-such".to_owned()), ..any.clone() };
        let error = listen(&path, &nobody).expect_err("there is no such group").to_string();
        assert!(error.contains("no group \"no-such\""), "{error}");

        std::fs::write(directory.join("file"), "precious").expect("a file can be written");
        assert!(matches!(listen(&directory.join("file"), &any), Err(SocketError::NotSocket(_))));
        let left: Vec<_> = std::fs::read_dir(&directory).expect("it is there").collect();
        assert_eq!(left.len(), 2, "nothing else is left behind: {left:?}");
        std::fs::remove_dir_all(&directory).expect("the temporary directory can be removed");
    }
}
