//! Force unit access past the log: the change comes first, then a flush. The flush passes the flush
//! gate like all others, so that a failure is reported to every shard.
#![allow(clippy::unwrap_used, reason = "a test ends at the first thing it did not expect")]

#[path = "support/world.rs"]
mod world;

use forebay_block::{ByteRange, ErrorKind, IoBuf, IoFlags, IoOp, VolumeId};
use forebay_engine::{Mode, Request, RequestId, Setting, Shard, Target, Trust};
use world::{BLOCK, World, blank, content};

/// Writes a block with force unit access in write-around mode. Returns the operations that the
/// primary got before the answer, and whether the answer was a success.
fn write(flush_fails: bool) -> (Vec<IoOp>, bool) {
    let mut world = World::start(blank(), true, Trust::Full, false, 1);
    world.engine.set(Setting::Mode(VolumeId(0), Mode::WriteAround));
    world.flush();
    let request = Request {
        id: RequestId(7),
        volume: VolumeId(0),
        op: IoOp::Write,
        range: ByteRange::new(5 * BLOCK, BLOCK),
        flags: IoFlags { fua: true, ..IoFlags::default() },
        buf: IoBuf::copy_of(&content(5, 1)),
        bypass: None,
    };
    world.send(request);
    let mut asked = Vec::new();
    for _ in 0..100 {
        let ios = world.poll();
        if let Some(reply) = world.replies.pop() {
            return (asked, reply.result.is_ok());
        }
        for (target, io) in ios {
            assert!(!io.flags.fua, "{target:?} {:?}: a flush that hides in it", io.op);
            let primary = matches!(target, Target::Primary(_));
            let fails = primary && io.op == IoOp::Flush && flush_fails;
            if primary {
                asked.push(io.op);
            }
            let result = if fails { Err(ErrorKind::Media.into()) } else { Ok(()) };
            world.complete(target, io.complete(result));
        }
    }
    panic!("it is not answered");
}

#[test]
fn a_flush_follows_a_write_with_fua_and_the_answer_waits_for_it() {
    assert_eq!(write(false), (vec![IoOp::Write, IoOp::Flush], true));
    assert_eq!(write(true), (vec![IoOp::Write, IoOp::Flush], false));
}

/// The number of failed flushes that had been reported to the shard when the primary completed the
/// operation, according to the reply.
fn known_failures(world: &mut World, op: IoOp, fua: bool) -> Option<u64> {
    let request = Request {
        id: RequestId(7),
        volume: VolumeId(0),
        op,
        range: ByteRange::new(5 * BLOCK, BLOCK),
        flags: IoFlags { fua, ..IoFlags::default() },
        buf: if op == IoOp::Write { IoBuf::copy_of(&content(5, 1)) } else { IoBuf::empty() },
        bypass: None,
    };
    world.send(request);
    for _ in 0..100 {
        let ios = world.poll();
        if let Some(reply) = world.replies.pop() {
            assert!(reply.result.is_ok());
            return reply.direct;
        }
        for (target, io) in ios {
            world.complete(target, io.complete(Ok(())));
        }
    }
    panic!("it is not answered");
}

#[test]
fn a_direct_write_says_which_failed_flushes_came_before_it() {
    let mut world = World::start(blank(), true, Trust::Full, false, 1);
    world.engine.set(Setting::Mode(VolumeId(0), Mode::WriteAround));
    for failures in 0..3 {
        assert_eq!(known_failures(&mut world, IoOp::Write, false), Some(failures));
        assert_eq!(known_failures(&mut world, IoOp::WriteZeroes, false), Some(failures));
        assert_eq!(known_failures(&mut world, IoOp::Write, true), None, "it is flushed");
        let target = Target::Primary(VolumeId(0));
        let error = ErrorKind::Media.into();
        world.flush_failed(target, &error);
    }
    world.engine.set(Setting::Mode(VolumeId(0), Mode::WriteBack));
    assert_eq!(known_failures(&mut world, IoOp::Write, false), None, "it is in the log");
}
