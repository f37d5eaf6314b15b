//! Checks of a configuration: its file, its devices, and who else uses them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use forebay_control::config::{Config, VolumeConfig};
use forebay_control::default_socket;
use rustix::process::geteuid;

use crate::host::devices::Device;

use super::{Facts, Finding, unwise, wrong};

/// Permission bits for others and for the group to write.
const OTHERS_WRITE: u32 = 0o022;
/// The flags of an open file that mean that it may be written.
const MAY_WRITE: u32 = 0o3;

/// Everything found; `path` is that of the configuration.
pub fn all(facts: &Facts<'_>, path: Option<&Path>) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(path.and_then(|path| writable("configuration", path)));
    let Some(config) = facts.config else { return found };
    found.extend(writable("state", &config.cache.state_dir));
    found.extend(socket(config));
    found.extend(cache(facts, config));
    for volume in &config.volumes {
        found.extend(primary(facts, volume));
    }
    found
}

/// A file or directory that decides over the server must be its user's or root's alone.
fn writable(check: &'static str, path: &Path) -> Option<Finding> {
    let found = fs::metadata(path).ok()?;
    let (mode, owner) = (found.permissions().mode() & 0o7777, found.uid());
    let shown = path.display();
    if owner != 0 && owner != geteuid().as_raw() {
        let what = format!("{shown} belongs to user {owner}, who can change it");
        return Some(wrong(check, what, format!("chown root: {shown}")));
    }
    (mode & OTHERS_WRITE != 0).then(|| {
        let what = format!("{shown} can be written by others (mode {mode:04o})");
        wrong(check, what, format!("chmod go-w {shown}"))
    })
}

fn socket(config: &Config) -> Option<Finding> {
    let path = config.control.socket.clone().unwrap_or_else(default_socket);
    let mode = fs::metadata(&path).ok()?.permissions().mode() & 0o777;
    (mode & 0o002 != 0).then(|| {
        let what = format!("every user may connect to {} (mode {mode:04o})", path.display());
        unwise("control", what, "[control] mode = \"0660\", group = \"forebay\"")
    })
}

fn cache(facts: &Facts<'_>, config: &Config) -> Vec<Finding> {
    let path = &config.cache.path;
    let mut found = Vec::new();
    let device = match Device::at(facts.host, path) {
        Ok(Some(device)) => device,
        Ok(None) => return found,
        Err(error) if config.cache.size.is_some() => {
            // A file that the first start makes.
            let missing = error.kind() == std::io::ErrorKind::NotFound;
            if missing && path.parent().is_none_or(Path::is_dir) {
                return found;
            }
            return vec![absent("cache", path, &error)];
        }
        Err(error) => return vec![absent("cache", path, &error)],
    };
    let shown = path.display();
    if device.is_rotational() {
        let what = format!("{shown} is a rotational disk: as a cache it is no faster");
        found.push(unwise("cache-device", what, "name an SSD as [cache] path"));
    }
    if config.cache.discard && !device.takes_discards() {
        let what = format!("{shown} takes no discards: the SSD does not learn what is free");
        found.push(unwise(
            "cache-device",
            what,
            "use part of it: [cache] size = 80% of the device",
        ));
    }
    found.extend(unstable(facts, "cache-device", &device, path));
    found
}

fn primary(facts: &Facts<'_>, volume: &VolumeConfig) -> Vec<Finding> {
    let Some(path) = path_of(&volume.primary) else { return Vec::new() };
    let name = &volume.name;
    let device = match Device::at(facts.host, &path) {
        Ok(device) => device,
        Err(error) => return vec![absent("primary", &path, &error)],
    };
    let mut found = Vec::new();
    let shown = path.display();
    if let Some(device) = device {
        for place in device.mounted(facts.host) {
            let place = place.display();
            let what = format!(
                "{shown}, the primary of {name}, is mounted at {place}: what is \
                                written there goes past the cache"
            );
            found.push(wrong("primary", what, format!("umount {place}")));
        }
        let holders = device.holders();
        if !holders.is_empty() {
            let what = format!("{shown}, the primary of {name}, is part of {}", holders.join(", "));
            found.push(wrong("primary", what, "name that device as the primary instead"));
        }
        for swap in device.swaps(facts.host) {
            let what = format!("{shown}, the primary of {name}, is used as swap: {swap}");
            found.push(wrong("primary", what, format!("swapoff {swap}")));
        }
        found.extend(unstable(facts, "primary", &device, &path));
    }
    found.extend(writers(facts, name, &path));
    found
}

/// The path of a local primary.
pub fn path_of(primary: &str) -> Option<PathBuf> {
    if primary.starts_with("nbd") && primary.contains("://") {
        return None;
    }
    let path = primary.strip_prefix("file:").unwrap_or(primary);
    Some(PathBuf::from(path.split_once('?').map_or(path, |(path, _)| path)))
}

fn absent(check: &'static str, path: &Path, error: &std::io::Error) -> Finding {
    wrong(check, format!("{}: {error}", path.display()), "connect it, or change the configuration")
}

/// A name that another disk may have after the next start of the host.
fn unstable(
    facts: &Facts<'_>,
    check: &'static str,
    device: &Device,
    path: &Path,
) -> Option<Finding> {
    let text = path.to_string_lossy();
    let changes = ["/dev/sd", "/dev/nvme", "/dev/vd"].iter().any(|start| text.starts_with(start));
    let stable = device.stable_name(facts.host).filter(|_| changes)?;
    let what = format!("{text} may be another disk after a restart; the server would refuse it");
    Some(unwise(check, what, format!("name it {}", stable.display())))
}

/// Processes that have the primary open for writing, other than Forebay's own.
fn writers(facts: &Facts<'_>, volume: &str, path: &Path) -> Option<Finding> {
    let wanted = fs::metadata(path).ok()?;
    let is_it = |found: &fs::Metadata| match wanted.rdev() {
        0 => (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()),
        number => found.rdev() == number,
    };
    let mut names = BTreeSet::new();
    for pid in facts.host.processes() {
        if is_forebay(facts, pid) {
            continue;
        }
        let name = facts.host.text(format!("/proc/{pid}/comm")).unwrap_or_default();
        for open in facts.host.names(format!("/proc/{pid}/fd")) {
            let link = facts.host.at(format!("/proc/{pid}/fd/{open}"));
            if fs::metadata(link).is_ok_and(|found| is_it(&found)) && writes(facts, pid, &open) {
                names.insert(format!("{name} (process {pid})"));
            }
        }
    }
    let shown: Vec<String> = names.into_iter().collect();
    (!shown.is_empty()).then(|| {
        let what = format!(
            "{}, the primary of {volume}, is open for writing by {}: what is written there goes \
             past the cache",
            path.display(),
            shown.join(", ")
        );
        wrong("primary", what, "stop it, or let it use the volume")
    })
}

/// Whether it is a process of Forebay: of the server, or with a program of that name.
fn is_forebay(facts: &Facts<'_>, pid: u32) -> bool {
    let own = facts.status.is_some_and(|one| one.pid == pid || one.keeper_pid == Some(pid));
    let program = fs::read_link(facts.host.at(format!("/proc/{pid}/exe"))).unwrap_or_default();
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    own || name == "forebay" || name == "forebay (deleted)"
}

/// Whether a file is open for writing.
fn writes(facts: &Facts<'_>, pid: u32, open: &str) -> bool {
    let info = facts.host.text(format!("/proc/{pid}/fdinfo/{open}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|text| u32::from_str_radix(text.trim(), 8).ok());
    flags.is_some_and(|flags| flags & MAY_WRITE != 0)
}

#[cfg(test)]
mod tests {
    use super::super::checks::tests::{Place, config};
    use super::super::{Facts, Severity};
    use super::*;

    fn found(place: &Place, config: &Config) -> Vec<Finding> {
        let host = place.host();
        all(&Facts { host: &host, config: Some(config), status: None }, None)
    }

    /// A configuration whose cache and primary are files of the test.
    fn files(place: &Place) -> Config {
        place.put("/disk.img", "data").put("/cache.img", "");
        let mut config = config("", "nbd = [\"unix:/run/s\"]");
        config.cache.path = place.0.join("cache.img");
        config.cache.state_dir = place.0.join("state");
        config.volumes[0].primary = place.0.join("disk.img").display().to_string();
        config.control.socket = Some(place.0.join("control.sock"));
        config
    }

    #[test]
    fn files_in_order_have_no_finding() {
        let place = Place::new("config-sound");
        assert_eq!(found(&place, &files(&place)), []);
    }

    #[test]
    fn what_is_not_there_is_wrong() {
        let place = Place::new("config-absent");
        let mut config = files(&place);
        config.volumes[0].primary = "/no/such".to_owned();
        config.cache.path = PathBuf::from("/no/such/cache");
        let found = found(&place, &config);
        let checks: Vec<_> = found.iter().map(|one| one.check).collect();
        assert_eq!(checks, ["cache", "primary"], "{found:?}");
        // A new file is no problem if it can be made.
        config.volumes[0].primary = place.0.join("disk.img").display().to_string();
        config.cache.path = place.0.join("new.img");
        config.cache.size = Some(forebay_control::units::Size(1 << 30));
        assert_eq!(super::tests::found(&place, &config), []);
    }

    #[test]
    fn files_that_others_may_write_are_wrong() {
        let place = Place::new("config-modes");
        let config = files(&place);
        place.put("/forebay.toml", "").put("/state/x", "").put("/control.sock", "");
        let set = |name: &str, mode: u32| {
            let path = place.0.join(name);
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
        };
        let path = place.0.join("forebay.toml");
        for (name, mode, check) in [
            ("forebay.toml", 0o666, "configuration"),
            ("state", 0o777, "state"),
            ("control.sock", 0o666, "control"),
        ] {
            set("forebay.toml", 0o644);
            set("state", 0o700);
            set("control.sock", 0o660);
            let host = place.host();
            let facts = Facts { host: &host, config: Some(&config), status: None };
            assert_eq!(all(&facts, Some(&path)), [], "{name}: before");
            set(name, mode);
            let found = all(&facts, Some(&path));
            assert_eq!(found.iter().map(|one| one.check).collect::<Vec<_>>(), [check]);
        }
    }

    #[test]
    fn a_primary_that_is_written_by_others_is_wrong() {
        let place = Place::new("config-writers");
        let config = files(&place);
        let disk = place.0.join("disk.img");
        // A process of the test's host that has the file open, in the way that /proc shows it.
        place.put("/proc/77/comm", "qemu\n").put("/proc/77/fdinfo/3", "pos:\t0\nflags:\t0100002\n");
        fs::create_dir_all(place.0.join("proc/77/fd")).expect("it can be made");
        std::os::unix::fs::symlink(&disk, place.0.join("proc/77/fd/3")).expect("it can be made");
        let one = found(&place, &config);
        assert!(one.len() == 1 && one[0].what.contains("qemu (process 77)"), "{one:?}");
        assert_eq!(one[0].severity, Severity::Wrong);
        place.put("/proc/77/fdinfo/3", "flags:\t0100000");
        assert_eq!(found(&place, &config), [], "it only reads");
        place.put("/proc/77/fdinfo/3", "flags:\t02");
        assert_eq!(found(&place, &config).len(), 1);
        std::os::unix::fs::symlink("/usr/bin/forebay", place.0.join("proc/77/exe")).expect("made");
        assert_eq!(found(&place, &config), [], "it is Forebay");
    }

    /// Facts of devices come from sysfs; the device itself is any block device of this machine.
    #[test]
    fn devices_are_judged_by_what_the_kernel_says_of_them() {
        let Some((path, numbers)) = a_block_device() else { return };
        let place = Place::new("config-devices");
        let mut config = files(&place);
        let sys = format!("/sys/dev/block/{numbers}");
        place.put(&format!("{sys}/queue/rotational"), "0");
        place.put(&format!("{sys}/queue/discard_max_bytes"), "4096");
        place.put("/proc/self/mountinfo", "22 1 0:20 / /sys rw - sysfs sysfs rw\n");
        config.cache.path = path.clone();
        config.volumes[0].primary = path.display().to_string();
        assert_eq!(found(&place, &config), [], "in order");
        let mount = format!("36 22 {numbers} / /srv/db rw - xfs /dev/x rw\n");
        // A partition has the numbers of the only device that is known here.
        place.put(&format!("{sys}/sdb1/partition"), "1").put(&format!("{sys}/sdb1/dev"), &numbers);
        let _ = fs::create_dir_all(place.0.join("dev"));
        std::os::unix::fs::symlink(&path, place.0.join("dev/swap")).expect("it can be made");
        let swaps = "Filename Type Size Used Priority\n/dev/swap partition 1 0 -2\n";
        let cases: [(&str, &str, &str); 6] = [
            (&format!("{sys}/queue/rotational"), "1", "rotational disk"),
            (&format!("{sys}/queue/discard_max_bytes"), "0", "no discards"),
            ("/proc/self/mountinfo", &mount, "mounted at /srv/db"),
            (&format!("{sys}/holders/dm-0"), "", "is part of dm-0"),
            (&format!("{sys}/sdb1/holders/dm-1"), "", "is part of dm-1"),
            ("/proc/swaps", swaps, "is used as swap: /dev/swap"),
        ];
        for (file, text, what) in cases {
            let before = fs::read_to_string(place.0.join(&file[1..])).ok();
            place.put(file, text);
            let found = found(&place, &config);
            assert!(found.len() == 1 && found[0].what.contains(what), "{what}: {found:?}");
            match before {
                Some(before) => drop(place.put(file, &before)),
                None => fs::remove_file(place.0.join(&file[1..])).expect("it is ours"),
            }
        }
    }

    fn a_block_device() -> Option<(PathBuf, String)> {
        use std::os::unix::fs::FileTypeExt as _;
        let all = fs::read_dir("/dev").ok()?.flatten().map(|entry| entry.path());
        let is_block =
            |path: &PathBuf| fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device());
        let path = all.into_iter().find(is_block)?;
        let number = fs::metadata(&path).ok()?.rdev();
        Some((path, format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number))))
    }
}
