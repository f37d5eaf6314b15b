//! The model against its documented figures, in modeled time only.

use super::*;

const SIZE: u64 = 64 << 30;
const BLOCK: u64 = 4096;

/// Keeps `depth` requests in flight until `count` have ended; returns the time in seconds.
fn run(
    profile: Profile,
    depth: usize,
    count: u64,
    op: IoOp,
    mut next: impl FnMut() -> ByteRange,
) -> f64 {
    let mut model = Model::new(profile, SIZE, 1);
    let (mut now, mut ended, mut tickets) = (Instant(0), 0, Vec::new());
    for slot in 0..depth as u64 {
        model.submit(now, (0, slot), op, next());
    }
    while ended < count {
        now = model.next_event().expect("requests are in flight");
        model.ended(now, &mut tickets);
        for (_, slot) in tickets.drain(..) {
            ended += 1;
            model.submit(now, (0, slot), op, next());
        }
    }
    now.0 as f64 / 1e9
}

fn random_rate(profile: Profile, depth: usize, op: IoOp) -> f64 {
    let mut numbers = Numbers::new(5);
    let count = 4000;
    let place = || ByteRange::new(numbers.below(SIZE / BLOCK) * BLOCK, BLOCK);
    count as f64 / run(profile, depth, count, op, place)
}

fn sequential_rate(profile: Profile, depth: usize, len: u64, op: IoOp) -> f64 {
    let mut at = 0;
    let count = 4000;
    let place = || {
        at += len;
        ByteRange::new(at - len, len)
    };
    (count * len) as f64 / run(profile, depth, count, op, place) / 1e6
}

fn assert_within(what: &str, found: f64, low: f64, high: f64) {
    println!("{what}: {found:.1}");
    assert!((low..=high).contains(&found), "{what}: {found:.1}, not within {low} to {high}");
}

/// One at a time: 8.5 ms of seek, 4.17 ms of rotation, 0.03 ms of transfer; 78.8 a second.
#[test]
fn random_reads_of_a_disk_one_at_a_time() {
    assert_within("hdd 4 KiB random depth 1", random_rate(Profile::Hdd, 1, IoOp::Read), 76., 82.);
}

#[test]
fn sequential_transfers_reach_the_platter_rate() {
    for op in [IoOp::Read, IoOp::Write] {
        for (depth, len) in [(1, 1 << 20), (1, 4096), (8, 64 << 10)] {
            let rate = sequential_rate(Profile::Hdd, depth, len, op);
            assert_within("hdd sequential MB/s", rate, 149., 150.5);
        }
    }
}

/// Choosing among 32 requests shortens seek and rotation: real drives gain a factor of 2 to 3.
#[test]
fn a_deep_queue_gains_by_reordering() {
    let one = random_rate(Profile::Hdd, 1, IoOp::Read);
    let four = random_rate(Profile::Hdd, 4, IoOp::Read) / one;
    let deep = random_rate(Profile::Hdd, 32, IoOp::Read) / one;
    assert_within("gain at depth 4", four, 1.2, 1.8);
    assert_within("gain at depth 32", deep, 2.0, 3.5);
}

#[test]
fn an_array_of_four_scales() {
    let one = random_rate(Profile::Raid10x4, 1, IoOp::Read);
    assert_within("raid10x4 random read depth 1", one, 80., 100.);
    let reads = random_rate(Profile::Raid10x4, 128, IoOp::Read);
    let writes = random_rate(Profile::Raid10x4, 64, IoOp::Write);
    let disk = random_rate(Profile::Hdd, 32, IoOp::Read);
    assert_within("reads of an array, in disks", reads / disk, 3.4, 4.6);
    assert_within("writes to an array, in disks", writes / disk, 1.6, 2.1);
    let stream = sequential_rate(Profile::Raid10x4, 1, 1 << 20, IoOp::Read);
    assert_within("raid10x4 sequential read MB/s, 1 MiB", stream, 290., 301.);
}

/// A small write reads and writes on two disks; a write of full stripes only writes.
#[test]
fn an_array_with_parity_pays_for_small_writes() {
    let disk = random_rate(Profile::Hdd, 32, IoOp::Read);
    let reads = random_rate(Profile::Raid5x5, 160, IoOp::Read);
    let writes = random_rate(Profile::Raid5x5, 80, IoOp::Write);
    assert_within("raid5x5 reads, in disks", reads / disk, 4.0, 5.5);
    assert_within("raid5x5 writes, in disks", writes / disk, 0.7, 1.2);
    let write = |len| sequential_rate(Profile::Raid5x5, 8, len, IoOp::Write);
    assert_within("raid5x5 full stripes MB/s", write(FULL_STRIPE), 470., 601.);
    assert_within("raid5x5 sequential writes of 16 KiB MB/s", write(16 << 10), 1., 60.);
}

/// Destaging blocks here and there in a stripe, each run of them as a write or all as one.
#[test]
fn a_stripe_with_dirty_blocks_here_and_there_is_cheaper_written_whole() {
    let mut gains = Vec::new();
    for runs in [1, 2, 4, 8, 16] {
        let time = |whole: bool| {
            let mut numbers = Numbers::new(7);
            let mut left = Vec::new();
            let mut count = 0;
            let place = || {
                if left.is_empty() {
                    let start = numbers.below(SIZE / FULL_STRIPE) * FULL_STRIPE;
                    let run = |at| ByteRange::new(start + at * FULL_STRIPE / runs, BLOCK);
                    left.extend((0..runs).rev().map(run));
                    if whole {
                        left = vec![ByteRange::new(start, FULL_STRIPE)];
                    }
                }
                count += 1;
                left.pop().expect("it was filled")
            };
            let writes = if whole { 1000 } else { 1000 * runs };
            run(Profile::Raid5x5, 64, writes, IoOp::Write, place)
        };
        gains.push(time(false) / time(true));
    }
    println!("gains with 1, 2, 4, 8, 16 runs: {gains:.2?}");
    assert!(gains[1] > 1.0 && gains[4] > gains[2]);
}

#[test]
fn a_san_adds_half_a_millisecond() {
    let array = 1.0 / random_rate(Profile::Raid10x4, 1, IoOp::Read);
    let san = 1.0 / random_rate(Profile::San, 1, IoOp::Read);
    assert_within("san minus array, microseconds", (san - array) * 1e6, 300., 700.);
}

#[test]
fn a_cloud_volume_has_its_limits() {
    let one = random_rate(Profile::Cloud, 1, IoOp::Read);
    assert_within("cloud depth 1", one, 990., 1001.);
    let deep = random_rate(Profile::Cloud, 64, IoOp::Write);
    assert_within("cloud depth 64", deep, 2900., 3100.);
    let stream = sequential_rate(Profile::Cloud, 8, 1 << 20, IoOp::Read);
    assert_within("cloud sequential MB/s", stream, 120., 127.);
}

#[test]
fn the_seed_decides_and_nothing_else() {
    let trace = |seed| {
        let mut model = Model::new(Profile::Raid10x4, SIZE, seed);
        let (mut numbers, mut ends, mut tickets) = (Numbers::new(9), Vec::new(), Vec::new());
        for step in 0..500u64 {
            let now = Instant(step * 3_000_000);
            let place = ByteRange::new(numbers.below(SIZE / BLOCK) * BLOCK, BLOCK);
            let op = if numbers.below(3) == 0 { IoOp::Write } else { IoOp::Read };
            model.submit(now, (0, step), op, place);
            model.ended(now, &mut tickets);
            ends.push(model.next_event());
        }
        (tickets, ends)
    };
    assert_eq!(trace(1), trace(1));
    assert_ne!(trace(1), trace(2));
}

#[test]
fn a_flush_ends_after_all_that_came_before_and_costs_nothing() {
    let mut model = Model::new(Profile::Hdd, SIZE, 1);
    let at = |place: u64| ByteRange::new(place, BLOCK);
    model.submit(Instant(0), (0, 1), IoOp::Write, at(SIZE / 2));
    model.submit(Instant(0), (0, 2), IoOp::Flush, ByteRange::default());
    model.submit(Instant(0), (0, 3), IoOp::Flush, ByteRange::default());
    let end = model.next_event().unwrap();
    let mut tickets = Vec::new();
    model.ended(Instant(end.0 - 1), &mut tickets);
    assert!(tickets.is_empty());
    model.submit(end, (0, 4), IoOp::Read, at(0));
    model.ended(end, &mut tickets);
    assert_eq!(tickets, [(0, 1), (0, 2), (0, 3)]);
    tickets.clear();
    model.ended(Instant(end.0 + NANOS), &mut tickets);
    model.submit(Instant(end.0 + NANOS), (0, 5), IoOp::Flush, ByteRange::default());
    model.ended(Instant(end.0 + NANOS), &mut tickets);
    assert_eq!(tickets, [(0, 4), (0, 5)]);
    assert!(model.next_event().is_none());
}

/// Each byte of a range lies on exactly one pair, at the position given by its stripe.
#[test]
fn shares_of_pairs_cover_a_range_once() {
    let unit = STRIPE_UNIT;
    let mut numbers = Numbers::new(3);
    for _ in 0..2000 {
        let range = ByteRange::new(numbers.below(8 * unit), 1 + numbers.below(6 * unit));
        let shares: Vec<ByteRange> = (0..PAIRS).map(|pair| share_of_pair(range, pair)).collect();
        assert_eq!(shares.iter().map(|share| share.len).sum::<u64>(), range.len);
        for byte in [range.offset, range.end() - 1] {
            let (stripe, within) = (byte / unit, byte % unit);
            let place = stripe / PAIRS * unit + within;
            let share = shares[(stripe % PAIRS) as usize];
            assert!(share.offset <= place && place < share.end(), "{range}: {byte}");
        }
    }
}
