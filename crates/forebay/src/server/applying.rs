//! The configuration for which a server hands over to its own program, in the state directory. The
//! server that starts with this text knows by it that the differences were checked, and what they
//! demand was done. A server that starts with another text knows that it has failed.

use std::io;

use forebay_block::{VOLUMES_MAX, VolumeId};
use forebay_control::config::{Config, FILE_BYTES_MAX};
use forebay_runtime::{StateDir, sealed, unsealed};

use crate::server::cache::no_state;
use crate::server::warm_up::WarmUp;

/// Name of the file.
const NAME: &str = "applying";
/// Its first line.
const HEADING: &str = "forebay applying 1";
/// The line if it takes a new cache.
const NEW_CACHE: &str = "new cache";
/// The line before the text.
const TEXT: &str = "text";
/// Longest file that is read, in bytes: a configuration, and a line for each volume.
const BYTES_MAX: u64 = 2 * FILE_BYTES_MAX;

/// A configuration that is being brought into force.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Applying {
    /// The text of its file.
    pub text: String,
    /// Whether it takes a new cache: the one before is given up when its server leaves.
    pub new_cache: bool,
    /// The ids of the volumes that stay, with their names in it.
    pub ids: Vec<(VolumeId, String)>,
}

impl Applying {
    /// The one on record, if it is the configuration `config` with this text.
    ///
    /// # Errors
    /// If the state directory cannot be read.
    pub fn of(config: &Config, text: Option<&str>) -> anyhow::Result<Option<Self>> {
        let directory = &config.cache.state_dir;
        let Some(text) = text.filter(|_| directory.exists()) else { return Ok(None) };
        let state = StateDir::open(directory).map_err(no_state)?;
        let found = state.read(NAME, BYTES_MAX)?.as_deref().and_then(parse);
        Ok(found.filter(|found| found.text == text))
    }

    /// Whether any is on record.
    ///
    /// # Errors
    /// If the state directory cannot be read.
    pub fn is_on_record(state: &StateDir) -> io::Result<bool> {
        Ok(state.read(NAME, BYTES_MAX)?.is_some())
    }

    /// Puts it on record; durable when this returns.
    ///
    /// # Errors
    /// If it cannot be made durable.
    pub fn store(&self, state: &StateDir) -> io::Result<()> {
        let mut body = format!("{HEADING}\n");
        if self.new_cache {
            body += &format!("{NEW_CACHE}\n");
        }
        for (id, name) in &self.ids {
            body += &format!("volume {} {name}\n", id.0);
        }
        body += &format!("{TEXT}\n{}\n", self.text);
        state.replace(NAME, &sealed(&body))
    }

    /// Removes it, and the list for a warm-up: it is in force, or has failed.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn end(state: &StateDir) -> io::Result<()> {
        state.remove(NAME)?;
        WarmUp::end(state)
    }
}

/// Whatever is not whole is none: a start then takes nothing for granted.
fn parse(file: &str) -> Option<Applying> {
    let body = unsealed(file)?.strip_prefix(HEADING)?.strip_prefix('\n')?;
    let (lines, text) = match body.strip_prefix(&format!("{TEXT}\n")) {
        Some(text) => ("", text),
        None => body.split_once(&format!("\n{TEXT}\n"))?,
    };
    let volume = |line: &str| {
        let (id, name) = line.strip_prefix("volume ")?.split_once(' ')?;
        let id = id.parse().ok().filter(|&id: &u8| usize::from(id) < VOLUMES_MAX)?;
        Some((VolumeId(id), name.to_owned()))
    };
    let new_cache = lines.lines().next() == Some(NEW_CACHE);
    let ids = lines.lines().skip(usize::from(new_cache)).map(volume).collect::<Option<_>>()?;
    Some(Applying { text: text.strip_suffix('\n')?.to_owned(), new_cache, ids })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_on_record_is_read_back() {
        let name = format!("forebay-applying-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let state = StateDir::open(&directory).expect("it is made");
        let longest = "#".repeat(FILE_BYTES_MAX as usize);
        let texts = ["", "text\n", "a = 1\n\n[b]\ntext\nc = 2", "volume 1 x\n", &longest];
        for (count, text) in texts.into_iter().enumerate() {
            let ids = (0..count as u8).map(|id| (VolumeId(id), format!("v {id}"))).collect();
            let new_cache = count % 2 == 1;
            let one = Applying { text: text.to_owned(), new_cache, ids };
            one.store(&state).expect("it is stored");
            let mut config = Config::defaults(1);
            config.cache.state_dir.clone_from(&directory);
            let found = |text| Applying::of(&config, text).expect("it can be read");
            assert_eq!(found(Some(text)), Some(one));
            assert_eq!(found(Some("another")), None);
            assert_eq!(found(None), None);
        }
        Applying::end(&state).expect("it is removed");
        assert_eq!(state.read(NAME, BYTES_MAX).expect("it can be read"), None);
        std::fs::remove_dir(&directory).expect("it is empty");
    }

    #[test]
    fn what_is_not_whole_is_none() {
        let whole = sealed(&format!("{HEADING}\nvolume 3 a\n{TEXT}\nx\n"));
        assert!(parse(&whole).is_some());
        for wrong in ["volume 64 a", "volume a", "volume 3", "vol 3 a"] {
            assert_eq!(
                parse(&sealed(&format!("{HEADING}\n{wrong}\n{TEXT}\nx\n"))),
                None,
                "{wrong}"
            );
        }
        for cut in 0..whole.len() {
            assert_eq!(parse(&whole[..cut]), None, "{cut} bytes");
        }
    }
}
