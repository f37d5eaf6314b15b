//! The table of settings: every entry can be parsed, is checked, and is in the reference.

mod support;

use std::fmt::Write as _;
use std::path::Path;

use forebay_control::config::Config;
use forebay_control::settings::{
    Change, Flag, Initial, Kind, NewValue, Online, Section, Spec, TABLE,
};

/// A configuration file with the minimum that a server needs, and `line` added to `section`.
fn file_with(section: Section, line: &str) -> String {
    let own = |this: Section| if this == section { line } else { "" };
    let required = |this: Section, key: &str, value: &str| {
        let given = section == this && line.starts_with(&format!("{key} ="));
        if given { String::new() } else { format!("{key} = {value}\n") }
    };
    format!(
        "[cache]\n{}{}\n[memory]\n{}\n[control]\n{}\n[web]\n{}\n[events]\n{}\n\
         [server]\n{}{}\n[[volume]]\n{}{}{}\n",
        required(Section::Cache, "path", "\"c\""),
        own(Section::Cache),
        own(Section::Memory),
        own(Section::Control),
        own(Section::Web),
        own(Section::Events),
        required(Section::Server, "nbd", "[\"unix:s\"]"),
        own(Section::Server),
        required(Section::Volume, "name", "\"v\""),
        required(Section::Volume, "primary", "\"p\""),
        own(Section::Volume),
    )
}

fn parse(section: Section, line: &str) -> Result<Config, String> {
    let config = Config::parse(Path::new("f.toml"), &file_with(section, line));
    config.map_err(|error| error.to_string())
}

/// A value as written in the file.
fn in_file(spec: &Spec, text: &str) -> String {
    match spec.kind {
        Kind::Bool | Kind::Number(_) => format!("{} = {text}", spec.key),
        Kind::List(_) => format!("{} = [{text:?}]", spec.key),
        _ => format!("{} = {text:?}", spec.key),
    }
}

#[test]
fn every_default_is_what_a_file_without_the_setting_has() {
    let least = parse(Section::Cache, "").expect("it is in order");
    for spec in TABLE {
        let now = spec.text(&least, 0);
        match spec.default {
            Initial::Value(text) => {
                assert_eq!(now.as_deref(), Some(text), "{}", spec.key);
                let given = parse(spec.section, &in_file(spec, text)).expect(spec.key);
                assert_eq!(given, least, "{}", spec.key);
            }
            Initial::Unset(_) if spec.key != "nbd" => assert_eq!(now, None, "{}", spec.key),
            _ => (),
        }
    }
}

#[test]
fn the_table_is_sound() {
    for (at, spec) in TABLE.iter().enumerate() {
        let same = |other: &&Spec| other.key == spec.key && other.section == spec.section;
        assert_eq!(TABLE.iter().filter(same).count(), 1, "{} is there once", spec.key);
        let flag = spec.flag_name();
        let taken = TABLE[..at].iter().any(|other| flag.is_some() && other.flag_name() == flag);
        assert!(!taken, "the flag of {}", spec.key);
        let of_volume = match spec.online {
            Online::Restart | Online::HandOver | Online::NewCache => continue,
            Online::Cache(_) | Online::Clients | Online::Rules => false,
            Online::Volume(_) | Online::Streams | Online::Pins => true,
        };
        assert_eq!(of_volume, spec.is_of_volume(), "{}", spec.key);
        // It is saved as a word for later starts, an empty one if there is no value.
        let is_word = match spec.default {
            Initial::Value(text) => !text.contains(' '),
            Initial::Unset(_) => spec.restore(&mut Config::defaults(1), 0, None).is_ok(),
            Initial::Required => false,
        };
        assert!(is_word, "{}", spec.key);
    }
}

/// Each value is rejected by a message with the value itself and the valid ones.
#[test]
fn a_bad_value_is_named_with_the_range() {
    let mut count = 0;
    for spec in TABLE {
        let (bad, said) = match spec.kind {
            Kind::Choice(names) => ("nonsense", names().join(", ")),
            Kind::Bool => ("2", "boolean".to_owned()),
            Kind::Percent(_) | Kind::Share(_) => ("101%", "0 to 100".to_owned()),
            Kind::Number(_) => ("65535", spec.kind.range().expect("it has a range")),
            Kind::Time(_) => ("soon", "a time".to_owned()),
            Kind::Size(_) => ("lots", "a size".to_owned()),
            Kind::Text(_) | Kind::List(_) => continue,
        };
        let message = parse(spec.section, &in_file(spec, bad)).expect_err(spec.key);
        let key = format!("{}.{}: ", spec.section.name(), spec.key);
        for word in [key.as_str(), bad, &said, "line "] {
            assert!(message.contains(word), "{}: no {word:?} in {message}", spec.key);
        }
        count += 1;
    }
    assert!(count > 15, "{count}");
    for (key, section, bad) in [
        ("dirty_limit", Section::Cache, "95%"),
        ("dirty_limit", Section::Volume, "0%"),
        ("sequential_threshold", Section::Volume, "512"),
        ("stripe_size", Section::Volume, "192KiB"),
        ("stripe_size", Section::Volume, "4KiB"),
        ("client_memory", Section::Server, "1MiB"),
        ("idle_timeout", Section::Server, "1ms"),
        ("write_cache_depth", Section::Cache, "0s"),
    ] {
        let spec = Spec::find(section, key).expect("it is in the table");
        let message = parse(section, &in_file(spec, bad)).expect_err(key);
        let range = spec.kind.range().expect("it has a range");
        assert!(message.contains(&format!("{bad} is out of range; use {range}")), "{message}");
    }
}

#[test]
fn changes_are_understood_or_refused_with_the_settings_that_can_be_changed() {
    for spec in Spec::online() {
        let value = match (spec.default, spec.kind) {
            (Initial::Value(default), _) => default,
            (_, Kind::Time(_)) => "7s",
            (_, Kind::Size(_)) => "64KiB",
            (_, Kind::List("RULE")) => "bypass user=7; cache",
            (_, Kind::List(_)) => "0..1GiB; a=1GiB..2GiB",
            _ => "7%",
        };
        // A volume's own setting hides one of the cache with the same name.
        let whose: &[Option<&str>] = match Spec::find(Section::Volume, spec.key) {
            Some(own) if own.section == spec.section => &[Some("db")],
            Some(_) => &[None],
            None => &[Some("db"), None],
        };
        for &volume in whose {
            for text in [value, "default"] {
                let change = Change::parse(volume, spec.key, text).expect(text);
                assert_eq!(change.spec.section, spec.section, "{}", spec.key);
                assert_eq!(change.volume.is_some(), spec.is_of_volume(), "{}", spec.key);
                let value = match text {
                    "default" => NewValue::Configured,
                    _ => NewValue::Is(text.to_owned()),
                };
                assert_eq!(change.value, value);
            }
        }
        let only_of_volume = Spec::changeable(false).all(|other| other.key != spec.key);
        assert_eq!(Change::parse(None, spec.key, value).is_err(), only_of_volume);
    }
    let known = "mode, sequential_threshold, cache_guarantee, cache_limit, dirty_guarantee, \
                 dirty_limit, latency_target, destage_rate, stripe_size, pinned, eviction, \
                 dirty_target, \
                 idle_destage, fill_rate, wear_budget, write_cache_depth, content, rules, \
                 client_stall_timeout, idle_timeout, patience";
    let refused = |volume, key, text| Change::parse(volume, key, text).expect_err(key);
    assert_eq!(
        refused(Some("db"), "depth", "3"),
        format!("unknown setting \"depth\"; use one of: {known}")
    );
    assert_eq!(refused(None, "mode", "default"), "mode is a setting of a volume; name the volume");
    assert_eq!(
        refused(None, "ram", "1GiB"),
        format!(
            "ram cannot be set while serving, only {known}; change the configuration, and apply it \
             (forebay apply FILE)"
        )
    );
    let by_hand_over = ["read_only", "ordered", "name"].map(|key| (Some("db"), key));
    for (volume, key) in by_hand_over.into_iter().chain([(None, "size")]) {
        assert!(refused(volume, key, "x").ends_with("and apply it (forebay apply FILE)"), "{key}");
    }
    assert!(refused(None, "state_dir", "/s").ends_with("change the configuration, and restart"));
    assert_eq!(
        refused(None, "eviction", "mru"),
        "eviction: unknown eviction policy \"mru\"; use one of: fifo, lru, frequency"
    );
}

/// The table of a section in the reference.
fn table(section: Section) -> String {
    let mut out =
        "| key | default | values | changed | meaning |\n|---|---|---|---|---|\n".to_owned();
    for spec in section.settings() {
        let key = match spec.flag {
            Flag::Key => format!("`{}`", spec.key),
            Flag::None => format!("`{}` (file only)", spec.key),
            Flag::Named(name) | Flag::Off(name, _) => format!("`{}` (`--{name}`)", spec.key),
            Flag::Part(flag) => format!("`{}` (`{flag}`)", spec.key),
        };
        let default = match spec.default {
            Initial::Value(text) => format!("`{text}`"),
            Initial::Unset("") => "none".to_owned(),
            Initial::Unset(said) => said.to_owned(),
            Initial::Required => "required".to_owned(),
        };
        let values = match spec.kind {
            Kind::Bool => "`true`, `false`".to_owned(),
            Kind::Choice(names) => {
                let names: Vec<String> = names().iter().map(|name| format!("`{name}`")).collect();
                names.join(", ")
            }
            kind => kind.range().unwrap_or_default(),
        };
        let online = spec.online.word();
        let more = if spec.more.is_empty() { "" } else { " " };
        let meaning = format!("{}.{more}{}", spec.help, spec.more);
        writeln!(out, "| {key} | {default} | {values} | {online} | {meaning} |")
            .expect("a text takes every line");
    }
    out
}

#[test]
fn the_reference_has_the_table() {
    let tables = Section::NAMES.iter().map(|&(name, section)| (name, table(section)));
    support::compare("docs/user/configuration.md", "settings", tables);
}
