//! Read misses: who shares a read of the primary, and what of it is kept.

use forebay_block::{ByteRange, ErrorKind, IoOp};

use super::*;
use crate::request::tests::Bed;
use crate::testing::VOLUME;
use crate::testing::rooms::{BLOCK, PRIMARY, PRIMARY_BLOCKS, content, key};

impl Bed {
    /// A bed whose primary has the content of these blocks.
    fn reading(blocks: std::ops::Range<u64>) -> Self {
        let mut bed = Self::new();
        for block in blocks {
            let at = (block * BLOCK) as usize;
            bed.rooms.devices.primary[at..at + BLOCK_SIZE].copy_from_slice(&content(block));
        }
        bed
    }

    /// Whether RAM has a block, and whether it is or will be in the log.
    fn kept(&mut self, block: u64) -> (bool, bool) {
        let admitted = self.rooms.log.builder().admits(key(block), 1);
        let cached = self.rooms.contents.get(key(block)).is_some();
        (self.rooms.ram.contains(key(block)), admitted || cached)
    }
}

#[test]
fn a_missed_block_is_read_from_the_primary_answered_and_kept() {
    let mut bed = Bed::reading(5..6);
    bed.read(5, 1);
    let read = bed.rooms.only();
    assert_eq!((read.0, read.1.op), (PRIMARY, IoOp::Read));
    assert_eq!(read.1.range, ByteRange::new(5 * BLOCK, BLOCK));
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(5));
    assert_eq!((bed.kept(5), bed.requests.fetches()), ((true, true), 0));
    assert!(!bed.rooms.contents.dirty().contains(key(5)));
}

#[test]
fn reads_that_miss_the_same_block_share_a_read_of_the_primary() {
    let mut bed = Bed::reading(4..8);
    let ids = [bed.read(5, 1), bed.read(4, 3), bed.read(6, 1)];
    let sent = bed.rooms.sent();
    let ranges = |(_, io): &(Target, Io)| (io.range.offset / BLOCK, io.range.len / BLOCK);
    assert_eq!(sent.iter().map(ranges).collect::<Vec<_>>(), [(5, 1), (4, 1), (6, 1)]);
    sent.into_iter().for_each(|read| bed.end(read, Ok(())));
    let answers = bed.rooms.answers();
    assert!(answers.iter().map(|reply| reply.id).eq([ids[0], ids[1], ids[2]]));
    assert_eq!(answers[1].buf.to_vec(), [content(4), content(5), content(6)].concat());
}

#[test]
fn a_read_that_overlaps_a_write_is_answered_but_not_kept() {
    // The write comes while the read is under way.
    let mut bed = Bed::reading(5..7);
    bed.read(5, 2);
    let read = bed.rooms.only();
    bed.write(5, &[1; BLOCK_SIZE]);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), [content(5), content(6)].concat());
    assert_eq!((bed.kept(5), bed.kept(6)), ((false, false), (true, true)));
    assert_eq!(bed.rooms.counters().stale_fills, 1);

    // It is there before, and has not come to RAM.
    let mut bed = Bed::reading(5..6);
    bed.write(5, &[1; BLOCK_SIZE]);
    bed.read(5, 1);
    let read = bed.rooms.only();
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(5));
    assert_eq!(bed.kept(5), (false, false));
}

#[test]
fn no_read_joins_one_that_a_write_has_overtaken() {
    let mut bed = Bed::reading(5..6);
    bed.rooms.set_mode(VOLUME, crate::api::Mode::WriteAround);
    bed.read(5, 1);
    let read = bed.rooms.only();
    bed.write(5, &[1; BLOCK_SIZE]);
    let write = bed.rooms.only();
    bed.end(write, Ok(()));
    bed.answered();
    bed.read(5, 1);
    let again = bed.rooms.only();
    assert_eq!((again.0, again.1.op), (PRIMARY, IoOp::Read), "the first may bring the old bytes");
    bed.end(read, Ok(()));
    bed.answered();
    assert_eq!(bed.kept(5), (false, false));
    bed.end(again, Ok(()));
    assert_eq!(bed.bytes(), [1; BLOCK_SIZE]);
}

#[test]
fn a_block_on_its_way_to_the_primary_is_not_kept_by_a_read_miss() {
    // A discard took it out of the cache after it had set out.
    let mut bed = Bed::reading(5..6);
    bed.rooms.dirty_durable([5]);
    bed.rooms.contents.begin_destaging(key(5));
    bed.rooms.forget(5);
    bed.read(5, 1);
    let read = bed.rooms.only();
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(5));
    assert_eq!(bed.kept(5), (false, false));
    bed.rooms.contents.end_destaging(key(5), None);
    bed.read(5, 1);
    let read = bed.rooms.only();
    bed.end(read, Ok(()));
    assert_eq!(bed.kept(5), (true, true));
}

#[test]
fn a_block_that_the_log_got_meanwhile_keeps_its_newer_version() {
    let mut bed = Bed::reading(5..6);
    bed.read(5, 1);
    let read = bed.rooms.only();
    bed.rooms.dirty([5]);
    bed.end(read, Ok(()));
    assert!(!bed.kept(5).0, "the bytes are older than the log's");
    assert!(bed.rooms.log.builder().is_empty());
}

#[test]
fn reads_that_go_past_the_cache_bring_nothing_into_it() {
    let mut bed = Bed::reading(5..6);
    bed.rooms.set_mode(VOLUME, crate::api::Mode::WriteOnly);
    bed.read(5, 1);
    let read = bed.rooms.only();
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(5));
    assert_eq!(bed.kept(5), (false, false));
}

#[test]
fn an_error_reaches_every_read_that_waits_and_nothing_is_kept() {
    let mut bed = Bed::new();
    let ids = [1, 2].map(|_| bed.read(5, 1));
    let read = bed.rooms.only();
    bed.end(read, Err(ErrorKind::Media.into()));
    assert_eq!(bed.answered(), ids.map(|id| (id, Some(ErrorKind::Media))));
    assert_eq!(bed.kept(5), (false, false));
}

#[test]
fn a_read_that_joined_a_longer_one_which_failed_tries_its_own_blocks() {
    let mut bed = Bed::reading(5..8);
    let long = bed.read(5, 3);
    let short = bed.read(6, 1);
    let read = bed.rooms.only();
    bed.end(read, Err(ErrorKind::Media.into()));
    assert_eq!(bed.answered(), [(long, Some(ErrorKind::Media))]);
    let read = bed.rooms.only();
    assert_eq!(read.1.range, ByteRange::new(6 * BLOCK, BLOCK));
    bed.end(read, Ok(()));
    assert_eq!(bed.answered(), [(short, None)]);
}

#[test]
fn the_short_last_block_of_a_volume_is_kept_with_zeros_behind_it() {
    let last = PRIMARY_BLOCKS - 1;
    let mut bed = Bed::reading(last..last + 1);
    bed.rooms.volume_mut(VOLUME).config.size -= BLOCK - 512;
    bed.submit(IoOp::Read, ByteRange::new(last * BLOCK, 512), &[], false);
    let read = bed.rooms.only();
    assert_eq!(read.1.range.len, 512);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(last)[..512]);
    let padded = bed.rooms.ram.peek(key(last), <[u8]>::to_vec).expect("it is kept");
    assert!(padded[..512] == content(last)[..512] && padded[512..].iter().all(|&byte| byte == 0));
}

#[test]
fn what_lies_around_a_miss_of_a_slow_primary_goes_to_the_log_and_not_into_ram() {
    let mut bed = Bed::reading(0..64);
    for block in [900, 950, 999] {
        bed.read(block, 1);
        let read = bed.rooms.only();
        bed.rooms.now = bed.rooms.now + std::time::Duration::from_millis(10);
        bed.end(read, Ok(()));
    }
    bed.answered();
    let before = bed.rooms.counters().read_around_blocks;
    bed.read(20, 1);
    let read = bed.rooms.only();
    let blocks = read.1.range.blocks();
    assert!(blocks.count > 1 && blocks.contains(20), "{blocks:?}");
    // One of them is being written.
    let other = blocks.iter().find(|&block| block != 20).expect("there are others");
    assert!(bed.rooms.locks.acquire(key(other), Id(99)));
    bed.requests.spoil_fetch(key(other));
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(20));
    for block in blocks.iter() {
        let expected = if block == other { (false, false) } else { (block == 20, true) };
        assert_eq!(bed.kept(block), expected, "block {block}");
    }
    assert_eq!(bed.rooms.counters().read_around_blocks - before, blocks.count - 2);
}

#[test]
fn a_prefetch_reads_what_is_missing_straight_into_the_log() {
    let mut bed = Bed::reading(4..9);
    bed.rooms.dirty([6]);
    let id = bed.prefetch(4, 5);
    let sent = bed.rooms.sent();
    let ranges = |(target, io): &(Target, Io)| (*target, io.range.offset / BLOCK, io.range.len);
    let wanted = [(PRIMARY, 4, 2 * BLOCK), (PRIMARY, 7, 2 * BLOCK)];
    assert_eq!(sent.iter().map(ranges).collect::<Vec<_>>(), wanted);
    sent.into_iter().for_each(|read| bed.end(read, Ok(())));
    assert_eq!(bed.answered(), [(id, None)]);
    for block in [4, 5, 7, 8] {
        assert_eq!(bed.kept(block), (false, true), "{block}");
    }
    let counters = bed.rooms.counters();
    assert_eq!(counters.prefetched_blocks, 4);
    let of_reads = (counters.lookups, counters.reads, counters.primary_read_blocks);
    assert_eq!(of_reads, (0, 0, 0), "no client has read");
    // What is there already is not read again.
    let id = bed.prefetch(4, 5);
    assert_eq!((bed.answered(), bed.rooms.sent().len()), (vec![(id, None)], 0));
}

#[test]
fn a_prefetch_does_not_bring_in_what_a_write_has_overtaken() {
    let mut bed = Bed::reading(5..6);
    bed.prefetch(5, 1);
    let read = bed.rooms.only();
    bed.write(5, &[1; BLOCK_SIZE]);
    bed.end(read, Ok(()));
    assert_eq!(bed.rooms.counters().prefetched_blocks, 0);
    assert!(bed.rooms.ram.contains(key(5)) || bed.rooms.contents.get(key(5)).is_none());
}

#[test]
fn a_client_that_joins_a_prefetch_gets_its_data() {
    let mut bed = Bed::reading(5..7);
    let prefetch = bed.prefetch(5, 2);
    let read = bed.read(6, 1);
    let fetch = bed.rooms.only();
    bed.end(fetch, Ok(()));
    let answers = bed.rooms.answers();
    let ids: Vec<_> = answers.iter().map(|reply| reply.id).collect();
    assert_eq!(ids, [prefetch, read]);
    assert_eq!(answers[1].buf.to_vec(), content(6));
    assert!(answers[0].buf.is_empty());
}

#[test]
fn a_prefetch_reads_nothing_while_nothing_may_enter() {
    let mut bed = Bed::reading(4..9);
    bed.rooms.set_fill_rate(Some(BLOCK));
    let ids = [bed.prefetch(4, 2), bed.prefetch(6, 2)];
    // Those that have begun all enter, although the first one takes all that the rate allows.
    for read in bed.rooms.sent() {
        bed.end(read, Ok(()));
    }
    assert_eq!(bed.answered(), ids.map(|id| (id, None)));
    assert_eq!(bed.rooms.counters().prefetched_blocks, 4);
    let refused = bed.prefetch(8, 1);
    assert_eq!(bed.answered(), [(refused, Some(ErrorKind::NoSpace))]);
    let cached = bed.prefetch(4, 4);
    assert_eq!((bed.answered(), bed.rooms.sent().len()), (vec![(cached, None)], 0));
}

#[test]
fn a_prefetch_says_when_nothing_may_enter_or_nothing_can_be_read() {
    let mut bed = Bed::reading(5..6);
    bed.prefetch(5, 1);
    let read = bed.rooms.only();
    bed.end(read, Err(ErrorKind::Media.into()));
    assert_eq!(bed.answered()[0].1, Some(ErrorKind::Media));
    bed.rooms.set_mode(VOLUME, crate::api::Mode::PassThrough);
    bed.prefetch(5, 1);
    assert_eq!(bed.answered()[0].1, Some(ErrorKind::Unsupported));
}
