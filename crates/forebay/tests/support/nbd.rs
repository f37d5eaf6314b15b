//! A minimal NBD client for tests: one request at a time, and errors that contain the server's
//! answer.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const EXPORT_NAME: u32 = 1;
/// Fixed newstyle, and no zeros after the handshake.
const CLIENT_FLAGS: u32 = 3;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const FUA: u16 = 1;

/// A connection to an export.
pub struct Nbd<S = UnixStream> {
    stream: S,
    /// The export's size.
    pub size: u64,
}

impl Nbd {
    /// Connects to the export `name` at the Unix socket `path`.
    pub fn connect(path: &Path, name: &str) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        stream.set_write_timeout(Some(Duration::from_secs(30)))?;
        Self::choose(stream, name)
    }

    /// The same connection for another thread.
    pub fn twin(&self) -> io::Result<Self> {
        Ok(Self { stream: self.stream.try_clone()?, size: self.size })
    }
}

impl Nbd<TcpStream> {
    /// Connects to the export `name` at a TCP port of this host.
    pub fn connect_tcp(port: u16, name: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        stream.set_write_timeout(Some(Duration::from_secs(30)))?;
        Self::choose(stream, name)
    }
}

impl<S: Read + Write> Nbd<S> {
    /// Chooses the export `name` on a new connection.
    pub fn choose(mut stream: S, name: &str) -> io::Result<Self> {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting[8..16], OPTION_MAGIC);
        let mut choice = CLIENT_FLAGS.to_be_bytes().to_vec();
        choice.extend(OPTION_MAGIC);
        choice.extend(EXPORT_NAME.to_be_bytes());
        choice.extend((name.len() as u32).to_be_bytes());
        choice.extend(name.as_bytes());
        stream.write_all(&choice)?;
        let mut export = [0; 10];
        stream.read_exact(&mut export)?;
        let size = u64::from_be_bytes(export[..8].try_into().expect("eight bytes"));
        Ok(Self { stream, size })
    }

    /// Reads `buf.len()` bytes at `offset`.
    pub fn read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.send(READ, 0, offset, buf.len(), &[])?;
        self.take_reply()?;
        self.stream.read_exact(buf)
    }

    /// Reads `len` bytes at `offset` and discards them.
    pub fn read_and_forget(&mut self, offset: u64, len: u32) -> io::Result<()> {
        self.begin_read(offset, len)?;
        self.take_reply()?;
        let mut rest = (&mut self.stream).take(len.into());
        let count = io::copy(&mut rest, &mut io::sink())?;
        if count == u64::from(len) { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Writes `bytes` at `offset`; with `fua`, durable when this returns.
    pub fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        self.send(WRITE, u16::from(fua) * FUA, offset, bytes.len(), bytes)?;
        self.take_reply()
    }

    /// Discards `len` bytes at `offset`.
    pub fn trim(&mut self, offset: u64, len: u32) -> io::Result<()> {
        self.send(TRIM, 0, offset, len as usize, &[])?;
        self.take_reply()
    }

    /// Makes completed writes durable.
    pub fn flush(&mut self) -> io::Result<()> {
        self.send(FLUSH, 0, 0, 0, &[])?;
        self.take_reply()
    }

    /// Requests `len` bytes at `offset`, without receiving the answer.
    pub fn begin_read(&mut self, offset: u64, len: u32) -> io::Result<()> {
        self.send(READ, 0, offset, len as usize, &[])
    }

    /// Begins to write `len` bytes at `offset` by sending only the first of them.
    pub fn begin_write(&mut self, offset: u64, len: u32, first: &[u8]) -> io::Result<()> {
        self.send(WRITE, 0, offset, len as usize, first)
    }

    /// Sends these bytes, such as the rest of a write.
    pub fn send_raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Receives the answer to the oldest unanswered request, and its data.
    pub fn finish(&mut self, buf: &mut [u8]) -> io::Result<()> {
        self.take_reply()?;
        self.stream.read_exact(buf)
    }

    /// Receives these bytes of an answer as they come: its head has 16, before the data.
    pub fn take(&mut self, buf: &mut [u8]) -> io::Result<()> {
        self.stream.read_exact(buf)
    }

    fn send(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: usize,
        payload: &[u8],
    ) -> io::Result<()> {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(7u64.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend((len as u32).to_be_bytes());
        bytes.extend(payload);
        self.stream.write_all(&bytes)
    }

    fn take_reply(&mut self) -> io::Result<()> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(reply[..4], REPLY_MAGIC.to_be_bytes());
        match u32::from_be_bytes(reply[4..8].try_into().expect("four bytes")) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno as i32)),
        }
    }
}
