//! The text that `blkparse` prints by default:
//! `8,0    3        1     0.000000000   697  Q  WS 223490 + 8 [process]`.
//!
//! A request counts where it is queued (`Q`). Everything else that happens to it, and the summary
//! at the end, is passed over.

use super::csv::Found;
use super::text::{number, rwbs, seconds, sectors};

/// What is in a line of an event.
struct Event<'a> {
    time: &'a str,
    action: &'a str,
    letters: &'a str,
    rest: [Option<&'a str>; 3],
}

fn event(line: &str) -> Option<Event<'_>> {
    let mut words = line.split_ascii_whitespace();
    let (major, minor) = words.next()?.split_once(',')?;
    let all_digits = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    let (cpu, sequence) = (words.next()?, words.next()?);
    let time = words.next()?;
    let process = words.next()?;
    let numbers = [major, minor, cpu, sequence, process];
    if !numbers.into_iter().all(all_digits) || !time.contains('.') {
        return None;
    }
    let (action, letters) = (words.next()?, words.next()?);
    Some(Event { time, action, letters, rest: [words.next(), words.next(), words.next()] })
}

/// Whether a first line is of this form.
pub fn is_one(line: &str) -> bool {
    event(line).is_some()
}

/// The parts of a trace that are of events, and its end.
#[derive(Debug, Default)]
pub struct Blkparse {
    summary: bool,
}

impl Blkparse {
    /// A line.
    pub fn line(&mut self, line: &str) -> Result<Found, String> {
        self.summary |= line.starts_with("CPU") || line.starts_with("Total (");
        if self.summary {
            return Ok([None, None]);
        }
        let event = event(line).ok_or_else(|| format!("not an event of blkparse: {line:?}"))?;
        if event.action != "Q" {
            return Ok([None, None]);
        }
        let nanos = seconds(event.time)?;
        let range = match event.rest {
            [Some(sector), Some("+"), Some(count)] => {
                sectors(number("sector", sector)?, number("number of sectors", count)?)?
            }
            // A flush has no place.
            _ if event.letters.starts_with('F') || event.letters.starts_with('N') => sectors(0, 0)?,
            _ => return Err(format!("no \"sector + number\" in {line:?}")),
        };
        rwbs(nanos, event.letters, range)
    }
}
