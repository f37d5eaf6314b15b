//! A client of an NBD server with one request at a time, which distinguishes an error of the server
//! from a broken connection.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use forebay_nbd_wire::{
    ClientFlags, Command, CommandFlags, ExportReply, Greeting, NbdError, OptionCode, OptionHeader,
    Request, SimpleReply,
};

/// Time limit for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why a request failed.
#[derive(Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The server answered with an error.
    Refused(NbdError),
    /// The connection broke.
    Gone(String),
    /// The server did not answer in time.
    Silent,
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(error) => write!(f, "the error {error}"),
            Self::Gone(why) => write!(f, "a broken connection: {why}"),
            Self::Silent => write!(f, "no answer in {} s", PATIENCE.as_secs()),
        }
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent,
            _ => Self::Gone(error.to_string()),
        }
    }
}

/// The outcome of a request.
pub type Answer<T> = Result<T, Trouble>;

/// A connection to an export.
pub struct Client {
    stream: UnixStream,
    cookie: u64,
}

impl Client {
    /// Connects to the export `name` at the socket `path`.
    pub fn connect(path: &Path, name: &str) -> Answer<Self> {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut [0; Greeting::BYTES])?;
        let flags = ClientFlags::FIXED_NEWSTYLE.with(ClientFlags::NO_ZEROES);
        let header = OptionHeader { code: OptionCode::EXPORT_NAME, len: name.len() as u32 };
        let hello = [&flags.encode()[..], &header.encode(), name.as_bytes()].concat();
        stream.write_all(&hello)?;
        stream.read_exact(&mut [0; ExportReply::BYTES])?;
        Ok(Self { stream, cookie: 0 })
    }

    /// Fills `buf` from `offset` on.
    pub fn read(&mut self, offset: u64, buf: &mut [u8]) -> Answer<()> {
        self.request(Command::READ, CommandFlags::NONE, offset, buf.len(), &[])?;
        Ok(self.stream.read_exact(buf)?)
    }

    /// Writes; with `fua`, the data is durable on return.
    pub fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Answer<()> {
        let flags = CommandFlags::NONE.with_if(fua, CommandFlags::FUA);
        self.request(Command::WRITE, flags, offset, bytes.len(), bytes)
    }

    /// Writes zeros.
    pub fn zero(&mut self, offset: u64, len: usize) -> Answer<()> {
        self.request(Command::WRITE_ZEROES, CommandFlags::NONE, offset, len, &[])
    }

    /// Makes completed writes durable.
    pub fn flush(&mut self) -> Answer<()> {
        self.request(Command::FLUSH, CommandFlags::NONE, 0, 0, &[])
    }

    fn request(
        &mut self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        len: usize,
        payload: &[u8],
    ) -> Answer<()> {
        self.cookie += 1;
        let cookie = self.cookie;
        let request = Request { flags, command, cookie, offset, len: len as u32 };
        self.stream.write_all(&request.encode())?;
        self.stream.write_all(payload)?;
        let mut reply = [0; SimpleReply::BYTES];
        self.stream.read_exact(&mut reply)?;
        let error = NbdError(u32::from_be_bytes([4, 5, 6, 7].map(|at| reply[at])));
        if (SimpleReply { error, cookie }).encode() != reply {
            return Err(Trouble::Gone("the answer is to something else".to_owned()));
        }
        if error == NbdError(0) { Ok(()) } else { Err(Trouble::Refused(error)) }
    }
}
