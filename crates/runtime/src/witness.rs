//! The witness: a small file on the host that records how far a cache device may be trusted.
//!
//! It matters when the cache device can no longer be written: once a primary has been written
//! without it, the device is out of date, and cannot know that itself. The witness also tells an
//! older copy of the device from the last one used, by the pool's start count, and detects a device
//! that was replaced or wiped, by the primaries that the pool served. The file is in the state
//! directory and has a checksum.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use forebay_engine::{DetachedStripe, Trust};
pub use forebay_volume::pool::Witness as Record;

use crate::detached::{self, DetachedList, OfShard};
use crate::mailbox::Mailbox;
use crate::message::Message;
use crate::state::{StateDir, file_of, sealed, unsealed};

/// First line of the file.
const HEADING: &str = "forebay witness 3";
/// First line once the device has failed, for builds that do not know [`crate::detached`].
const HEADING_FAILED: &str = "forebay witness 4";
/// First lines of earlier versions: version 2 had no checksum, and version 1 did not name the
/// primaries either.
const HEADINGS_BEFORE: [&str; 2] = ["forebay witness 1", "forebay witness 2"];
/// Longest file that is read, in bytes: 64 names of 255 escaped bytes, and a few more lines.
const BYTES_MAX: u64 = 128 << 10;
/// Most witnesses of other pools that are read.
const FILES_MAX: usize = 4096;
/// End of a file's name, after the pool's UUID.
const KIND: &str = "witness";
/// Pause before a failed record is tried again.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pause when there is nothing to record.
const PATIENCE_IDLE: Duration = Duration::from_secs(3600);

/// A directory with a witness for each pool.
#[derive(Clone, Debug)]
pub struct Witness {
    state: StateDir,
}

const TRUST_NAMES: [(Trust, &str); 3] =
    [(Trust::Full, "full"), (Trust::DirtyOnly, "dirty-only"), (Trust::Nothing, "nothing")];

impl Witness {
    /// Opens the witnesses in `dir`, which is created if it does not exist.
    ///
    /// # Errors
    /// If the directory cannot be created, or is writable by others.
    pub fn open(dir: &Path) -> io::Result<Self> {
        Ok(Self { state: StateDir::open(dir)? })
    }

    /// The state directory.
    #[must_use]
    pub fn state(&self) -> &StateDir {
        &self.state
    }

    /// The record of a pool, if there is one.
    ///
    /// # Errors
    /// If the file cannot be read, or is not a witness of this pool.
    pub fn load(&self, uuid: [u8; 16]) -> io::Result<Option<Record>> {
        let name = file_name(uuid);
        let Some(text) = self.state.read(&name, BYTES_MAX)? else { return Ok(None) };
        let record = parse(&text).filter(|record| record.uuid == uuid);
        let bad = || {
            let what = format!("{name}: this is no witness of the cache, or it is damaged");
            io::Error::new(io::ErrorKind::InvalidData, what)
        };
        record.ok_or_else(bad).map(Some)
    }

    /// The pools that have a record, whether or not it can be read.
    ///
    /// # Errors
    /// If the directory cannot be read, or has far too many files.
    pub fn pools(&self) -> io::Result<Vec<[u8; 16]>> {
        let all = self.state.caches_with(KIND)?;
        if all.len() > FILES_MAX {
            let what = format!("more than {FILES_MAX} witnesses; remove those of lost caches");
            return Err(io::Error::other(what));
        }
        Ok(all)
    }

    /// The records of all pools. A file that is not a valid witness is left out with a warning.
    ///
    /// # Errors
    /// As [`Witness::pools`].
    pub fn load_all(&self) -> io::Result<Vec<Record>> {
        let mut all = Vec::new();
        for uuid in self.pools()? {
            match self.load(uuid) {
                Ok(record) => all.extend(record),
                Err(error) => tracing::warn!(%error, "left out"),
            }
        }
        Ok(all)
    }

    /// Replaces the record of a pool; durable when this returns.
    ///
    /// # Errors
    /// If it could not be made durable: the next start may then find the old or the new record.
    pub fn store(&self, record: &Record) -> io::Result<()> {
        self.state.replace(&file_name(record.uuid), &print(record))
    }

    /// Removes the record of a pool that was created and never served.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(&self, uuid: [u8; 16]) -> io::Result<()> {
        self.state.remove(&file_name(uuid)).and(self.state.remove(&detached::file_name(uuid)))
    }
}

fn file_name(uuid: [u8; 16]) -> String {
    file_of(uuid, KIND)
}

fn print(record: &Record) -> String {
    let uuid = u128::from_be_bytes(record.uuid);
    let trust = TRUST_NAMES[record.trust as usize].1;
    let head = format!("pool {uuid:032x}\nepoch {}\ntrust {trust}\n", record.epoch);
    let Some(primaries) = &record.primaries else {
        return format!("{}\n{head}end\n", HEADINGS_BEFORE[0]);
    };
    let heading = if record.trust == Trust::DirtyOnly { HEADING_FAILED } else { HEADING };
    let mut text = format!("{heading}\n{head}dirty {}\n", record.dirty);
    for primary in primaries {
        text += &format!("primary {}\n", primary.escape_default());
    }
    sealed(&text)
}

fn parse(text: &str) -> Option<Record> {
    let sealed = [HEADING, HEADING_FAILED];
    let body = if sealed.iter().any(|heading| text.starts_with(heading)) {
        unsealed(text)?.strip_suffix('\n')?
    } else {
        text.strip_suffix("\nend\n")?
    };
    let mut lines = body.split('\n');
    let heading = lines.next()?;
    let uuid = u128::from_str_radix(lines.next()?.strip_prefix("pool ")?, 16).ok()?;
    let epoch = lines.next()?.strip_prefix("epoch ")?.parse().ok()?;
    let name = lines.next()?.strip_prefix("trust ")?;
    let (trust, _) = *TRUST_NAMES.iter().find(|(_, known)| *known == name)?;
    let mut record =
        Record { uuid: uuid.to_be_bytes(), epoch, trust, dirty: true, primaries: None };
    if sealed.contains(&heading) || heading == HEADINGS_BEFORE[1] {
        record.dirty = lines.next()?.strip_prefix("dirty ")?.parse().ok()?;
        let names = lines.by_ref().map(|line| unescape(line.strip_prefix("primary ")?));
        record.primaries = Some(names.collect::<Option<_>>()?);
    } else if heading != HEADINGS_BEFORE[0] {
        return None;
    }
    lines.next().is_none().then_some(record)
}

/// Reverses `escape_default`.
fn unescape(text: &str) -> Option<String> {
    let mut out = String::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        out.push(match rest.next()? {
            't' => '\t',
            'r' => '\r',
            'n' => '\n',
            'u' => {
                let (digits, after) = rest.as_str().strip_prefix('{')?.split_once('}')?;
                rest = after.chars();
                char::from_u32(u32::from_str_radix(digits, 16).ok()?)?
            }
            other => other,
        });
    }
    Some(out)
}

/// A shard's request for a record.
pub(crate) enum Asked {
    /// How far the device may still be trusted.
    Trust(Trust),
    /// Stripes that the cache has left.
    Detached(Vec<DetachedStripe>),
}

/// Carries out the shards' requests for records.
pub(crate) struct Clerk {
    pub witness: Witness,
    pub record: Record,
    pub detached: DetachedList,
    pub mailboxes: Arc<[Mailbox<Message>]>,
}

impl Clerk {
    /// Makes records, and tells the shards when they are durable. Runs until the shard threads are
    /// gone. A failed record is tried again until it succeeds: until then the shards hold back
    /// everything that depends on it.
    pub fn serve(mut self, asked: &Receiver<(usize, Asked)>) {
        let mut wanted = vec![self.record.trust; self.mailboxes.len()];
        let mut stripes = Vec::new();
        let (mut unrecorded, mut stale) = (false, false);
        loop {
            let patience = if unrecorded { PATIENCE } else { PATIENCE_IDLE };
            let mut next = match asked.recv_timeout(patience) {
                Ok(first) => Some(first),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            // Requests that arrived meanwhile are recorded together.
            while let Some((shard, what)) = next {
                match what {
                    Asked::Trust(trust) => {
                        wanted[shard] = wanted[shard].max(trust);
                        stale = true;
                    }
                    Asked::Detached(left) => stripes.extend(left.into_iter().map(|s| (shard, s))),
                }
                next = asked.try_recv().ok();
            }
            let recorded = self
                .record_trust(&mut stale, &wanted)
                .and_then(|()| self.record_detached(&mut stripes));
            if let Err(error) = &recorded {
                tracing::error!(%error, "the state of the cache device could not be recorded");
            }
            unrecorded = recorded.is_err();
        }
    }

    fn record_trust(&mut self, stale: &mut bool, wanted: &[Trust]) -> io::Result<()> {
        if !*stale {
            return Ok(());
        }
        self.record.trust = self.record.trust.max(together(wanted));
        self.witness.store(&self.record)?;
        *stale = false;
        let trust = self.record.trust;
        tracing::warn!("the cache device is trusted: {}", TRUST_NAMES[trust as usize].1);
        self.mailboxes.iter().for_each(|one| one.send_one(Message::TrustRecorded(trust)));
        if trust == Trust::Nothing {
            self.detached.remove()?;
        }
        Ok(())
    }

    fn record_detached(&mut self, stripes: &mut Vec<OfShard>) -> io::Result<()> {
        if stripes.is_empty() {
            return Ok(());
        }
        self.detached.add(stripes)?;
        for (shard, mailbox) in self.mailboxes.iter().enumerate() {
            let own = stripes.iter().filter(|(of, _)| *of == shard).map(|&(_, stripe)| stripe);
            let own: Vec<DetachedStripe> = own.collect();
            if !own.is_empty() {
                mailbox.send_one(Message::Detached(own));
            }
        }
        stripes.clear();
        Ok(())
    }
}

/// The trust of the whole pool: it falls as soon as one shard asks for less, but to nothing only
/// when every shard has nothing left to save.
fn together(wanted: &[Trust]) -> Trust {
    let worst = wanted.iter().copied().max().unwrap_or_default();
    let best = wanted.iter().copied().min().unwrap_or_default();
    if best == Trust::Nothing { best } else { worst.min(Trust::DirtyOnly) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::testing::TempDir;

    const UUID: [u8; 16] = *b"0123456789abcdef";

    fn record(trust: Trust) -> Record {
        let primaries = ["file:/a b", "file:/odd\\\n'\u{e9}\u{1f600}", ""].map(String::from);
        Record { uuid: UUID, epoch: 7, trust, dirty: true, primaries: Some(primaries.into()) }
    }

    #[test]
    fn what_was_stored_is_loaded() {
        let dir = TempDir::new();
        let witness = Witness::open(&dir.path("state/deep")).unwrap();
        assert_eq!(witness.load(UUID).unwrap(), None);
        for (trust, _) in TRUST_NAMES {
            for record in [record(trust), Record { primaries: None, ..record(trust) }] {
                witness.store(&record).unwrap();
                assert_eq!(witness.load(UUID).unwrap(), Some(record));
            }
        }
        assert_eq!(witness.load([0; 16]).unwrap(), None);
        fs::write(dir.path("state/deep/00.witness"), "rubbish").unwrap();
        fs::write(dir.path("state/deep/other"), "").unwrap();
        let found = witness.load_all().unwrap();
        assert_eq!(found.iter().map(|one| one.uuid).collect::<Vec<_>>(), [UUID]);
    }

    #[test]
    fn a_damaged_file_is_an_error_and_not_a_blank() {
        let dir = TempDir::new();
        let witness = Witness::open(&dir.path("state")).unwrap();
        let text = print(&record(Trust::Nothing));
        let path = |uuid| dir.path("state").join(file_name(uuid));
        for cut in 0..text.len() {
            fs::write(path(UUID), &text[..cut]).unwrap();
            let error = witness.load(UUID).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "cut at {cut}");
            let mut bytes = text.clone().into_bytes();
            bytes[cut] ^= 1;
            fs::write(path(UUID), &bytes).unwrap();
            assert!(witness.load(UUID).is_err(), "byte {cut} changed");
        }
        // One word edited, as by hand.
        fs::write(path(UUID), text.replace("trust nothing", "trust full")).unwrap();
        assert!(witness.load(UUID).is_err());
        fs::write(path([0; 16]), &text).unwrap();
        assert!(witness.load([0; 16]).is_err(), "a witness of another pool");
    }

    #[test]
    fn witnesses_of_earlier_versions_are_read() {
        let dir = TempDir::new();
        let witness = Witness::open(&dir.path("state")).unwrap();
        let path = dir.path("state").join(file_name(UUID));
        let pool = format!("pool {:032x}\nepoch 7\ntrust full\n", u128::from_be_bytes(UUID));
        fs::write(&path, format!("forebay witness 1\n{pool}end\n")).unwrap();
        let expected = Record { primaries: None, ..record(Trust::Full) };
        assert_eq!(witness.load(UUID).unwrap(), Some(expected));
        let text = format!("forebay witness 2\n{pool}dirty true\nprimary /a b\nend\n");
        fs::write(&path, text).unwrap();
        let primaries = Some(vec!["/a b".to_owned()]);
        let expected = Record { primaries, ..record(Trust::Full) };
        assert_eq!(witness.load(UUID).unwrap(), Some(expected));
    }

    #[test]
    fn nothing_is_trusted_only_when_every_shard_says_so() {
        use Trust::{DirtyOnly, Full, Nothing};
        let cases = [
            (vec![Full, Full], Full),
            (vec![Full, DirtyOnly], DirtyOnly),
            (vec![Full, Nothing], DirtyOnly),
            (vec![DirtyOnly, Nothing], DirtyOnly),
            (vec![Nothing, Nothing], Nothing),
            (vec![Nothing], Nothing),
        ];
        for (wanted, expected) in cases {
            assert_eq!(together(&wanted), expected, "{wanted:?}");
        }
    }

    #[test]
    fn a_directory_that_cannot_be_is_named() {
        let dir = TempDir::new();
        fs::write(dir.path("file"), "").unwrap();
        let error = Witness::open(&dir.path("file/below")).unwrap_err();
        assert!(error.to_string().contains("file/below"), "{error}");
    }
}
