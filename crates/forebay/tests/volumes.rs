//! Volumes that are renamed, removed and added: the others keep what is cached of them, and nothing
//! of a removed one comes back.

mod support;

use std::fs;

use support::nbd::Nbd;
use support::{Place, Server, noise};

const MIB: u64 = 1 << 20;

/// Arguments for these volumes, each a name and its primary, over one cache.
fn serve(place: &Place, volumes: &[(&str, &str)]) -> Vec<String> {
    let mut text = format!(
        "[cache]\npath = {:?}\nsize = \"32MiB\"\nstate_dir = {:?}\nwrite_cache_depth = \"1h\"\n\
         [memory]\nram = \"4MiB\"\n[server]\nnbd = [\"unix:{}\"]\nshards = 2\n\
         [control]\nsocket = {:?}\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("nbd.sock"),
        place.text("control.sock"),
    );
    for (name, primary) in volumes {
        let primary = place.text(primary);
        text += &format!(
            "[[volume]]\nname = {name:?}\nprimary = {primary:?}\nsequential_threshold = \"0\"\n"
        );
    }
    fs::write(place.path("forebay.toml"), text).expect("it can be written");
    vec!["serve".to_owned(), format!("--config={}", place.text("forebay.toml"))]
}

fn write(place: &Place, volume: &str, seed: u64) {
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), volume).expect("it serves");
    nbd.write(MIB, &noise(seed, 1 << 20), true).expect("it is written");
}

fn check(place: &Place, volume: &str, expected: &[u8]) {
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), volume).expect("it serves");
    let mut found = vec![0; expected.len()];
    nbd.read(MIB, &mut found).expect("it can be read");
    assert!(found == expected, "something else is on {volume}");
}

fn stop(server: Server, how: &[&str]) {
    server.ask(&[&["stop"], how].concat());
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn volumes_are_renamed_removed_and_added_and_the_others_keep_their_cache() {
    let place = Place::new();
    place.make("a.img", 16 * MIB);
    place.make("b.img", 16 * MIB);
    let server = place.start(&serve(&place, &[("a", "a.img"), ("b", "b.img")]));
    write(&place, "a", 1);
    write(&place, "b", 2);
    server.kill();

    // Renamed, and its dirty blocks are there; the other one too, under the first one's name.
    let server = place.start(&serve(&place, &[("c", "a.img"), ("a", "b.img")]));
    check(&place, "c", &noise(1, 1 << 20));
    check(&place, "a", &noise(2, 1 << 20));
    // Not long before the kill: what waits is destaged when nobody asks for anything.
    write(&place, "a", 2);
    server.kill();

    // Removed with dirty blocks: refused, and nothing has changed.
    let alone = serve(&place, &[("c", "a.img")]);
    let said = place.refuse(&alone);
    assert!(said.contains("volume a of ") && said.contains("256 blocks"), "{said}");
    assert!(said.contains("--forget-volume a"), "{said}");
    let wrong = [&alone[..], &["--forget-volume=b".to_owned()]].concat();
    assert!(place.refuse(&wrong).contains("no volume of that name"));
    let server = place.start(&serve(&place, &[("c", "a.img"), ("a", "b.img")]));
    check(&place, "a", &noise(2, 1 << 20));
    stop(server, &["--drain"]);

    // Removed when nothing of it is dirty; the other stays warm.
    let server = place.start(&serve(&place, &[("c", "a.img")]));
    check(&place, "c", &noise(1, 1 << 20));
    let status = server.status();
    assert_eq!(status["counters"]["misses"], 0, "all of it was in the cache");
    assert_eq!(status["volumes"].as_array().map(Vec::len), Some(1));
    server.kill();

    // Its primary is used without the cache meanwhile. Added again, it is a new volume.
    let mut bytes = fs::read(place.path("b.img")).expect("it is there");
    let changed = noise(3, 1 << 20);
    bytes[MIB as usize..][..1 << 20].copy_from_slice(&changed);
    fs::write(place.path("b.img"), bytes).expect("it can be written");
    let server = place.start(&serve(&place, &[("c", "a.img"), ("b", "b.img")]));
    check(&place, "b", &changed);
    check(&place, "c", &noise(1, 1 << 20));
    write(&place, "b", 4);
    server.kill();
    let server = place.start(&serve(&place, &[("c", "a.img"), ("b", "b.img")]));
    check(&place, "b", &noise(4, 1 << 20));
    write(&place, "b", 4);
    server.kill();

    // Given up: what only the cache had of it is lost, as was asked for, and stays so.
    let server = place.start(
        &[&serve(&place, &[("c", "a.img")])[..], &["--forget-volume=b".to_owned()]].concat(),
    );
    check(&place, "c", &noise(1, 1 << 20));
    stop(server, &[]);
    let server = place.start(&serve(&place, &[("b", "b.img"), ("c", "a.img")]));
    check(&place, "b", &changed);
    check(&place, "c", &noise(1, 1 << 20));
    stop(server, &["--drain"]);
}
