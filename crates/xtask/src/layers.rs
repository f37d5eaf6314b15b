//! Which crate may depend on which, checked against `cargo metadata`.
//!
//! A crate depends only on crates of lower layers; frontends only on the types of block I/O and of
//! their protocol; test crates on anything, and only tests depend on them. The crates without I/O
//! are linted with `clippy-pure.toml` and use third-party crates from a short list.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::Report;

/// The layer of a crate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Layer {
    /// One of the product's layers, lowest first.
    Product(u8),
    /// A protocol: layer 5, but it sees only `block` and its wire format.
    Frontend,
    /// Proof and measurement: sees everything, seen by tests only.
    Test,
    /// Work on the workspace itself: sees none of its crates.
    Tool,
}

/// Every crate of the workspace.
const LAYERS: [(&str, Layer); 20] = [
    ("forebay-block", Layer::Product(0)),
    ("forebay-format", Layer::Product(1)),
    ("forebay-policy", Layer::Product(1)),
    ("forebay-codec", Layer::Product(1)),
    ("forebay-nbd-wire", Layer::Product(1)),
    ("forebay-fuse-wire", Layer::Product(1)),
    ("forebay-ublk-wire", Layer::Product(1)),
    ("forebay-engine", Layer::Product(2)),
    ("forebay-trace", Layer::Product(2)),
    ("forebay-volume", Layer::Product(3)),
    ("forebay-device", Layer::Product(3)),
    ("forebay-runtime", Layer::Product(4)),
    ("forebay-frontend-nbd", Layer::Frontend),
    ("forebay-frontend-fuse", Layer::Frontend),
    ("forebay-control", Layer::Product(5)),
    ("forebay", Layer::Product(6)),
    ("forebay-model", Layer::Test),
    ("forebay-sim", Layer::Test),
    // Benchmarks start the product as a process, and `forebay bench` starts them as one.
    ("forebay-bench", Layer::Test),
    ("xtask", Layer::Tool),
];
/// The crates of the workspace that a frontend may see.
const FRONTEND_SEES: [&str; 3] = ["forebay-block", "forebay-nbd-wire", "forebay-fuse-wire"];
/// The crates without I/O, threads, clock and randomness.
const PURE: [&str; 6] = [
    "forebay-engine",
    "forebay-volume",
    "forebay-format",
    "forebay-policy",
    "forebay-trace",
    "forebay-model",
];
/// The third-party crates that pure crates may use: computation only.
const PURE_SEES: [&str; 7] =
    ["hashbrown", "lz4_flex", "crc-fast", "twox-hash", "zerocopy", "thiserror", "smallvec"];
/// Third-party crates that only certain crates may use, and why.
const PLACES: [(&str, &[&str], &str); 3] = [
    ("tokio", &["forebay-control", "forebay"], "async belongs to the control thread"),
    ("axum", &["forebay-control"], "the HTTP API belongs to control"),
    (
        "anyhow",
        &["forebay", "forebay-bench", "forebay-sim"],
        "libraries have their own errors; use thiserror",
    ),
];
/// The file that a pure crate's `clippy.toml` must be.
const PURE_LINTS: &str = "clippy-pure.toml";

/// A crate of the workspace, as cargo describes it.
#[derive(Clone, Debug)]
struct Package {
    name: String,
    /// The crates that it is built from.
    needs: Vec<String>,
    /// The crates that only its tests use.
    test_needs: Vec<String>,
    /// The text of its `clippy.toml`, if it has one.
    lints: Option<String>,
}

/// Checks the workspace at `root`.
pub fn workspace(root: &Path) -> Result<Report, std::io::Error> {
    let packages = packages(root)?;
    let lints = fs::read_to_string(root.join(PURE_LINTS))?;
    let problems = check(&packages, &lints);
    Ok(Report { problems, summary: format!("layers: {} crates are in order", packages.len()) })
}

fn packages(root: &Path) -> Result<Vec<Package>, std::io::Error> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["metadata", "--no-deps", "--format-version=1"]).current_dir(root);
    let output = cargo.output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(std::io::Error::other(format!("cargo metadata failed: {said}")));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let list = metadata["packages"].as_array().into_iter().flatten();
    list.map(package).collect()
}

fn package(described: &Value) -> Result<Package, std::io::Error> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let dependencies = described["dependencies"].as_array().cloned().unwrap_or_default();
    let (tests, needs): (Vec<_>, Vec<_>) =
        dependencies.iter().partition(|dependency| dependency["kind"] == "dev");
    let manifest = text(&described["manifest_path"]);
    let lints = Path::new(&manifest).with_file_name("clippy.toml");
    Ok(Package {
        name: text(&described["name"]),
        needs: needs.iter().map(|dependency| text(&dependency["name"])).collect(),
        test_needs: tests.iter().map(|dependency| text(&dependency["name"])).collect(),
        lints: if lints.exists() { Some(fs::read_to_string(lints)?) } else { None },
    })
}

fn layer_of(name: &str) -> Option<Layer> {
    LAYERS.iter().find(|(known, _)| *known == name).map(|&(_, layer)| layer)
}

/// Every violation in `packages`; `pure_lints` is the text that a pure crate's lints must have.
fn check(packages: &[Package], pure_lints: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for package in packages {
        let name = &package.name;
        let Some(layer) = layer_of(name) else {
            problems.push(format!("{name}: no layer; give it one in xtask's layers.rs"));
            continue;
        };
        for need in &package.needs {
            problems.extend(inside(name, layer, need));
            problems.extend(outside(name, need));
        }
        for need in &package.test_needs {
            let test = layer_of(need) == Some(Layer::Test);
            // A crate's tests may use a feature of the crate itself.
            if !test && need != name && layer != Layer::Frontend {
                problems.extend(inside(name, layer, need));
            }
        }
        if PURE.contains(&name.as_str()) && package.lints.as_deref() != Some(pure_lints) {
            problems.push(format!(
                "{name}: its clippy.toml must be a link to {PURE_LINTS}, since it holds no I/O"
            ));
        }
    }
    for (name, _) in LAYERS {
        if packages.iter().all(|package| package.name != name) {
            problems.push(format!("{name}: not in the workspace; drop it from xtask's layers.rs"));
        }
    }
    problems
}

/// Whether `name` may depend on another crate of the workspace.
fn inside(name: &str, layer: Layer, need: &str) -> Option<String> {
    let needed = layer_of(need)?;
    let allowed = match (layer, needed) {
        (Layer::Tool, _) | (_, Layer::Tool) => false,
        (Layer::Test, _) => true,
        (_, Layer::Test) => false,
        (Layer::Frontend, _) => FRONTEND_SEES.contains(&need),
        (Layer::Product(mine), Layer::Product(other)) => other < mine,
        (Layer::Product(mine), Layer::Frontend) => mine > 5,
    };
    (!allowed).then(|| {
        format!("{name} ({layer:?}) must not depend on {need} ({needed:?}); depend downwards only")
    })
}

/// Whether `name` may depend on a third-party crate.
fn outside(name: &str, need: &str) -> Option<String> {
    if layer_of(need).is_some() {
        return None;
    }
    if PURE.contains(&name) && !PURE_SEES.contains(&need) {
        return Some(format!("{name} must not depend on {need}: it computes and does no I/O"));
    }
    let (_, places, why) = PLACES.iter().find(|(known, ..)| *known == need)?;
    (!places.contains(&name)).then(|| format!("{name} must not depend on {need}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINTS: &str = "the lints";

    /// A workspace in order: every crate, none with a dependency.
    fn sound() -> Vec<Package> {
        let lints = |name: &str| PURE.contains(&name).then(|| LINTS.to_owned());
        let make = |&(name, _): &(&str, Layer)| Package {
            name: name.to_owned(),
            needs: Vec::new(),
            test_needs: Vec::new(),
            lints: lints(name),
        };
        LAYERS.iter().map(make).collect()
    }

    fn with(name: &str, change: impl FnOnce(&mut Package)) -> Vec<String> {
        let mut packages = sound();
        let found = packages.iter_mut().find(|package| package.name == name);
        change(found.expect("the crate is in the table"));
        check(&packages, LINTS)
    }

    #[test]
    fn a_sound_workspace_passes() {
        assert_eq!(check(&sound(), LINTS), Vec::<String>::new());
    }

    #[test]
    fn dependencies_go_downwards() {
        let planted = [
            ("forebay-block", "forebay-engine"),
            ("forebay-volume", "forebay-device"),
            ("forebay-engine", "forebay-sim"),
            ("forebay-frontend-nbd", "forebay-engine"),
            ("forebay-control", "forebay-frontend-nbd"),
            ("forebay-runtime", "forebay-control"),
            ("xtask", "forebay-block"),
            ("forebay-bench", "xtask"),
            ("forebay", "forebay-bench"),
            ("forebay-engine", "rand"),
            ("forebay-runtime", "tokio"),
            ("forebay-device", "anyhow"),
        ];
        for (name, need) in planted {
            let problems = with(name, |package| package.needs.push(need.to_owned()));
            assert_eq!(problems.len(), 1, "{name} -> {need}: {problems:?}");
            assert!(problems[0].contains(need), "{problems:?}");
        }
        let fine = [
            ("forebay-runtime", "forebay-device"),
            ("forebay-frontend-nbd", "forebay-nbd-wire"),
            ("forebay", "forebay-frontend-nbd"),
            ("forebay-sim", "forebay-engine"),
            ("forebay-engine", "hashbrown"),
            ("forebay-control", "tokio"),
        ];
        for (name, need) in fine {
            let problems = with(name, |package| package.needs.push(need.to_owned()));
            assert!(problems.is_empty(), "{problems:?}");
        }
    }

    #[test]
    fn tests_may_use_test_crates_but_not_higher_layers() {
        let test =
            |need: &str| with("forebay-engine", |package| package.test_needs.push(need.to_owned()));
        assert!(test("forebay-model").is_empty());
        assert!(test("proptest").is_empty());
        assert!(test("forebay-engine").is_empty(), "with a feature for tests");
        assert_eq!(test("forebay-runtime").len(), 1);
    }

    #[test]
    fn a_crate_has_a_layer_and_a_pure_one_its_lints() {
        let renamed = with("forebay-block", |package| package.name = "forebay-new".to_owned());
        assert_eq!(renamed.len(), 2, "{renamed:?}");
        assert_eq!(with("forebay-format", |package| package.lints = None).len(), 1);
        let weaker = with("forebay-policy", |package| package.lints = Some("weaker".to_owned()));
        assert_eq!(weaker.len(), 1);
    }
}
