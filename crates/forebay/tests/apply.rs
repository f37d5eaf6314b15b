//! `forebay apply` and `forebay config`: a configuration file is brought into force as a whole or
//! not at all, stays in force, and what is in force is shown with its origin.

mod support;

use std::fs;
use std::process::Command;

use serde_json::Value;
use support::nbd::Nbd;
use support::{Place, Server, forebay, noise, until};

const MIB: u64 = 1 << 20;

/// A place with two primaries.
fn two() -> Place {
    let place = Place::new();
    place.make("a.img", 16 * MIB);
    place.make("b.img", 16 * MIB);
    place
}

/// Writes a configuration of the volumes `a` and `b`, with these lines more; returns its path.
fn write(place: &Place, cache: &str, a: &str, b: &str) -> String {
    let text = format!(
        "[cache]\npath = {:?}\nsize = \"32MiB\"\nstate_dir = {:?}\n{cache}\n\
         [memory]\nram = \"4MiB\"\n[server]\nnbd = [\"unix:{}\"]\nshards = 2\n\
         [control]\nsocket = {:?}\n\
         [[volume]]\nname = \"a\"\nprimary = {:?}\n{a}\n\
         [[volume]]\nname = \"b\"\nprimary = {:?}\n{b}\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("nbd.sock"),
        place.text("control.sock"),
        place.text("a.img"),
        place.text("b.img"),
    );
    fs::write(place.path("forebay.toml"), text).expect("it can be written");
    place.text("forebay.toml")
}

fn start(place: &Place) -> Server {
    place.start(&["serve".to_owned(), format!("--config={}", place.text("forebay.toml"))])
}

/// The error of `forebay apply`, and its exit code.
fn refused(server: &Server, file: &str) -> (Option<i32>, String) {
    let output = forebay(&["apply", file, &server.control_argument()]);
    assert!(output.stdout.is_empty(), "{output:?}");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_file_is_applied_as_a_whole_and_stays_in_force() {
    let place = two();
    write(&place, "dirty_limit = \"30%\"", "", "dirty_limit = \"20%\"");
    let server = start(&place);
    let mut client = Nbd::connect(&place.path("nbd.sock"), "a").expect("it serves");
    client.write(MIB, &noise(1, MIB as usize), true).expect("it is written");
    let file = place.text("forebay.toml");
    assert_eq!(server.ask(&["apply", &file]), "nothing differs\n");
    server.ask(&["set", "eviction=lru"]);

    // The file wins over `set`; a value that it does not have is taken away.
    write(&place, "dirty_limit = \"40%\"", "mode = \"write-through\"", "");
    let lines = "eviction: lru -> frequency\n\
                 dirty_limit: 30% -> 40%\n\
                 a: mode: write-back -> write-through\n\
                 b: dirty_limit: 20% -> none\n";
    assert_eq!(server.ask(&["apply", &file, "--dry-run"]), lines);
    assert_eq!(server.shown(None, "dirty_limit"), ("30%".into(), "configuration".into()));
    assert_eq!(server.ask(&["apply", &file]), lines);
    let changed = |server: &Server, from: &str| {
        assert_eq!(server.shown(None, "dirty_limit"), ("40%".into(), from.into()));
        assert_eq!(server.shown(Some("a"), "mode"), ("write-through".into(), from.into()));
        assert_eq!(server.shown(None, "eviction"), ("frequency".into(), "default".into()));
        let own = server.ask(&["config", "b"]);
        assert!(!own.contains("dirty_limit") && own.contains("[volume b]"), "{own}");
    };
    changed(&server, "configuration");
    assert_eq!(server.ask(&["apply", &file]), "nothing differs\n");

    // In write-through every byte is on the primary when the write is done.
    client.write(2 * MIB, &noise(2, MIB as usize), true).expect("it is written");
    let on_primary = fs::read(place.path("a.img")).expect("it is there");
    assert!(on_primary[2 << 20..3 << 20] == noise(2, MIB as usize));

    server.kill();
    let server = start(&place);
    changed(&server, "configuration");
    server.stop(&[]);
}

/// Regression: what was set after an apply was lost at the next start, by the operator or by the
/// keeper: it was kept as a change of the file of the start.
#[test]
fn what_is_set_after_an_apply_stays_in_force() {
    let place = two();
    let limit = |percent: u32| format!("dirty_limit = \"{percent}%\"");
    let file = write(&place, &limit(30), "", "");
    let begin = || place.start_kept(&["serve".to_owned(), format!("--config={file}")]);
    let mut server = begin();
    let in_force = |server: &Server| server.shown(None, "dirty_limit");
    let die = |server: &Server| {
        let pid = server.status()["pid"].clone();
        let killed = Command::new("kill").args(["-s", "KILL", &pid.to_string()]).status();
        assert!(killed.expect("it runs").success());
        until("another one serves", || {
            let output = forebay(&["status", "--json", &server.control_argument()]);
            let status = serde_json::from_slice::<Value>(&output.stdout);
            status.is_ok_and(|status| status["pid"] != pid)
        });
    };
    // The value of the start, and another one.
    for (round, value) in [(40, "30%"), (45, "35%")] {
        write(&place, &limit(round), "", "");
        server.ask(&["apply", &file]);
        assert_eq!(in_force(&server), (format!("{round}%"), "configuration".into()));
        server.ask(&["set", &format!("dirty_limit={value}")]);
        die(&server);
        assert_eq!(in_force(&server), (value.into(), "set".into()));
        server.stop(&[]);
        server = begin();
        assert_eq!(in_force(&server), (value.into(), "set".into()));
        // The same file once more, which ends that.
        server.ask(&["apply", &file]);
        die(&server);
        assert_eq!(in_force(&server), (format!("{round}%"), "configuration".into()));
    }
    server.stop(&[]);
}

#[test]
fn a_hangup_applies_the_file_of_the_start() {
    let place = two();
    write(&place, "", "", "");
    let server = start(&place);
    write(&place, "dirty_limit = \"40%\"", "", "");
    server.signal("HUP");
    server.log("forebay.toml is in force");
    assert_eq!(server.shown(None, "dirty_limit"), ("40%".into(), "configuration".into()));
    write(&place, "dirty_limit = \"45%\"\nlog_share = \"20%\"", "", "");
    server.signal("HUP");
    let log = server.log("is not applied");
    assert!(log.contains("the server has no keeper"), "{log}");
    write(&place, "dirty_limit = \"450%\"", "", "");
    server.signal("HUP");
    server.log("SIGHUP: nothing was changed");
    assert_eq!(server.shown(None, "dirty_limit"), ("40%".into(), "configuration".into()));
    server.stop(&[]);
}

/// What was set to nothing stays so while the configuration of the start is the same.
#[test]
fn a_value_that_was_taken_away_stays_away() {
    let place = two();
    let file = write(&place, "", "", "");
    let other = place.text("other.toml");
    fs::rename(&file, &other).expect("it is ours");
    write(&place, "", "", "dirty_limit = \"20%\"");
    let server = start(&place);
    assert_eq!(server.ask(&["apply", &other]), "b: dirty_limit: 20% -> none\n");
    server.kill();
    let server = start(&place);
    let own = server.ask(&["config", "b"]);
    assert!(!own.contains("dirty_limit"), "{own}");
    server.ask(&["set", "b", "dirty_limit=default"]);
    assert_eq!(server.shown(Some("b"), "dirty_limit"), ("20%".into(), "configuration".into()));
    server.stop(&[]);
}

/// The start chooses what the file leaves open: that is no difference.
#[test]
fn a_file_that_leaves_things_open_does_not_differ() {
    let place = two();
    let file = write(&place, "", "", "");
    let text = fs::read_to_string(&file).expect("it is there");
    let open = text.replace("shards = 2\n", "").replace("ram = \"4MiB\"\n", "");
    fs::write(&file, open).expect("it can be written");
    let server = start(&place);
    assert_eq!(server.ask(&["apply", &file]), "nothing differs\n");
    server.stop(&[]);
}

#[test]
fn a_file_that_cannot_be_applied_changes_nothing() {
    let place = two();
    write(&place, "", "", "");
    let server = start(&place);
    let file = place.text("forebay.toml");
    let before = server.ask(&["config"]);
    let cases = [
        // A mistake, by line.
        ("dirty_limit = \"95%\"", "", "", 2, "line 5: cache.dirty_limit: 95% is out of range"),
        // Settings that take a hand-over, beside one that does not.
        ("log_share = \"20%\"\ndirty_limit = \"30%\"", "", "", 1, "the server has no keeper"),
        ("", "read_only = true", "", 1, "the server has no keeper"),
        // Shares that contradict each other.
        ("", "dirty_guarantee = \"60%\"", "dirty_guarantee = \"50%\"", 2, "together are 110%"),
    ];
    for (cache, a, b, code, expected) in cases {
        write(&place, cache, a, b);
        let (found, said) = refused(&server, &file);
        assert!(found == Some(code) && said.contains(expected), "{found:?} {said}");
        assert_eq!(server.ask(&["config"]), before);
    }
    // Other volumes than those served.
    write(&place, "", "", "");
    let text = fs::read_to_string(&file).expect("it is there");
    fs::write(&file, text.replace("\"b\"", "\"c\"")).expect("it can be written");
    let (code, said) = refused(&server, &file);
    assert!(code == Some(1) && said.contains("the server has no keeper"), "{said}");
    // A place that the next server could not find what this one has left.
    fs::write(&file, text.replace("/state\"", "/other\"")).expect("it can be written");
    let (code, said) = refused(&server, &file);
    assert!(code == Some(1) && said.contains("cache.state_dir cannot be changed"), "{said}");
    assert_eq!(server.ask(&["config"]), before);
    server.stop(&[]);
}
