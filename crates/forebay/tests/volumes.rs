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

/// A primary that is not there at the start: the others are served, and what the cache alone has of
/// its volume is served, kept, and written to it when it is back.
#[test]
fn a_primary_that_is_not_there_does_not_keep_the_others_from_starting() {
    let place = Place::new();
    place.make("a.img", 16 * MIB);
    place.make("b.img", 16 * MIB);
    let arguments = serve(&place, &[("a", "a.img"), ("b", "b.img")]);
    let server = place.start(&arguments);
    write(&place, "a", 1);
    write(&place, "b", 2);
    server.kill();
    fs::rename(place.path("a.img"), place.path("elsewhere")).expect("it is there");

    for how in [&[][..], &["--drain"]] {
        let server = place.start(&arguments);
        check(&place, "a", &noise(1, 1 << 20));
        check(&place, "b", &noise(2, 1 << 20));
        write(&place, "b", 2);
        let mut nbd = Nbd::connect(&place.path("nbd.sock"), "a").expect("it serves");
        let mut bytes = [0; 4096];
        let error = nbd.read(8 * MIB, &mut bytes).expect_err("only the primary has it");
        assert!(error.raw_os_error().is_some(), "the connection must stay: {error}");
        nbd.write(4 * MIB, &noise(5, 4096), true).expect("the cache takes it");
        let said = server.ask(&["status"]);
        assert!(
            said.contains("volume a: the primary") && said.contains("does not answer"),
            "{said}"
        );
        drop(nbd);
        if how.is_empty() {
            stop(server, &[]);
        } else {
            // What is left is said, and kept.
            let output = support::forebay(&["stop", "--drain", &server.control_argument()]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.code() == Some(1) && said.contains("volume a"), "{said}");
            assert_eq!(server.wait(), Some(1));
        }
    }

    // One that nothing is known of is a mistake in the configuration.
    let more = serve(&place, &[("a", "elsewhere"), ("b", "b.img"), ("c", "nosuch.img")]);
    let said = place.refuse(&more);
    assert!(said.contains("volume c") && said.contains("nosuch.img"), "{said}");

    fs::rename(place.path("elsewhere"), place.path("a.img")).expect("it is there");
    let server = place.start(&serve(&place, &[("a", "a.img"), ("b", "b.img")]));
    check(&place, "a", &noise(1, 1 << 20));
    stop(server, &["--drain"]);
    let bytes = fs::read(place.path("a.img")).expect("it is there");
    assert!(bytes[MIB as usize..][..1 << 20] == noise(1, 1 << 20), "the primary has it");
    assert!(bytes[4 * MIB as usize..][..4096] == noise(5, 4096), "and what was written meanwhile");
}
