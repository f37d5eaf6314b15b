//! The rules for requests, as the configuration has them.

use forebay_block::VolumeId;
use forebay_policy::{RULES_MAX, RequestRule, RequestRules, SenderTest};

use super::list::{ListItem, TextList};
use super::{Config, ConfigError, invalid};
use crate::access::user_number;

/// Rules, in their order.
pub type RuleList = TextList<RequestRule>;

/// Longest name of a process that the kernel keeps, in bytes (proc(5), `comm`).
const PROCESS_BYTES_MAX: usize = 15;

impl ListItem for RequestRule {}

impl RuleList {
    /// The rules, ready for use; `volume` knows volumes by name.
    #[must_use]
    pub fn compiled(&self, volume: impl Fn(&str) -> Option<VolumeId>) -> RequestRules {
        RequestRules::new(&self.0, volume, |name| user_number(name).ok())
    }

    /// Checks that the users of rules are known on this host. One that is unknown matches nobody.
    ///
    /// # Errors
    /// Names the first that is unknown.
    pub fn check_users(&self) -> Result<(), String> {
        let mut tests = self.0.iter().flat_map(|rule| &rule.sender);
        tests.try_for_each(|test| match test {
            SenderTest::User(user) => user_number(&user.text).map(drop),
            _ => Ok(()),
        })
    }
}

impl Config {
    /// Checks that there are not too many rules, that their volumes exist, and that their names of
    /// processes are not too long to match any.
    ///
    /// # Errors
    /// Names the first rule that is wrong.
    pub fn check_rules(&self) -> Result<(), ConfigError> {
        let TextList(rules) = &self.cache.rules;
        if rules.len() > RULES_MAX {
            let what = format!("{} rules", rules.len());
            return Err(invalid("cache.rules", what, &format!("use {RULES_MAX} at most")));
        }
        for rule in rules {
            let known = |name: &String| self.volumes.iter().any(|volume| volume.name == *name);
            if rule.volume.as_ref().is_some_and(|name| !known(name)) {
                let names: Vec<_> = self.volumes.iter().map(|one| one.name.as_str()).collect();
                let hint = format!("use one of: {}", names.join(", "));
                let what = format!("no volume has the name in {:?}", rule.to_string());
                return Err(invalid("cache.rules", what, &hint));
            }
            let is_long = |test: &SenderTest| match test {
                SenderTest::Process(name) => {
                    name.strip_suffix('*').unwrap_or(name).len() > PROCESS_BYTES_MAX
                }
                _ => false,
            };
            if rule.sender.iter().any(is_long) {
                let what = format!("no process can have the name in {:?}", rule.to_string());
                let hint = format!(
                    "names have {PROCESS_BYTES_MAX} bytes at most: see /proc/PID/comm, or use \
                     executable="
                );
                return Err(invalid("cache.rules", what, &hint));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_several_rules() {
        let mut rules = RuleList::default();
        rules.add("bypass process=restic ;cache  volume=db;").expect("rules");
        rules.add("cache").expect("a rule");
        let text = rules.text().expect("there are some");
        assert_eq!(text, "bypass process=restic; cache volume=db; cache");
        let mut again = RuleList::default();
        again.add(&text).expect("its own text");
        assert_eq!(again, rules);
        assert!(rules.add("cache; bypass what").is_err());
        assert_eq!(RuleList::default().text(), None);
    }

    #[test]
    fn users_are_looked_up() {
        let rules = |text: &str| {
            let mut rules = RuleList::default();
            rules.add(text).map(|()| rules)
        };
        assert_eq!(rules("bypass user=root; cache user=12").expect("rules").check_users(), Ok(()));
        let error = rules("bypass user=no-such").expect("a rule").check_users();
        assert!(error.expect_err("unknown").contains("no-such"));
    }

    #[test]
    fn rules_name_volumes_that_exist() {
        let mut config = Config::defaults(1);
        config.volumes[0].name = "db".to_owned();
        config.cache.rules.add("cache volume=db").expect("a rule");
        assert!(config.check_rules().is_ok());
        config.cache.rules.add("cache volume=vm").expect("a rule");
        let error = config.check_rules().expect_err("there is no vm").to_string();
        assert!(error.contains("volume=vm") && error.contains("use one of: db"), "{error}");
        for (name, fits) in [
            ("fifteen-bytes-x", true),
            ("fifteen-bytes-x*", true),
            ("sixteen-bytes-xy", false),
            ("sixteen-bytes-xy*", false),
        ] {
            config.cache.rules = RuleList::default();
            config.cache.rules.add(&format!("bypass process={name}")).expect("a rule");
            let checked = config.check_rules().map_err(|error| error.to_string());
            assert_eq!(checked.is_ok(), fits, "{checked:?}");
            assert!(fits || checked.is_err_and(|error| error.contains("15 bytes at most")));
        }
        config.cache.rules = RuleList::default();
        (0..=RULES_MAX).for_each(|_| config.cache.rules.add("cache").expect("a rule"));
        assert!(config.check_rules().expect_err("too many").to_string().contains("65 rules"));
    }
}
