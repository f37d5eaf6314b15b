//! The chunks of Forebay's own traces with valid checksums: entries of arbitrary bytes.
#![no_main]

use forebay_trace::{Format, TraceReader, TraceRequest, TraceWriter};
use libfuzzer_sys::fuzz_target;

/// Length of a chunk's header in bytes, and the number of bytes before those that its CRC covers.
const HEAD: usize = 32;
const COVERED_FROM: usize = 8;

fuzz_target!(|data: &[u8]| {
    let Some((&count, entries)) = data.split_first() else { return };
    let mut trace = Vec::new();
    let _ = TraceWriter::new("v", 1 << 30, 0, &mut trace);
    let at = trace.len();
    trace.extend(b"FBTC\0\0\0\0");
    trace.extend((entries.len() as u32).to_le_bytes());
    trace.extend(u32::from(count).to_le_bytes());
    trace.resize(at + HEAD, 0);
    trace.extend(entries);
    let crc = crc_fast::crc32_iscsi(&trace[at + COVERED_FROM..]);
    trace[at + 4..at + COVERED_FROM].copy_from_slice(&crc.to_le_bytes());
    let reader = TraceReader::new(&trace[..], Some(Format::Forebay)).expect("it can be begun");
    let read: Result<Vec<TraceRequest>, _> = reader.collect();
    if let Ok(requests) = read {
        assert_eq!(requests.len(), usize::from(count));
    }
});
