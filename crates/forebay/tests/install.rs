//! The first minutes of an operator: `setup` by flags, `doctor`, who may change what, and whether
//! the programs may be removed. `tools/tour` does the same with a package and systemd.

mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use support::{Place, client, forebay};
use tools::{have, succeeds};

/// An exclusive open of a block device.
const O_EXCL: i32 = 0o200;

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs `forebay setup` without a terminal, with the configuration and the units in the place.
fn setup(place: &Place, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.arg("setup").arg(format!("--config={}", place.text("etc/forebay.toml")));
    command.arg(format!("--units={}", place.text("units"))).arg("--no-start").args(more);
    command.stdin(Stdio::null()).output().expect("the binary runs")
}

/// Setup writes to `/etc` and starts services, so it wants to be root.
fn is_root(place: &Place) -> bool {
    let root = fs::metadata(place.path("")).expect("it is there").uid() == 0;
    if !root {
        assert!(said(&setup(place, &["--yes"])).contains("run it as root"));
    }
    root
}

#[test]
fn setup_by_flags_writes_what_serve_takes() {
    let place = Place::new();
    place.make("disk.img", 64 << 20);
    if !is_root(&place) {
        return;
    }
    let primary = format!("--primary={}", place.text("disk.img"));
    let cache = format!("--cache={},size=64MiB", place.text("cache.img"));
    let usual = [primary.as_str(), &cache, "--ram=16MiB", "--write-cache-depth=5s"];
    // Without --yes nobody has agreed, and nothing is written.
    let output = setup(&place, &usual);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("add --yes"), "{}", said(&output));
    assert!(!place.path("etc").exists() && !place.path("units").exists());

    let output = setup(&place, &[&usual[..], &["--yes"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(shown.contains("volume disk: ") && shown.contains("start it with:"), "{shown}");
    // The service does not read this configuration, so its units stay as they are.
    assert!(!place.path("units").exists() && !shown.contains("settings of a unit"), "{shown}");
    let written = fs::read_to_string(place.path("etc/forebay.toml")).expect("it is written");
    assert!(written.contains("write_cache_depth = \"5s\""), "{written}");

    // Another setup replaces nothing, unless it may; then it keeps a copy.
    let output = setup(&place, &[&usual[..], &["--yes", "--name=other"]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("--replace"), "{}", said(&output));
    let output = setup(&place, &[&usual[..], &["--yes", "--name=other", "--replace"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let copy = fs::read_to_string(place.path("etc/forebay.toml.before-1"));
    assert_eq!(copy.expect("it is kept"), written);
}

#[test]
fn setup_destroys_nothing_that_is_not_named() {
    let place = Place::new();
    place.make("disk.img", 64 << 20);
    place.make("ssd.img", 64 << 20);
    if !is_root(&place) {
        return;
    }
    client("mkfs.ext4", &["-q", "-F", &place.text("ssd.img")]);
    let before = fs::read(place.path("ssd.img")).expect("it is there");
    let primary = format!("--primary={}", place.text("disk.img"));
    let cache = format!("--cache={}", place.text("ssd.img"));
    let other = format!("--overwrite={}", place.text("disk.img"));
    for more in [&[][..], &[other.as_str()]] {
        let output = setup(&place, &[&[primary.as_str(), &cache, "--yes"], more].concat());
        assert_eq!(output.status.code(), Some(1));
        let said = said(&output);
        assert!(said.contains("holds an ext2, ext3 or ext4 file system"), "{said}");
        assert!(said.contains("--overwrite"), "{said}");
    }
    assert!(fs::read(place.path("ssd.img")).expect("it is there") == before, "nothing has changed");
    // The arguments the other way around would make a cache of the volume.
    let swapped = [format!("--primary={}", place.text("ssd.img")), cache.clone()];
    let output = setup(&place, &[&swapped[0], &swapped[1], "--yes"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));

    let named = format!("--overwrite={}", place.text("ssd.img"));
    let output = setup(&place, &[&primary, &cache, "--yes", &named]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let blank = fs::read(place.path("ssd.img")).expect("it is there");
    assert!(blank[..128 << 10].iter().all(|&byte| byte == 0), "serve will take it");
}

/// Regression: the ends of a disk were overwritten, and with them its partition table, while one of
/// its partitions was in use. Here a process of the test uses the partition, which no list shows.
#[test]
fn setup_overwrites_no_disk_with_a_partition_in_use() {
    let place = Place::new();
    place.make("primary", 64 << 20);
    place.make("ssd.img", 64 << 20);
    if !is_root(&place) || !Path::new("/dev/loop-control").exists() || !have(&["addpart"]) {
        return;
    }
    client("mkfs.ext4", &["-q", "-F", &place.text("ssd.img")]);
    let disk = client("losetup", &["--find", "--show", "--partscan", &place.text("ssd.img")]);
    let disk = Loop(disk.trim().to_owned());
    client("addpart", &[&disk.0, "1", "2048", "65536"]);
    let exclusive = OpenOptions::new().read(true).custom_flags(O_EXCL).open(disk.0.clone() + "p1");
    let exclusive = exclusive.expect("it is a partition");
    let before = fs::read(&disk.0).expect("it is read");
    let flags = ["primary", "cache", "overwrite"].map(|flag| match flag {
        "primary" => format!("--primary={}", place.text("primary")),
        flag => format!("--{flag}={}", disk.0),
    });
    let output = setup(&place, &[&flags[0], &flags[1], &flags[2], "--yes"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("a partition of it is in use"), "{}", said(&output));
    assert!(fs::read(&disk.0).expect("it is read") == before, "nothing has changed");
    assert!(!place.path("etc").exists());
    drop(exclusive);
    let output = setup(&place, &[&flags[0], &flags[1], &flags[2], "--yes"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
}

/// A loop device, removed at the end.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        succeeds("losetup", &["--detach", &self.0]);
    }
}

#[test]
fn setup_without_a_terminal_names_what_is_missing() {
    let place = Place::new();
    if !is_root(&place) {
        return;
    }
    place.make("disk.img", 64 << 20);
    let blank = format!("--primary={}", place.text("disk.img"));
    let cases: [(&[&str], i32, &str); 5] = [
        (&["--yes"], 2, "give --primary and --cache"),
        (&["--yes", "--cache=/no/such"], 2, "give --primary"),
        (&["--yes", "--primary=/no/such", "--cache=x,size=1GiB"], 1, "/no/such"),
        (&["--yes", "--primary=nbd://h/x", "--cache=/dev/no-such"], 1, "there is no such device"),
        (&["--yes", &blank, "--cache=c,size=1GiB", "--mount=/x"], 1, "holds nothing"),
    ];
    for (arguments, code, what) in cases {
        let output = setup(&place, arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", said(&output));
        assert!(said(&output).contains(what), "{arguments:?}: {}", said(&output));
    }
    assert!(!place.path("etc").exists());
}

#[test]
fn the_doctor_finds_what_is_wrong_and_says_so_by_its_exit_code() {
    let place = Place::new();
    let config = place.path("bad.toml");
    fs::write(&config, "[cache]\npath = \"c\"\nsise = 1\n").expect("it can be written");
    let nowhere = format!("--control={}", place.text("none.sock"));
    let config = format!("--config={}", config.display());
    let output = forebay(&["doctor", &config, "--json", &nowhere]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    assert_eq!(told["wrong"], true);
    let finding = &told["findings"][0];
    assert_eq!(
        (&finding["check"], &finding["severity"]),
        (&"configuration".into(), &"wrong".into())
    );
    assert!(finding["what"].as_str().is_some_and(|what| what.contains("line 3")), "{finding}");
    let output = forebay(&["doctor", &config, &nowhere]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("wrong   configuration: ") && text.contains("no server runs"), "{text}");
}

#[test]
fn who_may_connect_may_read_and_only_the_owner_may_change() {
    let (place, mut arguments) = Place::with_disk();
    if fs::metadata(place.path("")).expect("it is there").uid() != 0 {
        return; // only root can be somebody else
    }
    for open in [place.path(""), place.path("control.sock").parent().expect("one").to_owned()] {
        fs::set_permissions(open, fs::Permissions::from_mode(0o755)).expect("it is ours");
    }
    arguments.retain(|argument| !argument.starts_with("--control="));
    let socket = place.text("control.sock");
    let as_nobody = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "curl", "--silent"]);
        command.args(["--unix-socket", &socket]).args(words).output().expect("setpriv runs")
    };
    for (changes, may) in [("owner", false), ("anyone", true)] {
        let text = format!(
            "[cache]\npath = \"{}\"\nsize = \"32MiB\"\nstate_dir = \"{}\"\n\
             [memory]\nram = \"4MiB\"\n[control]\nsocket = \"{socket}\"\nmode = \"0666\"\n\
             changes = \"{changes}\"\n[server]\nnbd = [\"unix:{}\"]\n\
             [[volume]]\nname = \"disk\"\nprimary = \"{}\"\n",
            place.text("cache.img"),
            place.text("state"),
            place.text("nbd.sock"),
            place.text("disk.img"),
        );
        fs::write(place.path("forebay.toml"), text).expect("it can be written");
        let config = format!("--config={}", place.text("forebay.toml"));
        let server = place.start(&["serve".to_owned(), config]);
        let status = as_nobody(&["http://forebay/v1/status"]);
        assert!(String::from_utf8_lossy(&status.stdout).contains("\"serving\""), "{status:?}");
        let drain = as_nobody(&["-X", "POST", "http://forebay/v1/drain"]);
        let answer = String::from_utf8_lossy(&drain.stdout).into_owned();
        let refused = answer.contains("user 65534 may read the status");
        assert_eq!(refused, !may, "{changes}: {answer}");
        server.stop(&[]);
    }
}

#[test]
fn programs_may_be_removed_when_every_primary_is_complete() {
    let (place, arguments) = Place::with_disk();
    let ask = || {
        let control = format!("--control={}", place.text("control.sock"));
        let state = format!("--state={}", place.text("state"));
        let config = format!("--config={}", place.text("none.toml"));
        let output = forebay(&["may-remove", &control, &state, &config]);
        (output.status.code(), said(&output))
    };
    assert_eq!(ask().0, Some(0), "nothing was ever served");
    let server = place.start(&arguments);
    let (code, why) = ask();
    assert_eq!(code, Some(1));
    assert!(why.contains("a server serves disk; first: forebay stop --drain"), "{why}");
    client("qemu-io", &["-f", "raw", "-c", "write -P 7 0 64k", "-c", "flush", &place.uri()]);
    server.kill();
    let (code, why) = ask();
    assert_eq!(code, Some(1));
    assert!(why.contains("holds data that is not on its primaries"), "{why}");
    place.start(&arguments).stop(&["--drain"]);
    assert_eq!(ask(), (Some(0), String::new()));
    // A damaged record says nothing.
    let state = fs::read_dir(place.path("state")).expect("it is there").flatten();
    let mut files = state.map(|file| file.path());
    let is_witness = |path: &PathBuf| path.extension() == Some("witness".as_ref());
    let witness = files.find(is_witness).expect("there is one");
    fs::write(&witness, "rubbish").expect("it is ours");
    let (code, why) = ask();
    let name = witness.file_name().expect("it has one").to_string_lossy().into_owned();
    assert_eq!(code, Some(1), "{why}");
    assert!(why.contains(&name) && why.contains("it is unknown whether the cache holds"), "{why}");
}

/// Regression: only the usual socket and state directory were examined.
#[test]
fn the_configuration_names_the_server_and_the_state_that_hinder_a_removal() {
    let (place, arguments) = Place::with_disk();
    let config = place.text("forebay.toml");
    let text = format!(
        "[cache]\npath = {:?}\nstate_dir = {:?}\n[control]\nsocket = {:?}\n\
         [server]\nnbd = [\"unix:{}\"]\n[[volume]]\nname = \"disk\"\nprimary = {:?}\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("control.sock"),
        place.text("nbd.sock"),
        place.text("disk.img"),
    );
    fs::write(&config, &text).expect("it can be written");
    let flags = [
        format!("--config={config}"),
        format!("--control={}", place.text("none.sock")),
        format!("--state={}", place.text("none")),
    ];
    let ask = || {
        let output = forebay(&["may-remove", &flags[0], &flags[1], &flags[2]]);
        (output.status.code(), said(&output))
    };
    assert_eq!(ask().0, Some(0), "nothing was ever served");
    let server = place.start(&arguments);
    let (code, why) = ask();
    assert_eq!(code, Some(1));
    let stop = format!("forebay stop --drain --control {}", place.text("control.sock"));
    assert!(why.contains("a server serves disk") && why.contains(&stop), "{why}");
    client("qemu-io", &["-f", "raw", "-c", "write -P 7 0 64k", "-c", "flush", &place.uri()]);
    server.kill();
    let (code, why) = ask();
    assert_eq!(code, Some(1));
    assert!(why.contains("holds data that is not on its primaries"), "{why}");
    place.start(&arguments).stop(&["--drain"]);
    assert_eq!(ask(), (Some(0), String::new()));
    fs::write(&config, text + "nonsense\n").expect("it can be written");
    let (code, why) = ask();
    assert_eq!(code, Some(1));
    assert!(why.contains("it is unknown where the state of the cache is"), "{why}");
}
