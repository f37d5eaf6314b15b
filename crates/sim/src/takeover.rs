//! The server dies while its host runs on, and the next one does the requests that were under way:
//! the clients of a mount whose keeper starts the server again. Nothing that was answered may be
//! lost, flushed or not.

use std::collections::{BTreeMap, BTreeSet};

use forebay_block::{Io, IoBuf, IoOp};
use forebay_model::Model;

use crate::failure::Failure;
use crate::planted::Bug;
use crate::world::World;

/// Percentage of crashes in which only the server dies.
const DEATHS_PERCENT: u64 = 60;
/// The tags of answered requests that a planted bug does again.
const GHOSTS: u64 = 1 << 60;

/// The requests that a next server would get.
#[derive(Debug, Default)]
pub struct UnderWay {
    requests: BTreeMap<u64, Io>,
    /// The last write that was answered; kept for the bug that does it again.
    answered: Option<(usize, Io)>,
    ghosts: BTreeSet<u64>,
}

impl UnderWay {
    /// Notes a request.
    pub fn begin(&mut self, tag: u64, io: &Io) {
        self.requests.insert(tag, copy_of(io));
    }

    /// Notes the answer to a request; returns whether no client waits for it.
    pub fn end(&mut self, tag: u64, volume: usize) -> bool {
        if let Some(io) = self.requests.remove(&tag).filter(|io| io.op == IoOp::Write) {
            self.answered = Some((volume, io));
        }
        self.ghosts.remove(&tag)
    }
}

fn copy_of(io: &Io) -> Io {
    Io { tag: io.tag, op: io.op, range: io.range, flags: io.flags, buf: IoBuf::copy_of(&io.buf) }
}

impl World {
    /// Whether this crash is only the death of the server. Otherwise the clients are gone as well.
    pub(crate) fn only_dies(&mut self) -> bool {
        let dies = self.setup.takeover && self.rng.percent(DEATHS_PERCENT);
        if !dies {
            self.clients.clear();
            self.under_way = UnderWay::default();
            self.models.iter_mut().chain(self.alone.iter_mut().flatten()).for_each(Model::crash);
        }
        dies
    }

    /// The new server gets the requests that the one before it left.
    pub(crate) fn send_again(&mut self) -> Result<(), Failure> {
        let mut again: Vec<(u64, Io)> =
            self.under_way.requests.iter().map(|(&tag, io)| (tag, copy_of(io))).collect();
        if self.rng.percent(50) {
            again.reverse();
        }
        if self.mischief.interferes(Bug::RequestForgotten) {
            again.pop();
        }
        for (tag, io) in again {
            let volume = self.clients[&tag].volume;
            self.tally.taken_over += 1;
            self.models[volume].send_again(tag);
            self.submit(tag, volume, io)?;
        }
        if let Some((volume, mut io)) = self.under_way.answered.take()
            && self.mischief.interferes(Bug::WriteRepeated)
        {
            let tag = GHOSTS | io.tag.0;
            io.tag.0 = tag;
            self.under_way.ghosts.insert(tag);
            self.submit(tag, volume, io)?;
        }
        Ok(())
    }
}
