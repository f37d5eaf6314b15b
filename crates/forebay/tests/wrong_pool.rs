//! Devices that do not belong together: refused and left unchanged, so that a start with the
//! correct ones finds all data.

mod support;

use std::fs;
use std::os::unix::fs::FileExt;

use support::nbd::Nbd;
use support::{Place, forebay, noise};

const MIB: u64 = 1 << 20;

/// Two primaries with a cache each, both with dirty data, left by a kill.
fn two_pools() -> (Place, [Vec<String>; 2]) {
    let place = Place::new();
    let pools = [1, 2].map(|number| {
        place.make(&format!("disk{number}.img"), 64 * MIB);
        let cache = format!("cache{number}.img,size=32MiB");
        place.serve(&format!("disk{number}.img"), &cache)
    });
    for (arguments, seed) in pools.iter().zip(1..) {
        let server = place.start(arguments);
        let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
        // Backwards: a sequential stream would bypass the cache.
        let bytes = noise(seed, 1 << 20);
        for (at, part) in bytes.chunks(64 << 10).enumerate().rev() {
            let offset = MIB + (at as u64) * (64 << 10);
            nbd.write(offset, part, true).expect("it is written");
        }
        server.kill();
    }
    (place, pools)
}

fn check(place: &Place, arguments: &[String], seed: u64) {
    let server = place.start(arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mut found = vec![0; 1 << 20];
    nbd.read(MIB, &mut found).expect("it can be read");
    assert!(found == noise(seed, 1 << 20), "something else is there");
    drop(nbd);
    server.kill();
}

#[test]
fn the_cache_of_another_pool_is_refused_and_neither_loses_anything() {
    let (place, [one, two]) = two_pools();
    for (disk, cache) in [("disk1.img", "cache2.img"), ("disk2.img", "cache1.img")] {
        let said = place.refuse(&place.serve(disk, cache));
        assert!(said.contains("belongs to primary") && said.contains(disk), "{said}");
    }
    check(&place, &one, 1);
    check(&place, &two, 2);
}

/// The other primary is a volume of its own: the first one's dirty blocks must not be dropped.
#[test]
fn a_cache_with_a_volume_that_is_not_configured_is_refused() {
    let (place, [one, _]) = two_pools();
    place.make("disk3.img", 64 * MIB);
    let mut other = place.serve("disk3.img", "cache1.img");
    let at = other.iter().position(|argument| argument.starts_with("--name"));
    other[at.expect("it is given")] = "--name=other".to_owned();
    let said = place.refuse(&other);
    assert!(said.contains("volume disk") && said.contains("256 blocks"), "{said}");
    check(&place, &one, 1);
    // Even without dirty blocks it may be the wrong device.
    let server = place.start(&one);
    server.stop(&["--drain"]);
    let said = place.refuse(&other);
    assert!(said.contains("none of its volumes is configured"), "{said}");
    check(&place, &one, 1);
}

#[test]
fn a_primary_that_shrank_after_a_kill_is_refused_until_its_size_is_restored() {
    let (place, [one, _]) = two_pools();
    let file = fs::File::options().write(true).open(place.path("disk1.img")).expect("it is there");
    file.set_len(32 * MIB).expect("it can be cut");
    let said = place.refuse(&one);
    assert!(said.contains("shrunk") && said.contains("disk1.img"), "{said}");
    file.set_len(64 * MIB).expect("it can grow");
    drop(file);
    check(&place, &one, 1);
}

#[test]
fn a_cache_device_that_shrank_is_refused() {
    let (place, _) = two_pools();
    let file = fs::File::options().write(true).open(place.path("cache1.img"));
    file.and_then(|file| file.set_len(16 * MIB)).expect("it can be cut");
    let said = place.refuse(&place.serve("disk1.img", "cache1.img"));
    assert!(said.contains("restore its size"), "{said}");
}

#[test]
fn a_cache_that_is_its_own_primary_is_refused() {
    let place = Place::new();
    place.make("disk.img", 64 * MIB);
    fs::hard_link(place.path("disk.img"), place.path("same.img")).expect("it can be linked");
    let said = place.refuse(&place.serve("disk.img", "same.img"));
    assert!(said.contains("in use") || said.contains("same"), "{said}");
    let bytes = fs::read(place.path("disk.img")).expect("it is there");
    assert!(bytes.iter().all(|&byte| byte == 0), "nothing was written on it");
}

/// The cache's first megabyte was zeroed, or another device is in its place: dirty blocks must not
/// be lost silently.
#[test]
fn a_cache_that_was_wiped_or_replaced_is_refused() {
    let (place, [one, _]) = two_pools();
    let whole = fs::read(place.path("cache1.img")).expect("it is there");
    let mut wiped = whole.clone();
    wiped[..MIB as usize].fill(0);
    fs::write(place.path("cache1.img"), &wiped).expect("it can be written");
    let said = place.refuse(&one);
    assert!(said.contains("is blank") && said.contains("disk1.img"), "{said}");
    assert!(said.contains("--reset-cache"), "{said}");
    assert!(fs::read(place.path("cache1.img")).expect("it is there") == wiped, "left alone");
    fs::remove_file(place.path("cache1.img")).expect("it is there");
    assert!(place.refuse(&one).contains("is blank"));
    fs::write(place.path("cache1.img"), &whole).expect("it can be written");
    check(&place, &one, 1);

    // The other cache is discarded on purpose, and must not be accepted again by mistake.
    fs::rename(place.path("cache1.img"), place.path("away")).expect("it is there");
    let mut reset = one.clone();
    reset.push("--reset-cache".to_owned());
    place.start(&reset).kill();
    place.start(&one).kill();
    fs::rename(place.path("away"), place.path("cache1.img")).expect("it is there");
    let said = place.refuse(&one);
    assert!(said.contains("served with another cache since"), "{said}");
}

#[test]
fn a_cache_that_was_drained_can_be_replaced() {
    let (place, [one, _]) = two_pools();
    let server = place.start(&one);
    server.stop(&["--drain"]);
    fs::remove_file(place.path("cache1.img")).expect("it is there");
    check(&place, &one, 1);
}

/// Salvages the cache of pool 1; returns the exit code and standard error.
fn salvage(place: &Place, state: &str, more: &[&str]) -> (Option<i32>, String) {
    let (cache, to) = (place.text("cache1.img"), place.text("disk1.img"));
    let state = format!("--state={}", place.text(state));
    let output = forebay(&[&["salvage", &cache, "--to", &to, &state], more].concat());
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Replaces the data with `noise(3)` and drains it.
fn rewrite(place: &Place, arguments: &[String]) {
    let server = place.start(arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    nbd.write(MIB, &noise(3, 1 << 20), true).expect("it is written");
    drop(nbd);
    server.stop(&["--drain"]);
}

/// Found by an audit: a salvage wrote the blocks of an older copy of the cache, of a cache whose
/// primary another one has served since, and of one whose primary was changed, and exited with 0.
#[test]
fn a_salvage_refuses_what_a_start_refuses_unless_it_is_forced() {
    const OLDER: &str = "an older copy";
    const ANOTHER: &str = "served with another cache since";
    const CHANGED: &str = "was changed since the cache was last used";
    for reason in [OLDER, ANOTHER, CHANGED] {
        let (place, [one, _]) = two_pools();
        let cache = place.path("cache1.img");
        let kept = fs::read(&cache).expect("it is there");
        match reason {
            OLDER => rewrite(&place, &one),
            ANOTHER => {
                fs::remove_file(&cache).expect("it is there");
                rewrite(&place, &[&one[..], &["--reset-cache".to_owned()]].concat());
            }
            _ => {
                let file = fs::File::options().write(true).open(place.path("disk1.img"));
                let file = file.expect("it is there");
                file.write_all_at(&noise(3, 1 << 20), MIB).expect("it is written");
            }
        }
        fs::write(&cache, &kept).expect("it can be written");
        let data = || {
            let mut found = vec![0; 1 << 20];
            let file = fs::File::open(place.path("disk1.img")).expect("it is there");
            file.read_exact_at(&mut found, MIB).expect("it is long enough");
            found
        };
        assert!(place.refuse(&one).contains(reason));
        let (code, said) = salvage(&place, "state", &[]);
        assert!(code == Some(1) && said.contains(reason) && said.contains("--force"), "{said}");
        assert!(data() == noise(3, 1 << 20), "{reason}: older blocks are on the primary");
        let (code, said) = salvage(&place, "state", &["--force"]);
        assert!(code == Some(0) && said.contains(reason), "{said}");
        assert!(data() == noise(1, 1 << 20), "{reason}: not forced");
    }
}

#[test]
fn a_salvage_writes_to_the_primary_as_it_was_left_and_where_nothing_is_on_record() {
    for state in ["state", "elsewhere"] {
        let (place, _) = two_pools();
        let (code, said) = salvage(&place, state, &[]);
        let unknown = said.contains("no record of this cache: it may be an older copy");
        assert!(code == Some(0) && unknown == (state == "elsewhere"), "{said}");
        let disk = fs::read(place.path("disk1.img")).expect("it is there");
        assert!(disk[MIB as usize..2 * MIB as usize] == noise(1, 1 << 20), "{state}");
    }
}

/// Found by an audit: while the primary was still blank, the two devices could be exchanged in the
/// configuration. The blank one became a new cache, and clients wrote over the old cache.
#[test]
fn a_cache_and_a_blank_primary_that_are_exchanged_are_refused() {
    let place = Place::new();
    place.make("disk1.img", 64 * MIB);
    let one = place.serve("disk1.img", "cache1.img,size=32MiB");
    // All of its data is dirty.
    let server = place.start(&[&one[..], &["--idle-destage=0s".to_owned()]].concat());
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    nbd.write(MIB, &noise(1, 4096), true).expect("it is written");
    drop(nbd);
    server.kill();
    let before = ["disk1.img", "cache1.img"].map(|name| fs::read(place.path(name)).expect(name));
    assert!(before[0].iter().all(|&byte| byte == 0), "or this shows nothing");
    let exchanged = place.serve("cache1.img", "disk1.img");
    for more in [None, Some("--reset-cache"), Some("--accept-data-loss")] {
        let more = more.map(str::to_owned);
        let said = place.refuse(&[&exchanged[..], more.as_slice()].concat());
        assert!(said.contains("cache1.img is a Forebay cache; are the primary"), "{said}");
    }
    let after = ["disk1.img", "cache1.img"].map(|name| fs::read(place.path(name)).expect(name));
    assert!(after == before, "both are left alone");

    // A volume may hold the image of a cache: accepted once, it is known.
    fs::copy(place.path("cache1.img"), place.path("image.img")).expect("it can be copied");
    let mut nested = place.serve("image.img", "cache2.img,size=32MiB");
    assert!(place.refuse(&nested).contains("--accept-primary disk"));
    nested.push("--accept-primary=disk".to_owned());
    place.start(&nested).kill();
    nested.pop();
    place.start(&nested).stop(&[]);
    let server = place.start(&one);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mut found = vec![0; 4096];
    nbd.read(MIB, &mut found).expect("it can be read");
    assert!(found == noise(1, 4096), "something else is there");
    server.kill();
}
