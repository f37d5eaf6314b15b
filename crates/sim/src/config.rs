//! Derives from a seed the world of its run: geometry, modes, sizes, disks. Swarm testing: each
//! seed omits some features altogether and exaggerates others.

use std::time::Duration;

use forebay_block::{ByteRange, SECTOR_SIZE, STRIPE_SIZE};
use forebay_engine::{CacheShare, ContentLocality, DirtyShare, Eviction, Mode, Pace, Part};

use crate::atlas::{Outcome, Scenario};
use crate::disk::{Discards, DiskProfile};
use crate::rng::Rng;

const KIB: u64 = 1 << 10;
const MICRO: u64 = 1_000;
const MILLI: u64 = 1_000_000;
/// Most bytes of a volume that a run touches, and checks after each crash.
const WINDOWS_BYTES_MAX: u64 = 512 * KIB;

/// A volume and how clients use it.
#[derive(Clone, Debug)]
pub struct VolumeSetup {
    /// Size in bytes.
    pub size: u64,
    /// Mode at the start.
    pub mode: Mode,
    /// Length in bytes from which a sequential stream bypasses the cache; 0 for never.
    pub sequential_threshold: u64,
    /// The ranges that clients read and write, in whole sectors.
    pub windows: Vec<ByteRange>,
    /// Whether the primary initially holds data in the windows.
    pub filled: bool,
    /// Whether the primary takes discards.
    pub discard: bool,
    /// Whether seeks of the primary take time.
    pub rotational: bool,
    /// The primary's preferred unit of I/O, in bytes.
    pub optimal_io: u32,
    /// Its share of the dirty limit.
    pub share: DirtyShare,
    /// Its share of the cache.
    pub cache_share: CacheShare,
    /// How destaging treats its primary.
    pub pace: Pace,
    /// If it is ordered, the blocks that a cut may have in each shard.
    pub ordered: Option<u64>,
}

/// All parameters of a run except its script.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The seed that it is derived from.
    pub seed: u64,
    /// Number of shards.
    pub shards: usize,
    /// The volumes.
    pub volumes: Vec<VolumeSetup>,
    /// Bytes in a segment.
    pub segment_size: u32,
    /// Segments of each shard, in log and store.
    pub segments: u64,
    /// Segments of each shard's log, if it has a store.
    pub log_segments: Option<u32>,
    /// Whether the first starts keep a cache of an earlier build, without unit entries.
    pub keeps_format: bool,
    /// RAM of each shard, in bytes.
    pub ram_bytes: u64,
    /// Capacity of each shard's index, in blocks.
    pub index_blocks: u64,
    /// Number of stripes with dirty blocks for which each shard has memory, if that is limited.
    pub dirty_stripes: Option<u64>,
    /// The eviction policy.
    pub eviction: Eviction,
    /// The longest a block may stay dirty.
    pub write_cache_depth: Duration,
    /// Dirty limit, in percent of the log.
    pub dirty_limit: Part,
    /// Share of the dirty limit above which blocks are destaged, in percent.
    pub dirty_target: Part,
    /// The time without requests from which everything is destaged.
    pub idle_destage: Option<Duration>,
    /// The most bytes per second of clean blocks that enter the cache.
    pub fill_rate: Option<u64>,
    /// The bytes per day that may be written to the cache device for other than clients' writes.
    pub wear_budget: Option<u64>,
    /// How long a write waits for a primary that is away.
    pub patience: Duration,
    /// Most destage writes in flight.
    pub destage_depth: u32,
    /// Whether payloads are compressed.
    pub compress: bool,
    /// Whether the RAM tier compresses.
    pub compress_ram: bool,
    /// How rewritten blocks are stored.
    pub content: ContentLocality,
    /// The cache device.
    pub cache: DiskProfile,
    /// Every primary, except for its size.
    pub primary: DiskProfile,
    /// Most requests that clients keep in flight.
    pub client_depth: usize,
    /// Longest time between two submissions of the clients, in nanoseconds.
    pub think: u64,
    /// The fault, in addition to crashes.
    pub scenario: Scenario,
    /// A second fault at the same time.
    pub also: Option<Scenario>,
    /// Whether a crash is a power failure; otherwise only the process dies.
    pub power: bool,
    /// Whether in most crashes only the server dies, and the next one gets the requests under way.
    pub takeover: bool,
    /// Whether clients write here and there in a small part of a volume, so that stripes of its
    /// primary are filled.
    pub striped: bool,
    /// Whether the links to primaries break, and primaries are said to have changed.
    pub restless: bool,
    /// Whether it is several kinds of world at once.
    pub mixed: bool,
    /// If volumes and cache change: the size of each volume at the first start, in bytes.
    pub steered: Option<Vec<u64>>,
    /// Percentage of restarts after which everything is read and checked.
    pub verify_percent: u64,
}

/// Seeds from this one on may have a store. The worlds of lower ones stay as they were when they
/// found a bug.
pub const STORE_SEEDS: u64 = 20_000_000;

/// Seeds from this one on are worlds in which a server takes over from one that died.
pub const TAKEOVER_SEEDS: u64 = 40_000_000;

/// Seeds from this one on are worlds with ordered volumes. The cache device of the even ones is
/// lost at the end; the odd ones meet any fault.
pub const ORDERED_SEEDS: u64 = 60_000_000;

/// Seeds from this one on are worlds of arrays with parity, whose stripes the cache fills.
pub const STRIPED_SEEDS: u64 = 80_000_000;

/// Seeds from this one on are worlds whose volumes and cache change while they are served
/// ([`crate::steer`]).
pub const STEERED_SEEDS: u64 = 100_000_000;

/// Seeds from this one on are worlds whose primaries are restless: their links break and are there
/// again, they are said to have changed, and requests are long.
pub const RESTLESS_SEEDS: u64 = 120_000_000;

/// Seeds from this one on are worlds that are several of the above at once, with volumes that
/// differ from each other.
pub const MIXED_SEEDS: u64 = 140_000_000;

/// Bytes of a cache device with `shards` shards of `segments` segments, with the share that a pool
/// leaves unused.
fn cache_bytes(shards: usize, segments: u64, segment_size: u32) -> u64 {
    let areas = shards as u64 * segments * u64::from(segment_size);
    (2 << 20) + areas * 10 / 9 / 4096 * 4096
}

/// Whether a power failure may leave garbage where primaries were written. In some modes the
/// primary alone must be as the client wrote it: garbage in it would be the disk's fault, not the
/// cache's. A discard may also bring back older content.
fn primary_may_garble(volumes: &[VolumeSetup], scenario: Scenario, also: Option<Scenario>) -> bool {
    let is_logged = |v: &VolumeSetup| is_back(v.mode) && v.sequential_threshold == 0 && !v.discard;
    volumes.iter().all(is_logged)
        && scenario.keeps_cache_and_modes()
        && also.is_none_or(Scenario::keeps_cache_and_modes)
}

/// All segments of a shard, and those of its log if it has a store; `all` if it has none.
fn log_and_store(seed: u64, all: u64) -> (u64, Option<u32>) {
    let mut rng = Rng::new(seed ^ 0x0005_704e);
    if seed < STORE_SEEDS || rng.percent(20) {
        return (all, None);
    }
    let log = rng.pick(&[8, 8, 9, 10, 12, 16]);
    let extents = rng.pick(&[2, 3, 4, 6, 8, 16, 32]);
    (log + extents, Some(log as u32))
}

/// Whether the cache device takes discards. Uses random numbers of its own, so that the rest of a
/// seed stays unchanged.
fn cache_discards(seed: u64) -> Discards {
    match seed >= STORE_SEEDS && Rng::new(seed ^ 0x0d15_ca2d).percent(70) {
        true => Discards::Garbage,
        false => Discards::Never,
    }
}

impl Setup {
    /// The setup of a seed.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x005e_7009);
        let shards = rng.pick(&[1, 1, 1, 2, 3]);
        let count = rng.pick(&[1, 1, 1, 2]);
        let modes = mode_set(&mut rng);
        let ordered = (ORDERED_SEEDS..STRIPED_SEEDS).contains(&seed);
        let takeover = (TAKEOVER_SEEDS..ORDERED_SEEDS).contains(&seed);
        let scenario = Scenario::from_rng(&mut rng);
        let scenario = if takeover { Scenario::Crashes } else { scenario };
        let also = second_fault(seed, scenario).filter(|_| !takeover);
        let ends = ordered && seed.is_multiple_of(2);
        let (scenario, also) = if ends { (Scenario::CacheEnds, None) } else { (scenario, also) };
        let volumes: Vec<_> = (0..count)
            .map(|_| {
                let mode = rng.pick(&modes);
                volume(&mut rng, mode, WINDOWS_BYTES_MAX / count)
            })
            .collect();
        let (compress_ram, small_ram) = ram(seed);
        let segment_size = rng.pick(&[64 * KIB, 64 * KIB, 128 * KIB, 256 * KIB]) as u32;
        let all = rng.pick(&[8, 9, 10, 12, 16, 24, 40]);
        let (segments, log_segments) = log_and_store(seed, all);
        let index_all = segments * u64::from(segment_size) / 4096;
        let fast = rng.percent(60);
        let garbles = rng.percent(70);
        let cache = DiskProfile {
            size: cache_bytes(shards, segments, segment_size),
            volatile: rng.percent(75),
            garbles,
            latency: (10 * MICRO, if fast { 40 * MICRO } else { 2 * MILLI }),
            flush: (20 * MICRO, if fast { 300 * MICRO } else { 5 * MILLI }),
            slow_percent: rng.pick(&[0, 0, 2, 10]),
            discards: cache_discards(seed),
        };
        let primary = DiskProfile {
            size: 0,
            volatile: rng.percent(75),
            garbles: garbles && primary_may_garble(&volumes, scenario, also),
            latency: (50 * MICRO, rng.pick(&[200 * MICRO, 8 * MILLI])),
            flush: (50 * MICRO, rng.pick(&[500 * MICRO, 20 * MILLI])),
            slow_percent: rng.pick(&[0, 0, 2, 10]),
            discards: Discards::Zeros,
        };
        let setup = Self {
            seed,
            shards,
            volumes,
            segment_size,
            segments,
            log_segments,
            keeps_format: Rng::new(seed ^ 0x0f02_3a70).percent(25),
            ram_bytes: small_ram.unwrap_or(rng.pick(&[
                0,
                16 * KIB,
                64 * KIB,
                256 * KIB,
                4096 * KIB,
            ])),
            index_blocks: rng.pick(&[index_all, index_all * 3 / 2, index_all * 3 / 2]),
            dirty_stripes: None,
            eviction: rng.pick(&Eviction::NAMES.map(|(_, eviction)| eviction)),
            write_cache_depth: Duration::from_millis(rng.pick(&[2, 20, 200, 30_000])),
            dirty_limit: Part::Percent(rng.pick(&[10, 30, 50, 70])),
            dirty_target: Part::Percent(50),
            idle_destage: Some(Duration::from_secs(5)),
            fill_rate: None,
            wear_budget: None,
            patience: Duration::from_secs(30),
            destage_depth: rng.pick(&[1, 2, 8, 32]),
            compress: rng.percent(70),
            compress_ram,
            content: content(seed),
            cache,
            primary,
            client_depth: rng.pick(&[1, 2, 4, 8, 16, 32]),
            think: rng.pick(&[0, 10 * MICRO, 100 * MICRO, 2 * MILLI]),
            scenario,
            also,
            power: rng.percent(85),
            takeover,
            striped: false,
            restless: false,
            mixed: false,
            steered: None,
            verify_percent: rng.pick(&[30, 80, 100]),
        };
        match seed {
            MIXED_SEEDS.. => setup.mixed(),
            RESTLESS_SEEDS.. => setup.restless(),
            STEERED_SEEDS.. => setup.steered(),
            STRIPED_SEEDS.. => setup.striped(),
            ORDERED_SEEDS.. => setup.in_order(ends),
            _ => setup,
        }
    }

    /// The same world with ordered volumes.
    fn in_order(mut self, ends: bool) -> Self {
        let mut rng = Rng::new(self.seed ^ 0x0009_de6e);
        self.shards = rng.pick(&[1, 2, 2, 3]);
        self.cache.size = cache_bytes(self.shards, self.segments, self.segment_size);
        for volume in &mut self.volumes {
            if ends {
                volume.mode = rng.pick(&[Mode::WriteBack, Mode::WriteBack, Mode::WriteOnly]);
            }
            volume.ordered = Some(rng.pick(&[4, 8, 16, 64, 256]));
        }
        if ends {
            self.client_depth = rng.pick(&[1, 2, 4, 16]);
            self.patience = Duration::from_secs(2);
        }
        self.write_cache_depth = Duration::from_millis(rng.pick(&[2, 5, 20, 200]));
        self
    }

    /// The same world with arrays as primaries, and clients that write here and there in a small
    /// part of a volume, all of which the store can hold.
    fn striped(mut self) -> Self {
        let mut rng = Rng::new(self.seed ^ 0x0057_219e);
        self.striped = true;
        self.shards = rng.pick(&[1, 1, 2]);
        // Blocks come to the store soon.
        (self.segment_size, self.log_segments) = (64 << 10, Some(8));
        self.segments = 8 + rng.pick(&[16, 32]);
        self.compress &= rng.percent(30);
        if rng.percent(70) {
            self.content = ContentLocality::Independent;
        }
        self.cache.size = cache_bytes(self.shards, self.segments, self.segment_size);
        self.index_blocks = self.segments * u64::from(self.segment_size) / 4096;
        for volume in &mut self.volumes {
            volume.optimal_io = rng.pick(&[8, 16, 32, 64]) << 10;
            volume.rotational = rng.percent(80);
            if rng.percent(80) {
                (volume.mode, volume.discard, volume.sequential_threshold) =
                    (Mode::WriteBack, false, 0);
            }
            volume.windows.truncate(1);
            let most = rng.pick(&[64 * KIB, 128 * KIB, 512 * KIB]);
            volume.windows[0].len = volume.windows[0].len.min(most);
        }
        if rng.percent(70) {
            (self.scenario, self.also) = (Scenario::Crashes, None);
        }
        self.primary.garbles = primary_may_garble(&self.volumes, self.scenario, self.also);
        self.primary.volatile = true;
        self.ram_bytes = rng.pick(&[0, 16 * KIB, 64 * KIB]);
        self.dirty_limit = Part::Percent(50);
        self.dirty_target = Part::Percent(rng.pick(&[0, 2, 10]));
        self.write_cache_depth = Duration::from_millis(rng.pick(&[20, 200, 30_000]));
        self.dirty_stripes = rng.pick(&[None, None, Some(2), Some(4)]);
        self
    }

    /// The same world with primaries whose links break, half of the time with another fault or with
    /// modes that are switched.
    fn restless(mut self) -> Self {
        let mut rng = Rng::new(self.seed ^ 0x4e57_1e55);
        self.restless = true;
        (self.scenario, self.also) = match rng.below(6) {
            0 => (Scenario::ModeSwitches, Some(Scenario::PrimaryReturns)),
            1 => (Scenario::PrimaryReturns, Some(Scenario::PrimaryWriteErrors)),
            2 => (Scenario::PrimaryReturns, Some(Scenario::PrimaryFlushErrors)),
            _ => (Scenario::PrimaryReturns, None),
        };
        self.patience = Duration::from_millis(rng.pick(&[50, 1_000, 30_000]));
        for volume in &mut self.volumes {
            volume.discard |= rng.percent(50);
        }
        self.primary.garbles = primary_may_garble(&self.volumes, self.scenario, self.also);
        self
    }

    /// The same world with volumes and a cache that change, half of the time with settings too. It
    /// has no other fault than crashes.
    fn steered(mut self) -> Self {
        let mut rng = Rng::new(self.seed ^ 0x0057_ee9d);
        let count = rng.pick(&[1, 2, 2, 3]);
        while self.volumes.len() < count {
            let volume = self.volumes[0].clone();
            self.volumes.push(volume);
        }
        self.scenario = if rng.percent(50) { Scenario::Crashes } else { Scenario::ModeSwitches };
        self.also = None;
        self.primary.garbles &= primary_may_garble(&self.volumes, self.scenario, None);
        let first_size = |volume: &VolumeSetup| match rng.percent(40) {
            true => volume.size,
            false => rng.within(1, volume.size / SECTOR_SIZE as u64) * SECTOR_SIZE as u64,
        };
        self.steered = Some(self.volumes.iter().map(first_size).collect());
        self
    }

    /// The same world as several kinds at once, with volumes that differ, and with settings that
    /// otherwise only switches of the mode bring.
    fn mixed(mut self) -> Self {
        let mut rng = Rng::new(self.seed ^ 0x000a_11ed);
        self.mixed = true;
        let ends = rng.percent(15);
        if rng.percent(40) {
            self = self.striped();
        }
        if ends {
            (self.scenario, self.also) = (Scenario::CacheEnds, None);
            self = self.in_order(true);
        } else if rng.percent(60) {
            self = self.in_order(false);
        }
        match rng.below(4) {
            _ if ends => {}
            0 => self = self.restless(),
            1 => {
                let faults = (self.scenario, self.also);
                self = self.steered();
                if rng.percent(50) {
                    (self.scenario, self.also) = faults;
                }
            }
            2 => (self.scenario, self.also) = (Scenario::Crashes, None),
            _ => {}
        }
        self.takeover = self.also.is_none() && self.scenario.spares_devices() && rng.percent(50);
        let part = |percent| Some(Part::Percent(percent));
        for volume in &mut self.volumes {
            if !ends && rng.percent(50) {
                volume.mode = rng.pick(&Mode::NAMES).1;
            }
            volume.ordered = volume.ordered.filter(|_| ends || rng.percent(70));
            volume.rotational = rng.percent(50);
            let (at_least, at_most) =
                rng.pick(&[(None, None), (None, part(5)), (part(40), None), (part(1), part(60))]);
            volume.cache_share = CacheShare { at_least, at_most };
            let (at_least, at_most) =
                rng.pick(&[(None, None), (part(30), None), (None, part(10)), (part(0), part(1))]);
            volume.share = DirtyShare { at_least, at_most };
            let latency = rng.pick(&[None, Some(50)]).map(Duration::from_micros);
            volume.pace = Pace { latency, rate: rng.pick(&[None, Some(4 << 20)]), stripe: None };
        }
        // Memory for fewer blocks than the device takes.
        let all = self.segments * u64::from(self.segment_size) / 4096;
        self.index_blocks = rng.pick(&[all / 4, all / 2, all, all * 3 / 2]);
        let idle = rng.pick(&[Some(0), Some(30), Some(5_000), None]);
        self.idle_destage = idle.map(Duration::from_millis);
        self.fill_rate = rng.pick(&[None, None, Some(1), Some(1 << 20)]);
        self.wear_budget = rng.pick(&[None, None, Some(1), Some(100 << 20)]);
        self.dirty_stripes = rng.pick(&[None, None, Some(1), Some(3)]);
        self.primary.garbles &= primary_may_garble(&self.volumes, self.scenario, self.also);
        self
    }

    /// Changes the number of segments of each shard, those of its log included.
    pub(crate) fn set_segments(&mut self, segments: u64) {
        self.segments = segments;
        self.index_blocks = segments * u64::from(self.segment_size) / 4096 * 3 / 2;
        self.cache.size = cache_bytes(self.shards, segments, self.segment_size);
    }

    /// Whether this fault is part of the run.
    #[must_use]
    pub fn meets(&self, scenario: Scenario) -> bool {
        self.scenario == scenario || self.also == Some(scenario)
    }

    /// The consequences that all faults of the run may have together.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let outcome = self.scenario.outcome();
        self.also.map_or(outcome, |also| outcome.and(also.outcome()))
    }

    /// Whether a 4 KiB block of this volume must never be torn after a crash.
    #[must_use]
    pub fn is_atomic(&self, volume: usize) -> bool {
        let setup = &self.volumes[volume];
        is_logged(setup.mode) && setup.sequential_threshold == 0 && !self.scenario.changes_modes()
    }

    /// Whether a fault may end the use of the cache.
    #[must_use]
    pub fn may_end_cache(&self) -> bool {
        self.scenario.may_end_cache() || self.also.is_some_and(Scenario::may_end_cache)
    }

    /// Whether a fault may change what the cache device holds.
    #[must_use]
    pub fn may_spoil_cache(&self) -> bool {
        self.may_end_cache() || self.meets(Scenario::CacheStale)
    }

    /// Whether the primary alone must be complete at all times.
    #[must_use]
    pub fn is_complete(&self, volume: usize) -> bool {
        use Mode::{PassThrough, WriteAround, WriteThrough};
        let mode = self.volumes[volume].mode;
        matches!(mode, PassThrough | WriteAround | WriteThrough) && !self.scenario.changes_modes()
    }
}

/// Whether every write in this mode goes through the log first.
fn is_logged(mode: Mode) -> bool {
    matches!(mode, Mode::WriteBack | Mode::WriteThrough | Mode::WriteOnly)
}

/// Whether the content of the primary alone is meaningless to the client.
fn is_back(mode: Mode) -> bool {
    matches!(mode, Mode::WriteBack | Mode::WriteOnly)
}

/// A second fault, of a device, in some of the runs that survive crashes. It uses random numbers of
/// its own, so that the rest of a seed stays unchanged.
fn second_fault(seed: u64, first: Scenario) -> Option<Scenario> {
    let mut rng = Rng::new(seed ^ 0x02fa_0175);
    let chance = if first == Scenario::Crashes { 0 } else { 50 };
    if !first.outcome().crashes || !rng.percent(chance) {
        return None;
    }
    Some(rng.pick(&Scenario::SECOND)).filter(|&also| also != first)
}

/// Uses random numbers of its own, so that the rest of a seed stays unchanged.
fn content(seed: u64) -> ContentLocality {
    if Rng::new(seed ^ 0x51a1_1a12).percent(40) {
        ContentLocality::Similar
    } else if Rng::new(seed ^ 0x0c0a_7e47).percent(75) {
        ContentLocality::Rewrite
    } else {
        ContentLocality::Independent
    }
}

fn mode_set(rng: &mut Rng) -> Vec<Mode> {
    match rng.below(10) {
        0..=4 => vec![Mode::WriteBack],
        5 => vec![Mode::WriteThrough],
        6 => vec![Mode::WriteAround],
        7 => vec![Mode::WriteOnly],
        8 => vec![Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround],
        _ => Mode::NAMES.iter().map(|&(_, mode)| mode).collect(),
    }
}

/// Whether the RAM tier compresses, and a size at which it compresses many blocks. Uses random
/// numbers of its own, so that the rest of a seed stays unchanged.
fn ram(seed: u64) -> (bool, Option<u64>) {
    let mut rng = Rng::new(seed ^ 0x0ca3_9ac4);
    let size = rng.pick(&[32 * KIB, 40 * KIB, 64 * KIB, 96 * KIB]);
    (rng.percent(75), rng.percent(40).then_some(size))
}

fn volume(rng: &mut Rng, mode: Mode, windows_max: u64) -> VolumeSetup {
    let sector = SECTOR_SIZE as u64;
    let stripes = rng.within(1, 4);
    let odd = if rng.percent(50) { 0 } else { rng.below(STRIPE_SIZE / sector / 2) * sector };
    let size = stripes * STRIPE_SIZE - odd;
    let count = rng.within(1, 4);
    let mut windows = Vec::new();
    for i in 0..count {
        let len = rng.pick(&[4 * KIB, 16 * KIB, 64 * KIB, 128 * KIB, windows_max]);
        let len = len.min(windows_max / count / 4096 * 4096).min(size);
        // The first window lies at the end of the volume, most others across a stripe boundary.
        let around = rng.within(0, stripes) * STRIPE_SIZE;
        let start = match i {
            0 => size - len,
            _ if rng.percent(70) => around.saturating_sub(len / 2 / 4096 * 4096),
            _ => rng.below(size / sector) * sector,
        };
        windows.push(ByteRange::new(start.min(size - len), len));
    }
    VolumeSetup {
        size,
        mode,
        sequential_threshold: rng.pick(&[0, 0, 0, 32 * KIB]),
        windows,
        filled: rng.percent(70),
        discard: rng.percent(70),
        rotational: rng.percent(50),
        optimal_io: 4096,
        share: DirtyShare::default(),
        cache_share: CacheShare::default(),
        pace: Pace::default(),
        ordered: None,
    }
}
