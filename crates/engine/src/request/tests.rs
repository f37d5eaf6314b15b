//! Requests on a cache, without the rooms above and below them that the engine passes on between:
//! the test says when a record is closed and written, and when the devices have flushed.

use forebay_block::{ByteRange, Completion, ErrorKind, Instant, Io, IoFlags, IoOp, IoResult};

use super::*;
use crate::api::{Bypass, Request, Target};
use crate::log::read::Reader;
use crate::note::Note;
use crate::testing::VOLUME;
use crate::testing::rooms::{BLOCK, Rooms, content};
use crate::ticket::{PrimaryFlush, Ticket};

/// Requests, and the rooms that they work on.
pub struct Bed {
    pub rooms: Rooms,
    pub requests: Requests,
    /// Notes other than those that requests are told by.
    pub notes: Vec<Note>,
    next: u64,
}

impl Bed {
    /// A cache of which nothing is known, with 16 blocks of RAM.
    pub fn new() -> Self {
        Self::with_ram(16)
    }

    pub fn with_ram(blocks: u64) -> Self {
        let (rooms, requests) = (Rooms::new(blocks), Requests::default());
        Self { rooms, requests, notes: Vec::new(), next: 1 }
    }

    /// Takes a request; how its answer is named.
    pub fn submit(&mut self, op: IoOp, range: ByteRange, bytes: &[u8], fua: bool) -> RequestId {
        let buf = match op {
            IoOp::Read => IoBuf::zeroed(range.len as usize),
            _ => IoBuf::copy_of(bytes),
        };
        let flags = IoFlags { fua, ..IoFlags::default() };
        let id = RequestId(0);
        self.take(Request { id, volume: VOLUME, op, range, flags, buf, bypass: None })
    }

    /// A write of a block that is part of a stream.
    pub fn stream(&mut self, block: u64) -> RequestId {
        let (op, range) = (IoOp::Write, ByteRange::new(block * BLOCK, BLOCK));
        let (id, flags) = (RequestId(0), IoFlags::default());
        let buf = IoBuf::copy_of(&content(block));
        let bypass = Some(Bypass::Sequential);
        self.take(Request { id, volume: VOLUME, op, range, flags, buf, bypass })
    }

    /// Takes a request under the next name.
    fn take(&mut self, request: Request) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        let op = request.op;
        let request = Request { id, ..request };
        let Rooms { cache, fx, .. } = &mut self.rooms;
        match op {
            IoOp::Read => self.requests.submit_read(cache, request, fx),
            IoOp::Flush => self.requests.submit_flush(cache, request, fx),
            IoOp::Prefetch => self.requests.submit_prefetch(cache, request, fx),
            _ => self.requests.submit_write(cache, request, fx),
        }
        self.deliver();
        id
    }

    pub fn prefetch(&mut self, first: u64, count: u64) -> RequestId {
        self.submit(IoOp::Prefetch, ByteRange::new(first * BLOCK, count * BLOCK), &[], false)
    }

    /// Reads the blocks from `first` on that fill a buffer.
    pub fn read_into(&mut self, buf: IoBuf, first: u64) -> RequestId {
        let range = ByteRange::new(first * BLOCK, buf.len() as u64);
        let (id, flags, bypass) = (RequestId(0), IoFlags::default(), None);
        self.take(Request { id, volume: VOLUME, op: IoOp::Read, range, flags, buf, bypass })
    }

    /// Reads blocks, bypassing the cache.
    pub fn read_past(&mut self, first: u64, count: u64, why: Bypass) -> RequestId {
        let range = ByteRange::new(first * BLOCK, count * BLOCK);
        let buf = IoBuf::zeroed(range.len as usize);
        let (id, flags, bypass) = (RequestId(0), IoFlags::default(), Some(why));
        self.take(Request { id, volume: VOLUME, op: IoOp::Read, range, flags, buf, bypass })
    }

    pub fn read(&mut self, first: u64, count: u64) -> RequestId {
        self.submit(IoOp::Read, ByteRange::new(first * BLOCK, count * BLOCK), &[], false)
    }

    /// Writes whole blocks.
    pub fn write(&mut self, first: u64, bytes: &[u8]) -> RequestId {
        self.submit(IoOp::Write, ByteRange::new(first * BLOCK, bytes.len() as u64), bytes, false)
    }

    pub fn write_fua(&mut self, first: u64, bytes: &[u8]) -> RequestId {
        self.submit(IoOp::Write, ByteRange::new(first * BLOCK, bytes.len() as u64), bytes, true)
    }

    pub fn flush(&mut self) -> RequestId {
        self.submit(IoOp::Flush, ByteRange::default(), &[], false)
    }

    pub fn discard(&mut self, first: u64, count: u64) -> RequestId {
        self.submit(IoOp::Discard, ByteRange::new(first * BLOCK, count * BLOCK), &[], false)
    }

    /// Tells requests what they are to be told.
    pub fn deliver(&mut self) {
        for note in self.rooms.notes() {
            let Rooms { cache, fx, .. } = &mut self.rooms;
            match note {
                Note::Placed(op, lsn) => self.requests.write_applied(cache, op, lsn, fx),
                other => self.notes.push(other),
            }
        }
    }

    /// Puts into the record being built what waits for it.
    pub fn log(&mut self) {
        while let Some(op) = self.rooms.log.queue().pop_front() {
            let Rooms { cache, fx, .. } = &mut self.rooms;
            assert!(self.requests.log_op(cache, op, fx), "there is room");
            self.deliver();
        }
    }

    /// Closes the record, which is sent.
    pub fn close(&mut self) -> (Target, Io) {
        self.log();
        let Rooms { cache, fx, .. } = &mut self.rooms;
        assert!(cache.close_record(fx), "there is room");
        self.deliver();
        let ios = &mut self.rooms.fx.ios;
        let at =
            ios.iter().rposition(|(target, io)| (*target, io.op) == (Target::Cache, IoOp::Write));
        ios.remove(at.expect("the record has entries"))
    }

    /// Ends an I/O and tells requests of it.
    pub fn end(&mut self, io: (Target, Io), result: IoResult<()>) {
        let (sent, done) = self.rooms.end(io, result);
        let at = sent.at;
        match sent.ticket {
            Ticket::Record { lsn, .. } => self.record_written(lsn),
            ticket => self.tell(ticket, at, done),
        }
        self.deliver();
    }

    fn tell(&mut self, ticket: Ticket, at: Instant, mut done: Completion) {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        match ticket {
            Ticket::Fetch(fetch) => self.requests.fetched(cache, fetch, at, done, fx),
            Ticket::Direct(op) => self.requests.direct_done(cache, op, at, done, fx),
            Ticket::Payloads(read) => {
                cache.log.end_read(&read);
                let Reader::Read(op) = read.reader else { panic!("{:?}", read.reader) };
                self.requests.ssd_read(cache, op, &read, &mut done, fx);
            }
            other => panic!("{other:?}"),
        }
    }

    fn record_written(&mut self, lsn: forebay_format::Lsn) {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        cache.log.end_record(lsn);
        while let Some(ops) = cache.log.complete_next() {
            for op in ops {
                let Op::Write(write) = self.requests.get_mut(op) else { panic!("it is a write") };
                write.outstanding -= 1;
                self.requests.advance_write(cache, op, fx);
            }
        }
        for (op, key) in cache.log.take_read_waiters() {
            self.requests.read_again(cache, op, key, fx);
            self.requests.part_done(cache, op, Ok(()), fx);
        }
    }

    /// Closes the record; the device writes it.
    pub fn log_written(&mut self) {
        let record = self.close();
        self.end(record, Ok(()));
    }

    /// The cache device flushes, which somebody must wait for.
    pub fn device_flushed(&mut self) {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        assert!(cache.log.begin_wanted_flush(), "somebody waits for it");
        let covered = cache.log.end_flush();
        assert!(cache.log.advance_durable(covered));
        while let Some(op) = cache.log.pop_waiter(false) {
            match self.requests.get(op) {
                Op::Write(_) => self.requests.write_durable(cache, op, fx),
                Op::Flush(_) => self.requests.flush_part_done(cache, op, Ok(()), fx),
                Op::Read(_) => panic!("a read waits for no flush"),
            }
        }
        self.deliver();
    }

    /// The primary flushes what was written directly.
    pub fn primary_flushed(&mut self, result: &IoResult<()>) {
        let Rooms { cache, fx, .. } = &mut self.rooms;
        let volume = cache.volume_mut(VOLUME);
        let flushes = std::mem::take(&mut volume.flush_waiters);
        let writes = std::mem::take(&mut volume.fua_waiters);
        volume.direct_durable = volume.direct;
        let (direct, destages) = (volume.direct, Vec::new());
        let flush = PrimaryFlush { volume: VOLUME, direct, destages, flushes, writes };
        for op in flush.flushes {
            self.requests.flush_part_done(cache, op, result.clone(), fx);
        }
        for op in flush.writes {
            self.requests.write_flushed(cache, op, result.clone(), fx);
        }
        self.deliver();
    }

    /// The requests that are answered, in order, and the errors of those that failed.
    pub fn answered(&mut self) -> Vec<(RequestId, Option<ErrorKind>)> {
        let answers = self.rooms.answers().into_iter();
        answers.map(|reply| (reply.id, reply.result.err().map(|error| error.kind()))).collect()
    }

    /// The bytes of the only answer.
    pub fn bytes(&mut self) -> Vec<u8> {
        let mut answers = self.rooms.answers();
        assert_eq!(answers.len(), 1, "{answers:?}");
        let reply = answers.remove(0);
        assert!(reply.result.is_ok(), "{reply:?}");
        reply.buf.to_vec()
    }
}
