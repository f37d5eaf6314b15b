//! The caches that `forebay trace simulate` simulates: each size with each policy of each layout.

use forebay_block::BLOCK_SIZE;
use forebay_control::units::Size;
use forebay_engine::Eviction;
use forebay_trace::{
    Simulate, SimulateConfig, Simulator, StoreConfig, StorePolicy, StoreSimulator,
};

use super::super::args::{CacheSize, Layout, SimulateArgs};
use crate::WrongUsage;
use crate::host::Host;

/// A layout with one of its policies.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A circular log.
    Log(Eviction),
    /// A journal for writes and a store of slots.
    Store(StorePolicy),
}

impl Kind {
    /// The policies of a layout.
    fn all(layout: Layout) -> Vec<Self> {
        match layout {
            Layout::Log => Eviction::NAMES.map(|(_, policy)| Self::Log(policy)).to_vec(),
            Layout::JournalStore => {
                StorePolicy::NAMES.map(|(_, policy)| Self::Store(policy)).to_vec()
            }
        }
    }

    /// The policy's name.
    pub fn policy(self) -> &'static str {
        match self {
            Self::Log(policy) => policy.name(),
            Self::Store(policy) => policy.name(),
        }
    }

    /// Whether the layout has this policy unless another is set.
    pub fn is_default(self) -> bool {
        match self {
            Self::Log(policy) => policy == Eviction::default(),
            Self::Store(policy) => policy == StorePolicy::default(),
        }
    }

    /// The layout's name.
    pub fn layout(self) -> &'static str {
        match self {
            Self::Log(_) => "log",
            Self::Store(_) => "journal-store",
        }
    }
}

/// A cache to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub cache_bytes: u64,
    pub ram_bytes: u64,
    pub kind: Kind,
    sequential_threshold: u64,
    journal_percent: f64,
    compress: f64,
}

impl Job {
    /// The empty cache.
    pub fn simulator(&self) -> Box<dyn Simulate + Send> {
        let Self { cache_bytes, ram_bytes, sequential_threshold, .. } = *self;
        match self.kind {
            Kind::Log(eviction) => {
                let config =
                    SimulateConfig { cache_bytes, ram_bytes, eviction, sequential_threshold };
                Box::new(Simulator::new(&config))
            }
            Kind::Store(policy) => Box::new(StoreSimulator::new(&StoreConfig {
                cache_bytes,
                ram_bytes,
                policy,
                sequential_threshold,
                journal_percent: self.journal_percent,
                compress: self.compress,
            })),
        }
    }
}

/// Memory that a policy takes for each block of a simulated cache, in bytes; some take less.
const POLICY_BYTES: u64 = 8;
/// Most blocks in all: they are numbered with 32 bits.
const BLOCKS_MAX: u64 = (u32::MAX - 1) as u64;

/// The largest cache that `memory` bytes of this machine can simulate, in bytes.
fn largest(memory: u64, compress: f64) -> u64 {
    let blocks = (memory / POLICY_BYTES).min(BLOCKS_MAX) as f64 / compress;
    blocks as u64 * BLOCK_SIZE as u64
}

/// Sizes of the cache device and the RAM tier to simulate.
pub fn sizes(args: &SimulateArgs, footprint: u64) -> Result<Vec<(u64, u64)>, WrongUsage> {
    let memory = Host::default().memory().unwrap_or(u64::MAX);
    let most = largest(memory, args.compress);
    let fits = |what: &str, bytes: u64| match bytes <= most {
        true => Ok(bytes),
        false => Err(WrongUsage(format!(
            "{what} of {} is too large to simulate; {} is the most with this machine's memory",
            Size(bytes),
            Size(most)
        ))),
    };
    let sizes = args.size.iter().map(|&size| {
        let cache_bytes = size.of(footprint);
        let least = Simulator::CACHE_BYTES_MIN;
        if cache_bytes < least {
            let what = match size {
                CacheSize::Bytes(_) => "a cache",
                CacheSize::Percent(_) => "a share of the trace's footprint",
            };
            let (found, least) = (Size(cache_bytes), Size(least));
            return Err(WrongUsage(format!(
                "{what} of {found} is too small to simulate; {least} is the least"
            )));
        }
        let ram_bytes = fits("a RAM tier", args.ram.of(cache_bytes))?;
        Ok((fits("a cache", cache_bytes)?, ram_bytes))
    });
    sizes.collect()
}

/// Every layout with every policy of it.
pub fn kinds(args: &SimulateArgs) -> Result<Vec<Kind>, WrongUsage> {
    let least = StoreConfig::journal_percent_min(args.compress);
    if args.layout.contains(&Layout::JournalStore) && args.journal < least {
        return Err(WrongUsage(format!(
            "--journal {} is too small for --compress {}; {least:.1} is the least",
            args.journal, args.compress
        )));
    }
    let all: Vec<Kind> = args.layout.iter().flat_map(|&layout| Kind::all(layout)).collect();
    if let Some(unknown) =
        args.policy.iter().find(|name| all.iter().all(|kind| kind.policy() != *name))
    {
        let known: Vec<_> = all.iter().map(|kind| kind.policy()).collect();
        return Err(WrongUsage(format!(
            "no simulated layout has a policy {unknown:?}; use one of: {}",
            known.join(", ")
        )));
    }
    let wanted = |kind: &Kind| {
        args.policy.is_empty() || args.policy.iter().any(|name| name == kind.policy())
    };
    Ok(all.into_iter().filter(wanted).collect())
}

/// Every cache to simulate, size by size.
pub fn jobs(args: &SimulateArgs, sizes: &[(u64, u64)], kinds: &[Kind]) -> Vec<Job> {
    let job = |(cache_bytes, ram_bytes), kind| Job {
        cache_bytes,
        ram_bytes,
        kind,
        sequential_threshold: args.sequential_threshold.0,
        journal_percent: args.journal,
        compress: args.compress,
    };
    sizes.iter().flat_map(|&size| kinds.iter().map(move |&kind| job(size, kind))).collect()
}
