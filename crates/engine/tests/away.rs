//! Writes that would go past the cache while the primary is away: the cache takes them.
#![allow(clippy::unwrap_used, reason = "a test ends at the first thing it did not expect")]

#[path = "support/world.rs"]
mod world;

use forebay_block::{ByteRange, IoBuf, IoFlags, IoOp, VolumeId};
use forebay_engine::{Bypass, Mode, Request, RequestId, Setting, Shard, Trust};
use world::{BLOCK, World, blank, content};

/// Submits a change of blocks 100 to 199 that goes past the cache; returns whether it succeeded.
fn change(world: &mut World, op: IoOp) -> bool {
    let bytes: Vec<u8> = (100..200).flat_map(|block| content(block, 1)).collect();
    world.send(Request {
        id: RequestId(7),
        volume: VolumeId(0),
        op,
        range: ByteRange::new(100 * BLOCK, 100 * BLOCK),
        flags: IoFlags::default(),
        buf: if op == IoOp::Write { IoBuf::copy_of(&bytes) } else { IoBuf::empty() },
        bypass: (op == IoOp::Write).then_some(Bypass::Sequential),
    });
    world.settle();
    world.replies.pop().unwrap().result.is_ok()
}

#[test]
fn a_stream_goes_to_the_cache_while_the_primary_is_away() {
    for op in [IoOp::Write, IoOp::WriteZeroes] {
        let mut world = World::start(blank(), true, Trust::Full, false, 1);
        for block in 100..200 {
            world.write(block, 2);
        }
        world.drain();
        world.away = true;
        // The first one finds out; the second one does not ask.
        assert!(change(&mut world, op) && change(&mut world, op), "{op:?}");
        let expected = u64::from(op == IoOp::Write);
        let versions = |world: &mut World| (100..200).map(|block| world.version(block)).collect();
        let found: Vec<_> = versions(&mut world);
        assert!(found.iter().all(|&version| version == Some(expected)), "{op:?}: {found:?}");
        world.away = false;
        world.drain();
        let first = (100 * BLOCK) as usize;
        let on_primary = &world.devices.primary[first..first + BLOCK as usize];
        assert_eq!(on_primary, &content(100, expected)[..], "{op:?}");
    }
}

#[test]
fn where_the_primary_has_to_be_complete_they_fail() {
    let mut world = World::start(blank(), true, Trust::Full, false, 1);
    world.engine.set(Setting::Mode(VolumeId(0), Mode::WriteThrough));
    world.flush();
    world.away = true;
    assert!(!change(&mut world, IoOp::Write));
}
