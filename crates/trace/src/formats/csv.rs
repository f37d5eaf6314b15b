//! Traces as comma-separated values: Forebay's, those of MSR Cambridge (Narayanan, Donnelly and
//! Rowstron, FAST 2008) and those of CloudPhysics (Waldspurger et al., FAST 2015).

use forebay_block::IoOp;

use super::text::{bytes, number, rwbs, scsi, seconds, sectors};
use crate::request::TraceRequest;

/// The head of Forebay's form.
pub const HEADER: &str = "t_us,rwbs,sector,nsect";
/// The head that the CloudPhysics form may have.
const CLOUDPHYSICS_HEADER: &str = "version,time,op,size,lbn";

/// What a line says: at most a flush and something after it.
pub type Found = [Option<TraceRequest>; 2];

/// The fields of a line, as many as the format has.
fn fields<const N: usize>(line: &str) -> Result<[&str; N], String> {
    let mut all = line.split(',');
    let mut fields = [""; N];
    for (at, field) in fields.iter_mut().enumerate() {
        *field = all.next().ok_or_else(|| format!("{at} fields where {N} should be: {line:?}"))?;
    }
    match all.count() {
        0 => Ok(fields),
        more => Err(format!("{} fields where {N} should be: {line:?}", N + more)),
    }
}

fn are_numbers(line: &str, count: usize, at: &[usize]) -> bool {
    let fields: Vec<&str> = line.split(',').collect();
    fields.len() == count && at.iter().all(|&at| fields[at].trim().parse::<f64>().is_ok())
}

/// Whether a first line is of Forebay's form.
pub fn is_csv(line: &str) -> bool {
    line == HEADER || are_numbers(line, 4, &[0, 2, 3])
}

/// Whether a first line is of MSR's form.
pub fn is_msr(line: &str) -> bool {
    line.starts_with("Timestamp,Hostname") || are_numbers(line, 7, &[0, 2, 4, 5])
}

/// Whether a first line is of the CloudPhysics form.
pub fn is_cloudphysics(line: &str) -> bool {
    line == CLOUDPHYSICS_HEADER || are_numbers(line, 5, &[0, 1, 3, 4])
}

/// A line of `t_us,rwbs,sector,nsect`; nothing for the head.
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

/// Lines of `timestamp,host,disk,type,offset,size,response`, times in units of 100 ns since 1601:
/// the reader subtracts the first.
#[derive(Debug, Default)]
pub struct Msr {
    disk: Option<(String, u64)>,
}

impl Msr {
    /// A line; nothing for the head. A trace is of one disk: another is an error.
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

/// A line of `version,time,op,size,lbn`; nothing for the head and for commands without data.
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
