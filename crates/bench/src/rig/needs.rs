//! The programs, rights, devices and space that a benchmark needs. They are checked before it
//! begins; the message names the missing one and the remedy.

use std::fs::OpenOptions;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};

use crate::rig::cleanup::tool;
use crate::rig::setup::SetUp;

/// Checks that the programs are installed; each is listed with its Debian package.
pub fn tools(needed: &[(&str, &str)]) -> anyhow::Result<()> {
    let exists = |name: &str| {
        let command = tool(name);
        let program = Path::new(command.get_program());
        let paths = std::env::var_os("PATH").unwrap_or_default();
        program.is_absolute() || std::env::split_paths(&paths).any(|dir| dir.join(name).is_file())
    };
    let missing: Vec<_> = needed.iter().filter(|(name, _)| !exists(name)).collect();
    let Some((name, _)) = missing.first() else { return Ok(()) };
    let mut packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    packages.dedup();
    bail!("{name} is not installed; on Debian: apt-get install {}", packages.join(" "))
}

/// Checks that a block device can be created for the set-ups.
pub fn disk_can_be_made(setups: &[SetUp]) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "not root: loop devices and mounts need it; run it as root, or choose vdbench or burst"
    );
    let open = |path: &str| OpenOptions::new().read(true).write(true).open(path);
    open("/dev/loop-control").context("/dev/loop-control: no loop devices; run modprobe loop")?;
    if setups.iter().any(|setup| *setup != SetUp::BareSsd) {
        open("/dev/fuse").context("/dev/fuse: no FUSE; run modprobe fuse")?;
    }
    Ok(())
}

/// Checks that a directory has `bytes` bytes of free space.
pub fn space(dir: &Path, bytes: u64) -> anyhow::Result<()> {
    let found = rustix::fs::statvfs(dir).with_context(|| format!("{}", dir.display()))?;
    let free = found.f_bavail * found.f_frsize;
    ensure!(
        free >= bytes,
        "{}: {} MiB are free, {} MiB are needed; give another --dir, or make it smaller",
        dir.display(),
        free >> 20,
        bytes >> 20
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let error = tools(&[("ls", "coreutils"), ("no-such-tool", "the-package")]);
        let error = error.expect_err("it is not there").to_string();
        assert!(error.contains("no-such-tool") && error.contains("install the-package"), "{error}");
        assert!(tools(&[("ls", "coreutils")]).is_ok());
        let error = space(Path::new("/"), u64::MAX).expect_err("no disk has so much").to_string();
        assert!(error.contains("MiB are free") && error.contains("--dir"), "{error}");
    }
}
