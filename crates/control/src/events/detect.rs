//! Finds events: compares the pool with what it was a second ago. A counter that grew in between
//! tells also what has ended since.

use std::collections::{BTreeMap, BTreeSet};

use forebay_engine::{Health, Stats};

use super::{News, cut};
use crate::api::{Job, JobState, Severity};
use crate::pool::{Keeper, PoolSnapshot, UpgradeSnapshot, UpgradeState, VolumeSnapshot};
use crate::units::Size;

/// Most bytes of a setting's value in a text; longer ones are cut.
const VALUE_BYTES_MAX: usize = 512;
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
    state_fails: bool,
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
        let last = self.last.take().unwrap_or_else(|| Last::before(pool));
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
            state_fails: pool.state_problem.is_some(),
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
                        "fix the problem, and drain again",
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
                let remedy = "the previous program serves; fix the problem, and try again";
                Some(News::new("upgrade-failed", Severity::Error, text, remedy))
            }
        }
    }
}

impl Last {
    /// Before the first look all was well, nothing was counted, and the settings were as they are.
    fn before(pool: &PoolSnapshot) -> Self {
        Self {
            health: Health::Good,
            keeper: if pool.keeper == Keeper::Gone { Keeper::Process(0) } else { pool.keeper },
            state_fails: false,
            stats: Stats::default(),
            clients_refused: 0,
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

/// Settings with another value. Those without one are not in the maps.
fn changed(
    before: &BTreeMap<(Option<String>, &'static str), String>,
    now: &BTreeMap<(Option<String>, &'static str), String>,
    news: &mut Vec<News>,
) {
    let all: BTreeSet<_> = before.keys().chain(now.keys()).collect();
    for setting in all {
        let (old, value) = (before.get(setting), now.get(setting));
        if old == value {
            continue;
        }
        let (volume, key) = setting;
        let shown =
            |value: Option<&String>| cut(value.map_or("none", |text| text), VALUE_BYTES_MAX);
        let [old, value] = [shown(old), shown(value)];
        let text = match old == value {
            true => format!("{key} was changed after its first {VALUE_BYTES_MAX} bytes: {value}"),
            false => format!("{key} was changed from {old} to {value}"),
        };
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
                "the cache device failed or was retired: it is being emptied",
                "replace it when nothing is dirty: docs/user/replacing-an-ssd.md",
            ),
            Health::Detached => (
                "the cache device failed or was retired: the primaries are used without it",
                "replace it: docs/user/replacing-an-ssd.md",
            ),
        };
        let severity = if now == Health::Good { Severity::Info } else { Severity::Error };
        news.push(News::new("cache-failed", severity, text.to_owned(), remedy));
    }
    if pool.keeper == Keeper::Gone && last.keeper != Keeper::Gone {
        let text = "the keeper is gone: nobody starts the server again if it dies".to_owned();
        news.push(News::new("keeper-gone", Severity::Error, text, "restart the server soon"));
    }
    if let Some(why) = pool.state_problem.as_ref().filter(|_| !last.state_fails) {
        let text = format!("the state directory cannot be written: {why}");
        let remedy = "free space there, or make it writable: a restart or an upgrade may fail";
        news.push(News::new("state-failed", Severity::Error, text, remedy));
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
        "clean blocks could not be read from the cache device, or had wrong bytes there, and were \
         read from the primary",
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
            format!("{given_up} writes failed because they waited longer than patience"),
            "see `forebay status` and the log: a primary or the cache device is away, or the state \
             directory cannot be written; fix that, and check the clients",
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

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use forebay_block::ByteRange;
    use forebay_engine::{ContentLocality, Eviction, Mode, State, VolumeState};

    use super::*;
    use crate::config::Config;
    use crate::pool::{PrimaryHealth, ShardSnapshot};
    use crate::settings::in_force;

    /// A pool that is well, with the volume `db`.
    pub(crate) fn pool() -> PoolSnapshot {
        let volume = VolumeSnapshot {
            name: "db".to_owned(),
            primary: "/dev/sdb".to_owned(),
            size: 1 << 30,
            mode: Mode::WriteBack,
            read_only: false,
            file: None,
            devices: Vec::new(),
            state: VolumeState { dirty_limit_blocks: 100, ..VolumeState::default() },
            primary_health: PrimaryHealth::default(),
        };
        let shard =
            ShardSnapshot { state: State::Serving, health: Health::Good, stats: Stats::default() };
        PoolSnapshot {
            uptime: Duration::from_secs(1),
            pid: 1,
            keeper: Keeper::Process(2),
            state_problem: None,
            stopping: false,
            drain_given_up: false,
            cache_path: "/dev/cache".to_owned(),
            cache_bytes: 1 << 30,
            cache_device_bytes: 1 << 30,
            eviction: Eviction::Lru,
            content: ContentLocality::Rewrite,
            write_cache_depth: Duration::from_secs(30),
            wear_budget: None,
            endpoints: Vec::new(),
            clients: 0,
            clients_refused: 0,
            volumes: vec![volume],
            shards: vec![shard],
            tier_latencies: Vec::new(),
            latencies: Vec::new(),
            primary_latencies: Vec::new(),
            settings: in_force(&Config::defaults(1)),
            rules: Vec::new(),
        }
    }

    /// The kinds of what has happened after a change of a pool that was well.
    fn after(change: impl Fn(&mut PoolSnapshot)) -> Vec<&'static str> {
        let mut detector = Detector::default();
        let mut pool = pool();
        assert_eq!(detector.look(&pool, &[]), [], "a pool that is well has no news");
        change(&mut pool);
        let news = detector.look(&pool, &[]);
        assert_eq!(detector.look(&pool, &[]), [], "and what goes on is told once");
        news.iter().map(|news| news.kind).collect()
    }

    #[test]
    fn each_change_is_told_once() {
        let away = PrimaryHealth { away: Some(Duration::from_secs(1)), ..PrimaryHealth::default() };
        type Change = Box<dyn Fn(&mut PoolSnapshot)>;
        let cases: [(&str, Change); 15] = [
            ("cache-failed", Box::new(|pool| pool.shards[0].health = Health::Draining)),
            ("keeper-gone", Box::new(|pool| pool.keeper = Keeper::Gone)),
            ("state-failed", Box::new(|pool| pool.state_problem = Some("full".to_owned()))),
            ("cache-errors", Box::new(|pool| pool.shards[0].stats.cache_errors = 3)),
            ("cache-corrupt", Box::new(|pool| pool.shards[0].stats.corrupt_clean = 3)),
            ("cache-slow", Box::new(|pool| pool.shards[0].stats.slow_cache_ios = 1)),
            ("clients-refused", Box::new(|pool| pool.clients_refused = 8)),
            ("primary-away", Box::new(move |pool| pool.volumes[0].primary_health = away.clone())),
            ("primary-errors", Box::new(|pool| pool.volumes[0].state.primary.errors.reads = 1)),
            ("primary-slow", Box::new(|pool| pool.volumes[0].state.slow_ios = 1)),
            ("primary-changed", Box::new(|pool| pool.volumes[0].state.changed = true)),
            (
                "data-lost",
                Box::new(|pool| {
                    pool.volumes[0].state.lost_blocks = 2;
                    pool.volumes[0].state.lost = vec![ByteRange::new(0, 8192)];
                }),
            ),
            ("writes-failed", Box::new(|pool| pool.volumes[0].state.stats.given_up_writes = 1)),
            (
                "limit-reached",
                Box::new(|pool| {
                    pool.volumes[0].state.dirty_blocks = 100;
                    pool.volumes[0].state.held_writes = 1;
                }),
            ),
            ("setting-changed", Box::new(|pool| pool.settings[0].value = "other".to_owned())),
        ];
        for (kind, change) in cases {
            assert_eq!(after(change), [kind]);
        }
    }

    /// A setting that had no value, or has none any more, was never told of.
    #[test]
    fn a_setting_that_gets_or_loses_its_value_is_told() {
        let mut detector = Detector::default();
        let (before, mut after) = (pool(), pool());
        let mut config = Config::defaults(1);
        config.volumes[0].dirty_limit = Some("20%".parse().expect("a share"));
        after.settings = in_force(&config);
        let mut texts = Vec::new();
        for pool in [&before, &after, &before] {
            texts.extend(detector.look(pool, &[]).into_iter().map(|news| news.text));
        }
        let expected = ["none to 20%", "20% to none"];
        assert_eq!(texts, expected.map(|how| format!("dirty_limit was changed from {how}")));
    }

    #[test]
    fn what_is_wrong_at_the_start_is_told() {
        let mut pool = pool();
        pool.shards[0].health = Health::Detached;
        pool.volumes[0].state.lost_blocks = 1;
        pool.keeper = Keeper::Gone;
        let news = Detector::default().look(&pool, &[]);
        let kinds: Vec<_> = news.iter().map(|news| news.kind).collect();
        assert_eq!(kinds, ["cache-failed", "keeper-gone", "data-lost"]);
    }

    #[test]
    fn a_primary_that_is_back_and_a_level_that_has_fallen_may_be_told_again() {
        let mut detector = Detector::default();
        let (mut away, mut full) = (pool(), pool());
        away.volumes[0].primary_health.away = Some(Duration::from_secs(1));
        full.volumes[0].state.held_writes = 1;
        let mut kinds = Vec::new();
        for (pool, dirty) in
            [(&away, 0), (&full, 99), (&full, 85), (&full, 99), (&full, 70), (&full, 99)]
        {
            let mut pool = pool.clone();
            pool.volumes[0].state.dirty_blocks = dirty;
            kinds.extend(detector.look(&pool, &[]).into_iter().map(|news| news.kind));
        }
        assert_eq!(kinds, ["primary-away", "primary-back", "limit-reached", "limit-reached"]);
    }

    #[test]
    fn a_drain_is_told_when_it_ends_however_short() {
        let job = |id, state| Job {
            id,
            volume: Some("db".to_owned()),
            state,
            total_bytes: 1,
            remaining_bytes: 0,
            seconds: 0.1,
            error: Some("it is away".to_owned()),
        };
        let mut detector = Detector::default();
        let pool = pool();
        assert_eq!(detector.look(&pool, &[job(1, JobState::Running)]), []);
        let jobs = [job(1, JobState::Done), job(2, JobState::Failed), job(3, JobState::Cancelled)];
        let news = detector.look(&pool, &jobs);
        let kinds: Vec<_> = news.iter().map(|news| news.kind).collect();
        assert_eq!(kinds, ["drain-done", "drain-failed", "drain-cancelled"]);
        assert!(news[1].text.contains("it is away") && news[1].volume.as_deref() == Some("db"));
        assert_eq!(detector.look(&pool, &jobs), []);
    }

    #[test]
    fn an_upgrade_is_told_when_it_ends() {
        let mut detector = Detector::default();
        let mut upgrade = UpgradeSnapshot {
            to_drain: None,
            id: 3,
            program: "/bin/new".into(),
            state: UpgradeState::Running,
            pause: None,
            error: None,
        };
        assert_eq!(detector.upgrade(None), None);
        assert_eq!(detector.upgrade(Some(&upgrade)), None);
        upgrade.state = UpgradeState::Failed;
        upgrade.error = Some("it cannot read".to_owned());
        let news = detector.upgrade(Some(&upgrade)).expect("it has ended");
        assert!(news.kind == "upgrade-failed" && news.text.contains("it cannot read"));
        assert_eq!(detector.upgrade(Some(&upgrade)), None);
    }
}
