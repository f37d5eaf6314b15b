//! Settings that were changed while serving, kept for the next start.
//!
//! `UUID.settings` in the state directory holds each change with the value configured at that time.
//! As long as the configured value is the same, the change stays in force; once it differs, the
//! configuration wins. Both cases are logged.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_block::VolumeId;
use forebay_control::config::Config;
use forebay_control::settings::Spec;
use forebay_control::text::date;
use forebay_format::Superblock;
use forebay_runtime::{StateDir, file_of, sealed, unsealed};

/// First line of the file.
const HEADING: &str = "forebay settings 1";
/// Longest file that is read, in bytes: a line for each setting of each of 64 volumes, and more.
const BYTES_MAX: u64 = 4 << 20;

/// A setting that was changed while serving.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The volume; `None` for a setting of the whole cache.
    pub volume: Option<VolumeId>,
    /// Its line in the table of settings.
    pub spec: &'static Spec,
    /// The new value.
    pub value: String,
    /// The value configured at the time of the change.
    pub configured: String,
    /// Time of the change, in seconds since 1970.
    pub since: u64,
}

impl Setting {
    fn is(&self, volume: Option<VolumeId>, key: &str) -> bool {
        self.volume == volume && self.spec.key == key
    }
}

/// A value to be kept.
#[derive(Debug)]
pub struct Wish {
    /// As in [`Setting`].
    pub volume: Option<VolumeId>,
    pub spec: &'static Spec,
    pub value: String,
    /// The configured value; if it is the same, nothing is kept.
    pub configured: String,
}

/// The kept settings of one cache.
pub struct KeptSettings {
    state: StateDir,
    name: String,
    settings: Vec<Setting>,
}

impl KeptSettings {
    /// The kept settings of the cache `uuid`.
    ///
    /// # Errors
    /// If the file cannot be read or is damaged: continuing without it could end a protection that
    /// the operator requested.
    pub fn load(state: &StateDir, uuid: [u8; 16]) -> io::Result<Self> {
        let name = file_of(uuid, "settings");
        let uuid = format!("{:032x}", u128::from_be_bytes(uuid));
        let settings = match state.read(&name, BYTES_MAX)? {
            None => Vec::new(),
            Some(text) => parse(&text, &uuid).ok_or_else(|| {
                let hint = "remove it to go on with the configuration";
                io::Error::new(io::ErrorKind::InvalidData, format!("{name} is damaged; {hint}"))
            })?,
        };
        Ok(Self { state: state.clone(), name, settings })
    }

    /// The kept settings of the cache that `opened` describes. If it was re-created in place of
    /// `old`, it keeps the settings of `old`, those of a volume under the volume's name.
    /// [`KeptSettings::store`] makes that durable.
    ///
    /// # Errors
    /// As [`KeptSettings::load`].
    pub fn of(state: &StateDir, opened: &Superblock, old: Option<&Superblock>) -> io::Result<Self> {
        let own = Self::load(state, opened.uuid)?;
        let Some(old) = old.filter(|old| old.uuid != opened.uuid) else { return Ok(own) };
        let mut settings = Self::load(state, old.uuid)?.settings;
        settings.retain_mut(|setting| {
            let Some(id) = setting.volume else { return true };
            let before = old.volumes.iter().find(|volume| volume.id == id);
            let same = |name: &String| opened.volumes.iter().find(|volume| volume.name == *name);
            setting.volume = before.and_then(|one| same(&one.name)).map(|volume| volume.id);
            setting.volume.is_some()
        });
        Ok(Self { settings, ..own })
    }

    /// Applies the kept settings to `config`, whose volumes have the ids `ids`, and forgets those
    /// that the configuration overrides. Both are logged.
    ///
    /// # Errors
    /// If a value is unknown.
    pub fn apply(&mut self, config: &mut Config, ids: &[VolumeId]) -> io::Result<()> {
        let before = self.settings.len();
        let mut held = Vec::new();
        for setting in std::mem::take(&mut self.settings) {
            let at = setting.volume.map(|id| ids.iter().position(|known| *known == id));
            let Some(at) = at.unwrap_or(Some(0)) else { continue };
            let Setting { spec, value, configured, since, .. } = &setting;
            let whose = match setting.volume {
                Some(_) => format!("volume {}: ", config.volumes[at].name),
                None => String::new(),
            };
            let (key, date) = (spec.key, date(*since));
            let now = spec.text(config, at).unwrap_or_default();
            if now != *configured {
                tracing::warn!(
                    "{whose}{key} {now} as configured: the configuration was changed since {key} \
                     was set to {value} on {date}"
                );
                continue;
            }
            // One that was set to nothing is kept as an empty text.
            let value = (!value.is_empty()).then_some(value.as_str());
            spec.restore(config, at, value)
                .map_err(|what| io::Error::new(io::ErrorKind::InvalidData, what))?;
            let value = value.unwrap_or("none");
            tracing::warn!("{whose}{key} {value}, set on {date}; the configuration says {now}");
            held.push(setting);
        }
        self.settings = held;
        if self.settings.len() < before
            && let Err(error) = self.store()
        {
            // The next start comes to the same result.
            tracing::warn!(%error, "settings that do not count any more stay on record");
        }
        Ok(())
    }

    /// Forgets all of them: a configuration is brought into force as a whole.
    /// [`KeptSettings::store`] makes that durable.
    pub fn forget(&mut self) {
        self.settings.clear();
    }

    /// Forgets all of them; durable when this returns.
    ///
    /// # Errors
    /// If it cannot be made durable. They stay in force then.
    pub fn clear(&mut self) -> io::Result<()> {
        if self.settings.is_empty() {
            return Ok(());
        }
        let before = std::mem::take(&mut self.settings);
        self.store().inspect_err(|_| self.settings = before)
    }

    /// The kept setting with this volume and key.
    pub fn find(&self, volume: Option<VolumeId>, key: &str) -> Option<&Setting> {
        self.settings.iter().find(|known| known.is(volume, key))
    }

    /// Keeps these values, and forgets each that equals the configured one; durable when this
    /// returns.
    ///
    /// # Errors
    /// If they cannot be made durable, or are longer than a start reads (`FileTooLarge`). The
    /// settings kept before then stay in force.
    pub fn keep(&mut self, wishes: &[Wish]) -> io::Result<()> {
        let before = self.settings.clone();
        for Wish { volume, spec, value, configured } in wishes {
            self.settings.retain(|known| !known.is(*volume, spec.key));
            if value != configured {
                let now = SystemTime::now().duration_since(UNIX_EPOCH);
                self.settings.push(Setting {
                    volume: *volume,
                    spec,
                    value: value.clone(),
                    configured: configured.clone(),
                    since: now.map_or(0, |now| now.as_secs()),
                });
            }
        }
        let stored = self.store();
        if stored.is_err() {
            self.settings = before;
        }
        stored
    }

    /// Stores the kept settings; durable when this returns.
    ///
    /// # Errors
    /// If they cannot be made durable, or are longer than a start reads (`FileTooLarge`).
    pub fn store(&self) -> io::Result<()> {
        if self.settings.is_empty() {
            return self.state.remove(&self.name);
        }
        let uuid = self.name.strip_suffix(".settings").unwrap_or_default();
        let mut body = format!("{HEADING}\npool {uuid}\n");
        for Setting { volume, spec, value, configured, since } in &self.settings {
            let (key, whose) = (spec.key, volume.map_or("cache".to_owned(), |id| id.0.to_string()));
            let [value, configured] = [value, configured].map(|text| escaped(text));
            body += &format!("set {whose} {key} {value} {configured} {since}\n");
        }
        let text = sealed(&body);
        if text.len() as u64 > BYTES_MAX {
            let (name, bytes) = (&self.name, text.len());
            let what = format!("{name} would have {bytes} bytes, and a start reads {BYTES_MAX}");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
        }
        self.state.replace(&self.name, &text)
    }
}

fn parse(text: &str, uuid: &str) -> Option<Vec<Setting>> {
    let mut lines = unsealed(text)?.lines();
    if lines.next()? != HEADING || lines.next()?.strip_prefix("pool ")? != uuid {
        return None;
    }
    lines.map(setting).collect()
}

fn setting(line: &str) -> Option<Setting> {
    let mut words = line.strip_prefix("set ")?.split(' ');
    let volume = match words.next()? {
        "cache" => None,
        id => Some(VolumeId(id.parse().ok()?)),
    };
    let key = words.next()?;
    let spec = Spec::online().find(|s| s.key == key && s.is_of_volume() == volume.is_some())?;
    let [value, configured] = [words.next()?, words.next()?].map(unescaped);
    let since = words.next()?.parse().ok()?;
    words.next().is_none().then_some(Setting { volume, spec, value, configured, since })
}

/// A value as one word of a line.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace(' ', "\\s")
}

fn unescaped(word: &str) -> String {
    let mut text = String::with_capacity(word.len());
    let mut rest = word.chars();
    while let Some(c) = rest.next() {
        match c {
            '\\' => text.extend(rest.next().map(|c| if c == 's' { ' ' } else { c })),
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_with_spaces_are_kept() {
        for text in ["", "50%", "bypass process=a; cache", "\\s \\ s"] {
            assert!(!escaped(text).contains(' '));
            assert_eq!(unescaped(&escaped(text)), text);
        }
        let line = format!("set cache rules {} {} 7", escaped("bypass user=a b"), escaped(""));
        let found = setting(&line).expect("it is one");
        assert_eq!((found.value.as_str(), found.configured.as_str()), ("bypass user=a b", ""));
    }

    /// Very long pins were kept, and the next start refused the file as damaged.
    #[test]
    fn what_a_start_would_not_read_is_not_kept() {
        let name = format!("forebay-settings-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let state = StateDir::open(&directory).expect("it is made");
        let spec = Spec::online().find(|spec| spec.key == "pinned").expect("it is one");
        let wish = |bytes: usize| {
            let value = format!("{}=..4KiB", "x".repeat(bytes));
            [Wish { volume: Some(VolumeId(3)), spec, value, configured: String::new() }]
        };
        let mut kept = KeptSettings::load(&state, [7; 16]).expect("nothing is there");
        kept.keep(&wish(1 << 20)).expect("it is not too long");
        let error = kept.keep(&wish(4 << 20)).expect_err("it is too long");
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(error.to_string().contains(".settings would have 41"), "{error}");
        let again = KeptSettings::load(&state, [7; 16]).expect("it is whole");
        for one in [kept, again] {
            let found = one.find(Some(VolumeId(3)), "pinned").expect("it is kept");
            assert_eq!(found.value.len(), "=..4KiB".len() + (1 << 20));
        }
        std::fs::remove_dir_all(&directory).expect("it is ours");
    }

    #[test]
    fn lines_that_are_not_ours_are_no_settings() {
        let line = "set 3 mode write-through write-back 7";
        let found = setting(line).expect("it is one");
        assert_eq!((found.volume, found.since), (Some(VolumeId(3)), 7));
        assert_eq!(setting("set cache eviction lru fifo 7").and_then(|found| found.volume), None);
        for wrong in
            ["", "set", "set 3 eviction lru fifo 7", "set cache mode a b 7", "set 3 mode a b"]
        {
            assert!(setting(wrong).is_none(), "{wrong}");
        }
        assert!(setting(&format!("{line} 8")).is_none());
    }
}
