//! The outcomes of writes on a simulated disk: kept, dropped, torn, garbled.

use forebay_block::{IoBuf, IoTag};

use super::*;

fn disk(volatile: bool) -> SimDisk {
    let profile = DiskProfile {
        size: 1 << 20,
        volatile,
        garbles: true,
        latency: (1, 10),
        flush: (1, 10),
        slow_percent: 0,
        discards: Discards::Zeros,
    };
    SimDisk::new(profile, Pages::new(1 << 20), Rng::new(1))
}

fn write(disk: &mut SimDisk, offset: u64, byte: u8, fua: bool) {
    let buf = IoBuf::copy_of(&[byte; 1024]);
    let (slot, _) = disk.submit(Io::write(IoTag(0), offset, buf).with_fua(fua));
    disk.finish(slot).result.expect("no fault");
}

fn flush(disk: &mut SimDisk) {
    let (slot, _) = disk.submit(Io::flush(IoTag(0)));
    disk.finish(slot).result.expect("no fault");
}

/// First byte of each of the two sectors at `offset`.
fn read(disk: &mut SimDisk, offset: u64) -> [u8; 2] {
    let range = ByteRange::new(offset, 1024);
    let (slot, _) = disk.submit(Io::read(IoTag(0), range, IoBuf::zeroed(1024)));
    let done = disk.finish(slot);
    done.result.expect("no fault");
    [done.buf[0], done.buf[512]]
}

#[test]
fn a_crash_deals_fates_to_what_was_not_flushed_alone() {
    let mut d = disk(true);
    write(&mut d, 0, 1, false);
    flush(&mut d);
    write(&mut d, 0, 2, false);
    write(&mut d, 4096, 3, false);
    assert_eq!(d.uncertain(), 2);
    let mut fates = [Fate::Drop, Fate::Prefix(1)].into_iter();
    d.crash(&mut |sectors| {
        assert_eq!(sectors, 2);
        fates.next().expect("two fates")
    });
    assert_eq!(read(&mut d, 0), [1, 1]);
    assert_eq!(read(&mut d, 4096), [3, 0]);
}

#[test]
fn a_flush_covers_what_completed_before_it_was_submitted() {
    let mut d = disk(true);
    write(&mut d, 0, 1, false);
    let (slot, _) = d.submit(Io::flush(IoTag(0)));
    write(&mut d, 4096, 2, false);
    d.finish(slot).result.expect("no fault");
    assert_eq!(d.uncertain(), 1);
    d.crash(&mut |_| Fate::Drop);
    assert_eq!(read(&mut d, 0), [1, 1]);
    assert_eq!(read(&mut d, 4096), [0, 0]);
}

#[test]
fn force_unit_access_is_not_undone_by_an_older_write() {
    let mut d = disk(true);
    write(&mut d, 0, 1, false);
    write(&mut d, 0, 2, true);
    let mut held = [0; 2];
    d.image().read(0, &mut held);
    assert_eq!(held, [2, 2], "it is held for good already");
    d.crash(&mut |_| Fate::Keep);
    assert_eq!(read(&mut d, 0), [2, 2]);
}

#[test]
fn without_a_volatile_cache_only_writes_in_flight_are_uncertain() {
    let mut d = disk(false);
    write(&mut d, 0, 1, false);
    let (_, _) = d.submit(Io::write(IoTag(0), 0, IoBuf::copy_of(&[2; 1024])));
    assert_eq!(d.uncertain(), 1);
    d.crash(&mut |_| Fate::Garble(7));
    let bytes = read(&mut d, 0);
    assert_ne!(bytes, [1, 1], "this seed changes something");
}

#[test]
fn a_failed_flush_may_give_up_what_it_held() {
    let mut d = disk(true);
    for i in 0..16 {
        write(&mut d, i * 4096, 1, false);
    }
    let range = ByteRange::new(0, u64::MAX);
    let fault = Fault::Error(ErrorKind::Media);
    d.add_rule(Rule { fault, ops: &[IoOp::Flush], range, times: 1 });
    let (slot, _) = d.submit(Io::flush(IoTag(0)));
    assert!(d.finish(slot).result.is_err());
    flush(&mut d);
    assert_eq!(read(&mut d, 0), [1, 1], "until power fails nothing is missed");
    let lost = d.lost().count();
    d.crash(&mut |_| Fate::Keep);
    let kept = (0..16).filter(|i| read(&mut d, i * 4096) == [1, 1]).count();
    assert!((1..16).contains(&kept), "{kept} of 16 survived");
    assert_eq!(lost, (16 - kept) * 2, "sectors");
    assert_eq!(d.lost().count(), 0, "they are not shown any more");
}

#[test]
fn each_fault_does_what_it_says() {
    let range = ByteRange::new(0, u64::MAX);
    let ops: &[IoOp] = &[IoOp::Write];
    let struck = |fault| {
        let mut d = disk(true);
        d.add_rule(Rule { fault, ops, range, times: 1 });
        let (slot, _) = d.submit(Io::write(IoTag(0), 0, IoBuf::copy_of(&[9; 1024])));
        let ok = d.finish(slot).result.is_ok();
        (ok, read(&mut d, 0), read(&mut d, 4096))
    };
    assert_eq!(struck(Fault::Error(ErrorKind::Media)), (false, [0, 0], [0, 0]));
    assert_eq!(struck(Fault::TornError), (false, [9, 0], [0, 0]));
    assert_eq!(struck(Fault::Lost), (true, [0, 0], [0, 0]));
    assert_eq!(struck(Fault::Misdirected(4096)), (true, [0, 0], [9, 9]));
    assert_eq!(struck(Fault::Slow(1)), (true, [9, 9], [0, 0]));
}

#[test]
fn each_part_of_a_discarded_range_stays_or_becomes_zeros_or_garbage() {
    let mut d = disk(true);
    d.profile.discards = Discards::Garbage;
    for i in 0..16u64 {
        write(&mut d, i * 4096, 1, true);
    }
    let range = ByteRange::new(0, 16 * 4096);
    let mut seen = [0; 3];
    for _ in 0..16 {
        let (slot, _) = d.submit(Io::bare(IoTag(0), IoOp::Discard, range));
        d.finish(slot).result.expect("no fault");
        let kind = |i: u64| match read(&mut d, i * 16384) {
            [1, 1] => 0,
            [0, 0] => 1,
            _ => 2,
        };
        (0..4).map(kind).for_each(|kind: usize| seen[kind] += 1);
        for i in 0..16 {
            write(&mut d, i * 4096, 1, true);
        }
    }
    assert!(seen.iter().all(|&count| count > 5), "{seen:?}");
    d.profile.discards = Discards::Never;
    assert!(d.would_take(&Io::bare(IoTag(0), IoOp::Discard, range)).is_err());
}

#[test]
fn a_disk_that_vanished_fails_and_returns_as_it_was() {
    let mut d = disk(true);
    write(&mut d, 0, 1, false);
    flush(&mut d);
    write(&mut d, 0, 2, false);
    d.vanish();
    let (slot, _) = d.submit(Io::flush(IoTag(0)));
    assert!(d.finish(slot).result.is_err());
    d.heal();
    assert_eq!(read(&mut d, 0), [2, 2]);
    d.crash(&mut |_| Fate::Drop);
    assert_eq!(read(&mut d, 0), [1, 1]);
}
