//! Memory: how much of it the index may take, and whether a start can get all it needs. A lack of
//! memory is an error before anything is written; later it would end the process.

use std::fs;
use std::path::Path;

use anyhow::bail;
use forebay_control::config::Config;
use forebay_control::units::Size;
use forebay_engine::DIRTY_STRIPE_BYTES;
use forebay_volume::pool::{Opened, index_bytes};
use rustix::process::{Resource, getrlimit};
use rustix::system::sysinfo;

/// By default, the index of a new cache may take the machine's memory divided by this.
const INDEX_SHARE: u64 = 2;

/// The stripes with dirty blocks may take the machine's memory divided by this, or the index's if
/// that is more, and the first bytes in any case.
const DIRTY_SHARE: u64 = 16;
const DIRTY_INDEX_SHARE: u64 = 8;
const DIRTY_BYTES_MIN: u64 = 16 << 20;

/// Most bytes for the index of a new cache.
pub fn index_budget(config: &Config) -> u64 {
    config.memory.index.map_or_else(|| limit(false) / INDEX_SHARE, |Size(bytes)| bytes)
}

/// Most bytes that the index of a cache takes.
pub fn index(opened: &Opened) -> u64 {
    opened.superblock.shards.iter().map(|&area| index_bytes(area)).sum()
}

/// Bytes that a server needs; `others`: bytes in addition to index, RAM tier and clients.
fn wanted(config: &Config, opened: &Opened, others: usize) -> u64 {
    let (Size(ram), Size(clients)) = (config.memory.ram, config.server.client_memory);
    [index(opened), ram, clients].into_iter().fold(others as u64, u64::saturating_add)
}

/// Number of stripes with dirty blocks for which each shard has memory, of what is left by all the
/// rest. Near that many, writes wait: a start need not be refused for this.
pub fn dirty_stripes(config: &Config, opened: &Opened, others: usize) -> u64 {
    let left = limit(true).saturating_sub(wanted(config, opened, others));
    let share = (limit(false) / DIRTY_SHARE).max(index(opened) / DIRTY_INDEX_SHARE);
    let bytes = share.min(left).max(DIRTY_BYTES_MIN);
    bytes / DIRTY_STRIPE_BYTES / opened.superblock.shards.len() as u64
}

/// Fails if the server cannot get its memory; `others` as in [`wanted`].
pub fn check(config: &Config, opened: &Opened, others: usize) -> anyhow::Result<()> {
    let (index, Size(ram)) = (index(opened), config.memory.ram);
    let (buffers, Size(clients)) = (others as u64, config.server.client_memory);
    let shown = format!(
        "{} for recent blocks, {} for the index, {} for clients and {} for buffers",
        Size(ram),
        Size(index),
        Size(clients),
        Size(buffers)
    );
    let hint = "use less for memory.ram (--ram) or server.client_memory, or a smaller cache";
    let most = limit(true);
    if wanted(config, opened, others) > most {
        bail!("memory: {shown} are more than the {} available; {hint}", Size(most));
    }
    let shards = opened.superblock.shards.iter();
    let count = shards.len() as u64;
    let parts = shards.flat_map(|&area| [index_bytes(area), ram / count]);
    // Allocates everything at the same time, and frees it. The index grows later; should memory be
    // short then, it counts as full.
    let mut held = Vec::new();
    for bytes in parts.chain([buffers.saturating_add(clients)]) {
        let mut piece: Vec<u8> = Vec::new();
        let wanted = usize::try_from(bytes).unwrap_or(usize::MAX);
        if let Err(error) = piece.try_reserve_exact(wanted) {
            bail!(
                "memory: {shown} cannot be allocated ({error}); {hint}, or raise the limit on \
                 memory or on locked memory"
            );
        }
        held.push(piece);
    }
    Ok(())
}

/// Bytes of memory that this process may have: the machine's, with or without `swap`, or a limit of
/// the process or of its control group.
fn limit(swap: bool) -> u64 {
    let machine = sysinfo();
    let unit = u64::from(machine.mem_unit);
    let swap = if swap { machine.totalswap } else { 0 };
    let machine = machine.totalram.saturating_add(swap).saturating_mul(unit);
    let own = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    machine.min(own).min(of_groups(&groups, Path::new("/sys/fs/cgroup")))
}

/// The lowest memory limit among control groups, which are listed as in `/proc/self/cgroup`, and of
/// those that these are in. `mounted` is where they are.
fn of_groups(groups: &str, mounted: &Path) -> u64 {
    groups.lines().filter_map(|group| of_group(group, mounted)).min().unwrap_or(u64::MAX)
}

fn of_group(line: &str, mounted: &Path) -> Option<u64> {
    let (_, line) = line.split_once(':')?;
    let (controllers, group) = line.split_once(":/")?;
    let (top, file) = match controllers {
        "" => (mounted.to_owned(), "memory.max"),
        // Version 1: a tree for each controller.
        _ if controllers.split(',').any(|one| one == "memory") => {
            (mounted.join("memory"), "memory.limit_in_bytes")
        }
        _ => return None,
    };
    let limit = |path: &Path| {
        let text = fs::read_to_string(path.join(file)).unwrap_or_default();
        text.trim().parse().unwrap_or(u64::MAX)
    };
    top.join(group).ancestors().take_while(|path| path.starts_with(&top)).map(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the limits of version 1 were not known; a server that was too large for its
    /// group was killed while it served, instead of being refused.
    #[test]
    fn the_lowest_limit_counts_in_both_versions_of_control_groups() {
        let mounted = std::env::temp_dir().join(format!("forebay-groups-{}", std::process::id()));
        let set = |group: &str, file: &str, limit: &str| {
            fs::create_dir_all(mounted.join(group)).expect("a directory can be made");
            fs::write(mounted.join(group).join(file), limit).expect("a file can be written");
        };
        let most = |groups: &str| of_groups(groups, &mounted);
        assert_eq!(most(""), u64::MAX);
        assert_eq!(most("3:cpu:/a/b\n0::/a/b\n"), u64::MAX);
        set("a/b", "memory.max", "max\n");
        assert_eq!(most("0::/a/b\n"), u64::MAX);
        set("a", "memory.max", "7000\n");
        assert_eq!(most("0::/a/b\n"), 7000);
        set("memory/c/d", "memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(most("4:memory:/c/d\n0::/\n"), 9_223_372_036_854_771_712);
        set("memory/c", "memory.limit_in_bytes", "5000\n");
        assert_eq!(most("5:cpu:/c\n4:blkio,memory:/c/d\n0::/\n"), 5000);
        // In a container its own group may be at the top.
        set("memory", "memory.limit_in_bytes", "4000\n");
        assert_eq!(most("4:memory:/docker/1234\n"), 4000);
        fs::remove_dir_all(&mounted).expect("it is ours");
    }
}
