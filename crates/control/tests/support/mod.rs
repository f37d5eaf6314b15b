//! Tables in documents that are written from tables in the code.

use std::fs;
use std::path::PathBuf;

/// The environment variable that makes the tests write the tables; `cargo xtask` sets it.
const UPDATE: &str = "FOREBAY_UPDATE_DOCS";

/// Compares tables with those of a document, or writes them there. Each is between a line
/// `<!-- KIND: NAME -->` and a line `<!-- end -->`; `cargo xtask KIND` writes them.
pub fn compare<'a>(document: &str, kind: &str, tables: impl Iterator<Item = (&'a str, String)>) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(document);
    let mut text = fs::read_to_string(&path).expect("it can be read");
    let before = text.clone();
    for (name, table) in tables {
        let (begin, end) = (format!("<!-- {kind}: {name} -->\n\n"), "\n<!-- end -->");
        let from = text.find(&begin).unwrap_or_else(|| panic!("{document} has {begin:?}"));
        let from = from + begin.len();
        let length = text[from..].find(end).expect("the table ends");
        text.replace_range(from..from + length, &table);
    }
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&path, &text).expect("it can be written");
    } else {
        assert!(text == before, "{document} differs from the code; run `cargo xtask {kind}`");
    }
}
