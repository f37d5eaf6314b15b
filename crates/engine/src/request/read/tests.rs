//! Where a block is read from, and what happens if it cannot be.

use forebay_block::{Io, IoOp};
use forebay_format::{PAGE, decode_record};

use super::*;
use crate::api::{Bypass, Target};
use crate::request::tests::Bed;
use crate::testing::VOLUME;
use crate::testing::rooms::{BLOCK, PRIMARY, content, key};
use forebay_policy::Standing;

impl Bed {
    /// A bed without RAM, in whose log these blocks are dirty.
    fn dirty(blocks: impl IntoIterator<Item = u64>) -> Self {
        let mut bed = Self::with_ram(0);
        bed.rooms.dirty_durable(blocks);
        bed
    }

    /// The next I/O, which must be a read.
    fn read_of(&mut self, target: Target) -> (Target, Io) {
        let read = self.rooms.only();
        assert_eq!((read.0, read.1.op), (target, IoOp::Read));
        read
    }
}

#[test]
fn neighbors_of_a_record_are_read_with_one_request() {
    let mut bed = Bed::dirty([5, 6, 7]);
    bed.read(5, 3);
    let read = bed.read_of(Target::Cache);
    assert_eq!(read.1.range.len, 3 * BLOCK);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), [content(5), content(6), content(7)].concat());
}

/// No byte of such a block is copied: where the client's buffer is, the answer must be.
#[test]
fn a_block_stored_as_it_is_is_read_into_the_buffer_of_the_client() {
    for (count, spoilt, lends) in [(1, false, true), (1, true, true), (2, false, false)] {
        let mut bed = Bed::with_ram(0);
        bed.rooms.clean(5..5 + count);
        if spoilt {
            bed.rooms.spoil(5);
        }
        let buf = IoBuf::zeroed((count * BLOCK) as usize);
        let mine = buf.as_ptr();
        bed.read_into(buf, 5);
        let read = bed.read_of(Target::Cache);
        assert_eq!(read.1.buf.as_ptr() == mine, lends);
        bed.end(read, Ok(()));
        if spoilt {
            let read = bed.read_of(PRIMARY);
            bed.end(read, Ok(()));
        }
        let answer = bed.rooms.fx.replies.last().expect("it is answered");
        assert_eq!(answer.buf.as_ptr(), mine);
        let on_primary = |_| vec![0; BLOCK_SIZE];
        let blocks = 5..5 + count;
        let expected: Vec<u8> = match spoilt {
            true => blocks.flat_map(on_primary).collect(),
            false => blocks.flat_map(content).collect(),
        };
        assert!(bed.bytes() == expected, "{count} blocks, spoilt: {spoilt}");
    }
}

#[test]
fn a_read_of_hits_and_misses_is_answered_when_all_parts_are_there() {
    let mut bed = Bed::dirty([6]);
    let id = bed.read(5, 3);
    let mut sent = bed.rooms.sent();
    assert_eq!(sent.len(), 3, "blocks 5 and 7 of the primary, 6 of the cache device");
    while let Some(read) = sent.pop() {
        assert!(bed.answered().is_empty());
        bed.end(read, Ok(()));
    }
    assert_eq!(bed.answered(), [(id, None)]);
    let stats = bed.rooms.cache.stats(forebay_block::Instant::default());
    assert_eq!((stats.partial_hits, stats.lookups), (1, 1));
}

#[test]
fn bytes_of_a_write_that_has_no_place_in_the_log_are_not_seen() {
    let mut bed = Bed::new();
    bed.rooms.dirty_durable([5]);
    bed.write(5, &[1; BLOCK_SIZE]);
    bed.log();
    assert!(bed.rooms.ram.contains(key(5)), "they are in RAM already");
    bed.read(5, 1);
    let read = bed.read_of(Target::Cache);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(5));
    bed.close();
    bed.read(5, 1);
    assert_eq!(bed.bytes(), [1; BLOCK_SIZE], "the index has the version");
}

#[test]
fn a_block_that_is_read_while_it_is_written_does_not_come_into_ram() {
    let mut bed = Bed::new();
    bed.rooms.dirty_durable([5]);
    bed.read(5, 1);
    let read = bed.read_of(Target::Cache);
    bed.write(5, &[1; BLOCK_SIZE]);
    bed.end(read, Ok(()));
    assert!(!bed.rooms.ram.contains(key(5)));
}

#[test]
fn a_block_whose_record_is_on_its_way_is_read_when_that_is_written() {
    let mut bed = Bed::with_ram(0);
    bed.write(5, &content(5));
    let record = bed.close();
    bed.read(5, 1);
    assert!(bed.rooms.fx.ios.is_empty());
    bed.end(record, Ok(()));
    bed.answered();
    let read = bed.read_of(Target::Cache);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(5));
    assert_eq!(bed.rooms.counters().ssd_hit_blocks, 1, "it was looked up twice and read once");
}

#[test]
fn a_block_whose_record_could_not_be_written_is_read_from_memory() {
    let mut bed = Bed::with_ram(0);
    bed.write(5, &content(5));
    let record = bed.close();
    let (sent, done) = bed.rooms.end(record, Err(ErrorKind::Media.into()));
    let crate::ticket::Ticket::Record { lsn, .. } = sent.ticket else { panic!("{sent:?}") };
    bed.rooms.log.fail_record(lsn, done.buf);
    bed.read(5, 1);
    assert_eq!(bed.bytes(), content(5));
}

#[test]
fn a_dirty_block_with_bad_bytes_is_fenced_and_never_read_from_the_primary() {
    let mut bed = Bed::dirty([5]);
    bed.rooms.spoil(5);
    let id = bed.read(5, 1);
    let read = bed.read_of(Target::Cache);
    bed.end(read, Ok(()));
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::Corrupt))]);
    assert!(bed.rooms.contents.fenced().contains(&key(5)));
    let id = bed.read(5, 1);
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::Corrupt))]);
    assert!(bed.rooms.fx.ios.is_empty());
}

#[test]
fn a_dirty_block_that_cannot_be_read_is_not_fenced_and_leads_to_a_probe() {
    let mut bed = Bed::dirty([5]);
    let id = bed.read(5, 1);
    let read = bed.read_of(Target::Cache);
    bed.end(read, Err(ErrorKind::Media.into()));
    assert_eq!(bed.answered(), [(id, Some(ErrorKind::Media))]);
    assert!(bed.rooms.contents.fenced().is_empty());
    assert_eq!(bed.rooms.only().1.op, IoOp::Write, "can the device be written?");
}

#[test]
fn a_clean_block_with_bad_bytes_is_dropped_in_the_log_and_read_from_the_primary() {
    let mut bed = Bed::with_ram(0);
    bed.rooms.clean([5]);
    bed.rooms.spoil(5);
    bed.read(5, 1);
    let read = bed.read_of(Target::Cache);
    bed.end(read, Ok(()));
    let read = bed.read_of(PRIMARY);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), [0; BLOCK_SIZE], "the primary's bytes");
    let next = bed.rooms.log.next_lsn();
    assert_eq!(bed.rooms.log.barrier(), next, "a direct write must find this durable");
    let record = decode_record(&bed.close().1.buf[..PAGE]).expect("it is a record");
    assert_eq!(record.entries[0].kind, EntryKind::Invalidate);
    assert_eq!(bed.rooms.contents.get(key(5)), None);
    assert_eq!(bed.rooms.counters().corrupt_clean, 1);
}

#[test]
fn a_block_that_moved_while_it_was_read_is_looked_up_again() {
    let mut bed = Bed::dirty([5]);
    bed.read(5, 1);
    let read = bed.read_of(Target::Cache);
    bed.rooms.spoil(5);
    bed.rooms.dirty_durable([5]);
    bed.end(read, Ok(()));
    assert!(bed.answered().is_empty() && bed.rooms.contents.fenced().is_empty());
    let read = bed.read_of(Target::Cache);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(5));
    assert_eq!(bed.rooms.counters().ssd_hit_blocks, 1, "the first read brought nothing");
}

#[test]
fn clean_blocks_of_a_distrusted_volume_are_read_from_the_primary() {
    let mut bed = Bed::new();
    bed.rooms.clean([5]);
    bed.rooms.dirty_durable([6]);
    let ram = [5, 6].map(|block| (key(block), content(block)));
    ram.iter().for_each(|(key, bytes)| bed.rooms.ram.put(*key, bytes, Standing::Doubled));
    bed.rooms.volume_mut(crate::testing::VOLUME).distrusted = true;
    bed.read(6, 1);
    assert_eq!(bed.bytes(), content(6), "only the cache has it");
    bed.rooms.ram.remove(key(6));
    bed.read(6, 1);
    let read = bed.read_of(Target::Cache);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(6));
    bed.read(5, 1);
    let read = bed.read_of(PRIMARY);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), [0; BLOCK_SIZE]);
}

#[test]
fn a_read_that_a_rule_sends_past_the_cache_leaves_no_traces() {
    let mut bed = Bed::with_ram(2);
    bed.rooms.dirty_durable([5]);
    for block in [8, 9] {
        bed.read(block, 1);
        let read = bed.read_of(Target::Primary(VOLUME));
        bed.end(read, Ok(()));
    }
    bed.answered();
    let oldest = |bed: &Bed| bed.rooms.cache.ram.recent().oldest().map(|(key, _)| key);
    assert_eq!(oldest(&bed), Some(key(8).0));
    // From RAM, the cache device, and the primary.
    bed.read_past(8, 1, Bypass::Rule);
    assert_eq!(bed.bytes(), [0; BLOCK_SIZE]);
    bed.read_past(5, 1, Bypass::Rule);
    let read = bed.read_of(Target::Cache);
    bed.end(read, Ok(()));
    assert_eq!(bed.bytes(), content(5));
    bed.read_past(7, 1, Bypass::Rule);
    let read = bed.read_of(Target::Primary(VOLUME));
    bed.end(read, Ok(()));
    assert_eq!(oldest(&bed), Some(key(8).0), "block 8 is no more recent");
    let in_ram = |bed: &Bed, block| bed.rooms.cache.ram.contains(key(block));
    assert!(!in_ram(&bed, 5) && !in_ram(&bed, 7) && in_ram(&bed, 9));
    let stats = bed.rooms.cache.stats(forebay_block::Instant::default());
    assert_eq!((stats.bypasses, stats.bypassed_by[Bypass::Rule as usize]), (3, 3));
    // A stream is only a guess: what it finds counts as read.
    bed.read_past(8, 1, Bypass::Sequential);
    assert_eq!(oldest(&bed), Some(key(9).0));
}
