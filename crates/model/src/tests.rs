//! Reads that the model allows and forbids, case by case.

use super::*;

const V: VolumeId = VolumeId(0);

fn model() -> Model {
    Model::new(V, 8192, |_| Content::Stamp(0))
}

fn block(id: u64) -> ByteRange {
    ByteRange::new(id * 4096, 4096)
}

fn bytes_of(range: ByteRange, content: &Content) -> Vec<u8> {
    let mut data = vec![0; range.len as usize];
    for (i, chunk) in data.chunks_mut(SECTOR_SIZE).enumerate() {
        content.fill(V, range.offset / SECTOR + i as u64, chunk);
    }
    data
}

/// Whether a read of block 0 that starts now may return this content.
fn may_read(model: &mut Model, content: &Content) -> bool {
    let read = model.begin_read();
    let data = bytes_of(block(0), content);
    // A copy is used, so that the question does not change the model.
    let sectors = model.sectors.clone();
    let verdict = model.end_read(read, block(0), Some(&data)).is_ok();
    model.sectors = sectors;
    verdict
}

fn write(model: &mut Model, id: u64, ok: bool, fua: bool) {
    model.begin_write(id, block(0), Change::Stamp).expect("whole sectors");
    model.end_write(id, ok, fua);
}

fn flush(model: &mut Model) {
    let token = model.begin_flush();
    model.end_flush(token);
}

/// The stamps from 0 to 4, and zeros, that a read may return.
fn visible(model: &mut Model) -> Vec<u64> {
    (0..5).filter(|&id| may_read(model, &Content::Stamp(id))).collect()
}

#[test]
fn a_completed_write_is_all_that_is_seen() {
    let mut m = model();
    assert_eq!(visible(&mut m), [0]);
    write(&mut m, 1, true, false);
    assert_eq!(visible(&mut m), [1]);
    assert!(!may_read(&mut m, &Content::Zero));
}

#[test]
fn a_read_may_see_what_was_in_flight_while_it_ran() {
    let mut m = model();
    m.begin_write(1, block(0), Change::Stamp).expect("whole sectors");
    assert_eq!(visible(&mut m), [0, 1]);
    let read = m.begin_read();
    m.end_write(1, true, false);
    write(&mut m, 2, true, false);
    for id in [0, 1, 2] {
        let data = bytes_of(block(0), &Content::Stamp(id));
        assert!(m.clone().end_read(read, block(0), Some(&data)).is_ok(), "{id}");
    }
    assert_eq!(visible(&mut m), [2]);
}

#[test]
fn overlapping_writes_end_in_either_order_and_what_is_seen_stays() {
    let mut m = model();
    m.begin_write(1, block(0), Change::Stamp).expect("whole sectors");
    m.begin_write(2, block(0), Change::Stamp).expect("whole sectors");
    m.end_write(1, true, false);
    m.end_write(2, true, false);
    assert_eq!(visible(&mut m), [1, 2]);
    let read = m.begin_read();
    let data = bytes_of(block(0), &Content::Stamp(1));
    m.end_read(read, block(0), Some(&data)).expect("allowed");
    assert_eq!(visible(&mut m), [1]);
    flush(&mut m);
    m.crash();
    assert_eq!(visible(&mut m), [1]);
}

#[test]
fn a_crash_spares_what_was_flushed_and_nothing_else() {
    let mut m = model();
    write(&mut m, 1, true, false);
    flush(&mut m);
    write(&mut m, 2, true, false);
    let late = m.begin_flush();
    write(&mut m, 3, true, false);
    m.end_flush(late);
    m.begin_write(4, block(0), Change::Stamp).expect("whole sectors");
    m.crash();
    assert_eq!(visible(&mut m), [2, 3, 4]);
    let read = m.begin_read();
    let data = bytes_of(block(0), &Content::Stamp(3));
    m.end_read(read, block(0), Some(&data)).expect("allowed");
    assert_eq!(visible(&mut m), [3]);
    m.crash();
    assert_eq!(visible(&mut m), [3], "what was read after the crash stays after the next");
}

#[test]
fn an_unfinished_flush_promises_nothing() {
    let mut m = model();
    write(&mut m, 1, true, false);
    m.begin_flush();
    m.crash();
    assert_eq!(visible(&mut m), [0, 1]);
}

#[test]
fn force_unit_access_survives_alone() {
    let mut m = model();
    write(&mut m, 1, true, false);
    write(&mut m, 2, true, true);
    m.crash();
    assert_eq!(visible(&mut m), [2]);
}

#[test]
fn a_failed_write_is_old_or_new_until_overwritten() {
    let mut m = model();
    write(&mut m, 1, false, false);
    assert_eq!(visible(&mut m), [0, 1]);
    flush(&mut m);
    m.crash();
    assert_eq!(visible(&mut m), [0, 1]);
    write(&mut m, 2, true, false);
    assert_eq!(visible(&mut m), [2]);
}

#[test]
fn a_discard_leaves_older_bytes_or_zeros() {
    let mut m = model();
    write(&mut m, 1, true, true);
    assert_eq!(visible(&mut m), [1]);
    m.begin_write(2, block(0), Change::Discard).expect("whole sectors");
    m.end_write(2, true, true);
    assert_eq!(visible(&mut m), [0, 1]);
    assert!(may_read(&mut m, &Content::Zero));
    write(&mut m, 3, true, false);
    assert_eq!(visible(&mut m), [3]);
    assert!(!may_read(&mut m, &Content::Zero));
}

#[test]
fn a_discard_may_come_after_what_was_in_flight_with_it() {
    let mut m = model();
    write(&mut m, 1, true, false);
    m.begin_write(2, block(0), Change::Discard).expect("whole sectors");
    write(&mut m, 3, true, false);
    write(&mut m, 4, true, false);
    assert!(may_read(&mut m, &Content::Stamp(3)), "if both came before the discard");
    m.end_write(2, true, false);
    assert!(may_read(&mut m, &Content::Stamp(3)) && may_read(&mut m, &Content::Stamp(1)));
    write(&mut m, 5, true, false);
    write(&mut m, 6, true, false);
    assert!(!may_read(&mut m, &Content::Stamp(5)) && !may_read(&mut m, &Content::Stamp(3)));
}

#[test]
fn a_sector_written_in_part_keeps_its_other_bytes() {
    let mut m = model();
    let range = ByteRange::new(100, 1000);
    let data = m.begin_write(3, range, Change::Stamp).expect("content is known");
    assert!(!m.is_free(ByteRange::new(0, 1)));
    m.end_write(3, true, false);
    let mut expected = bytes_of(block(0), &Content::Stamp(0));
    expected[100..1100].copy_from_slice(&data);
    let read = m.begin_read();
    m.end_read(read, block(0), Some(&expected)).expect("old bytes around the new ones");
    expected[99] ^= 1;
    let read = m.begin_read();
    assert!(m.end_read(read, block(0), Some(&expected)).is_err());
}

#[test]
fn a_partial_write_over_unknown_content_is_refused() {
    let mut m = model();
    write(&mut m, 1, false, false);
    assert!(m.begin_write(2, ByteRange::new(0, 100), Change::Stamp).is_none());
}

#[test]
fn a_block_of_two_times_is_called_mixed() {
    let mut m = model();
    write(&mut m, 1, true, false);
    m.begin_write(2, ByteRange::new(512, 512), Change::Stamp).expect("a whole sector");
    m.end_write(2, true, false);
    m.crash();
    let old = bytes_of(block(0), &Content::Stamp(0));
    let mut newest = bytes_of(block(0), &Content::Stamp(1));
    let second = bytes_of(ByteRange::new(512, 512), &Content::Stamp(2));
    newest[512..1024].copy_from_slice(&second);
    let mut torn = old.clone();
    torn[2048..].copy_from_slice(&newest[2048..]);
    let mut skipped = old.clone();
    skipped[512..1024].copy_from_slice(&second);
    assert!(m.check_unmixed(0, &old).is_ok());
    assert!(m.check_unmixed(0, &newest).is_ok());
    assert!(m.check_unmixed(0, &bytes_of(block(0), &Content::Stamp(1))).is_ok());
    assert!(m.check(0, &torn).is_ok(), "each sector alone is allowed");
    assert!(m.check_unmixed(0, &torn).is_err());
    assert!(m.check_unmixed(0, &skipped).is_err());
}

/// The disk shows what it lost. A write that failed may have put the same bytes there, or not.
#[test]
fn bytes_of_a_failed_flush_are_no_safer_because_a_failed_write_had_the_same() {
    for told in [false, true] {
        let mut m = model();
        write(&mut m, 1, true, false);
        if told {
            m.fail_flush();
        }
        m.begin_write(2, block(0), Change::Copy { of: 1, ahead: 0 }).expect("whole sectors");
        m.end_write(2, false, false);
        let read = m.begin_read();
        let data = bytes_of(block(0), &Content::Stamp(1));
        m.end_read(read, block(0), Some(&data)).expect("both wrote it");
        flush(&mut m);
        m.crash();
        assert_eq!(visible(&mut m), if told { vec![0, 1] } else { vec![1] });
    }
}

/// If two writes left equal bytes, the model forgets which of them the content is from. Two such
/// unknown writes are not one write of which a block could have one half (seed 623624).
#[test]
fn two_writes_of_unknown_origin_are_two() {
    let mut m = model();
    for id in [1, 2] {
        write(&mut m, id, true, true);
    }
    let copy = |m: &mut Model, id, of| {
        m.begin_write(id, block(0), Change::Copy { of, ahead: 0 }).expect("whole sectors");
        m.end_write(id, true, false);
    };
    let see = |m: &mut Model, of| {
        let read = m.begin_read();
        m.end_read(read, block(0), Some(&bytes_of(block(0), &Content::Stamp(of))))
            .expect("allowed");
    };
    copy(&mut m, 3, 2);
    m.crash();
    see(&mut m, 2);
    copy(&mut m, 4, 1);
    m.begin_write(5, block(0), Change::Copy { of: 1, ahead: 0 }).expect("whole sectors");
    m.end_write(5, false, false);
    see(&mut m, 1);
    m.crash();
    let unknown = |e: &Entry| e.id == UNKNOWN;
    assert_eq!(m.sectors[0].entries.iter().filter(|e| unknown(e)).count(), 2);
    assert!(m.check_unmixed(0, &bytes_of(block(0), &Content::Stamp(2))).is_ok());
}

#[test]
fn histories_stay_short() {
    let mut m = model();
    for id in 1..1000 {
        write(&mut m, id, true, false);
        flush(&mut m);
    }
    assert!(m.sectors[0].entries.len() <= 2);
}

#[test]
fn judged_by_flushes_alone_a_read_settles_nothing_for_the_next_crash() {
    let mut m = model().by_flushes_alone();
    write(&mut m, 1, true, true);
    write(&mut m, 2, false, false);
    m.crash();
    let read = m.begin_read();
    let data = bytes_of(block(0), &Content::Stamp(1));
    m.end_read(read, block(0), Some(&data)).expect("allowed");
    assert_eq!(visible(&mut m), [1]);
    m.crash();
    assert_eq!(visible(&mut m), [1, 2]);
    let read = m.begin_read();
    m.end_read(read, block(0), Some(&data)).expect("allowed");
    flush(&mut m);
    m.crash();
    assert_eq!(visible(&mut m), [1]);
}

#[test]
fn what_was_given_up_and_forgotten_is_seen_after_a_crash_until_it_is_gone() {
    let mut m = model();
    write(&mut m, 1, true, true);
    write(&mut m, 2, true, false);
    m.forget_failure(block(0));
    assert_eq!(visible(&mut m), [2], "until a crash nothing else is seen");
    flush(&mut m);
    m.crash();
    assert_eq!(visible(&mut m), [1, 2], "no flush helps any more");
    let end = |m: &mut Model, id| {
        let read = m.begin_read();
        m.end_read(read, block(0), Some(&bytes_of(block(0), &Content::Stamp(id))))
    };
    end(&mut m, 2).expect("allowed");
    assert_eq!(visible(&mut m), [1, 2], "it may go yet");
    end(&mut m, 1).expect("allowed");
    assert_eq!(visible(&mut m), [1, 2], "a cache may have a copy that it has not loaded yet");
    write(&mut m, 3, true, false);
    assert_eq!(visible(&mut m), [3]);
    flush(&mut m);
    m.crash();
    assert_eq!(visible(&mut m), [3], "a later write is as any other");
}

#[test]
fn a_repeated_write_may_be_before_and_after_another() {
    let start = || {
        let mut m = model();
        write(&mut m, 1, true, true);
        m.begin_write(2, ByteRange::new(0, 1024), Change::Stamp).expect("whole sectors");
        m.begin_write(3, ByteRange::new(0, 512), Change::Stamp).expect("whole sectors");
        m
    };
    // Write 2 is seen over write 3; after the crash, it is seen in one sector, and write 3 in the
    // other.
    let end = |mut m: Model| {
        m.end_write(3, true, false);
        m.end_write(2, true, false);
        let read = m.begin_read();
        let range = ByteRange::new(0, 512);
        m.end_read(read, range, Some(&bytes_of(range, &Content::Stamp(2)))).expect("allowed");
        m.crash();
        let mut found = bytes_of(block(0), &Content::Stamp(1));
        found[..512].copy_from_slice(&bytes_of(ByteRange::new(0, 512), &Content::Stamp(3)));
        let second = ByteRange::new(512, 512);
        found[512..1024].copy_from_slice(&bytes_of(second, &Content::Stamp(2)));
        m.check_unmixed(0, &found)
    };
    assert_eq!(end(start()).expect_err("write 2 came last").wrong, Wrong::Mixed);
    let mut repeated = start();
    repeated.send_again(2);
    assert!(end(repeated).is_ok());
}
