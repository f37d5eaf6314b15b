//! A shard that writes its own sectors and flushes them, over the runtime's real devices. Like the
//! engine, it considers a sector safe when a flush has succeeded that was requested after the
//! sector's write had completed; after a failed flush, its own or another's, no unflushed write is
//! safe.

use std::collections::BTreeMap;

use forebay_block::{ByteRange, Completion, Instant, Io, IoBuf, IoError, IoTag};
use forebay_block::{SECTOR_SIZE, SECTOR_SIZE as SECTOR, VolumeId};
use forebay_engine::{Request, RequestId, Target};
use forebay_runtime::{Devices, Message};
use forebay_volume::Coming;

use crate::rng::Rng;

/// The one device.
pub const TARGET: Target = Target::Primary(VolumeId(0));
/// Number of sectors of a shard.
pub const SECTORS: u64 = 6;

/// The state of a sector.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sector {
    /// The number last written to it.
    pub written: u64,
    /// The last number whose write completed, unless a failure has lost it since.
    pub completed: u64,
    /// The last number that is safe.
    pub safe: u64,
    busy: bool,
}

/// A shard under test.
pub struct Shard {
    /// Its devices.
    pub devices: Devices,
    /// Messages to it.
    pub inbox: Vec<Message>,
    /// The clients' flushes on their way to all shards.
    coming: Coming,
    /// Its sectors; the first one has number `first`.
    pub sectors: Vec<Sector>,
    /// Number of its first sector on the disk.
    pub first: u64,
    writes: BTreeMap<u64, (usize, u64)>,
    /// The writes that the flush in flight will make safe.
    flush: Option<(u64, Vec<u64>)>,
    tag: u64,
    stamp: u64,
    /// Number of flushes that succeeded, and that failed.
    pub flushes: [u64; 2],
    /// Failed flushes, its own and others', that it was told of.
    pub failures: u64,
}

impl Shard {
    /// A shard whose sectors hold zeros.
    pub fn new(devices: Devices, coming: Coming, first: u64) -> Self {
        Self {
            devices,
            coming,
            inbox: Vec::new(),
            sectors: vec![Sector::default(); SECTORS as usize],
            first,
            writes: BTreeMap::new(),
            flush: None,
            tag: 0,
            stamp: 0,
            flushes: [0; 2],
            failures: 0,
        }
    }

    /// Starts again after its process was killed, over new devices. What had not been flushed may
    /// be there or not.
    pub fn start_again(&mut self, devices: Devices, coming: Coming) {
        (self.devices, self.coming) = (devices, coming);
        self.inbox.clear();
        self.writes.clear();
        self.flush = None;
        for sector in &mut self.sectors {
            sector.busy = false;
            if sector.completed > sector.safe {
                sector.completed = 0;
            }
        }
    }

    /// A turn of its thread: completions, mail, then `wants` more requests. Messages for others go
    /// to `outgoing`. `deaf`: it does not listen to failures of others.
    pub fn turn(
        &mut self,
        now: Instant,
        (wants, deaf): (usize, bool),
        rng: &mut Rng,
        outgoing: &mut [Vec<Message>],
    ) {
        let (mut ends, mut read) = (Vec::new(), 0);
        self.devices.poll(now, outgoing, |_, done| ends.push(done));
        ends.into_iter().for_each(|done| self.ended(done));
        for message in std::mem::take(&mut self.inbox) {
            match message {
                Message::SendFlush(target) => self.devices.send_flush(now, target),
                Message::Flushed(target, tag, result) => {
                    let done = self.devices.flushed(target, tag, result);
                    self.ended(done);
                }
                Message::FlushFailed(target, error) => {
                    if !deaf {
                        self.flush_failed(&error);
                    }
                    self.devices.told(target);
                }
                Message::Request(_) => {
                    read += 1;
                    self.start_flush(now);
                }
                _ => unreachable!("threads tell each other nothing else here"),
            }
        }
        for _ in 0..wants {
            match rng.percent(5) {
                true => self.flush_all(now, outgoing),
                false => self.act(now, rng),
            }
        }
        if read > 0 {
            self.devices.seen(now, read, outgoing);
        }
    }

    /// Starts a client's flush, which goes to every shard.
    fn flush_all(&mut self, now: Instant, outgoing: &mut [Vec<Message>]) {
        for (shard, messages) in outgoing.iter_mut().enumerate() {
            if shard as u64 * SECTORS != self.first {
                self.coming.send(shard);
                let flush = Request::flush(RequestId(0), VolumeId(0));
                messages.push(Message::Request(flush));
            }
        }
        self.start_flush(now);
    }

    /// How it stands, for a message.
    pub fn state(&self) -> impl std::fmt::Debug {
        (self.sectors.clone(), self.writes.clone(), self.flush.clone(), self.devices.in_flight())
    }

    fn act(&mut self, now: Instant, rng: &mut Rng) {
        if rng.percent(30) {
            return self.start_flush(now);
        }
        let at = rng.below(SECTORS) as usize;
        if rng.percent(10) {
            let range = self.range(at);
            let io = Io::read(self.next_tag(), range, IoBuf::zeroed(SECTOR));
            return self.devices.submit(now, TARGET, io);
        }
        self.write(now, at);
    }

    fn next_tag(&mut self) -> IoTag {
        self.tag += 1;
        IoTag(self.tag)
    }

    fn range(&self, at: usize) -> ByteRange {
        ByteRange::new((self.first + at as u64) * SECTOR as u64, SECTOR as u64)
    }

    fn write(&mut self, now: Instant, at: usize) {
        if std::mem::replace(&mut self.sectors[at].busy, true) {
            return;
        }
        self.stamp += 1;
        self.sectors[at].written = self.stamp;
        let mut buf = IoBuf::zeroed(SECTOR_SIZE);
        buf[..8].copy_from_slice(&self.stamp.to_le_bytes());
        let tag = self.next_tag();
        self.writes.insert(tag.0, (at, self.stamp));
        let offset = self.range(at).offset;
        self.devices.submit(now, TARGET, Io::write(tag, offset, buf));
    }

    fn start_flush(&mut self, now: Instant) {
        if self.flush.is_some() {
            return;
        }
        let tag = self.next_tag();
        self.flush = Some((tag.0, self.sectors.iter().map(|sector| sector.completed).collect()));
        self.devices.submit(now, TARGET, Io::flush(tag));
    }

    fn ended(&mut self, done: Completion) {
        if let Some((at, stamp)) = self.writes.remove(&done.tag.0) {
            self.sectors[at].busy = false;
            self.sectors[at].completed = if done.result.is_ok() { stamp } else { 0 };
            return;
        }
        let Some((_, covered)) = self.flush.take_if(|(tag, _)| *tag == done.tag.0) else { return };
        self.flushes[usize::from(done.result.is_err())] += 1;
        match done.result {
            Ok(()) => {
                for (sector, stamp) in self.sectors.iter_mut().zip(covered) {
                    sector.safe = sector.safe.max(stamp);
                }
            }
            Err(error) => self.flush_failed(&error),
        }
    }

    /// Nothing that was completed and not flushed counts.
    fn flush_failed(&mut self, _: &IoError) {
        self.failures += 1;
        for sector in &mut self.sectors {
            if sector.completed > sector.safe {
                sector.completed = 0;
            }
        }
        if let Some((_, covered)) = &mut self.flush {
            // The engine's flush fails with it; this one covers nothing.
            covered.fill(0);
        }
    }

    /// Writes sectors that are not safe, and flushes; returns true when all are safe.
    pub fn settle(&mut self, now: Instant) -> bool {
        for at in 0..self.sectors.len() {
            let Sector { written, completed, .. } = self.sectors[at];
            if completed < written {
                self.write(now, at);
            }
        }
        let safe = self.sectors.iter().all(|sector| sector.safe == sector.written);
        if !safe && self.writes.is_empty() {
            self.start_flush(now);
        }
        safe && self.flush.is_none()
    }
}
