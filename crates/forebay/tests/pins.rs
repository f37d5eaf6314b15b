//! Pins and prefetches with the real binary: what is pinned stays, also over a restart; a file is
//! found where it lies; a prefetch brings in what nobody has asked for, at its rate, until it is
//! ended.

#[path = "support/disk.rs"]
mod disk;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::time::Instant;

use disk::{attach, can_attach, disk_of, mount_point, refused};
use support::nbd::Nbd;
use support::{Place, Server, client, noise};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A primary of 64 MiB with content that does not compress, and a cache that lets go of what was
/// read longest ago.
fn filled() -> (Place, Vec<String>) {
    let (place, mut arguments) = Place::with_disk();
    arguments.extend(["--eviction=lru", "--sequential-threshold=0"].map(str::to_owned));
    fs::write(place.path("disk.img"), noise(7, 64 << 20)).expect("it can be written");
    (place, arguments)
}

fn counter(server: &Server, name: &str) -> u64 {
    server.status()["counters"][name].as_u64().unwrap_or_else(|| panic!("{name} is counted"))
}

/// Reads bytes of the volume in a scattered order; returns the blocks that came from the primary.
fn read(server: &Server, place: &Place, from: u64, to: u64) -> u64 {
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it connects");
    let mut buf = vec![0; (64 * KIB) as usize];
    let before = counter(server, "primary_read_blocks");
    let pieces = (to - from) / (64 * KIB);
    // The number is coprime to every count of pieces here.
    for at in (0..pieces).map(|n| from + n * 389 % pieces * 64 * KIB) {
        nbd.read(at, &mut buf).expect("it reads");
    }
    counter(server, "primary_read_blocks") - before
}

/// Reads more than the cache holds, until it has let go of as many blocks as it holds.
fn press(server: &Server, place: &Place) {
    let before = counter(server, "evicted_blocks");
    support::until("blocks leave", || {
        read(server, place, 8 * MIB, 64 * MIB);
        counter(server, "evicted_blocks") - before > 8192
    });
}

#[test]
fn what_is_pinned_stays_whatever_else_is_read() {
    let (place, arguments) = filled();
    let server = place.start(&arguments);
    server.ask(&["prefetch", "disk", "--range", "0..4MiB"]);
    press(&server, &place);
    let missed = read(&server, &place, 0, 4 * MIB);
    assert!(missed > 256, "it makes way if it is not pinned: {missed}");
    server.stop(&[]);

    let (place, arguments) = filled();
    let server = place.start(&arguments);
    let said = server.ask(&["pin", "disk", "--range", "0..4MiB", "--prefetch"]);
    assert_eq!(said.trim(), "4 MiB  ..4MiB");
    assert_eq!(counter(&server, "prefetched_blocks"), 1024);
    press(&server, &place);
    assert_eq!(read(&server, &place, 0, 4 * MIB), 0, "all of it is in the cache");
    server.stop(&[]);

    let server = place.start(&arguments);
    server.wait_until_loaded();
    press(&server, &place);
    assert_eq!(read(&server, &place, 0, 4 * MIB), 0, "after a restart too");
    let error = refused(&server, &["pin", "disk", "--range", "0..20MiB"]);
    assert!(error.contains("half of the cache"), "{error}");
    // What is beyond the end was dropped without a word, or kept as a pin of nothing.
    for range in ["65MiB..66MiB", "63MiB..65MiB", "64MiB.."] {
        for command in ["pin", "prefetch"] {
            let error = refused(&server, &[command, "disk", "--range", range]);
            assert!(error.contains(range) && error.contains("ends at 64 MiB"), "{error}");
        }
    }
    for range in ["65MiB..66MiB", "..1MiB; 63MiB..65MiB"] {
        let error = refused(&server, &["set", "disk", &format!("pinned={range}")]);
        assert!(error.contains("beyond the end of volume disk, at 64 MiB"), "{error}");
    }
    assert_eq!(server.ask(&["pin", "disk"]).trim(), "4 MiB  ..4MiB");
    server.ask(&["prefetch", "disk", "--range", "63MiB.."]);
    server.ask(&["pin", "disk", "--remove", "..4MiB"]);
    assert_eq!(server.ask(&["pin", "disk"]).trim(), "nothing is pinned");
    server.stop(&[]);
}

/// Each read the pins, and wrote back all of them with its own: the last one won.
#[test]
fn pins_of_several_at_once_are_all_kept() {
    let (place, arguments) = filled();
    let server = place.start(&arguments);
    let block = |number: u64| format!("{}KiB..{}KiB", 8 * number, 8 * number + 4);
    std::thread::scope(|scope| {
        for person in 0..4 {
            let (server, block) = (&server, &block);
            scope.spawn(move || {
                for turn in 0..8 {
                    server.ask(&["pin", "disk", "--range", &block(1 + 8 * person + turn)]);
                }
                server.ask(&["pin", "disk", "--remove", &block(1 + 8 * person)]);
            });
        }
    });
    let pins: serde_json::Value =
        serde_json::from_str(&server.ask(&["pin", "disk", "--json"])).expect("JSON");
    assert_eq!(pins.as_array().expect("a list").len(), 28, "{pins}");
    let error = refused(&server, &["pin", "disk", "--remove", "x"]);
    assert!(error.contains("nothing is pinned as \"x\""), "{error}");
    server.stop(&[]);
}

#[test]
fn a_file_is_pinned_where_it_lies() {
    if !can_attach() {
        return;
    }
    let (place, _cleanup, arguments) = disk_of(256 * MIB);
    let server = place.start(&arguments);
    let device = attach(&server, &[]);
    client("mkfs.ext4", &["-q", &device]);
    let (mounted, _) = mount_point(&place);
    client("mount", &[&device, &mounted.to_string_lossy()]);
    let path = mounted.join("table.ibd");
    fs::write(&path, noise(3, (6 * MIB) as usize)).expect("it can be written");
    let shown = path.to_string_lossy().into_owned();
    server.ask(&["pin", "disk", "--file", &shown, "--prefetch"]);
    let pins: serde_json::Value =
        serde_json::from_str(&server.ask(&["pin", "disk", "--json"])).expect("JSON");
    assert_eq!(pins[0]["name"].as_str(), Some(shown.as_str()));
    // Where it lies is what its bytes say.
    let ranges = pins[0]["ranges"].as_array().expect("ranges");
    let bounds = |range: &serde_json::Value| {
        [0, 1].map(|at| usize::try_from(range[at].as_u64().expect("bytes")).expect("small"))
    };
    let disk = fs::read(&device).expect("the disk can be read");
    let found: Vec<u8> =
        ranges.iter().map(bounds).flat_map(|[from, to]| disk[from..to].to_vec()).collect();
    assert_eq!(found, noise(3, (6 * MIB) as usize));
    let elsewhere = refused(&server, &["pin", "disk", "--file", "/proc/self/exe"]);
    assert!(!elsewhere.is_empty());
    client("umount", &[&mounted.to_string_lossy()]);
    server.ask(&["detach", "disk"]);
    server.stop(&[]);
}

#[test]
fn a_prefetch_keeps_to_its_rate_and_can_be_ended() {
    let (place, arguments) = filled();
    let server = place.start(&arguments);
    let began = Instant::now();
    server.ask(&["prefetch", "disk", "--range", "0..4MiB", "--rate", "4MiB"]);
    assert!(began.elapsed().as_millis() > 700, "{:?}", began.elapsed());
    assert_eq!(read(&server, &place, 0, 4 * MIB), 0);
    let stats = server.status();
    let requests = |name: &str| {
        let all = stats["volumes"][0]["operations"].as_array().expect("operations");
        all.iter()
            .find(|one| one["operation"] == name)
            .map_or(0, |one| one["requests"].as_u64().expect("a number"))
    };
    assert_eq!(requests("read"), 64, "those of the prefetch are no reads");
    assert!(requests("prefetch") >= 16);

    let begun = server.ask(&["prefetch", "disk", "--all", "--rate", "1MiB", "--background"]);
    assert!(begun.starts_with("running"), "{begun}");
    let error = refused(&server, &["prefetch", "disk", "--range", "0..1MiB"]);
    assert!(error.contains("already"), "{error}");
    server.ask(&["prefetch", "disk", "--cancel"]);
    support::until("it ends", || {
        server.ask(&["prefetch", "disk", "--show"]).starts_with("cancelled")
    });
    server.ask(&["set", "disk", "mode=write-only"]);
    let error = refused(&server, &["prefetch", "disk", "--range", "8MiB..9MiB"]);
    assert!(error.contains("mode"), "{error}");
    server.stop(&[]);
}
