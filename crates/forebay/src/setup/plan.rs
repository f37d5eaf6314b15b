//! What setup writes: the configuration, the settings of the units; and what it says about it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Context;
use forebay_control::units::Size;

use crate::host::Host;

use super::answers::Answers;
use super::{CONFIG, SetupArgs};

/// The mount of the server, where the kernel has no ublk.
const FUSE: &str = "/mnt/forebay";
/// The settings that a server with a mount needs.
const FUSE_SETTINGS: &str = include_str!("../../../../contrib/forebay-fuse.conf");
/// The group for local clients.
const GROUP: &str = "forebay";
const UBLK: &str = "/dev/ublk-control";

/// What to write and to start.
pub struct Plan {
    /// The text of the configuration.
    pub configuration: String,
    /// Settings of units: the unit, the file's name, its text.
    pub drop_ins: Vec<(String, &'static str, String)>,
    /// The unit that makes the disk.
    pub attach: Option<String>,
    /// Directories to make.
    pub mount: Option<PathBuf>,
    pub fuse: Option<PathBuf>,
}

impl Plan {
    /// Decides.
    pub fn new(answers: &Answers, host: &Host) -> anyhow::Result<Self> {
        let fuse = (!host.has(UBLK)).then(|| PathBuf::from(FUSE));
        let mut drop_ins = Vec::new();
        if fuse.is_some() {
            drop_ins.push(("forebay.service".to_owned(), "fuse.conf", FUSE_SETTINGS.to_owned()));
        } else if let Some(text) = writable_files(answers) {
            drop_ins.push(("forebay.service".to_owned(), "files.conf", text));
        }
        let attach =
            answers.mount.as_ref().map(|_| format!("forebay-attach@{}.service", answers.name));
        if let Some((unit, place)) = attach.as_ref().zip(answers.mount.as_ref()) {
            drop_ins.push((unit.clone(), "mount.conf", mounting(place)?));
        }
        let configuration = configuration(answers, fuse.as_deref(), host.has_group(GROUP));
        Ok(Self { configuration, drop_ins, attach, mount: answers.mount.clone(), fuse })
    }

    /// The files with settings of units, and their texts. Without a start, a configuration that is
    /// not the service's leaves its units alone.
    pub fn unit_files(&self, args: &SetupArgs) -> Vec<(PathBuf, &str)> {
        if args.no_start && args.config != Path::new(CONFIG) {
            return Vec::new();
        }
        let path = |unit: &str, file: &str| args.units.join(format!("{unit}.d")).join(file);
        let all = self.drop_ins.iter();
        all.map(|(unit, file, text)| (path(unit, file), text.as_str())).collect()
    }

    /// What will be done, for people.
    pub fn summary(&self, answers: &Answers, args: &SetupArgs) -> String {
        let content = answers.content.unwrap_or("nothing that is known here");
        let depth = answers
            .depth
            .map_or("not at all (write-through)".to_owned(), |depth| format!("at most {depth}"));
        let size = answers.cache_size.map(|size| format!(", {size} of it")).unwrap_or_default();
        let mount = answers.mount.as_deref().map_or("nowhere".into(), Path::to_string_lossy);
        let way = if self.fuse.is_some() { "FUSE" } else { "ublk" };
        let units = self.unit_files(args).into_iter();
        let units = units.map(|(path, _)| format!("settings of a unit: {}\n", path.display()));
        let units: String = units.collect();
        format!(
            "volume {}: {} ({content}); it stays as it is\n\
             cache: {}{size}\n\
             memory: {}; writes wait {depth}\n\
             mounted: {mount}; disks by {way}\n\
             configuration: {}\n{units}",
            answers.name,
            answers.primary,
            answers.cache.display(),
            answers.ram,
            args.config.display()
        )
    }

    /// The commands that start it by hand.
    pub fn commands(&self, config: &Path, systemd: bool) -> String {
        let attach = self.attach.as_deref().unwrap_or_default();
        if systemd {
            return format!("systemctl daemon-reload\nsystemctl enable --now forebay {attach}\n")
                .replace(" \n", "\n");
        }
        let mut out = format!("forebay serve --config {} &\n", config.display());
        if let Some((unit, place)) = self.attach.as_ref().zip(self.mount.as_ref()) {
            let name = unit.trim_start_matches("forebay-attach@").trim_end_matches(".service");
            out += &format!("forebay attach {name} --mount {}\n", place.display());
        }
        out
    }

    /// What to do next, for people.
    pub fn next_steps(&self, answers: &Answers) -> String {
        let name = &answers.name;
        let disk = match &answers.mount {
            Some(place) => format!("{} is on it\n", place.display()),
            None => format!("forebay attach {name}   makes it a disk of this host\n"),
        };
        disk + "forebay doctor     checks this host\nforebay help       has more\n"
    }
}

/// The text of the configuration.
fn configuration(answers: &Answers, fuse: Option<&Path>, has_group: bool) -> String {
    // Every text goes through the TOML writer, so that no name can break the file.
    let quoted = |text: &str| toml_text(text);
    let mut out = "# Written by `forebay setup`. forebay.toml(5) has every key; after a change:\n\
                   # systemctl reload forebay\n[cache]\n"
        .to_owned();
    out += &format!("path = {}\n", quoted(&answers.cache.to_string_lossy()));
    if let Some(size) = answers.cache_size {
        out += &format!("size = {}\n", quoted(&exact(size)));
    }
    if let Some(depth) = answers.depth {
        out += &format!("write_cache_depth = {}\n", quoted(&depth.to_string()));
    }
    out += &format!("\n[memory]\nram = {}\n\n[server]\n", quoted(&exact(answers.ram)));
    let group = if has_group { format!(",mode=0660,group={GROUP}") } else { String::new() };
    out += &format!("nbd = [{}]\n", quoted(&format!("unix:/run/forebay/nbd.sock{group}")));
    if let Some(fuse) = fuse {
        out += &format!("fuse = {}\n", quoted(&fuse.to_string_lossy()));
    }
    if has_group {
        out += &format!(
            "\n[control]\n# Members of the group may read the status; only root changes anything.\n\
             mode = \"0660\"\ngroup = \"{GROUP}\"\n"
        );
    }
    out += &format!("\n[[volume]]\nname = {}\n", quoted(&answers.name));
    out += &format!("primary = {}\n", quoted(&answers.primary));
    if answers.depth.is_none() {
        out += "mode = \"write-through\"\n";
    }
    out
}

/// A text as TOML writes it.
fn toml_text(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A size that is read back as the same.
fn exact(Size(bytes): Size) -> String {
    let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let fitting = units.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit));
    fitting.map_or_else(|| bytes.to_string(), |(name, unit)| format!("{}{name}", bytes / unit))
}

/// The settings that let the server write files outside of its own directories.
fn writable_files(answers: &Answers) -> Option<String> {
    let files = [answers.primary_path.as_deref(), Some(answers.cache.as_path())];
    let outside = files.into_iter().flatten().filter(|path| !path.starts_with("/dev"));
    let places: BTreeSet<&Path> = outside.filter_map(Path::parent).collect();
    if places.is_empty() {
        return None;
    }
    let mut out = "# Written by `forebay setup`: directories of primaries and caches.\n[Service]\n"
        .to_owned();
    for place in places {
        out += &format!("ReadWritePaths={}\n", escaped(place));
    }
    Some(out)
}

/// The settings of the unit that mounts the disk.
fn mounting(place: &Path) -> anyhow::Result<String> {
    let program = std::env::current_exe().context("the path of this program")?;
    let program = program.display();
    Ok(format!(
        "# Written by `forebay setup`.\n[Service]\nExecStart=\n\
         ExecStart={program} attach %i --mount {}\n",
        escaped(place)
    ))
}

/// A path as systemd reads it in a command or a list.
fn escaped(path: &Path) -> String {
    let text = path.to_string_lossy().replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", text.replace('%', "%%"))
}

#[cfg(test)]
mod tests {
    use forebay_control::config::Config;
    use forebay_control::units::Time;
    use std::time::Duration;

    use super::*;

    fn answers() -> Answers {
        Answers {
            primary: "/srv/odd \"name\".img".to_owned(),
            primary_path: Some(PathBuf::from("/srv/odd \"name\".img")),
            content: Some("an XFS file system"),
            name: "db".to_owned(),
            cache: PathBuf::from("/dev/disk/by-id/nvme-1"),
            cache_size: Some(Size(100_000_000_000)),
            overwrite: false,
            ram: Size(3 << 28),
            depth: Some(Time(Duration::from_secs(90))),
            mount: Some(PathBuf::from("/srv/db")),
        }
    }

    #[test]
    fn the_configuration_is_read_back_as_it_was_meant() {
        for (fuse, group) in [(None, true), (Some(Path::new(FUSE)), false)] {
            let text = configuration(&answers(), fuse, group);
            let config = Config::parse(Path::new("test"), &text);
            let config = config.unwrap_or_else(|error| panic!("{error}: {text}"));
            let Answers { primary, cache, cache_size, ram, depth, .. } = answers();
            assert_eq!(config.volumes[0].primary, primary);
            assert_eq!((config.cache.path, config.cache.size), (cache, cache_size));
            assert_eq!((config.memory.ram, Some(config.cache.write_cache_depth)), (ram, depth));
            assert_eq!(config.server.fuse.as_deref(), fuse);
            assert_eq!(config.control.group.is_some(), group);
        }
        let through = Answers { depth: None, ..answers() };
        assert!(configuration(&through, None, false).contains("mode = \"write-through\""));
    }

    #[test]
    fn files_outside_of_dev_may_be_written() {
        let text = writable_files(&answers()).expect("the primary is a file");
        assert!(text.ends_with("ReadWritePaths=\"/srv\"\n"), "{text}");
        let devices = Answers { primary_path: Some(PathBuf::from("/dev/sdb")), ..answers() };
        assert_eq!(writable_files(&devices), None);
    }
}
