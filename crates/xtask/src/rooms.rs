//! The order of the engine's rooms: the folders and files of its crate, lowest first. A room
//! imports lower rooms only. Most know nothing of `Engine`; the rooms that still add methods to it
//! call methods of higher rooms only where a list here allows it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use crate::Report;
use crate::scan::code_of;

/// The rooms that know nothing of `Engine`, lowest first.
const ROOMS: [&str; 14] = [
    "key", "slab", "limits", "pace", "tries", "locks", "losses", "api", "ram", "contents", "log",
    "ticket", "out", "form",
];
/// The rooms that add methods to `Engine`, lowest first.
const ENGINE_ROOMS: [&str; 7] =
    ["destage", "volume", "reclaim", "request", "admission", "life", "recovery"];
/// The rooms that pass data between others, decisions about a whole cache device, and the test
/// harness.
const ABOVE: [&str; 7] = ["turn", "engine", "shard", "lib", "pool", "offline", "testing"];
/// The calls to higher rooms that are left: the caller's room, and the room of the method.
const CALLS_UP: [(&str, &str); 5] = [
    // A destage that ends answers the requests waiting for it, and a failed read probes the device.
    ("destage", "request"),
    ("destage", "life"),
    // A segment that cannot be read means that the device has failed.
    ("reclaim", "life"),
    // A read makes room in RAM; a write waits for a stripe that a failed cache is leaving.
    ("request", "admission"),
    ("request", "life"),
];
/// Most fields that `Engine` may have.
const FIELDS_MAX: usize = 15;

/// A source file: its room and its code without comments and tests.
struct Source {
    room: String,
    code: String,
}

/// Checks the engine's crate below the workspace at `root`.
pub fn workspace(root: &Path) -> Result<Report, io::Error> {
    let base = root.join("crates/engine/src");
    let mut sources = Vec::new();
    collect(&base, &base, &mut sources)?;
    let problems = check(&sources);
    let rooms: BTreeSet<&str> = sources.iter().map(|source| source.room.as_str()).collect();
    Ok(Report { problems, summary: format!("rooms: {} of the engine are in order", rooms.len()) })
}

fn collect(base: &Path, folder: &Path, sources: &mut Vec<Source>) -> Result<(), io::Error> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(base, &path, sources)?;
            continue;
        }
        if path.file_name().is_some_and(|name| name == "tests.rs") {
            continue;
        }
        let inside = path.strip_prefix(base).expect("it lies below");
        let first = inside.components().next().expect("a file has a name");
        let room = Path::new(first.as_os_str()).with_extension("").to_string_lossy().into_owned();
        let text = fs::read_to_string(&path)?;
        let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        sources.push(Source { room, code: code_of(product) });
    }
    Ok(())
}

/// The order of all rooms, lowest first.
fn order() -> impl Iterator<Item = &'static str> {
    ROOMS.into_iter().chain(ENGINE_ROOMS).chain(ABOVE)
}

fn rank(room: &str) -> Option<usize> {
    order().position(|known| known == room)
}

/// Every violation.
fn check(sources: &[Source]) -> Vec<String> {
    let mut problems = BTreeSet::new();
    let methods = methods(sources);
    let mut up = BTreeSet::new();
    for Source { room, code } in sources {
        let Some(own) = rank(room) else {
            problems.insert(format!("{room}: no place; give it one in xtask's rooms.rs"));
            continue;
        };
        for (used, _) in words_behind(code, "crate::") {
            if rank(used).is_some_and(|other| other > own) && !ABOVE.contains(&used) {
                problems.insert(format!("{room} imports {used}, which is higher"));
            }
            if used == "Engine" && ROOMS.contains(&room.as_str()) {
                problems.insert(format!("{room} knows Engine; pass it what it needs"));
            }
        }
        if !ENGINE_ROOMS.contains(&room.as_str()) {
            continue;
        }
        let calls = words_behind(code, "self.").filter(|&(_, rest)| rest.starts_with('('));
        for (called, _) in calls {
            let Some(&other) = methods.get(called) else { continue };
            if !ENGINE_ROOMS.contains(&other) || rank(other) <= Some(own) {
                continue;
            }
            up.insert((room.as_str(), other));
            if !CALLS_UP.contains(&(room, other)) {
                problems.insert(format!("{room} calls {called} of {other}, which is higher"));
            }
        }
    }
    for (from, to) in CALLS_UP {
        if !up.contains(&(from, to)) {
            problems
                .insert(format!("{from} no longer calls {to}: remove that from xtask's CALLS_UP"));
        }
    }
    problems.extend(fields(sources));
    problems.into_iter().collect()
}

/// Whether `Engine` has more fields than it may.
fn fields(sources: &[Source]) -> Option<String> {
    let engine = sources.iter().find(|source| source.room == "engine")?;
    let body = engine.code.split("pub struct Engine {").nth(1)?.split("\n}").next()?;
    let count = body.lines().filter(|line| line.contains(':')).count();
    let many = format!("Engine has {count} fields, {FIELDS_MAX} at most: a room owns them");
    (count > FIELDS_MAX).then_some(many)
}

/// The methods of `Engine`, with the room of each.
fn methods(sources: &[Source]) -> BTreeMap<&str, &str> {
    let mut methods = BTreeMap::new();
    for Source { room, code } in sources {
        for part in code.split("\nimpl Engine {").skip(1) {
            let body = part.split("\n}").next().unwrap_or_default();
            let lines =
                body.lines().filter(|line| line.starts_with("    ") && !line.starts_with("     "));
            for line in lines.filter(|line| line.contains("fn ")) {
                let name = line.split("fn ").nth(1).unwrap_or_default();
                let end = name.find(|c: char| !is_word(c)).unwrap_or(name.len());
                methods.insert(&name[..end], room.as_str());
            }
        }
    }
    methods
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The words that follow `before` in the code, each with the code after it.
fn words_behind<'a>(code: &'a str, before: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    code.match_indices(before).filter_map(move |(at, _)| {
        let rest = code[at + before.len()..].trim_start();
        let end = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
        (end > 0).then_some(rest.split_at(end))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(room: &str, code: &str) -> Source {
        Source { room: room.to_owned(), code: code.to_owned() }
    }

    /// The problems of these files, without complaints about unused entries of `CALLS_UP`.
    fn problems_of(files: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<Source> = files.iter().map(|(room, code)| source(room, code)).collect();
        let mut problems = check(&sources);
        problems.retain(|problem| !problem.contains("CALLS_UP"));
        problems
    }

    #[test]
    fn each_planted_violation_is_found() {
        let engine = "pub struct Engine {\n    a: u8,\n}\n";
        let method = "\nimpl Engine {\n    pub(crate) fn recover_all(&mut self) {\n    }\n}\n";
        let call =
            "\nimpl Engine {\n    fn f(&mut self) {\n        self.recover_all();\n    }\n}\n";
        for (file, what) in [
            (("contents", "use crate::form::Forms;"), "contents imports form"),
            (("log", "use crate::Engine;"), "log knows Engine"),
            (("cellar", ""), "cellar: no place"),
            (("destage", call), "destage calls recover_all of recovery"),
        ] {
            let problems = problems_of(&[("engine", engine), ("recovery", method), file]);
            assert!(problems.len() == 1 && problems[0].contains(what), "{what}: {problems:?}");
        }
        let many: String = (0..=FIELDS_MAX).map(|n| format!("    f{n}: u8,\n")).collect();
        let many = format!("pub struct Engine {{\n{many}}}\n");
        assert!(problems_of(&[("engine", &many)])[0].contains("fields"));
        let down = ("form", "use crate::contents::Contents;");
        assert!(problems_of(&[("engine", engine), down]).is_empty());
    }

    #[test]
    fn a_call_up_that_is_no_more_is_taken_off_the_list() {
        let problems = check(&[source("engine", "")]);
        assert_eq!(problems.len(), CALLS_UP.len(), "{problems:?}");
    }
}
