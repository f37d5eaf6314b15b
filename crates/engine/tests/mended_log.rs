//! A log that was damaged at rest: what is served of it is the newest version or an error; where
//! that cannot be told the start is refused, and with the word given nothing but older versions of
//! the same block comes back. What was found stays so over restarts and reclaim.
#![allow(clippy::unwrap_used, reason = "a test ends at the first thing it did not expect")]

#[path = "support/world.rs"]
mod world;

use forebay_block::BLOCK_SIZE;
use forebay_block::testing::Numbers;
use forebay_engine::testing::SEGMENT;
use forebay_engine::{Shard, State, Trust};
use forebay_format::decode_record;
use world::{AREA, BLOCK, BLOCKS, Devices, World, blank, content};

/// A log with clean and dirty blocks, and the newest version of each block.
fn filled(seed: u64) -> (Devices, Vec<u64>) {
    let mut world = World::start(blank(), true, Trust::Full, false, 1);
    let (mut numbers, mut newest) = (Numbers::new(seed), vec![0; BLOCKS as usize]);
    for n in 0..1200 {
        let block = numbers.below(BLOCKS);
        newest[block as usize] += 1;
        world.write(block, newest[block as usize]);
        if n == 500 {
            world.drain();
        }
        if numbers.below(20) == 0 || n > 1190 {
            world.flush();
        }
    }
    world.flush();
    (world.into_devices(), newest)
}

/// Damages places of segments that are followed by others.
fn damage(cache: &mut [u8], seed: u64) {
    let mut numbers = Numbers::new(seed ^ 0xdada);
    let segments = AREA / u64::from(SEGMENT);
    let seq = |i: &u64| {
        let at = (*i * u64::from(SEGMENT)) as usize;
        decode_record(&cache[at..at + BLOCK_SIZE]).map_or(0, |record| record.header.seq.0)
    };
    let newest = (0..segments).max_by_key(seq).unwrap();
    for _ in 0..1 + numbers.below(4) {
        let segment = numbers.below(segments);
        if segment == newest {
            continue;
        }
        let start = segment * u64::from(SEGMENT);
        let last = u64::from(SEGMENT) - BLOCK;
        let (at, len) = match numbers.below(5) {
            0 => (0, u64::from(SEGMENT)),
            1 => (last, BLOCK),
            2 => (numbers.below(16) * BLOCK, 64),
            3 => (numbers.below(u64::from(SEGMENT)), 1),
            _ => (numbers.below(8) * BLOCK, 8 * BLOCK),
        };
        for at in start + at..start + at + len {
            cache[at as usize] ^= 0xff;
        }
    }
}

/// What is served after the damage stays the same over a restart, a drain and reclaim.
fn stays(mut world: World, seed: u64) {
    let served = world.versions();
    world.flush();
    let mut world = World::start(world.into_devices(), false, Trust::Full, false, 3);
    assert_eq!(*world.engine.state(), State::Serving, "seed {seed}: after the restart");
    assert_eq!(world.versions(), served, "seed {seed}: after the restart");
    world.drain();
    for block in (0..BLOCKS).filter(|&block| served[block as usize].is_some()) {
        let at = (block * BLOCK) as usize;
        let expected = content(block, served[block as usize].unwrap());
        assert!(world.devices.primary[at..at + BLOCK_SIZE] == expected, "seed {seed}: {block}");
    }
    // Twice around the log.
    for n in 0..3000 {
        world.write(1000 + n % 2900, n + 1);
        if n % 100 == 0 {
            world.flush();
            world.drain();
        }
    }
    world.flush();
    assert_eq!(world.versions(), served, "seed {seed}: after reclaim");
    let mut world = World::start(world.into_devices(), false, Trust::Full, false, 4);
    assert_eq!(world.versions(), served, "seed {seed}: after reclaim and a restart");
    for block in (0..BLOCKS).filter(|&block| served[block as usize].is_none()) {
        world.write(block, 1);
        assert_eq!(world.version(block), Some(1), "seed {seed}: it can be written again");
    }
}

#[test]
fn damage_at_rest_is_an_error_or_a_refusal_and_never_silently_old() {
    let (mut refused, mut fenced, mut whole) = (0, 0, 0);
    for seed in 0..60 {
        let (mut devices, newest) = filled(seed / 10);
        damage(&mut devices.cache, seed);
        let mut world = World::start(devices.clone(), false, Trust::Full, false, 2);
        let accepted = matches!(world.engine.state(), State::Refused(_));
        if accepted {
            refused += 1;
            assert!(world.devices.cache == devices.cache, "seed {seed}: a refusal writes nothing");
            world = World::start(devices.clone(), false, Trust::Full, true, 2);
            assert!(!world.engine.lost_records().is_empty(), "seed {seed}: what is it for");
        }
        assert_eq!(*world.engine.state(), State::Serving, "seed {seed}");
        let served = world.versions();
        for (block, (found, newest)) in served.iter().zip(&newest).enumerate() {
            let old = found.is_some_and(|found| found < *newest);
            assert!(!old || accepted, "seed {seed}: block {block}: {found:?} for {newest}");
        }
        fenced += served.iter().filter(|found| found.is_none()).count();
        whole += u64::from(!accepted && served.iter().all(Option::is_some));
        let lost: u64 = world.engine.lost_ranges(1 << 20).iter().map(|lost| lost.range.len).sum();
        let errors = served.iter().filter(|found| found.is_none()).count() as u64;
        assert_eq!(lost, errors * BLOCK, "seed {seed}: the list is what cannot be read");
        stays(world, seed);
        // As `forebay salvage` does it: nothing is written to the cache.
        let mut world = World::start(devices.clone(), false, Trust::DirtyOnly, true, 2);
        world.drain();
        assert!(world.devices.cache == devices.cache, "seed {seed}: a salvage writes nothing");
    }
    assert!(refused > 3 && fenced > 10 && whole > 3, "{refused}, {fenced}, {whole}");
}
