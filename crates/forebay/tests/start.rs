//! The traces of starts and refused starts: the state directory, settings changed while serving,
//! and new files.

mod support;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use support::{Place, Server};

/// The mode of the volume and the eviction policy, each with its configured value if it was changed
/// with `set`.
fn in_force(server: &Server) -> [(String, Option<String>); 2] {
    let status = server.status();
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    let found = |name: &str| {
        let all = status["settings"].as_array().expect("a list");
        let one = all.iter().find(|one| one["name"] == name).expect("it is listed");
        (text(&one["value"]).expect("a text"), text(&one["configured"]))
    };
    let found = [found("mode"), found("eviction")];
    assert_eq!(status["volumes"][0]["mode"].as_str(), Some(found[0].0.as_str()));
    assert_eq!(status["cache"]["eviction"].as_str(), Some(found[1].0.as_str()));
    found
}

fn expected(
    mode: (&str, Option<&str>),
    eviction: (&str, Option<&str>),
) -> [(String, Option<String>); 2] {
    [mode, eviction].map(|(now, configured)| (now.to_owned(), configured.map(str::to_owned)))
}

fn stop(server: Server) {
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
}

/// The only file in the state directory whose name has this ending.
fn state_file(place: &Place, end: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(place.path("state")).expect("it is there");
    let mut paths = entries.map(|entry| entry.expect("it can be listed").path());
    paths.find(|path| path.to_string_lossy().ends_with(end))
}

/// Regression: `set` was forgotten at every restart, so a crash silently ended the protection of
/// write-through.
#[test]
fn what_was_set_outlasts_a_kill_and_a_stop_until_the_configuration_changes() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    assert_eq!(in_force(&server), expected(("write-back", None), ("frequency", None)));
    server.ask(&["set", "disk", "mode=write-through", "eviction=lru"]);
    let set = expected(("write-through", Some("write-back")), ("lru", Some("frequency")));
    assert_eq!(in_force(&server), set);
    server.kill();
    let server = place.start(&arguments);
    assert_eq!(in_force(&server), set, "after a kill");
    let said = server.ask(&["status"]);
    assert!(said.contains("mode=write-through (set; configured write-back)"), "{said}");
    stop(server);
    let server = place.start(&arguments);
    assert_eq!(in_force(&server), set, "after a stop");
    server.ask(&["set", "disk", "eviction=default"]);
    server.kill();

    // A changed configuration wins.
    let changed: Vec<String> = [&arguments[..], &["--mode=write-around".to_owned()]].concat();
    let server = place.start(&changed);
    assert_eq!(in_force(&server), expected(("write-around", None), ("frequency", None)));
    server.kill();
    let server = place.start(&arguments);
    assert_eq!(in_force(&server), expected(("write-back", None), ("frequency", None)));
    assert_eq!(state_file(&place, ".settings"), None, "nothing is kept any more");
    stop(server);
}

#[test]
fn the_configured_mode_comes_back_with_default() {
    let (place, mut arguments) = Place::with_disk();
    arguments.push("--mode=write-through".to_owned());
    let server = place.start(&arguments);
    server.ask(&["set", "disk", "mode=pass-through"]);
    let said = server.ask(&["set", "disk", "mode=default"]);
    assert_eq!(said, "disk: mode=write-through\n");
    server.kill();
    let server = place.start(&arguments);
    assert_eq!(in_force(&server), expected(("write-through", None), ("frequency", None)));
    stop(server);
}

#[test]
fn settings_that_are_damaged_are_refused_and_not_forgotten() {
    let (place, arguments) = Place::with_disk();
    let server = place.start(&arguments);
    server.ask(&["set", "disk", "mode=write-through"]);
    server.kill();
    let path = state_file(&place, ".settings").expect("it is kept");
    let whole = fs::read_to_string(&path).expect("it can be read");
    let edited = whole.replacen("write-through", "write-around", 1);
    fs::write(&path, edited).expect("it can be written");
    let said = place.refuse(&arguments);
    assert!(said.contains("damaged") && said.contains("remove it"), "{said}");
    fs::write(&path, whole).expect("it can be written");
    let server = place.start(&arguments);
    assert_eq!(in_force(&server)[0].0, "write-through");
    stop(server);
}

#[test]
fn a_state_directory_that_others_may_write_is_refused() {
    let (place, arguments) = Place::with_disk();
    place.start(&arguments).kill();
    let state = place.path("state");
    fs::set_permissions(&state, fs::Permissions::from_mode(0o777)).expect("it is ours");
    let said = place.refuse(&arguments);
    assert!(said.contains("chmod go-w"), "{said}");
    fs::set_permissions(&state, fs::Permissions::from_mode(0o700)).expect("it is ours");
    fs::rename(&state, place.path("moved")).expect("it is ours");
    symlink(place.path("moved"), &state).expect("a link can be made");
    let said = place.refuse(&arguments);
    assert!(said.contains("symbolic link"), "{said}");
    fs::remove_file(&state).expect("it is ours");
    fs::rename(place.path("moved"), &state).expect("it is ours");

    // A link in place of the witness is not followed: its target stays unchanged.
    let witness = state_file(&place, ".witness").expect("a start has a witness");
    let precious = place.path("precious");
    fs::write(&precious, "precious").expect("it can be written");
    let aside = format!("{}.new", witness.display());
    symlink(&precious, &aside).expect("a link can be made");
    stop(place.start(&arguments));
    assert_eq!(fs::read_to_string(&precious).expect("it is there"), "precious");
}

/// Regression: a cache file of the wrong size stayed behind, and made the next start fail.
#[test]
fn a_refused_start_leaves_no_file_behind() {
    let (place, arguments) = Place::with_disk();
    let refused = place.serve("disk.img", "cache.img,size=1MiB");
    let said = place.refuse(&refused);
    assert!(said.contains("need at least"), "{said}");
    for name in ["cache.img", "state", "nbd.sock", "control.sock"] {
        assert!(!place.path(name).exists(), "{name} is left");
    }
    place.start(&arguments).kill();
    let said = place.refuse(&place.serve("disk.img", "cache.img,size=64MiB"));
    assert!(said.contains("leave the size out"), "{said}");
    assert!(place.path("cache.img").exists(), "one that was there stays");
    stop(place.start(&arguments));
}

/// The message asked for a size, which was given.
#[test]
fn a_cache_below_a_directory_that_is_missing_is_told_from_one_without_a_size() {
    let (place, mut arguments) = Place::with_disk();
    arguments[2] = format!("--cache={},size=32MiB", place.text("missing/cache.img"));
    let said = place.refuse(&arguments);
    assert!(said.contains("/missing does not exist; create it"), "{said}");
    arguments[2] = format!("--cache={}", place.text("cache.img"));
    let said = place.refuse(&arguments);
    assert!(said.contains("it does not exist; to create a file, give it a size"), "{said}");
}
