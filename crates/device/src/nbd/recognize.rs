//! Whether the export behind a new connection is the previous one: places whose content is on
//! record are read before the connection is used. Another export of the same size at the same
//! address would otherwise be mixed with the one that is cached.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant as Wall};

use forebay_block::{Completion, Instant, Io, IoBuf, IoTag};
use forebay_codec::crc32c;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::handshake::Connection;
use super::session::Session;
use super::terms::Terms;
use crate::error::OpenError;
use crate::layer::watch::{Recorded, Watch};

/// Most places that are read: few enough that a disk answers at once.
const PLACES_MAX: usize = 32;
/// Longest place that is read, in bytes.
const PLACE_LEN_MAX: u64 = 4 << 10;
/// Time limit for all reads together: that of a server that gets requests.
const PATIENCE: Duration = Duration::from_secs(60);
/// Size of the receive buffer, in bytes.
const RECEIVE_BYTES: usize = 64 << 10;

/// Compares the export behind a new connection with what is on record of it. Places that cannot be
/// read, or that are taken off the record meanwhile, tell nothing.
///
/// # Errors
/// If a place has other content, or the server does not answer.
pub(super) fn recognize(
    uri: &str,
    connection: &Connection,
    record: &Watch,
) -> Result<(), OpenError> {
    let places = chosen(record.recorded());
    let found = read(&connection.socket, connection.terms, &places)
        .map_err(|error| OpenError::system(format!("cannot read {uri}"), error))?;
    for Completion { tag, buf, result, .. } in found {
        let place = &places[usize::try_from(tag.0).expect("tags are those given")];
        if result.is_ok() && crc32c(&buf) != place.sum && record.has(place) {
            let reason = format!(
                "is not used: its content at {} is not what it was. Another export is at this \
                 address, or somebody else has changed it. Bring the previous export back; or \
                 start again, and see what the start says",
                place.range.offset
            );
            return Err(OpenError::unfit(uri, reason));
        }
    }
    Ok(())
}

/// Some of the short places, evenly chosen.
fn chosen(mut places: Vec<Recorded>) -> Vec<Recorded> {
    places.retain(|place| place.range.len <= PLACE_LEN_MAX);
    let step = places.len().div_ceil(PLACES_MAX).max(1);
    places.into_iter().step_by(step).collect()
}

/// Reads the places over a connection that nobody uses yet. The tags are their indexes.
fn read(socket: &OwnedFd, terms: Terms, places: &[Recorded]) -> io::Result<Vec<Completion>> {
    let (mut session, mut done) = (Session::new(terms), Vec::new());
    for (tag, place) in places.iter().enumerate() {
        let len = usize::try_from(place.range.len).expect("a place is short");
        let io = Io::read(IoTag(tag as u64), place.range, IoBuf::zeroed(len));
        session.submit(Instant(0), io, &mut done);
    }
    let limit = Wall::now() + PATIENCE;
    let mut out = Vec::new();
    session.send(&mut out);
    set_socket_timeout(socket, Timeout::Send, Some(PATIENCE))?;
    let mut sent = 0;
    while sent < out.len() {
        sent += send(socket, &out[sent..], SendFlags::NOSIGNAL)?;
    }
    let (mut bytes, mut kept) = (vec![0; RECEIVE_BYTES], 0);
    while session.in_flight() > 0 {
        let left = limit.saturating_duration_since(Wall::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        set_socket_timeout(socket, Timeout::Recv, Some(left))?;
        let end = match recv(socket, &mut bytes[kept..], RecvFlags::empty()) {
            Ok((_, 0)) => return Err(io::ErrorKind::ConnectionAborted.into()),
            Ok((_, count)) => kept + count,
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(error) => return Err(error.into()),
        };
        let used = session.receive(&bytes[..end], &mut done).map_err(io::Error::other)?;
        bytes.copy_within(used..end, 0);
        kept = end - used;
    }
    if kept > 0 {
        return Err(io::Error::other("the server sent more than was asked for"));
    }
    set_socket_timeout(socket, Timeout::Send, None)?;
    set_socket_timeout(socket, Timeout::Recv, None)?;
    Ok(done)
}
