//! The operator's actions between two servers: disks swap names; volumes are added, removed and
//! renamed; primaries are changed without the cache; starts are cut short. Whatever the
//! documentation says is refused must be refused, with the documented reason, and a refused start
//! must change nothing.

use std::fs::{self, File};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use forebay_format::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};

use super::Log;
use super::load;
use super::model::content;
use super::pool::Pool;
use super::volume::{BLOCKS, Primary, Volume};
use forebay_block::testing::Numbers;

/// How the last server was ended.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum End {
    /// It was not.
    Stays,
    /// By SIGKILL.
    Kill,
    /// By SIGKILL, and its keeper started another one.
    Dies,
    /// It was stopped in order.
    Stop,
    /// It was stopped in order, with nothing dirty left.
    Drained,
}

const PAGE: usize = 4096;
/// Names for volumes, in addition to the initial ones.
const NAMES: [&str; 4] = ["file", "disk", "db-1", "x.y"];

/// An action.
type Doing = fn(&mut Between<'_>) -> anyhow::Result<()>;

/// All actions; an action that is listed more often is chosen more often.
const DOINGS: [Doing; 13] = [
    swap, swap, rename, remove, remove, change, change, touch, cut_short, cut_short, away, power,
    look,
];

/// The operator between two servers.
pub struct Between<'a> {
    /// The server, which is not running.
    pub pool: &'a mut Pool,
    /// How it ended.
    pub end: End,
    /// Source of random choices.
    pub numbers: &'a mut Numbers,
    /// The log of the actions.
    pub log: &'a Log,
    /// Additional flags for the next start.
    pub flags: Vec<String>,
}

impl Between<'_> {
    /// Performs some actions.
    pub fn work(&mut self) -> anyhow::Result<()> {
        for _ in 0..self.numbers.below(4) {
            let doing = DOINGS[self.numbers.below(DOINGS.len() as u64) as usize];
            doing(self)?;
        }
        Ok(())
    }

    fn any_served(&mut self) -> usize {
        let served = (0..self.pool.volumes.len()).filter(|&at| self.pool.volumes[at].served);
        let served: Vec<_> = served.collect();
        served[self.numbers.below(served.len() as u64) as usize]
    }

    /// Whether the next start may succeed or be refused, because of an earlier action.
    fn is_open(&self) -> bool {
        !self.flags.is_empty()
    }
}

fn swap(between: &mut Between<'_>) -> anyhow::Result<()> {
    let volumes = &mut between.pool.volumes;
    let disk = volumes.iter().position(|volume| matches!(volume.primary, Primary::Disk(_)));
    let Some(at) = disk else { return Ok(()) };
    let Primary::Disk(pair) = &mut volumes[at].primary else { return Ok(()) };
    let former = pair.swap()?;
    between.log.say(&format!("{} is another disk's name now", former.display()));
    // Another disk under a name that is unknown to the cache is another volume.
    if !volumes[at].served || !volumes[at].is_known || between.is_open() {
        return Ok(());
    }
    between.log.say("a start on the other disk must be refused");
    let right = between.pool.volumes[at].aim(Some(former));
    let refused = between.pool.refuse(&["belongs to primary loop:"]);
    between.pool.volumes[at].aim(right);
    refused.map(drop)
}

fn rename(between: &mut Between<'_>) -> anyhow::Result<()> {
    // The next start's flags refer to names.
    if between.is_open() {
        return Ok(());
    }
    let at = between.any_served();
    let name = NAMES[between.numbers.below(NAMES.len() as u64) as usize];
    let volumes = &mut between.pool.volumes;
    let former = std::mem::replace(&mut volumes[at].name, name.to_owned());
    if let Some(other) = (0..volumes.len()).find(|&i| i != at && volumes[i].name == name) {
        volumes[other].name.clone_from(&former);
        volumes[other].be_new();
    }
    volumes[at].be_new();
    between.log.say(&format!("volume {former} is called {name} from now on"));
    Ok(())
}

/// Removes a volume from the configuration, or adds it again.
fn remove(between: &mut Between<'_>) -> anyhow::Result<()> {
    if between.is_open() {
        return Ok(());
    }
    if let Some(back) = between.pool.volumes.iter_mut().find(|volume| !volume.served) {
        back.served = true;
        back.be_new();
        between.log.say(&format!("volume {} is there again", back.name));
        return Ok(());
    }
    let at = between.any_served();
    if !between.pool.volumes[at].is_known {
        return Ok(());
    }
    let name = between.pool.volumes[at].name.clone();
    between.log.say(&format!("volume {name} is taken out of the configuration"));
    between.pool.volumes[at].served = false;
    match between.pool.try_start(&[])? {
        Ok(_) => {
            // No data of it was dirty.
            let alone = between.pool.volumes[at].check_alone();
            alone.context("a volume was removed while it was dirty")?;
            between.pool.kill()?;
            between.end = End::Kill;
            used_alone(between, at)
        }
        Err(said) => {
            ensure!(between.end != End::Drained, "a drained volume cannot be removed: {said}");
            let flag = format!("--forget-volume {name}");
            ensure!(said.contains(&flag), "refused without a word of {flag}: {said}");
            between.log.say("refused, since it is dirty: it stays");
            between.pool.volumes[at].served = true;
            Ok(())
        }
    }
}

/// Writes to a primary while no cache is in front of it.
fn used_alone(between: &mut Between<'_>, at: usize) -> anyhow::Result<()> {
    let volume = &mut between.pool.volumes[at];
    between.log.say(&format!("the primary of {} is written meanwhile", volume.name));
    volume.use_alone(between.numbers)
}

/// Changes a primary without the cache, in a sampled place.
fn change(between: &mut Between<'_>) -> anyhow::Result<()> {
    let at = between.any_served();
    // After a kill or a failed flush the place may be off the record, so detection is not promised.
    // Of a volume that is new to the cache, nothing is on record.
    if between.is_open()
        || !between.pool.volumes[at].is_known
        || between.pool.volumes[at].san().is_some()
        || !matches!(between.end, End::Stop | End::Drained)
    {
        return Ok(());
    }
    let block = if between.numbers.below(2) == 0 { 0 } else { BLOCKS - 1 };
    let volume = &mut between.pool.volumes[at];
    let name = volume.name.clone();
    let version = loop {
        let version = volume.model.version();
        if version % 16 == 4 {
            break version;
        }
    };
    between.log.say(&format!("block {block} of the primary of {name} is changed"));
    volume.change(block, &content(volume.model.salt, block, version))?;
    volume.model.changed(block, version, between.end == End::Drained);
    between.log.say("a start must be refused");
    let flag = format!("--accept-primary {name}");
    between.pool.refuse(&["was changed since", &flag])?;
    between.log.say(&format!("it is accepted with {flag}"));
    between.flags.push(format!("--accept-primary={name}"));
    Ok(())
}

/// Touches a file without changing its content.
fn touch(between: &mut Between<'_>) -> anyhow::Result<()> {
    let paths = between.pool.volumes.iter().filter_map(|volume| match &volume.primary {
        Primary::File(path) => Some(path.clone()),
        _ => None,
    });
    for path in paths {
        between.log.say(&format!("{} is touched", path.display()));
        let file = File::options().write(true).open(path)?;
        file.set_modified(std::time::SystemTime::now())?;
    }
    Ok(())
}

/// Kills a start, perhaps during recovery.
fn cut_short(between: &mut Between<'_>) -> anyhow::Result<()> {
    if between.is_open() {
        return Ok(());
    }
    let time = Duration::from_millis(between.numbers.below(250));
    between.log.say(&format!("a start is killed after {} ms", time.as_millis()));
    between.pool.start_and_kill(time)?;
    between.end = End::Kill;
    Ok(())
}

/// Starts while the NBD server is away: the others must be served, if the cache knows its volume;
/// otherwise the start must be refused for that reason. The server is killed.
fn away(between: &mut Between<'_>) -> anyhow::Result<()> {
    let of = |volume: &Volume| Some((volume.san()?.clone(), volume.name.clone(), volume.is_known));
    let san = between.pool.served().find_map(of);
    let Some((san, name, is_known)) = san.filter(|_| !between.is_open()) else { return Ok(()) };
    san.set_off(true);
    san.cut_links();
    let started = between.pool.try_start(&[]);
    let served = match &started {
        Ok(Ok(_)) => others_are_served(between, &name),
        _ => Ok(()),
    };
    san.set_off(false);
    if let Err(said) = started? {
        between.log.say("refused, while the NBD server is away");
        ensure!(said.contains(&name), "refused without a word of {name}: {said}");
        let is_alone = between.pool.served().count() == 1;
        // The names on record are those of the last start.
        ensure!(!is_known || is_alone, "the others were not served: {said}");
        return Ok(());
    }
    between.end = End::Kill;
    between.pool.kill()?;
    served
}

/// Checks the volumes beside one whose primary is away.
fn others_are_served(between: &Between<'_>, away: &str) -> anyhow::Result<()> {
    between.log.say("started, while the NBD server is away: the others are served");
    let status = between.pool.status()?;
    let volumes = status["volumes"].as_array().context("a status has volumes")?;
    let shown = volumes.iter().find(|volume| volume["name"] == away).context("it is served")?;
    let state = &shown["primary_health"]["state"];
    ensure!(state == "away", "the primary of {away} is {state}");
    let socket = between.pool.socket();
    let mut others = between.pool.served().filter(|volume| volume.name != away);
    others.try_for_each(|volume| load::verify(volume, &socket))
}

/// Inspects the cache, which must be valid with nothing lost.
fn look(between: &mut Between<'_>) -> anyhow::Result<()> {
    between.log.say("check, dump, salvage --list");
    let cache = between.pool.cache().display().to_string();
    for words in [&["check", &cache][..], &["dump", &cache], &["salvage", &cache, "--list"]] {
        let said = between.pool.run(words)?;
        ensure!(
            said.status.success(),
            "forebay {words:?} ended with {}: {}{}",
            said.status,
            said.out,
            said.err
        );
    }
    Ok(())
}

/// Cuts the NBD server's power while no client is connected to it.
fn power(between: &mut Between<'_>) -> anyhow::Result<()> {
    let Between { pool, numbers, log, .. } = between;
    for volume in &mut pool.volumes {
        if let Some(san) = volume.san().cloned() {
            log.say("power of the NBD server: some is lost that was not flushed");
            san.cut_some(|_| numbers.below(2) == 0);
            volume.model.lost();
        }
    }
    Ok(())
}

/// Damages some pages of the cache, but not near the ends of the logs: if no later record proves
/// that a record was durable, nobody can tell that it was there. Returns false if the logs are too
/// short.
pub fn damage(pool: &Pool, numbers: &mut Numbers, log: &Log) -> anyhow::Result<bool> {
    let path = pool.cache();
    let mut bytes = fs::read(&path)?;
    let logs = old_segments(pool)?;
    let places = places(&bytes, &logs)?;
    if logs.iter().all(Range::is_empty) {
        log.say("the log is too short to be damaged");
        return Ok(false);
    }
    for _ in 0..=numbers.below(6) {
        let mut any = || places[numbers.below(places.len() as u64) as usize];
        let (at, other) = (any(), any());
        let what = numbers.below(3);
        match what {
            0 => bytes[at + numbers.below(PAGE as u64) as usize] ^= 1 << numbers.below(8),
            1 => bytes[at..at + PAGE].fill(0),
            _ => bytes.copy_within(other..other + PAGE, at),
        }
        let what = ["has a bit that flipped", "is zeros", "is a copy of another"][what as usize];
        log.say(&format!("the cache is damaged: the page at {at} {what}"));
    }
    fs::write(&path, bytes)?;
    Ok(true)
}

/// The numbers of all but the last two segments of each log.
fn old_segments(pool: &Pool) -> anyhow::Result<Vec<Range<u64>>> {
    let said = pool.run(&["dump", &pool.cache().display().to_string(), "--json"])?;
    ensure!(said.status.success(), "forebay dump: {}", said.err.trim());
    let dump: serde_json::Value = serde_json::from_str(&said.out).context("the dump as JSON")?;
    let shards = dump["shards"].as_array().context("a dump has shards")?;
    let old = |shard: &serde_json::Value| {
        let number = |name: &str| shard[name].as_u64().unwrap_or_default();
        number("first_segment")..number("last_segment").saturating_sub(1)
    };
    Ok(shards.iter().map(old).collect())
}

/// The positions of the pages in these segments of each log, and of the stores.
fn places(cache: &[u8], logs: &[Range<u64>]) -> anyhow::Result<Vec<usize>> {
    let copies = SUPERBLOCK_OFFSETS.map(|at| cache.get(at as usize..)?.get(..SUPERBLOCK_BYTES));
    let copies = copies.into_iter().flatten().filter_map(|copy| Superblock::decode(copy).ok());
    let superblock = copies.max_by_key(|copy| copy.generation).context("a superblock")?;
    let segment = u64::from(superblock.segment_size);
    let mut places = Vec::new();
    for (area, log) in superblock.shards.iter().zip(logs) {
        let segments = superblock.log_segments_of(area);
        let in_log = log.clone().map(|number| number % segments);
        for number in in_log.chain(segments..area.len / segment) {
            let at = area.offset + number * segment;
            places.extend((at as usize..(at + segment) as usize).step_by(PAGE));
        }
    }
    Ok(places)
}
