//! State shared by all requests: the files, and the open texts.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_block::{ErrorKind, Export, VolumeId};

use crate::tree::TEXTS;

/// Maximum number of open texts.
const TEXTS_MAX: usize = 256;

/// A volume as a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedFile {
    /// The volume, which determines the inode number.
    pub volume: VolumeId,
    /// Its name.
    pub name: String,
    /// Its size in bytes; constant.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the primary makes holes at less cost than writing zeros. If not, large holes are
    /// refused, and the caller must write zeros where it needs them.
    pub holes: bool,
}

impl SharedFile {
    /// The file of a volume's export.
    #[must_use]
    pub fn of(volume: VolumeId, export: &Export, holes: bool) -> Self {
        let Export { name, info, .. } = export;
        Self { volume, name: name.clone(), size: info.size, read_only: info.read_only, holes }
    }
}

/// Owner and time of the files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// Modification time, in seconds since 1970: the start of the server.
    pub seconds: u64,
}

impl Owner {
    /// A number below the handles of open texts: later servers of a mount give out other handles.
    fn first_handle(&self) -> u64 {
        self.seconds << 20
    }
}

/// Why a server cannot be created.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServerError {
    /// There is no volume to serve.
    NoFile,
    /// The name is not valid for a file.
    BadName(String),
    /// Two files have the same name.
    SameName(String),
}

impl std::fmt::Display for ServerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoFile => f.write_str("no file to serve: name at least one volume"),
            Self::BadName(name) => {
                write!(f, "no file can be named {name:?} here; give the volume another name")
            }
            Self::SameName(name) => write!(f, "two files are named {name:?}: names must differ"),
        }
    }
}

impl std::error::Error for ServerError {}

/// The file system.
#[derive(Debug)]
pub struct FuseServer {
    pub(crate) files: Vec<SharedFile>,
    pub(crate) owner: Owner,
    texts: Mutex<Texts>,
}

/// Open texts, with their content at the time of opening.
#[derive(Debug)]
struct Texts {
    open: HashMap<u64, Arc<[u8]>>,
    last: u64,
}

impl FuseServer {
    /// A file system with these files.
    ///
    /// # Errors
    /// When a name is invalid or not unique, or there are no files.
    pub fn new(files: Vec<SharedFile>, owner: Owner) -> Result<Self, ServerError> {
        if files.is_empty() {
            return Err(ServerError::NoFile);
        }
        for (at, file) in files.iter().enumerate() {
            let name = &file.name;
            let taken = ["", ".", "..", TEXTS].contains(&name.as_str());
            if taken || name.contains(['/', '\0']) || name.len() > 255 {
                return Err(ServerError::BadName(name.clone()));
            }
            if files[..at].iter().any(|other| other.name == *name) {
                return Err(ServerError::SameName(name.clone()));
            }
        }
        let texts = Mutex::new(Texts { open: HashMap::new(), last: owner.first_handle() });
        Ok(Self { files, owner, texts })
    }

    /// Stores the text of a file being opened. Returns its handle.
    pub(crate) fn keep(&self, text: Vec<u8>) -> Result<u64, ErrorKind> {
        let handle = {
            let mut texts = self.texts();
            texts.last += 1;
            texts.last
        };
        self.keep_as(handle, text.into())?;
        Ok(handle)
    }

    /// Stores the text of a file that an earlier server of the mount has opened as `handle`.
    pub(crate) fn keep_as(&self, handle: u64, text: Arc<[u8]>) -> Result<(), ErrorKind> {
        let mut texts = self.texts();
        if texts.open.len() >= TEXTS_MAX {
            return Err(ErrorKind::NoSpace);
        }
        texts.open.insert(handle, text);
        Ok(())
    }

    pub(crate) fn text(&self, handle: u64) -> Option<Arc<[u8]>> {
        self.texts().open.get(&handle).cloned()
    }

    pub(crate) fn forget(&self, handle: u64) {
        self.texts().open.remove(&handle);
    }

    /// Poisoning is ignored: the table is consistent at any time.
    fn texts(&self) -> MutexGuard<'_, Texts> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
