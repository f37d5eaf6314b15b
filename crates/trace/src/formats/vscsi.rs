//! CloudPhysics traces in the hypervisor's own format: records of 32 (version 1) or 40 bytes
//! (version 2), little-endian, without a header. The layout is that of libCacheSim's reader.
//!
//! ```text
//! version 1:  0 sequence u32 | 4 bytes u32 | 8 sg u32 | 12 command u16 | 14 version u16
//!            16 lbn u64 | 24 microseconds u64
//! version 2:  0 command u16 | 2 version u16 | 4 sequence u32 | 8 bytes u32 | 12 sg u32
//!            16 lbn u64 | 24 microseconds u64 | 32 response time u64
//! ```
//! The version is the upper byte of its field; blocks are 512 bytes.

use super::Format;
use super::text::{bytes, scsi, sectors};
use crate::request::TraceRequest;

/// Length of a record of version 1 and of version 2, in bytes.
pub const RECORD_BYTES: [usize; 2] = [32, 40];
/// Records that must be plausible for a guess.
const LOOK: usize = 2;

fn field<const N: usize>(record: &[u8], at: usize) -> [u8; N] {
    let bytes = record.get(at..at + N).and_then(|bytes| bytes.first_chunk());
    *bytes.expect("a record is as long as its version says")
}

fn version(record: &[u8], at: usize) -> u8 {
    (u16::from_le_bytes(field(record, at)) >> 8) as u8
}

/// Guesses the version from the first bytes of a trace.
pub fn guess(head: &[u8]) -> Option<Format> {
    let fits = |number: u8, size: usize, version_at: usize, command_at: usize| {
        let records = head.chunks_exact(size).take(LOOK);
        let known = |record: &[u8]| {
            let command = u16::from_le_bytes(field(record, command_at));
            version(record, version_at) == number && u8::try_from(command).is_ok()
        };
        records.len() > 0 && records.clone().all(known)
    };
    if fits(2, 40, 2, 0) {
        Some(Format::Vscsi2)
    } else if fits(1, 32, 14, 12) {
        Some(Format::Vscsi1)
    } else {
        None
    }
}

/// Decodes a record of `format`'s length; `None` for a command without data.
pub fn record(format: Format, record: &[u8]) -> Result<Option<TraceRequest>, String> {
    let [command, version_at, len] = if format == Format::Vscsi2 { [0, 2, 8] } else { [12, 14, 4] };
    let wanted = if format == Format::Vscsi2 { 2 } else { 1 };
    let found = version(record, version_at);
    if found != wanted {
        return Err(format!("a record of version {found} instead of {wanted}"));
    }
    let command = u16::from_le_bytes(field(record, command));
    let Ok(code) = u8::try_from(command) else {
        return Err(format!("command {command:#x} is no SCSI operation code"));
    };
    let Some(op) = scsi(code) else { return Ok(None) };
    let lbn = u64::from_le_bytes(field(record, 16));
    let micros = u64::from_le_bytes(field(record, 24));
    let nanos = micros.checked_mul(1000).ok_or_else(|| format!("time {micros} is too large"))?;
    let len = u64::from(u32::from_le_bytes(field(record, len)));
    let range = bytes(sectors(lbn, 0)?.offset, len)?;
    Ok(Some(TraceRequest { nanos, op, fua: false, range }))
}
