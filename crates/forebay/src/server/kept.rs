//! What a server gets from its keeper, and leaves there for the next one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::fs::MemfdFlags;

use crate::keeper::{Line, Message};

/// The name of the configuration's text.
pub const CONFIGURATION: &str = "configuration";
/// The name under which every server leaves something.
const SERVED: &str = "served";

/// The line to the keeper, and what earlier servers have left there.
#[derive(Debug, Default)]
pub struct Kept {
    line: Option<Arc<Line>>,
    /// It shall take over from a server that still serves.
    successor: bool,
    held: BTreeMap<String, Held>,
}

/// A descriptor that an earlier server has left, and its note.
#[derive(Debug)]
pub struct Held {
    pub descriptor: OwnedFd,
    pub note: String,
}

impl Kept {
    /// Takes all that the keeper holds, unless it is to be taken over from a server that serves.
    ///
    /// # Errors
    /// If standard input is no line to a keeper, or the keeper is gone.
    pub fn receive() -> anyhow::Result<Self> {
        let line = Line::inherited().context("--kept is only for a server that has a keeper")?;
        let mut kept = Self { line: Some(Arc::new(line)), ..Self::default() };
        kept.successor = kept.take_held()?;
        Ok(kept)
    }

    /// Takes all that the keeper holds. Returns true if it shall prepare to take over first.
    fn take_held(&mut self) -> anyhow::Result<bool> {
        let line = self.line.as_ref().context("there is no keeper")?;
        loop {
            match line.receive().context("the line to the keeper")? {
                Some((Message::Held { name, note }, Some(descriptor))) => {
                    self.held.insert(name, Held { descriptor, note });
                }
                Some((Message::AllHeld, _)) => return Ok(false),
                Some((Message::Prepare, _)) => return Ok(true),
                Some((Message::Unknown, _)) => {}
                Some((message, _)) => bail!("the keeper sent {message:?}"),
                None => bail!("the keeper is gone"),
            }
        }
    }

    /// Whether it shall take over from a server that still serves.
    pub fn is_successor(&self) -> bool {
        self.successor
    }

    /// Waits until the server before has left everything, and takes it.
    ///
    /// # Errors
    /// If the keeper is gone: the server before serves on.
    pub fn take_over(&mut self) -> anyhow::Result<()> {
        self.tell(&Message::Prepared { version: env!("CARGO_PKG_VERSION").to_owned() })?;
        self.take_held()?;
        Ok(())
    }

    /// Hands the keeper's messages to `take` from now on, on a thread of its own; `None` once the
    /// keeper is gone.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn listen(&self, take: impl Fn(Option<Message>) + Send + 'static) -> io::Result<()> {
        let Some(line) = self.line.clone() else { return Ok(()) };
        let listen = move || {
            while let Ok(Some((message, _))) = line.receive() {
                take(Some(message));
            }
            take(None);
        };
        std::thread::Builder::new().name("keeper".into()).spawn(listen)?;
        Ok(())
    }

    /// A handle to send messages from anywhere.
    pub fn line(&self) -> Option<Arc<Line>> {
        self.line.clone()
    }

    /// Whether there is a keeper.
    pub fn is_there(&self) -> bool {
        self.line.is_some()
    }

    /// Whether an earlier server of this keeper has served.
    pub fn is_restart(&self) -> bool {
        !self.held.is_empty()
    }

    /// Takes what was left under this name.
    pub fn take(&mut self, name: &str) -> Option<Held> {
        self.held.remove(name)
    }

    /// Leaves a descriptor for the next server.
    ///
    /// # Errors
    /// If the keeper is gone.
    pub fn hold(&self, name: &str, note: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.line.as_ref().map_or(Ok(()), |line| line.hold(name, note, descriptor))
    }

    /// The text of the configuration of the server that died: a file that was changed since then
    /// is none of a restart's business.
    pub fn configuration(&mut self) -> io::Result<Option<String>> {
        let Some(Held { descriptor, .. }) = self.take(CONFIGURATION) else { return Ok(None) };
        String::from_utf8(content(descriptor)?).map(Some).map_err(io::Error::other)
    }

    /// Sends the keeper a message without a descriptor.
    ///
    /// # Errors
    /// If the keeper is gone.
    pub fn tell(&self, message: &Message) -> io::Result<()> {
        self.line.as_ref().map_or(Ok(()), |line| line.send(message, None))
    }
}

/// Leaves the text of the configuration with the keeper, if there is one; nothing if it came from
/// flags, which stay the same.
///
/// # Errors
/// If it cannot be sent. A keeper that is gone needs nothing: it starts no other server.
pub fn hold_configuration(keeper: Option<&Line>, text: Option<&str>) -> io::Result<()> {
    let Some(keeper) = keeper else { return Ok(()) };
    let name = if text.is_some() { CONFIGURATION } else { SERVED };
    let file = memory(name, text.unwrap_or_default().as_bytes())?;
    match keeper.hold(name, "", file.as_fd()) {
        Err(error)
            if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
        {
            Ok(())
        }
        sent => sent,
    }
}

/// A file in memory with these bytes.
pub fn memory(name: &str, bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

/// The bytes of a file in memory.
pub fn content(descriptor: OwnedFd) -> io::Result<Vec<u8>> {
    let file = File::from(descriptor);
    let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}
