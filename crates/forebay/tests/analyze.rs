//! `forebay analyze` on files whose blocks are known.

mod support;

use std::process::{Command, Output};

use serde_json::Value;
use support::{Place, noise};

fn analyze(args: &[&str], place: &Place) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.arg("analyze").args(args).current_dir(place.path(""));
    command.output().expect("forebay starts")
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("it prints JSON")
}

#[test]
fn kinds_and_what_a_cache_holds_of_them() {
    let place = Place::new();
    let mut image = Vec::new();
    for i in 0..1024u64 {
        match i % 4 {
            0 => image.extend([0; 4096]),
            1 => image.extend(noise(i, 4096)),
            2 => image.extend(noise(1, 4096)),
            _ => image.extend(format!("{i:08}").repeat(512).bytes()),
        }
    }
    std::fs::write(place.path("new"), &image).expect("there is room");
    let found = json(&analyze(&["new", "--json"], &place));
    let share = |name: &str| found["shares"][name].as_f64().expect("a number");
    for (name, want) in [("zero", 0.25), ("lz4", 0.25), ("raw", 0.5), ("zstd_only", 0.0)] {
        assert!((share(name) - want).abs() < 1e-9, "{name}: {}", share(name));
    }
    // All blocks of the third kind except one, which equals the first block of the second kind.
    assert!((share("duplicate") - 256.0 / 1024.0).abs() < 1e-3, "{}", share("duplicate"));
    let holds = |name: &str| found["holds"][name].as_f64().expect("a number");
    assert!(holds("raw") < 1.0 && holds("raw") > 0.95, "{}", holds("raw"));
    assert!(holds("lz4") > 1.4 && holds("zstd") >= holds("lz4"), "{found:#}");
    assert!(holds("zstd_equal_once") > 1.4 * holds("zstd"), "{found:#}");

    image[4096 * 5 + 100] ^= 1;
    std::fs::write(place.path("newer"), &image).expect("there is room");
    let found = json(&analyze(&["newer", "--older", "new", "--json"], &place));
    assert_eq!(found["rewrites"]["changed"], 1);
    assert_eq!(found["rewrites"]["deltas"], 1);
    let text = analyze(&["newer", "--older", "new"], &place).stdout;
    let text = String::from_utf8(text).expect("it prints text");
    assert!(text.contains("rewrites: 1 of 1024 blocks differ"), "{text}");

    let part = json(&analyze(&["new", "--limit", "1MiB", "--json"], &place));
    assert_eq!((&part["blocks_read"], &part["one_piece_of"]), (&256.into(), &4.into()));
}

#[test]
fn what_cannot_be_read_is_named() {
    let place = Place::new();
    std::fs::write(place.path("short"), [1; 100]).expect("there is room");
    std::fs::write(place.path("whole"), [1; 8192]).expect("there is room");
    std::fs::write(place.path("half"), [1; 4096]).expect("there is room");
    for (args, wanted) in [
        (&["nothing"][..], "nothing"),
        (&["."], "is a directory"),
        (&["short"], "less than a block"),
        (&["whole", "--older", "half"], "same size"),
    ] {
        let output = analyze(args, &place);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {error}");
        assert!(error.contains(wanted), "{args:?}: {error}");
    }
    let output = analyze(&["whole", "--limit", "much"], &place);
    assert_eq!(output.status.code(), Some(2), "not a size");
}
