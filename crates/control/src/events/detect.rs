//! Finds events: compares the pool with what it was a second ago. A counter that grew in between
//! tells also what has ended since.

use std::collections::BTreeMap;

use forebay_engine::{Health, Stats};

use super::News;
use crate::api::{Job, JobState, Severity};
use crate::pool::{Keeper, PoolSnapshot, UpgradeSnapshot, UpgradeState, VolumeSnapshot};
use crate::units::Size;

const BLOCK: u64 = forebay_block::BLOCK_SIZE as u64;

/// What the pool was at the last look.
#[derive(Default)]
pub(crate) struct Detector {
    last: Option<Last>,
    jobs: BTreeMap<u64, JobState>,
    upgrade: Option<(u64, UpgradeState)>,
}

struct Last {
    health: Health,
    keeper: Keeper,
    stats: Stats,
    clients_refused: u64,
    volumes: Vec<VolumeSnapshot>,
    settings: BTreeMap<(Option<String>, &'static str), String>,
    /// By volume: its writes wait at the limit.
    full: Vec<bool>,
}

impl Detector {
    /// What has happened since the last look; at the first look, what is wrong already.
    pub fn look(&mut self, pool: &PoolSnapshot, jobs: &[Job]) -> Vec<News> {
        let mut news = Vec::new();
        let stats = pool.stats();
        let last = self.last.take().unwrap_or_else(|| Last::before(pool, &stats));
        health(&last, pool, &mut news);
        counters(&last, pool, &stats, &mut news);
        let settings = settings(pool);
        changed(&last.settings, &settings, &mut news);
        let mut full = Vec::new();
        for (at, volume) in pool.volumes.iter().enumerate() {
            let before = last.volumes.get(at);
            of_volume(before, volume, &mut news);
            full.push(fills(last.full.get(at) == Some(&true), volume, &mut news));
        }
        self.jobs(jobs, &mut news);
        self.last = Some(Last {
            health: pool.health(),
            keeper: pool.keeper,
            stats,
            clients_refused: pool.clients_refused,
            volumes: pool.volumes.clone(),
            settings,
            full,
        });
        news
    }

    /// Drains that have ended since the last look.
    fn jobs(&mut self, jobs: &[Job], news: &mut Vec<News>) {
        for job in jobs {
            let before = self.jobs.insert(job.id, job.state);
            if before == Some(job.state) {
                continue;
            }
            let whose = job.volume.as_ref().map_or_else(
                || "of all volumes".to_owned(),
                |volume| format!("of volume {volume}"),
            );
            let what = match job.state {
                JobState::Running => continue,
                JobState::Done => News::new(
                    "drain-done",
                    Severity::Info,
                    format!("the drain {whose} is done after {:.0} s", job.seconds),
                    "",
                ),
                JobState::Cancelled => News::new(
                    "drain-cancelled",
                    Severity::Info,
                    format!("the drain {whose} was cancelled"),
                    "",
                ),
                JobState::Failed => {
                    let why = job.error.as_deref().unwrap_or("no reason is known");
                    News::new(
                        "drain-failed",
                        Severity::Error,
                        format!("the drain {whose} failed: {why}"),
                        "mend what it says, and drain again",
                    )
                }
            };
            news.push(job.volume.as_ref().map_or(what.clone(), |volume| what.of(volume)));
        }
        self.jobs.retain(|id, _| jobs.iter().any(|job| job.id == *id));
    }

    /// The end of an upgrade.
    pub fn upgrade(&mut self, last: Option<&UpgradeSnapshot>) -> Option<News> {
        let upgrade = last?;
        let now = Some((upgrade.id, upgrade.state));
        if std::mem::replace(&mut self.upgrade, now) == now {
            return None;
        }
        let program = upgrade.program.display();
        match upgrade.state {
            UpgradeState::Running => None,
            UpgradeState::Done => {
                let pause = upgrade.pause.unwrap_or_default();
                let text = format!("{program} took over; clients waited for {pause:.2} s");
                Some(News::new("upgrade-done", Severity::Info, text, ""))
            }
            UpgradeState::Failed => {
                let why = upgrade.error.as_deref().unwrap_or("no reason is known");
                let text = format!("{program} did not take over: {why}");
                let remedy = "the program of before serves; mend what it says, and try again";
                Some(News::new("upgrade-failed", Severity::Error, text, remedy))
            }
        }
    }
}

impl Last {
    /// Before the first look all was well, and the settings were as they are.
    fn before(pool: &PoolSnapshot, stats: &Stats) -> Self {
        let slow_cache_ios = 0;
        Self {
            health: Health::Good,
            keeper: if pool.keeper == Keeper::Gone { Keeper::Process(0) } else { pool.keeper },
            stats: Stats { slow_cache_ios, ..stats.clone() },
            clients_refused: pool.clients_refused,
            volumes: Vec::new(),
            settings: settings(pool),
            full: Vec::new(),
        }
    }
}

fn settings(pool: &PoolSnapshot) -> BTreeMap<(Option<String>, &'static str), String> {
    let all = pool.settings.iter();
    all.map(|one| ((one.volume.clone(), one.spec.key), one.value.clone())).collect()
}

fn changed(
    before: &BTreeMap<(Option<String>, &'static str), String>,
    now: &BTreeMap<(Option<String>, &'static str), String>,
    news: &mut Vec<News>,
) {
    for ((volume, key), value) in now {
        let Some(old) = before.get(&(volume.clone(), *key)).filter(|old| *old != value) else {
            continue;
        };
        let text = format!("{key} was changed from {old} to {value}");
        let one = News::new("setting-changed", Severity::Info, text, "").about(key);
        news.push(volume.as_ref().map_or(one.clone(), |volume| one.of(volume)));
    }
}

fn health(last: &Last, pool: &PoolSnapshot, news: &mut Vec<News>) {
    let now = pool.health();
    if now != last.health {
        let (text, remedy) = match now {
            Health::Good => ("the cache device is in use again", ""),
            Health::Draining => (
                "the cache device failed: it is being emptied",
                "replace it when nothing is dirty: docs/user/replacing-an-ssd.md",
            ),
            Health::Detached => (
                "the cache device failed: the primaries are used without it",
                "replace it, and start again: docs/user/replacing-an-ssd.md",
            ),
        };
        let severity = if now == Health::Good { Severity::Info } else { Severity::Error };
        news.push(News::new("cache-failed", severity, text.to_owned(), remedy));
    }
    if pool.keeper == Keeper::Gone && last.keeper != Keeper::Gone {
        let text = "the keeper is gone: nobody starts the server again if it dies".to_owned();
        news.push(News::new("keeper-gone", Severity::Error, text, "restart the server soon"));
    }
}

/// Counters of the server that grew, and levels that left zero.
fn counters(last: &Last, pool: &PoolSnapshot, stats: &Stats, news: &mut Vec<News>) {
    let before = &last.stats;
    let mut grew = |kind, severity, now: u64, before: u64, what: &str, remedy| {
        if now > before {
            let text = format!("{} {what}", now - before);
            news.push(News::new(kind, severity, text, remedy));
        }
    };
    grew(
        "cache-errors",
        Severity::Warning,
        stats.cache_errors,
        before.cache_errors,
        "requests failed on the cache device",
        "look at the SSD: dmesg, SMART",
    );
    grew(
        "cache-corrupt",
        Severity::Warning,
        stats.corrupt_clean,
        before.corrupt_clean,
        "clean blocks had wrong bytes on the cache device, and were read again from the primary",
        "replace the SSD if it happens again",
    );
    grew(
        "clients-refused",
        Severity::Warning,
        pool.clients_refused,
        last.clients_refused,
        "clients were refused because all places are taken",
        "raise max_clients, or disconnect clients",
    );
    if stats.slow_cache_ios > 0 && before.slow_cache_ios == 0 {
        let text = "the cache device has not answered for longer than patience".to_owned();
        news.push(News::new("cache-slow", Severity::Error, text, "look at the SSD: dmesg, SMART"));
    }
}

/// What has happened to a volume.
fn of_volume(before: Option<&VolumeSnapshot>, now: &VolumeSnapshot, news: &mut Vec<News>) {
    let mut tell = |kind, severity, text, remedy| {
        news.push(News::new(kind, severity, text, remedy).of(&now.name));
    };
    let was_away = before.is_some_and(|before| before.primary_health.away.is_some());
    let dirty = Size(now.state.dirty_blocks * BLOCK);
    let primary = &now.primary;
    match (was_away, now.primary_health.away) {
        (false, Some(_)) => tell(
            "primary-away",
            Severity::Error,
            format!("the primary {primary} does not answer; {dirty} wait for it"),
            "bring it back: nothing else is needed",
        ),
        (true, None) => {
            tell("primary-back", Severity::Info, format!("the primary {primary} answers again"), "")
        }
        _ => {}
    }
    let earlier = |of: fn(&VolumeSnapshot) -> u64| before.map_or(0, of);
    let errors = now.state.primary.errors.total();
    let failed = errors.saturating_sub(earlier(|one| one.state.primary.errors.total()));
    if failed > 0 && now.primary_health.away.is_none() && !was_away {
        let how = now.primary_health.last_error.as_ref().map_or("", |(_, how)| how);
        tell(
            "primary-errors",
            Severity::Warning,
            format!("the primary {primary} failed {failed} requests; the last: {how}"),
            "look at the device and its log: dmesg, the NBD server's",
        );
    }
    if now.state.slow_ios > 0 && earlier(|one| one.state.slow_ios) == 0 {
        tell(
            "primary-slow",
            Severity::Error,
            format!("the primary {primary} has not answered for longer than patience"),
            "look at the device or its server; the requests are not given up",
        );
    }
    if now.state.changed && !before.is_some_and(|before| before.state.changed) {
        tell(
            "primary-changed",
            Severity::Error,
            format!("the primary {primary} was changed without the cache"),
            "find out who writes to it, and check its content",
        );
    }
    let lost = now.state.lost_blocks.saturating_sub(earlier(|one| one.state.lost_blocks));
    if lost > 0 {
        let ranges: Vec<String> = now.state.lost.iter().take(3).map(ToString::to_string).collect();
        tell(
            "data-lost",
            Severity::Error,
            format!(
                "LOST {} that were only in the cache: {}",
                Size(lost * BLOCK),
                ranges.join(", ")
            ),
            "restore these ranges from a copy; until they are written, reads of them fail",
        );
    }
    let given_up = now.state.stats.given_up_writes;
    let given_up = given_up.saturating_sub(earlier(|one| one.state.stats.given_up_writes));
    if given_up > 0 {
        tell(
            "writes-failed",
            Severity::Error,
            format!("{given_up} writes failed at the dirty limit as the primary was away"),
            "bring the primary back, and check the clients",
        );
    }
}

/// Whether the volume's writes wait at its limit; tells when they begin to. They no longer do when
/// a fifth of the limit is free.
fn fills(was_full: bool, volume: &VolumeSnapshot, news: &mut Vec<News>) -> bool {
    let (dirty, limit) = (volume.state.dirty_blocks, volume.state.dirty_limit_blocks);
    if was_full {
        return dirty * 5 > limit * 4;
    }
    let full = limit > 0 && volume.state.held_writes > 0 && dirty * 50 >= limit * 49;
    if full {
        let text = format!(
            "{} are dirty, which is the limit: writes wait for the primary",
            Size(dirty * BLOCK)
        );
        let remedy = "if it lasts, the primary is too slow for these writes: raise dirty_limit, or \
                      use a faster primary";
        let one = News::new("limit-reached", Severity::Warning, text, remedy);
        news.push(one.of(&volume.name));
    }
    full
}
