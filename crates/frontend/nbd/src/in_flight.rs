//! The requests in flight. Each has an index in a table and is carried out in one or more pieces,
//! each a separate `Io`; the reply is made when the last piece is done.
//!
//! A piece lies within one stripe. So no lower layer has to split it again, and its buffer is never
//! larger than the ones that pools keep.

use forebay_block::{Completion, IoBuf, IoError, IoTag};

/// The properties of a request that its reply depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub cookie: u64,
    pub offset: u64,
    /// Total size of its buffers, in bytes.
    pub bytes: u32,
    pub returns_data: bool,
    pub fast_only: bool,
}

/// A request with outstanding pieces.
#[derive(Debug)]
struct Pending {
    asked: Asked,
    /// Number of outstanding pieces.
    left: usize,
    /// The error of the first piece that failed.
    error: Option<IoError>,
    /// The buffers of the completed pieces, if there are several.
    parts: Vec<IoBuf>,
}

/// A request whose last piece has completed.
pub(crate) struct Finished {
    pub asked: Asked,
    pub error: Option<IoError>,
    parts: Vec<IoBuf>,
    last: IoBuf,
}

impl Finished {
    /// The buffers of its pieces, in order.
    pub fn buffers(&self) -> &[IoBuf] {
        if self.parts.is_empty() { std::slice::from_ref(&self.last) } else { &self.parts }
    }

    /// The buffers of its pieces, in order, by value.
    pub fn into_buffers(self) -> Vec<IoBuf> {
        if self.parts.is_empty() { vec![self.last] } else { self.parts }
    }
}

/// All requests of a connection that are in flight.
#[derive(Default)]
pub(crate) struct InFlight {
    places: Vec<Option<Pending>>,
    free: Vec<usize>,
    requests: usize,
    pieces: usize,
}

impl InFlight {
    pub fn requests(&self) -> usize {
        self.requests
    }

    pub fn pieces(&self) -> usize {
        self.pieces
    }

    /// Adds a request of `pieces` pieces. Returns its index, for [`tag`].
    pub fn insert(&mut self, asked: Asked, pieces: usize) -> usize {
        let mut parts = Vec::new();
        if pieces > 1 {
            parts.resize_with(pieces, IoBuf::empty);
        }
        self.requests += 1;
        self.pieces += pieces;
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.places[place] = Some(Pending { asked, left: pieces, error: None, parts });
        place
    }

    /// Records the completion of a piece. Returns the request if it was the last piece.
    pub fn complete(&mut self, done: Completion) -> Option<Finished> {
        let (place, piece) = (done.tag.0 as u32 as usize, (done.tag.0 >> 32) as usize);
        let slot = &mut self.places[place];
        let request = slot.as_mut().expect("a completion names a request in flight");
        self.pieces -= 1;
        request.left -= 1;
        if let Err(error) = done.result {
            request.error.get_or_insert(error);
        }
        let mut last = done.buf;
        if let Some(part) = request.parts.get_mut(piece) {
            *part = std::mem::take(&mut last);
        }
        if request.left > 0 {
            return None;
        }
        self.requests -= 1;
        self.free.push(place);
        let Pending { asked, error, parts, .. } = slot.take()?;
        Some(Finished { asked, error, parts, last })
    }
}

/// The tag of a piece of the request at index `place`.
pub(crate) fn tag(place: usize, piece: usize) -> IoTag {
    IoTag((piece as u64) << 32 | place as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_block::{ErrorKind, Io};

    #[test]
    fn a_request_ends_with_its_last_piece_and_keeps_the_first_error() {
        let mut in_flight = InFlight::default();
        let asked = |cookie| {
            let (returns_data, fast_only) = (true, false);
            Asked { cookie, offset: 0, bytes: 3, returns_data, fast_only }
        };
        let one = in_flight.insert(asked(1), 1);
        let many = in_flight.insert(asked(2), 3);
        assert_eq!((in_flight.requests(), in_flight.pieces()), (2, 4));
        let mut done = |place, piece, result: Result<(), ErrorKind>| {
            let io = Io::write(tag(place, piece), 0, IoBuf::copy_of(&[piece as u8]));
            in_flight.complete(io.complete(result.map_err(Into::into)))
        };
        assert!(done(many, 2, Ok(())).is_none());
        assert!(done(many, 0, Err(ErrorKind::Corrupt)).is_none());
        let single = done(one, 0, Ok(())).unwrap();
        assert_eq!((single.asked.cookie, single.buffers().len()), (1, 1));
        let finished = done(many, 1, Err(ErrorKind::Media)).unwrap();
        let bytes: Vec<u8> = finished.buffers().iter().map(|buf| buf[0]).collect();
        assert_eq!(bytes, [0, 1, 2]);
        assert_eq!(finished.error.unwrap().kind(), ErrorKind::Corrupt);
        assert_eq!((in_flight.requests(), in_flight.pieces()), (0, 0));
        assert_eq!(in_flight.insert(asked(3), 1), many, "places are used again");
    }
}
