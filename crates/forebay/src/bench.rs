//! `forebay bench` and `forebay demo`: they run in `forebay-bench`, a separate binary, so that the
//! server does not contain the packages of the benchmarks. It replaces this process and receives
//! all arguments.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

/// The binary of the benchmarks.
const NAME: &str = "forebay-bench";
/// The variable that tells it which Forebay to measure.
const FOREBAY: &str = "FOREBAY_BINARY";

/// Arguments that `forebay-bench` parses.
#[derive(clap::Args, Debug)]
pub struct Passed {
    /// Passed on to forebay-bench
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Becomes `forebay-bench COMMAND ARGUMENTS`; returns only if it cannot be started.
pub fn run(command: &str, passed: &Passed) -> anyhow::Result<()> {
    start(command, passed).map(|never| match never {})
}

fn start(command: &str, passed: &Passed) -> anyhow::Result<Infallible> {
    let own = std::env::current_exe().context("the path of this program")?;
    let search = std::env::var_os("PATH").unwrap_or_default();
    let found = find(&own, std::env::split_paths(&search)).with_context(|| {
        format!(
            "{NAME} is neither in {} nor in PATH; install it next to forebay (make install)",
            own.parent().unwrap_or(Path::new("/")).display()
        )
    })?;
    let mut next = Command::new(&found);
    next.arg(command).args(&passed.arguments).env(FOREBAY, &own);
    Err(next.exec()).with_context(|| found.display().to_string())
}

/// The binary next to `own`, otherwise the first one in `search`.
fn find(own: &Path, search: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    let beside = own.parent().map(Path::to_owned);
    beside.into_iter().chain(search).map(|dir| dir.join(NAME)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_beside_comes_before_those_in_the_path() {
        let dir = std::env::temp_dir().join(format!("forebay-find-{}", std::process::id()));
        let (own, other) = (dir.join("own/forebay"), dir.join("other"));
        for place in [dir.join("own"), other.clone()] {
            std::fs::create_dir_all(place).expect("a directory");
        }
        let search = || [dir.join("none"), other.clone()].into_iter();
        assert_eq!(find(&own, search()), None);
        std::fs::write(other.join(NAME), "").expect("a file");
        assert_eq!(find(&own, search()), Some(other.join(NAME)));
        std::fs::write(own.with_file_name(NAME), "").expect("a file");
        assert_eq!(find(&own, search()), Some(own.with_file_name(NAME)));
        std::fs::remove_dir_all(&dir).expect("it can be removed");
    }
}
