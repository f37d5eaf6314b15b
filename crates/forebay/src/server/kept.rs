//! What a server gets from its keeper, and leaves there for the next one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use anyhow::{Context, bail};
use rustix::fs::MemfdFlags;

use crate::keeper::{Line, Message};

/// The name of the configuration's text.
const CONFIGURATION: &str = "configuration";
/// The name under which every server leaves something.
const SERVED: &str = "served";

/// The line to the keeper, and what earlier servers have left there.
#[derive(Debug, Default)]
pub struct Kept {
    line: Option<Line>,
    held: BTreeMap<String, Held>,
}

/// A descriptor that an earlier server has left, and its note.
#[derive(Debug)]
pub struct Held {
    pub descriptor: OwnedFd,
    pub note: String,
}

impl Kept {
    /// Takes all that the keeper holds.
    ///
    /// # Errors
    /// If standard input is no line to a keeper, or the keeper is gone.
    pub fn receive() -> anyhow::Result<Self> {
        let line = Line::inherited().context("--kept is only for a server that has a keeper")?;
        let mut held = BTreeMap::new();
        loop {
            match line.receive().context("the line to the keeper")? {
                Some((Message::Held { name, note }, Some(descriptor))) => {
                    held.insert(name, Held { descriptor, note });
                }
                Some((Message::AllHeld, _)) => break,
                Some((message, _)) => bail!("the keeper sent {message:?}"),
                None => bail!("the keeper is gone"),
            }
        }
        Ok(Self { line: Some(line), held })
    }

    /// Whether there is a keeper.
    pub fn is_there(&self) -> bool {
        self.line.is_some()
    }

    /// Whether an earlier server of this keeper died after it had served.
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
        let Some(line) = &self.line else { return Ok(()) };
        let (name, note) = (name.to_owned(), note.to_owned());
        line.send(&Message::Held { name, note }, Some(descriptor))
    }

    /// The text of the configuration of the server that died: a file that was changed since then
    /// is none of a restart's business.
    pub fn configuration(&mut self) -> io::Result<Option<String>> {
        let Some(Held { descriptor, .. }) = self.take(CONFIGURATION) else { return Ok(None) };
        let file = File::from(descriptor);
        let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let mut text = vec![0; length];
        file.read_exact_at(&mut text, 0)?;
        String::from_utf8(text).map(Some).map_err(io::Error::other)
    }

    /// Leaves the text of the configuration; nothing if it came from flags, which stay the same.
    pub fn hold_configuration(&self, text: Option<&str>) -> io::Result<()> {
        let name = if text.is_some() { CONFIGURATION } else { SERVED };
        let mut file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
        file.write_all(text.unwrap_or_default().as_bytes())?;
        self.hold(name, "", file.as_fd())
    }

    /// Sends the keeper a message without a descriptor.
    ///
    /// # Errors
    /// If the keeper is gone.
    pub fn tell(&self, message: &Message) -> io::Result<()> {
        self.line.as_ref().map_or(Ok(()), |line| line.send(message, None))
    }
}
