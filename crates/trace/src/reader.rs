//! A trace in any format, request by request.
//!
//! Times count from the first request and never go back: a request earlier than its predecessor
//! gets the predecessor's time. The reader needs memory for one line, record or chunk.

use std::io::{BufRead, Chain, Cursor, Read};

use forebay_block::{ByteRange, IoOp};

use crate::TraceError;
use crate::formats::blkparse::Blkparse;
use crate::formats::csv::{Found, Msr, cloudphysics, csv};
use crate::formats::iolog::Iolog;
use crate::formats::own::OwnReader;
use crate::formats::text::Lines;
use crate::formats::{Format, vscsi};
use crate::request::TraceRequest;

/// Bytes at the start from which the format is guessed.
const HEAD_BYTES: u64 = 4096;

/// Longest read or write, in bytes.
const DATA_MAX: u64 = 1 << 30;

type Input<R> = Chain<Cursor<Vec<u8>>, R>;

/// Reads a trace.
pub struct TraceReader<R> {
    format: Format,
    source: Source<Input<R>>,
    /// Requests of the last line that have not been returned yet.
    waiting: [Option<TraceRequest>; 2],
    first: Option<u64>,
    last: u64,
}

enum Source<R> {
    Own(R, OwnReader),
    Records { input: R, format: Format, offset: u64 },
    Lines(Lines<R>, Kind),
}

enum Kind {
    Csv,
    Msr(Msr),
    CloudPhysics,
    Blkparse(Blkparse),
    Iolog(Iolog),
}

impl<R: BufRead> TraceReader<R> {
    /// Begins to read `input`, in the given format or, without one, in the one guessed from its
    /// first bytes.
    ///
    /// # Errors
    /// If the input cannot be read, or its format is unknown.
    pub fn new(mut input: R, format: Option<Format>) -> Result<Self, TraceError> {
        let mut head = Vec::new();
        (&mut input).take(HEAD_BYTES).read_to_end(&mut head)?;
        let format = format.or_else(|| Format::guess(&head)).ok_or(TraceError::Unknown)?;
        let input = Cursor::new(head).chain(input);
        let lines = |input, kind| Source::Lines(Lines::new(input), kind);
        let source = match format {
            Format::Forebay => Source::Own(input, OwnReader::new()),
            Format::Vscsi1 | Format::Vscsi2 => Source::Records { input, format, offset: 0 },
            Format::Csv => lines(input, Kind::Csv),
            Format::Msr => lines(input, Kind::Msr(Msr::default())),
            Format::CloudPhysics => lines(input, Kind::CloudPhysics),
            Format::Blkparse => lines(input, Kind::Blkparse(Blkparse::default())),
            Format::Iolog => lines(input, Kind::Iolog(Iolog::default())),
        };
        Ok(Self { format, source, waiting: [None, None], first: None, last: 0 })
    }

    /// The trace's format.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// The volume's size according to the trace, known once the first request has been read.
    #[must_use]
    pub fn volume_size(&self) -> Option<u64> {
        match &self.source {
            Source::Own(_, own) => own.head.as_ref().map(|head| head.size),
            _ => None,
        }
    }

    /// Requests dropped during the recording, according to the part of the trace read so far.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        match &self.source {
            Source::Own(_, own) => own.dropped,
            _ => 0,
        }
    }

    /// The next request; `None` at the end.
    ///
    /// # Errors
    /// If the trace cannot be read any further; do not call it again then.
    pub fn next_request(&mut self) -> Result<Option<TraceRequest>, TraceError> {
        loop {
            let waiting = self.waiting[0].take().or_else(|| self.waiting[1].take());
            if let Some(request) = waiting {
                return Ok(Some(self.in_time(request)));
            }
            match self.read()? {
                Some(found) => self.waiting = found,
                None => return Ok(None),
            }
        }
    }

    /// Makes the request's time relative to the first one's, and never lets it go back. A flush
    /// covers the whole volume, whatever range it names.
    fn in_time(&mut self, mut request: TraceRequest) -> TraceRequest {
        if request.op == IoOp::Flush {
            request.range = ByteRange::default();
        }
        // Forebay's recordings count from their own start, not from their first request.
        let own = matches!(self.source, Source::Own(..));
        let first = *self.first.get_or_insert(if own { 0 } else { request.nanos });
        self.last = self.last.max(request.nanos.saturating_sub(first));
        request.nanos = self.last;
        request
    }

    fn read(&mut self) -> Result<Option<Found>, TraceError> {
        match &mut self.source {
            Source::Own(input, own) => {
                let Some(request) = own.next(input)? else { return Ok(None) };
                let found = check([None, Some(request)]);
                found.map(Some).map_err(|reason| TraceError::bytes(own.offset(), reason))
            }
            Source::Records { input, format, offset } => read_record(input, *format, offset),
            Source::Lines(lines, kind) => {
                let Some(line) = lines.next()? else { return Ok(None) };
                let found = match kind {
                    Kind::Csv => csv(line),
                    Kind::Msr(msr) => msr.line(line),
                    Kind::CloudPhysics => cloudphysics(line),
                    Kind::Blkparse(blkparse) => blkparse.line(line),
                    Kind::Iolog(iolog) => iolog.line(line),
                };
                let number = lines.number;
                let found = found.and_then(check);
                found.map(Some).map_err(|reason| TraceError::line(number, reason))
            }
        }
    }
}

/// Rejects requests that no client sends, which could keep a block-by-block user busy forever.
fn check(found: Found) -> Result<Found, String> {
    match found[1] {
        Some(request) if request.carries_data() && request.range.len > DATA_MAX => Err(format!(
            "a request of {} bytes; no client reads or writes more than {DATA_MAX} at once",
            request.range.len
        )),
        _ => Ok(found),
    }
}

fn read_record(
    input: &mut impl BufRead,
    format: Format,
    offset: &mut u64,
) -> Result<Option<Found>, TraceError> {
    let size = vscsi::RECORD_BYTES[usize::from(format == Format::Vscsi2)];
    let mut record = Vec::with_capacity(size);
    input.take(size as u64).read_to_end(&mut record)?;
    match record.len() {
        0 => Ok(None),
        len if len < size => {
            let reason = format!("it ends after {len} of the {size} bytes of a record");
            Err(TraceError::bytes(*offset, reason))
        }
        _ => {
            let found = vscsi::record(format, &record).and_then(|request| check([None, request]));
            let found = found.map_err(|reason| TraceError::bytes(*offset, reason))?;
            *offset += size as u64;
            Ok(Some(found))
        }
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_request().transpose()
    }
}
