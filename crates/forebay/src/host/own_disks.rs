//! Whether a file lies on a disk that the server itself makes over a volume: in a file system on
//! it, perhaps with a partition, device-mapper, md or loop devices between. In a hand-over, the
//! next server would wait for that file, and the file for the next server.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::bail;
use forebay_control::config::Config;
use forebay_device::primary_path;

use crate::disk::block::names;
use crate::disk::mounts;

use super::Host;

/// What a server makes over its volumes.
pub struct OwnDisks {
    /// The directory of the volumes as files.
    pub files: Option<PathBuf>,
    /// The paths of the disks.
    pub disks: Vec<String>,
}

impl OwnDisks {
    /// Fails if the cache, the state directory or a primary lies on one of them.
    pub fn check(&self, host: &Host, config: &Config) -> anyhow::Result<()> {
        let primaries = config.volumes.iter().filter_map(|volume| {
            let path = primary_path(&volume.primary).ok()??;
            Some((format!("primary of volume {}", volume.name), path))
        });
        let own = [("cache", &config.cache.path), ("state directory", &config.cache.state_dir)];
        let own = own.map(|(what, path)| (what.to_owned(), path.clone()));
        for (what, path) in own.into_iter().chain(primaries) {
            if let Some(disk) = self.below(host, &resolved(&path), &mut Vec::new()) {
                bail!(
                    "{what} {}: it is on {disk}, which this server makes of a volume, and would \
                     wait for itself; name a place on another disk",
                    path.display()
                );
            }
        }
        Ok(())
    }

    /// The own disk or directory that is below a file or block device. Devices in `seen` were
    /// examined: the name of a loop device's file may by now be that of a file on this very device.
    fn below(&self, host: &Host, path: &Path, seen: &mut Vec<String>) -> Option<String> {
        if let Some(files) = self.files.as_ref().filter(|files| path.starts_with(files)) {
            return Some(files.display().to_string());
        }
        let devices = match mounts::numbers_of(&host.at("/"), path) {
            Some(numbers) => vec![numbers],
            None => mounts::devices_of(&host.at("/"), path).unwrap_or_default(),
        };
        devices.into_iter().find_map(|device| self.below_device(host, device, seen))
    }

    /// The same for a block device with these numbers.
    fn below_device(&self, host: &Host, numbers: String, seen: &mut Vec<String>) -> Option<String> {
        let link = host.at(format!("/sys/dev/block/{numbers}"));
        if seen.contains(&numbers) {
            return None;
        }
        seen.push(numbers);
        let mut directory = link.canonicalize().ok()?;
        if directory.join("partition").exists() {
            directory.pop();
        }
        let path = format!("/dev/{}", directory.file_name()?.to_str()?);
        if self.disks.contains(&path) {
            return Some(path);
        }
        if let Ok(file) = fs::read_to_string(directory.join("loop/backing_file")) {
            return self.below(host, Path::new(file.trim_end_matches('\n')), seen);
        }
        let slaves = directory.join("slaves");
        let numbers = |name: &String| fs::read_to_string(slaves.join(name).join("dev")).ok();
        let mut parts = names(&slaves).into_iter().filter_map(|name| numbers(&name));
        parts.find_map(|numbers| self.below_device(host, numbers.trim().to_owned(), seen))
    }
}

/// The path without symbolic links, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = whole.ancestors().find_map(|part| Some((part.canonicalize().ok()?, part)));
    let Some((real, part)) = there else { return whole };
    whole.strip_prefix(part).map_or(real.clone(), |rest| real.join(rest))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A host with a device for each line: its numbers, its directory in sysfs.
    fn host(name: &str, devices: &[(&str, &str)]) -> (PathBuf, Host) {
        let root = std::env::temp_dir().join(format!("forebay-own-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for (numbers, directory) in devices {
            let directory = root.join("sys").join(directory);
            fs::create_dir_all(&directory).expect("it can be made");
            fs::write(directory.join("dev"), format!("{numbers}\n")).expect("it can be written");
            fs::create_dir_all(root.join("sys/dev/block")).expect("it can be made");
            symlink(&directory, root.join("sys/dev/block").join(numbers)).expect("it can be made");
        }
        (root.clone(), Host::below(&root))
    }

    #[test]
    fn own_disks_are_found_below_file_systems_partitions_lvm_and_loop_devices() {
        let (root, host) = host(
            "below",
            &[
                ("8:0", "block/sda"),
                ("259:0", "block/ublkb0"),
                ("259:1", "block/ublkb0/ublkb0p1"),
                ("253:0", "block/dm-0"),
                ("7:0", "block/loop0"),
                ("7:1", "block/loop1"),
            ],
        );
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("it has one")).expect("it can be made");
            fs::write(path, text).expect("it can be written");
        };
        put("sys/block/ublkb0/ublkb0p1/partition", "1\n");
        fs::create_dir_all(root.join("sys/block/dm-0/slaves")).expect("it can be made");
        symlink(root.join("sys/block/ublkb0/ublkb0p1"), root.join("sys/block/dm-0/slaves/part"))
            .expect("it can be made");
        put("sys/block/loop0/loop/backing_file", "/lvm/image\n");
        // A loop device whose file is hidden by the mount of its own file system.
        put("sys/block/loop1/loop/backing_file", "/hidden/image\n");
        put(
            "proc/self/mountinfo",
            "1 0 8:0 / / rw - ext4 /dev/sda rw\n2 1 259:0 / /srv rw - xfs /dev/ublkb0 rw\n\
             3 1 259:1 / /part rw - xfs /dev/ublkb0p1 rw\n4 1 253:0 / /lvm rw - xfs /dev/dm-0 rw\n\
             5 1 7:0 / /image rw - xfs /dev/loop0 rw\n6 1 7:1 / /hidden rw - xfs /dev/loop1 rw\n",
        );
        let own = OwnDisks {
            files: Some(PathBuf::from("/mnt/forebay")),
            disks: vec!["/dev/ublkb0".to_owned()],
        };
        let below = |path: &str| own.below(&host, Path::new(path), &mut Vec::new());
        for path in ["/srv/c.img", "/part/c.img", "/lvm/c.img", "/image/c.img"] {
            assert_eq!(below(path).as_deref(), Some("/dev/ublkb0"), "{path}");
        }
        assert_eq!(below("/mnt/forebay/db").as_deref(), Some("/mnt/forebay"));
        for path in ["/var/c.img", "/srv2/c.img", "/hidden/c.img", "/mnt/c.img"] {
            assert_eq!(below(path), None, "{path}");
        }
        fs::remove_dir_all(&root).expect("it is ours");
    }

    #[test]
    fn a_path_is_resolved_as_far_as_it_exists() {
        let (root, _) = host("resolved", &[]);
        fs::create_dir_all(root.join("real")).expect("it can be made");
        symlink(root.join("real"), root.join("link")).expect("it can be made");
        let real = root.canonicalize().expect("it is there").join("real");
        assert_eq!(resolved(&root.join("link/new/file")), real.join("new/file"));
        assert_eq!(resolved(&root.join("link")), real);
        fs::remove_dir_all(&root).expect("it is ours");
    }
}
