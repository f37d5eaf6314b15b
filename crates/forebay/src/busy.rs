//! Retries while a resource is in use. The kernel ends the rings of a killed server shortly after
//! its process is gone, and holds its devices and sockets until then. A start right after a kill
//! must not fail for that reason; a start against a running server must fail soon.

use std::fmt::Display;
use std::time::{Duration, Instant};

use forebay_device::OpenError;

use crate::output;

/// How long to retry: a killed server's flush of a busy disk must end first.
const PATIENCE: Duration = Duration::from_secs(6);
/// Pause between attempts.
const STEP: Duration = Duration::from_millis(20);

/// Reports the wait at once, on standard error, where the log of a server goes too.
fn say(what: &str) {
    if tracing::enabled!(tracing::Level::WARN) {
        tracing::warn!("{what}");
    } else {
        output::say(&format!("forebay: {what}"));
    }
}

/// Opens a device, and retries while it is in use.
pub fn open<T>(attempt: impl FnMut() -> Result<T, OpenError>) -> Result<T, OpenError> {
    retry(attempt, |error| matches!(error, OpenError::InUse { .. }), say)
}

/// Binds a socket, and retries while it is in use.
pub fn bind<T>(attempt: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    retry(attempt, |error| error.kind() == std::io::ErrorKind::AddrInUse, say)
}

fn retry<T, E: Display>(
    mut attempt: impl FnMut() -> Result<T, E>,
    is_busy: impl Fn(&E) -> bool,
    mut say: impl FnMut(&str),
) -> Result<T, E> {
    let limit = Instant::now() + PATIENCE;
    let mut said = false;
    loop {
        match attempt() {
            Err(error) if is_busy(&error) && Instant::now() < limit => {
                if !said {
                    let seconds = PATIENCE.as_secs();
                    say(&format!("{error}; trying again for {seconds} s"));
                    said = true;
                }
                std::thread::sleep(STEP);
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_busy_is_tried_again_and_nothing_else_is() {
        let mut tries = 0;
        let mut answers = [Err("busy"), Err("busy"), Ok(7)].into_iter();
        let mut next = || {
            tries += 1;
            answers.next().unwrap_or(Err("gone"))
        };
        let mut said = Vec::new();
        let mut say = |what: &str| said.push(what.to_owned());
        assert_eq!(retry(&mut next, |error| *error == "busy", &mut say), Ok(7));
        assert_eq!(retry(&mut next, |error| *error == "busy", &mut say), Err("gone"));
        assert_eq!((tries, said), (4, vec!["busy; trying again for 6 s".to_owned()]));
    }
}
