//! How one configuration differs from another, and how a running server comes from the first to the
//! second: by changes that it makes at once, or by handing over to a server that starts with the
//! second.

use crate::config::{Config, location};

use super::{Change, NewValue, Online, Spec, TABLE};

/// What differs between two configurations.
#[derive(Clone, Default, Debug)]
pub struct Differences {
    /// The volumes that are not the same ones.
    pub volumes: Vec<VolumeDifference>,
    /// The settings with another value, in the order of the table; those of volumes by volume.
    pub settings: Vec<Difference>,
}

/// A volume that is not the same in both.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeDifference {
    /// Its name; in the second configuration, if it is there.
    pub volume: String,
    /// The difference.
    pub change: VolumeChange,
}

/// How a volume differs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum VolumeChange {
    /// Only the second configuration has it.
    Added,
    /// Only the first configuration has it.
    Removed,
    /// The first one has its primary under this name.
    Renamed(String),
    /// Its primary has become larger: its sizes before and after, in bytes. No configuration tells
    /// this.
    Grown(u64, u64),
}

/// A setting whose value differs.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The setting.
    pub spec: &'static Spec,
    /// The volume, for a setting of volumes; its name in the second configuration.
    pub volume: Option<String>,
    /// The value in the first configuration; `None` if it is unset.
    pub from: Option<String>,
    /// The value in the second one.
    pub to: Option<String>,
}

impl Difference {
    /// Section or volume, and key.
    fn name(&self) -> String {
        match &self.volume {
            Some(volume) => format!("volume {volume:?}: {}", self.spec.key),
            None => format!("{}.{}", self.spec.section.name(), self.spec.key),
        }
    }
}

/// How a running server comes to its new configuration.
#[derive(Clone, Debug)]
pub enum Way {
    /// By these changes, at once.
    Live(Vec<Change>),
    /// By handing over to a server that starts with the configuration.
    HandOver,
    /// The same, after everything dirty was written to the primaries: that server makes a new
    /// cache.
    NewCache,
}

impl Differences {
    /// What differs between `from` and `to`. A volume is where its primary is: one whose primary
    /// has another name in `to` is renamed, also if two swap their names. Only a primary that `to`
    /// does not have leaves its name to another one.
    #[must_use]
    pub fn between(from: &Config, to: &Config) -> Self {
        let places = |config: &Config| -> Vec<String> {
            config.volumes.iter().map(|volume| location(&volume.primary)).collect()
        };
        let (old, new) = (places(from), places(to));
        let mut volumes = Vec::new();
        let mut pairs = Vec::new();
        for (at, volume) in to.volumes.iter().enumerate() {
            let name = &volume.name;
            let same = old.iter().position(|place| *place == new[at]);
            let replaced = || {
                let named = from.volumes.iter().position(|one| one.name == *name);
                named.filter(|&before| !new.contains(&old[before]))
            };
            let before = same.or_else(replaced);
            pairs.extend(before.map(|before| (before, at)));
            let change = match before.map(|before| &from.volumes[before].name) {
                None => VolumeChange::Added,
                Some(before) if before != name => VolumeChange::Renamed(before.clone()),
                Some(_) => continue,
            };
            volumes.push(VolumeDifference { volume: name.clone(), change });
        }
        let gone = from.volumes.iter().enumerate();
        let gone = gone.filter(|(at, _)| pairs.iter().all(|(before, _)| before != at));
        volumes.extend(gone.map(|(_, volume)| VolumeDifference {
            volume: volume.name.clone(),
            change: VolumeChange::Removed,
        }));
        Self { volumes, settings: settings(from, to, &pairs) }
    }

    /// The name that the volume `name` of the second configuration has in the first one; `None` if
    /// that does not have it.
    #[must_use]
    pub fn before<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        let of = |one: &'a VolumeDifference| match &one.change {
            VolumeChange::Added => Some(None),
            VolumeChange::Renamed(before) => Some(Some(before.as_str())),
            VolumeChange::Removed | VolumeChange::Grown(..) => None,
        };
        let mut own = self.volumes.iter().filter(|one| one.volume == name);
        own.find_map(of).unwrap_or(Some(name))
    }

    /// Whether nothing differs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.volumes.is_empty() && self.settings.is_empty()
    }

    /// How a running server comes from the first configuration to the second.
    ///
    /// # Errors
    /// Names the settings that only a restart changes.
    pub fn way(&self) -> Result<Way, String> {
        let is = |one: &Difference, kind: fn(Online) -> bool| kind(one.spec.online);
        let fixed =
            self.settings.iter().filter(|one| is(one, |how| matches!(how, Online::Restart)));
        let fixed: Vec<_> = fixed.map(Difference::name).collect();
        if !fixed.is_empty() {
            return Err(format!("{} cannot be changed while serving", fixed.join(", ")));
        }
        if self.settings.iter().any(|one| is(one, |how| matches!(how, Online::NewCache))) {
            return Ok(Way::NewCache);
        }
        if !self.volumes.is_empty() || !self.settings.iter().all(|one| is(one, Online::is_live)) {
            return Ok(Way::HandOver);
        }
        let change = |one: &Difference| Change {
            spec: one.spec,
            volume: one.volume.clone(),
            value: one.to.clone().map_or(NewValue::Unset, NewValue::Is),
        };
        Ok(Way::Live(self.settings.iter().map(change).collect()))
    }
}

/// The settings that differ; `pairs` are the indices of the volumes that both have.
fn settings(from: &Config, to: &Config, pairs: &[(usize, usize)]) -> Vec<Difference> {
    // Fields are accessible through exclusive references only.
    let (mut old, mut new) = (from.clone(), to.clone());
    let mut all = Vec::new();
    let mut compare = |spec: &'static Spec, volume: Option<&str>, at: (usize, usize)| {
        let (from, to) = (spec.field(&mut old, at.0).text(), spec.field(&mut new, at.1).text());
        if from != to {
            all.push(Difference { spec, volume: volume.map(str::to_owned), from, to });
        }
    };
    TABLE.iter().filter(|spec| !spec.is_of_volume()).for_each(|spec| compare(spec, None, (0, 0)));
    // A name is what tells volumes apart, so another one is no setting that differs.
    let of_volume = || TABLE.iter().filter(|spec| spec.is_of_volume() && spec.key != "name");
    for &(before, at) in pairs {
        let name = &to.volumes[at].name;
        of_volume().for_each(|spec| compare(spec, Some(name), (before, at)));
    }
    all
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(cache: &str, volumes: &[(&str, &str)]) -> Config {
        let head = format!("[cache]\npath = \"/c\"\n{cache}\n[server]\nnbd = [\"unix:/s\"]\n");
        let volume = |(name, more): &(&str, &str)| {
            let primary = if more.contains("primary") {
                String::new()
            } else {
                format!("primary = \"/p/{name}\"")
            };
            format!("[[volume]]\nname = {name:?}\n{primary}\n{more}\n")
        };
        let text = head + &volumes.iter().map(volume).collect::<String>();
        Config::parse(Path::new("a file"), &text).expect("it is valid")
    }

    #[test]
    fn what_differs_is_named_with_both_values() {
        let now = config("dirty_limit = \"30%\"", &[("a", ""), ("b", "dirty_limit = \"10%\"")]);
        let new = config("", &[("b", ""), ("a", "mode = \"write-around\"")]);
        let all = Differences::between(&now, &new);
        let texts: Vec<_> = all
            .settings
            .iter()
            .map(|one| (one.name(), one.from.as_deref().unwrap_or("-"), one.to.as_deref()))
            .collect();
        assert_eq!(
            texts,
            [
                ("cache.dirty_limit".to_owned(), "30%", Some("50%")),
                ("volume \"b\": dirty_limit".to_owned(), "10%", None),
                ("volume \"a\": mode".to_owned(), "write-back", Some("write-around")),
            ]
        );
        let Ok(Way::Live(changes)) = all.way() else { panic!("all are possible at once") };
        let values: Vec<_> = changes.into_iter().map(|one| one.value).collect();
        let is = |text: &str| NewValue::Is(text.to_owned());
        assert_eq!(values, [is("50%"), NewValue::Unset, is("write-around")]);
        assert!(all.volumes.is_empty());
        assert!(Differences::between(&new, &new).is_empty());
    }

    #[test]
    fn the_way_is_the_widest_that_a_setting_needs() {
        let now = config("", &[("a", "")]);
        let way = |cache: &str, volume: &str| {
            Differences::between(&now, &config(cache, &[("a", volume)])).way()
        };
        assert!(matches!(way("dirty_limit = \"30%\"", ""), Ok(Way::Live(_))));
        assert!(matches!(way("dirty_limit = \"30%\"", "read_only = true"), Ok(Way::HandOver)));
        let share = "log_share = \"20%\"\ndirty_limit = \"30%\"";
        assert!(matches!(way(share, "read_only = true"), Ok(Way::NewCache)));
        let error = way("state_dir = \"/s\"\nlog_share = \"20%\"", "").expect_err("it is fixed");
        assert!(error.contains("cache.state_dir") && !error.contains("log_share"), "{error}");
    }

    #[test]
    fn volumes_that_come_go_or_have_another_name_are_told_apart() {
        let now = config("", &[("a", ""), ("b", "mode = \"write-around\""), ("c", "")]);
        let new = config("", &[("d", ""), ("e", "primary = \"/p/b\""), ("c", "")]);
        let all = Differences::between(&now, &new);
        let change = |volume: &str, change| VolumeDifference { volume: volume.to_owned(), change };
        assert_eq!(
            all.volumes,
            [
                change("d", VolumeChange::Added),
                change("e", VolumeChange::Renamed("b".to_owned())),
                change("a", VolumeChange::Removed),
            ]
        );
        let names: Vec<_> = all.settings.iter().map(Difference::name).collect();
        assert_eq!(names, ["volume \"e\": mode"]);
        assert!(matches!(all.way(), Ok(Way::HandOver)));
    }

    fn changes(from: &Config, to: &Config) -> Vec<(String, VolumeChange)> {
        let all = Differences::between(from, to).volumes.into_iter();
        all.map(|one| (one.volume, one.change)).collect()
    }

    /// Each volume that swaps its name goes on with its primary under the other name. They were
    /// taken for volumes with other primaries, and their clients stayed with the names.
    #[test]
    fn volumes_that_swap_their_names_are_renamed() {
        let now = config("", &[("a", ""), ("b", "mode = \"write-around\"")]);
        let new = config("", &[("a", "primary = \"/p/b\""), ("b", "primary = \"/p/a\"")]);
        let all = Differences::between(&now, &new);
        let renamed = |to: &str, from: &str| (to.into(), VolumeChange::Renamed(from.into()));
        assert_eq!(changes(&now, &new), [renamed("a", "b"), renamed("b", "a")]);
        assert_eq!((all.before("a"), all.before("b")), (Some("b"), Some("a")));
        let names: Vec<_> = all.settings.iter().map(Difference::name).collect();
        assert_eq!(names, ["volume \"a\": mode"]);
    }

    #[test]
    fn a_name_goes_to_another_volume() {
        let now = config("", &[("a", ""), ("b", "")]);
        let new = config("", &[("a", "primary = \"/p/b\"")]);
        let taken = [
            ("a".to_owned(), VolumeChange::Renamed("b".to_owned())),
            ("a".to_owned(), VolumeChange::Removed),
        ];
        assert_eq!(changes(&now, &new), taken);
        let new = config("", &[("a", "primary = \"/p/c\""), ("c", "primary = \"/p/a\"")]);
        let all = Differences::between(&now, &new);
        assert_eq!(all.volumes[0].change, VolumeChange::Added);
        assert_eq!((all.before("a"), all.before("c")), (None, Some("a")));
        // No other volume has the previous primary: this one has another primary.
        let new = config("", &[("a", "primary = \"/p/c\""), ("b", "")]);
        assert_eq!(changes(&now, &new), []);
    }
}
