//! Traces as comma-separated values: Forebay's format, and those of MSR Cambridge (Narayanan,
//! Donnelly and Rowstron, FAST 2008) and CloudPhysics (Waldspurger et al., FAST 2015).

use forebay_block::IoOp;

use super::text::{bytes, number, rwbs, scsi, seconds, sectors};
use crate::request::TraceRequest;

/// The header line of Forebay's format.
pub const HEADER: &str = "t_us,rwbs,sector,nsect";
/// The header line that the CloudPhysics format may have.
const CLOUDPHYSICS_HEADER: &str = "version,time,op,size,lbn";

/// The requests in a line: at most a flush and one request after it.
pub type Found = [Option<TraceRequest>; 2];

/// Splits a line into its fields; an error if their number is not `N`.
fn fields<const N: usize>(line: &str) -> Result<[&str; N], String> {
    let mut all = line.split(',');
    let mut fields = [""; N];
    for (at, field) in fields.iter_mut().enumerate() {
        *field = all.next().ok_or_else(|| format!("{at} fields instead of {N}: {line:?}"))?;
    }
    match all.count() {
        0 => Ok(fields),
        more => Err(format!("{} fields instead of {N}: {line:?}", N + more)),
    }
}

fn are_numbers(line: &str, count: usize, at: &[usize]) -> bool {
    let fields: Vec<&str> = line.split(',').collect();
    fields.len() == count && at.iter().all(|&at| fields[at].trim().parse::<f64>().is_ok())
}

/// Whether a trace with this first line is in Forebay's CSV format.
pub fn is_csv(line: &str) -> bool {
    line == HEADER || are_numbers(line, 4, &[0, 2, 3])
}

/// Whether a trace with this first line is in MSR's format.
pub fn is_msr(line: &str) -> bool {
    line.starts_with("Timestamp,Hostname") || are_numbers(line, 7, &[0, 2, 4, 5])
}

/// Whether a trace with this first line is in the CloudPhysics format.
pub fn is_cloudphysics(line: &str) -> bool {
    line == CLOUDPHYSICS_HEADER || are_numbers(line, 5, &[0, 1, 3, 4])
}

/// Decodes a line of `t_us,rwbs,sector,nsect`; the header contains no request.
pub fn csv(line: &str) -> Result<Found, String> {
    if line == HEADER {
        return Ok([None, None]);
    }
    let [micros, letters, sector, count] = fields(line)?;
    let micros = number("time", micros)?;
    let nanos = micros.checked_mul(1000).ok_or_else(|| format!("time {micros} is too large"))?;
    let range = sectors(number("sector", sector)?, number("number of sectors", count)?)?;
    rwbs(nanos, letters.trim(), range)
}

/// Decodes lines of `timestamp,host,disk,type,offset,size,response`. Times are in units of 100 ns
/// since 1601; the reader subtracts the first.
#[derive(Debug, Default)]
pub struct Msr {
    disk: Option<(String, u64)>,
}

impl Msr {
    /// Decodes a line; a header contains no request. A trace covers one disk: a second one is an
    /// error.
    pub fn line(&mut self, line: &str) -> Result<Found, String> {
        if line.starts_with("Timestamp,Hostname") {
            return Ok([None, None]);
        }
        let [time, host, disk, kind, offset, size, _response] = fields(line)?;
        let ticks = number("timestamp", time)?;
        let disk = (host.to_owned(), number("disk number", disk)?);
        let known = self.disk.get_or_insert_with(|| disk.clone());
        if *known != disk {
            return Err(format!(
                "disk {} of {} after disk {} of {}; a trace is of one disk, so split it",
                disk.1, disk.0, known.1, known.0
            ));
        }
        let op = match kind.trim() {
            kind if kind.eq_ignore_ascii_case("read") => IoOp::Read,
            kind if kind.eq_ignore_ascii_case("write") => IoOp::Write,
            other => return Err(format!("the type {other:?} is neither Read nor Write")),
        };
        let range = bytes(number("offset", offset)?, number("size", size)?)?;
        let nanos = ticks.checked_mul(100);
        let nanos = nanos.ok_or_else(|| format!("the timestamp {ticks} is too large"))?;
        Ok([None, Some(TraceRequest { nanos, op, fua: false, range })])
    }
}

/// Decodes a line of `version,time,op,size,lbn`; the header and commands without data contain no
/// request.
pub fn cloudphysics(line: &str) -> Result<Found, String> {
    if line == CLOUDPHYSICS_HEADER {
        return Ok([None, None]);
    }
    let [_version, time, op, size, lbn] = fields(line)?;
    let nanos = seconds(time)?;
    let op = op.trim().trim_start_matches("0x");
    let code = u8::from_str_radix(op, 16)
        .map_err(|_| format!("the op {op:?} is not a SCSI operation code, as 2a"))?;
    let range = bytes(sectors(number("lbn", lbn)?, 0)?.offset, number("size", size)?)?;
    Ok([None, scsi(code).map(|op| TraceRequest { nanos, op, fua: false, range })])
}
