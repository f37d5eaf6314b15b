//! A server that follows another one, in a restart, an upgrade or an apply, meets primaries that
//! have changed in size or in place meanwhile. Clients of the server before go on.

#[path = "support/disk.rs"]
mod disk;
#[path = "support/nbdkit.rs"]
mod nbdkit;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use disk::{Cleanup, can_mount, open};
use nbdkit::Nbdkit;
use support::nbd::Nbd;
use support::{Place, Server, forebay, noise, until};

const MIB: u64 = 1 << 20;

/// Writes a configuration with these volumes and primaries; returns the arguments of its server.
fn configure(place: &Place, volumes: &[(&str, String)], more: &str) -> Vec<String> {
    let (cache, state) = (place.text("cache.img"), place.text("state"));
    let (control, nbd) = (place.text("control.sock"), place.text("nbd.sock"));
    let mut text = format!(
        "[cache]\npath = {cache:?}\nsize = \"64MiB\"\nstate_dir = {state:?}\n\
         write_cache_depth = \"1h\"\n[control]\nsocket = {control:?}\n\
         [server]\nnbd = [\"unix:{nbd}\"]\n{more}\n"
    );
    for (name, primary) in volumes {
        text += &format!("[[volume]]\nname = {name:?}\nprimary = {primary:?}\n");
    }
    let file = place.text("forebay.toml");
    fs::write(&file, text).expect("it can be written");
    vec!["serve".to_owned(), format!("--config={file}")]
}

fn connect(place: &Place, volume: &str) -> Nbd {
    Nbd::connect(&place.path("nbd.sock"), volume).expect("it is served")
}

fn set_size(place: &Place, primary: &str, size: u64) {
    let file = OpenOptions::new().write(true).open(place.path(primary)).expect("it is there");
    file.set_len(size).expect("it takes that size");
}

fn size(server: &Server, volume: &str) -> u64 {
    let volumes = server.status()["volumes"].clone();
    let of = |one: &&serde_json::Value| one["name"] == volume;
    volumes.as_array().expect("a list").iter().find(of).expect("it is served")["size"]
        .as_u64()
        .expect("a number")
}

fn read(nbd: &mut Nbd, offset: u64, len: usize) -> Vec<u8> {
    let mut found = vec![0; len];
    nbd.read(offset, &mut found).expect("it is read");
    found
}

/// Runs a command that the server must refuse, and go on; returns the error.
fn refused(server: &Server, arguments: &[&str]) -> String {
    let control = server.control_argument();
    let output = forebay(&[arguments, &[control.as_str()]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(server.status()["state"], "serving", "{said}");
    said
}

/// An export of the file `name`, and its URI.
fn export(place: &Place, name: &str) -> (Nbdkit, String) {
    let socket = place.path(&format!("{name}.sock"));
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    (Nbdkit::start(&socket, &["file", &place.text(name)]), uri)
}

/// Before, each restart was refused, since the kernel knows the file with its size; after 30 of
/// them everything was cut off.
#[test]
fn a_primary_that_grew_has_the_size_of_before_until_it_is_applied() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let _cleanup = Cleanup::of(&place, &[]);
    fs::create_dir_all(place.path("volumes")).expect("a directory can be made");
    place.make("a", 16 * MIB);
    let volumes = [("a", place.text("a"))];
    let fuse = format!("fuse = {:?}", place.text("volumes"));
    let server = place.start_kept(&configure(&place, &volumes, &fuse));
    let file = open(&place.path("volumes").join("a"), 0);
    file.write_all_at(&noise(1, 4096), 15 * MIB).expect("it is written");
    file.sync_all().expect("it is flushed");
    set_size(&place, "a", 24 * MIB);
    let program = env!("CARGO_BIN_EXE_forebay");
    for round in 0..2 {
        if round == 0 {
            server.kill_kept();
        } else {
            server.ask(&["upgrade", program]);
        }
        let mut found = vec![0; 4096];
        file.read_exact_at(&mut found, 15 * MIB).expect("the next server reads it");
        assert!(found == noise(1, 4096));
        until("the next one serves", || place.path("control.sock").exists());
        assert_eq!(size(&server, "a"), 16 * MIB);
    }
    let said = server.ask(&["apply", &place.text("forebay.toml")]);
    assert!(said.starts_with("a: grown from 16 MiB to 24 MiB\n"), "{said}");
    file.write_all_at(&noise(2, 4096), 23 * MIB).expect("it is written");
    drop(file);
    server.stop(&["--drain"]);
    let mut found = vec![0; 4096];
    let primary = fs::File::open(place.path("a")).expect("it is there");
    primary.read_exact_at(&mut found, 23 * MIB).expect("it is that large");
    assert!(found == noise(2, 4096));
}

/// Nobody serves when a server starts without one before it, so nobody knows another size.
#[test]
fn a_start_takes_the_size_of_a_primary_that_grew() {
    let place = Place::new();
    place.make("a", 16 * MIB);
    let arguments = configure(&place, &[("a", place.text("a"))], "");
    let server = place.start_kept(&arguments);
    server.stop(&[]);
    set_size(&place, "a", 24 * MIB);
    let server = place.start_kept(&arguments);
    assert_eq!(size(&server, "a"), 24 * MIB);
    server.stop(&[]);
}

#[test]
fn a_primary_that_shrank_does_not_end_the_service() {
    let place = Place::new();
    ["a", "b", "c"].iter().for_each(|name| place.make(name, 16 * MIB));
    let (_remote, uri) = export(&place, "b");
    let volumes = [("a", place.text("a")), ("b", uri)];
    let server = place.start_kept(&configure(&place, &volumes, ""));
    let mut nbd = connect(&place, "a");
    let program = env!("CARGO_BIN_EXE_forebay");
    let config = place.text("forebay.toml");
    let pid = server.status()["pid"].clone();
    let changed = [&volumes[..], &[("c", place.text("c"))]].concat();
    for name in ["a", "b"] {
        set_size(&place, name, 8 * MIB);
        configure(&place, &changed, "");
        for command in [["upgrade", program], ["apply", &config]] {
            let said = refused(&server, &command);
            assert!(said.contains(&format!("volume {name}: ")), "{said}");
            assert!(said.contains("has shrunk from 16 MiB to 8 MiB"), "{said}");
        }
        assert_eq!(server.status()["pid"], pid, "the same server serves");
        set_size(&place, name, 16 * MIB);
    }
    nbd.write(0, &noise(1, 4096), true).expect("it is written");
    server.ask(&["apply", &config]);
    assert!(read(&mut nbd, 0, 4096) == noise(1, 4096));
    server.stop(&[]);
}

/// Before, the record of a volume was found by its name: `a` had the blocks of the primary of `b`.
#[test]
fn an_absent_primary_is_known_by_its_place_and_not_by_its_volume() {
    for remote in [true, false] {
        let place = Place::new();
        ["a.img", "b.img", "c.img"].iter().for_each(|name| place.make(name, 16 * MIB));
        let exports = ["a.img", "b.img"].map(|name| remote.then(|| export(&place, name)));
        let at = |number: usize, name: &str| match &exports[number] {
            Some((_, uri)) => uri.clone(),
            None => place.text(name),
        };
        let (a, b, c) = (at(0, "a.img"), at(1, "b.img"), place.text("c.img"));
        let third = ("c", c.clone());
        let volumes = [("a", a.clone()), ("b", b.clone()), third.clone()];
        let server = place.start_kept(&configure(&place, &volumes, ""));
        for (name, seed) in [("a", 1), ("b", 2)] {
            connect(&place, name).write(0, &noise(seed, 4096), true).expect("it is written");
        }
        server.stop(&[]);
        drop(exports);
        if !remote {
            for name in ["a.img", "b.img"] {
                fs::rename(place.path(name), place.path(&format!("{name}.gone")))
                    .expect("it is ours");
            }
        }
        // Their names are exchanged while both are away.
        let volumes = [("b", a.clone()), ("a", b.clone()), third.clone()];
        let server = place.start_kept(&configure(&place, &volumes, ""));
        for (name, seed) in [("b", 1), ("a", 2)] {
            assert!(read(&mut connect(&place, name), 0, 4096) == noise(seed, 4096));
        }
        server.stop(&[]);
        // Another one that is away has no blocks.
        let other = match remote {
            true => format!("nbd+unix:///?socket={}", place.text("other.sock")),
            false => place.text("other.img"),
        };
        let volumes = [("b", other.clone()), ("a", b), third];
        let said = place.refuse(&configure(&place, &volumes, ""));
        let shown = a.trim_start_matches("nbd+unix://");
        assert!(said.contains(&other) && said.contains(shown), "{said}");
    }
}

#[test]
fn an_address_with_a_mistake_is_not_applied() {
    let place = Place::new();
    ["a.img", "b.img"].iter().for_each(|name| place.make(name, 16 * MIB));
    let (_remote, uri) = export(&place, "a.img");
    let volumes = [("a", uri.clone()), ("b", place.text("b.img"))];
    let server = place.start_kept(&configure(&place, &volumes, ""));
    let mut nbd = connect(&place, "a");
    nbd.write(0, &noise(1, 4096), true).expect("it is written");
    let config = place.text("forebay.toml");
    let wrong = uri.replace("a.img.sock", "nothing.sock");
    configure(&place, &[("a", wrong.clone()), volumes[1].clone()], "");
    let said = refused(&server, &["apply", &config]);
    assert!(said.contains("volume a") && said.contains("nothing.sock"), "{said}");
    configure(&place, &[volumes[0].clone(), volumes[1].clone(), ("c", wrong)], "");
    let said = refused(&server, &["apply", &config]);
    assert!(said.contains("volume c") && said.contains("nothing.sock"), "{said}");
    assert!(read(&mut nbd, 0, 4096) == noise(1, 4096));
    server.stop(&["--drain"]);
}

/// Before, an apply waited for the primary that it was to take out.
#[test]
fn a_volume_whose_primary_is_away_can_be_taken_out() {
    let place = Place::new();
    ["a.img", "b.img"].iter().for_each(|name| place.make(name, 16 * MIB));
    let (remote, uri) = export(&place, "a.img");
    let volumes = [("a", uri), ("b", place.text("b.img"))];
    let server = place.start_kept(&configure(&place, &volumes, ""));
    drop(remote);
    let mut nbd = connect(&place, "a");
    // It is not cached, and so waits for the primary.
    nbd.begin_read(8 * MIB, 4096).expect("it is sent");
    let health = || server.status()["volumes"][0]["primary_health"]["state"].clone();
    until("it is away", || health() == "away");
    configure(&place, &volumes[1..], "");
    let said = server.ask(&["apply", &place.text("forebay.toml")]);
    assert!(said.starts_with("a: removed\n"), "{said}");
    connect(&place, "b").write(0, &noise(1, 4096), true).expect("it is written");
    server.stop(&["--drain"]);
}

/// Before, three seconds had to do for all that a primary had left to take and to flush.
#[test]
fn a_volume_whose_primary_is_slow_can_be_taken_out_under_load() {
    let place = Place::new();
    ["a.img", "b.img"].iter().for_each(|name| place.make(name, 16 * MIB));
    let slow = format!("{}?delay=1700ms", place.text("a.img"));
    let volumes = [("a", slow), ("b", place.text("b.img"))];
    let server = place.start_kept(&configure(&place, &volumes, ""));
    connect(&place, "a").write(0, &noise(1, MIB as usize), true).expect("it is written");
    let mut b = connect(&place, "b");
    b.write(0, &noise(2, 4096), true).expect("it is written");
    configure(&place, &volumes[1..], "");
    let said = server.ask(&["apply", &place.text("forebay.toml")]);
    assert!(said.starts_with("a: removed\n"), "{said}");
    assert!(read(&mut b, 0, 4096) == noise(2, 4096), "its client has only waited");
    let primary = fs::read(place.path("a.img")).expect("it is there");
    assert!(primary[..1 << 20] == noise(1, MIB as usize));
    server.stop(&[]);
}
