//! Accepted and rejected configurations: the error messages must name the problem.

use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_control::config::{Config, ConfigError, TlsPolicy};
use forebay_control::endpoint::{Listen, Place};
use forebay_control::units::{Share, Size, Time};
use forebay_engine::{Eviction, Mode};

const WHOLE: &str = r#"
[cache]
path = "/dev/nvme0n1"
size = "100GiB"
state_dir = "/var/lib/forebay"
eviction = "fifo"
dirty_limit = "40%"
write_cache_depth = "2m"
compress = false

[memory]
ram = "1GiB"
lock = true

[control]
socket = "/run/forebay/control.sock"

[server]
shards = 4
max_clients = 16
idle_timeout = "1h"
client_memory = "64MiB"
client_stall_timeout = "5s"
nbd = ["unix:/run/forebay/nbd.sock", "tcp:[::1]:10809"]
tls = "required"
tls_cert = "/etc/forebay/cert.pem"
tls_key = "/etc/forebay/key.pem"
tls_ca = "/etc/forebay/ca.pem"

[[volume]]
name = "db"
primary = "/dev/sdb"
mode = "write-through"
sequential_threshold = 0
read_only = false

[[volume]]
name = "vm"
primary = "nbd://san:10809/vm"
"#;

const LEAST: &str = r#"
[cache]
path = "/dev/nvme0n1"
[server]
nbd = ["unix:/run/nbd.sock"]
[[volume]]
name = "db"
primary = "/dev/sdb"
"#;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(Path::new("forebay.toml"), text)
}

#[test]
fn every_key_is_read() {
    let config = parse(WHOLE).expect("it is in order");
    assert_eq!(config.cache.size, Some(Size(100 << 30)));
    assert_eq!(config.cache.eviction, Eviction::Fifo);
    assert_eq!(config.cache.dirty_limit, Share(forebay_engine::Part::Percent(40)));
    assert_eq!(config.cache.write_cache_depth, Time(Duration::from_secs(120)));
    assert!(!config.cache.compress);
    assert_eq!(config.memory.ram, Size(1 << 30));
    assert!(config.memory.lock);
    assert_eq!(config.control.socket, Some(PathBuf::from("/run/forebay/control.sock")));
    assert_eq!((config.server.shards, config.server.max_clients), (Some(4), 16));
    assert_eq!(config.server.idle_timeout, Time(Duration::from_secs(3600)));
    assert_eq!(config.server.client_memory, Size(64 << 20));
    assert_eq!(config.server.client_stall_timeout, Time(Duration::from_secs(5)));
    let nbd = [
        Listen::from(Place::Unix(PathBuf::from("/run/forebay/nbd.sock"))),
        Listen::from(Place::Tcp("::1".to_owned(), 10809)),
    ];
    assert_eq!(config.server.nbd, nbd);
    assert_eq!(config.server.tls, TlsPolicy::Required);
    assert_eq!(config.volumes.len(), 2);
    assert_eq!(config.volumes[0].mode, Mode::WriteThrough);
    assert_eq!(config.volumes[0].sequential_threshold, Size(0));
    assert_eq!(config.volumes[1].mode, Mode::WriteBack);
}

#[test]
fn what_is_left_out_has_a_default() {
    let config = parse(LEAST).expect("it is in order");
    assert_eq!(config.cache.size, None);
    assert_eq!(config.cache.eviction, Eviction::Frequency);
    assert_eq!(config.cache.dirty_limit, Share(forebay_engine::Part::Percent(50)));
    assert_eq!(config.memory.ram, Size(256 << 20));
    assert_eq!(config.server.max_clients, 128);
    assert_eq!(config.server.idle_timeout, Time(Duration::ZERO), "for ever");
    assert_eq!(config.server.client_memory, Size(256 << 20));
    assert_eq!(config.server.client_stall_timeout, Time(Duration::from_secs(60)));
    assert_eq!(config.server.tls, TlsPolicy::Off);
    assert_eq!(config.volumes[0].sequential_threshold, Size(512 << 10));
}

/// Each is [`WHOLE`] with one text replaced, and words that the message must contain.
const REFUSED: &[(&str, &str, &[&str])] = &[
    ("size = \"100GiB\"", "sise = \"1\"", &["line 4", "unknown key `sise`", "`size`", "`path`"]),
    ("[memory]", "[memroy]", &["line 11", "unknown key `memroy`", "`memory`"]),
    ("path = \"/dev/nvme0n1\"", "", &["missing key `path`"]),
    ("\"100GiB\"", "\"100gigs\"", &["line 4", "100gigs", "GiB"]),
    ("\"100GiB\"", "-1", &["line 4", "-1", "a size"]),
    ("\"100GiB\"", "0", &["cache.size", "0 is out of range"]),
    ("\"40%\"", "\"140%\"", &["line 7", "140%", "0 to 100"]),
    ("\"40%\"", "\"95%\"", &["cache.dirty_limit", "95%", "90%"]),
    ("\"2m\"", "\"2\"", &["line 8", "a time"]),
    ("\"2m\"", "\"0s\"", &["cache.write_cache_depth", "write-through"]),
    ("[[volume]]\nname = \"vm\"", "[volume]\nname = \"vm\"", &["line", "write [[volume]]"]),
    ("\"fifo\"", "\"mru\"", &["line 6", "mru", "fifo, lru"]),
    ("\"write-through\"", "\"writeback\"", &["writeback", "write-back", "pass-through"]),
    ("shards = 4", "shards = 0", &["server.shards", "0", "64"]),
    ("shards = 4", "shards = 65", &["server.shards", "65"]),
    ("max_clients = 16", "max_clients = 0", &["server.max_clients", "900"]),
    ("\"64MiB\"", "\"8MiB\"", &["server.client_memory", "8MiB", "16MiB or more"]),
    ("\"5s\"", "\"0s\"", &["server.client_stall_timeout", "0s", "1s or more"]),
    ("\"1h\"", "\"1ms\"", &["server.idle_timeout", "1ms", "0s for never"]),
    ("\"unix:/run/forebay/nbd.sock\", ", "\"unix:\", ", &["line 24", "path is missing"]),
    ("tcp:[::1]:10809", "udp:x:1", &["udp:x:1", "tcp:HOST:PORT"]),
    ("tcp:[::1]:10809", "tcp:host", &["no port"]),
    ("tcp:[::1]:10809", "tcp:host:70000", &["port is not from 0 to 65535"]),
    ("tcp:[::1]:10809", "tcp::1", &["host is missing"]),
    ("tcp:[::1]:10809", "unix:/run/forebay/nbd.sock", &["server.nbd", "twice"]),
    ("tcp:[::1]:10809", "unix:/run/forebay/nbd.sock,tls=off", &["server.nbd", "twice"]),
    ("tcp:[::1]:10809", "tcp:h:1,tls=on", &["tcp:h:1,tls=on", "off, allowed, required"]),
    (", \"tcp:[::1]:10809\"", "", &["server.tls", "no endpoint uses it", "unix:PATH,tls="]),
    ("\"required\"", "\"on\"", &["on", "off, allowed, required"]),
    ("\"required\"", "\"off\"", &["server.tls", "TLS is off"]),
    ("tls_key = \"/etc/forebay/key.pem\"", "", &["server.tls", "tls_key"]),
    ("name = \"vm\"", "name = \"db\"", &["two volumes", "db"]),
    ("name = \"vm\"", "name = \"a/b\"", &["a/b", "cannot be used"]),
    ("name = \"vm\"", "name = \"\"", &["volume.name", "1 to 64"]),
    ("nbd://san:10809/vm", "/dev/sdb", &["volume \"vm\"", "/dev/sdb", "already the primary"]),
    ("nbd://san:10809/vm", "file:/dev/../dev/sdb?emulate=hdd", &["already the primary"]),
    ("nbd://san:10809/vm", "/dev/nvme0n1", &["volume \"vm\"", "cache device", "overwrite"]),
    ("nbd://san:10809/vm", "", &["volume \"vm\": primary", "is empty"]),
    (
        "sequential_threshold = 0",
        "sequential_threshold = 512",
        &["512 is out of range", "64KiB or more"],
    ),
    ("compress = false", "compress = \"no\"", &["line 9", "boolean"]),
];

#[test]
fn what_cannot_be_used_is_refused_with_a_reason() {
    for (old, new, words) in REFUSED {
        // Only the last occurrence is replaced where "/dev/nvme0n1" must stay the cache's path.
        let at = WHOLE.rfind(old).unwrap_or_else(|| panic!("{old:?} is in the whole"));
        let text = format!("{}{new}{}", &WHOLE[..at], &WHOLE[at + old.len()..]);
        let message = match parse(&text) {
            Ok(_) => panic!("{new:?} must be refused"),
            Err(error) => error.to_string(),
        };
        for word in *words {
            assert!(message.contains(word), "{new:?}: {word:?} is missing from {message:?}");
        }
        assert!(!message.contains('\n'), "one line: {message:?}");
    }
}

#[test]
fn a_configuration_needs_an_endpoint_and_a_volume() {
    let without = |section: &str| {
        let at = LEAST.find(section).expect("it is in the least");
        parse(&LEAST[..at]).expect_err("it must be refused").to_string()
    };
    assert!(without("[server]").contains("no endpoint"));
    assert!(without("[[volume]]").contains("0 volumes"));
}

#[test]
fn volumes_are_limited() {
    let mut text = LEAST.to_owned();
    for number in 1..64 {
        text.push_str(&format!("[[volume]]\nname = \"v{number}\"\nprimary = \"/dev/x{number}\"\n"));
    }
    parse(&text).expect("64 volumes fit");
    text.push_str("[[volume]]\nname = \"v64\"\nprimary = \"/dev/x64\"\n");
    assert!(parse(&text).expect_err("65 do not").to_string().contains("65 volumes"));
}

#[test]
fn links_to_the_same_device_are_seen_through() {
    let directory = std::env::temp_dir().join(format!("forebay-config-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a temporary directory can be made");
    let (real, link) = (directory.join("real"), directory.join("link"));
    std::fs::write(&real, "").expect("a file can be written");
    std::os::unix::fs::symlink(&real, &link).expect("a link can be made");
    let text = LEAST.replace("/dev/nvme0n1", &real.to_string_lossy());
    let text = text.replace("/dev/sdb", &link.to_string_lossy());
    let message = parse(&text).expect_err("the cache is its own primary").to_string();
    assert!(message.contains("is the cache device"), "{message}");
    std::fs::remove_dir_all(&directory).expect("the temporary directory can be removed");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let missing = Config::text(Path::new("/nonexistent/forebay.toml"));
    let message = missing.expect_err("there is no such file").to_string();
    assert!(message.contains("/nonexistent/forebay.toml"), "{message}");
    let long = std::env::temp_dir().join(format!("forebay-long-{}", std::process::id()));
    std::fs::write(&long, "#".repeat((1 << 20) + 1)).expect("a file can be written");
    let message = Config::text(&long).expect_err("it is too long").to_string();
    assert!(message.contains("it has 1048577 bytes, and the limit is 1048576;"), "{message}");
    std::fs::remove_file(&long).expect("it is ours");
}
