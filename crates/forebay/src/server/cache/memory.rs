//! Memory: how much of it the index may take, and whether a start can get all it needs. A lack of
//! memory is an error before anything is written; later it would end the process.

use std::fs;
use std::path::Path;

use anyhow::bail;
use forebay_control::config::Config;
use forebay_control::units::Size;
use forebay_engine::DIRTY_STRIPE_BYTES;
use forebay_runtime::client_memory_max;
use forebay_volume::pool::{Opened, index_bytes};
use rustix::process::{Resource, getrlimit};
use rustix::system::sysinfo;

/// By default, the index of a new cache may take the machine's memory divided by this.
const INDEX_SHARE: u64 = 2;

/// The stripes with dirty blocks may take the machine's memory divided by the first, or the index's
/// divided by the second if that is more, and the last in any case.
const DIRTY_SHARE: u64 = 16;
const DIRTY_INDEX_SHARE: u64 = 8;
const DIRTY_BYTES_MIN: u64 = 16 << 20;

/// For the use of its pages and for how often blocks are read, a cache takes its size divided by
/// this, at most: two bytes for each page, and five for each block.
const TABLES_SHARE: u64 = 512;

/// Most bytes for the index of a new cache.
pub fn index_budget(config: &Config) -> u64 {
    config.memory.index.map_or_else(|| limit(false) / INDEX_SHARE, |Size(bytes)| bytes)
}

/// Most bytes that the index of a cache takes.
pub fn index(opened: &Opened) -> u64 {
    opened.superblock.shards.iter().map(|&area| index_bytes(area)).sum()
}

/// Bytes of a cache that are divided among its shards.
fn size(opened: &Opened) -> u64 {
    opened.superblock.shards.iter().map(|area| area.len).sum()
}

/// The memory that a server needs in any case, by its use, in bytes.
#[derive(Clone, Copy)]
struct Needs {
    ram: u64,
    index: u64,
    /// The tables of pages, and of how often blocks are read.
    tables: u64,
    clients: u64,
    /// Staged blocks of ordered volumes.
    ordered: u64,
    /// The first stripes with dirty blocks.
    dirty: u64,
    buffers: u64,
}

impl Needs {
    /// Those with a cache of `size` bytes and its index; `buffers`: bytes of the buffers for I/O.
    fn of(config: &Config, (size, index): (u64, u64), buffers: usize) -> Self {
        let (Size(clients), places) = (config.server.client_memory, config.server.max_clients);
        let ordered = config.volumes.iter().map(|volume| volume.ordered.0);
        Self {
            ram: config.memory.ram.0,
            index,
            tables: size / TABLES_SHARE,
            clients: client_memory_max(clients, places as usize),
            ordered: ordered.fold(0, u64::saturating_add),
            dirty: DIRTY_BYTES_MIN,
            buffers: buffers as u64,
        }
    }

    fn sum(self) -> u64 {
        let Self { ram, index, tables, clients, ordered, dirty, buffers } = self;
        [ram, index, tables, clients, ordered, dirty, buffers]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    fn text(self) -> String {
        let ordered = match self.ordered {
            0 => String::new(),
            bytes => format!("{} for ordered volumes, ", Size(bytes)),
        };
        format!(
            "{} for recent blocks, {} for the index, {} for tables of blocks, {} for clients, \
             {ordered}{} for dirty blocks and {} for buffers",
            Size(self.ram),
            Size(self.index),
            Size(self.tables),
            Size(self.clients),
            Size(self.dirty),
            Size(self.buffers)
        )
    }
}

/// Number of stripes with dirty blocks for which each shard has memory: those that [`check`] has
/// counted, and more of what is left. Near that many, writes wait: a start need not be refused for
/// this.
pub fn dirty_stripes(config: &Config, opened: &Opened, buffers: usize) -> u64 {
    let cache = (size(opened), index(opened));
    let left = limit(true).saturating_sub(Needs::of(config, cache, buffers).sum());
    let share = (limit(false) / DIRTY_SHARE).max(cache.1 / DIRTY_INDEX_SHARE);
    let bytes = DIRTY_BYTES_MIN + share.saturating_sub(DIRTY_BYTES_MIN).min(left);
    bytes / DIRTY_STRIPE_BYTES / opened.superblock.shards.len() as u64
}

/// Fails if the server cannot get its memory; `buffers`: bytes of the buffers for I/O.
pub fn check(config: &Config, opened: &Opened, buffers: usize) -> anyhow::Result<()> {
    let needs = Needs::of(config, (size(opened), index(opened)), buffers);
    let shown = needs.text();
    let hint = "use less for memory.ram (--ram), server.client_memory or `ordered` of a volume, or \
                a smaller cache";
    let most = limit(true);
    if needs.sum() > most {
        bail!("memory: {shown} are more than the {} available; {hint}", Size(most));
    }
    let shards = opened.superblock.shards.iter();
    let count = shards.len() as u64;
    let parts = shards.flat_map(|&area| [index_bytes(area), needs.ram / count]);
    let others = [needs.tables, needs.clients, needs.ordered, needs.dirty, needs.buffers];
    // Allocates everything at the same time, and frees it. The index grows later; should memory be
    // short then, it counts as full.
    let mut held = Vec::new();
    for bytes in parts.chain(others) {
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

    /// `ordered` was not counted: a server that had more of it than the machine has memory was
    /// started, and killed while it served.
    #[test]
    fn a_server_needs_the_memory_of_its_ordered_volumes_and_of_all_its_clients() {
        let needs = |ordered: &str, clients: &str| {
            let text = format!(
                "[cache]\npath = \"/c\"\n[memory]\nram = \"1GiB\"\n\
                 [server]\nnbd = [\"unix:/s\"]\n{clients}\n\
                 [[volume]]\nname = \"a\"\nprimary = \"/p/a\"\n{ordered}\n\
                 [[volume]]\nname = \"b\"\nprimary = \"/p/b\"\n{ordered}\n"
            );
            let config = Config::parse(Path::new("a file"), &text).expect("it is valid");
            Needs::of(&config, (64 << 30, 512 << 20), 64 << 20)
        };
        let plain = needs("", "");
        assert_eq!(plain.sum(), (1024 + 512 + 128 + 256 + 16 + 64) << 20);
        assert!(!plain.text().contains("ordered"), "{}", plain.text());
        let ordered = needs("ordered = \"3GiB\"", "");
        assert_eq!(ordered.sum() - plain.sum(), 6 << 30);
        assert!(ordered.text().contains("6 GiB for ordered volumes"), "{}", ordered.text());
        // 64 KiB for each, and one request that is larger than the rest.
        let many = needs("", "client_memory = \"16MiB\"\nmax_clients = 900");
        assert_eq!(many.clients, 900 * (64 << 10) + (32 << 20));
    }

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
