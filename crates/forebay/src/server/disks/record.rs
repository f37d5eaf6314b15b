//! The record of a disk: `MARK.disk` in the state directory, from before the kernel makes the disk
//! until after it has removed it.
//!
//! The mark is a random number that the kernel keeps with the device. So a server knows its devices
//! by their marks, whatever their numbers are, and never touches a device of another program. The
//! record names the primary, since the volume may be renamed and the cache be made again.

use std::io;

use anyhow::Context;
use forebay_runtime::{StateDir, sealed, unsealed};

/// First line of the file.
const HEADING: &str = "forebay disk 1";
const SUFFIX: &str = ".disk";
/// Of the empty file beside it while a server takes the disk over.
const BEGUN_SUFFIX: &str = ".taking";
/// Longest file that is read, in bytes.
const BYTES_MAX: u64 = 16 << 10;

/// A disk, as the state directory has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// The device's mark.
    pub mark: u64,
    /// Name of the volume when the disk was made.
    pub volume: String,
    /// The identity of its primary.
    pub primary: String,
    /// Bytes in a sector.
    pub sector_size: u32,
}

impl Record {
    /// The record of a new disk.
    pub fn new(volume: &str, primary: &str, sector_size: u32) -> io::Result<Self> {
        let mut mark = [0; 8];
        io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut mark)?;
        // Devices of other programs may have the mark zero.
        let mark = u64::from_ne_bytes(mark).max(1);
        let (volume, primary) = (volume.to_owned(), primary.to_owned());
        Ok(Self { mark, volume, primary, sector_size })
    }

    /// Every record in the directory; damaged ones are left out, with a warning.
    pub fn all(state: &StateDir) -> anyhow::Result<Vec<Self>> {
        let mut records = Vec::new();
        for name in state.names()?.into_iter().filter(|name| name.ends_with(SUFFIX)) {
            let text = match state.read(&name, BYTES_MAX) {
                Ok(Some(text)) => text,
                Ok(None) => continue,
                Err(error) => {
                    tracing::warn!(%error, "the record of a disk is not believed");
                    continue;
                }
            };
            match Self::parse(&text).filter(|record| record.file_name() == name) {
                Some(record) => records.push(record),
                None => tracing::warn!(name, "the record of a disk is damaged; remove it"),
            }
        }
        Ok(records)
    }

    /// Keeps it; durable when this returns.
    pub fn store(&self, state: &StateDir) -> anyhow::Result<()> {
        state.replace(&self.file_name(), &sealed(&self.text())).context("the disk's record")
    }

    /// Notes that a server begins to take the disk over. Like the device, the note is for the time
    /// until the machine is restarted.
    pub fn begin(&self, state: &StateDir) -> io::Result<()> {
        state.mark(&self.begun_name())
    }

    /// Whether a server has begun that, and not ended it.
    pub fn has_begun(&self, state: &StateDir) -> io::Result<bool> {
        Ok(state.read(&self.begun_name(), 0)?.is_some())
    }

    /// Notes that this has ended, or that the kernel has not begun.
    pub fn end(&self, state: &StateDir) {
        if let Err(error) = state.remove(&self.begun_name()) {
            tracing::warn!(%error, "the disk cannot be taken over again");
        }
    }

    /// Removes it.
    pub fn remove(&self, state: &StateDir) {
        self.end(state);
        if let Err(error) = state.remove(&self.file_name()) {
            tracing::warn!(%error, "the record of a removed disk stays");
        }
    }

    fn file_name(&self) -> String {
        format!("{:016x}{SUFFIX}", self.mark)
    }

    fn begun_name(&self) -> String {
        format!("{:016x}{BEGUN_SUFFIX}", self.mark)
    }

    fn text(&self) -> String {
        let Self { mark, volume, primary, sector_size } = self;
        let (volume, primary) = (volume.escape_default(), primary.escape_default());
        format!(
            "{HEADING}\nmark {mark:016x}\nsector {sector_size}\n\
             volume {volume}\nprimary {primary}\n"
        )
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = unsealed(text)?.lines();
        if lines.next()? != HEADING {
            return None;
        }
        let mut value = |key: &str| lines.next()?.strip_prefix(key)?.strip_prefix(' ');
        let mark = u64::from_str_radix(value("mark")?, 16).ok()?;
        let sector_size = value("sector")?.parse().ok()?;
        let (volume, primary) = (unescaped(value("volume")?)?, unescaped(value("primary")?)?);
        Some(Self { mark, volume, primary, sector_size })
    }
}

/// The text that `escape_default` has escaped.
fn unescaped(text: &str) -> Option<String> {
    let mut out = String::new();
    let mut rest = text.chars();
    while let Some(next) = rest.next() {
        if next != '\\' {
            out.push(next);
            continue;
        }
        out.push(match rest.next()? {
            't' => '\t',
            'r' => '\r',
            'n' => '\n',
            'u' => {
                let digits: String = rest.by_ref().take_while(|&digit| digit != '}').collect();
                let number = u32::from_str_radix(digits.strip_prefix('{')?, 16).ok()?;
                char::from_u32(number)?
            }
            literal => literal,
        });
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let primary = "file:/d b/\n\"x\"\\u{e9}é";
        let record = Record::new("d b", primary, 4096).expect("there are random numbers");
        assert_eq!(Record::parse(&sealed(&record.text())), Some(record.clone()));
        assert_ne!(record.mark, 0);
        assert!(record.file_name().ends_with(".disk") && record.file_name().len() == 21);
    }

    #[test]
    fn a_damaged_or_foreign_record_is_not_believed() {
        let record = Record::new("db", "/dev/sdb", 512).expect("there are random numbers");
        let whole = sealed(&record.text());
        for at in 0..whole.len() {
            assert_eq!(Record::parse(&whole[..at]), None, "cut at {at}");
        }
        assert_eq!(Record::parse(&sealed("forebay disk 2\n")), None);
        assert_eq!(Record::parse(&sealed(&format!("{HEADING}\nmark x\n"))), None);
        let broken = record.text().replace("sector 512", "sector many");
        assert_eq!(Record::parse(&sealed(&broken)), None);
    }
}
