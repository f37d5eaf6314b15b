//! One connection: handshake, then transmission, with or without TLS.

use std::sync::Arc;

use forebay_block::{BufPool, Completion, Outbox, Session};

use crate::agreed::Agreed;
use crate::handshake::{Agreement, Handshake, Next};
use crate::server::Shared;
use crate::tls::TlsLayer;
use crate::transmission::Transmission;

/// The session given to the event loop: the protocol, and TLS around it once started.
pub(crate) struct NbdSession {
    protocol: Protocol,
    tls: Option<Box<TlsLayer>>,
}

impl NbdSession {
    pub fn new(shared: Arc<Shared>, pool: BufPool) -> Self {
        let handshake = Handshake::new(Arc::clone(&shared));
        Self { protocol: Protocol::new(shared, pool, handshake), tls: None }
    }

    /// A session that refuses every option with `why`.
    pub fn refusing(shared: Arc<Shared>, pool: BufPool, why: &'static str) -> Self {
        let handshake = Handshake::refusing(Arc::clone(&shared), why);
        Self { protocol: Protocol::new(shared, pool, handshake), tls: None }
    }

    /// A session that goes on with a connection of another server, as that has agreed with the
    /// client; `None` if the export is no longer as the client knows it.
    pub fn resumed(shared: Arc<Shared>, pool: BufPool, agreed: &str) -> Option<Self> {
        let agreement = Agreed::parse(agreed)?.agreement(&shared.exports)?;
        let mut session = Self::new(shared, pool);
        session.protocol.transmit(agreement);
        Some(session)
    }

    /// Starts TLS around the connection. A client waits for the answer to `STARTTLS` before it
    /// sends anything else, so bytes received together with the option were injected, and end the
    /// connection.
    fn start_tls(&mut self, injected: usize, out: &mut Outbox) {
        if injected > 0 {
            out.why = Some(format!("{injected} bytes came in plain text behind STARTTLS"));
            self.protocol.die(out);
            return;
        }
        match TlsLayer::new(&self.protocol.shared.tls) {
            Ok(tls) => {
                self.protocol.enter_tls();
                self.tls = Some(Box::new(tls));
            }
            Err(error) => {
                out.why = Some(format!("TLS cannot be started: {error}"));
                self.protocol.die(out);
            }
        }
    }
}

impl Session for NbdSession {
    fn start(&mut self, out: &mut Outbox) {
        if self.is_negotiating() {
            Handshake::greet(&mut out.bytes);
        }
    }

    fn receive(&mut self, bytes: &[u8], out: &mut Outbox) -> usize {
        if let Some(tls) = &mut self.tls {
            return tls.receive(&mut self.protocol, bytes, out);
        }
        let used = self.protocol.receive(bytes, out);
        if self.protocol.take_starts_tls() {
            self.start_tls(bytes.len() - used, out);
            return bytes.len();
        }
        used
    }

    fn complete(&mut self, done: Completion, out: &mut Outbox) {
        match &mut self.tls {
            Some(tls) => tls.complete(&mut self.protocol, done, out),
            None => self.protocol.complete(done, out),
        }
    }

    fn speak(&mut self, out: &mut Outbox) {
        match &mut self.tls {
            Some(tls) => tls.speak(&mut self.protocol, out),
            None => self.protocol.speak(out),
        }
    }

    fn has_more_to_say(&self) -> bool {
        self.protocol.has_more_to_say()
    }

    fn next_turn(&mut self) -> bool {
        match &mut self.protocol.phase {
            Phase::Handshake(_) => false,
            Phase::Transmission(transmission) => transmission.next_turn(),
        }
    }

    fn wants_input(&self) -> bool {
        self.protocol.wants_input()
    }

    fn is_negotiating(&self) -> bool {
        matches!(self.protocol.phase, Phase::Handshake(_))
    }

    fn certificate_names(&self) -> Vec<String> {
        self.tls.as_ref().map_or_else(Vec::new, |tls| tls.peer_names())
    }

    fn in_flight(&self) -> usize {
        self.protocol.in_flight()
    }

    fn memory(&self) -> u64 {
        self.protocol.transmission().map_or(0, Transmission::memory)
    }

    fn wants_memory(&self) -> Option<u64> {
        self.protocol.transmission().and_then(Transmission::wants_memory)
    }

    fn allow_memory(&mut self, bytes: u64, out: &mut Outbox) {
        self.protocol.allow_memory(bytes);
        if let Some(tls) = &mut self.tls {
            tls.go_on(&mut self.protocol, out);
        }
    }

    fn is_owed(&self) -> bool {
        self.protocol.transmission().is_some_and(Transmission::is_owed)
    }

    fn hold(&mut self) -> bool {
        match &mut self.protocol.phase {
            // Another server would not know the keys of a TLS connection.
            Phase::Transmission(transmission) if self.tls.is_none() => transmission.hold(),
            _ => false,
        }
    }

    fn agreed(&self) -> Option<String> {
        let transmission = self.protocol.transmission().filter(|_| self.tls.is_none())?;
        let agreement = transmission.held()?;
        Some(Agreed::of(agreement, &self.protocol.shared.exports).to_string())
    }

    fn shutdown(&mut self, out: &mut Outbox) {
        match &mut self.tls {
            Some(tls) => tls.shutdown(&mut self.protocol, out),
            None => self.protocol.shutdown(out),
        }
    }
}

/// The protocol in plain text.
pub(crate) struct Protocol {
    shared: Arc<Shared>,
    pool: BufPool,
    phase: Phase,
    starts_tls: bool,
    /// Bytes of data that may be held.
    allowed: u64,
    /// Whether the connection has ended, so that nothing more is read or sent.
    dead: bool,
}

enum Phase {
    Handshake(Handshake),
    Transmission(Box<Transmission>),
}

impl Protocol {
    fn new(shared: Arc<Shared>, pool: BufPool, handshake: Handshake) -> Self {
        let phase = Phase::Handshake(handshake);
        Self { shared, pool, phase, starts_tls: false, allowed: u64::MAX, dead: false }
    }

    /// Consumes bytes of `bytes`; returns the number consumed.
    pub fn receive(&mut self, bytes: &[u8], out: &mut Outbox) -> usize {
        let mut used = 0;
        while !self.dead {
            match &mut self.phase {
                Phase::Transmission(transmission) => {
                    match transmission.receive(&bytes[used..], out) {
                        Ok(more) => return used + more,
                        Err(error) => {
                            out.why = Some(format!("it sent no request: {error}"));
                            self.die(out);
                        }
                    }
                }
                Phase::Handshake(handshake) => {
                    let (more, next) = handshake.receive(&bytes[used..], &mut out.bytes);
                    used += more;
                    match next {
                        Next::Options => return used,
                        Next::Transmit(agreement) => self.transmit(agreement),
                        Next::Close(why) => {
                            out.why = why;
                            self.die(out);
                        }
                        Next::StartTls => {
                            self.starts_tls = true;
                            return used;
                        }
                    }
                }
            }
        }
        bytes.len()
    }

    fn transmit(&mut self, agreement: Agreement) {
        let info = self.shared.exports[agreement.export].info.clone();
        let (limits, pool) = (self.shared.limits, self.pool.clone());
        let mut transmission = Transmission::new(agreement, info, limits, pool);
        transmission.allow_memory(self.allowed);
        self.phase = Phase::Transmission(Box::new(transmission));
    }

    fn transmission(&self) -> Option<&Transmission> {
        match &self.phase {
            Phase::Handshake(_) => None,
            Phase::Transmission(transmission) => Some(transmission),
        }
    }

    fn allow_memory(&mut self, bytes: u64) {
        self.allowed = bytes;
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.allow_memory(bytes);
        }
    }

    /// Whether the client was just told to start TLS; true only once.
    fn take_starts_tls(&mut self) -> bool {
        std::mem::take(&mut self.starts_tls)
    }

    fn enter_tls(&mut self) {
        if let Phase::Handshake(handshake) = &mut self.phase {
            handshake.enter_tls();
        }
    }

    pub fn complete(&mut self, done: Completion, out: &mut Outbox) {
        let Phase::Transmission(transmission) = &mut self.phase else {
            unreachable!("requests are made only in the transmission phase");
        };
        transmission.complete(done, self.dead, out);
    }

    pub fn speak(&mut self, out: &mut Outbox) {
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.speak(out);
        }
    }

    fn has_more_to_say(&self) -> bool {
        match &self.phase {
            Phase::Handshake(_) => false,
            Phase::Transmission(transmission) => transmission.has_more_to_say(),
        }
    }

    /// Whether input would be processed.
    pub fn wants_input(&self) -> bool {
        match &self.phase {
            _ if self.dead => false,
            Phase::Handshake(_) => true,
            Phase::Transmission(transmission) => transmission.wants_input(),
        }
    }

    fn in_flight(&self) -> usize {
        match &self.phase {
            Phase::Handshake(_) => 0,
            Phase::Transmission(transmission) => transmission.in_flight(),
        }
    }

    pub fn shutdown(&mut self, out: &mut Outbox) {
        match &mut self.phase {
            Phase::Handshake(_) => self.die(out),
            Phase::Transmission(transmission) => transmission.stop(out),
        }
    }

    /// Ends the connection at once: the stream is no longer trustworthy, or has ended.
    pub fn die(&mut self, out: &mut Outbox) {
        self.dead = true;
        out.close = true;
        if let Phase::Transmission(transmission) = &mut self.phase {
            transmission.fall_silent();
        }
    }
}
