//! The status as text, beginning with the most important facts. For the command line, and for the
//! files of a FUSE mount.

mod clients;
mod events;
mod rules;
mod statistics;

use crate::api::{OperationStatus, PoolStatus, SettingStatus, VolumeStatus};
use crate::units::Size;

pub use clients::clients;
pub use events::{date, event, events, severity, utc};
pub use rules::rules;
pub use statistics::{statistics, tier, time};

/// A number of clients.
#[must_use]
pub fn count_of_clients(count: u64) -> String {
    if count == 1 { "1 client".to_owned() } else { format!("{count} clients") }
}

/// The pool in a few lines.
#[must_use]
pub fn pool(status: &PoolStatus) -> String {
    let cache = &status.cache;
    let bypassed = status.volumes.iter().any(|volume| volume.reads.bypasses > 0);
    let hits = match cache.full_hit_percent {
        Some(share) => {
            let part = cache.partial_hit_percent.unwrap_or_default();
            format!("{share:.1} % of reads are hits, {part:.1} % in part")
        }
        None if bypassed => "all reads bypassed it".to_owned(),
        None => "no reads yet".to_owned(),
    };
    let mut out = format!(
        "forebay {}: {}, cache {}, up {}, {}\n",
        status.version,
        status.state,
        status.health,
        duration(status.uptime_seconds),
        count_of_clients(status.clients),
    );
    for problem in &status.problems {
        out += &format!("WRONG    {problem}\n");
    }
    out += &format!(
        "cache    {}: {} of data in {}{}; {hits}\n",
        cache.path,
        Size(cache.cached_bytes),
        Size(cache.size),
        if cache.size < cache.device_size {
            format!(" of the device's {}", Size(cache.device_size))
        } else {
            String::new()
        }
    );
    if cache.payload_bytes > 0 {
        out += &format!(
            "content  the data takes {}, {:.1} to 1",
            Size(cache.payload_bytes),
            cache.cached_bytes as f64 / cache.payload_bytes as f64
        );
        if let Some(held) = cache.held_per_used_byte {
            out += &format!(" ({held:.1} with headers and garbage)");
        }
        let written = cache.written_per_byte.map(|bytes| {
            format!("; {bytes:.2} bytes went to the cache for each byte that clients wrote")
        });
        out += &(written.unwrap_or_default() + "\n");
        out += &kinds(status);
    }
    out += &ram(status);
    out += &format!(
        "at risk  {} not on the primaries yet, limit {}; the oldest waits {:.1} s of {} s\n",
        Size(cache.dirty_bytes),
        Size(cache.dirty_limit_bytes),
        cache.oldest_dirty_seconds,
        cache.write_cache_depth_seconds
    );
    out += &wear(status);
    for endpoint in &status.endpoints {
        out += &format!("serves   {endpoint}\n");
    }
    out + &volumes(&status.volumes) + &settings(&status.settings)
}

/// The settings in force: one line for the server, one for each volume.
fn settings(settings: &[SettingStatus]) -> String {
    let mut out = String::new();
    let mut last = None;
    for setting in settings {
        if last != Some(&setting.volume) {
            let whose = setting.volume.as_deref().unwrap_or("settings");
            out += if last.is_some() { "\n" } else { "" };
            out += whose;
            out += if setting.volume.is_some() { ":" } else { "" };
            last = Some(&setting.volume);
        }
        out += &format!(" {}={}", setting.name, setting.value);
        if let Some(configured) = &setting.configured {
            let configured = if configured.is_empty() { "none" } else { configured };
            out += &format!(" (set; configured {configured})");
        }
    }
    if out.is_empty() { out } else { out + "\n" }
}

/// The line about the RAM tier; empty while nothing is in it.
fn ram(status: &PoolStatus) -> String {
    let stats = status.stats();
    let bytes = |blocks: u64| blocks * forebay_block::BLOCK_SIZE as u64;
    status.cache.held_per_ram_byte.map_or_else(String::new, |gain| {
        format!(
            "RAM      {} of data in {}, {gain:.1} to 1; {} of it compressed\n",
            Size(bytes(stats.ram_blocks)),
            Size(stats.ram_bytes),
            Size(bytes(stats.ram_compressed_blocks)),
        )
    })
}

/// The line about the wear of the cache device; empty if it has no budget.
fn wear(status: &PoolStatus) -> String {
    status.cache.wear.as_ref().map_or_else(String::new, |wear| {
        format!(
            "wear     {} written in the last {}, budget {} per day; now {} per day, \
             pressure {} %\n",
            Size(wear.written_bytes),
            duration(wear.seconds as u64),
            Size(wear.budget_bytes_per_day),
            Size(wear.written_bytes_per_day as u64),
            wear.pressure_percent
        )
    })
}

/// How the blocks in the cache are stored, and the wear saved by that.
fn kinds(status: &PoolStatus) -> String {
    let stats = status.stats();
    let all = stats.cached_blocks.max(1) as f64;
    let similar = stats.similar_blocks;
    let kinds = [
        ("as they are", stats.raw_blocks),
        ("as LZ4", stats.lz4_blocks),
        ("as zstd", stats.zstd_blocks),
        ("zero", stats.zero_blocks),
        ("by similar ones", similar),
        ("deltas beside", stats.associate_blocks.saturating_sub(similar)),
    ];
    let share = |(kind, blocks)| format!("{kind} {:.1} %", 100.0 * blocks as f64 / all);
    let saved = status.cache.written_per_stored_byte.map_or_else(String::new, |written| {
        format!("; wear is {written:.2} of blocks written whole")
    });
    format!("         {}{saved}\n", kinds.map(share).join(", "))
}

/// A table of volumes.
#[must_use]
pub fn volumes(volumes: &[VolumeStatus]) -> String {
    let width = volumes.iter().map(|volume| volume.name.len()).max().unwrap_or(0).max(6);
    let mut out = format!(
        "{:width$}  {:13}  {:>10}  {:>10}  {:>10}  {:6}  PRIMARY\n",
        "VOLUME", "MODE", "SIZE", "CACHED", "DIRTY", "STATE"
    );
    for volume in volumes {
        let only = if volume.read_only { " (read-only)" } else { "" };
        let devices: String = volume.devices.iter().map(|path| format!(" as {path}")).collect();
        out += &format!(
            "{:width$}  {:13}  {:>10}  {:>10}  {:>10}  {:6}  {}{only}{devices}\n",
            volume.name,
            volume.mode,
            Size(volume.size).to_string(),
            Size(volume.cached_bytes).to_string(),
            Size(volume.dirty_bytes).to_string(),
            volume.primary_health.state,
            volume.primary
        );
    }
    out
}

/// A duration in at most two units.
#[must_use]
pub fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// One volume: its table line, its problems, and its request counts.
#[must_use]
pub fn volume(status: &VolumeStatus) -> String {
    let mut out = volumes(std::slice::from_ref(status));
    for problem in &status.problems {
        out += &format!("WRONG    {problem}\n");
    }
    out += &share(status);
    out += &format!("{:13}  {:>12}  {:>10}\n", "OPERATION", "REQUESTS", "MEAN");
    for OperationStatus { operation, requests, mean_micros } in &status.operations {
        let mean = mean_micros.unwrap_or_default();
        out += &format!("{operation:13}  {requests:>12}  {mean:>7.1} us\n");
    }
    out
}

/// The line about a volume's share of the cache; empty if it has neither guarantee nor limit.
fn share(status: &VolumeStatus) -> String {
    let guarantee = Some(status.cache_guarantee_bytes).filter(|&bytes| bytes > 0);
    let guarantee = guarantee.map(|bytes| format!("{} guaranteed", Size(bytes)));
    let limit = status.cache_limit_bytes.map(|bytes| format!("{} at most", Size(bytes)));
    let parts: Vec<String> = guarantee.into_iter().chain(limit).collect();
    match parts.is_empty() {
        true => String::new(),
        false => format!("share    of the cache: {}\n", parts.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{PrimaryStatus, ReadStatus};

    #[test]
    fn times_are_short() {
        assert_eq!(duration(59), "59 s");
        assert_eq!(duration(61), "1 min 1 s");
        assert_eq!(duration(7_260), "2 h 1 min");
        assert_eq!(duration(90_000), "1 d 1 h");
    }

    #[test]
    fn settings_have_a_line_for_the_server_and_for_each_volume() {
        let setting = |volume: Option<&str>, name: &str, value: &str| SettingStatus {
            volume: volume.map(str::to_owned),
            name: name.to_owned(),
            value: value.to_owned(),
            configured: None,
            set_unix_seconds: None,
        };
        let mut all = vec![
            setting(None, "eviction", "lru"),
            setting(None, "ram", "4 MiB"),
            setting(Some("db"), "mode", "write-through"),
        ];
        all[2].configured = Some("write-back".to_owned());
        let expected = "settings eviction=lru ram=4MiB\n\
                        db: mode=write-through (set; configured write-back)\n";
        assert_eq!(settings(&all).replace("4 MiB", "4MiB"), expected);
        assert_eq!(settings(&[]), "");
    }

    #[test]
    fn the_table_is_as_wide_as_its_names() {
        let one = VolumeStatus {
            name: "a-long-name".to_owned(),
            primary: "/dev/sdb".to_owned(),
            size: 3 << 30,
            mode: "write-back".to_owned(),
            read_only: true,
            file: None,
            devices: vec!["/dev/loop7".to_owned()],
            primary_health: PrimaryStatus { state: "away".to_owned(), ..Default::default() },
            reads: ReadStatus::default(),
            cached_bytes: 1 << 20,
            cache_guarantee_bytes: 1 << 30,
            cache_limit_bytes: Some(2 << 30),
            dirty_bytes: 8192,
            lost_bytes: 0,
            lost: Vec::new(),
            problems: vec!["volume a-long-name: it is away".to_owned()],
            operations: vec![OperationStatus {
                operation: "read".to_owned(),
                requests: 3,
                mean_micros: Some(500.0),
            }],
        };
        let expected = "VOLUME       MODE                 SIZE      CACHED       DIRTY  STATE   \
                        PRIMARY\n\
                        a-long-name  write-back          3 GiB       1 MiB       8 KiB  away    \
                        /dev/sdb (read-only) as /dev/loop7\n";
        assert_eq!(volumes(std::slice::from_ref(&one)), expected);
        let more = "WRONG    volume a-long-name: it is away\n\
                    share    of the cache: 1 GiB guaranteed, 2 GiB at most\n\
                    OPERATION          REQUESTS        MEAN\n\
                    read                      3    500.0 us\n";
        assert_eq!(volume(&one), format!("{expected}{more}"));
    }
}
