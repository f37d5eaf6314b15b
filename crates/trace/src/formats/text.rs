//! Lines of a text trace, and the numbers in them.

use std::io::{BufRead, Read};

use forebay_block::{ByteRange, IoOp, SECTOR_SIZE};

use crate::TraceError;
use crate::request::TraceRequest;

/// Longest line, in bytes.
const LINE_MAX: u64 = 4096;

/// The lines of a trace, one at a time.
pub struct Lines<R> {
    input: R,
    line: Vec<u8>,
    /// Number of the last line read, from 1.
    pub number: u64,
}

impl<R: BufRead> Lines<R> {
    /// Reads the lines of `input`.
    pub fn new(input: R) -> Self {
        Self { input, line: Vec::new(), number: 0 }
    }

    /// The next non-empty line, without surrounding blanks.
    pub fn next(&mut self) -> Result<Option<&str>, TraceError> {
        loop {
            self.line.clear();
            let mut limited = (&mut self.input).take(LINE_MAX + 1);
            if limited.read_until(b'\n', &mut self.line)? == 0 {
                return Ok(None);
            }
            self.number += 1;
            if self.line.len() as u64 > LINE_MAX {
                let reason = format!("longer than {LINE_MAX} bytes; this is no text trace");
                return Err(TraceError::line(self.number, reason));
            }
            if !self.line.trim_ascii().is_empty() {
                break;
            }
        }
        match std::str::from_utf8(self.line.trim_ascii()) {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err(TraceError::line(self.number, "not text")),
        }
    }
}

/// Parses a whole number; `what` names it in the error.
pub fn number(what: &str, text: &str) -> Result<u64, String> {
    let text = text.trim();
    text.parse().map_err(|_| format!("the {what} {text:?} is not a whole number below 2^64"))
}

/// Parses seconds with a fraction into nanoseconds, exactly; digits beyond nanoseconds are dropped.
pub fn seconds(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let wrong = || format!("the time {text:?} is not a number of seconds");
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let digits = &fraction[..fraction.len().min(9)];
    let scale = 10u64.pow(9 - digits.len() as u32);
    let part = if digits.is_empty() { 0 } else { digits.parse::<u64>().map_err(|_| wrong())? };
    let whole: u64 = whole.parse().map_err(|_| wrong())?;
    whole.checked_mul(1_000_000_000).and_then(|n| n.checked_add(part * scale)).ok_or_else(wrong)
}

/// The byte range of `count` sectors from `sector`; an error if it is too large.
pub fn sectors(sector: u64, count: u64) -> Result<ByteRange, String> {
    let size = SECTOR_SIZE as u64;
    let range = sector.checked_mul(size).zip(count.checked_mul(size));
    let range = range.and_then(|(offset, len)| ByteRange::checked(offset, len));
    range.ok_or_else(|| format!("{count} sectors at sector {sector} are beyond 2^64 bytes"))
}

/// The byte range of `len` bytes from `offset`; an error if it is too large.
pub fn bytes(offset: u64, len: u64) -> Result<ByteRange, String> {
    ByteRange::checked(offset, len)
        .ok_or_else(|| format!("{len} bytes at {offset} are beyond 2^64 bytes"))
}

/// Decodes blktrace's letters: at most a flush and a request after it. `None` for requests that a
/// cache ignores.
///
/// # Errors If the letters are invalid.
pub fn rwbs(
    nanos: u64,
    letters: &str,
    range: ByteRange,
) -> Result<[Option<TraceRequest>; 2], String> {
    let unknown = |at: char| format!("the kind {letters:?} has an unknown letter {at:?}");
    if let Some(at) = letters.chars().find(|at| !"RWDFSMANVCEBZ".contains(*at)) {
        return Err(unknown(at));
    }
    let (flush, rest) = match letters.strip_prefix('F') {
        Some(rest) => (true, rest),
        None => (false, letters),
    };
    let flush = flush.then_some(TraceRequest::flush(nanos));
    let op = match rest.chars().next() {
        Some('R') => Some(IoOp::Read),
        Some('W') if rest.contains('Z') => Some(IoOp::WriteZeroes),
        Some('W') => Some(IoOp::Write),
        Some('D') => Some(IoOp::Discard),
        None | Some('F' | 'S' | 'N') => None,
        Some(at) => return Err(unknown(at)),
    };
    if flush.is_none() && op.is_none() && !rest.starts_with('N') {
        return Err(format!("the kind {letters:?} is neither R, W, D nor F"));
    }
    let fua = rest.get(1..).is_some_and(|rest| rest.contains('F'));
    let op = op.filter(|_| !range.is_empty());
    let request = op.map(|op| TraceRequest {
        nanos,
        op,
        fua: fua && matches!(op, IoOp::Write | IoOp::WriteZeroes),
        range,
    });
    Ok([flush, request])
}

/// The operation of a SCSI code; `None` for commands that move no data of the volume.
#[must_use]
pub fn scsi(code: u8) -> Option<IoOp> {
    match code {
        0x08 | 0x28 | 0xa8 | 0x88 => Some(IoOp::Read),
        0x0a | 0x2a | 0xaa | 0x8a | 0x2e | 0xae | 0x8e => Some(IoOp::Write),
        0x35 | 0x91 => Some(IoOp::Flush),
        0x41 | 0x93 => Some(IoOp::WriteZeroes),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_exact() {
        assert_eq!(seconds("33898"), Ok(33_898_000_000_000));
        assert_eq!(seconds("0.000001500"), Ok(1_500));
        assert_eq!(seconds("1.0000000019"), Ok(1_000_000_001));
        for wrong in ["", "x", "1.x", "-1", "1e3", "99999999999999"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn letters_are_read_as_blktrace_writes_them() {
        let range = ByteRange::new(512, 1024);
        let kinds = |letters: &str| {
            let found = rwbs(1, letters, range).expect("known letters");
            found.map(|request| request.map(|r| (r.op, r.fua)))
        };
        assert_eq!(kinds("RSM"), [None, Some((IoOp::Read, false))]);
        assert_eq!(kinds("WS"), [None, Some((IoOp::Write, false))]);
        assert_eq!(kinds("WFSM"), [None, Some((IoOp::Write, true))]);
        assert_eq!(kinds("FWS"), [Some((IoOp::Flush, false)), Some((IoOp::Write, false))]);
        assert_eq!(kinds("FWFS"), [Some((IoOp::Flush, false)), Some((IoOp::Write, true))]);
        assert_eq!(kinds("DS"), [None, Some((IoOp::Discard, false))]);
        assert_eq!(kinds("FN"), [Some((IoOp::Flush, false)), None]);
        assert_eq!(kinds("N"), [None, None]);
        let bare = rwbs(1, "FWS", ByteRange::default()).expect("a bare flush");
        assert_eq!(bare, [Some(TraceRequest::flush(1)), None]);
        for wrong in ["", "S", "read", "Q"] {
            assert!(rwbs(1, wrong, range).expect_err(wrong).contains(wrong));
        }
    }
}
