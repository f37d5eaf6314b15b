//! Current problems, as sentences that say what to do; for the top of the status.

use forebay_engine::{Health, State};

use crate::pool::{Keeper, PoolSnapshot, PrimaryHealth, VolumeSnapshot};
use crate::units::Size;

/// Maximum number of lost ranges listed in a sentence.
const RANGES_NAMED: usize = 3;
const BLOCK: u64 = forebay_block::BLOCK_SIZE as u64;

/// One sentence for each problem of the pool.
#[must_use]
pub fn problems(pool: &PoolSnapshot) -> Vec<String> {
    let mut all = Vec::new();
    for (number, shard) in pool.shards.iter().enumerate() {
        if let State::Refused(reason) = &shard.state {
            all.push(format!("shard {number} refuses to serve: {reason}"));
        }
    }
    match pool.health() {
        Health::Good => {}
        Health::Draining => all.push(
            "the cache device failed or was retired: it is being emptied; replace it when nothing \
             is dirty"
                .into(),
        ),
        Health::Detached => all.push(
            "the cache device failed or was retired: the primaries are used without it; \
                 replace it"
                .into(),
        ),
    }
    if pool.keeper == Keeper::Gone {
        all.push(
            "the keeper is gone: nobody starts the server again if it dies; restart it soon".into(),
        );
    }
    if let Some(why) = &pool.state_problem {
        all.push(format!(
            "the state directory cannot be written: {why}; the server serves on, but a restart or \
             an upgrade may fail, and no setting can be changed: free space there, or make it \
             writable"
        ));
    }
    all.extend(pool.volumes.iter().flat_map(of_volume));
    let known: u64 = pool.volumes.iter().map(|volume| volume.state.lost_blocks).sum();
    let lost: u64 = pool.shards.iter().map(|shard| shard.stats.fenced_blocks).sum();
    if lost > known {
        let bytes = Size((lost - known) * BLOCK);
        all.push(format!("LOST {bytes} that the cache cannot read back; restore and write them"));
    }
    all
}

/// One sentence for each problem of a volume.
#[must_use]
pub fn of_volume(volume: &VolumeSnapshot) -> Vec<String> {
    let mut all = Vec::new();
    let name = &volume.name;
    let dirty = Size(volume.state.dirty_blocks * BLOCK);
    let PrimaryHealth { away, silent, last_error } = &volume.primary_health;
    if let Some(away) = away {
        all.push(format!(
            "volume {name}: the primary {} does not answer ({:.0} s so far); {dirty} wait for it; \
             bring it back",
            volume.primary,
            away.as_secs_f64()
        ));
    } else if let Some(silent) = silent {
        all.push(format!(
            "volume {name}: the primary {} has not answered for {:.0} s, and reports no error: \
             {} requests wait; look at the device or its server",
            volume.primary,
            silent.as_secs_f64(),
            volume.state.slow_ios
        ));
    } else if let ("errors", Some((ago, how))) = (volume.primary_health.name(), last_error) {
        let errors = volume.state.primary.errors;
        all.push(format!(
            "volume {name}: the primary {} failed {} reads, {} writes, {} flushes; the last {:.0} \
             s ago: {how}; check the device",
            volume.primary,
            errors.reads,
            errors.writes,
            errors.flushes,
            ago.as_secs_f64()
        ));
    }
    if volume.state.changed {
        all.push(format!(
            "volume {name}: the primary {} was changed without the cache; its cached \
             blocks are dropped, except {dirty} that are not on it; check its content",
            volume.primary
        ));
    }
    if volume.state.lost_blocks > 0 {
        let lost = &volume.state.lost;
        let named = lost.iter().take(RANGES_NAMED).map(ToString::to_string);
        let named = named.collect::<Vec<_>>().join(", ");
        let more = match lost.len().saturating_sub(RANGES_NAMED) {
            0 => String::new(),
            more => format!(" and {more} more ranges (forebay status --json)"),
        };
        all.push(format!(
            "volume {name}: LOST {} that were only in the cache: {named}{more}; restore them from \
             a copy; until they are written, reads of them fail",
            Size(volume.state.lost_blocks * BLOCK)
        ));
    }
    all
}
