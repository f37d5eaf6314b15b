//! The operator's actions while the server serves and clients are at work.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::Log;
use super::load::Signs;
use super::pool::Pool;
use super::volume::{Notice, Volume};
use crate::rig::san::San;
use forebay_block::testing::Numbers;

/// Every mode.
pub const MODES: [&str; 5] =
    ["write-back", "write-through", "write-around", "write-only", "pass-through"];

/// Most attempts to apply a configuration that takes a new cache.
const APPLIES: usize = 3;
/// Parts of the message if such an attempt fails because of a write at the wrong moment.
const DIRTY_AGAIN: [&str; 2] = ["may have the newest version", "became dirty again"];

/// The operator's view of a volume while a client uses it.
pub struct Seen {
    name: String,
    notice: Arc<Notice>,
    san: Option<San>,
    configured: &'static str,
    /// The mode set in the meantime; `Some(None)` is the configured one.
    pub set: Option<Option<&'static str>>,
}

impl Seen {
    /// The view of a volume.
    pub fn of(volume: &Volume) -> Self {
        Self {
            name: volume.name.clone(),
            notice: Arc::clone(&volume.notice),
            san: volume.san().cloned(),
            configured: volume.configured,
            set: None,
        }
    }
}

/// An action.
type Doing = fn(&mut Operator<'_>) -> anyhow::Result<()>;

/// All actions; an action that is listed more often is chosen more often.
const DOINGS: [Doing; 21] = [
    set_mode,
    set_mode,
    set_mode,
    set_cache,
    set_limits,
    set_limits,
    set_wrong,
    prefetch,
    apply,
    reconfigure,
    exchange,
    retire,
    drain,
    drain,
    look,
    cut_power,
    cut_power,
    cut_links,
    away,
    freeze,
    garbage,
];

/// The operator.
pub struct Operator<'a> {
    /// The server.
    pub pool: &'a Pool,
    /// Its volumes.
    pub seen: &'a mut [Seen],
    /// Signals to the clients.
    pub signs: &'a Signs,
    /// Source of random choices.
    pub numbers: &'a mut Numbers,
    /// The log of the actions.
    pub log: &'a Log,
    /// Number of changes made: of settings, volumes, sizes, devices.
    pub changes: u64,
}

impl Operator<'_> {
    /// Performs some actions, with pauses; stops when a client has found an error.
    pub fn work(&mut self) -> anyhow::Result<()> {
        for _ in 0..=self.numbers.below(5) {
            self.pause(400);
            if self.signs.broken.load(Ordering::SeqCst) {
                return Ok(());
            }
            let doing = DOINGS[self.numbers.below(DOINGS.len() as u64) as usize];
            doing(self)?;
        }
        self.pause(600);
        Ok(())
    }

    fn pause(&mut self, most: u64) {
        std::thread::sleep(Duration::from_millis(self.numbers.below(most)));
    }

    fn any(&mut self) -> usize {
        self.numbers.below(self.seen.len() as u64) as usize
    }

    fn san(&self) -> Option<(San, Arc<Notice>)> {
        let seen = self.seen.iter().find(|seen| seen.san.is_some())?;
        Some((seen.san.clone()?, Arc::clone(&seen.notice)))
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.numbers.below(choices.len() as u64) as usize]
    }
}

fn set_mode(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let at = operator.any();
    let mode = if operator.numbers.below(8) == 0 { None } else { Some(operator.pick(&MODES)) };
    let seen = &mut operator.seen[at];
    let word = mode.unwrap_or("default");
    operator.log.say(&format!("set {} mode={word}", seen.name));
    seen.notice.set_mode(None);
    operator.changes += 1;
    operator.pool.must(&["set", &seen.name, &format!("mode={word}")])?;
    seen.notice.set_mode(Some(mode.unwrap_or(seen.configured)));
    seen.set = Some(mode);
    Ok(())
}

fn set_cache(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let eviction = operator.pick(&["frequency", "lru", "fifo", "default"]);
    let content = operator.pick(&["rewrite", "similar", "independent", "default"]);
    let name = operator.seen[operator.any()].name.clone();
    operator.log.say(&format!("set {name} eviction={eviction} content={content}"));
    let (eviction, content) = (format!("eviction={eviction}"), format!("content={content}"));
    operator.changes += 1;
    operator.pool.must(&["set", &name, &eviction, &content]).map(drop)
}

/// Changes limits and times of the cache or of a volume.
fn set_limits(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let name = operator.seen[operator.any()].name.clone();
    operator.changes += 1;
    let (whose, setting) = match operator.numbers.below(17) {
        0 => (None, operator.pick(&["dirty_limit=1%", "dirty_limit=8MiB", "dirty_limit=default"])),
        1 => (None, operator.pick(&["write_cache_depth=1ms", "write_cache_depth=default"])),
        2 => (None, operator.pick(&["client_stall_timeout=2m", "client_stall_timeout=default"])),
        3 => (None, operator.pick(&["idle_timeout=1h", "idle_timeout=0s"])),
        4 => (Some(&name), operator.pick(&["dirty_limit=1%", "dirty_limit=default"])),
        6 => (None, operator.pick(&["dirty_target=0%", "dirty_target=90%"])),
        7 => {
            (None, operator.pick(&["idle_destage=10ms", "idle_destage=0s", "idle_destage=default"]))
        }
        8 => (Some(&name), operator.pick(&["latency_target=1ms", "latency_target=disks"])),
        9 => (Some(&name), operator.pick(&["destage_rate=20MiB", "destage_rate=0"])),
        10 => (Some(&name), operator.pick(&["cache_limit=1%", "cache_limit=default"])),
        11 => (Some(&name), operator.pick(&["cache_guarantee=1%", "cache_guarantee=default"])),
        12 => (None, operator.pick(&["fill_rate=1MiB", "fill_rate=0"])),
        13 => (None, operator.pick(&["wear_budget=1GiB", "wear_budget=0"])),
        14 => (None, operator.pick(&["rules=bypass operation=read; cache", "rules=default"])),
        15 => (Some(&name), operator.pick(&["pinned=0..1MiB; a=2MiB..3MiB", "pinned=default"])),
        // All volumes together may have 100 % at most.
        5 => (Some(&name), operator.pick(&["dirty_guarantee=0%", "dirty_guarantee=default"])),
        _ => {
            (Some(&name), operator.pick(&["sequential_threshold=0", "sequential_threshold=64KiB"]))
        }
    };
    let words: Vec<&str> =
        ["set"].into_iter().chain(whose.map(String::as_str)).chain([setting]).collect();
    operator.log.say(&words.join(" "));
    operator.pool.must(&words).map(drop)
}

/// Applies the configuration of the start, which takes back whatever was set.
fn apply(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let file = operator.pool.configuration();
    operator.log.say("apply the configuration");
    operator.apply(&file)
}

/// Gives a setting that only a start changes another value: the server hands over to another one,
/// perhaps with a new cache.
fn reconfigure(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    if !operator.pool.is_kept() {
        return Ok(());
    }
    let (key, values) = operator.pick(&[
        ("ram", ["\"1MiB\"", "\"4MiB\"", "\"16MiB\""]),
        ("ram", ["\"0\"", "\"2MiB\"", "\"8MiB\""]),
        ("size", ["\"16MiB\"", "\"24MiB\"", "\"48MiB\""]),
        ("shards", ["1", "2", "3"]),
    ]);
    let value = operator.pick(&values);
    operator.log.say(&format!("apply the configuration with {key} = {value}"));
    let file = operator.pool.reconfigure(key, value)?;
    operator.apply(&file)
}

/// Replaces the cache device by a blank one: the server hands over to another one with a new cache.
/// Then the old device is taken out.
fn exchange(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    if !operator.pool.is_kept() {
        return Ok(());
    }
    let (file, old) = operator.pool.exchange(operator.numbers)?;
    // If it fails, the server may go on with the old device.
    let old = std::mem::ManuallyDrop::new(old);
    let (old_path, new_path) = (old.path.clone(), operator.pool.cache());
    operator.log.say(&format!("apply: {} instead of {}", new_path.display(), old_path.display()));
    operator.apply(&file)?;
    ensure!(!operator.pool.is_retired(), "there is no new cache");
    std::mem::ManuallyDrop::into_inner(old).take_out()
}

/// Gives up the cache device. Until there is another one, or the next start, the primaries are used
/// without a cache.
fn retire(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    if operator.pool.is_retired() {
        return Ok(());
    }
    operator.log.say("retire");
    operator.changes += 1;
    operator.pool.set_retired(true);
    operator.seen.iter().for_each(|seen| seen.notice.set_without_cache(true));
    operator.pool.must(&["retire"])?;
    if operator.numbers.below(2) == 0 { exchange(operator) } else { Ok(()) }
}

impl Operator<'_> {
    /// Brings other volumes into force, of which these are the tables of the configuration. Clients
    /// of the volumes that stay as they are must not notice.
    pub fn restructure(&mut self, volumes: &str) -> anyhow::Result<()> {
        if self.signs.broken.load(Ordering::SeqCst) {
            return Ok(());
        }
        let file = self.pool.configure(volumes)?;
        self.apply(&file)
    }

    /// Applies the configuration, which takes back whatever was set.
    fn apply(&mut self, file: &str) -> anyhow::Result<()> {
        self.changes += 1;
        self.seen.iter().for_each(|seen| seen.notice.set_mode(None));
        // The next server waits, too, for changes that were on their way when a link broke.
        let waits =
            |seen: &&Seen| seen.san.is_some() && (self.pool.waits() || seen.notice.is_troubled());
        let held: Vec<Arc<Notice>> =
            self.seen.iter().filter(waits).map(|seen| Arc::clone(&seen.notice)).collect();
        held.iter().for_each(|notice| notice.hold());
        let announced = self.pool.must(&["apply", file, "--dry-run"])?;
        let applied = self.apply_once_more(file)?;
        held.iter().for_each(|notice| notice.hold());
        ensure!(applied.starts_with(&announced), "announced {announced:?}, changed {applied:?}");
        for seen in &mut *self.seen {
            seen.notice.set_mode(Some(seen.configured));
            seen.set = Some(None);
        }
        // A hand-over to a new cache replaces a retired one.
        let retired = self.pool.status()?["health"] != "good";
        self.pool.set_retired(retired);
        self.seen.iter().for_each(|seen| seen.notice.set_without_cache(retired));
        let same = self.pool.must(&["apply", file, "--dry-run"])?;
        ensure!(same == "nothing differs\n", "applied again it differs: {same}");
        self.check_nothing_is_set()
    }

    /// Applies the configuration. A cache that gets something dirty between the drain and the end
    /// of its server is not given up, and the server of before comes back: then once more.
    fn apply_once_more(&self, file: &str) -> anyhow::Result<String> {
        for _ in 0..APPLIES {
            let said = self.pool.ask(&["apply", file])?;
            if said.status.success() {
                return Ok(said.out);
            }
            let is_dirty = DIRTY_AGAIN.iter().any(|part| said.err.contains(part));
            ensure!(is_dirty, "apply failed: {}", said.err.trim());
            self.log.say("not applied, as something became dirty again: once more");
        }
        bail!("something became dirty again {APPLIES} times")
    }

    fn check_nothing_is_set(&self) -> anyhow::Result<()> {
        let shown: serde_json::Value =
            serde_json::from_str(&self.pool.must(&["config", "--json"])?).context("as JSON")?;
        let all = shown.as_array().context("a list of settings")?;
        ensure!(all.iter().all(|one| one["from"] != "set"), "something is set still: {shown}");
        Ok(())
    }
}

/// Sends an invalid setting, which must be refused and change nothing.
fn set_wrong(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let name = operator.seen[operator.any()].name.clone();
    let wrong = operator.pick(&[
        "mode=writeback",
        "mode=",
        "evictoin=lru",
        "content=\u{1f980}",
        "dirty_limit=0%",
        "dirty_limit=4194304",
        "dirty_guarantee=101%",
        "cache_guarantee=91%",
        "write_cache_depth=-1s",
        "sequential_threshold=1",
        "rules=bypass proces=x",
        "pinned=0..1TiB",
    ]);
    let nobody = operator.numbers.below(3) == 0;
    let (name, wrong) = if nobody { ("nobody", "mode=write-back") } else { (&name[..], wrong) };
    operator.log.say(&format!("set {name} {wrong}: must be refused"));
    let said = operator.pool.ask(&["set", name, wrong])?;
    ensure!(matches!(said.status.code(), Some(1 | 2)), "it ended with {}", said.status);
    ensure!(!said.err.trim().is_empty(), "it said nothing");
    Ok(())
}

/// Brings a volume into the cache in the background, as far as its mode and another prefetch let
/// it, and may end that.
fn prefetch(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let name = operator.seen[operator.any()].name.clone();
    operator.log.say(&format!("prefetch {name}"));
    let said = operator.pool.ask(&["prefetch", &name, "--all", "--background"])?;
    let expected = ["already", "learning"].iter().any(|why| said.err.contains(why));
    ensure!(said.status.success() || expected, "prefetch: {}", said.err);
    if operator.numbers.below(2) == 0 {
        operator.pause(300);
        let said = operator.pool.ask(&["prefetch", &name, "--cancel"])?;
        // After a hand-over nobody knows of it.
        ensure!(said.status.success() || said.err.contains("prefetched"), "{}", said.err);
    }
    Ok(())
}

/// Starts a drain in the background, and may cancel it.
fn drain(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let name = operator.seen[operator.any()].name.clone();
    let cancel = operator.numbers.below(2) == 0;
    operator.log.say(&format!("drain {name}{}", if cancel { ", cancelled soon" } else { "" }));
    let out = operator.pool.must(&["drain", &name, "--background", "--json"])?;
    let job: serde_json::Value = serde_json::from_str(&out).context("the job as JSON")?;
    let job = job["id"].to_string();
    operator.pause(300);
    if cancel {
        let said = operator.pool.ask(&["drain", "--job", &job, "--cancel"])?;
        let known = said.status.success() || !said.err.is_empty();
        ensure!(known, "cancelling it ended with {}, without a word", said.status);
    }
    Ok(())
}

fn look(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    operator.log.say("status");
    let status = operator.pool.status()?;
    let (health, retired) = (&status["health"], operator.pool.is_retired());
    ensure!((health == "good") != retired, "health is {health}; retired: {retired}");
    operator.pool.must(&["status"]).map(drop)
}

fn cut_power(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let Some((san, notice)) = operator.san() else { return Ok(()) };
    notice.fault();
    match operator.numbers.below(3) {
        0 => {
            operator.log.say("power of the NBD server: all is lost that was not flushed");
            san.cut_power();
        }
        1 => {
            operator.log.say("power of the NBD server: half is lost that was not flushed");
            san.cut_some(|_| operator.numbers.below(2) == 0);
        }
        _ => {
            let writes = 1 + operator.numbers.below(20);
            operator.log.say(&format!("power of the NBD server: after {writes} more writes"));
            san.cut_after(Some(writes));
            operator.pause(1000);
            san.cut_after(None);
        }
    }
    notice.heal();
    Ok(())
}

fn cut_links(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let Some((san, notice)) = operator.san() else { return Ok(()) };
    operator.log.say("links to the NBD server break");
    notice.fault();
    san.cut_links();
    notice.heal();
    Ok(())
}

fn away(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let Some((san, notice)) = operator.san() else { return Ok(()) };
    let time = 200 + operator.numbers.below(4000);
    let loses = operator.numbers.below(2) == 0;
    let what = if loses { ", and loses" } else { "" };
    operator.log.say(&format!("the NBD server goes away for {time} ms{what}"));
    notice.fault();
    san.set_off(true);
    if loses {
        san.cut_some(|_| operator.numbers.below(2) == 0);
    } else {
        san.cut_links();
    }
    std::thread::sleep(Duration::from_millis(time));
    operator.pool.status()?;
    san.set_off(false);
    notice.heal();
    Ok(())
}

fn freeze(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    let Some((san, _)) = operator.san() else { return Ok(()) };
    let time = 50 + operator.numbers.below(600);
    operator.log.say(&format!("the NBD server answers nothing for {time} ms"));
    san.freeze(Duration::from_millis(time));
    Ok(())
}

/// Connects clients that do not speak the protocol, at both sockets.
fn garbage(operator: &mut Operator<'_>) -> anyhow::Result<()> {
    operator.log.say("clients that send garbage");
    let sockets = [operator.pool.socket(), operator.pool.place.path("control.sock")];
    for path in sockets.iter().cycle().take(6) {
        let mut stream = UnixStream::connect(path).context("a client of garbage")?;
        stream.set_read_timeout(Some(Duration::from_millis(20)))?;
        stream.set_write_timeout(Some(Duration::from_millis(200)))?;
        let mut bytes = Vec::new();
        if operator.numbers.below(2) == 0 {
            // A valid beginning.
            bytes.extend_from_slice(b"\0\0\0\x03IHAVEOPT\0\0\0\x01");
        }
        let len = operator.numbers.below(4096);
        bytes.extend((0..len).map(|_| operator.numbers.next() as u8));
        let _ = stream.write_all(&bytes);
        let _ = stream.read(&mut [0; 512]);
    }
    Ok(())
}
