//! The order of the rooms of the engine: the folders and files of its crate, lowest first. A room
//! imports lower rooms only, and knows nothing of `Engine`, which passes on what one room has for
//! another. A call needs a type, and a type has to be imported or come from a lower room: so no
//! room can call one above it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use crate::Report;
use crate::scan::code_of;

/// The rooms, lowest first.
const ROOMS: [&str; 26] = [
    "key", "slab", "limits", "pace", "tries", "locks", "losses", "api", "ram", "contents", "log",
    "store", "form", "note", "ticket", "out", "left", "flow", "order", "volume", "cache",
    "destage", "reclaim", "request", "life", "recovery",
];
/// `Engine` with the rooms that it passes on between, and the harness of tests.
const ABOVE: [&str; 5] = ["engine", "turn", "shard", "lib", "testing"];
/// Fields that `Engine` may have.
const FIELDS_MAX: usize = 15;

/// A source file: its room and its code without comments and tests.
struct Source {
    room: String,
    code: String,
}

/// Checks the engine's crate below the workspace at `root`.
pub fn workspace(root: &Path) -> Result<Report, io::Error> {
    let sources = sources(root)?;
    let rooms: BTreeSet<&str> = sources.iter().map(|source| source.room.as_str()).collect();
    let summary = format!("rooms: {} of the engine are in order", rooms.len());
    Ok(Report { problems: check(&sources), summary })
}

/// Each room with those that it imports, lowest first, for people.
pub fn graph(root: &Path) -> Result<Report, io::Error> {
    let sources = sources(root)?;
    let uses = uses(&sources);
    let mut lines = Vec::new();
    for room in order() {
        let mut used: Vec<&str> = uses.get(room).into_iter().flatten().copied().collect();
        used.sort_by_key(|used| rank(used));
        lines.push(format!("{room}: {}", used.join(" ")).trim_end().to_owned());
    }
    Ok(Report { problems: Vec::new(), summary: lines.join("\n") })
}

fn sources(root: &Path) -> Result<Vec<Source>, io::Error> {
    let base = root.join("crates/engine/src");
    let mut sources = Vec::new();
    collect(&base, &base, &mut sources)?;
    Ok(sources)
}

fn collect(base: &Path, folder: &Path, sources: &mut Vec<Source>) -> Result<(), io::Error> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        // Tests of a room stand in `tests.rs`, and in a folder `tests` beside it.
        if path.file_stem().is_some_and(|name| name == "tests") {
            continue;
        }
        if path.is_dir() {
            collect(base, &path, sources)?;
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
    ROOMS.into_iter().chain(ABOVE)
}

fn rank(room: &str) -> Option<usize> {
    order().position(|known| known == room)
}

/// The rooms that each room imports.
fn uses(sources: &[Source]) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut uses: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for Source { room, code } in sources {
        let used = words_behind(code, "crate::");
        let used = used.filter(|used| used != room && rank(used).is_some());
        uses.entry(room).or_default().extend(used);
    }
    uses
}

/// Every violation.
fn check(sources: &[Source]) -> Vec<String> {
    let mut problems = BTreeSet::new();
    for Source { room, code } in sources {
        if rank(room).is_none() {
            problems.insert(format!("{room}: no place; give it one in xtask's rooms.rs"));
        }
        let knows = words_behind(code, "crate::").any(|used| used == "Engine");
        if knows && ROOMS.contains(&room.as_str()) {
            problems.insert(format!("{room} knows Engine; pass it what it needs"));
        }
    }
    for (room, used) in uses(sources) {
        let own = rank(room);
        // Above the rooms the engine's own files know each other.
        let higher = used.into_iter().filter(|used| rank(used) > own && ROOMS.contains(&room));
        problems.extend(higher.map(|used| format!("{room} imports {used}, which is higher")));
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

/// The words that follow `before` in the code.
fn words_behind<'a>(code: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    code.match_indices(before).filter_map(move |(at, _)| {
        let rest = &code[at + before.len()..];
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        (end > 0).then_some(&rest[..end])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems_of(files: &[(&str, &str)]) -> Vec<String> {
        let source = |(room, code): &(&str, &str)| Source {
            room: (*room).to_owned(),
            code: (*code).to_owned(),
        };
        check(&files.iter().map(source).collect::<Vec<_>>())
    }

    #[test]
    fn each_planted_violation_is_found() {
        for (file, what) in [
            (("contents", "use crate::form::Forms;"), "contents imports form"),
            (("destage", "fn f(life: &crate::life::Life) {}"), "destage imports life"),
            (("log", "use crate::Engine;"), "log knows Engine"),
            (("recovery", "use crate::engine::Engine;"), "recovery imports engine"),
            (("cellar", ""), "cellar: no place"),
        ] {
            let problems = problems_of(&[file]);
            assert!(problems.len() == 1 && problems[0].contains(what), "{what}: {problems:?}");
        }
        let many: String = (0..=FIELDS_MAX).map(|n| format!("    f{n}: u8,\n")).collect();
        let many = format!("pub struct Engine {{\n{many}}}\n");
        assert!(problems_of(&[("engine", &many)])[0].contains("fields"));
        let down = ("form", "use crate::contents::Contents;");
        assert!(problems_of(&[down, ("turn", "use crate::Engine;")]).is_empty());
    }

    #[test]
    fn the_graph_shows_which_rooms_a_room_imports() {
        let source = |room: &str, code: &str| Source { room: room.into(), code: code.into() };
        let sources = [
            source("log", "use crate::key::Key;"),
            source("log", "use crate::slab::Id; use crate::log::Log;"),
        ];
        assert_eq!(uses(&sources)["log"], BTreeSet::from(["key", "slab"]));
    }
}
