//! Questions on the terminal, a line each. Without a terminal nothing is asked: flags decide.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use anyhow::bail;

/// Someone who can be asked, or nobody.
pub struct Questions {
    someone: bool,
    /// `--yes` was given.
    yes: bool,
}

impl Questions {
    /// Questions on this terminal, if it is one and `wanted`.
    pub fn on_terminal(wanted: bool) -> Self {
        Self { someone: wanted && io::stdin().is_terminal(), yes: !wanted }
    }

    /// Whether anybody can be asked.
    pub fn has_someone(&self) -> bool {
        self.someone
    }

    /// The answer; an empty one is `default`. `None` if nobody can be asked.
    pub fn ask(&mut self, question: &str, default: &str) -> anyhow::Result<Option<String>> {
        if !self.someone {
            return Ok(None);
        }
        let hint = if default.is_empty() { String::new() } else { format!(" [{default}]") };
        eprint!("{question}{hint}: ");
        io::stderr().flush()?;
        let mut line = String::new();
        if io::stdin().lock().read_line(&mut line)? == 0 {
            bail!("no answer; nothing was changed");
        }
        let answer = line.trim();
        Ok(Some(if answer.is_empty() { default } else { answer }.to_owned()))
    }

    /// Whether the user agrees to what a flag would have to allow otherwise: `--yes` does not.
    pub fn agrees(&mut self, question: &str) -> anyhow::Result<bool> {
        let answer = self.ask(&format!("{question}? yes or no"), "no")?;
        Ok(answer.is_some_and(|answer| answer == "yes" || answer == "y"))
    }

    /// Whether to go on; `--yes`, and a complete set of flags without a terminal, mean so.
    pub fn confirms(&mut self, question: &str) -> anyhow::Result<bool> {
        if self.yes {
            return Ok(true);
        }
        if !self.someone {
            bail!("nobody can be asked here; add --yes, which confirms what is shown above");
        }
        let answer = self.ask(&format!("{question}? yes or no"), "yes")?;
        Ok(answer.is_some_and(|answer| answer == "yes" || answer == "y"))
    }
}
