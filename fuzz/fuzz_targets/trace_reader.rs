//! Traces of every format: for any bytes, reading ends, with requests or with an error that names a
//! position. Requests read from Forebay's own format are written back to the same requests.
#![no_main]

use forebay_trace::{Format, TraceError, TraceReader, TraceRequest, TraceWriter};
use libfuzzer_sys::fuzz_target;

fn read(bytes: &[u8], format: Option<Format>) -> Result<Vec<TraceRequest>, TraceError> {
    TraceReader::new(bytes, format)?.collect()
}

fuzz_target!(|data: &[u8]| {
    let Some((&choice, bytes)) = data.split_first() else { return };
    let format = Format::NAMES.get(usize::from(choice)).map(|&(_, format)| format);
    match read(bytes, format) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(requests) => {
            assert!(requests.is_sorted_by_key(|request| request.nanos));
            let mut written = Vec::new();
            let mut writer = TraceWriter::new("v", 0, 0, &mut written);
            requests.iter().for_each(|request| writer.push(*request, &mut written));
            writer.finish(&mut written);
            assert_eq!(read(&written, None).expect("it was written just now"), requests);
        }
    }
});
