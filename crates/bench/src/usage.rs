//! Errors of the command line.

/// The arguments are invalid together: exit code 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongUsage(pub String);

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}
