//! The router against shards that answer late, out of order, with errors, or have no room: a client
//! still sees one device.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_block::{
    BufPool, ByteRange, DeviceInfo, ErrorKind, Instant, Io, IoBuf, IoFlags, IoOp, IoTag,
    STRIPE_SIZE, VolumeId,
};
use forebay_engine::{Bypass, Reply, Request};
use forebay_policy::{RequestRules, RuleCount, RuleSet, Sender};
use forebay_volume::{
    Ask, Asked, ClientKey, Coming, DISCARD_MAX, Done, FlushGate, PIECES_MAX, Registry, Router,
    RouterConfig, ShardPort, Source, Volume, WAVE, origin_of, shard_of,
};
use proptest::prelude::*;

const VOLUME: VolumeId = VolumeId(3);
const CLIENT: ClientKey = ClientKey(77);
const ORIGIN: u16 = 5;

/// Shards that keep requests until the test answers them.
struct Shards {
    taken: Vec<VecDeque<Request>>,
    /// Requests that each shard may hold.
    room: usize,
    data: Vec<u8>,
}

impl Shards {
    fn new(shards: usize, size: u64) -> Self {
        let data = vec![0; usize::try_from(size).expect("small")];
        Self { taken: (0..shards).map(|_| VecDeque::new()).collect(), room: usize::MAX, data }
    }

    fn waiting(&self) -> usize {
        self.taken.iter().map(VecDeque::len).sum()
    }

    /// Carries out the request at index `place` of a shard's queue.
    fn answer(&mut self, shard: usize, place: usize, error: Option<ErrorKind>) -> Reply {
        let mut request = self.taken[shard].remove(place).expect("a request is there");
        let result = error.map_or(Ok(()), |kind| Err(kind.into()));
        if result.is_ok() && !request.range.is_empty() && !self.data.is_empty() {
            let bytes = request.range.offset as usize..request.range.end() as usize;
            match request.op {
                IoOp::Read => request.buf.copy_from_slice(&self.data[bytes]),
                IoOp::Write => self.data[bytes].copy_from_slice(&request.buf),
                _ => self.data[bytes].fill(0),
            }
        }
        Reply { id: request.id, result, buf: request.buf, direct: None, tier: None }
    }
}

impl ShardPort for Shards {
    fn submit(&mut self, shard: usize, request: Request) -> Result<(), Request> {
        if self.taken[shard].len() >= self.room {
            return Err(request);
        }
        assert_eq!(origin_of(request.id), usize::from(ORIGIN));
        if request.op != IoOp::Flush {
            assert!(request.range.is_in_one_stripe(), "{}", request.range);
            let stripe = request.range.stripe();
            assert_eq!(shard, shard_of(request.volume, stripe, self.taken.len()));
        }
        self.taken[shard].push_back(request);
        Ok(())
    }
}

struct World {
    router: Router,
    /// The rules that may match the client's requests.
    rules: RuleSet,
    shards: Shards,
    done: Vec<Done>,
}

impl World {
    fn new(shards: usize, size: u64, change: impl FnOnce(&mut Volume)) -> Self {
        let mut volume = Volume::new(VOLUME, "v", DeviceInfo::plain(size, "memory"));
        volume.sequential_threshold = 0;
        change(&mut volume);
        let registry = Registry::new(vec![volume]).expect("a good table");
        let buffers = BufPool::default();
        let config = RouterConfig { origin: ORIGIN, shards, registry: &registry, buffers };
        let held = if size <= 64 * STRIPE_SIZE { size } else { 0 };
        let shards = Shards::new(shards, held);
        Self { router: Router::new(config), rules: RuleSet::default(), shards, done: Vec::new() }
    }

    fn submit(&mut self, io: Io) {
        let source = Source { client: CLIENT, rules: self.rules, arrived: Instant(8) };
        let whom = (source, VOLUME);
        let taken = self.router.submit(Instant(9), whom, io, &mut self.shards, &mut self.done);
        assert!(taken.is_ok(), "the router has room");
    }

    /// Sets rules, and makes the client one of this user.
    fn set_rules(&mut self, texts: &[&str], user: u32) {
        let rules: Vec<_> = texts.iter().map(|text| text.parse().expect("a rule")).collect();
        let rules = RequestRules::new(&rules, |name| (name == "v").then_some(VOLUME), |_| None);
        self.rules = rules.of(&Sender { user: Some(user), ..Sender::default() });
        self.router.set_rules(Arc::new(rules));
    }

    fn answer(&mut self, shard: usize, place: usize, error: Option<ErrorKind>) {
        let reply = self.shards.answer(shard, place, error);
        self.router.reply(reply, &mut self.done);
        self.router.pump(&mut self.shards);
    }

    fn answer_all(&mut self) {
        while self.shards.waiting() > 0 {
            for shard in 0..self.shards.taken.len() {
                while !self.shards.taken[shard].is_empty() {
                    self.answer(shard, 0, None);
                }
            }
        }
    }

    fn one_done(&mut self) -> Done {
        assert_eq!(self.done.len(), 1);
        assert_eq!(self.router.in_flight(), 0);
        self.done.pop().expect("counted")
    }
}

fn pattern(len: usize) -> IoBuf {
    let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 4096) as u8 | 1).collect();
    IoBuf::copy_of(&bytes)
}

#[test]
fn a_request_within_a_stripe_passes_without_a_copy() {
    let mut world = World::new(3, 8 * STRIPE_SIZE, |_| ());
    let buf = pattern(4096);
    let memory = buf.as_ptr();
    world.submit(Io::write(IoTag(1), STRIPE_SIZE - 4096, buf).with_fua(true));
    let shard = shard_of(VOLUME, 0, 3);
    let request = &world.shards.taken[shard][0];
    assert_eq!(request.buf.as_ptr(), memory);
    assert!(request.flags.fua);
    world.answer_all();
    let done = world.one_done();
    assert_eq!(done.completion.buf.as_ptr(), memory);
    assert_eq!((done.client, done.completion.tag), (CLIENT, IoTag(1)));
    assert_eq!((done.started, done.op), (Instant(8), IoOp::Write));
}

#[test]
fn a_request_over_stripes_is_joined_from_its_pieces() {
    let size = 8 * STRIPE_SIZE;
    for shards in [1, 2, 5] {
        let mut world = World::new(shards, size, |_| ());
        let data = pattern(3 * STRIPE_SIZE as usize + 1000);
        let offset = STRIPE_SIZE / 2 + 3;
        let expected = data.to_vec();
        world.submit(Io::write(IoTag(1), offset, data).with_fua(true));
        assert_eq!(world.shards.waiting(), 4);
        assert!(world.shards.taken.iter().flatten().all(|request| request.flags.fua));
        world.answer_all();
        let done = world.one_done();
        assert!(done.completion.result.is_ok());
        assert_eq!(&done.completion.buf[..], &expected[..]);

        let range = ByteRange::new(offset, expected.len() as u64);
        world.submit(Io::read(IoTag(2), range, IoBuf::zeroed(expected.len())));
        world.answer_all();
        assert_eq!(&world.one_done().completion.buf[..], &expected[..]);
    }
}

#[test]
fn the_first_error_wins_and_the_rest_is_not_sent() {
    let mut world = World::new(2, 1000 * STRIPE_SIZE, |_| ());
    let range = ByteRange::new(0, 500 * STRIPE_SIZE);
    world.submit(Io::bare(IoTag(4), IoOp::Discard, range));
    assert_eq!(world.shards.waiting(), WAVE as usize);
    world.answer(0, 0, None);
    assert_eq!(world.shards.waiting(), WAVE as usize, "the next piece follows");
    world.answer(0, 3, Some(ErrorKind::NoSpace));
    world.answer(1, 0, Some(ErrorKind::Media));
    assert_eq!(world.shards.waiting(), WAVE as usize - 2, "nothing follows an error");
    assert!(world.done.is_empty(), "answered when no piece is in flight");
    world.answer_all();
    let done = world.one_done();
    assert_eq!(done.completion.result.map_err(|e| e.kind()), Err(ErrorKind::NoSpace));
}

#[test]
fn a_flush_is_complete_when_every_shard_has_answered() {
    for shards in 1..=5 {
        for last in 0..shards {
            let mut world = World::new(shards, 8 * STRIPE_SIZE, |_| ());
            world.submit(Io::flush(IoTag(8)));
            for shard in (0..shards).filter(|&shard| shard != last) {
                assert_eq!(world.router.unanswered(), 1);
                assert_eq!(world.shards.taken[shard].len(), 1);
                assert!(world.shards.taken[shard][0].range.is_empty());
                world.answer(shard, 0, None);
                assert!(world.done.is_empty());
            }
            world.answer(last, 0, None);
            assert!(world.one_done().completion.result.is_ok());
        }
    }
}

#[test]
fn a_flush_fails_when_one_shard_fails() {
    let mut world = World::new(3, 8 * STRIPE_SIZE, |_| ());
    world.submit(Io::flush(IoTag(8)));
    world.answer(2, 0, None);
    world.answer(0, 0, Some(ErrorKind::Media));
    // At once: the shard has reported its loss, and another flush may succeed before the other
    // pieces are answered.
    assert_eq!(world.done.len(), 1);
    // A server whose clients have all gone need not wait for the other pieces. Found by the
    // operator, 2026-11-26.
    assert_eq!((world.router.in_flight(), world.router.unanswered()), (1, 0));
    world.answer(1, 0, None);
    let done = world.one_done();
    assert_eq!(done.completion.result.map_err(|e| e.kind()), Err(ErrorKind::Media));
}

/// A direct write over two stripes: the primary completes one half, then a flush fails, then the
/// primary completes the other half. The first half may be lost, and the client that flushed was
/// told before the write was answered. So the write must fail: the next flush would succeed without
/// it (seed 600249).
#[test]
fn a_direct_write_fails_if_a_flush_failed_since_the_primary_had_it() {
    for (first, second, known) in [(0, 1, 1), (1, 0, 1), (1, 1, 2), (0, 0, 0), (1, 1, 1)] {
        let mut gate = FlushGate::new(1, false, Coming::new(1));
        let mut world = World::new(1, 8 * STRIPE_SIZE, |_| ());
        world.router.watch_flushes(VOLUME, gate.failed());
        world.submit(Io::write(IoTag(1), STRIPE_SIZE - 4096, pattern(8192)));
        world.submit(Io::write(IoTag(2), 0, pattern(4096)));
        for _ in 0..known {
            assert!(matches!(gate.ask(Asked { shard: 0, tag: IoTag(0) }), Ask::Send));
            assert!(gate.ended(0, &Err(ErrorKind::Media.into())).result.is_err());
            gate.told(0);
        }
        for direct in [first, second, second] {
            let reply = world.shards.answer(0, 0, None);
            let reply = Reply { direct: Some(direct), ..reply };
            world.router.reply(reply, &mut world.done);
        }
        let good: Vec<bool> = world.done.iter().map(|d| d.completion.result.is_ok()).collect();
        assert_eq!(good, [first.min(second) == known, second == known], "{first} {second} {known}");
    }
}

#[test]
fn requests_that_cannot_be_are_answered_at_once() {
    let size = 4 * STRIPE_SIZE + 512;
    let cases = [
        (IoOp::Discard, ByteRange { offset: size, len: 1 }, Err(ErrorKind::OutOfRange)),
        (IoOp::Discard, ByteRange { offset: 512, len: size }, Err(ErrorKind::OutOfRange)),
        (IoOp::Discard, ByteRange { offset: u64::MAX, len: 2 }, Err(ErrorKind::OutOfRange)),
        (IoOp::WriteZeroes, ByteRange { offset: size, len: 0 }, Ok(())),
    ];
    for (op, range, expected) in cases {
        let mut world = World::new(2, size, |_| ());
        world.submit(Io::bare(IoTag(1), op, range));
        assert_eq!(world.one_done().completion.result.map_err(|e| e.kind()), expected, "{range}");
    }
    let mut world = World::new(2, 8 << 30, |_| ());
    world.submit(Io::bare(IoTag(1), IoOp::Discard, ByteRange::new(0, DISCARD_MAX + 1)));
    let result = world.one_done().completion.result;
    assert_eq!(result.map_err(|e| e.kind()), Err(ErrorKind::OutOfRange));
}

#[test]
fn a_read_only_volume_can_only_be_read() {
    let mut world = World::new(2, STRIPE_SIZE, |volume| volume.read_only = true);
    let whole = ByteRange::new(0, STRIPE_SIZE);
    for io in [
        Io::write(IoTag(1), 0, IoBuf::zeroed(512)),
        Io::bare(IoTag(1), IoOp::Discard, whole),
        Io::bare(IoTag(1), IoOp::WriteZeroes, whole),
    ] {
        world.submit(io);
        let result = world.one_done().completion.result;
        assert_eq!(result.map_err(|e| e.kind()), Err(ErrorKind::ReadOnly));
    }
    world.submit(Io::read(IoTag(1), ByteRange::new(0, 512), IoBuf::zeroed(512)));
    world.submit(Io::flush(IoTag(2)));
    world.answer_all();
    assert!(world.done.iter().all(|done| done.completion.result.is_ok()));
    assert_eq!(world.done.len(), 2);
}

/// What each piece of the requests in flight was told, and all of them answered.
fn told(world: &mut World) -> Vec<Option<Bypass>> {
    let told = world.shards.taken.iter().flatten().map(|request| request.bypass).collect();
    world.answer_all();
    told
}

#[test]
fn rules_decide_before_streams_do() {
    let mut world =
        World::new(2, 16 * STRIPE_SIZE, |volume| volume.sequential_threshold = 64 << 10);
    let stream = |world: &mut World| {
        let read =
            |i: u64| Io::read(IoTag(i), ByteRange::new(i << 16, 1 << 16), IoBuf::zeroed(1 << 16));
        let mut all = Vec::new();
        for i in 0..16 {
            world.submit(read(i));
            all.extend(told(world));
        }
        all
    };
    assert_eq!(stream(&mut world).last(), Some(&Some(Bypass::Sequential)));
    world.set_rules(&["cache user=7 volume=v", "bypass size=..4KiB"], 7);
    assert!(stream(&mut world).iter().all(Option::is_none));
    world.submit(Io::flush(IoTag(1)));
    assert!(told(&mut world).iter().all(Option::is_none), "a flush is subject to no rule");
    let counts = |world: &World| {
        let count = |count: &RuleCount| (count.requests, count.bytes);
        world.router.rule_counts().iter().map(count).collect::<Vec<_>>()
    };
    assert_eq!(counts(&world), [(16, 1 << 20), (0, 0)]);
    // Another client; the rule that stays goes on counting, in its new place.
    world.set_rules(&["bypass size=..4KiB", "cache user=7 volume=v"], 8);
    world.submit(Io::write(IoTag(1), STRIPE_SIZE - 2048, pattern(4096)));
    assert_eq!(told(&mut world), [Some(Bypass::Rule); 2], "each piece of a request");
    assert_eq!(counts(&world), [(1, 4096), (16, 1 << 20)]);
    world.set_rules(&[], 7);
    assert_eq!(stream(&mut world).last(), Some(&Some(Bypass::Sequential)));
}

#[test]
fn a_stream_is_sent_past_the_cache_after_its_threshold() {
    let mut world =
        World::new(2, 16 * STRIPE_SIZE, |volume| volume.sequential_threshold = 512 << 10);
    let mut past = Vec::new();
    for i in 0..32u64 {
        world.submit(Io::read(IoTag(i), ByteRange::new(i << 16, 1 << 16), IoBuf::zeroed(1 << 16)));
        let request = world.shards.taken.iter().flatten().next().expect("sent");
        past.push(request.bypass == Some(Bypass::Sequential));
        world.answer_all();
    }
    assert!(!past[0] && !past[3], "{past:?}");
    assert!(past[12..].iter().all(|&bypass| bypass), "{past:?}");
}

#[test]
fn what_a_shard_has_no_room_for_waits_in_order() {
    let mut world = World::new(1, 8 * STRIPE_SIZE, |_| ());
    world.shards.room = 2;
    for i in 0..10 {
        world.submit(Io::write(IoTag(i), i * 512, IoBuf::zeroed(512)));
    }
    assert_eq!(world.shards.waiting(), 2);
    world.answer_all();
    let tags: Vec<u64> = world.done.iter().map(|done| done.completion.tag.0).collect();
    assert_eq!(tags, (0..10).collect::<Vec<_>>());
}

#[test]
fn pieces_in_flight_are_bounded_whatever_clients_ask() {
    let mut world = World::new(2, 8 << 30, |_| ());
    let whole = ByteRange::new(0, 200 * STRIPE_SIZE);
    for i in 0..100 {
        world.submit(Io::bare(IoTag(i), IoOp::WriteZeroes, whole));
    }
    assert_eq!(world.shards.waiting(), PIECES_MAX);
    world.answer_all();
    assert_eq!(world.done.len(), 100);
    assert_eq!(world.router.in_flight(), 0);
}

#[derive(Clone, Debug)]
struct Step {
    op: IoOp,
    offset: u64,
    len: u64,
    fill: u8,
}

const SPAN: u64 = 5 * STRIPE_SIZE + 1536;

fn step() -> impl Strategy<Value = Step> {
    let op = prop_oneof![
        Just(IoOp::Read),
        Just(IoOp::Write),
        Just(IoOp::Flush),
        Just(IoOp::Discard),
        Just(IoOp::WriteZeroes),
    ];
    // Near stripe boundaries more often than elsewhere.
    let near = (0..6u64, 0..4096u64).prop_map(|(s, d)| (s * STRIPE_SIZE + d).saturating_sub(2048));
    let offset = prop_oneof![near, 0..SPAN];
    let len = prop_oneof![1..5000u64, 1..SPAN];
    (op, offset, len, 1..=255u8).prop_map(|(op, offset, len, fill)| {
        let offset = offset.min(SPAN - 1);
        Step { op, offset, len: len.min(SPAN - offset), fill }
    })
}

fn request(step: &Step, tag: u64) -> Io {
    let range = ByteRange::new(step.offset, step.len);
    match step.op {
        IoOp::Read => Io::read(IoTag(tag), range, IoBuf::zeroed(step.len as usize)),
        IoOp::Write => {
            let mut buf = IoBuf::zeroed(step.len as usize);
            buf.fill(step.fill);
            Io::write(IoTag(tag), step.offset, buf)
        }
        IoOp::Flush => Io::flush(IoTag(tag)),
        op => {
            let mut io = Io::bare(IoTag(tag), op, range);
            io.flags = IoFlags { no_hole: true, ..IoFlags::default() };
            io
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// One request at a time, answered by the shards in any order, behaves as a plain array.
    #[test]
    fn a_volume_behaves_as_an_array(
        shards in 1..5usize,
        room in 1..8usize,
        steps in prop::collection::vec(step(), 1..12),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 64),
    ) {
        let mut world = World::new(shards, SPAN, |_| ());
        world.shards.room = room;
        let mut model = vec![0u8; SPAN as usize];
        let mut picks = picks.iter().cycle();
        for (tag, step) in steps.iter().enumerate() {
            world.submit(request(step, tag as u64));
            while world.shards.waiting() > 0 {
                let busy: Vec<usize> =
                    (0..shards).filter(|&s| !world.shards.taken[s].is_empty()).collect();
                let pick = picks.next().expect("endless");
                let shard = busy[pick.index(busy.len())];
                let place = pick.index(world.shards.taken[shard].len());
                world.answer(shard, place, None);
            }
            let done = world.one_done();
            prop_assert!(done.completion.result.is_ok());
            prop_assert_eq!(done.completion.tag, IoTag(tag as u64));
            let bytes = step.offset as usize..(step.offset + step.len) as usize;
            match step.op {
                IoOp::Read => prop_assert!(done.completion.buf[..] == model[bytes]),
                IoOp::Write => model[bytes].fill(step.fill),
                IoOp::Flush => {}
                _ => model[bytes].fill(0),
            }
        }
        prop_assert!(world.shards.data == model);
    }

    /// Many requests at once, with errors and shards without room: each is answered exactly once,
    /// with a buffer of its own length, and with an error exactly when one of its pieces failed.
    #[test]
    fn every_request_is_answered_once(
        shards in 1..5usize,
        room in 1..8usize,
        steps in prop::collection::vec(step(), 1..40),
        picks in prop::collection::vec((any::<prop::sample::Index>(), 0..20u8), 1..200),
    ) {
        let mut world = World::new(shards, SPAN, |_| ());
        world.shards.room = room;
        for (tag, step) in steps.iter().enumerate() {
            world.submit(request(step, tag as u64));
        }
        let mut failed = 0usize;
        let mut picks = picks.iter().cycle();
        while world.shards.waiting() > 0 {
            let (pick, luck) = picks.next().expect("endless");
            let busy: Vec<usize> =
                (0..shards).filter(|&s| !world.shards.taken[s].is_empty()).collect();
            let shard = busy[pick.index(busy.len())];
            let place = pick.index(world.shards.taken[shard].len());
            let error = (*luck == 0).then_some(ErrorKind::Media);
            failed += usize::from(error.is_some());
            world.answer(shard, place, error);
        }
        prop_assert_eq!(world.router.in_flight(), 0);
        let mut tags: Vec<u64> = world.done.iter().map(|d| d.completion.tag.0).collect();
        tags.sort_unstable();
        prop_assert_eq!(tags, (0..steps.len() as u64).collect::<Vec<_>>());
        let errors = world.done.iter().filter(|d| d.completion.result.is_err()).count();
        prop_assert!(errors <= failed && (errors > 0) == (failed > 0));
        for done in &world.done {
            let step = &steps[done.completion.tag.0 as usize];
            let len = if matches!(step.op, IoOp::Read | IoOp::Write) { step.len } else { 0 };
            prop_assert_eq!(done.completion.buf.len() as u64, len);
        }
    }
}
