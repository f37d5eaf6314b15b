//! `forebay salvage`: writes the dirty blocks of a cache device to a primary, without a server and
//! without a change to the cache device. A cache or a primary that a start would refuse is refused.
//! The engine reads the log as at a start, and destages as it does when a cache device has failed;
//! here its reads and writes are carried out one by one.

use std::fmt::Display;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use forebay_block::{
    BLOCK_SIZE, BufPool, Completion, ErrorKind, Instant, Io, IoBuf, IoOp, IoResult, VolumeId,
};
use forebay_control::config::STATE_DIR;
use forebay_control::units::Size;
use forebay_device::{BlockDevice, STRAGGLE_MAX, open_cache_read_only, open_primary};
use forebay_engine::salvage::{Hole, LostRange};
use forebay_engine::{
    ContentLocality, Effects, Engine, Eviction, LastStop, Mode, Pace, Shard, ShardConfig, State,
    Target, Trust, VolumeConfig,
};
use forebay_format::{Superblock, VolumeRecord};
use forebay_runtime::detached::{self, OfShard};
use forebay_runtime::{Blocking, Record, StateDir, Witness};
use forebay_volume::offline;
use forebay_volume::pool::{self, area_of, index_blocks, is_removed};
use serde_json::{Value, json};

use crate::server::cache::stops::Stops;
use crate::server::cache::superblocks::Superblocks;
use crate::server::cache::{of_shard, read_at};
use crate::server::primaries;
use crate::server::primaries::samples::Table;
use crate::server::primaries::users::Users;
use crate::{busy, output};

/// Memory for recent blocks, of which a salvage needs almost none.
const RAM_BYTES: u64 = 1 << 20;
/// Most concurrent writes that the engine requests.
const DESTAGE_DEPTH: u32 = 64;
/// Most lost ranges that are printed; the JSON output has all.
const RANGES_SHOWN: usize = 100;
/// Most separate lost ranges of a shard.
const RANGES_MAX: usize = 1 << 20;
/// Longest write of zeros, in bytes.
const ZEROS_MAX: u64 = 1 << 20;
/// Most turns without work of an engine that was told to destage everything.
const IDLE_TURNS_MAX: u32 = 100_000;

/// Arguments of `forebay salvage`.
#[derive(Args, Debug)]
pub struct SalvageArgs {
    /// The cache device
    pub cache: PathBuf,
    /// Destination of a volume's blocks: like serve's --primary
    #[arg(long, value_name = "PRIMARY", required_unless_present = "list")]
    pub to: Vec<String>,
    /// The volume that --to is for; needed if the cache holds several, once for each --to
    #[arg(long, value_name = "NAME")]
    pub volume: Vec<String>,
    /// Only list the blocks that would be written, and the lost ones
    #[arg(long, conflicts_with_all = ["to", "volume", "force"])]
    pub list: bool,
    /// Write even if the primary is another one or was changed since, or the cache is out of date
    #[arg(long)]
    pub force: bool,
    /// Directory in which the host keeps the state of the cache: it tells whether cache and primary
    /// are the last ones used, and which blocks were written past a failed cache
    #[arg(long, value_name = "DIR", default_value = STATE_DIR)]
    pub state: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What the host has on record of the cache.
#[derive(Default)]
struct Known {
    witness: Option<Record>,
    /// The samples of the primaries.
    samples: Option<Table>,
    /// Stripes that the cache left when it had failed: the primaries have newer blocks of them.
    detached: Vec<OfShard>,
    stops: Stops,
}

/// A volume of the cache, and the destination of its blocks.
struct Saved {
    record: VolumeRecord,
    /// The destination; `None` when the blocks are only counted.
    primary: Option<(Arc<dyn BlockDevice>, Blocking)>,
    bytes: u64,
}

/// The result of a salvage.
pub struct Outcome {
    /// Readable bytes, by volume.
    pub readable: Vec<(VolumeRecord, u64)>,
    /// Ranges known to be lost.
    pub lost: Vec<LostRange>,
    /// Lost records, with their shard: it is unknown which blocks they held.
    pub holes: Vec<(usize, Hole)>,
    /// Shards whose log cannot be read at all, with the reason.
    pub refused: Vec<(usize, String)>,
}

impl Outcome {
    /// Whether nothing is lost.
    pub fn is_whole(&self) -> bool {
        self.lost.is_empty() && self.holes.is_empty() && self.refused.is_empty()
    }

    /// Bytes known to be lost of a volume.
    pub fn lost_bytes(&self, id: VolumeId) -> u64 {
        self.lost.iter().filter(|lost| lost.volume == id).map(|lost| lost.range.len).sum()
    }

    /// The losses, for people.
    pub fn losses(&self) -> String {
        let mut out = String::new();
        let name =
            |id| self.readable.iter().find(|(v, _)| v.id == id).map(|(v, _)| v.name.as_str());
        for lost in self.lost.iter().take(RANGES_SHOWN) {
            let name = name(lost.volume).unwrap_or("?");
            out += &format!(
                "lost: volume {name}: {} bytes at {}\n",
                lost.range.len, lost.range.offset
            );
        }
        if self.lost.len() > RANGES_SHOWN {
            out += &format!(
                "lost: {} more ranges; --json lists them\n",
                self.lost.len() - RANGES_SHOWN
            );
        }
        for (shard, hole) in &self.holes {
            out += &format!(
                "lost: shard {shard}, {}: {} records up to {}; it is unknown which blocks they \
                 held, so any block may be older than its last write\n",
                hole.seq, hole.records, hole.last
            );
        }
        for (shard, why) in &self.refused {
            out += &format!("lost: shard {shard}: all its dirty data: {why}\n");
        }
        out
    }

    /// The losses, for machines.
    pub fn losses_json(&self) -> (Value, Value) {
        let name = |id| self.readable.iter().find(|(v, _)| v.id == id).map(|(v, _)| v.name.clone());
        let ranges = self.lost.iter().map(|lost| {
            json!({
                "volume": name(lost.volume),
                "offset": lost.range.offset,
                "length": lost.range.len,
            })
        });
        let holes = self.holes.iter().map(|(shard, hole)| {
            json!({
                "shard": shard,
                "segment": hole.seq.0,
                "records": hole.records,
                "last_record": hole.last.0,
            })
        });
        let refused =
            self.refused.iter().map(|(shard, why)| json!({"shard": shard, "reason": why}));
        (ranges.collect(), holes.chain(refused).collect())
    }
}

/// Saves all readable blocks; fails if any are lost.
pub fn run(args: &SalvageArgs) -> anyhow::Result<()> {
    let device = busy::open(|| open_cache_read_only(&args.cache))?;
    let mut queue = Blocking::open(&*device).with_context(|| args.cache.display().to_string())?;
    let superblock = superblock_of(&args.cache, &mut queue)?;
    let mut known = known(&args.state, &superblock)?;
    let size = queue.info().size;
    let copies = Superblocks::read(&mut queue, size)?.known;
    let last = pool::last_used(&superblock, known.witness.as_ref()).map_err(anyhow::Error::new);
    if let Err(why) = last.and_then(|()| known.stops.check(&copies)) {
        overrule(args, &args.cache.display().to_string(), &why)?;
        // It tells of another copy.
        known.stops = Stops::default();
    }
    let volumes = chosen(args, &superblock, &known)?;
    let users = put_on_record(args, superblock.uuid, &volumes)?;
    let outcome = salvage(&mut queue, &superblock, volumes, &known)?;
    if let Some(Err(error)) = users.map(|users| users.end()) {
        eprintln!("forebay: {}: the next start waits some seconds: {error}", args.state.display());
    }
    report(args, &superblock, &outcome)?;
    if !outcome.is_whole() {
        let saved = if args.list { "readable" } else { "saved" };
        bail!("{}: not everything is {saved}; the losses are listed above", args.cache.display());
    }
    Ok(())
}

/// The readable and the lost blocks of a cache device; nothing is written.
pub fn survey(path: &Path, queue: &mut Blocking) -> anyhow::Result<Outcome> {
    let superblock = superblock_of(path, queue)?;
    let volumes = superblock.volumes.iter().map(|record| counted(record.clone())).collect();
    salvage(queue, &superblock, volumes, &Known::default())
}

fn counted(record: VolumeRecord) -> Saved {
    Saved { record, primary: None, bytes: 0 }
}

/// The superblock, without the volumes that are gone: their primaries have everything, and their
/// entries in the log count no more.
fn superblock_of(path: &Path, queue: &mut Blocking) -> anyhow::Result<Superblock> {
    let size = queue.info().size;
    let mut read = |offset: u64, bytes: &mut [u8]| read_at(queue, size, offset, bytes);
    let found = offline::superblock(&mut read);
    let mut superblock = found.map_err(|error| anyhow!("{}: {error}", path.display()))?;
    pool::check_geometry(&superblock).with_context(|| path.display().to_string())?;
    superblock.volumes.retain(|volume| !is_removed(volume));
    Ok(superblock)
}

/// The host's records of the cache.
fn known(state: &Path, superblock: &Superblock) -> anyhow::Result<Known> {
    let uuid = superblock.uuid;
    let found = match state.exists() {
        true => {
            let witness = Witness::open(state).map_err(crate::server::cache::no_state)?;
            witness.load(uuid)?.map(|record| (record, witness))
        }
        false => None,
    };
    let Some((record, witness)) = found else {
        eprintln!(
            "forebay: {} has no record of this cache: it may be an older copy, another cache may \
             have served the primary since, and if it failed while serving, it may hold blocks \
             that are older than the primary's; name the server's directory with --state",
            state.display()
        );
        return Ok(Known::default());
    };
    if record.trust == Trust::Nothing {
        bail!(
            "all data of this cache was on the primaries before they were written without it: \
             there is nothing to save"
        );
    }
    let state = witness.state();
    let samples = Table::load(state, superblock).unwrap_or_else(|error| {
        eprintln!("forebay: the samples of the primaries cannot be read, and are ignored: {error}");
        None
    });
    Ok(Known {
        samples,
        detached: detached::read(state, uuid)?,
        witness: Some(record),
        stops: Stops::load(state, superblock)?,
    })
}

/// Passes a refusal over if that is wanted, or if nothing is written.
fn overrule(args: &SalvageArgs, what: &str, why: &dyn Display) -> anyhow::Result<()> {
    if !args.force && !args.list {
        bail!("{what}: {why}. Nothing was written; to write the blocks all the same, add --force");
    }
    eprintln!("forebay: {what}: {why}");
    Ok(())
}

/// The volumes to save, each with its primary.
fn chosen(
    args: &SalvageArgs,
    superblock: &Superblock,
    known: &Known,
) -> anyhow::Result<Vec<Saved>> {
    if args.list {
        return Ok(superblock.volumes.iter().map(|record| counted(record.clone())).collect());
    }
    let names: Vec<&str> = superblock.volumes.iter().map(|v| v.name.as_str()).collect();
    let wanted: Vec<&str> = match (args.volume.as_slice(), names.as_slice()) {
        ([], [one]) => vec![one],
        ([], _) => bail!(
            "the cache holds the volumes {}: give --volume NAME --to PRIMARY for each to save",
            names.join(", ")
        ),
        (volumes, _) => volumes.iter().map(String::as_str).collect(),
    };
    if wanted.len() != args.to.len() {
        bail!(
            "{} volumes and {} primaries: each --volume needs one --to",
            wanted.len(),
            args.to.len()
        );
    }
    if let Some((_, name)) =
        wanted.iter().enumerate().find(|(at, name)| wanted[..*at].contains(name))
    {
        bail!("volume {name} is given twice; salvage it once for each destination");
    }
    let mut saved = Vec::new();
    for (name, uri) in wanted.into_iter().zip(&args.to) {
        let record = superblock.volumes.iter().find(|record| record.name == name);
        let Some(record) = record else {
            bail!("the cache holds no volume {name}; it holds {}", names.join(", "));
        };
        saved.push(target(args, (superblock, known), record, uri)?);
    }
    Ok(saved)
}

/// Opens the primary for a volume's blocks, if a start would serve it.
fn target(
    args: &SalvageArgs,
    (superblock, known): (&Superblock, &Known),
    record: &VolumeRecord,
    uri: &str,
) -> anyhow::Result<Saved> {
    let name = &record.name;
    let device = busy::open(|| open_primary(uri)).with_context(|| format!("volume {name}"))?;
    let info = device.info();
    if info.read_only {
        bail!("volume {name}: {uri} cannot be written");
    }
    if info.size < record.size {
        bail!(
            "volume {name}: {uri} has {} bytes, too few for a volume of {}",
            info.size,
            record.size
        );
    }
    let samples = known.samples.as_ref().map_or(&[][..], |table| table.of(record.id));
    let spec = primaries::compared(name, &*device, Some((record, samples)), Blocking::PATIENCE)?;
    let witness = known.witness.as_ref().filter(|witness| witness.epoch == superblock.epoch);
    if let Err(why) = pool::rejoin(record, &spec, witness) {
        overrule(args, uri, &why)?;
    }
    // A server may have been killed just before.
    device.await_stragglers();
    let queue = Blocking::open(&*device).with_context(|| format!("volume {name}"))?;
    Ok(Saved { record: record.clone(), primary: Some((device, queue)), bytes: 0 })
}

/// Puts the destinations on record as in use. If this process is killed, their servers may carry
/// out its last requests late: the next start waits for them.
fn put_on_record(
    args: &SalvageArgs,
    uuid: [u8; 16],
    volumes: &[Saved],
) -> anyhow::Result<Option<Users>> {
    let primaries = volumes.iter().filter_map(|volume| volume.primary.as_ref());
    let primaries: Vec<_> = primaries.map(|(device, _)| Arc::clone(device)).collect();
    if primaries.is_empty() || !args.state.exists() {
        return Ok(None);
    }
    let state = StateDir::open(&args.state);
    match state.and_then(|state| Users::begin(&state, uuid, &primaries)) {
        Ok(users) => Ok(Some(users)),
        Err(error) => {
            let why = format!(
                "it cannot be recorded that the primaries are written: if this is interrupted, \
                 start no server for {} s: {error}",
                STRAGGLE_MAX.as_secs()
            );
            overrule(args, &args.state.display().to_string(), &why)?;
            Ok(None)
        }
    }
}

/// Reads the log of every shard, and writes the dirty blocks to their destinations.
fn salvage(
    cache: &mut Blocking,
    superblock: &Superblock,
    mut volumes: Vec<Saved>,
    known: &Known,
) -> anyhow::Result<Outcome> {
    let (mut lost, mut holes, mut refused) = (Vec::new(), Vec::new(), Vec::new());
    for shard in 0..superblock.shards.len() {
        let detached = of_shard(&known.detached, shard);
        let last_stop = known.stops.of_shard(shard);
        let config = ShardConfig { detached, last_stop, ..config_of(superblock, shard, &volumes) };
        let engine = Engine::new(config, Instant(0));
        let mut drive = Drive { engine, fx: Effects::default(), now: Instant(0) };
        drive.run(cache, &mut volumes)?;
        if let State::Refused(why) = drive.engine.state() {
            refused.push((shard, why.clone()));
        }
        lost.extend(drive.engine.lost_ranges(RANGES_MAX));
        holes.extend(drive.engine.lost_records().iter().map(|&hole| (shard, hole)));
    }
    lost.sort_by_key(|lost: &LostRange| (lost.volume, lost.range.offset));
    for volume in &mut volumes {
        if let Some((_, queue)) = &mut volume.primary {
            queue.flush().with_context(|| format!("volume {}", volume.record.name))?;
        }
    }
    let readable = volumes.into_iter().map(|volume| (volume.record, volume.bytes)).collect();
    Ok(Outcome { readable, lost, holes, refused })
}

/// The configuration of an engine that writes nothing to its cache device, and only destages.
fn config_of(superblock: &Superblock, shard: usize, volumes: &[Saved]) -> ShardConfig {
    let area = superblock.shards[shard];
    let volumes = volumes.iter().map(|volume| VolumeConfig {
        id: volume.record.id,
        size: volume.record.size,
        mode: Mode::WriteBack,
        discard: false,
        rotational: false,
        foreground: Arc::default(),
        optimal_io: 4096,
        share: forebay_engine::DirtyShare::default(),
        cache_share: forebay_engine::CacheShare::default(),
        pace: Pace::default(),
        ordered: None,
        suspect: false,
        lost: false,
    });
    ShardConfig {
        shard: u16::try_from(shard).expect("the superblock bounds the shards"),
        shards: 1,
        pool: superblock.pool,
        area: area_of(area),
        segment_size: superblock.segment_size,
        log_segments: superblock.log_segments,
        unit_entries: superblock.unit_entries,
        volumes: volumes.collect(),
        ram_bytes: RAM_BYTES,
        index_blocks: index_blocks(area),
        dirty_stripes: u64::MAX,
        eviction: Eviction::default(),
        write_cache_depth: std::time::Duration::ZERO,
        fill_rate: None,
        wear_budget: None,
        patience: std::time::Duration::from_secs(30),
        dirty_limit: forebay_engine::Part::Percent(50),
        dirty_target: forebay_engine::Part::Percent(50),
        idle_destage: Some(std::time::Duration::from_secs(5)),
        destage_depth: DESTAGE_DEPTH,
        compress: true,
        compress_ram: false,
        content: ContentLocality::Independent,
        cache_volatile: true,
        discard: false,
        discarded: true,
        buffers: BufPool::default(),
        fresh: false,
        trust: Trust::DirtyOnly,
        detached: Vec::new(),
        accept_loss: true,
        epoch: superblock.epoch,
        last_stop: LastStop::default(),
    }
}

/// Drives an engine in virtual time, which passes as fast as requests are carried out.
struct Drive {
    engine: Engine,
    fx: Effects,
    now: Instant,
}

impl Drive {
    /// Runs until only lost blocks are dirty.
    fn run(&mut self, cache: &mut Blocking, volumes: &mut [Saved]) -> anyhow::Result<()> {
        self.engine.start(self.now, &mut self.fx);
        self.engine.set_drain(true);
        let mut idle = 0;
        loop {
            let ios = std::mem::take(&mut self.fx.ios);
            idle = if ios.is_empty() { idle + 1 } else { 0 };
            if ios.is_empty()
                && (matches!(self.engine.state(), State::Refused(_)) || self.is_done())
            {
                return Ok(());
            }
            if idle > IDLE_TURNS_MAX {
                bail!("{} dirty blocks are not destaged", self.engine.dirty_blocks());
            }
            for (target, io) in ios {
                let done = match target {
                    Target::Cache => read_cache(cache, io),
                    Target::Primary(id) => write_primary(volumes, id, io)?,
                };
                self.engine.complete(self.now, target, done, &mut self.fx);
            }
            self.engine.poll(self.now, &mut self.fx);
            if self.fx.ios.is_empty() {
                let deadline = self.fx.deadline.unwrap_or(self.now);
                self.now = deadline.max(Instant(self.now.0 + 1_000_000));
            }
        }
    }

    fn is_done(&self) -> bool {
        let fenced = self.engine.stats(self.now).fenced_blocks;
        *self.engine.state() == State::Serving && self.engine.dirty_blocks() == fenced
    }
}

/// Carries out a read; a write to the cache device, which is not open for writing, fails.
fn read_cache(cache: &mut Blocking, mut io: Io) -> Completion {
    let result = match io.op {
        IoOp::Read => cache.read(io.range).map(|bytes| io.buf.copy_from_slice(&bytes)),
        _ => Err(ErrorKind::ReadOnly.into()),
    };
    io.complete(result)
}

fn write_primary(volumes: &mut [Saved], id: VolumeId, mut io: Io) -> anyhow::Result<Completion> {
    let volume = volumes.iter_mut().find(|volume| volume.record.id == id);
    let volume = volume.expect("the engine knows no other");
    if matches!(io.op, IoOp::Write | IoOp::WriteZeroes | IoOp::Discard) {
        volume.bytes += io.range.len;
    }
    let Some((_, queue)) = &mut volume.primary else { return Ok(io.complete(Ok(()))) };
    let result: IoResult<()> = match io.op {
        IoOp::Read => queue.read(io.range).map(|bytes| io.buf.copy_from_slice(&bytes)),
        IoOp::Flush => queue.flush(),
        IoOp::Prefetch => Err(ErrorKind::Unsupported.into()),
        IoOp::Write => {
            let mut buf = IoBuf::zeroed(io.buf.len());
            buf.copy_from_slice(&io.buf);
            queue.write(io.range.offset, buf)
        }
        IoOp::WriteZeroes | IoOp::Discard => {
            let starts = (io.range.offset..io.range.end()).step_by(ZEROS_MAX as usize);
            let mut pieces = starts.map(|at| (at, ZEROS_MAX.min(io.range.end() - at)));
            pieces.try_for_each(|(at, len)| queue.write(at, IoBuf::zeroed(len as usize)))
        }
    };
    if let Err(error) = &result {
        bail!("volume {}: {:?} {}: {error}", volume.record.name, io.op, io.range);
    }
    Ok(io.complete(result))
}

fn report(args: &SalvageArgs, superblock: &Superblock, outcome: &Outcome) -> anyhow::Result<()> {
    if args.json {
        let (lost, holes) = outcome.losses_json();
        let volumes = outcome.readable.iter().map(|(volume, bytes)| {
            json!({
                "name": volume.name,
                "primary": volume.identity,
                "dirty_bytes": bytes,
                "lost_bytes": outcome.lost_bytes(volume.id),
            })
        });
        let value = json!({
            "uuid": format!("{:032x}", u128::from_be_bytes(superblock.uuid)),
            "written": !args.list,
            "volumes": volumes.collect::<Vec<_>>(),
            "lost": lost,
            "lost_records": holes,
        });
        return Ok(output::line(&format!("{value:#}"))?);
    }
    let mut text = String::new();
    for (volume, bytes) in &outcome.readable {
        text += &format!(
            "volume {}: {} {}, {} known to be lost\n",
            volume.name,
            Size(*bytes),
            if args.list { "of dirty data readable" } else { "saved" },
            Size(outcome.lost_bytes(volume.id)),
        );
    }
    Ok(output::print(&(text + &outcome.losses()))?)
}

const _: () = assert!(ZEROS_MAX.is_multiple_of(BLOCK_SIZE as u64));
