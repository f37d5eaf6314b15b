//! Memory: how much of it the index may take, and whether a start can get all it needs. A lack of
//! memory is an error before anything is written; later it would end the process.

use std::fs;
use std::path::Path;

use anyhow::bail;
use forebay_control::config::Config;
use forebay_control::units::Size;
use forebay_volume::pool::{Opened, index_bytes};
use rustix::process::{Resource, getrlimit};
use rustix::system::sysinfo;

/// By default, the index of a new cache may take the machine's memory divided by this.
const INDEX_SHARE: u64 = 2;

/// Most bytes for the index of a new cache.
pub fn index_budget(config: &Config) -> u64 {
    config.memory.index.map_or_else(|| limit(false) / INDEX_SHARE, |Size(bytes)| bytes)
}

/// Most bytes that the index of a cache takes.
pub fn index(opened: &Opened) -> u64 {
    opened.superblock.shards.iter().map(|&area| index_bytes(area)).sum()
}

/// Fails if the server cannot get its memory; `others`: bytes in addition to index, RAM tier and
/// clients.
pub fn check(config: &Config, opened: &Opened, others: usize) -> anyhow::Result<()> {
    let (index, Size(ram)) = (index(opened), config.memory.ram);
    let (others, Size(clients)) = (others as u64, config.server.client_memory);
    let shown = format!(
        "{} for recent blocks, {} for the index, {} for clients and {} for buffers",
        Size(ram),
        Size(index),
        Size(clients),
        Size(others)
    );
    let others = others.saturating_add(clients);
    let hint = "use less for memory.ram (--ram) or server.client_memory, or a smaller cache";
    let most = limit(true);
    let wanted = index.saturating_add(ram).saturating_add(others);
    if wanted > most {
        bail!("memory: {shown} are more than the {} available; {hint}", Size(most));
    }
    let shards = opened.superblock.shards.iter();
    let count = shards.len() as u64;
    let parts = shards.flat_map(|&area| [index_bytes(area), ram / count]);
    // Allocates everything at the same time, and frees it. The index grows later; should memory be
    // short then, it counts as full.
    let mut held = Vec::new();
    for bytes in parts.chain([others]) {
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
    machine.min(own).min(of_groups())
}

/// The lowest memory limit among the control groups of this process.
fn of_groups() -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(group) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return u64::MAX;
    };
    let top = Path::new("/sys/fs/cgroup");
    let limits = top
        .join(group)
        .ancestors()
        .take_while(|path| path.starts_with(top))
        .map(|path| {
            let text = fs::read_to_string(path.join("memory.max")).unwrap_or_default();
            text.trim().parse().unwrap_or(u64::MAX)
        })
        .min();
    limits.unwrap_or(u64::MAX)
}
