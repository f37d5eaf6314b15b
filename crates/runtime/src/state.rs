//! The state directory: small files about a cache that the host keeps, and that the server trusts
//! at its start.
//!
//! So no other user may have written them. The directory and each file in it must belong to this
//! user or to root, and must not be writable by others; a symbolic link is never followed. A file
//! is always replaced whole: written to a new file, synced, renamed, and the directory synced.
//! [`sealed`] appends a checksum to its text.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_codec::crc32c;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, StatVfsMountFlags};
use rustix::io::Errno;

/// Most files in the directory.
const ENTRIES_MAX: usize = 16 << 10;
/// End of the name of a file that is to replace another.
const ASIDE: &str = ".new";
/// Permissions of a file: only its owner's.
const FILE_MODE: Mode = Mode::from_bits_truncate(0o600);
/// Permissions of a new directory.
const DIRECTORY_MODE: u32 = 0o700;

/// The name of the file of this kind about the cache `uuid`.
#[must_use]
pub fn file_of(uuid: [u8; 16], kind: &str) -> String {
    format!("{:032x}.{kind}", u128::from_be_bytes(uuid))
}

/// An open state directory.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
    dir: Arc<OwnedFd>,
    made: bool,
}

impl StateDir {
    /// Opens the directory at `path`, and creates it if it does not exist.
    ///
    /// # Errors
    /// If it cannot be created or opened, is a symbolic link, or is writable by others.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Without a trailing slash, which would follow a link.
        let path: PathBuf = path.components().collect();
        let opened = || {
            let made = make(&path)?;
            if fs::symlink_metadata(&path)?.is_symlink() {
                return Err(io::Error::other("is a symbolic link; name the directory itself"));
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let dir = rustix::fs::open(&path, flags, Mode::empty())?;
            check(&rustix::fs::fstat(&dir)?)?;
            Ok((dir, made))
        };
        let (dir, made) = opened().map_err(|error| named(&path, &error))?;
        Ok(Self { path, dir: Arc::new(dir), made })
    }

    /// Reads the file `name`, at most `most` bytes of it; `None` if there is no such file.
    ///
    /// # Errors
    /// If it cannot be read, is not a regular file, or others may have written it.
    pub fn read(&self, name: &str, most: u64) -> io::Result<Option<String>> {
        let read = || {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = match rustix::fs::openat(&self.dir, name, flags, Mode::empty()) {
                Ok(file) => file,
                Err(Errno::NOENT) => return Ok(None),
                Err(Errno::LOOP) => {
                    return Err(io::Error::other("is a symbolic link, which is not followed"));
                }
                Err(error) => return Err(error.into()),
            };
            check_file(&file)?;
            let mut text = String::new();
            File::from(file).take(most).read_to_string(&mut text)?;
            Ok(Some(text))
        };
        read().map_err(|error| named(&self.path.join(name), &error))
    }

    /// Replaces the file `name`; durable when this returns.
    ///
    /// # Errors
    /// If it could not be made durable: the next start may then find the old or the new text.
    pub fn replace(&self, name: &str, text: &str) -> io::Result<()> {
        let aside = format!("{name}{ASIDE}");
        let write = || -> io::Result<()> {
            let mut file = self.create(&aside)?;
            let renamed = file
                .write_all(text.as_bytes())
                .and_then(|()| file.sync_all())
                .and_then(|()| Ok(rustix::fs::renameat(&self.dir, &aside, &self.dir, name)?));
            if renamed.is_err() {
                // It may take the space that others need.
                let _ = rustix::fs::unlinkat(&self.dir, &aside, AtFlags::empty());
            }
            renamed?;
            Ok(rustix::fs::fsync(&self.dir)?)
        };
        write().map_err(|error| named(&self.path.join(name), &error))
    }

    /// Creates a file in place of the one of this name.
    fn create(&self, name: &str) -> io::Result<File> {
        // Left by a crash, or put there by another program: never write to an existing file.
        match rustix::fs::unlinkat(&self.dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(&self.dir, name, flags, FILE_MODE)?))
    }

    /// Opens a file to be changed as it is; it must be a regular one that others have not written.
    fn open_or_create(&self, name: &str, more: OFlags) -> io::Result<File> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, name, flags | more, FILE_MODE)?;
        check_file(&file)?;
        Ok(File::from(file))
    }

    /// Makes the file `name` an empty one, which takes no space; durable when this returns.
    ///
    /// # Errors
    /// If it cannot be made durable. If the file is not a regular one, or others may have written
    /// it.
    pub fn empty(&self, name: &str) -> io::Result<()> {
        let empty = || -> io::Result<()> {
            let file = self.open_or_create(name, OFlags::empty())?;
            file.set_len(0)?;
            file.sync_all()?;
            Ok(rustix::fs::fsync(&self.dir)?)
        };
        empty().map_err(|error| named(&self.path.join(name), &error))
    }

    /// Makes the file `name` durable as it is.
    ///
    /// # Errors
    /// If it cannot be made durable.
    pub fn sync(&self, name: &str) -> io::Result<()> {
        let sync = || -> io::Result<()> {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?;
            rustix::fs::fsync(&file)?;
            Ok(rustix::fs::fsync(&self.dir)?)
        };
        sync().map_err(|error| named(&self.path.join(name), &error))
    }

    /// Whether files can be created here, as far as the file system tells without a write.
    ///
    /// # Errors
    /// The reason why not.
    pub fn is_writable(&self) -> io::Result<()> {
        let look = || -> io::Result<()> {
            if rustix::fs::fstat(&self.dir)?.st_nlink == 0 {
                return Err(io::Error::new(io::ErrorKind::NotFound, "was removed"));
            }
            let found = rustix::fs::fstatvfs(&self.dir)?;
            if found.f_flag.contains(StatVfsMountFlags::RDONLY) {
                return Err(Errno::ROFS.into());
            }
            // Root may use what is kept back. Some file systems count no blocks, or no files.
            let root = rustix::process::geteuid().is_root();
            let blocks = if root { found.f_bfree } else { found.f_bavail };
            let no_block = found.f_blocks > 0 && blocks == 0;
            let no_file = found.f_files > 0 && found.f_ffree == 0;
            if no_block || no_file { Err(Errno::NOSPC.into()) } else { Ok(()) }
        };
        look().map_err(|error| named(&self.path, &error))
    }

    /// Whether files of `bytes` in all can be created here: one is, and is removed at once.
    ///
    /// # Errors
    /// The reason why not.
    pub fn has_room_for(&self, bytes: usize) -> io::Result<()> {
        let name = format!("room-{}{ASIDE}", std::process::id());
        let write = || -> io::Result<()> {
            let mut file = self.create(&name)?;
            // Without a name it goes with this process.
            rustix::fs::unlinkat(&self.dir, &name, AtFlags::empty())?;
            file.write_all(&vec![0; bytes])?;
            file.sync_all()
        };
        write().map_err(|error| named(&self.path, &error))
    }

    /// The bytes of the largest file about the cache `uuid` among those of these kinds.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn largest(&self, uuid: [u8; 16], kinds: &[&str]) -> io::Result<u64> {
        let mut sizes = kinds.iter().map(|kind| {
            let name = file_of(uuid, kind);
            match rustix::fs::statat(&self.dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(found) => Ok(u64::try_from(found.st_size).unwrap_or_default()),
                Err(Errno::NOENT) => Ok(0),
                Err(error) => Err(named(&self.path.join(name), &error.into())),
            }
        });
        sizes.try_fold(0, |most, size| Ok(most.max(size?)))
    }

    /// Removes what a crash has left of files of the cache `uuid` that were being replaced. Its
    /// device must be ours alone.
    ///
    /// # Errors
    /// If the directory cannot be read, or a file cannot be removed.
    pub fn sweep(&self, uuid: [u8; 16]) -> io::Result<()> {
        let id = file_of(uuid, "");
        let is_left = |name: &String| name.starts_with(&id) && name.ends_with(ASIDE);
        self.names()?.iter().filter(|name| is_left(name)).try_for_each(|name| self.remove(name))
    }

    /// Appends text to the file `name`, and creates it if it does not exist; durable when this
    /// returns.
    ///
    /// # Errors
    /// If it could not be made durable: a part of it may then be there. If the file is not a
    /// regular one, or others may have written it.
    pub fn append(&self, name: &str, text: &str) -> io::Result<()> {
        let append = || -> io::Result<()> {
            let mut file = self.open_or_create(name, OFlags::APPEND)?;
            let before = file.metadata()?.len();
            if let Err(error) = file.write_all(text.as_bytes()).and_then(|()| file.sync_data()) {
                // The next text must begin on a line of its own.
                file.set_len(before)?;
                return Err(error);
            }
            Ok(rustix::fs::fsync(&self.dir)?)
        };
        append().map_err(|error| named(&self.path.join(name), &error))
    }

    /// Creates the empty file `name`, if it is not there: for the next process, not durable.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn mark(&self, name: &str) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.dir, name, flags, FILE_MODE);
        made.map(drop).map_err(|error| named(&self.path.join(name), &error.into()))
    }

    /// Removes the file `name`, if it is there; durable when this returns.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let remove = || match rustix::fs::unlinkat(&self.dir, name, AtFlags::empty()) {
            Ok(()) => rustix::fs::fsync(&self.dir),
            Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        };
        remove().map_err(|error| named(&self.path.join(name), &error.into()))
    }

    /// The ids of the caches that have a file of this kind ([`file_of`]).
    ///
    /// # Errors
    /// As [`StateDir::names`].
    pub fn caches_with(&self, kind: &str) -> io::Result<Vec<[u8; 16]>> {
        let cache = |name: String| {
            let uuid = name.strip_suffix(kind)?.strip_suffix('.')?;
            u128::from_str_radix(uuid, 16).ok().map(u128::to_be_bytes)
        };
        Ok(self.names()?.into_iter().filter_map(cache).collect())
    }

    /// The names of the files in the directory.
    ///
    /// # Errors
    /// If the directory cannot be read, or has far too many files.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let list = || {
            let mut names = Vec::new();
            for entry in Dir::read_from(&self.dir)? {
                names.extend(entry?.file_name().to_str().ok().map(str::to_owned));
                if names.len() > ENTRIES_MAX {
                    let what = format!("more than {ENTRIES_MAX} files; use a directory of its own");
                    return Err(io::Error::other(what));
                }
            }
            Ok(names)
        };
        list().map_err(|error| named(&self.path, &error))
    }

    /// Removes the directory if [`StateDir::open`] created it and it is empty: for a refused start.
    pub fn undo(&self) {
        if self.made {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// Creates the directory if it does not exist; returns whether it was created.
fn make(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => return Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        fs::create_dir_all(parent)?;
    }
    match fs::DirBuilder::new().mode(DIRECTORY_MODE).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
        Err(error) => return Err(error),
    }
    // Its content is durable only when the directory itself is.
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(true)
}

/// Rejects anything but a regular file, and files that others may have written.
fn check_file(file: &OwnedFd) -> io::Result<()> {
    let found = rustix::fs::fstat(file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("is no regular file; remove it"));
    }
    check(&found)
}

/// Rejects files and directories that others may have written. Others can add files to a sticky
/// directory, but each file is checked separately.
fn check(found: &Stat) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    let mode = found.st_mode & 0o7777;
    let sticky =
        FileType::from_raw_mode(found.st_mode) == FileType::Directory && mode & 0o1000 != 0;
    let why = if found.st_uid != own && found.st_uid != 0 {
        let owner = found.st_uid;
        format!("belongs to user {owner}, and is believed only of user {own} or root; chown it")
    } else if mode & 0o022 != 0 && !sticky {
        format!("has mode {mode:04o}: others may write it; chmod go-w it")
    } else {
        return Ok(());
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// `body`, which consists of whole lines, followed by its checksum.
#[must_use]
pub fn sealed(body: &str) -> String {
    format!("{body}check {:08x}\nend\n", crc32c(body.as_bytes()))
}

/// The body given to [`sealed`], if the text is whole and unchanged.
#[must_use]
pub fn unsealed(text: &str) -> Option<&str> {
    let whole = text.strip_suffix("\nend\n")?;
    let (body, sum) = whole.split_at(whole.rfind("\ncheck ")? + 1);
    let sum = sum.strip_prefix("check ")?;
    (format!("{:08x}", crc32c(body.as_bytes())) == sum).then_some(body)
}

/// Whether there was no space for a file.
#[must_use]
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

pub(crate) fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    use super::*;
    use crate::testing::TempDir;

    fn refused(path: &Path, word: &str) {
        let error = StateDir::open(path).expect_err("it is refused").to_string();
        assert!(error.contains(word) && error.contains(&*path.to_string_lossy()), "{error}");
    }

    #[test]
    fn a_directory_that_others_may_write_or_own_is_refused() {
        let dir = TempDir::new();
        let path = dir.path("state");
        StateDir::open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        for (mode, good) in [(0o755, true), (0o770, false), (0o702, false), (0o1777, true)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(StateDir::open(&path).is_ok(), good, "{mode:o}");
        }
        symlink(&path, dir.path("link")).unwrap();
        refused(&dir.path("link"), "symbolic link");
        assert!(StateDir::open(&dir.path("link/")).is_err(), "nor with a slash behind it");
        // Only root can change the owner.
        if chown(&path, Some(12345), None).is_ok() {
            refused(&path, "belongs to user 12345");
        }
    }

    #[test]
    fn no_link_is_followed_and_nothing_of_others_is_read() {
        let dir = TempDir::new();
        let state = StateDir::open(&dir.path("state")).unwrap();
        let other = dir.path("other");
        fs::write(&other, "precious").unwrap();
        symlink(&other, dir.path("state/a.new")).unwrap();
        symlink(&other, dir.path("state/a")).unwrap();
        assert!(state.read("a", 100).unwrap_err().to_string().contains("symbolic link"));
        state.replace("a", "mine").unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "precious");
        assert_eq!(state.read("a", 100).unwrap().as_deref(), Some("mine"));
        let path = dir.path("state/a");
        let found = fs::symlink_metadata(&path).unwrap();
        assert!(found.is_file() && found.mode() & 0o777 == 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(state.read("a", 100).unwrap_err().to_string().contains("others may write"));
        if chown(&path, Some(12345), None).is_ok() {
            assert!(state.read("a", 100).unwrap_err().to_string().contains("user 12345"));
        }
        state.remove("a").unwrap();
        assert_eq!(state.read("a", 100).unwrap(), None);
        fs::create_dir(&path).unwrap();
        assert!(state.read("a", 100).unwrap_err().to_string().contains("no regular file"));
    }

    #[test]
    fn what_a_crash_left_is_swept_and_other_caches_keep_theirs() {
        let dir = TempDir::new();
        let state = StateDir::open(&dir.path("state")).unwrap();
        let (own, other) = ([1; 16], [2; 16]);
        let names = [
            file_of(own, "witness"),
            file_of(own, "witness.new"),
            file_of(other, "witness.new"),
            "applying.new".to_owned(),
        ];
        for name in &names {
            fs::write(dir.path("state").join(name), "text").unwrap();
        }
        state.sweep(own).unwrap();
        let mut left = state.names().unwrap();
        left.retain(|name| !name.starts_with("."));
        left.sort();
        let mut kept = [0, 2, 3].map(|at: usize| names[at].clone());
        kept.sort();
        assert_eq!(left, kept);
        assert_eq!(state.largest(own, &["witness", "samples"]).unwrap(), 4);
        state.has_room_for(1 << 20).unwrap();
        state.empty(&names[0]).unwrap();
        assert_eq!(state.largest(own, &["witness"]).unwrap(), 0);
        state.is_writable().unwrap();
        fs::remove_dir_all(dir.path("state")).unwrap();
        assert!(state.is_writable().unwrap_err().to_string().contains("was removed"));
    }

    #[test]
    fn a_seal_tells_every_changed_byte() {
        let text = sealed("heading 1\nkey value\n");
        assert_eq!(unsealed(&text), Some("heading 1\nkey value\n"));
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            let changed = String::from_utf8(bytes).unwrap();
            assert_eq!(unsealed(&changed), None, "byte {at}");
            assert_eq!(unsealed(&text[..at]), None, "cut at {at}");
        }
    }
}
