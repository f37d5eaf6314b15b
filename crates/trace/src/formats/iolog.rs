//! fio's iolog, versions 2 and 3 (fio's manual, "Trace file format v2", "v3"): `filename action
//! [offset length]`, in version 3 with a time in microseconds in front. In version 2 time passes
//! only at `wait`, which gives microseconds from the start of the log.

use forebay_block::IoOp;

use super::csv::Found;
use super::text::{bytes, number};
use crate::request::TraceRequest;

/// The version that a first line declares.
pub fn version(line: &str) -> Option<u8> {
    match line {
        "fio version 2 iolog" => Some(2),
        "fio version 3 iolog" => Some(3),
        _ => None,
    }
}

/// The state of reading a log.
#[derive(Debug, Default)]
pub struct Iolog {
    version: u8,
    file: Option<String>,
    /// Current time of a version 2 log, in microseconds.
    micros: u64,
}

impl Iolog {
    /// Decodes a line.
    pub fn line(&mut self, line: &str) -> Result<Found, String> {
        if self.version == 0 {
            let wrong = || format!("{line:?} instead of \"fio version 2 iolog\" or 3");
            self.version = version(line).ok_or_else(wrong)?;
            return Ok([None, None]);
        }
        let mut words = line.split_ascii_whitespace();
        let mut word = |what: &str| words.next().ok_or_else(|| format!("no {what} in {line:?}"));
        let time = if self.version == 3 { Some(number("time", word("time")?)?) } else { None };
        let file = word("file name")?;
        let action = word("action")?;
        let op = match action {
            "add" | "open" | "close" => return Ok([None, None]),
            "wait" => {
                self.micros = number("time", word("time")?)?.max(self.micros);
                return Ok([None, None]);
            }
            "read" => IoOp::Read,
            "write" => IoOp::Write,
            "trim" => IoOp::Discard,
            "sync" | "datasync" => IoOp::Flush,
            other => return Err(format!("the action {other:?} is not one of fio's")),
        };
        self.same_file(file)?;
        let micros = time.unwrap_or(self.micros);
        let nanos =
            micros.checked_mul(1000).ok_or_else(|| format!("time {micros} is too large"))?;
        if op == IoOp::Flush {
            return Ok([Some(TraceRequest::flush(nanos)), None]);
        }
        let offset = number("offset", word("offset")?)?;
        let range = bytes(offset, number("length", word("length")?)?)?;
        Ok([None, Some(TraceRequest { nanos, op, fua: false, range })])
    }

    fn same_file(&mut self, file: &str) -> Result<(), String> {
        match &self.file {
            Some(known) if known != file => Err(format!(
                "requests of file {file:?} after those of {known:?}; a trace is of one volume"
            )),
            Some(_) => Ok(()),
            None => {
                self.file = Some(file.to_owned());
                Ok(())
            }
        }
    }
}
