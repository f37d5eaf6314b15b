//! The line between keeper and server: a pair of sockets for packets. A packet is one message, with
//! a descriptor if it needs one.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

/// Longest message, in bytes.
const BYTES_MAX: usize = 16 << 10;

/// A message, in either direction. Keeper and server may be of different versions after an upgrade:
/// messages are only added, and unknown ones are ignored.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum Message {
    /// A descriptor to be held under this name, and a note for whoever takes it. From the keeper:
    /// an earlier server has left it.
    Held { name: String, note: String },
    /// The keeper has sent all that it holds.
    AllHeld,
    /// Clients may write to a new cache from now on, which the program before could not use: that
    /// does not come back, even if this one ends before `Ready`.
    NoReturn,
    /// Clients are served. What earlier servers have left and this one has not is forgotten.
    Ready,
    /// The server stops in order: its end is no crash.
    Stopping,
    /// From the server: start the program that comes as a descriptor in its place.
    Upgrade(Upgrade),
    /// From the keeper, as the first message: check whether you could take over from the server,
    /// and wait.
    Prepare,
    /// The answer to `Prepare`, if it can.
    Prepared { version: String },
    /// The answer to `Prepare`, if it cannot; or why it could not start, before it ends.
    Unable { why: String },
    /// From the keeper: leave everything, and end.
    HandOver,
    /// From the keeper: the end of an upgrade.
    Upgraded(Outcome),
    /// A message of a later version.
    #[serde(other)]
    Unknown,
}

/// A wanted upgrade.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Upgrade {
    /// Chosen by the server that was asked.
    pub id: u64,
    /// The path of the program, for people.
    pub program: String,
    /// Once it serves, the program before does not come back: it could not use the cache.
    #[serde(default)]
    pub stays: bool,
}

/// How an upgrade ended.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Outcome {
    pub upgrade: Upgrade,
    /// Why the program before still serves; `None` after a success.
    pub why: Option<String>,
    /// The time for which clients waited, in seconds.
    pub pause: f64,
}

/// A message, and the descriptor that came with it.
pub type Received = (Message, Option<OwnedFd>);

/// One end of the line.
#[derive(Debug)]
pub struct Line(OwnedFd);

impl Line {
    /// Both ends of a new line; the second is for the server's standard input.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (keeper, server) = socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        Ok((Self(keeper), server))
    }

    /// The end that this process got from its keeper, as standard input.
    ///
    /// # Errors
    /// If standard input is something else.
    pub fn inherited() -> io::Result<Self> {
        let input = std::io::stdin().as_fd().try_clone_to_owned()?;
        if rustix::net::sockopt::socket_type(&input) != Ok(SocketType::SEQPACKET) {
            return Err(io::Error::other("standard input is not a keeper's; leave out --kept"));
        }
        Ok(Self(input))
    }

    /// Sends a message, with its descriptor.
    ///
    /// # Errors
    /// If the other end is gone, or the message is too long.
    pub fn send(&self, message: &Message, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > BYTES_MAX {
            return Err(io::Error::other("a message to the keeper is too long"));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.as_slice();
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let flags = SendFlags::NOSIGNAL;
        rustix::io::retry_on_intr(|| {
            sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags)
        })?;
        Ok(())
    }

    /// Sends a descriptor to be held, with its name and note.
    ///
    /// # Errors
    /// As for [`Line::send`].
    pub fn hold(&self, name: &str, note: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let (name, note) = (name.to_owned(), note.to_owned());
        self.send(&Message::Held { name, note }, Some(descriptor))
    }

    /// Waits for a message; `None` once the other end is gone.
    ///
    /// # Errors
    /// If the message is unknown.
    pub fn receive(&self) -> io::Result<Option<Received>> {
        let flags = RecvFlags::CMSG_CLOEXEC;
        let mut bytes = vec![0; BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = match rustix::io::retry_on_intr(|| {
            recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
        }) {
            Ok(received) => received,
            Err(Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if received.bytes == 0 {
            return Ok(None);
        }
        let cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
        let mut descriptor = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                descriptor = descriptors.last();
            }
        }
        if cut {
            return Err(io::Error::other("a message between keeper and server was cut"));
        }
        Ok(Some((serde_json::from_slice(&bytes[..received.bytes])?, descriptor)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn messages_arrive_whole_with_their_descriptors() {
        let (ours, theirs) = Line::pair().expect("a pair of sockets");
        let theirs = Line(theirs);
        let mut file = std::fs::File::from(
            rustix::fs::memfd_create("kept", rustix::fs::MemfdFlags::CLOEXEC).expect("memory"),
        );
        file.write_all(b"content").expect("it is written");
        let note = "\"{}\n".to_owned();
        let held = Message::Held { name: "a b".to_owned(), note };
        theirs.send(&held, Some(file.as_fd())).expect("it is sent");
        theirs.send(&Message::Ready, None).expect("it is sent");

        let (message, descriptor) = ours.receive().expect("sound").expect("a message");
        assert_eq!(message, held);
        let mut copy = std::fs::File::from(descriptor.expect("its descriptor"));
        let mut text = String::new();
        copy.rewind().expect("a file");
        copy.read_to_string(&mut text).expect("it is read");
        assert_eq!(text, "content");
        let (message, descriptor) = ours.receive().expect("sound").expect("a message");
        assert_eq!(message, Message::Ready);
        assert!(descriptor.is_none());
        let name = "n".repeat(BYTES_MAX);
        let long = Message::Held { name, note: String::new() };
        theirs.send(&long, None).expect_err("it is too long");

        drop(theirs);
        assert!(ours.receive().expect("sound").is_none());
        ours.send(&Message::AllHeld, None).expect_err("nobody is there");
    }

    #[test]
    fn messages_of_other_versions_are_known_as_such() {
        let (ours, theirs) = Line::pair().expect("a pair of sockets");
        let later = br#"{"message":"dance","steps":[1,2]}"#;
        rustix::net::send(&theirs, later, SendFlags::empty()).expect("it is sent");
        assert_eq!(ours.receive().expect("sound").expect("a message").0, Message::Unknown);
        let more = br#"{"message":"held","name":"a","note":"b","colour":"red"}"#;
        rustix::net::send(&theirs, more, SendFlags::empty()).expect("it is sent");
        let held = Message::Held { name: "a".to_owned(), note: "b".to_owned() };
        assert_eq!(ours.receive().expect("sound").expect("a message").0, held);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let (ours, theirs) = Line::pair().expect("a pair of sockets");
        rustix::net::send(&theirs, b"rubbish", SendFlags::empty()).expect("it is sent");
        ours.receive().expect_err("it is no message");
    }
}
