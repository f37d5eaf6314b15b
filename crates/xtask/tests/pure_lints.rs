//! The lints of the crates without I/O must catch what they forbid: each violation is planted in a
//! crate of its own, and clippy must reject it and name the replacement.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Code that a pure crate may not contain, and a word of clippy's answer.
const PLANTED: [(&str, &str); 6] = [
    ("pub fn f() { std::thread::spawn(|| ()); }", "runtime owns"),
    ("pub fn f() -> std::time::Instant { std::time::Instant::now() }", "clock is passed in"),
    ("pub fn f() -> std::time::SystemTime { std::time::UNIX_EPOCH }", "clock is passed in"),
    ("pub fn f() -> std::io::Result<Vec<u8>> { std::fs::read(\"x\") }", "emit an effect"),
    ("pub fn f(map: std::collections::HashMap<u8, u8>) -> usize { map.len() }", "BTreeMap"),
    ("pub fn f(s: &mut std::hash::RandomState) { *s = Default::default() }", "fixed hasher"),
];

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("this crate lies two directories deep").to_owned()
}

/// Lints `code` as a crate of its own; returns whether it passed, and clippy's output.
fn lint(directory: &Path, code: &str) -> (bool, String) {
    fs::write(directory.join("src/lib.rs"), code).expect("the crate is written");
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["clippy", "--quiet", "--offline", "--", "-D", "clippy::all"])
        .current_dir(directory)
        .env("CLIPPY_CONF_DIR", directory)
        .env("CARGO_TARGET_DIR", directory.join("target"))
        .output()
        .expect("cargo clippy runs");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn each_planted_violation_is_refused() {
    let directory = std::env::temp_dir().join(format!("forebay-lints-{}", std::process::id()));
    fs::create_dir_all(directory.join("src")).expect("a temporary directory can be made");
    fs::copy(root().join("clippy-pure.toml"), directory.join("clippy.toml"))
        .expect("the lints are there");
    let manifest = "[package]\nname = \"planted\"\nedition = \"2024\"\n[workspace]\n";
    fs::write(directory.join("Cargo.toml"), manifest).expect("the manifest is written");

    let (passed, said) = lint(&directory, "pub fn f(x: u64) -> u64 { x + 1 }");
    assert!(passed, "harmless code must pass: {said}");
    for (code, word) in PLANTED {
        let (passed, said) = lint(&directory, code);
        assert!(!passed, "must be refused: {code}");
        assert!(said.contains(word), "{code}: {said}");
    }
    fs::remove_dir_all(&directory).expect("the temporary directory can be removed");
}
