//! The connections of NBD clients, on their way from one server to the next.

use std::os::fd::AsFd;

use anyhow::Context;
use forebay_runtime::LeftClient;
use serde::{Deserialize, Serialize};

use crate::server::kept::{Kept, content, memory};

/// The beginning of the names under which the keeper holds a socket, and the bytes that were
/// received from it and not used.
const SOCKET: &str = "client ";
const INPUT: &str = "input ";

/// What the keeper holds with a socket.
#[derive(Serialize, Deserialize)]
struct Note {
    agreed: String,
    unix: bool,
    peer: String,
}

/// Leaves connections with the keeper.
///
/// # Errors
/// If the keeper is gone, or memory is short. The connections that were not left are closed.
pub fn leave(clients: Vec<LeftClient>, kept: &Kept) -> anyhow::Result<()> {
    for (number, client) in clients.into_iter().enumerate() {
        let LeftClient { socket, input, agreed, unix, peer } = client;
        let note = serde_json::to_string(&Note { agreed, unix, peer })?;
        if !input.is_empty() {
            kept.hold(&format!("{INPUT}{number}"), "", memory(INPUT, &input)?.as_fd())?;
        }
        kept.hold(&format!("{SOCKET}{number}"), &note, socket.as_fd())?;
    }
    Ok(())
}

/// Takes the connections that the server before has left.
///
/// # Errors
/// If what the keeper holds makes no sense.
pub fn take(kept: &mut Kept) -> anyhow::Result<Vec<LeftClient>> {
    let mut clients = Vec::new();
    for number in 0.. {
        let input = kept.take(&format!("{INPUT}{number}"));
        let Some(held) = kept.take(&format!("{SOCKET}{number}")) else { break };
        let note = serde_json::from_str(&held.note).context("a client that the keeper holds")?;
        let Note { agreed, unix, peer } = note;
        let input = input.map(|held| content(held.descriptor)).transpose()?.unwrap_or_default();
        clients.push(LeftClient { socket: held.descriptor, input, agreed, unix, peer });
    }
    Ok(clients)
}
