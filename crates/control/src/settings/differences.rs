//! How one configuration differs from another, and which changes of a running server make the first
//! equal to the second.

use crate::config::Config;

use super::{Change, NewValue, Spec, TABLE};

/// A setting whose value differs.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The setting.
    pub spec: &'static Spec,
    /// The volume, for a setting of volumes.
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

/// The settings that differ, in the order of the table; those of volumes by volume.
///
/// # Errors
/// When the configurations do not have the same volumes.
pub fn differences(from: &Config, to: &Config) -> Result<Vec<Difference>, String> {
    let place = |config: &Config, name: &str| config.volumes.iter().position(|v| v.name == name);
    let mut places = Vec::new();
    for (at, volume) in from.volumes.iter().enumerate() {
        let there = place(to, &volume.name);
        places.push((at, there.ok_or_else(|| format!("volume {:?} is missing", volume.name))?));
    }
    if let Some(new) = to.volumes.iter().find(|volume| place(from, &volume.name).is_none()) {
        return Err(format!("volume {:?} is not served", new.name));
    }
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
    for (volume, at) in from.volumes.iter().zip(places) {
        let of_volume = TABLE.iter().filter(|spec| spec.is_of_volume());
        of_volume.for_each(|spec| compare(spec, Some(&volume.name), at));
    }
    Ok(all)
}

/// The changes that give all these settings their second value.
///
/// # Errors
/// Names all of them that a running server cannot change.
pub fn changes(differences: &[Difference]) -> Result<Vec<Change>, String> {
    let fixed = differences.iter().filter(|one| !one.spec.online.is_possible());
    let fixed: Vec<_> = fixed.map(Difference::name).collect();
    if !fixed.is_empty() {
        return Err(format!("{} cannot be changed while serving", fixed.join(", ")));
    }
    let change = |one: &Difference| Change {
        spec: one.spec,
        volume: one.volume.clone(),
        value: one.to.clone().map_or(NewValue::Unset, NewValue::Is),
    };
    Ok(differences.iter().map(change).collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(cache: &str, volumes: &[(&str, &str)]) -> Config {
        let head = format!("[cache]\npath = \"/c\"\n{cache}\n[server]\nnbd = [\"unix:/s\"]\n");
        let volume = |(name, more): &(&str, &str)| {
            format!("[[volume]]\nname = {name:?}\nprimary = \"/p/{name}\"\n{more}\n")
        };
        let text = head + &volumes.iter().map(volume).collect::<String>();
        Config::parse(Path::new("a file"), &text).expect("it is valid")
    }

    #[test]
    fn what_differs_is_named_with_both_values() {
        let now = config("dirty_limit = \"30%\"", &[("a", ""), ("b", "dirty_limit = \"10%\"")]);
        let new = config("", &[("b", ""), ("a", "mode = \"write-around\"")]);
        let all = differences(&now, &new).expect("they have the same volumes");
        let texts: Vec<_> = all
            .iter()
            .map(|one| (one.name(), one.from.as_deref().unwrap_or("-"), one.to.as_deref()))
            .collect();
        assert_eq!(
            texts,
            [
                ("cache.dirty_limit".to_owned(), "30%", Some("50%")),
                ("volume \"a\": mode".to_owned(), "write-back", Some("write-around")),
                ("volume \"b\": dirty_limit".to_owned(), "10%", None),
            ]
        );
        let values: Vec<_> =
            changes(&all).expect("all are possible").into_iter().map(|one| one.value).collect();
        let is = |text: &str| NewValue::Is(text.to_owned());
        assert_eq!(values, [is("50%"), is("write-around"), NewValue::Unset]);
        assert!(differences(&new, &new).expect("they have the same volumes").is_empty());
    }

    #[test]
    fn one_setting_that_needs_a_restart_refuses_all() {
        let now = config("", &[("a", "")]);
        let new = config("log_share = \"20%\"\ndirty_limit = \"30%\"", &[("a", "")]);
        let all = differences(&now, &new).expect("they have the same volumes");
        let error = changes(&all).expect_err("the log share is fixed");
        assert!(error.contains("cache.log_share") && !error.contains("dirty_limit"), "{error}");
    }

    #[test]
    fn volumes_that_come_or_go_are_named() {
        let (one, two) = (config("", &[("a", "")]), config("", &[("a", ""), ("b", "")]));
        assert!(differences(&one, &two).expect_err("b is new").contains("\"b\" is not served"));
        assert!(differences(&two, &one).expect_err("b is gone").contains("\"b\" is missing"));
    }
}
