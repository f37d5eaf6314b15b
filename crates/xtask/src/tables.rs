//! Tables of the documentation, generated from tables in the code. The tests that compare them
//! write them here, since this crate depends on no other crate of the workspace.

use std::path::Path;
use std::process::Command;

use crate::Report;

/// The variable that makes the tests write.
const UPDATE: &str = "FOREBAY_UPDATE_DOCS";

/// The tables of a document.
pub struct Tables {
    /// The test of `forebay-control` that compares them with the code; also their name as a
    /// command.
    test: &'static str,
    document: &'static str,
}

/// Those of `crates/control/src/settings/table.rs`.
pub const SETTINGS: Tables = Tables { test: "settings", document: "docs/user/configuration.md" };
/// Those of `crates/engine/src/api/stats.rs`.
pub const STATISTICS: Tables = Tables { test: "statistics", document: "docs/user/statistics.md" };

impl Tables {
    /// Writes them.
    pub fn write(&self, root: &Path) -> Result<Report, std::io::Error> {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["test", "--quiet", "--package=forebay-control", "--test", self.test]);
        cargo.args(["--", "has_the_table"]);
        let output = cargo.env(UPDATE, "1").current_dir(root).output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let cause = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(std::io::Error::other(format!("cargo test failed: {said}{cause}")));
        }
        let summary = format!("{}: {} has the tables", self.test, self.document);
        Ok(Report { problems: Vec::new(), summary })
    }
}
