//! The layer over a device in memory: correct data, delayed completions.

use std::time::Duration;

use forebay_block::{ByteRange, ErrorKind, IoOp};

use super::*;
use crate::MemoryDevice;
use crate::testing::Bench;

fn emulated(profile: Profile) -> EmulatedDevice {
    EmulatedDevice::new(Arc::new(MemoryDevice::new(64 << 20)), profile, 1)
}

#[test]
fn data_passes_and_time_is_held() {
    let device = emulated(Profile::Cloud);
    let mut bench = Bench::new(&device);
    let started = bench.clock.now();
    for i in 0..20u64 {
        bench.write(i * 4096, &[i as u8; 4096]).unwrap();
    }
    let took = bench.clock.now().since(started);
    assert!(took >= Duration::from_millis(20), "{took:?}");
    bench.bare(IoOp::Flush, ByteRange::default()).unwrap();
    for i in 0..20u64 {
        assert_eq!(bench.read(i * 4096, 4096).unwrap(), [i as u8; 4096]);
    }
}

#[test]
fn two_queues_share_one_medium() {
    let device = emulated(Profile::Cloud);
    let mut first = Bench::new(&device);
    let mut second = Bench::new(&device);
    second.clock = first.clock;
    let batch =
        |bench: &mut Bench| (0..200u64).map(|i| bench.write_io(i * 512, &[1; 512])).collect();
    let started = first.clock.now();
    // The first queue's requests use up the bucket; the second queue's come after them.
    let ios: Vec<Io> = batch(&mut first);
    for io in ios {
        first.queue.submit(started, io).unwrap();
    }
    let ios = batch(&mut second);
    second.run(ios);
    let took = second.clock.now().since(started);
    assert!(took > Duration::from_millis(125), "400 requests at 3,000 a second took {took:?}");
    let mut done = Vec::new();
    first.queue.poll(first.clock.now(), &mut done);
    assert_eq!(done.len(), 200);
}

#[test]
fn a_refused_request_takes_no_time_and_breaks_nothing() {
    let device = emulated(Profile::Hdd);
    let mut bench = Bench::new(&device);
    assert_eq!(bench.read(64 << 20, 512).unwrap_err().kind(), ErrorKind::OutOfRange);
    assert!(bench.read(0, 512).is_ok());
    assert_eq!(bench.queue.deadline(), None);
}

#[test]
fn every_profile_is_found_by_its_name() {
    for (name, profile) in Profile::NAMES {
        assert_eq!(Profile::from_name(name), Some(profile));
    }
    assert_eq!(Profile::from_name("floppy"), None);
}

/// The model's rates are not exceeded on the wall clock. A busy machine falls short of them,
/// because it notices late that a wait has ended.
#[test]
fn modelled_rates_hold_on_the_clock() {
    let rate = |profile, count: u64, depth: u64| {
        let device = emulated(profile);
        let mut bench = Bench::new(&device);
        let mut numbers = crate::random::Numbers::new(5);
        let started = bench.clock.now();
        for _ in 0..count / depth {
            let place = |numbers: &mut crate::random::Numbers| numbers.below(16384) * 4096;
            let ios = (0..depth).map(|_| bench.read_io(place(&mut numbers), 4096)).collect();
            bench.run(ios);
        }
        count as f64 / bench.clock.now().since(started).as_secs_f64()
    };
    let disk = rate(Profile::Hdd, 60, 1);
    assert!((40.0..90.0).contains(&disk), "hdd at depth 1: {disk:.1} a second");
    let cloud = rate(Profile::Cloud, 1600, 400);
    assert!((1500.0..3020.0).contains(&cloud), "cloud at depth 400: {cloud:.0} a second");
}
