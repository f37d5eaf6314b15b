//! A primary that was changed without the cache: the change is found and clean blocks are no longer
//! served, while no dirty block is lost and no clean block comes back after a crash.
#![allow(clippy::unwrap_used, reason = "a test ends at the first thing it did not expect")]

#[path = "support/world.rs"]
mod world;

use forebay_block::{Instant, VolumeId};
use forebay_engine::{Event, Shard, Trust};
use world::{BLOCK, BLOCKS, Devices, World, blank, content};

/// A cache whose blocks are clean in version 1; every tenth is dirty in version 2.
fn used() -> World {
    let mut world = World::start(blank(), true, Trust::Full, false, 1);
    for block in 0..BLOCKS {
        world.write(block, 1);
    }
    world.flush();
    world.drain();
    // The log records cleanness for whole segments, so the following writes go into a new one.
    world.stop();
    let mut world = World::start(world.into_devices(), false, Trust::Full, false, 2);
    for block in (0..BLOCKS).step_by(10) {
        world.write(block, 2);
    }
    world.flush();
    world
}

/// Lets time pass; returns the events.
fn pass(world: &mut World, seconds: u64) -> Vec<Event> {
    let mut events = Vec::new();
    for _ in 0..seconds * 100 {
        world.settle();
        events.append(&mut world.fx.events);
        world.now = Instant(world.now.0 + 10_000_000);
    }
    events
}

fn change(devices: &mut Devices, block: u64) {
    let at = (block * BLOCK) as usize;
    devices.primary[at..at + BLOCK as usize].copy_from_slice(&content(block, 7));
}

fn found(events: &[Event]) -> Vec<&Event> {
    events.iter().filter(|e| matches!(e, Event::PrimaryChanged { .. })).collect()
}

#[test]
fn a_change_is_found_and_nothing_clean_is_served_after_it() {
    let mut devices = used().into_devices();
    for block in (0..BLOCKS).filter(|block| block % 10 != 0) {
        change(&mut devices, block);
    }
    let mut world = World::start_suspect(devices, 3);
    let events = pass(&mut world, 20);
    assert_eq!(found(&events).len(), 1, "{events:?}");
    let state = &world.engine.volumes(world.now)[0];
    assert!(state.changed && state.id == VolumeId(0));
    // A crash does not bring the old block back, whether or not the next start is suspicious.
    let devices = world.devices.clone();
    let next = World::start(devices, false, Trust::Full, false, 4);
    for mut world in [world, next] {
        for block in 0..BLOCKS {
            let expected = if block % 10 == 0 { 2 } else { 7 };
            assert_eq!(world.version(block), Some(expected), "block {block}");
        }
    }
}

/// A read that the primary does not answer compares nothing: the same blocks are compared when it
/// is back, even if no client sends it a request.
#[test]
fn what_was_not_compared_while_the_primary_was_away_is_when_it_is_back() {
    // The first round is compared in the turn of the start.
    let mut world = World::start_suspect(used().into_devices(), 3);
    for block in (0..BLOCKS).filter(|block| block % 10 != 0) {
        change(&mut world.devices, block);
    }
    world.away = true;
    let events = pass(&mut world, 60);
    assert!(found(&events).is_empty(), "{events:?}");
    assert!(world.engine.volumes(world.now)[0].primary.away_since.is_some());
    world.away = false;
    let events = pass(&mut world, 20);
    assert_eq!(found(&events).len(), 1, "{events:?}");
    assert!(world.engine.volumes(world.now)[0].primary.away_since.is_none());
}

/// The blocks of a round with a sector that the primary cannot read counted as compared.
#[test]
fn only_the_block_that_the_primary_cannot_read_is_not_compared() {
    let devices = used().into_devices();
    let clean = BLOCKS - BLOCKS.div_ceil(10);
    for unreadable in [None, Some(33 * BLOCK)] {
        let mut world = World::start_suspect(devices.clone(), 3);
        world.unreadable = unreadable;
        let events = pass(&mut world, 30);
        let compared = events.iter().find_map(|event| match event {
            Event::Compared { blocks, .. } => Some(*blocks),
            _ => None,
        });
        assert_eq!(compared, Some(clean - u64::from(unreadable.is_some())));
    }
}

#[test]
fn what_is_read_while_clean_blocks_are_dropped_is_the_primarys() {
    let mut devices = used().into_devices();
    change(&mut devices, 33);
    let mut world = World::start_suspect(devices, 3);
    world.engine.distrust(VolumeId(0));
    assert_eq!(world.version(33), Some(7), "at once, before the log knows of it");
    assert_eq!(world.version(30), Some(2), "dirty blocks are only here");
    world.write(33, 8);
    assert_eq!(world.version(33), Some(8));
    pass(&mut world, 1);
    assert_eq!((world.version(33), world.version(30)), (Some(8), Some(2)));
}

#[test]
fn an_unchanged_primary_keeps_its_clean_blocks_while_clients_write() {
    let mut world = World::start_suspect(used().into_devices(), 3);
    let mut events = Vec::new();
    for version in 3..200 {
        for block in [11, 12, 13, version % BLOCKS] {
            world.write(block, version);
        }
        events.append(&mut pass(&mut world, 1));
        world.engine.set_drain(version % 2 == 0);
    }
    assert!(found(&events).is_empty(), "{events:?}");
    let compared = events.iter().find_map(|event| match event {
        Event::Compared { blocks, .. } => Some(*blocks),
        _ => None,
    });
    assert!(compared > Some(BLOCKS / 2), "{compared:?} blocks were compared");
}
