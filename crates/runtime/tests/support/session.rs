//! A session that a test controls through a channel.

use std::sync::mpsc::Sender;

use forebay_block::{Completion, Endpoint, Io, Outbox, Session};

/// It sends a script of requests at once, in order, and passes on the answers.
pub struct Scripted {
    pub script: Vec<Io>,
    pub answers: Sender<Completion>,
    pub in_flight: usize,
}

impl Session for Scripted {
    fn start(&mut self, out: &mut Outbox) {
        self.in_flight = self.script.len();
        out.ios.extend(self.script.drain(..).map(|io| (Endpoint(0), io)));
    }

    fn receive(&mut self, bytes: &[u8], _: &mut Outbox) -> usize {
        bytes.len()
    }

    fn complete(&mut self, done: Completion, _: &mut Outbox) {
        self.in_flight -= 1;
        let _ = self.answers.send(done);
    }

    fn wants_input(&self) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn shutdown(&mut self, _: &mut Outbox) {}
}
