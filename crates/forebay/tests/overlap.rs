//! Devices with bytes in common under different names are refused: they would overwrite each other.

#[path = "support/disk.rs"]
mod disk;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use disk::can_attach;
use support::{Place, client, forebay, noise};

const MIB: u64 = 1 << 20;

/// A loop device, removed when dropped.
struct Loop(String);

impl Loop {
    fn over(place: &Place, file: &str, more: &[&str]) -> Self {
        let path = place.text(file);
        let made = client("losetup", &[&["--find", "--show"], more, &[&path]].concat());
        Self(made.trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// Writes the configuration of a cache and of volumes with these primaries; returns its path.
fn write(place: &Place, cache: &str, primaries: &[&str]) -> String {
    let mut text = format!(
        "[cache]\npath = {cache:?}\nstate_dir = {:?}\n[control]\nsocket = {:?}\n\
         [server]\nnbd = [\"unix:{}\"]\nshards = 1\n[memory]\nram = \"4MiB\"\n",
        place.text("state"),
        place.text("control.sock"),
        place.text("nbd.sock"),
    );
    for (number, primary) in primaries.iter().enumerate() {
        text += &format!("[[volume]]\nname = \"v{number}\"\nprimary = {primary:?}\n");
    }
    fs::write(place.path("forebay.toml"), text).expect("it can be written");
    place.text("forebay.toml")
}

/// A place with files of noise.
fn filled(names: &[&str]) -> Place {
    let place = Place::new();
    for (seed, name) in (1..).zip(names) {
        fs::write(place.path(name), noise(seed, 16 << 20)).expect("it is written");
    }
    place
}

fn refused(place: &Place, cache: &str, primaries: &[&str]) {
    let config = write(place, cache, primaries);
    let said = place.refuse(&["serve".to_owned(), format!("--config={config}")]);
    assert!(said.contains("bytes in common"), "{said}");
}

#[test]
fn hard_links_are_one_device() {
    let place = filled(&["a", "b"]);
    fs::hard_link(place.path("a"), place.path("link")).expect("it is linked");
    place.make("cache", 32 * MIB);
    let [a, b, link, cache] = ["a", "b", "link", "cache"].map(|name| place.text(name));
    refused(&place, &link, &[&a]);
    refused(&place, &cache, &[&a, &b, &link]);
    // Setup would overwrite both ends of its cache.
    let words = [
        "setup".to_owned(),
        format!("--config={}", place.text("etc/forebay.toml")),
        format!("--units={}", place.text("units")),
        format!("--primary={a}"),
        format!("--cache={link}"),
        format!("--overwrite={link}"),
        "--yes".to_owned(),
        "--no-start".to_owned(),
    ];
    if fs::metadata(place.path("a")).expect("it is there").uid() != 0 {
        return;
    }
    let output = forebay(&words);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("cannot be both"), "{said}");
    assert!(fs::read(place.path("a")).expect("it is there") == noise(1, 16 << 20));
}

#[test]
fn a_loop_device_is_the_part_of_its_file() {
    if !can_attach() {
        return;
    }
    let place = filled(&["a", "b"]);
    place.make("cache", 32 * MIB);
    let [a, b, cache] = ["a", "b", "cache"].map(|name| place.text(name));
    let (over_cache, over_a) = (Loop::over(&place, "cache", &[]), Loop::over(&place, "a", &[]));
    refused(&place, &cache, &[&over_cache.0]);
    refused(&place, &cache, &[&b, &a, &over_a.0]);
    // Whatever the file is named.
    fs::rename(place.path("a"), place.path("renamed")).expect("it is ours");
    refused(&place, &cache, &[&over_a.0, &place.text("renamed")]);
    fs::rename(place.path("renamed"), place.path("a")).expect("it is ours");
    let twice = Loop::over(&place, "a", &[]);
    refused(&place, &cache, &[&over_a.0, &twice.0]);
    drop((over_cache, over_a, twice));

    // Two parts of a file are different devices.
    let half = (8 * MIB).to_string();
    let first = Loop::over(&place, "a", &["--sizelimit", &half]);
    let second = Loop::over(&place, "a", &["--offset", &half]);
    let config = write(&place, &cache, &[&first.0, &second.0]);
    let server = place.start_kept(&["serve".to_owned(), format!("--config={config}")]);
    // A change is refused before anything is handed over.
    let all = Loop::over(&place, "a", &[]);
    for more in [&all.0, &cache] {
        let file = write(&place, &cache, &[&first.0, &second.0, more]);
        let output = forebay(&["apply", &file, &server.control_argument()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        assert!(more == &cache || said.contains("bytes in common"), "{said}");
    }
    write(&place, &cache, &[&first.0, &second.0]);
    server.stop(&[]);
}
