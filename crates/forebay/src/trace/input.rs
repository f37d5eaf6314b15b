//! A trace's file: opened, decompressed if needed, with progress by the bytes of the file.

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read};

use anyhow::Context;
use forebay_trace::TraceReader;
use indicatif::{ProgressBar, ProgressStyle};

use super::args::TraceInput;

/// The first bytes of a zstd frame.
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Size of a read, in bytes.
const BUFFER: usize = 256 << 10;

/// A trace being read.
pub type Reader = TraceReader<Box<dyn BufRead + Send>>;

/// Opens the trace; `what` names the action in the progress bar on standard error.
pub fn open(input: &TraceInput, what: &'static str) -> anyhow::Result<(Reader, ProgressBar)> {
    let path = &input.trace;
    let failed = || format!("cannot open the trace {}", path.display());
    let file = File::open(path).with_context(failed)?;
    let about = file.metadata().with_context(failed)?;
    anyhow::ensure!(!about.is_dir(), "{} is a directory; name the trace in it", path.display());
    let bar = bar(about.len(), what);
    let mut file = bar.wrap_read(file);
    let mut head = Vec::new();
    (&mut file).take(ZSTD.len() as u64).read_to_end(&mut head).with_context(failed)?;
    let packed = head == ZSTD;
    let whole = Cursor::new(head).chain(file);
    let bytes: Box<dyn BufRead + Send> = if packed {
        Box::new(BufReader::with_capacity(BUFFER, zstd::Decoder::new(whole).with_context(failed)?))
    } else {
        Box::new(BufReader::with_capacity(BUFFER, whole))
    };
    let reader = TraceReader::new(bytes, input.format).with_context(|| in_trace(input))?;
    Ok((reader, bar))
}

/// Names the trace that an error is about.
pub fn in_trace(input: &TraceInput) -> String {
    input.trace.display().to_string()
}

/// A progress bar over the bytes of the file; hidden if standard error is not a terminal.
fn bar(bytes: u64, what: &'static str) -> ProgressBar {
    let template = "{msg} {bar:40} {percent}%, {eta} left";
    let style = ProgressStyle::with_template(template).expect("the template is sound");
    ProgressBar::new(bytes).with_style(style).with_message(what)
}
