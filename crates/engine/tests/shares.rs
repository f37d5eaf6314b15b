//! Shares of the cache: a guarantee keeps the blocks of a volume that others would displace, and a
//! limit holds a volume to its part, with and without a store and with every eviction policy.

use std::ops::Range;
use std::time::Duration;

use forebay_block::testing::{Numbers, noise};
use forebay_block::{BLOCK_SIZE, ByteRange, IoBuf, IoFlags, IoOp, VolumeId};
use forebay_engine::testing::{Devices, Harness, config};
use forebay_engine::{
    CacheShare, Eviction, Part, Request, RequestId, Setting, Shard, ShardConfig, VolumeConfig,
    VolumeState,
};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes of a segment.
const SEGMENT: u64 = 256 << 10;
const SEGMENTS: u64 = 40;
/// Blocks of a request.
const PAGE: u64 = 4;
const ROOM: u64 = (SEGMENTS - 4) * SEGMENT / BLOCK;
const SIZE: u64 = 8000 * BLOCK;
const DB: VolumeId = VolumeId(0);
const SCAN: VolumeId = VolumeId(1);

/// A layout of the cache and an eviction policy.
type Kind = (Option<u32>, Eviction);

/// The log alone, and with a store, with every policy.
fn kinds() -> impl Iterator<Item = Kind> {
    let policies = || Eviction::NAMES.map(|(_, eviction)| eviction).into_iter();
    let layouts = [None, Some(8)].into_iter();
    layouts.flat_map(move |layout| policies().map(move |eviction| (layout, eviction)))
}

fn share(at_least: Option<u8>, at_most: Option<u8>) -> CacheShare {
    CacheShare { at_least: at_least.map(Part::Percent), at_most: at_most.map(Part::Percent) }
}

struct Bed {
    harness: Harness,
    numbers: Numbers,
}

impl Bed {
    /// A cache of two volumes, of which the first has this share.
    fn new((log_segments, eviction): Kind, cache_share: CacheShare) -> Self {
        let cache = SEGMENTS * SEGMENT;
        let all = config(cache, SIZE);
        let volume = |id, cache_share| VolumeConfig { id, cache_share, ..all.volumes[0].clone() };
        let volumes = vec![volume(DB, cache_share), volume(SCAN, CacheShare::default())];
        let ram_bytes = 64 * BLOCK;
        let (dirty_limit, dirty_target) = (Part::Percent(80), Part::Percent(90));
        let config = ShardConfig {
            log_segments,
            segment_size: SEGMENT as u32,
            eviction,
            volumes,
            ram_bytes,
            dirty_limit,
            dirty_target,
            ..all
        };
        let devices = Devices { primary: noise(1, SIZE as usize), ..Devices::new(cache, SIZE) };
        let harness = Harness::start(config, devices);
        let mut bed = Self { harness, numbers: Numbers::new(7) };
        bed.harness.settle();
        bed
    }

    /// Reads or writes a page, the four blocks from `PAGE * page` on.
    fn ask(&mut self, volume: VolumeId, op: IoOp, page: u64) {
        let range = ByteRange::new(page * PAGE * BLOCK, PAGE * BLOCK);
        let buf = match op {
            IoOp::Write => IoBuf::copy_of(&noise(page, range.len as usize)),
            _ => IoBuf::zeroed(range.len as usize),
        };
        let (id, flags) = (RequestId(1), IoFlags::default());
        self.harness.send(Request { id, volume, op, range, flags, buf, bypass: None });
        while self.harness.replies.is_empty() {
            self.harness.settle();
            self.harness.wait(Duration::from_micros(100));
        }
        let reply = self.harness.replies.pop().expect("there is one");
        assert!(reply.result.is_ok(), "{:?}", reply.result);
    }

    /// Reads `times` pages, chosen at random.
    fn read(&mut self, volume: VolumeId, pages: Range<u64>, times: u64) {
        for _ in 0..times {
            let page = pages.start + self.numbers.below(pages.end - pages.start);
            self.ask(volume, IoOp::Read, page);
        }
        self.harness.engine.check().expect("the counts are right");
    }

    fn state(&self, volume: VolumeId) -> VolumeState {
        self.harness.engine.volumes(self.harness.now).swap_remove(usize::from(volume.0))
    }

    fn held(&self, volume: VolumeId) -> u64 {
        self.state(volume).stats.cached_blocks
    }

    /// Lets turns pass; returns the most blocks of the database that left in one.
    fn rest(&mut self, turns: u64) -> u64 {
        let mut most = 0;
        for _ in 0..turns {
            self.harness.wait(Duration::from_millis(1));
            let before = self.held(DB);
            let ios = self.harness.poll();
            most = most.max(before.saturating_sub(self.held(DB)));
            ios.into_iter().for_each(|(target, io)| self.harness.finish(target, io));
        }
        self.harness.engine.check().expect("the counts are right");
        most
    }

    fn set(&mut self, volume: VolumeId, share: CacheShare) {
        self.harness.engine.set(Setting::CacheShare(volume, share));
    }

    /// The hits of reads of all of some pages, in percent.
    fn hit_percent(&mut self, volume: VolumeId, pages: Range<u64>) -> u64 {
        let (before, count) = (self.state(volume).stats.hits, pages.end - pages.start);
        pages.for_each(|page| self.ask(volume, IoOp::Read, page));
        (self.state(volume).stats.hits - before) * 100 / count
    }
}

/// Pages of the working set of the database, and those that its neighbor reads more frequently.
const WORKING_SET: Range<u64> = 0..125;
const NEIGHBOR: Range<u64> = 0..700;

/// A database fills the cache with its working set, and rests while another volume reads more than
/// fits: the hits of the database afterwards, in percent.
fn after_a_neighbor(kind: Kind, cache_share: CacheShare) -> u64 {
    let mut bed = Bed::new(kind, cache_share);
    bed.read(DB, WORKING_SET, 600);
    bed.read(SCAN, NEIGHBOR, 4_000);
    bed.hit_percent(DB, WORKING_SET)
}

#[test]
fn a_guarantee_keeps_the_working_set_that_a_neighbor_would_displace() {
    for kind in kinds() {
        let with = after_a_neighbor(kind, share(Some(30), None));
        let without = after_a_neighbor(kind, CacheShare::default());
        // Reclaim drops a quarter of a segment at least.
        let least = if kind.0.is_some() { 95 } else { 80 };
        assert!(with >= least && without <= 60, "{kind:?}: {with}% {without}%");
    }
}

#[test]
fn others_displace_blocks_down_to_the_guarantee_and_no_further() {
    for kind in kinds().filter(|kind| kind.0.is_some()) {
        let mut bed = Bed::new(kind, share(Some(10), None));
        bed.read(DB, WORKING_SET, 600);
        bed.read(SCAN, NEIGHBOR, 4_000);
        let (held, guarantee) = (bed.held(DB), bed.state(DB).cache_guarantee_blocks);
        assert_eq!(guarantee, ROOM / 10);
        assert!((guarantee..guarantee + 50).contains(&held), "{kind:?}: {held} of {guarantee}");
    }
}

#[test]
fn a_guarantee_yields_to_dirty_blocks() {
    for kind in kinds() {
        let mut bed = Bed::new(kind, share(Some(90), None));
        bed.read(DB, 0..520, 4_000);
        (0..400).for_each(|page| bed.ask(SCAN, IoOp::Write, page));
        let dirty = bed.state(SCAN).dirty_blocks;
        assert!(dirty > 400, "{kind:?}: {dirty}");
        assert!(bed.held(DB) > 400, "{kind:?}: {}", bed.held(DB));
    }
}

#[test]
fn a_volume_grows_to_its_guarantee_although_others_are_more_frequent() {
    for kind in kinds() {
        let mut bed = Bed::new(kind, share(Some(30), None));
        bed.read(SCAN, NEIGHBOR, 4_000);
        bed.read(DB, WORKING_SET, 1500);
        let (hits, held) = (bed.hit_percent(DB, WORKING_SET), bed.held(DB));
        assert!(hits >= 90, "{kind:?}: {hits}%, {held} held");
    }
}

#[test]
fn a_volume_at_its_guarantee_can_change_what_it_holds() {
    for kind in kinds() {
        let mut bed = Bed::new(kind, share(Some(20), None));
        bed.read(DB, 0..95, 1000);
        bed.read(SCAN, NEIGHBOR, 4_000);
        bed.read(DB, 500..595, 3000);
        let hits = bed.hit_percent(DB, 500..595);
        assert!(hits >= 60, "{kind:?}: {hits}%");
    }
}

#[test]
fn a_volume_at_its_limit_displaces_only_its_own_blocks() {
    for kind in kinds() {
        let mut bed = Bed::new(kind, CacheShare::default());
        bed.set(SCAN, share(None, Some(20)));
        bed.read(DB, WORKING_SET, 600);
        bed.read(SCAN, NEIGHBOR, 4_000);
        bed.rest(20);
        let (held, limit) = (bed.held(SCAN), ROOM * 20 / 100);
        assert_eq!(bed.state(SCAN).cache_limit_blocks, Some(limit));
        assert!((limit * 9 / 10..=limit).contains(&held), "{kind:?}: {held} of {limit}");
        let hits = bed.hit_percent(DB, WORKING_SET);
        // In a log alone the blocks that leave still take room until their segment is reclaimed.
        let least = if kind.0.is_some() { 95 } else { 70 };
        assert!(hits >= least, "{kind:?}: {hits}%");
        // It follows its working set, if the policy can choose.
        bed.read(SCAN, 1000..1080, 2_000);
        let hits = bed.hit_percent(SCAN, 1000..1080);
        let chooses = kind.0.is_some() || kind.1 == Eviction::Frequency;
        assert!(hits >= 60 || !chooses, "{kind:?}: {hits}%");
    }
}

#[test]
fn a_volume_above_a_lowered_limit_shrinks_in_small_steps() {
    for kind in kinds() {
        let mut bed = Bed::new(kind, CacheShare::default());
        bed.read(DB, 0..400, 4_000);
        let before = bed.held(DB);
        bed.set(DB, share(None, Some(10)));
        let most = bed.rest(200);
        let (held, limit) = (bed.held(DB), ROOM / 10);
        assert!(before > 1200 && held <= limit && held > limit / 2, "{kind:?}: {before} {held}");
        assert!(most <= 2 * 32 * 4, "{kind:?}: {most}");
    }
}

#[test]
fn dirty_blocks_exceed_a_limit_until_they_are_clean() {
    for kind in kinds() {
        let mut bed = Bed::new(kind, share(None, Some(10)));
        (0..150).for_each(|page| bed.ask(DB, IoOp::Write, page));
        bed.rest(50);
        assert_eq!((bed.held(DB), bed.state(DB).dirty_blocks), (600, 600), "{kind:?}");
        bed.harness.drain();
        bed.rest(200);
        assert!(bed.held(DB) <= ROOM / 10, "{kind:?}: {}", bed.held(DB));
    }
}
