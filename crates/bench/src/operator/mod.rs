//! A random operator of a real server: settings, drains, kills, stops, hand-overs to other
//! configurations and cache devices, primaries that lose power or disconnect, disks that swap
//! names, volumes added and removed, primaries changed without the cache, a cache damaged while it
//! is not in use. Clients write, flush and read all the time, and everything is compared with a
//! model ([`model`]).
//!
//! A run is a sequence of lives, each with a new cache and new primaries: a file, an NBD server
//! whose power can be cut, and, as root, a disk. A life is a sequence of rounds: the server serves,
//! and the operator performs some actions ([`online`]); then the server stays, or is ended in some
//! way, and the operator performs other actions ([`offline`]) before it is started again. At the
//! end of a life everything is drained and the primaries alone must be complete; or the cache is
//! damaged, and reads must return correct data or an error.
//!
//! The seed determines the actions, but not their timing: clients and server run concurrently. So
//! the same seed may not fail again; each action is printed when it is performed.

mod client;
mod damaged;
mod device;
mod load;
mod model;
mod offline;
mod online;
mod pool;
mod shift;
mod volume;

use std::mem;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use self::load::{Done, Signs};
use self::offline::{Between, End};
use self::online::{MODES, Operator, Seen};
use self::pool::{PATIENCE, Pool, Setup};
use self::shift::Shift;
use self::volume::Volume;
use crate::rig::place::Place;
use crate::rig::server;
use forebay_block::testing::Numbers;

/// Maximum number of rounds in a life.
const ROUNDS: u64 = 14;

/// Arguments of the command.
#[derive(clap::Args, Clone)]
pub struct Args {
    /// Binary and directory.
    #[command(flatten)]
    pub common: crate::rig::Common,
    /// Seconds to run
    #[arg(long, default_value_t = 600)]
    pub seconds: u64,
    /// Seed of the actions; from the time if not given
    #[arg(long)]
    pub seed: Option<u64>,
    /// Use an NBD server that answers flushes without doing them: the run must fail
    #[arg(long)]
    pub lie: bool,
}

/// For tests: a short run.
pub fn quick(forebay: PathBuf, seconds: u64, seed: u64, lie: bool) -> Args {
    let common = crate::rig::Common { forebay: Some(forebay), dir: None };
    Args { common, seconds, seed: Some(seed), lie }
}

/// A timed log of the actions.
struct Log {
    begin: Instant,
}

impl Log {
    /// Prints a line.
    fn say(&self, what: &str) {
        println!("{:7.1} {what}", self.begin.elapsed().as_secs_f64());
    }
}

/// Totals of a run.
#[derive(Default)]
struct Sum {
    lives: u64,
    rounds: u64,
    starts: u64,
    changes: u64,
    requests: u64,
    errors: u64,
    checked: u64,
    slowest: Duration,
}

/// Runs lives until the time is over.
///
/// # Errors
/// When the server misbehaves, or this machine is unsuitable.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let seed = args.seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |now| now.as_secs())
    });
    let binary = server::binary(args.common.forebay.as_deref())?;
    println!("seed {seed}");
    let log = Log { begin: Instant::now() };
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let mut sum = Sum::default();
    while sum.lives == 0 || Instant::now() < end {
        let mut numbers = Numbers::new(seed.wrapping_mul(1_000_003) ^ sum.lives);
        log.say(&format!("life {}", sum.lives));
        let place = Place::new(args.common.dir.as_deref())?;
        let mut life = Life::new(&binary, place, &mut numbers, &log, args)?;
        let outcome = life.run(end, &mut sum);
        outcome.with_context(|| {
            let log = life.pool.log();
            format!("seed {seed}, life {}; the server said last:\n  {log}\n", sum.lives)
        })?;
        sum.lives += 1;
    }
    println!(
        "{} lives, {} rounds, {} starts, the slowest {:.1} s; {} changes of settings, volumes, \
         sizes and devices; {} requests, {} allowed errors; {} blocks compared on primaries alone",
        sum.lives,
        sum.rounds,
        sum.starts,
        sum.slowest.as_secs_f64(),
        sum.changes,
        sum.requests,
        sum.errors,
        sum.checked
    );
    Ok(())
}

/// A cache and its volumes, from creation to the end.
struct Life<'a> {
    pool: Pool,
    numbers: &'a mut Numbers,
    log: &'a Log,
}

impl<'a> Life<'a> {
    fn new(
        binary: &Path,
        place: Place,
        numbers: &'a mut Numbers,
        log: &'a Log,
        args: &Args,
    ) -> anyhow::Result<Self> {
        let disks = rustix::process::geteuid().is_root()
            && ["/dev/loop-control", "/usr/sbin/losetup"]
                .iter()
                .all(|path| Path::new(path).exists());
        if !disks {
            log.say("without disks: they need root, losetup and /dev/loop-control");
        }
        let setup = Setup::any(numbers, &place, disks)?;
        log.say(&setup.describe());
        let mut volumes = Vec::new();
        for kind in 0..if disks { 3 } else { 2 } {
            let mut volume = Volume::new(&place, kind, numbers.below(1 << 20))?;
            let mode = numbers.below(2 * MODES.len() as u64) as usize;
            // The other half of the volumes use write-back.
            volume.configured = MODES.get(mode).copied().unwrap_or(MODES[0]);
            volume.threshold = ["0", "0", "64KiB", "512KiB"][numbers.below(4) as usize];
            log.say(&format!("volume {}: {}", volume.name, volume.configured));
            if let Some(san) = volume.san().filter(|_| args.lie) {
                san.lie();
            }
            volumes.push(volume);
        }
        let pool = Pool::new(PathBuf::from(binary), place, setup, volumes);
        Ok(Self { pool, numbers, log })
    }

    fn run(&mut self, end: Instant, sum: &mut Sum) -> anyhow::Result<()> {
        self.start(&[], sum)?;
        for _ in 0..=self.numbers.below(ROUNDS) {
            if Instant::now() > end {
                break;
            }
            sum.rounds += 1;
            let how = match self.numbers.below(10) {
                0..3 => End::Stays,
                3..5 if self.pool.is_kept() => End::Dies,
                3..7 => End::Kill,
                7 => End::Stop,
                _ => End::Drained,
            };
            self.round(how, sum)?;
            if how == End::Stays {
                continue;
            }
            if how == End::Dies {
                self.pool.hold();
                // A retired device stays out of use.
                let retired = self.pool.is_retired();
                self.serves(!retired)?;
                self.set_retired(retired);
                self.verify(sum)?;
                continue;
            }
            let (numbers, log) = (&mut *self.numbers, self.log);
            let flags = Vec::new();
            let mut between = Between { pool: &mut self.pool, end: how, numbers, log, flags };
            // A cache that was retired is not one any more.
            if !between.pool.is_retired() {
                between.work()?;
            }
            let flags = between.flags;
            self.start(&flags, sum)?;
            if !flags.is_empty() {
                self.renew(sum)?;
            }
            self.verify(sum)?;
        }
        if self.numbers.below(3) == 0 {
            self.round(End::Kill, sum)?;
            if self.pool.is_retired() {
                return Ok(());
            }
            return damaged::end(&mut self.pool, self.numbers, self.log);
        }
        self.round(End::Drained, sum)
    }

    fn start(&mut self, flags: &[String], sum: &mut Sum) -> anyhow::Result<()> {
        let took = self.pool.start(flags)?;
        self.log.say(&format!("started in {:.2} s", took.as_secs_f64()));
        sum.starts += 1;
        sum.slowest = sum.slowest.max(took);
        // With `--accept-primary` the cache is emptied and left.
        self.serves(flags.is_empty())
    }

    /// Notes whether the cache device is retired.
    fn set_retired(&mut self, retired: bool) {
        self.pool.set_retired(retired);
        self.pool.volumes.iter().for_each(|volume| volume.notice.set_without_cache(retired));
    }

    /// Checks a server that has just started, with a good cache if it must have one, and notes what
    /// it begins with.
    fn serves(&mut self, is_cached: bool) -> anyhow::Result<()> {
        let status = self.pool.status()?;
        let is_good = status["health"] == "good" || !is_cached;
        ensure!(is_good, "after a start health is {}", status["health"]);
        self.set_retired(false);
        let found = status["volumes"].as_array().context("a status has volumes")?;
        for volume in self.pool.volumes.iter_mut().filter(|volume| volume.served) {
            let shown = found.iter().find(|shown| shown["name"] == volume.name.as_str());
            let shown = shown.with_context(|| format!("no volume {} is served", volume.name))?;
            let mode = shown["mode"].as_str().context("a volume has a mode")?;
            let mode = MODES.into_iter().find(|&known| known == mode).context("of five")?;
            ensure!(
                !volume.is_known || mode == volume.mode(),
                "volume {} is in {mode}, not in {}",
                volume.name,
                volume.mode()
            );
            volume.is_known = true;
            volume.set = (mode != volume.configured).then_some(mode);
            volume.notice.forget();
            volume.notice.set_mode(Some(mode));
            volume.model.restarted();
        }
        Ok(())
    }

    /// After a primary was accepted, the cache is emptied and abandoned; the next start creates a
    /// new one, in which changed settings are still in force.
    fn renew(&mut self, sum: &mut Sum) -> anyhow::Result<()> {
        let limit = Instant::now() + PATIENCE;
        while self.pool.status()?["health"] != "detached" {
            ensure!(Instant::now() < limit, "the old cache is not left in time");
            std::thread::sleep(Duration::from_millis(50));
        }
        self.verify(sum)?;
        self.log.say("the old cache is left: stop");
        self.pool.must(&["stop"])?;
        self.pool.ended()?;
        self.alone(None, sum)?;
        self.start(&[], sum)
    }

    /// One round: clients at work, the operator's actions meanwhile, and the end of the server.
    fn round(&mut self, how: End, sum: &mut Sum) -> anyhow::Result<()> {
        let signs = Signs::default();
        let socket = self.pool.socket();
        let shift = Shift::any(&self.pool, self.numbers);
        let mut volumes = mem::take(&mut self.pool.volumes);
        let tables = shift.as_ref().map(|shift| shift.tables(&volumes));
        let mut seen: Vec<Seen> =
            volumes.iter().filter(|volume| volume.served).map(Seen::of).collect();
        let seeds: Vec<u64> = volumes.iter().map(|_| self.numbers.next()).collect();
        let (worked, outcome, changes) = std::thread::scope(|scope| {
            let changes = |at: usize| shift.as_ref().is_some_and(|shift| shift.at == at);
            let workers: Vec<_> = (volumes.iter_mut().zip(seeds).enumerate())
                .filter(|(at, (volume, _))| volume.served && !changes(*at))
                .map(|(_, (volume, seed))| {
                    let (socket, signs) = (&socket, &signs);
                    scope.spawn(move || load::run(volume, socket, signs, Numbers::new(seed)))
                })
                .collect();
            let (pool, numbers, log) = (&self.pool, &mut *self.numbers, self.log);
            let changes = 0;
            let mut operator =
                Operator { pool, seen: &mut seen, signs: &signs, numbers, log, changes };
            let mut outcome = operator.work();
            if let Some((shift, tables)) = shift.as_ref().zip(tables) {
                outcome = outcome.and_then(|()| {
                    operator.log.say(&shift.describe());
                    operator.restructure(&tables)
                });
            }
            let changes = operator.changes;
            let outcome = outcome.and_then(|()| end(&mut self.pool, how, &signs, self.log));
            signs.end.store(true, Ordering::SeqCst);
            let done: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            (done, outcome, changes)
        });
        sum.changes += changes;
        let served = volumes.iter_mut().filter(|volume| volume.served);
        for (volume, set) in served.zip(seen.iter().map(|seen| seen.set)) {
            volume.set = set.unwrap_or(volume.set);
        }
        self.pool.volumes = volumes;
        for done in worked {
            let Ok(done) = done else { bail!("a client panicked") };
            let Done { good, bad } = done?;
            sum.requests += good + bad;
            sum.errors += bad;
        }
        outcome?;
        if let Some(shift) = shift {
            shift.note(&mut self.pool.volumes, self.numbers, self.log)?;
            self.set_retired(self.pool.is_retired());
        }
        self.after(how, sum)
    }

    /// Checks the requirements after the end `how`.
    fn after(&mut self, how: End, sum: &mut Sum) -> anyhow::Result<()> {
        for volume in self.pool.served() {
            sum.checked += volume.check_direct()?;
        }
        match how {
            End::Stays => {
                self.pool.is_well()?;
                self.verify(sum)?;
                match self.numbers.below(6) {
                    0 => {
                        self.log.say("drain, to its end");
                        self.pool.must(&["drain"])?;
                        self.alone(None, sum)?;
                    }
                    1 => {
                        let one = self.pool.served().next().context("one is served")?;
                        let name = one.name.clone();
                        self.log.say(&format!("drain {name}, to its end"));
                        self.pool.must(&["drain", &name])?;
                        self.alone(Some(&name), sum)?;
                    }
                    _ => {}
                }
                Ok(())
            }
            End::Drained => self.alone(None, sum),
            End::Kill | End::Dies | End::Stop => Ok(()),
        }
    }

    /// Checks that the primary of one volume, or of every volume, is complete alone.
    fn alone(&self, only: Option<&str>, sum: &mut Sum) -> anyhow::Result<()> {
        let meant = |name: &str| only.is_none_or(|only| only == name);
        for volume in self.pool.served().filter(|volume| meant(&volume.name)) {
            volume.check_alone()?;
            sum.checked += volume.model.len();
        }
        Ok(())
    }

    fn verify(&self, sum: &mut Sum) -> anyhow::Result<()> {
        for volume in self.pool.served() {
            load::verify(volume, &self.pool.socket())?;
            sum.requests += volume.model.len() / 64;
        }
        Ok(())
    }
}

/// Ends the server in the way `how`, unless it stays.
fn end(pool: &mut Pool, how: End, signs: &Signs, log: &Log) -> anyhow::Result<()> {
    if signs.broken.load(Ordering::SeqCst) {
        return Ok(());
    }
    let words: &[&str] = match how {
        End::Stays => return Ok(()),
        End::Kill => {
            log.say("kill");
            signs.going.store(true, Ordering::SeqCst);
            return pool.kill();
        }
        End::Dies => {
            signs.going.store(true, Ordering::SeqCst);
            let took = pool.die()?;
            log.say(&format!(
                "kill, but not the keeper: served again after {:.2} s",
                took.as_secs_f64()
            ));
            return Ok(());
        }
        End::Stop => &["stop"],
        End::Drained => &["stop", "--drain"],
    };
    log.say(&words.join(" "));
    signs.going.store(true, Ordering::SeqCst);
    pool.must(words)?;
    pool.ended()
}
