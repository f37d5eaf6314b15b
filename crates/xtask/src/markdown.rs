//! Rules for every document: links and anchors resolve, lines and table cells have a readable
//! width, and only documents of this repository are cited.
//!
//! Only the Markdown of this repository is understood: fenced code blocks, tables with a leading
//! `|`, inline links, and headings with `#`. Anchors are made from headings as GitHub makes them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// Columns in the widest line outside of tables and code blocks.
const COLUMNS_MAX: usize = 120;
/// Characters in the longest cell of a table.
const CELL_MAX: usize = 300;
/// Documents outside of the repository that were cited in the past: the reason belongs on the page.
const FOREIGN: [&str; 3] = ["DESIGN ", "RESEARCH-", "REVIEW-"];
/// Other files whose text may name documents.
const SCRIPTS: [&str; 4] = ["Makefile", ".ci", "contrib", "tools"];

/// Appends a problem for each mistake in a document below `root`, and for each missing document
/// that a file of `sources` names. Returns the number of documents.
pub fn check(
    root: &Path,
    sources: &[PathBuf],
    problems: &mut Vec<String>,
) -> Result<usize, io::Error> {
    let mut files = BTreeSet::new();
    collect(root, root, &mut files)?;
    let name = |path: &Path| path.strip_prefix(root).unwrap_or(path).to_string_lossy().into_owned();
    let sources: Vec<(String, &PathBuf)> = sources.iter().map(|path| (name(path), path)).collect();
    let mut tree = Tree { files, anchors: BTreeMap::new() };
    let documents: Vec<String> =
        tree.files.iter().filter(|name| name.ends_with(".md")).cloned().collect();
    let mut texts = Vec::new();
    for name in documents {
        let text = fs::read_to_string(root.join(&name))?;
        tree.anchors.insert(name.clone(), anchors(&text));
        texts.push((name, text));
    }
    for (name, text) in &texts {
        tree.document(name, text, problems);
    }
    for (name, path) in &sources {
        tree.mentions(name, &fs::read_to_string(path)?, problems);
    }
    for name in tree.files.iter().filter(|name| SCRIPTS.contains(&first(name))) {
        // A file that is not UTF-8 text names no document.
        if let Ok(text) = fs::read_to_string(root.join(name)) {
            tree.mentions(name, &text, problems);
        }
    }
    Ok(texts.len())
}

/// The part of a name before its first slash.
fn first(name: &str) -> &str {
    name.split('/').next().unwrap_or(name)
}

/// Adds the names of all files below `directory`, without build output and hidden directories.
fn collect(root: &Path, directory: &Path, files: &mut BTreeSet<String>) -> Result<(), io::Error> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let skipped = (name.starts_with('.') && name != ".ci") || name == "target";
        if entry.file_type()?.is_dir() {
            if !skipped {
                collect(root, &path, files)?;
            }
        } else if let Ok(relative) = path.strip_prefix(root) {
            files.insert(relative.to_string_lossy().into_owned());
        }
    }
    Ok(())
}

/// The files that documents may link to.
struct Tree {
    /// Paths relative to the workspace's directory.
    files: BTreeSet<String>,
    /// For each document, the anchors of its headings.
    anchors: BTreeMap<String, BTreeSet<String>>,
}

impl Tree {
    /// Checks one document.
    fn document(&self, name: &str, text: &str, problems: &mut Vec<String>) {
        for (number, line) in prose(text) {
            if line.trim_start().starts_with('|') {
                let longest = cells(line).map(|cell| cell.chars().count()).max().unwrap_or(0);
                if longest > CELL_MAX {
                    problems.push(format!(
                        "{name}:{number}: a cell of {longest} characters, {CELL_MAX} at most; \
                         explain it below the table"
                    ));
                }
            } else if line.chars().count() > COLUMNS_MAX {
                let columns = line.chars().count();
                problems.push(format!("{name}:{number}: {columns} columns, {COLUMNS_MAX} at most"));
            }
            for foreign in FOREIGN.iter().filter(|foreign| line.contains(*foreign)) {
                problems.push(format!(
                    "{name}:{number}: {foreign:?} is no document of this repository; give the \
                     reason itself"
                ));
            }
            for file in line.split('`').skip(1).step_by(2).filter(|code| is_source(code)) {
                if !self.files.iter().any(|known| known == file || ends_with(known, file)) {
                    problems.push(format!("{name}:{number}: no source file {file}"));
                }
            }
        }
        self.links(name, text, problems);
        self.mentions(name, text, problems);
    }

    /// Checks the links of a document.
    fn links(&self, name: &str, text: &str, problems: &mut Vec<String>) {
        for (number, target) in links(text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let Some(file) = resolve(name, path).filter(|file| self.exists(file)) else {
                problems.push(format!("{name}:{number}: dead link {target}"));
                continue;
            };
            let known = self.anchors.get(&file).is_some_and(|anchors| anchors.contains(anchor));
            if !anchor.is_empty() && !known {
                problems.push(format!("{name}:{number}: no heading for the anchor of {target}"));
            }
        }
    }

    /// Checks that the documents exist whose paths from the workspace's directory a text names.
    fn mentions(&self, name: &str, text: &str, problems: &mut Vec<String>) {
        for (number, line) in text.lines().enumerate() {
            for (at, _) in line.match_indices("docs/") {
                let part = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
                let path = &line[at..];
                let path = &path[..path.find(|c| !part(c)).unwrap_or(path.len())];
                let path = path.trim_end_matches('.');
                let inner = line[..at].ends_with(|c: char| c.is_ascii_alphanumeric());
                if !inner && path.ends_with(".md") && !self.exists(path) {
                    problems.push(format!("{name}:{}: no document {path}", number + 1));
                }
            }
        }
    }

    fn exists(&self, name: &str) -> bool {
        let directory = format!("{}/", name.trim_end_matches('/'));
        name.is_empty()
            || self.files.contains(name)
            || self.files.iter().any(|file| file.starts_with(&directory))
    }
}

/// Whether a code span is the name of a Rust file.
fn is_source(code: &str) -> bool {
    let part = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    code.ends_with(".rs") && code.chars().all(part)
}

/// Whether `path` ends with `tail`, and `tail` begins at a path component.
fn ends_with(path: &str, tail: &str) -> bool {
    path.strip_suffix(tail).is_some_and(|head| head.ends_with('/'))
}

/// The lines outside of code blocks, with their numbers from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!fence && !code).then_some((at + 1, line))
    })
}

/// The cells of a row. A bar in a code span is no separator.
fn cells(row: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    row.split(move |c| {
        code ^= c == '`';
        c == '|' && !code
    })
    .map(str::trim)
}

/// The targets of the inline links, with their line numbers. Code spans contain no links; a span
/// ends with its paragraph at the latest.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut code = false;
    let mut before = 0;
    for (number, line) in prose(text) {
        if line.trim().is_empty() || number != before + 1 {
            code = false;
        }
        before = number;
        let mut rest = line;
        while let Some(at) = rest.find(['`', ']']) {
            let is_link = !code && rest[at..].starts_with("](");
            code ^= rest[at..].starts_with('`');
            rest = &rest[at + 1..];
            if is_link && let Some(end) = rest.find(')') {
                found.push((number, rest[1..end].trim().to_owned()));
                rest = &rest[end..];
            }
        }
    }
    found
}

/// The file that a link in `from` points to, relative to the workspace's directory; `None` if it is
/// outside.
fn resolve(from: &str, path: &str) -> Option<String> {
    if path.is_empty() {
        return Some(from.to_owned());
    }
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::CurDir => {}
            Component::ParentDir => {
                parts.pop()?;
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(parts.join("/"))
}

/// The anchors of the headings: lower case, without punctuation, spaces as hyphens, and a number at
/// the end of repeated ones.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let title: String = title.trim().to_lowercase().chars().filter(kept).collect();
        let anchor = title.replace(' ', "-");
        let mut numbered = anchor.clone();
        let mut count = 0;
        while !found.insert(numbered) {
            count += 1;
            numbered = format!("{anchor}-{count}");
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The directory of the documents in these tests, apart, so that the check does not take the
    /// tests for documents.
    const DOCS: &str = "docs";

    /// The problems of a document in a small tree.
    fn problems_of(text: &str) -> Vec<String> {
        let (a, b) = (format!("{DOCS}/a.md"), format!("{DOCS}/user/b.md"));
        let files = ["README.md", &a, &b, "crates/x/src/y.rs"].map(str::to_owned);
        let mut tree = Tree { files: files.into(), anchors: BTreeMap::default() };
        tree.anchors.insert(a, anchors("# A `title`, here\n## [cache]\n"));
        tree.anchors.insert(b.clone(), anchors(text));
        let mut problems = Vec::new();
        tree.document(&b, text, &mut problems);
        problems
    }

    #[test]
    fn each_rule_is_broken_by_what_it_forbids() {
        let planted = [
            ("A [link](gone.md).\n".to_owned(), "b.md:1: dead link gone.md"),
            ("A [link](../../../a.md).\n".to_owned(), "dead link"),
            ("A [link over\ntwo lines](../gone.md).\n".to_owned(), "b.md:2: dead link ../gone.md"),
            ("A [link](../a.md#gone).\n".to_owned(), "no heading for the anchor of ../a.md#gone"),
            ("# One\n\nA [link](#two).\n".to_owned(), "no heading for the anchor of #two"),
            (format!("{}\n", "é".repeat(COLUMNS_MAX + 1)), "121 columns"),
            (format!("| a | {} |\n", "é".repeat(CELL_MAX + 1)), "a cell of 301 characters"),
            (format!("See {DOCS}/gone.md.\n"), "b.md:1: no document"),
            (format!("As {}4.1 says.\n", FOREIGN[0]), "is no document of this repository"),
            ("It is in `x/src/gone.rs`.\n".to_owned(), "no source file x/src/gone.rs"),
        ];
        for (text, word) in planted {
            let problems = problems_of(&text);
            assert_eq!(problems.len(), 1, "{text}: {problems:?}");
            assert!(problems[0].contains(word), "{text}: {problems:?}");
        }
    }

    #[test]
    fn what_is_allowed_passes() {
        let (wide, cell) = ("x".repeat(COLUMNS_MAX + 1), "x".repeat(CELL_MAX));
        let text = format!(
            "# One\n## One\n[a](../a.md), [b](../a.md#a-title-here), [c](#one-1)\n\
             [d](../a.md#cache) [e](../../README.md) [f](..) [g](https://example.org/x)\n\
             `[code](gone.md)`, `src/y.rs`, {DOCS}/a.md.\n\n```\n{wide}\n[code](gone.md)\n```\n\
             | {cell} | {cell} |\n| `a|b` | {wide} |\n"
        );
        assert!(problems_of(&text).is_empty(), "{:?}", problems_of(&text));
    }

    #[test]
    fn a_source_that_names_a_document_that_is_gone_is_found() {
        let tree = Tree { files: BTreeSet::default(), anchors: BTreeMap::default() };
        let mut problems = Vec::new();
        let text = format!("//! Head.\n//! `{DOCS}/gone.md` says so.\n");
        tree.mentions("crates/x/src/y.rs", &text, &mut problems);
        assert_eq!(problems, [format!("crates/x/src/y.rs:2: no document {DOCS}/gone.md")]);
    }
}
