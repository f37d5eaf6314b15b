//! Orders of the gate of an ordered volume: destaging takes, writes or forgets a cut, and requests
//! whose answers were withheld are answered.

use forebay_block::{Instant, VolumeId};

use crate::Engine;
use crate::api::Effects;
use crate::api::cut::CutOrder;
use crate::request::op::Op;

impl Engine {
    pub(crate) fn follow_order(
        &mut self,
        now: Instant,
        volume: VolumeId,
        order: CutOrder,
        fx: &mut Effects,
    ) {
        self.cache.now = now;
        if self.cache.known_volume(volume).is_none() {
            return;
        }
        match order {
            CutOrder::Take(number) => self.destaging.cut_ordered(&mut self.cache, volume, number),
            CutOrder::Release(number) => self.give_answers(volume, number, fx),
            CutOrder::Write { number, last } => {
                self.give_answers(volume, number, fx);
                self.destaging.write_ordered(&mut self.cache, volume, number, last);
            }
            CutOrder::Abandon(number) => {
                self.give_answers(volume, number, fx);
                self.destaging.abandon_ordered(&mut self.cache, volume, number);
            }
        }
        self.deliver(fx);
    }

    /// Gives the answers that were withheld since the shard took its part of a cut.
    fn give_answers(&mut self, volume: VolumeId, number: u64, fx: &mut Effects) {
        for op in self.cache.volume_mut(volume).order.release(number) {
            match self.requests.get(op) {
                Op::Flush(_) => self.requests.flush_part_done(&mut self.cache, op, Ok(()), fx),
                Op::Write(_) => self.requests.end_write(&mut self.cache, op, Ok(()), fx),
                Op::Read(_) => unreachable!("answers to reads are not withheld"),
            }
        }
    }
}
