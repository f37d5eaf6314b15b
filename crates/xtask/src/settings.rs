//! The tables of settings in `docs/user/configuration.md`, generated from the table in
//! `crates/control/src/settings/table.rs`. The test that compares them writes them here, since this
//! crate depends on no other crate of the workspace.

use std::path::Path;
use std::process::Command;

use crate::Report;

/// The test, and the variable that makes it write.
const TEST: [&str; 6] =
    ["test", "--quiet", "--package=forebay-control", "--test=settings", "--", "the_reference"];
const UPDATE: &str = "FOREBAY_UPDATE_DOCS";

/// Writes the tables.
pub fn write(root: &Path) -> Result<Report, std::io::Error> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let output = cargo.args(TEST).env(UPDATE, "1").current_dir(root).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let cause = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(std::io::Error::other(format!("cargo test failed: {said}{cause}")));
    }
    let summary = "settings: docs/user/configuration.md has the table".to_owned();
    Ok(Report { problems: Vec::new(), summary })
}
