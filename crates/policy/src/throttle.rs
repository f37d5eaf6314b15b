//! How long a write waits before it enters a cache that is filling up with dirty blocks.
//!
//! Below 60 % of the dirty limit no write waits, nor where destaging for the level has just begun:
//! up to a fifth of the way from the dirty target to the limit. Above, writes are admitted at a
//! rate that falls smoothly from unlimited to 0.9 times the destage rate, so that the level settles
//! at about 90 %, or more with a target above half, and a writer sees a steady rate instead of a
//! wall. The idea is that of the ZFS write throttle, with a rate in place of its delay: the level
//! at which it settles then depends on neither the number of writers nor the size of their
//! requests. The engine enforces the limit itself.

use std::ops::RangeInclusive;
use std::time::Duration;

use forebay_block::Instant;

/// Maximum delay of a write, whatever the estimate: the effect of a stalled primary on the estimate
/// is forgotten after this time.
pub const DELAY_MAX: Duration = Duration::from_secs(1);

/// Share of the limit below which there are no delays, and share of the way from the target to the
/// limit.
const FREE_SHARE: f64 = 0.6;
const FREE_ABOVE_TARGET: f64 = 0.2;
/// Admitted rate divided by drain rate, at share `x` of the way from where delays begin to the
/// limit, is `SLOPE / x + BASE`: infinite at 0, 1 at three quarters of the way (90 % of the limit,
/// if delays begin at 60 %), 0.9 at the limit.
const SLOPE: f64 = 0.3;
/// See [`SLOPE`].
const BASE: f64 = 0.6;
/// While the drain rate is unknown, writes are admitted at a rate that fills the limit in this many
/// seconds.
const UNKNOWN_FILL_SECONDS: f64 = 60.0;
/// Plausible drain rates in blocks per second; others count as unknown.
const RATES: RangeInclusive<f64> = 1.0..=1e12;

/// Paces writes near the dirty limit: a bucket of admitted blocks that drains at the admitted rate.
#[derive(Clone, Debug, Default)]
pub struct WriteThrottle {
    owed_blocks: f64,
    last: Instant,
}

impl WriteThrottle {
    /// A throttle that has admitted no write yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How long a write of `write_blocks` that arrived at `now` waits before it is admitted. Call
    /// this once per write: its blocks count as admitted after the delay.
    pub fn delay(
        &mut self,
        now: Instant,
        dirty_blocks: u64,
        target_blocks: u64,
        limit_blocks: u64,
        write_blocks: u64,
        drain_rate_blocks_per_s: f64,
    ) -> Duration {
        let elapsed = now.since(self.last).as_secs_f64();
        self.last = self.last.max(now);
        let level = share_of(limit_blocks, dirty_blocks);
        let free = free_share(target_blocks, limit_blocks);
        if level <= free {
            self.owed_blocks = 0.0;
            return Duration::ZERO;
        }
        let way = ((level - free) / (1.0 - free)).min(1.0);
        let drain = if RATES.contains(&drain_rate_blocks_per_s) {
            drain_rate_blocks_per_s
        } else {
            (limit_blocks as f64 / UNKNOWN_FILL_SECONDS).max(*RATES.start())
        };
        let rate = drain * (SLOPE / way + BASE);
        let most = rate * DELAY_MAX.as_secs_f64();
        let owed = (self.owed_blocks - rate * elapsed).clamp(0.0, most);
        self.owed_blocks = owed + write_blocks as f64;
        Duration::from_secs_f64(owed / rate).min(DELAY_MAX)
    }
}

/// The most dirty blocks with which no write waits.
#[must_use]
pub fn free_blocks(target_blocks: u64, limit_blocks: u64) -> u64 {
    (free_share(target_blocks, limit_blocks) * limit_blocks as f64) as u64
}

fn free_share(target_blocks: u64, limit_blocks: u64) -> f64 {
    let target = share_of(limit_blocks, target_blocks).min(1.0);
    FREE_SHARE.max(target + (1.0 - target) * FREE_ABOVE_TARGET)
}

fn share_of(limit_blocks: u64, blocks: u64) -> f64 {
    blocks as f64 / limit_blocks.max(1) as f64
}
