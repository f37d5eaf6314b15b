//! Tests that documents name must exist: a table below "Tests" is a promise that a renamed test
//! would break silently.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The documents with such a table.
const DOCUMENTS: [&str; 2] = ["docs/internals/fault-model.md", "docs/internals/recovery.md"];
/// The heading below which every name in backquotes must be a test or a scenario.
const HEADING: &str = "## Tests";

/// Appends a problem for each name of a test or scenario that is not in `files`.
pub fn check(root: &Path, files: &[PathBuf], problems: &mut Vec<String>) -> Result<(), io::Error> {
    let sources = files.iter().map(fs::read_to_string).collect::<Result<Vec<_>, _>>()?;
    for name in DOCUMENTS {
        let text = fs::read_to_string(root.join(name))?;
        let Some((_, section)) = text.split_once(HEADING) else {
            problems.push(format!("{name}: the section {HEADING:?} is gone"));
            continue;
        };
        for missing in missing(section, &sources) {
            problems.push(format!("{name}: no test or scenario {missing}; name one that exists"));
        }
    }
    Ok(())
}

/// The names in `section` that `sources` do not contain.
fn missing<'a>(section: &'a str, sources: &[String]) -> Vec<&'a str> {
    let exists = |declared: &str| sources.iter().any(|source| source.contains(declared));
    let quoted = section.split('`').skip(1).step_by(2);
    quoted
        .filter(|name| match name.strip_prefix("Scenario::") {
            Some(scenario) => !exists(&format!("Self::{scenario}")),
            None if is_test(name) => !exists(&format!("fn {name}()")),
            None => false,
        })
        .collect()
}

/// Whether a name is that of a test: a sentence, unlike a path or a command.
fn is_test(name: &str) -> bool {
    name.matches('_').count() >= 2 && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_does_not_exist_is_found() {
        let sources = ["fn it_is_there() {}".to_owned(), "(Self::CacheRot, 4)".to_owned()];
        let section = "`it_is_there`, `Scenario::CacheRot`, `make sim`, `crates/sim/src/x_y_z.rs`";
        assert!(missing(section, &sources).is_empty());
        let section = "`it_was_there`, `Scenario::CacheGone`";
        assert_eq!(missing(section, &sources), ["it_was_there", "Scenario::CacheGone"]);
    }
}
