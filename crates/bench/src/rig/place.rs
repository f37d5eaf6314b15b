//! A directory for the files of one benchmark; removed on drop.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::Context as _;

use crate::load::content::Content;
use crate::rig::cleanup::{self, Held};

/// Bytes written at a time.
const CHUNK: usize = 16 << 20;

/// Number of the next place in this process.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A directory for one benchmark.
pub struct Place {
    path: PathBuf,
    _held: Held,
}

impl Place {
    /// A new directory within `parent`, or within the system's directory for temporary files.
    pub fn new(parent: Option<&Path>) -> anyhow::Result<Self> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        // A socket's path must be short, and absolute for programs with another working directory.
        let parent = fs::canonicalize(&parent).with_context(|| format!("{}", parent.display()))?;
        let number = NEXT.fetch_add(1, Relaxed);
        let path = parent.join(format!("forebay-bench-{}-{number}", std::process::id()));
        let held = cleanup::directory(&path)?;
        Ok(Self { path, _held: held })
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A path in it, as text.
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    /// Creates a sparse file of `size` bytes.
    pub fn sparse(&self, name: &str, size: u64) -> anyhow::Result<PathBuf> {
        let path = self.path(name);
        let file = fs::File::create(&path).with_context(|| format!("{}", path.display()))?;
        file.set_len(size)?;
        Ok(path)
    }

    /// Creates a file of `size` incompressible bytes, all of them written to the medium.
    pub fn full(&self, name: &str, size: u64) -> anyhow::Result<PathBuf> {
        self.full_of(name, size, Content::Random)
    }

    /// The same with other content.
    pub fn full_of(&self, name: &str, size: u64, content: Content) -> anyhow::Result<PathBuf> {
        let path = self.path(name);
        let mut file = fs::File::create(&path).with_context(|| format!("{}", path.display()))?;
        let chunk = content.bytes(CHUNK);
        let mut left = usize::try_from(size)?;
        while left > 0 {
            let len = left.min(chunk.len());
            file.write_all(&chunk[..len])?;
            left -= len;
        }
        file.sync_all()?;
        Ok(path)
    }

    /// Removes a file or a directory if it exists.
    pub fn remove(&self, name: &str) {
        let path = self.path(name);
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
}
