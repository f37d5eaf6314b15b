//! Rules for every source file: a head that says what it owns, a bounded length and width, and
//! `unsafe` only in the files listed here. The rest of the style is rustfmt's and clippy's.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::Report;
use crate::docs;
use crate::markdown;
use crate::scan::{code_of, has_word};

/// Most lines in a file; most files should stay under 600.
const LINES_MAX: usize = 1000;
/// Most columns in a line, except for rows of tables, which cannot be broken.
const COLUMNS_MAX: usize = 100;
/// The files that may contain `unsafe`, and why.
const UNSAFE_FILES: [(&str, &str); 8] = [
    ("crates/block/src/buf.rs", "buffers that the kernel reads and writes"),
    ("crates/block/src/prefetch.rs", "an instruction of the processor"),
    ("crates/device/src/huge.rs", "the allocator, and huge pages for what is large"),
    ("crates/device/src/ring/mod.rs", "io_uring"),
    ("crates/device/src/ring/ublk.rs", "memory that the kernel shares"),
    ("crates/device/src/ring/uring.rs", "its queue, and submissions of 128 bytes"),
    ("crates/device/src/socket.rs", "what a peer has not taken"),
    ("crates/bench/examples/adr0001.rs", "a bare io_uring to compare with"),
];

/// Checks every Rust file under `crates` and `fuzz`.
pub fn workspace(root: &Path) -> Result<Report, io::Error> {
    let mut files = Vec::new();
    for top in ["crates", "fuzz"] {
        if root.join(top).is_dir() {
            collect(&root.join(top), &mut files)?;
        }
    }
    files.sort();
    let mut problems = Vec::new();
    let mut bounds = Bounds::default();
    for path in &files {
        let text = fs::read_to_string(path)?;
        let name = path.strip_prefix(root).unwrap_or(path).to_string_lossy();
        check(&name, &text, &mut problems);
        bounds.note(&name, &text, &mut problems);
    }
    let mut documents = 0;
    if root.join("docs").is_dir() {
        docs::check(root, &files, &mut problems)?;
        documents = markdown::check(root, &files, &mut problems)?;
    }
    if files.is_empty() {
        problems.push(format!("{}: no source file found", root.display()));
    }
    let summary = format!("style: {} files and {documents} documents are in order", files.len());
    Ok(Report { problems, summary })
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> Result<(), io::Error> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if entry.file_name() != "target" {
                collect(&path, files)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// The public bounds of the workspace: `pub const NAME_MAX`, each in one crate only.
#[derive(Default)]
struct Bounds(BTreeMap<String, String>);

impl Bounds {
    /// Notes the bounds of a file. A bound that another crate also defines is a problem.
    fn note(&mut self, name: &str, text: &str, problems: &mut Vec<String>) {
        let Some(krate) = name.strip_prefix("crates/").and_then(|rest| rest.split_once("/src/"))
        else {
            return;
        };
        for (number, line) in code_of(text).lines().enumerate() {
            let constant = line.trim_start().strip_prefix("pub const ");
            let bound = constant.and_then(|rest| rest.split_once(':')).map(|(bound, _)| bound);
            let Some(bound) = bound.filter(|bound| bound.ends_with("_MAX")) else { continue };
            let first = self.0.entry(bound.to_owned()).or_insert_with(|| krate.0.to_owned());
            if first != krate.0 {
                problems.push(format!(
                    "{name}:{}: {bound} is a bound of {first} too; keep one, in \
                     crates/block/src/limits.rs if no crate depends on the other",
                    number + 1
                ));
            }
        }
    }
}

/// Checks one file; `name` is its path relative to the workspace's directory.
fn check(name: &str, text: &str, problems: &mut Vec<String>) {
    if !text.starts_with("//!") {
        problems.push(format!("{name}:1: no head; begin with //! and say what the file owns"));
    }
    let lines = text.lines().count();
    if lines > LINES_MAX {
        problems.push(format!("{name}: {lines} lines, {LINES_MAX} at most; split it by noun"));
    }
    for (number, line) in text.lines().enumerate() {
        let columns = line.chars().count();
        let table =
            line.trim_start().starts_with("//! |") || line.trim_start().starts_with("/// |");
        if columns > COLUMNS_MAX && !table {
            let number = number + 1;
            problems.push(format!("{name}:{number}: {columns} columns, {COLUMNS_MAX} at most"));
        }
    }
    if UNSAFE_FILES.iter().all(|(known, _)| *known != name) {
        unsafe_lines(name, text, problems);
    }
}

fn unsafe_lines(name: &str, text: &str, problems: &mut Vec<String>) {
    for (number, line) in code_of(text).lines().enumerate() {
        if has_word(line, "unsafe") {
            problems.push(format!(
                "{name}:{}: unsafe; use what the files in UNSAFE_FILES of xtask's style.rs offer",
                number + 1
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems_of(name: &str, text: &str) -> Vec<String> {
        let mut problems = Vec::new();
        check(name, text, &mut problems);
        problems
    }

    #[test]
    fn each_rule_is_broken_by_what_it_forbids() {
        let planted = [
            ("fn main() {}\n".to_owned(), "no head"),
            (format!("//! Head.\n{}", "\n".repeat(LINES_MAX)), "lines"),
            (format!("//! Head.\n// {}\n", "é".repeat(COLUMNS_MAX)), "columns"),
            ("//! Head.\nfn f() { unsafe { g() } }\n".to_owned(), "unsafe"),
        ];
        for (text, word) in planted {
            let problems = problems_of("crates/engine/src/x.rs", &text);
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].contains(word), "{problems:?}");
        }
    }

    #[test]
    fn what_is_allowed_passes() {
        let text = format!("//! Head: no unsafe.\n// {}\n", "é".repeat(COLUMNS_MAX - 3));
        assert!(problems_of("crates/engine/src/x.rs", &text).is_empty());
        let text = format!("//! Head.\n//! | {} |\n", "x".repeat(COLUMNS_MAX));
        assert!(problems_of("crates/engine/src/x.rs", &text).is_empty());
        let text = "//! Head.\nunsafe impl Send for A {}\n";
        assert!(problems_of(UNSAFE_FILES[0].0, text).is_empty());
    }

    #[test]
    fn a_bound_stands_in_one_crate() {
        let mut bounds = Bounds::default();
        let mut problems = Vec::new();
        let text = "//! Head.\npub const A_MAX: u8 = 1;\nconst B_MAX: u8 = 1;\n";
        bounds.note("crates/one/src/a.rs", text, &mut problems);
        bounds.note("crates/one/src/b.rs", "    pub const A_MAX: u8 = 1;", &mut problems);
        bounds.note("crates/two/src/a.rs", "pub const B_MAX: u8 = 2;", &mut problems);
        bounds.note("crates/two/src/b.rs", "// pub const A_MAX: u8 = 2;", &mut problems);
        bounds.note("crates/two/tests/b.rs", "pub const A_MAX: u8 = 2;", &mut problems);
        assert!(problems.is_empty(), "{problems:?}");
        bounds.note("crates/two/src/c.rs", "//!\npub const A_MAX: u64 = 2;", &mut problems);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with("crates/two/src/c.rs:2: A_MAX"), "{problems:?}");
    }

    #[test]
    fn an_empty_workspace_is_a_failure() {
        let nowhere = Path::new("/nonexistent/workspace");
        let report = workspace(nowhere).expect("missing directories are skipped");
        assert_eq!(report.problems.len(), 1);
    }
}
