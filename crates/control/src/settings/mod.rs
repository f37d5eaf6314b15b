//! The settings in force, as a list: by the names and in the words of the configuration.

use crate::config::{Config, FuseTransport, TlsPolicy, VolumeConfig};
use crate::pool::SettingSnapshot;
use crate::units::Size;

/// Every setting of a server of `shards` threads that the status does not show elsewhere.
#[must_use]
pub fn in_force(config: &Config, shards: usize) -> Vec<SettingSnapshot> {
    let Config { cache, memory, server, .. } = config;
    let of_server = [
        ("eviction", cache.eviction.name().to_owned()),
        ("content", cache.content.name().to_owned()),
        ("compress", cache.compress.to_string()),
        ("dirty_limit", cache.dirty_limit.to_string()),
        ("write_cache_depth", cache.write_cache_depth.to_string()),
        ("ram", size(memory.ram)),
        ("index", memory.index.map_or_else(|| "half-of-memory".to_owned(), size)),
        ("lock", memory.lock.to_string()),
        ("shards", shards.to_string()),
        ("max_clients", server.max_clients.to_string()),
        ("client_memory", size(server.client_memory)),
        ("client_stall_timeout", server.client_stall_timeout.to_string()),
        ("idle_timeout", server.idle_timeout.to_string()),
        ("tls", tls(server.tls).to_owned()),
        ("fuse_transport", fuse_transport(server.fuse_transport).to_owned()),
        ("state_dir", cache.state_dir.display().to_string()),
    ];
    let mut all: Vec<_> = of_server.map(|(name, value)| setting(None, name, value)).into();
    all.extend(config.volumes.iter().flat_map(of_volume));
    all
}

fn of_volume(volume: &VolumeConfig) -> Vec<SettingSnapshot> {
    let settings = [
        ("mode", volume.mode.name().to_owned()),
        ("sequential_threshold", size(volume.sequential_threshold)),
        ("read_only", volume.read_only.to_string()),
    ];
    let whose = || Some(volume.name.clone());
    settings.map(|(name, value)| setting(whose(), name, value)).into()
}

fn setting(volume: Option<String>, name: &'static str, value: String) -> SettingSnapshot {
    SettingSnapshot { volume, name, value, changed: None }
}

/// As the configuration takes it.
fn size(size: Size) -> String {
    size.to_string().replace(' ', "")
}

fn tls(policy: TlsPolicy) -> &'static str {
    match policy {
        TlsPolicy::Off => "off",
        TlsPolicy::Allowed => "allowed",
        TlsPolicy::Required => "required",
    }
}

fn fuse_transport(transport: FuseTransport) -> &'static str {
    match transport {
        FuseTransport::Auto => "auto",
        FuseTransport::IoUring => "io-uring",
        FuseTransport::Device => "device",
    }
}
