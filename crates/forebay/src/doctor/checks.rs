//! Checks of the host and of the running server.

use std::path::Path;
use std::process::Command;

use super::{Facts, Finding, unwise, wrong};

/// The oldest kernel on which the server runs.
const KERNEL: (u32, u32) = (5, 19);
/// The first kernel that sends requests of a FUSE mount again.
const RESENDS: (u32, u32) = (6, 9);

/// Everything found.
pub fn all(facts: &Facts<'_>) -> Vec<Finding> {
    let checks = [kernel, io_uring, fuse, huge_pages, swap, memory_limit, clock, units, server];
    checks.iter().filter_map(|check| check(facts)).collect()
}

fn kernel(facts: &Facts<'_>) -> Option<Finding> {
    let found = facts.host.kernel()?;
    (found < KERNEL).then(|| {
        let what = format!("Linux {}.{} is older than {}.{}", found.0, found.1, KERNEL.0, KERNEL.1);
        wrong("kernel", what, "install a newer kernel")
    })
}

fn io_uring(facts: &Facts<'_>) -> Option<Finding> {
    let level = facts.host.number("/proc/sys/kernel/io_uring_disabled")?;
    let remedy = "sysctl kernel.io_uring_disabled=0";
    match level {
        0 => None,
        1 => {
            let what = "io_uring is for privileged processes only (io_uring_disabled = 1)";
            Some(unwise(
                "io_uring",
                what.to_owned(),
                format!("run the server as root, or {remedy}"),
            ))
        }
        _ => {
            let what = format!("io_uring is disabled (io_uring_disabled = {level})");
            Some(wrong("io_uring", what, remedy))
        }
    }
}

/// Whether disks survive a server that dies.
fn fuse(facts: &Facts<'_>) -> Option<Finding> {
    facts.config?.server.fuse.as_ref()?;
    if !facts.host.has("/dev/fuse") {
        let what = "fuse is configured, and there is no /dev/fuse".to_owned();
        return Some(wrong("fuse", what, "modprobe fuse"));
    }
    let found = facts.host.kernel()?;
    (found < RESENDS && !facts.host.has("/dev/ublk-control")).then(|| {
        let what = format!(
            "Linux {}.{} loses the requests of a FUSE mount when the server dies; disks then fail",
            found.0, found.1
        );
        unwise("fuse", what, "use disks by ublk (modprobe ublk_drv), or Linux 6.9")
    })
}

fn huge_pages(facts: &Facts<'_>) -> Option<Finding> {
    let switch = "/sys/kernel/mm/transparent_hugepage/enabled";
    let never = facts.host.text(switch)?.contains("[never]");
    never.then(|| {
        let what = "transparent huge pages are off: lookups in the index take longer".to_owned();
        unwise("huge-pages", what, format!("echo madvise > {switch}"))
    })
}

/// Whether the server may wait for its own memory to be read from swap.
fn swap(facts: &Facts<'_>) -> Option<Finding> {
    let config = facts.config?;
    let swaps = facts.host.swaps();
    // A server that serves files to this host locks its memory in any case.
    if swaps.is_empty() || config.memory.lock || config.server.fuse.is_some() {
        return None;
    }
    let what = format!("swap is on ({}), and the server's memory is not locked", swaps.join(", "));
    Some(unwise("swap", what, "[memory] lock = true in the configuration, then restart"))
}

/// Whether the running server may lock all of its memory, if it should.
fn memory_limit(facts: &Facts<'_>) -> Option<Finding> {
    let config = facts.config?;
    let pid = facts.status?.pid;
    if !config.memory.lock && config.server.fuse.is_none() {
        return None;
    }
    let limits = facts.host.text(format!("/proc/{pid}/limits"))?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    let limit = line.split_whitespace().next().filter(|limit| *limit != "unlimited")?;
    let what = format!("the server (process {pid}) may lock {limit} bytes of memory only");
    Some(wrong("memory-limit", what, "LimitMEMLOCK=infinity in its unit, or ulimit -l unlimited"))
}

/// Whether the times in logs and events can be compared with those of other hosts.
fn clock(facts: &Facts<'_>) -> Option<Finding> {
    if !facts.host.has_systemd() {
        return None;
    }
    let told = Command::new(facts.host.at("/usr/bin/timedatectl"))
        .args(["show", "--property=NTPSynchronized", "--value"])
        .output()
        .ok()?;
    let no = String::from_utf8_lossy(&told.stdout).trim() == "no";
    no.then(|| {
        let what = "the clock is not synchronized: the times of logs cannot be compared".to_owned();
        unwise("clock", what, "timedatectl set-ntp true")
    })
}

/// Whether two installations are in each other's way.
fn units(facts: &Facts<'_>) -> Option<Finding> {
    let own = "/etc/systemd/system/forebay.service";
    let packaged =
        ["/lib/systemd/system/forebay.service", "/usr/lib/systemd/system/forebay.service"];
    let packaged = packaged.iter().find(|path| facts.host.has(path))?;
    let own_is_file = facts.host.at(own).symlink_metadata().is_ok_and(|found| found.is_file());
    own_is_file.then(|| {
        let what = format!("{own} hides {packaged}: upgrades of the package do not reach it");
        let keep = "systemctl edit forebay, for changes";
        unwise("units", what, format!("rm {own} && systemctl daemon-reload; then {keep}"))
    })
}

/// The problems that the running server reports itself, and servers that compete.
fn server(facts: &Facts<'_>) -> Option<Finding> {
    let status = facts.status?;
    if let Some(problem) = status.problems.first() {
        let more = match status.problems.len() {
            1 => String::new(),
            count => format!(" (and {} more)", count - 1),
        };
        return Some(wrong("server", format!("{problem}{more}"), "forebay status"));
    }
    let serving = |pid: &u32| {
        let line = facts.host.text(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = line.split('\0');
        let program =
            words.next().map(|word| Path::new(word).file_name() == Some("forebay".as_ref()));
        // A keeper's server has the flag --kept.
        program == Some(true) && words.next() == Some("serve") && !words.any(|w| w == "--kept")
    };
    let servers: Vec<u32> = facts.host.processes().into_iter().filter(serving).collect();
    (servers.len() > 1).then(|| {
        let shown: Vec<String> = servers.iter().map(u32::to_string).collect();
        let what = format!("{} servers run: processes {}", shown.len(), shown.join(", "));
        let remedy = "forebay stop --control PATH stops one; a second one for the same host needs \
                      its own control socket and state directory";
        unwise("server", what, remedy)
    })
}

#[cfg(test)]
pub mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use forebay_control::config::Config;

    use crate::host::Host;

    use super::*;

    /// A host of files in a directory of its own.
    pub struct Place(pub PathBuf);

    impl Place {
        pub fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("forebay-doctor-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).expect("a directory can be made");
            Self(path)
        }

        pub fn put(&self, path: &str, text: &str) -> &Self {
            let path = self.0.join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().expect("it has one")).expect("it can be made");
            fs::write(path, text).expect("it can be written");
            self
        }

        pub fn host(&self) -> Host {
            Host::below(&self.0)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// A configuration with these lines in `[server]`.
    pub fn config(memory: &str, server: &str) -> Config {
        let text = format!(
            "[cache]\npath = \"/no/cache\"\n[memory]\n{memory}\n[server]\n{server}\n\
             [[volume]]\nname = \"db\"\nprimary = \"/no/primary\"\n"
        );
        Config::parse(Path::new("test"), &text).expect("it is valid")
    }

    /// A status with what the checks read.
    pub fn status(pid: u32, problems: &[&str]) -> forebay_control::api::PoolStatus {
        let told = serde_json::json!({
            "api": 1, "version": "0", "state": "serving", "health": "good", "problems": problems,
            "uptime_seconds": 1, "pid": pid, "endpoints": [], "clients": 0, "volumes": [],
            "shards": [], "counters": {},
            "cache": {
                "path": "", "size": 0, "cached_bytes": 0, "dirty_bytes": 0, "dirty_limit_bytes": 0,
                "oldest_dirty_seconds": 0.0, "write_cache_depth_seconds": 0.0, "fenced_bytes": 0,
                "hit_percent": null,
            },
        });
        serde_json::from_value(told).expect("it has every field")
    }

    fn found(place: &Place, config: Option<&Config>, pid: Option<u32>) -> Vec<Finding> {
        let (host, status) = (place.host(), pid.map(|pid| status(pid, &[])));
        all(&Facts { host: &host, config, status: status.as_ref() })
    }

    /// A host in order.
    fn sound(name: &str) -> Place {
        let place = Place::new(name);
        place
            .put("/proc/sys/kernel/osrelease", "6.12.1-amd64\n")
            .put("/proc/sys/kernel/io_uring_disabled", "0\n")
            .put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
            .put("/proc/swaps", "Filename Type Size Used Priority\n")
            .put("/dev/fuse", "")
            .put("/proc/9/limits", "Max locked memory         unlimited            unlimited\n")
            .put("/proc/9/cmdline", "/usr/bin/forebay\0serve\0--config\0/etc/x\0")
            .put("/proc/10/cmdline", "/usr/bin/forebay\0serve\0--config\0/etc/x\0--kept\0");
        place
    }

    const NBD: &str = "nbd = [\"unix:/run/s\"]";
    const FUSE: &str = "fuse = \"/mnt/forebay\"";

    #[test]
    fn a_host_in_order_has_no_finding() {
        let place = sound("sound");
        assert_eq!(found(&place, Some(&config("lock = true", FUSE)), Some(9)), []);
        assert_eq!(found(&place, None, None), []);
    }

    /// Each check fails on a host where one file is different.
    #[test]
    fn each_check_fails_on_its_own_problem() {
        let cases: [(&str, &str, &str, &str, &str); 8] = [
            ("kernel", "/proc/sys/kernel/osrelease", "5.10.0-30-amd64", "", NBD),
            ("io_uring", "/proc/sys/kernel/io_uring_disabled", "2", "", NBD),
            ("io_uring", "/proc/sys/kernel/io_uring_disabled", "1", "", NBD),
            ("fuse", "/proc/sys/kernel/osrelease", "6.1.0-40-amd64", "", FUSE),
            (
                "huge-pages",
                "/sys/kernel/mm/transparent_hugepage/enabled",
                "always madvise [never]",
                "",
                NBD,
            ),
            ("swap", "/proc/swaps", "Filename\n/dev/sda2 partition 1 0 -2\n", "", NBD),
            (
                "memory-limit",
                "/proc/9/limits",
                "Max locked memory         8388608              8388608    bytes",
                "lock = true",
                NBD,
            ),
            ("server", "/proc/11/cmdline", "forebay\0serve\0--primary\0x\0", "", NBD),
        ];
        for (number, (check, path, text, memory, server)) in cases.into_iter().enumerate() {
            let place = sound(&format!("case{number}"));
            let config = config(memory, server);
            assert_eq!(found(&place, Some(&config), Some(9)), [], "{check}: before");
            place.put(path, text);
            let found = found(&place, Some(&config), Some(9));
            let checks: Vec<_> = found.iter().map(|finding| finding.check).collect();
            assert_eq!(checks, [check], "{path}: {found:?}");
            assert!(!found[0].remedy.is_empty());
        }
    }

    #[test]
    fn a_missing_fuse_device_is_wrong() {
        let place = sound("no-fuse");
        fs::remove_file(place.0.join("dev/fuse")).expect("it is there");
        let found = found(&place, Some(&config("", FUSE)), None);
        assert_eq!(found.iter().map(|one| one.check).collect::<Vec<_>>(), ["fuse"]);
    }

    #[test]
    fn a_clock_that_systemd_calls_unsynchronized_is_found() {
        let place = sound("clock");
        let says = |answer: &str| {
            place.put("/run/systemd/system/x", "");
            place.put("/usr/bin/timedatectl", &format!("#!/bin/sh\necho {answer}\n"));
            let program = place.0.join("usr/bin/timedatectl");
            fs::set_permissions(program, fs::Permissions::from_mode(0o755)).expect("it is ours");
            found(&place, None, None)
        };
        assert_eq!(says("yes"), []);
        assert_eq!(says("no").iter().map(|one| one.check).collect::<Vec<_>>(), ["clock"]);
    }

    #[test]
    fn a_unit_that_hides_the_packages_is_found() {
        let place = sound("units");
        place.put("/lib/systemd/system/forebay.service", "");
        assert_eq!(found(&place, None, None), []);
        place.put("/etc/systemd/system/forebay.service", "");
        let found = found(&place, None, None);
        assert_eq!(found.iter().map(|one| one.check).collect::<Vec<_>>(), ["units"]);
    }

    #[test]
    fn problems_of_the_server_are_findings() {
        let place = sound("problems");
        let (host, status) = (place.host(), status(9, &["volume db: away; see its array", "b"]));
        let found = all(&Facts { host: &host, config: None, status: Some(&status) });
        assert_eq!(found.len(), 1);
        assert!(found[0].what.contains("see its array (and 1 more)"), "{found:?}");
    }
}
