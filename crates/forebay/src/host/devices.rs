//! Block devices: size, model, kind, wear, content, and who uses them.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_control::units::Size;

use crate::disk::block::names;
use crate::disk::mounts;
use crate::host::Host;
use crate::server::cache::foreign;

/// Sectors of sysfs have this size, whatever those of the device are.
const SECTOR: u64 = 512;

/// A block device of the host.
#[derive(Clone, Debug)]
pub struct Device {
    /// The path by which it was named.
    pub path: PathBuf,
    /// Major and minor number, as `8:16`.
    pub numbers: String,
    /// Its directory in sysfs, below the host's root.
    dir: PathBuf,
}

impl Device {
    /// The block device at `path`; `None` if that is something else.
    ///
    /// # Errors
    /// If there is nothing at `path`.
    pub fn at(host: &Host, path: &Path) -> io::Result<Option<Self>> {
        let found = fs::metadata(path)?;
        if !found.file_type().is_block_device() {
            return Ok(None);
        }
        let numbers =
            format!("{}:{}", rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
        Ok(Some(Self::of(host, path, numbers)))
    }

    fn of(host: &Host, path: &Path, numbers: String) -> Self {
        let link = host.at(format!("/sys/dev/block/{numbers}"));
        let dir = link.canonicalize().unwrap_or(link);
        Self { path: path.to_owned(), numbers, dir }
    }

    /// Every disk that can hold data: not optical drives, not empty loop devices.
    pub fn all(host: &Host) -> Vec<Self> {
        let named = host.names("/sys/block").into_iter().filter_map(|name| {
            let numbers = host.text(format!("/sys/block/{name}/dev"))?;
            Some(Self::of(host, &Path::new("/dev").join(&name), numbers))
        });
        named.filter(|device| device.size() > 0 && !device.is_optical()).collect()
    }

    fn is_optical(&self) -> bool {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        ["sr", "fd", "ram", "zram"].iter().any(|kind| name.starts_with(kind))
    }

    fn text(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.dir.join(name)).ok().map(|text| text.trim().to_owned())
    }

    /// A file of its queue; for a partition, of its disk's.
    fn queue(&self, name: &str) -> Option<String> {
        let own = self.text(&format!("queue/{name}"));
        own.or_else(|| self.text(&format!("../queue/{name}")))
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.text("size").and_then(|text| text.parse().ok()).unwrap_or(0) * SECTOR
    }

    /// Its model, if it has one.
    pub fn model(&self) -> Option<String> {
        let own = self.text("device/model");
        own.or_else(|| self.text("../device/model")).filter(|text| !text.is_empty())
    }

    /// Whether it has a spindle, as far as the kernel knows.
    pub fn is_rotational(&self) -> bool {
        self.queue("rotational").as_deref() == Some("1")
    }

    /// Whether it takes discards.
    pub fn takes_discards(&self) -> bool {
        self.queue("discard_max_bytes").is_some_and(|text| text != "0")
    }

    /// The directories of its partitions in sysfs.
    fn partitions(&self) -> Vec<PathBuf> {
        let all = names(&self.dir).into_iter().map(|name| self.dir.join(name));
        all.filter(|part| part.join("partition").exists()).collect()
    }

    /// The devices built on it or on its partitions, such as those of LVM and RAID.
    pub fn holders(&self) -> Vec<String> {
        let parts = self.partitions();
        let all = std::iter::once(&self.dir).chain(&parts);
        all.flat_map(|dir| names(&dir.join("holders"))).collect()
    }

    /// It and its partitions, as `8:16`.
    fn with_partitions(&self) -> Vec<String> {
        let parts = self.partitions().into_iter();
        let numbers = parts.filter_map(|part| fs::read_to_string(part.join("dev")).ok());
        let numbers = numbers.map(|numbers| numbers.trim().to_owned());
        std::iter::once(self.numbers.clone()).chain(numbers).collect()
    }

    /// Where file systems on it or on its partitions are mounted.
    pub fn mounted(&self, host: &Host) -> Vec<PathBuf> {
        mounts::of_devices(&host.at("/"), &self.with_partitions()).unwrap_or_default()
    }

    /// It or its partitions, as far as they are used as swap.
    pub fn swaps(&self, host: &Host) -> Vec<String> {
        let own = self.with_partitions();
        let is_own = |swap: &String| {
            let numbers = mounts::numbers_of(&host.at("/"), Path::new(swap));
            numbers.is_some_and(|numbers| own.contains(&numbers))
        };
        host.swaps().into_iter().filter(is_own).collect()
    }

    /// Percent of its life that is used up, if `smartctl` can tell.
    pub fn wear(&self) -> Option<u64> {
        let output = Command::new("smartctl").args(["--json", "--all"]).arg(&self.path).output();
        let told: serde_json::Value = serde_json::from_slice(&output.ok()?.stdout).ok()?;
        wear_of(&told)
    }

    /// A stable name for it, which a later start of the host will have too.
    pub fn stable_name(&self, host: &Host) -> Option<PathBuf> {
        let named = Path::new("/dev/disk/by-id");
        let mut found: Vec<String> = host.names(named);
        // Names by the model are easier to read than those by a number.
        found.sort_by_key(|name| name.starts_with("wwn-") || name.starts_with("nvme-eui."));
        let is_it = |name: &String| {
            let link = fs::metadata(host.at(named.join(name)));
            link.is_ok_and(|link| {
                let (major, minor) =
                    (rustix::fs::major(link.rdev()), rustix::fs::minor(link.rdev()));
                self.numbers == format!("{major}:{minor}")
            })
        };
        found.into_iter().find(is_it).map(|name| named.join(name))
    }

    /// One line about it, for people.
    pub fn described(&self) -> String {
        let kind = if self.is_rotational() { "rotational" } else { "SSD or virtual" };
        let model = self.model().map(|model| format!(", {model}")).unwrap_or_default();
        let wear = self.wear().map(|wear| format!(", {wear}% worn")).unwrap_or_default();
        let content = match foreign::at(&self.path) {
            Ok(Some(content)) => content.to_owned(),
            Ok(None) => "empty".to_owned(),
            Err(error) => format!("unreadable ({error})"),
        };
        format!("{}  {}{model}, {kind}{wear}: {content}", self.path.display(), Size(self.size()))
    }
}

/// The percentage used, as NVMe disks or SATA disks tell it.
fn wear_of(told: &serde_json::Value) -> Option<u64> {
    let nvme = &told["nvme_smart_health_information_log"]["percentage_used"];
    if let Some(used) = nvme.as_u64() {
        return Some(used);
    }
    let table = told["ata_smart_attributes"]["table"].as_array()?;
    // The normalized values of these count down from 100.
    let life =
        |entry: &&serde_json::Value| [177, 202, 231, 233].iter().any(|id| entry["id"] == *id);
    Some(100 - table.iter().find(life)?["value"].as_u64()?.min(100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wear_is_read_from_both_kinds_of_disks() {
        let nvme = serde_json::json!({"nvme_smart_health_information_log": {"percentage_used": 7}});
        assert_eq!(wear_of(&nvme), Some(7));
        let table = serde_json::json!([{"id": 9, "value": 99}, {"id": 177, "value": 88}]);
        let sata = serde_json::json!({"ata_smart_attributes": {"table": table}});
        assert_eq!(wear_of(&sata), Some(12));
        assert_eq!(wear_of(&serde_json::json!({})), None);
    }
}
