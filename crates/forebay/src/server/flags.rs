//! The flags of `forebay serve` that configure one volume. Each is generated from its line in the
//! table of settings; only `--cache`, which holds two settings, and the rules between flags are
//! defined here.

use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgGroup, ArgMatches, Args, Command, FromArgMatches};
use forebay_block::NAME_BYTES_MAX;
use forebay_control::config::{Config, TlsPolicy};
use forebay_control::settings::{Flag, Initial, Kind, Spec, TABLE};
use forebay_control::units::Size;

/// The group of these flags, all of which conflict with `--config`.
pub const GROUP: &str = "flags";

/// The settings given by flags.
#[derive(Clone, Debug, Default)]
pub struct ServeFlags {
    cache: CacheFlag,
    given: Vec<(&'static Spec, String)>,
}

/// `PATH[,size=SIZE]`.
#[derive(Clone, PartialEq, Debug, Default)]
struct CacheFlag {
    path: PathBuf,
    size: Option<Size>,
}

impl FromStr for CacheFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let path = PathBuf::from(parts.next().unwrap_or_default());
        let mut size = None;
        for part in parts {
            let value = part.strip_prefix("size=").ok_or_else(|| {
                format!("unknown option {part:?}; after the path only size=SIZE is known")
            })?;
            let key = setting("cache", "size");
            key.check(value)?;
            let before = size.replace(value.parse::<Size>().map_err(|error| error.to_string())?);
            if before.is_some() {
                return Err("size is given twice; use one of them".to_owned());
            }
        }
        Ok(Self { path, size })
    }
}

impl Args for ServeFlags {
    fn augment_args(command: Command) -> Command {
        let cache = Arg::new("cache")
            .long("cache")
            .value_name("PATH[,size=SIZE]")
            .value_parser(CacheFlag::from_str)
            .required_unless_present("config")
            .help("The cache device: a block device or a file, and how much of it to use");
        let own = TABLE.iter().filter_map(|spec| Some(related(flag(spec, spec.flag_name()?))));
        let all: Vec<Arg> = [cache].into_iter().chain(own).collect();
        let names: Vec<_> = all.iter().map(|arg| arg.get_id().clone()).collect();
        let group = ArgGroup::new(GROUP).args(names).multiple(true);
        command.args(all).group(group)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ServeFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let cache = matches.get_one::<CacheFlag>("cache").cloned().unwrap_or_default();
        let mut given = Vec::new();
        for spec in TABLE {
            let Some(name) = spec.flag_name() else { continue };
            if matches!(spec.kind, Kind::Bool) {
                let on = !matches!(spec.flag, Flag::Off(..));
                given.extend(matches.get_flag(&name).then(|| (spec, on.to_string())));
            } else {
                let texts = matches.get_many::<String>(&name).into_iter().flatten();
                given.extend(texts.map(|text| (spec, text.clone())));
            }
        }
        Ok(Self { cache, given })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The flag of a setting.
fn flag(spec: &'static Spec, name: String) -> Arg {
    let arg = Arg::new(name.clone()).long(name).help(help(spec));
    let Some(placeholder) = spec.kind.placeholder(spec.key) else {
        return arg.action(ArgAction::SetTrue);
    };
    let arg = arg.value_name(placeholder);
    match spec.kind {
        Kind::Choice(names) => arg.value_parser(PossibleValuesParser::new(names())),
        Kind::List(_) => arg.action(ArgAction::Append).value_parser(checked(spec)),
        _ => arg.value_parser(checked(spec)),
    }
}

/// Checks that a text is a value of the setting.
fn checked(spec: &'static Spec) -> impl Fn(&str) -> Result<String, String> + Clone {
    |text| spec.check(text).map(|()| text.to_owned())
}

/// The help of a flag: the setting's own, with its default and range.
fn help(spec: &Spec) -> String {
    if let Flag::Off(_, help) = spec.flag {
        return help.to_owned();
    }
    let mut help = spec.help.to_owned();
    match spec.default {
        Initial::Value(text) if !matches!(spec.kind, Kind::Bool) => {
            help += &format!(" [default: {text}]");
        }
        Initial::Unset(said) if !said.is_empty() => help += &format!(" [default: {said}]"),
        _ => (),
    }
    if let Some(range) = spec.kind.range() {
        help += &format!(" [range: {range}]");
    }
    help
}

/// Adds to a flag the flags that it requires or that can replace it.
fn related(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "primary" => arg.required_unless_present("config").display_order(0),
        "nbd" => arg.required_unless_present_any(["config", "fuse"]),
        "fuse-transport" => arg.requires("fuse"),
        "tls-cert" => arg.requires("tls-key"),
        "tls-key" | "tls-ca" => arg.requires("tls-cert"),
        _ => arg,
    }
}

/// The setting with that section and key.
fn setting(section: &str, key: &str) -> &'static Spec {
    let found = TABLE.iter().find(|spec| spec.section.name() == section && spec.key == key);
    found.expect("the table has this setting")
}

impl ServeFlags {
    /// The configuration given by the flags.
    pub fn config(&self) -> Result<Config, String> {
        let mut config = Config::defaults(1);
        config.cache.path.clone_from(&self.cache.path);
        config.cache.size = self.cache.size;
        for (spec, text) in &self.given {
            spec.set(&mut config, 0, text)?;
        }
        if !self.has("name") {
            config.volumes[0].name = name_of(&config.volumes[0].primary);
        }
        if self.has("tls_cert") && !self.has("tls") {
            config.server.tls = TlsPolicy::Required;
        }
        Ok(config)
    }

    fn has(&self, key: &str) -> bool {
        self.given.iter().any(|(spec, _)| spec.key == key)
    }
}

/// The path and size in the value of `--cache`.
///
/// # Errors
/// When it is no such value.
pub fn cache(text: &str) -> Result<(PathBuf, Option<Size>), String> {
    let CacheFlag { path, size } = text.parse()?;
    Ok((path, size))
}

/// The default name of a volume: the last part of its primary's path, with invalid characters
/// replaced.
pub fn name_of(primary: &str) -> String {
    let place = primary.split('?').next().unwrap_or(primary);
    let last = place.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or(place);
    let stem = last.strip_suffix(".img").or(last.strip_suffix(".raw")).unwrap_or(last);
    let known = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = stem.chars().take(NAME_BYTES_MAX).map(known).collect();
    if name.is_empty() { "volume".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};
    use forebay_control::units::{Share, Time};
    use forebay_engine::{Eviction, Mode};

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::server::kept::Kept;

    fn config_of(arguments: &[&str]) -> Result<Config, String> {
        let parsed = Cli::try_parse_from([&["forebay", "serve"], arguments].concat());
        match parsed.map_err(|error| error.to_string())?.command {
            Command::Serve(mut args) => {
                let config = args.config(&mut Kept::default());
                config.map(|(config, _)| config).map_err(|error| error.to_string())
            }
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn few_flags_are_enough() {
        let config = config_of(&["--primary", "/tmp/a b.img", "--cache", "c", "--nbd", "unix:s"]);
        let config = config.expect("it is in order");
        let mut defaults = Config::defaults(1).cache;
        defaults.path = PathBuf::from("c");
        assert_eq!(config.cache, defaults);
        assert_eq!(config.volumes[0].name, "a-b");
        assert_eq!(config.volumes[0].mode, Mode::WriteBack);
        assert_eq!(config.server.tls, TlsPolicy::Off);
    }

    #[test]
    fn flags_reach_the_configuration() {
        let config = config_of(&[
            "--primary=nbd://san:10809/disk?emulate=hdd",
            "--cache=/dev/x,size=1GiB",
            "--nbd=unix:/run/s",
            "--nbd=tcp:0.0.0.0:10809",
            "--mode=write-through",
            "--ram=1GiB",
            "--shards=3",
            "--sequential-threshold=0",
            "--write-cache-depth=5s",
            "--dirty-limit=20%",
            "--eviction=fifo",
            "--no-compression",
            "--state=/tmp/state",
            "--control=/tmp/control",
            "--max-clients=7",
            "--idle-timeout=1h",
            "--client-memory=64MiB",
            "--client-stall-timeout=5s",
            "--tls-cert=c",
            "--tls-key=k",
        ]);
        let config = config.expect("it is in order");
        assert_eq!(config.cache.size, Some(Size(1 << 30)));
        assert_eq!(config.cache.dirty_limit, Share(forebay_engine::Part::Percent(20)));
        assert_eq!(config.cache.eviction, Eviction::Fifo);
        assert!(!config.cache.compress);
        assert_eq!(config.cache.state_dir, PathBuf::from("/tmp/state"));
        assert_eq!(config.control.socket, Some(PathBuf::from("/tmp/control")));
        assert_eq!((config.server.shards, config.server.max_clients), (Some(3), 7));
        let seconds = |count| Time(std::time::Duration::from_secs(count));
        assert_eq!(config.server.client_memory, Size(64 << 20));
        assert_eq!(config.server.client_stall_timeout, seconds(5));
        assert_eq!(config.server.idle_timeout, seconds(3600));
        assert_eq!(config.server.tls, TlsPolicy::Required);
        let volume = &config.volumes[0];
        assert_eq!((volume.name.as_str(), volume.mode), ("disk", Mode::WriteThrough));
        assert_eq!(volume.sequential_threshold, Size(0));
    }

    #[test]
    fn flags_that_do_not_go_together_are_refused() {
        let base = ["--primary=p", "--cache=c", "--nbd=unix:s"];
        let refused: [(&[&str], &str); 8] = [
            (&["--config=f"], "cannot be used with"),
            (&["--tls-cert=c"], "--tls-key"),
            (&["--tls=required"], "no endpoint uses it"),
            (&["--tls=required", "--nbd=tcp:h:1"], "needs a certificate"),
            (&["--mode=writeback"], "write-back"),
            (&["--ram=lots"], "a size"),
            (&["--shards=0"], "1 to 64"),
            (&["--dirty-limit=100%"], "90%"),
        ];
        for (more, word) in refused {
            let message = config_of(&[&base, more].concat()).expect_err(word);
            assert!(message.contains(word), "{more:?}: {message}");
        }
        assert!(config_of(&["--primary=p"]).expect_err("no cache").contains("--cache"));
        let message = config_of(&["--primary=p", "--cache=c,sise=1", "--nbd=unix:s"]);
        assert!(message.expect_err("no such option").contains("size=SIZE"));
        let message = config_of(&["--primary=p", "--cache=c,size=1GiB,size=2GiB", "--nbd=unix:s"]);
        assert!(message.expect_err("two sizes").contains("size is given twice"));
    }

    #[test]
    fn names_come_from_primaries() {
        for (primary, name) in [
            ("/dev/mapper/vg-data", "vg-data"),
            ("file:disk.img?emulate=san", "disk"),
            ("nbd+unix:///vm1?socket=/run/x.sock", "vm1"),
            ("nbd://host:10809", "10809"),
            ("/", "volume"),
        ] {
            assert_eq!(name_of(primary), name, "{primary}");
        }
    }

    /// A value gives the same configuration as a flag and in the file: tested with the default of
    /// each setting, and with the last of its names.
    #[test]
    fn flags_and_file_agree_on_every_setting() {
        let base = ["--primary=p", "--cache=c", "--nbd=unix:s"];
        let mut count = 0;
        for spec in TABLE {
            let (Some(flag), Initial::Value(default)) = (spec.flag_name(), spec.default) else {
                continue;
            };
            let (more, values) = match (spec.flag, &spec.kind) {
                (Flag::Off(..), _) => (vec![format!("--{flag}")], vec!["false"]),
                (_, Kind::Bool) => (vec![format!("--{flag}")], vec!["true"]),
                (_, kind) => {
                    (Vec::new(), [default].into_iter().chain(kind.names().pop()).collect())
                }
            };
            for value in values {
                let pair = [format!("--{flag}={value}")];
                let more = if more.is_empty() { &pair[..] } else { &more[..] };
                let needs = if flag == "fuse-transport" { &["--fuse=/f"][..] } else { &[] };
                let arguments = more.iter().map(String::as_str).chain(needs.iter().copied());
                let arguments: Vec<&str> = base.into_iter().chain(arguments).collect();
                let by_flag = config_of(&arguments);
                let quoted = if matches!(spec.kind, Kind::Bool | Kind::Number(_)) {
                    value.to_owned()
                } else {
                    format!("\"{value}\"")
                };
                let by_file = config_in_file(spec, &quoted, !needs.is_empty());
                assert_eq!(by_flag, by_file, "{flag}={value}");
                count += 1;
            }
        }
        assert!(count > 15, "{count}");
    }

    /// A file with the minimum that a server needs, and this setting.
    fn config_in_file(spec: &Spec, value: &str, fuse: bool) -> Result<Config, String> {
        let fuse = if fuse { "fuse = \"/f\"\n" } else { "" };
        let section = |name: &str, keys: &str| {
            let own = spec.section.name() == name.trim_matches(['[', ']']);
            let line = if own { format!("{} = {value}\n", spec.key) } else { String::new() };
            format!("{name}\n{keys}{line}")
        };
        let text = [
            section("[cache]", "path = \"c\"\n"),
            section("[memory]", ""),
            section("[server]", &format!("nbd = [\"unix:s\"]\n{fuse}")),
            section("[[volume]]", "name = \"p\"\nprimary = \"p\"\n"),
        ];
        Config::parse(std::path::Path::new("f.toml"), &text.concat())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_help_has_every_flag_with_its_default_and_its_values() {
        let command = Cli::command();
        let serve = command.find_subcommand("serve").expect("it is a command");
        for spec in TABLE {
            let Some(name) = spec.flag_name() else { continue };
            let arg = serve.get_arguments().find(|arg| arg.get_long() == Some(name.as_str()));
            let arg = arg.unwrap_or_else(|| panic!("--{name} is missing"));
            let help = arg.get_help().expect("it has help").to_string();
            match spec.default {
                Initial::Value(text) if !matches!(spec.kind, Kind::Bool) => {
                    assert!(help.contains(&format!("[default: {text}]")), "--{name}: {help}");
                }
                _ => (),
            }
            let offered = arg.get_possible_values();
            let offered: Vec<&str> = offered.iter().map(|value| value.get_name()).collect();
            if let Kind::Choice(names) = spec.kind {
                assert_eq!(offered, names(), "--{name}");
            }
        }
    }
}
