//! From an address to a connection ready for requests: connect, negotiate, choose the export.
//!
//! Blocking, with one deadline for everything, on a thread that may block: the one that opens a
//! device, or one that reconnects. Answers of a server are bounded in number and length.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use forebay_nbd_wire::{
    ClientFlags, ExportReply, Greeting, HandshakeFlags, Info, InfoKind, InfoRequest, OptionCode,
    OptionHeader, OptionReplyHeader, OptionReplyKind, PAYLOAD_MAX, STRING_MAX, TransmissionFlags,
    WireError,
};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::terms::Terms;
use crate::error::OpenError;

/// Time limit for connecting and negotiating together, unless a caller has less.
pub const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// Maximum length of an answer to an option, in bytes.
const ANSWER_MAX: u32 = 2 * STRING_MAX as u32;
/// Maximum number of answers to one option.
const ANSWERS_MAX: usize = 64;

/// The address of a server, and the name of an export.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    /// For messages.
    pub(crate) uri: String,
    pub(crate) peer: Peer,
    /// Name of the export; empty for the default one.
    pub(crate) export: String,
}

impl Address {
    /// The identity of the device. The default port is left out, so that it is the same with and
    /// without it.
    pub(crate) fn identity(&self) -> String {
        self.uri.replacen(":10809/", "/", 1)
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Peer {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// A connection in the transmission phase.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) terms: Terms,
}

/// Connects and negotiates in at most this time.
pub(super) fn connect(address: &Address, patience: Duration) -> Result<Connection, OpenError> {
    let deadline = Instant::now() + patience;
    let refused = |error: Failure| match error {
        Failure::System(error) => {
            let error = match error.kind() {
                io::ErrorKind::WouldBlock => io::Error::from(io::ErrorKind::TimedOut),
                // A proxy does so whose server is gone.
                io::ErrorKind::UnexpectedEof => {
                    io::Error::new(io::ErrorKind::ConnectionAborted, "the server hung up")
                }
                _ => error,
            };
            OpenError::system(format!("cannot connect to {}", address.uri), error)
        }
        Failure::Answer(reason) => OpenError::Refused { peer: address.uri.clone(), reason },
    };
    let mut stream = dial(&address.peer, deadline).map_err(|e| refused(e.into()))?;
    let terms = negotiate(&mut stream, &address.export).map_err(refused)?;
    stream.unhurried().map_err(|e| refused(e.into()))?;
    Ok(Connection { socket: stream.into_socket(), terms })
}

fn dial(peer: &Peer, deadline: Instant) -> io::Result<Timed> {
    let socket = match peer {
        Peer::Unix(path) => Socket::Unix(dial_unix(path, deadline)?),
        Peer::Tcp { host, port } => {
            let mut refusal = io::Error::other("the name has no address");
            let mut found = None;
            let addresses = resolve(host, *port, deadline)?;
            for (tried, address) in addresses.iter().enumerate() {
                // One that does not answer leaves time for those after it.
                let share =
                    time_left(deadline)? / u32::try_from(addresses.len() - tried).unwrap_or(1);
                match TcpStream::connect_timeout(address, share) {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        found = Some(stream);
                        break;
                    }
                    Err(error) => refusal = error,
                }
            }
            Socket::Tcp(found.ok_or(refusal)?)
        }
    };
    Ok(Timed { socket, deadline })
}

/// Connects like [`UnixStream::connect`], but not for ever: a server that does not run takes no
/// connection, and when its backlog is full, the kernel waits.
fn dial_unix(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(time_left(deadline)?))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// The addresses of a name. The name service has its own limits, so it is asked by another thread.
fn resolve(host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let (tell, hear) = mpsc::channel();
    let host = host.to_owned();
    thread::Builder::new().name("nbd-resolve".to_owned()).spawn(move || {
        let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect);
        let _ = tell.send(found);
    })?;
    let found = hear.recv_timeout(time_left(deadline)?);
    // After a boot the name service may come later than this server.
    let unknown = |error| io::Error::new(io::ErrorKind::HostUnreachable, error);
    found.map_err(|_| io::ErrorKind::TimedOut)?.map_err(unknown)
}

fn negotiate(stream: &mut (impl Read + Write), export: &str) -> Result<Terms, Failure> {
    let mut greeting = [0; Greeting::BYTES];
    stream.read_exact(&mut greeting)?;
    let offered = Greeting::decode(&greeting)?.flags;
    if !offered.has(HandshakeFlags::FIXED_NEWSTYLE) {
        return Err(Failure::Answer("the server is too old: no fixed newstyle".to_owned()));
    }
    let no_zeroes = offered.has(HandshakeFlags::NO_ZEROES);
    let flags = ClientFlags::FIXED_NEWSTYLE.with_if(no_zeroes, ClientFlags::NO_ZEROES);
    stream.write_all(&flags.encode())?;

    send_option(stream, OptionCode::STRUCTURED_REPLY, &[])?;
    let kind = answers(stream, OptionCode::STRUCTURED_REPLY, |_| Ok(()))?.0;
    let structured = kind == OptionReplyKind::ACK;

    let mut terms = Terms {
        size: 0,
        flags: TransmissionFlags::NONE,
        structured,
        minimum: 1,
        preferred: 4096,
        maximum: PAYLOAD_MAX,
    };
    let mut request = Vec::new();
    InfoRequest::encode(export, &[InfoKind::BLOCK_SIZE], &mut request);
    send_option(stream, OptionCode::GO, &request)?;
    let mut told = false;
    let (kind, message) = answers(stream, OptionCode::GO, |data| {
        match Info::decode(data)? {
            Info::Export { size, flags } => {
                (terms.size, terms.flags, told) = (size, flags, true);
            }
            Info::BlockSize { minimum, preferred, maximum } => {
                (terms.minimum, terms.preferred, terms.maximum) = (minimum, preferred, maximum);
            }
            _ => {}
        }
        Ok(())
    })?;
    match kind {
        OptionReplyKind::ACK if told => Ok(terms),
        OptionReplyKind::ACK => {
            Err(Failure::Answer("the server did not send the export's size".to_owned()))
        }
        OptionReplyKind::ERR_UNSUP => export_name(stream, export, no_zeroes, terms),
        OptionReplyKind::ERR_UNKNOWN => {
            Err(Failure::Answer(format!("the server has no export {export:?}")))
        }
        OptionReplyKind::ERR_TLS_REQD => Err(Failure::Answer(
            "the server wants TLS, which this client does not speak".to_owned(),
        )),
        other => Err(Failure::Answer(format!("the server refused the export: {other} {message}"))),
    }
}

/// Chooses the export as old servers require; they close the connection if they have no such
/// export.
fn export_name(
    stream: &mut (impl Read + Write),
    export: &str,
    no_zeroes: bool,
    terms: Terms,
) -> Result<Terms, Failure> {
    send_option(stream, OptionCode::EXPORT_NAME, export.as_bytes())?;
    let mut reply = [0; ExportReply::BYTES];
    stream.read_exact(&mut reply)?;
    if !no_zeroes {
        stream.read_exact(&mut [0; ExportReply::ZEROES])?;
    }
    let ExportReply { size, flags } = ExportReply::decode(&reply);
    Ok(Terms { size, flags, ..terms })
}

fn send_option(stream: &mut impl Write, code: OptionCode, data: &[u8]) -> io::Result<()> {
    let len = u32::try_from(data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let header = OptionHeader { code, len }.encode();
    stream.write_all(&[&header[..], data].concat())
}

/// Reads all answers to an option and passes the data of each to `take`. Returns the kind of the
/// last one, and the server's message if it was an error.
fn answers(
    stream: &mut impl Read,
    option: OptionCode,
    mut take: impl FnMut(&[u8]) -> Result<(), Failure>,
) -> Result<(OptionReplyKind, String), Failure> {
    for _ in 0..ANSWERS_MAX {
        let mut header = [0; OptionReplyHeader::BYTES];
        stream.read_exact(&mut header)?;
        let header = OptionReplyHeader::decode(&header)?;
        if header.option != option {
            let reason = format!("it answered {} when asked {option}", header.option);
            return Err(Failure::Answer(reason));
        }
        if header.len > ANSWER_MAX {
            return Err(Failure::Answer(format!("an answer of {} bytes is too long", header.len)));
        }
        let mut data = vec![0; header.len as usize];
        stream.read_exact(&mut data)?;
        if header.kind.is_final() {
            return Ok((header.kind, String::from_utf8_lossy(&data).into_owned()));
        }
        if header.kind == OptionReplyKind::INFO {
            take(&data)?;
        }
    }
    Err(Failure::Answer(format!("more than {ANSWERS_MAX} answers to one option")))
}

/// Why there is no connection.
#[derive(Debug)]
enum Failure {
    System(io::Error),
    Answer(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

impl From<WireError> for Failure {
    fn from(error: WireError) -> Self {
        Self::Answer(format!("not the NBD protocol: {error}"))
    }
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A socket whose reads and writes fail after the deadline.
struct Timed {
    socket: Socket,
    deadline: Instant,
}

impl Timed {
    fn hurry(&self, left: Option<Duration>) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(s) => s.set_read_timeout(left).and_then(|()| s.set_write_timeout(left)),
            Socket::Unix(s) => s.set_read_timeout(left).and_then(|()| s.set_write_timeout(left)),
        }
    }

    /// Removes the time limits.
    fn unhurried(&self) -> io::Result<()> {
        self.hurry(None)
    }

    fn into_socket(self) -> OwnedFd {
        match self.socket {
            Socket::Tcp(stream) => stream.into(),
            Socket::Unix(stream) => stream.into(),
        }
    }
}

impl Read for Timed {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.hurry(Some(time_left(self.deadline)?))?;
        match &mut self.socket {
            Socket::Tcp(stream) => stream.read(buf),
            Socket::Unix(stream) => stream.read(buf),
        }
    }
}

impl Write for Timed {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.hurry(Some(time_left(self.deadline)?))?;
        match &mut self.socket {
            Socket::Tcp(stream) => stream.write(buf),
            Socket::Unix(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}
