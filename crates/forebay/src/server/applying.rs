//! The configuration for which a server hands over to its own program, in the state directory. The
//! server that starts with this text knows by it that the differences were checked, and what they
//! demand was done. A server that starts with another text knows that it has failed.
//!
//! Several servers may share a state directory, and one may start while another one drains. So the
//! file is named after the cache of the server that hands over. A start removes those of its own
//! cache, of its own configuration file, which may have named another cache, and of its own text.

use std::io;
use std::path::Path;

use forebay_block::{VOLUMES_MAX, VolumeId};
use forebay_control::config::{Config, FILE_BYTES_MAX};
use forebay_runtime::{StateDir, file_of, sealed, unsealed};

use crate::server::cache::no_state;
use crate::server::warm_up::WarmUp;

/// Kind of the file.
const KIND: &str = "applying";
/// Its first line.
const HEADING: &str = "forebay applying 2";
/// The names of this file and the list for a warm-up in builds that had one of each for all servers
/// of a state directory. They are not read: a start with such a text takes nothing for granted.
const OLD_NAMES: [&str; 2] = ["applying", "warm-up"];
/// The beginning of the line with the configuration file.
const SOURCE: &str = "source ";
/// The line if it takes a new cache.
const NEW_CACHE: &str = "new cache";
/// The line before the text.
const TEXT: &str = "text";
/// Longest file that is read, in bytes: a configuration, and a line for each volume.
const BYTES_MAX: u64 = 2 * FILE_BYTES_MAX;

/// A configuration that is being brought into force.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Applying {
    /// The cache of the server that hands over.
    pub cache: [u8; 16],
    /// The place of the configuration file, as [`source`] has it.
    pub source: String,
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
        let mut found = all(&state)?.into_iter().filter(|found| found.text == text);
        // If there are two, one of them has failed, and nobody knows which.
        Ok(found.next().filter(|_| found.next().is_none()))
    }

    /// Whether one of this configuration file is on record.
    ///
    /// # Errors
    /// If the state directory cannot be read.
    pub fn is_on_record(state: &StateDir, file: Option<&Path>) -> io::Result<bool> {
        let file = file.map(source);
        Ok(all(state)?.iter().any(|found| file.as_ref() == Some(&found.source)))
    }

    /// Puts it on record; durable when this returns.
    ///
    /// # Errors
    /// If it cannot be made durable.
    pub fn store(&self, state: &StateDir) -> io::Result<()> {
        let mut body = format!("{HEADING}\n{SOURCE}{}\n", self.source);
        if self.new_cache {
            body += &format!("{NEW_CACHE}\n");
        }
        for (id, name) in &self.ids {
            body += &format!("volume {} {name}\n", id.0);
        }
        body += &format!("{TEXT}\n{}\n", self.text);
        state.replace(&file_of(self.cache, KIND), &sealed(&body))
    }

    /// Removes those of this cache, of this configuration file, and of this text, with their lists
    /// for a warm-up: they are in force, or have failed.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub fn end(
        state: &StateDir,
        cache: [u8; 16],
        file: Option<&Path>,
        text: Option<&str>,
    ) -> io::Result<()> {
        let file = file.map(source);
        let is_ours =
            |one: &Self| file.as_ref() == Some(&one.source) || text == Some(one.text.as_str());
        let others = all(state)?.into_iter().filter(is_ours).map(|one| one.cache);
        for cache in others.chain([cache]) {
            state.remove(&file_of(cache, KIND))?;
            WarmUp::end(state, cache)?;
        }
        OLD_NAMES.iter().try_for_each(|name| state.remove(name))
    }
}

/// A configuration file's place as text on one line.
pub fn source(file: &Path) -> String {
    let place = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    format!("{place:?}")
}

/// All on record that are whole.
fn all(state: &StateDir) -> io::Result<Vec<Applying>> {
    let mut found = Vec::new();
    for cache in state.caches_with(KIND)? {
        let name = file_of(cache, KIND);
        match state.read(&name, BYTES_MAX) {
            Ok(text) => found.extend(text.and_then(|text| parse(cache, &text))),
            // It may be that of another server.
            Err(error) => tracing::warn!(name, %error, "ignored, as it is not whole"),
        }
    }
    Ok(found)
}

/// Whatever is not whole is none: a start then takes nothing for granted.
fn parse(cache: [u8; 16], file: &str) -> Option<Applying> {
    let body = unsealed(file)?.strip_prefix(HEADING)?.strip_prefix('\n')?;
    let (source, body) = body.strip_prefix(SOURCE)?.split_once('\n')?;
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
    let (source, text) = (source.to_owned(), text.strip_suffix('\n')?.to_owned());
    Some(Applying { cache, source, text, new_cache, ids })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A state directory, a configuration with it, and their place.
    fn directory(name: &str) -> (StateDir, Config, std::path::PathBuf) {
        let name = format!("forebay-applying-{name}-{}", std::process::id());
        let place = std::env::temp_dir().join(name);
        let state = StateDir::open(&place).expect("it is made");
        let mut config = Config::defaults(1);
        config.cache.state_dir.clone_from(&place);
        (state, config, place)
    }

    fn one(cache: u8, file: &str, text: &str) -> Applying {
        let (source, text) = (source(Path::new(file)), text.to_owned());
        Applying { cache: [cache; 16], source, text, new_cache: false, ids: Vec::new() }
    }

    #[test]
    fn what_was_put_on_record_is_read_back() {
        let (state, config, place) = directory("read");
        let longest = "#".repeat(FILE_BYTES_MAX as usize);
        let texts = ["", "text\n", "a = 1\n\n[b]\ntext\nc = 2", "volume 1 x\n", &longest];
        for (count, text) in texts.into_iter().enumerate() {
            let ids = (0..count as u8).map(|id| (VolumeId(id), format!("v {id}"))).collect();
            let new_cache = count % 2 == 1;
            let one = Applying { new_cache, ids, ..one(7, "/etc/a\nb.toml", text) };
            one.store(&state).expect("it is stored");
            let found = |text| Applying::of(&config, text).expect("it can be read");
            assert_eq!(found(Some(text)), Some(one));
            assert_eq!(found(Some("another")), None);
            assert_eq!(found(None), None);
        }
        Applying::end(&state, [7; 16], None, None).expect("it is removed");
        std::fs::remove_dir(&place).expect("it is empty");
    }

    /// The start of one server removed the record of another one, which was draining.
    #[test]
    fn a_start_leaves_what_other_servers_of_the_directory_apply() {
        let (state, config, place) = directory("others");
        let [first, other] = [one(1, "/etc/1", "a"), one(2, "/etc/2", "b")];
        let found = |text| Applying::of(&config, Some(text)).expect("it can be read");
        first.store(&state).expect("it is stored");
        other.store(&state).expect("it is stored");
        state.replace("warm-up", "of an older build").expect("it is stored");
        Applying::end(&state, [3; 16], Some(Path::new("/etc/3")), Some("c")).expect("it can");
        assert_eq!((found("a"), found("b")), (Some(first.clone()), Some(other.clone())));
        // The same file with another text, and then that text in another file; with other caches.
        Applying::end(&state, [3; 16], Some(Path::new("/etc/1")), None).expect("it can");
        assert_eq!((found("a"), found("b")), (None, Some(other)));
        first.store(&state).expect("it is stored");
        Applying::end(&state, [3; 16], None, Some("b")).expect("it can");
        assert_eq!((found("a"), found("b")), (Some(first), None));
        one(2, "/etc/2", "a").store(&state).expect("it is stored");
        assert_eq!(found("a"), None, "nobody knows which one");
        Applying::end(&state, [1; 16], Some(Path::new("/etc/2")), None).expect("it can");
        std::fs::remove_dir(&place).expect("it is empty");
    }

    #[test]
    fn what_is_not_whole_is_none() {
        let whole = sealed(&format!("{HEADING}\n{SOURCE}\"/a\"\nvolume 3 a\n{TEXT}\nx\n"));
        let parse = |text: &str| parse([1; 16], text);
        assert!(parse(&whole).is_some());
        for wrong in ["volume 64 a", "volume a", "volume 3", "vol 3 a"] {
            let text = sealed(&format!("{HEADING}\n{SOURCE}\"/a\"\n{wrong}\n{TEXT}\nx\n"));
            assert_eq!(parse(&text), None, "{wrong}");
        }
        for cut in 0..whole.len() {
            assert_eq!(parse(&whole[..cut]), None, "{cut} bytes");
        }
    }
}
