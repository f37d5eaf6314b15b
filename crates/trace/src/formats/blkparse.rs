//! The text that `blkparse` prints by default:
//! `8,0    3        1     0.000000000   697  Q  WS 223490 + 8 [process]`.
//!
//! A request counts when it is queued (`Q`). Its other events and the summary at the end are
//! skipped.

use super::csv::Found;
use super::text::{number, rwbs, seconds, sectors};

/// The fields of an event's line.
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

/// Whether a trace with this first line is in this format.
pub fn is_one(line: &str) -> bool {
    event(line).is_some()
}

/// Reads a trace; knows whether its summary has begun.
#[derive(Debug, Default)]
pub struct Blkparse {
    summary: bool,
}

impl Blkparse {
    /// Decodes a line.
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
            // A flush has no range.
            _ if event.letters.starts_with('F') || event.letters.starts_with('N') => sectors(0, 0)?,
            _ => return Err(format!("no \"sector + number\" in {line:?}")),
        };
        rwbs(nanos, event.letters, range)
    }
}
