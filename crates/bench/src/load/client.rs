//! A load-generating client of NBD servers: connections in one thread, several requests in flight
//! on each. It is the same for every server, and does only the necessary work: answers are counted,
//! the data of reads is discarded.
//!
//! Sockets are nonblocking: a client that waits to send while the server waits to answer would
//! deadlock with it.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use forebay_nbd_wire::{
    ClientFlags, Command, CommandFlags, ExportReply, Greeting, HandshakeFlags, NbdError,
    OptionCode, OptionHeader, Request, SimpleReply,
};

/// Maximum number of bytes read from a socket at a time.
const READ_BYTES: usize = 1 << 20;
/// Offset of the error in a simple reply, after the magic number.
const ERROR_AT: usize = 4;

/// A connection in its transmission phase.
pub struct Connection {
    socket: UnixStream,
    /// Size of the export, in bytes.
    pub size: u64,
    /// Encoded requests; the ones from `sent` on are not sent yet.
    output: Vec<u8>,
    sent: usize,
    input: Box<[u8]>,
    filled: usize,
    /// Bytes of read data still to be received and discarded.
    skip: usize,
    /// For each cookie in use, the length of its answer's data, in bytes.
    lens: Vec<u32>,
}

impl Connection {
    /// Connects and chooses the export `name`. Cookies will be below `depth`.
    pub fn open(path: &Path, name: &str, depth: usize) -> anyhow::Result<Self> {
        let at = path.display();
        let mut socket =
            UnixStream::connect(path).with_context(|| format!("connecting to {at}"))?;
        let size = negotiate(&mut socket, name)
            .with_context(|| format!("the handshake with {at}, export {name:?}"))?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            size,
            output: Vec::new(),
            sent: 0,
            input: vec![0; READ_BYTES].into_boxed_slice(),
            filled: 0,
            skip: 0,
            lens: vec![0; depth],
        })
    }

    /// Whether requests wait to be sent.
    pub fn wants_to_send(&self) -> bool {
        self.sent < self.output.len()
    }

    /// Appends a request to the output.
    pub fn push(&mut self, cookie: usize, command: Command, offset: u64, len: u32, data: &[u8]) {
        self.lens[cookie] = if command == Command::READ { len } else { 0 };
        let (flags, cookie) = (CommandFlags::NONE, cookie as u64);
        let request = Request { flags, command, cookie, offset, len };
        self.output.extend_from_slice(&request.encode());
        self.output.extend_from_slice(data);
    }

    /// Sends as much as the socket takes.
    pub fn send(&mut self) -> anyhow::Result<()> {
        while self.wants_to_send() {
            match self.socket.write(&self.output[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("sending to the server"),
            }
        }
        self.output.clear();
        self.sent = 0;
        Ok(())
    }

    /// Receives available bytes, and calls `answered` with the cookie of each complete answer.
    /// Returns false if nothing was available.
    pub fn receive(&mut self, mut answered: impl FnMut(usize)) -> anyhow::Result<bool> {
        match self.socket.read(&mut self.input[self.filled..]) {
            Ok(0) => bail!("the server hung up"),
            Ok(count) => self.filled += count,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(false),
                _ => return Err(error).context("receiving from the server"),
            },
        }
        let mut at = 0;
        loop {
            let skipped = self.skip.min(self.filled - at);
            at += skipped;
            self.skip -= skipped;
            if self.skip > 0 || self.filled - at < SimpleReply::BYTES {
                break;
            }
            let (error, cookie) = decode(&self.input[at..at + SimpleReply::BYTES])?;
            let Some(&len) = self.lens.get(cookie) else {
                bail!("the server answered a request {cookie} that was not sent");
            };
            at += SimpleReply::BYTES;
            ensure!(error == NbdError(0), "the server answered with the error {error}");
            // The data that follows counts as received: it is sent together with the reply.
            self.skip = len as usize;
            answered(cookie);
        }
        self.input.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(true)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn decode(bytes: &[u8]) -> anyhow::Result<(NbdError, usize)> {
    let number = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
    let error = NbdError(number(ERROR_AT));
    let cookie = u64::from(number(8)) << 32 | u64::from(number(12));
    let reply = SimpleReply { error, cookie };
    ensure!(reply.encode() == bytes, "the server does not speak in simple replies");
    Ok((error, usize::try_from(cookie)?))
}

fn negotiate(socket: &mut UnixStream, name: &str) -> anyhow::Result<u64> {
    let mut greeting = [0; Greeting::BYTES];
    socket.read_exact(&mut greeting)?;
    let offered = Greeting::decode(&greeting)?.flags;
    let wanted = HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES);
    ensure!(offered.has(wanted), "the server is too old");
    let flags = ClientFlags::FIXED_NEWSTYLE.with(ClientFlags::NO_ZEROES);
    socket.write_all(&flags.encode())?;
    let header = OptionHeader { code: OptionCode::EXPORT_NAME, len: u32::try_from(name.len())? };
    socket.write_all(&[&header.encode()[..], name.as_bytes()].concat())?;
    let mut reply = [0; ExportReply::BYTES];
    socket.read_exact(&mut reply)?;
    Ok(ExportReply::decode(&reply).size)
}
