//! What an orderly stop leaves on record: what is clean, and where the log ends.

mod support;

use std::fs;

use support::nbd::Nbd;
use support::{Place, Server, noise};

const MIB: u64 = 1 << 20;

/// Arguments for volume `back`, which stays dirty, and `through`, which is never dirty for long.
fn serve(place: &Place, more: &[&str]) -> Vec<String> {
    let mut text = format!(
        "[cache]\npath = {:?}\nsize = \"32MiB\"\nstate_dir = {:?}\nwrite_cache_depth = \"1h\"\n\
         idle_destage = \"0s\"\n[memory]\nram = \"4MiB\"\n[server]\nnbd = [\"unix:{}\"]\n\
         shards = 2\n[control]\nsocket = {:?}\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("nbd.sock"),
        place.text("control.sock"),
    );
    for (name, mode) in [("back", "write-back"), ("through", "write-through")] {
        let primary = place.text(name);
        text += &format!(
            "[[volume]]\nname = {name:?}\nprimary = {primary:?}\nmode = {mode:?}\n\
             sequential_threshold = \"0\"\n"
        );
    }
    fs::write(place.path("forebay.toml"), text).expect("it can be written");
    let mut arguments =
        vec!["serve".to_owned(), format!("--config={}", place.text("forebay.toml"))];
    arguments.extend(more.iter().map(|&one| one.to_owned()));
    arguments
}

fn place() -> Place {
    let place = Place::new();
    ["back", "through"].into_iter().for_each(|name| place.make(name, 16 * MIB));
    place
}

fn write(place: &Place, volume: &str, seed: u64) {
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), volume).expect("it serves");
    nbd.write(0, &noise(seed, MIB as usize), true).expect("it is written");
}

fn check(place: &Place, volume: &str, expected: &[u8]) {
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), volume).expect("it serves");
    let mut found = vec![0; expected.len()];
    nbd.read(0, &mut found).expect("it can be read");
    assert!(found == expected, "something else is on {volume}");
}

fn dirty(server: &Server, volume: &str) -> u64 {
    let status = server.status();
    let mut all = status["volumes"].as_array().expect("a list").iter();
    let one = all.find(|one| one["name"] == volume).expect("it is served");
    one["dirty_bytes"].as_u64().expect("a number") / 4096
}

/// Bytes that can be read of a volume that `salvage` lists.
fn readable(volume: &serde_json::Value) -> u64 {
    volume["dirty_bytes"].as_u64().expect("a number")
}

/// The log alone names its blocks dirty, since older ones of another volume are.
#[test]
fn a_volume_that_a_stop_left_clean_is_clean() {
    let place = place();
    let server = place.start(&serve(&place, &[]));
    write(&place, "back", 1);
    write(&place, "through", 2);
    assert_eq!(dirty(&server, "through"), 0);
    server.stop(&[]);
    let server = place.start(&serve(&place, &[]));
    assert_eq!((dirty(&server, "back"), dirty(&server, "through")), (256, 0));
    // Nor does a crash make it dirty.
    server.kill();
    let server = place.start(&serve(&place, &[]));
    assert_eq!((dirty(&server, "back"), dirty(&server, "through")), (256, 0));
    server.stop(&[]);

    // Somebody changes its primary, which was said to be complete.
    let changed = noise(3, 16 * MIB as usize);
    fs::write(place.path("through"), &changed).expect("it can be written");
    let said = place.refuse(&serve(&place, &[]));
    assert!(said.contains("volume through") && said.contains("--accept-primary"), "{said}");
    let list = |state: &str| {
        let state = format!("--state={}", place.text(state));
        let cache = place.text("cache.img");
        let listed = support::forebay(&["salvage", "--list", "--json", &state, &cache]);
        assert_eq!(listed.status.code(), Some(0));
        let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).expect("JSON");
        listed["volumes"].as_array().expect("a list").iter().map(readable).collect::<Vec<_>>()
    };
    assert_eq!(list("state"), [MIB, 0]);
    assert!(list("none")[1] > 0, "the log alone cannot tell");
    let server = place.start(&serve(&place, &["--accept-primary=through"]));
    check(&place, "through", &changed[..MIB as usize]);
    check(&place, "back", &noise(1, MIB as usize));
    server.stop(&["--drain"]);
    let found = fs::read(place.path("through")).expect("it is there");
    assert!(found == changed, "old bytes were written over the change");
}

/// A running server, and a copy of its cache from before what it writes from now on.
fn copied() -> (Place, Server) {
    let place = place();
    let server = place.start(&serve(&place, &[]));
    write(&place, "back", 1);
    fs::copy(place.path("cache.img"), place.path("older")).expect("it can be copied");
    (place, server)
}

#[test]
fn a_cache_that_lacks_the_end_that_a_stop_has_written_is_refused() {
    let (place, server) = copied();
    write(&place, "back", 2);
    server.stop(&[]);
    fs::copy(place.path("cache.img"), place.path("newer")).expect("it can be copied");

    fs::copy(place.path("older"), place.path("cache.img")).expect("it can be put back");
    let said = place.refuse(&serve(&place, &[]));
    assert!(said.contains("older copy") && said.contains("--accept-data-loss"), "{said}");
    let state = format!("--state={}", place.text("state"));
    let cache = place.text("cache.img");
    let listed = support::forebay(&["salvage", "--list", &state, &cache]);
    let said = String::from_utf8_lossy(&listed.stderr);
    assert!(said.contains("older copy"), "{said}");
    let to = format!("--to={}", place.text("back"));
    let saved = support::forebay(&["salvage", "--volume=back", &to, &state, &cache]);
    let said = String::from_utf8_lossy(&saved.stderr);
    assert!(said.contains("older copy") && said.contains("Nothing was written"), "{said}");

    fs::copy(place.path("newer"), place.path("cache.img")).expect("it can be put back");
    let server = place.start(&serve(&place, &[]));
    check(&place, "back", &noise(2, MIB as usize));
    // What is written later does not lead back to the copy.
    server.kill();
    fs::copy(place.path("older"), place.path("cache.img")).expect("it can be put back");
    let said = place.refuse(&serve(&place, &[]));
    assert!(said.contains("older copy"), "{said}");
}

/// The numbers of the records that are gone are used again: what was known of them must not count,
/// nor be recorded once more by the next stop.
#[test]
fn a_cut_off_end_that_was_accepted_is_forgotten() {
    for ends_by_kill in [true, false] {
        let (place, server) = copied();
        (10..20).for_each(|seed| write(&place, "through", seed));
        server.stop(&[]);
        fs::copy(place.path("older"), place.path("cache.img")).expect("it can be put back");
        place.refuse(&serve(&place, &[]));
        let server = place.start(&serve(&place, &["--accept-data-loss"]));
        check(&place, "back", &noise(1, MIB as usize));
        server.ask(&["set", "through", "mode=write-back"]);
        write(&place, "through", 4);
        assert_eq!(dirty(&server, "through"), 256);
        if ends_by_kill {
            server.kill()
        } else {
            server.stop(&[])
        }
        let server = place.start(&serve(&place, &[]));
        assert_eq!(dirty(&server, "through"), 256);
        check(&place, "through", &noise(4, MIB as usize));
        server.stop(&["--drain"]);
    }
}
