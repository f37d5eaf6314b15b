//! The files: their inode numbers, names and attributes. All exist from the start, permanently.

use forebay_fuse_wire::Attributes;

use crate::server::{Owner, SharedFile};

/// Name of the directory with the texts.
pub(crate) const TEXTS: &str = ".forebay";
/// Name of its subdirectory with a text for each volume.
const VOLUMES: &str = "volumes";
/// Names of the texts in it, in the order of their numbers.
const NAMES: [&str; 3] = ["status", "status.json", "metrics"];

pub(crate) const ROOT: u64 = 1;
const TEXT_DIRECTORY: u64 = 2;
pub(crate) const VOLUME_TEXTS: u64 = 3;
const FIRST_TEXT: u64 = 16;
const END_OF_TEXTS: u64 = FIRST_TEXT + NAMES.len() as u64;
const FIRST_VOLUME: u64 = 0x1000;
const FIRST_VOLUME_TEXT: u64 = 0x2000;

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;

/// The number of a volume's file.
pub(crate) fn volume_file(id: u8) -> u64 {
    FIRST_VOLUME + u64::from(id)
}

/// The number of a volume's text.
pub(crate) fn volume_text(id: u8) -> u64 {
    FIRST_VOLUME_TEXT + u64::from(id)
}

/// A readable text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Topic {
    /// The status, for people.
    Status,
    /// The status as JSON.
    Json,
    /// Every counter, for Prometheus.
    Metrics,
    /// One volume, by its index.
    Volume(usize),
}

impl Topic {
    /// The number of the text.
    #[must_use]
    pub fn number(self) -> u64 {
        match self {
            Self::Status => 0,
            Self::Json => 1,
            Self::Metrics => 2,
            Self::Volume(at) => 3 + at as u64,
        }
    }

    /// The text with this number.
    #[must_use]
    pub fn of(number: u64) -> Self {
        match number {
            0 => Self::Status,
            1 => Self::Json,
            2 => Self::Metrics,
            at => Self::Volume((at - 3) as usize),
        }
    }
}

/// A file or directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Node {
    Root,
    TextDirectory,
    VolumeTexts,
    Text(Topic),
    Volume(usize),
}

impl Node {
    /// Its number, in a tree with `files`. Numbers are those of the volumes' ids: the kernel keeps
    /// them, and the next server of the same mount must mean the same by them.
    pub fn number(self, files: &[SharedFile]) -> u64 {
        let id = |at: usize| files[at].volume.0;
        match self {
            Self::Root => ROOT,
            Self::TextDirectory => TEXT_DIRECTORY,
            Self::VolumeTexts => VOLUME_TEXTS,
            Self::Text(Topic::Volume(at)) => volume_text(id(at)),
            Self::Text(topic) => FIRST_TEXT + topic.number(),
            Self::Volume(at) => volume_file(id(at)),
        }
    }

    /// The node with this number, in a tree with `files`.
    pub fn of(number: u64, files: &[SharedFile]) -> Option<Self> {
        let named = |first: u64| {
            let id = number.checked_sub(first)?;
            files.iter().position(|file| u64::from(file.volume.0) == id)
        };
        match number {
            ROOT => Some(Self::Root),
            TEXT_DIRECTORY => Some(Self::TextDirectory),
            VOLUME_TEXTS => Some(Self::VolumeTexts),
            FIRST_TEXT..END_OF_TEXTS => Some(Self::Text(Topic::of(number - FIRST_TEXT))),
            _ => named(FIRST_VOLUME)
                .map(Self::Volume)
                .or_else(|| named(FIRST_VOLUME_TEXT).map(|at| Self::Text(Topic::Volume(at)))),
        }
    }

    /// Whether it is a directory.
    pub fn is_directory(self) -> bool {
        matches!(self, Self::Root | Self::TextDirectory | Self::VolumeTexts)
    }

    /// The entries of a directory, with names; `.` and `..` first.
    pub fn entries(self, files: &[SharedFile]) -> Vec<(Self, &str)> {
        let mut entries = vec![(self, "."), (Self::Root, "..")];
        let volumes = files.iter().enumerate();
        match self {
            Self::Root => {
                entries.push((Self::TextDirectory, TEXTS));
                entries.extend(volumes.map(|(at, file)| (Self::Volume(at), file.name.as_str())));
            }
            Self::TextDirectory => {
                let text = |(at, name)| (Self::Text(Topic::of(at)), name);
                entries.extend((0..).zip(NAMES).map(text));
                entries.push((Self::VolumeTexts, VOLUMES));
            }
            Self::VolumeTexts => {
                entries[1].0 = Self::TextDirectory;
                let text = |at| Self::Text(Topic::Volume(at));
                entries.extend(volumes.map(|(at, file)| (text(at), file.name.as_str())));
            }
            Self::Text(_) | Self::Volume(_) => entries.clear(),
        }
        entries
    }

    /// The entry of a directory with this name.
    pub fn child(self, name: &[u8], files: &[SharedFile]) -> Option<Self> {
        let entries = self.entries(files);
        let found = entries.iter().skip(2).find(|(_, known)| known.as_bytes() == name);
        found.map(|&(node, _)| node)
    }

    pub fn attributes(self, files: &[SharedFile], owner: Owner) -> Attributes {
        let (mode, links, size) = match self {
            Self::Root => (DIRECTORY | 0o755, 3, 0),
            Self::TextDirectory => (DIRECTORY | 0o500, 3, 0),
            Self::VolumeTexts => (DIRECTORY | 0o500, 2, 0),
            Self::Text(_) => (FILE | 0o400, 1, 0),
            Self::Volume(at) if files[at].read_only => (FILE | 0o400, 1, files[at].size),
            Self::Volume(at) => (FILE | 0o600, 1, files[at].size),
        };
        let Owner { uid, gid, seconds } = owner;
        Attributes { node: self.number(files), size, mode, links, uid, gid, seconds }
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::VolumeId;

    use super::*;

    #[test]
    fn a_volume_keeps_its_number_when_others_come_and_go() {
        let number = |files: &[SharedFile], at| Node::Volume(at).number(files);
        let mut now = files();
        let before = number(&now, 1);
        now.remove(0);
        assert_eq!(number(&now, 0), before);
    }

    fn files() -> Vec<SharedFile> {
        let file = |id: u8, name: &str| SharedFile {
            volume: VolumeId(id),
            name: name.to_owned(),
            size: 4096,
            read_only: false,
            holes: true,
        };
        vec![file(5, "a"), file(2, "status")]
    }

    #[test]
    fn every_node_is_found_by_name_and_by_number() {
        let files = files();
        let mut seen = Vec::new();
        let mut walk = vec![Node::Root];
        while let Some(node) = walk.pop() {
            let number = node.number(&files);
            assert_eq!(Node::of(number, &files), Some(node));
            assert!(!seen.contains(&number), "{node:?}");
            seen.push(number);
            for (child, name) in node.entries(&files).into_iter().skip(2) {
                assert_eq!(node.child(name.as_bytes(), &files), Some(child));
                walk.push(child);
            }
        }
        assert_eq!(seen.len(), 3 + 3 + 2 * 2);
    }

    #[test]
    fn what_is_not_there_is_not_found() {
        for number in [0, 4, 15, 19, 0x1000, 0x1003, 0x2000, u64::MAX] {
            assert_eq!(Node::of(number, &files()), None, "{number}");
        }
        assert_eq!(Node::Root.child(b"b", &files()), None);
        assert_eq!(Node::Root.child(b".", &files()), None);
        assert_eq!(Node::Volume(0).child(b"a", &files()), None);
    }
}
