//! The sequential detector against streams as clients send them, and against patterns that only
//! resemble streams.

use std::collections::VecDeque;

use forebay_block::ByteRange;
use forebay_block::testing::Numbers;
use forebay_policy::SequentialDetector;
use proptest::prelude::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const THRESHOLD: u64 = 512 * KIB;

fn detector() -> SequentialDetector {
    SequentialDetector::new(THRESHOLD, 64)
}

/// Requests of `len` bytes, one after another, from `start`.
fn stream(start: u64, len: u64, count: u64) -> impl Iterator<Item = ByteRange> {
    (0..count).map(move |i| ByteRange::new(start + i * len, len))
}

#[test]
fn a_stream_is_seen_when_it_reaches_the_threshold() {
    for is_write in [false, true] {
        let mut detector = detector();
        let flags: Vec<_> =
            stream(7 * MIB, 64 * KIB, 32).map(|r| detector.observe(r, is_write)).collect();
        assert_eq!(flags.iter().position(|flag| *flag), Some(7), "eight requests make 512 KiB");
        assert!(flags[7..].iter().all(|flag| *flag));
    }
}

#[test]
fn one_request_as_long_as_the_threshold_is_a_stream() {
    assert!(detector().observe(ByteRange::new(0, THRESHOLD), false));
    assert!(!detector().observe(ByteRange::new(0, THRESHOLD - 1), false));
}

#[test]
fn a_threshold_of_zero_turns_it_off() {
    let mut detector = SequentialDetector::new(0, 4);
    assert!(stream(0, MIB, 100).all(|range| !detector.observe(range, false)));
}

#[test]
fn reads_and_writes_do_not_add_up() {
    let mut detector = detector();
    for (i, range) in stream(0, 64 * KIB, 14).enumerate() {
        assert!(!detector.observe(range, i % 2 == 0), "neither side has 512 KiB in a row");
    }
}

#[test]
fn sixty_four_streams_at_once_are_all_seen() {
    let mut detector = detector();
    for round in 0..64 {
        for number in 0..64 {
            let range = ByteRange::new(number * 16 * GIB + round * 16 * KIB, 16 * KIB);
            assert_eq!(detector.observe(range, false), round >= 31, "stream {number}");
        }
    }
}

#[test]
fn the_least_recently_used_stream_makes_room() {
    let mut detector = SequentialDetector::new(THRESHOLD, 2);
    let mut feed = |start, count| {
        stream(start, 128 * KIB, count).map(|r| detector.observe(r, false)).last() == Some(true)
    };
    assert!(feed(0, 4));
    assert!(feed(GIB, 4));
    assert!(feed(512 * KIB, 1), "the first stream goes on, and the second is now the older");
    assert!(!feed(2 * GIB, 1));
    assert!(feed(640 * KIB, 1), "the first stream is still known");
    assert!(!feed(GIB + 512 * KIB, 1), "the second is not");
}

/// Four connections take turns on one stream and deliver at different speeds.
#[test]
fn a_stream_over_several_connections_is_seen() {
    for seed in 1..50 {
        let mut random = Numbers::new(seed);
        let mut detector = detector();
        let mut queues: [VecDeque<ByteRange>; 4] = Default::default();
        let (mut sent, mut flagged) = (0, 0);
        let mut delivered = 0;
        while delivered < 512 {
            // A connection has at most four requests in flight.
            while sent < 512 && queues[sent % 4].len() < 4 {
                let start = sent as u64 * 128 * KIB;
                queues[sent % 4].push_back(ByteRange::new(start, 128 * KIB));
                sent += 1;
            }
            if let Some(range) = queues[random.below(4) as usize].pop_front() {
                delivered += 1;
                flagged += u32::from(detector.observe(range, true));
            }
        }
        assert!(flagged >= 480, "seed {seed}: {flagged} of 512 flagged");
    }
}

#[test]
fn small_gaps_do_not_break_a_stream_and_large_ones_do() {
    let mut detector = detector();
    // 60 KiB of every 64 KiB, as a copy of a sparse file would read.
    let flags: Vec<_> =
        (0..64).map(|i| detector.observe(ByteRange::new(i * 64 * KIB, 60 * KIB), false)).collect();
    assert!(flags[12..].iter().all(|flag| *flag));
    // Half of every 64 KiB is not a stream.
    let mut detector = self::detector();
    assert!((0..1000).all(|i| !detector.observe(ByteRange::new(i * 64 * KIB, 32 * KIB), false)));
}

#[test]
fn reading_one_small_file_over_and_over_is_not_a_stream() {
    let mut detector = detector();
    let mut random = Numbers::new(3);
    let flagged = (0..100_000)
        .filter(|_| {
            let offset = 5 * GIB + random.below(64) * 4 * KIB;
            detector.observe(ByteRange::new(offset, 4 * KIB), false)
        })
        .count();
    assert_eq!(flagged, 0);
}

/// A log of appends that each rewrite the last block, in a 16 MiB file used as a ring. Each lap is
/// a separate stream: requests are flagged once the lap has reached the threshold, if the appends
/// are large enough. A database's redo log has small ones.
#[test]
fn a_circular_log_is_one_stream_per_lap_if_its_writes_are_large() {
    for (unit, is_large) in [(4 * KIB, false), (64 * KIB, true)] {
        let mut detector = detector();
        let mut random = Numbers::new(9);
        let (mut at, mut in_lap) = (0, 0);
        for _ in 0..20_000 {
            let len = (1 + random.below(4)) * unit;
            let start = at - if at == 0 { 0 } else { 4 * KIB };
            let end = (start + len).min(16 * MIB);
            in_lap += end - at.max(start);
            let flag = detector.observe(ByteRange::new(start, end - start), true);
            if end > at {
                let long = end - start >= 64 * KIB;
                let expected = in_lap >= THRESHOLD && long;
                assert_eq!(flag, expected, "{in_lap} bytes into the lap");
                assert!(!flag || is_large);
            }
            (at, in_lap) = if end == 16 * MIB { (0, 0) } else { (end, in_lap) };
        }
    }
}

/// The number of requests that fill holes before the balance is spent is random, so the bound is on
/// the mean of 20 runs: ten in 10,000.
#[test]
fn a_stream_that_turns_random_is_soon_none() {
    let mut flagged = 0;
    for seed in 0..20 {
        let mut detector = detector();
        assert_eq!(stream(0, MIB, 1000).filter(|r| detector.observe(*r, false)).count(), 1000);
        let mut random = Numbers::new(seed);
        let requests = (0..10_000).filter(|_| {
            let offset = 990 * MIB + random.below(20 * 256) * 4 * KIB;
            detector.observe(ByteRange::new(offset, 4 * KIB), false)
        });
        flagged += requests.count();
    }
    assert!(flagged <= 20 * 10, "{flagged} of 200,000");
}

#[test]
fn requests_at_the_end_of_the_address_space_are_counted() {
    let mut detector = detector();
    let start = u64::MAX - 2 * MIB;
    assert_eq!(stream(start, MIB, 2).filter(|r| detector.observe(*r, true)).count(), 2);
    assert!(!detector.observe(ByteRange::new(u64::MAX, 0), true));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn random_requests_are_hardly_ever_flagged(
        seed in 1..u64::MAX,
        shift in 2u32..7,
        span in prop_oneof![Just(256 * MIB), Just(GIB), Just(1000 * GIB)],
    ) {
        let (mut random, mut detector) = (Numbers::new(seed), detector());
        let len = KIB << shift;
        let flagged = (0..20_000)
            .filter(|_| {
                let range = ByteRange::new(random.below(span / len) * len, len);
                detector.observe(range, random.below(2) == 0)
            })
            .count();
        prop_assert!(flagged < 20, "{flagged} of 20000 requests of {len} bytes");
    }

    #[test]
    fn a_stream_is_seen_among_random_requests(seed in 1..u64::MAX, others in 1u64..40) {
        let (mut random, mut detector) = (Numbers::new(seed), detector());
        let mut flagged = 0;
        for range in stream(3 * GIB, 64 * KIB, 256) {
            for _ in 0..random.below(others + 1) {
                detector.observe(ByteRange::new(random.below(GIB / 4096) * 4096, 4096), false);
            }
            flagged += u32::from(detector.observe(range, false));
        }
        prop_assert_eq!(flagged, 249, "all but the first seven");
    }

    #[test]
    fn any_request_is_taken(
        requests in prop::collection::vec((any::<u64>(), any::<u64>(), any::<bool>()), 1..200),
        threshold in any::<u64>(),
        streams in 1usize..5,
    ) {
        let mut detector = SequentialDetector::new(threshold, streams);
        for (offset, len, is_write) in requests {
            let range = ByteRange::new(offset, len.min(u64::MAX - offset));
            let flag = detector.observe(range, is_write);
            prop_assert!(!flag || threshold > 0);
        }
    }
}
