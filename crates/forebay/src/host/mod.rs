//! What this host has, as `forebay setup` and `forebay doctor` see it: files of the kernel and of
//! the system. Reads only. Every path is below a [`Host`], so that tests bring their own.

pub mod devices;
pub mod overlap;
pub mod own_disks;

use std::fs;
use std::path::{Path, PathBuf};

/// Where the files of a host are.
#[derive(Clone, Debug)]
pub struct Host {
    /// The directory that stands for `/`.
    root: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self { root: PathBuf::from("/") }
    }
}

impl Host {
    /// A host whose files are below `root`.
    #[cfg(test)]
    pub fn below(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The place of an absolute path.
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file, without blanks at its ends; `None` if it cannot be read.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.at(path)).ok().map(|text| text.trim().to_owned())
    }

    /// The number in a file.
    pub fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// Whether there is such a file.
    pub fn has(&self, path: impl AsRef<Path>) -> bool {
        self.at(path).exists()
    }

    /// The names in a directory, sorted.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let mut names = crate::disk::block::names(&self.at(path));
        names.sort();
        names
    }

    /// The version of its kernel: major and minor.
    pub fn kernel(&self) -> Option<(u32, u32)> {
        let text = self.text("/proc/sys/kernel/osrelease")?;
        let mut numbers = text.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    /// Bytes of its memory.
    pub fn memory(&self) -> Option<u64> {
        let text = self.text("/proc/meminfo")?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    }

    /// The devices and files in use as swap.
    pub fn swaps(&self) -> Vec<String> {
        let text = self.text("/proc/swaps").unwrap_or_default();
        let lines = text.lines().skip(1);
        lines.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect()
    }

    /// The numbers of its processes.
    pub fn processes(&self) -> Vec<u32> {
        self.names("/proc").iter().filter_map(|name| name.parse().ok()).collect()
    }

    /// Whether systemd runs it.
    pub fn has_systemd(&self) -> bool {
        self.has("/run/systemd/system")
    }

    /// Whether there is a group of this name.
    pub fn has_group(&self, name: &str) -> bool {
        let groups = self.text("/etc/group").unwrap_or_default();
        groups.lines().any(|line| line.split(':').next() == Some(name))
    }
}
