//! The cache engine on shard threads: clients find the data that they wrote, also after a stop and
//! a start, while a cache much smaller than the volume constantly reclaims and destages.
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use forebay_block::testing::Numbers;
use forebay_block::{
    Arena, ByteRange, Completion, DeviceInfo, Io, IoBuf, IoOp, IoTag, Session, VolumeId,
};
use forebay_device::{BlockDevice, Clock, MemoryDevice};
use forebay_engine::{
    Bypass, ContentLocality, Engine, Eviction, Mode, Pace, Setting, ShardConfig, Trust,
    VolumeConfig,
};
use forebay_runtime::{Access, Address, Blocking, Listener, MakeShard, Pool, PoolConfig, Shard};
use forebay_volume::{Registry, Volume};

#[path = "support/session.rs"]
mod session;
use session::Scripted;

const SIZE: u64 = (48 << 20) + 512;
const AREA: u64 = 4 << 20;
const SHARDS: usize = 3;
const VOLUME: VolumeId = VolumeId(0);

fn maker(shard: usize, fresh: bool, epoch: u32, ordered: Option<u64>) -> MakeShard {
    Box::new(move |buffers| -> Box<dyn Shard> {
        let config = ShardConfig {
            shard: shard as u16,
            shards: 1,
            pool: 99,
            area: ByteRange::new((1 << 20) + shard as u64 * AREA, AREA),
            segment_size: 128 << 10,
            log_segments: None,
            unit_entries: true,
            volumes: vec![VolumeConfig {
                id: VOLUME,
                size: SIZE,
                mode: Mode::WriteBack,
                discard: true,
                rotational: false,
                foreground: Arc::default(),
                optimal_io: 4096,
                share: forebay_engine::DirtyShare::default(),
                cache_share: forebay_engine::CacheShare::default(),
                pace: Pace::default(),
                ordered,
                suspect: false,
                lost: false,
            }],
            ram_bytes: 256 << 10,
            index_blocks: AREA / 4096 * 3 / 2,
            dirty_stripes: u64::MAX,
            eviction: Eviction::Lru,
            write_cache_depth: Duration::from_millis(50),
            dirty_limit: forebay_engine::Part::Percent(50),
            dirty_target: forebay_engine::Part::Percent(50),
            idle_destage: Some(Duration::from_secs(5)),
            fill_rate: None,
            wear_budget: None,
            patience: Duration::from_secs(30),
            destage_depth: 16,
            compress: true,
            compress_ram: true,
            content: ContentLocality::Rewrite,
            cache_volatile: true,
            discard: false,
            discarded: true,
            buffers,
            fresh,
            trust: Trust::Full,
            detached: Vec::new(),
            accept_loss: false,
            epoch,
            last_stop: forebay_engine::LastStop::default(),
        };
        Box::new(Engine::new(config, Clock::start().now()))
    })
}

struct World {
    cache: Arc<dyn BlockDevice>,
    primary: Arc<dyn BlockDevice>,
    model: Vec<u8>,
    numbers: Numbers,
    /// If the volume is ordered, the blocks that a cut may have in each shard.
    ordered: Option<u64>,
}

impl World {
    fn new() -> Self {
        let cache = Arc::new(MemoryDevice::new((1 << 20) + SHARDS as u64 * AREA));
        let primary = Arc::new(MemoryDevice::new(SIZE));
        let (model, numbers) = (vec![0; SIZE as usize], Numbers::new(1));
        Self { cache, primary, model, numbers, ordered: None }
    }

    fn pool(&self, epoch: u32) -> Pool {
        let mut volume = Volume::new(VOLUME, "v", DeviceInfo::plain(SIZE, "memory"));
        volume.sequential_threshold = 1 << 20;
        let registry = Registry::new(vec![volume]).unwrap();
        let make = |shard| maker(shard, epoch == 1, epoch, self.ordered);
        let shards = (0..SHARDS).map(make).collect();
        let arena = Arena::new(6 << 20);
        let mut config = PoolConfig::new(registry, vec![Arc::clone(&self.primary)], shards, arena);
        config.cache = Some(Arc::clone(&self.cache));
        Pool::start(config).unwrap()
    }

    /// Requests that do not overlap, after which the model holds the volume's expected content.
    fn script(&mut self) -> Vec<Io> {
        let mut script = Vec::new();
        let mut at = self.numbers.next() % 300_000;
        while script.len() < 40 && at < SIZE {
            let tag = IoTag(at);
            let roll = self.numbers.next();
            let len = match roll % 8 {
                0 => 1 + roll % 3_000_000,
                1..4 => 1 + roll % 20_000,
                _ => 4096,
            };
            let start = if roll.is_multiple_of(3) { at } else { at.next_multiple_of(4096) };
            let len = len.min(SIZE.saturating_sub(start));
            if len == 0 {
                break;
            }
            let range = ByteRange::new(start, len);
            let bytes = start as usize..(start + len) as usize;
            script.push(match roll >> 32 & 15 {
                0 => {
                    self.model[bytes].fill(0);
                    Io::bare(tag, IoOp::WriteZeroes, range)
                }
                1 => Io::flush(tag),
                2..8 => Io::read(tag, range, IoBuf::zeroed(len as usize)),
                _ => {
                    let word = self.numbers.next();
                    let content = &mut self.model[bytes];
                    for (i, byte) in content.iter_mut().enumerate() {
                        *byte = (word >> (i % 8 * 8)) as u8 ^ (i / 512) as u8;
                    }
                    let fua = roll.is_multiple_of(5);
                    Io::write(tag, start, IoBuf::copy_of(content)).with_fua(fua)
                }
            });
            at = start + len + self.numbers.next() % 700_000;
        }
        script
    }

    /// Runs a script on a new connection, and compares the data read with the model.
    fn run(&mut self, pool: &Pool, name: &str) {
        let script = self.script();
        let count = script.len();
        let reads: Vec<_> = script.iter().map(|io| (io.tag, io.op, io.range)).collect();
        let answers = connect(pool, name, script);
        for _ in 0..count {
            let done = answers.recv_timeout(Duration::from_secs(30)).expect("it is answered");
            done.result.unwrap();
            let (_, op, range) = reads.iter().find(|(tag, ..)| *tag == done.tag).unwrap();
            if *op == IoOp::Read {
                let expected = &self.model[range.offset as usize..range.end() as usize];
                assert!(done.buf[..] == *expected, "a read of {range} is not what was written");
            }
        }
    }

    fn check_primary(&self) {
        let mut disk = Blocking::open(&*self.primary).unwrap();
        let content = disk.read(ByteRange::new(0, SIZE)).unwrap();
        let wrong = content.iter().zip(&self.model).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "the primary alone is complete after a drain");
    }
}

fn connect(pool: &Pool, name: &str, script: Vec<Io>) -> Receiver<Completion> {
    let (tell, hear) = channel();
    let path = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
    let listener =
        Listener::bind(&Address::Unix { path: path.clone(), access: Access::mode(0o600) }).unwrap();
    let script = std::sync::Mutex::new(script);
    let factory = move || -> Box<dyn Session> {
        let script = std::mem::take(&mut *script.lock().unwrap());
        Box::new(Scripted { script, answers: tell.clone(), in_flight: 0 })
    };
    pool.listen(vec![listener], Arc::new(factory)).unwrap();
    let _stream = std::os::unix::net::UnixStream::connect(path).unwrap();
    hear
}

/// A database's log and doublewrite buffer look like sequential streams each time they are written.
#[test]
fn what_is_written_over_and_over_passes_the_cache_by_a_few_times_only() {
    let world = World::new();
    let pool = world.pool(1);
    pool.set(Setting::Eviction(Eviction::Frequency));
    let mut passed = Vec::new();
    for round in 0..8 {
        let (piece, area) = (256 << 10, 2 << 20);
        let writes = (0..area).step_by(piece).map(|at| {
            let buf = IoBuf::copy_of(&vec![round; piece]);
            Io::write(IoTag(at as u64), at as u64, buf)
        });
        let script: Vec<Io> = writes.collect();
        let count = script.len();
        let answers = connect(&pool, &format!("over-{round}"), script);
        for _ in 0..count {
            answers.recv_timeout(Duration::from_secs(30)).expect("answered").result.unwrap();
        }
        passed.push(pool.stats().unwrap().total.bypassed_by[Bypass::Sequential as usize]);
    }
    assert!(passed[0] > 0, "a stream passes: {passed:?}");
    assert!(passed[4] == passed[7], "none of the last four rounds does: {passed:?}");
    assert!(pool.stop(true).complete);
}

/// Each write is durable before the next one is sent, to another stripe.
#[test]
fn a_stop_leaves_the_primary_of_an_ordered_volume_at_one_moment() {
    const STRIPES: u64 = 40;
    let stripe_of = |number: u64| number * 7 % STRIPES;
    let world = World { ordered: Some(64), ..World::new() };
    let pool = world.pool(1);
    let last = 400_u64;
    for number in 1..=last {
        let block: Vec<u8> = number.to_le_bytes().repeat(512);
        let at = stripe_of(number) << 20;
        let write = Io::write(IoTag(number), at, IoBuf::copy_of(&block)).with_fua(true);
        let answers = connect(&pool, &format!("order-{number}"), vec![write]);
        answers.recv_timeout(Duration::from_secs(30)).expect("answered").result.unwrap();
    }
    let destaged = pool.stats().unwrap().total.destaged_blocks;
    assert!(destaged > 0, "cuts are written while clients write");
    assert!(pool.stop(false).complete);

    let mut disk = Blocking::open(&*world.primary).unwrap();
    let mut number_at = |stripe: u64| {
        let block = disk.read(ByteRange::new(stripe << 20, 4096)).unwrap();
        u64::from_le_bytes(block[..8].try_into().unwrap())
    };
    let found: Vec<u64> = (0..STRIPES).map(&mut number_at).collect();
    let newest = found.iter().copied().max().unwrap();
    for stripe in 0..STRIPES {
        let then = (1..=newest).rev().find(|&number| stripe_of(number) == stripe).unwrap_or(0);
        assert_eq!(found[stripe as usize], then, "stripe {stripe} next to write {newest}");
    }
}

/// Text is compressed densely when written: this is more of it than one turn has time for.
#[test]
fn a_long_write_is_made_denser_turn_by_turn() {
    let world = World::new();
    let pool = world.pool(1);
    let len = 768 << 10;
    let mut text = Vec::new();
    for line in 0.. {
        text.extend(format!("{line}: a line of text that differs from the others\n").bytes());
        if text.len() >= len {
            break;
        }
    }
    text.truncate(len);
    let write = Io::write(IoTag(1), 0, IoBuf::copy_of(&text));
    let answers = connect(&pool, "dense-write", vec![write]);
    answers.recv_timeout(Duration::from_secs(30)).expect("answered").result.unwrap();
    let stats = pool.stats().unwrap().total;
    assert_eq!(stats.dense_blocks, len as u64 / 4096, "every block was");
    assert!(stats.log_bytes < len as u64 / 4, "{} bytes of log", stats.log_bytes);
    let read = Io::read(IoTag(2), ByteRange::new(0, len as u64), IoBuf::zeroed(len));
    let answers = connect(&pool, "dense-read", vec![read]);
    let done = answers.recv_timeout(Duration::from_secs(30)).expect("answered");
    assert!(done.buf[..] == text[..], "what was written is read");
    assert!(pool.stop(true).complete);
}

#[test]
fn what_was_written_is_read_before_and_after_stops_and_after_a_drain() {
    let mut world = World::new();
    for epoch in 1..4 {
        let pool = world.pool(epoch);
        for i in 0..12 {
            world.run(&pool, &format!("cached-{epoch}-{i}"));
        }
        let stats = pool.stats().unwrap().total;
        let parts = stats.hits + stats.partial_hits + stats.misses + stats.bypasses;
        assert_eq!(stats.lookups, parts, "every lookup has one outcome");
        assert!(stats.log_records > 0 && stats.destaged_blocks > 0, "{stats:?}");
        let last = epoch == 3;
        let stopped = pool.stop(last);
        assert!(stopped.complete);
        assert!(!last || stopped.dirty_blocks == 0);
    }
    world.check_primary();
}
