//! The rules for requests, and the pins, on their way from the configuration to the threads.

use std::fs;
use std::ops::Range;
use std::sync::Arc;

use forebay_block::{ByteRange, VolumeId};
use forebay_control::config::{Config, PinList, RuleList};
use forebay_control::units::Size;
use forebay_policy::{SenderTest, range_text};
use forebay_runtime::Pool;

/// A process that there always is, and that usually belongs to root.
const FIRST_PROCESS: &str = "/proc/1";

/// Tells a pool its rules. One with a user whom this host does not know matches nobody.
pub fn tell(pool: &Pool, rules: &RuleList) {
    if let Err(what) = rules.check_users() {
        tracing::warn!("a rule matches nobody: {what}");
    }
    warn_of_hidden(rules);
    let volumes = pool.registry().volumes();
    let id = |name: &str| volumes.iter().find(|one| one.name == name).map(|volume| volume.id);
    pool.set_rules(&Arc::new(rules.compiled(id)));
}

/// Tells a pool the pins of a volume.
pub fn tell_pins(pool: &Pool, volume: VolumeId, pins: &PinList) {
    let blocks = |range: &Range<u64>| ByteRange::new(range.start, range.end - range.start).blocks();
    let blocks: Vec<_> = pins.ranges().map(blocks).collect();
    pool.pin(volume, &blocks);
}

/// Checks that pins are within a volume of this many bytes.
///
/// # Errors
/// Names the first range that is not.
pub fn check_pins(pins: &PinList, volume: &str, size: u64) -> Result<(), String> {
    let Some(range) = pins.ranges().find(|range| range.end > size) else { return Ok(()) };
    let (shown, size) = (range_text(range), Size(size));
    Err(format!("pinned: {shown} is beyond the end of volume {volume}, at {size}"))
}

/// Tells a pool that starts its rules and pins.
pub fn tell_all(pool: &Pool, config: &Config, cache_bytes: u64) {
    tell(pool, &config.cache.rules);
    if let Err(error) = config.check_pins(cache_bytes) {
        return tracing::warn!(%error, "nothing is pinned");
    }
    for (volume, served) in config.volumes.iter().zip(pool.registry().volumes()) {
        if let Err(what) = check_pins(&volume.pinned, &volume.name, served.info.size) {
            tracing::warn!("{what}: nothing is there to be pinned");
        }
        if !volume.pinned.0.is_empty() {
            tell_pins(pool, served.id, &volume.pinned);
        }
    }
}

/// Warns if the system hides from this process what a rule asks for.
fn warn_of_hidden(rules: &RuleList) {
    let asked = |of: fn(&SenderTest) -> bool| rules.0.iter().flat_map(|rule| &rule.sender).any(of);
    let named = |test: &SenderTest| matches!(test, SenderTest::Process(_) | SenderTest::Cgroup(_));
    if asked(named) && fs::read(format!("{FIRST_PROCESS}/comm")).is_err() {
        tracing::warn!(
            "rules by process or cgroup match no other user's: the processes are hidden; remove \
             ProtectProc= from the unit"
        );
    }
    let executable = |test: &SenderTest| matches!(test, SenderTest::Executable(_));
    if asked(executable) && fs::read_link(format!("{FIRST_PROCESS}/exe")).is_err() {
        tracing::warn!(
            "rules by executable match no other user's: the server needs CAP_SYS_PTRACE; add \
             CapabilityBoundingSet=CAP_SYS_PTRACE to the unit"
        );
    }
}
