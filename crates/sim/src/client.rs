//! The clients: they submit requests and compare every answer with the model.

use forebay_block::{
    BLOCK_SIZE, ByteRange, ErrorKind, Io, IoBuf, IoError, IoFlags, IoOp, IoTag, SECTOR_SIZE,
};
use forebay_engine::ContentLocality;
use forebay_model::{ALIKE_EVERY, Change, FlushMark, Model, Token, Violation};
use forebay_volume::Done;

use crate::config::Setup;
use crate::disk::SLOWER;
use crate::failure::Kind;
use crate::rng::Rng;
use crate::run::SECOND;
use crate::script::COPIED_MAX;
use crate::world::{Failure, World};

/// Percentage of writes that resemble each other, where similar blocks are searched for.
const ALIKE_PERCENT: u64 = 60;

/// Longest time of a request without a fault, where no disk has slow requests.
const DELAY_MAX: u64 = SECOND / 4 * 3;
/// Added to it while another volume's primary has a fault: the log may fill with its blocks.
const DELAY_BESIDE_FAULT: u64 = 2 * SECOND;
/// The slow requests to a disk for which it may wait in addition, where there are some.
const SLOW_REQUESTS: u64 = 4;

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    pub(crate) volume: usize,
    op: IoOp,
    range: ByteRange,
    fua: bool,
    token: Option<Token>,
    /// The token of the request in the model of the primary alone.
    alone: Option<Token>,
    /// The token of a flush in the history of an ordered volume.
    mark: Option<FlushMark>,
    submitted: u64,
    /// Number of mode switches of the volume at the submission.
    switches: u64,
    /// Whether it repeats another write.
    copy: bool,
}

impl World {
    /// Submits a client's request. A request that the model could not follow is simplified: a
    /// change next to an unfinished change of the same sector becomes a read, and a change of part
    /// of a sector with several possible contents is widened to whole sectors. `again`: a write
    /// repeats an earlier write of whole blocks, that many writes back, in another place.
    pub(crate) fn request(
        &mut self,
        volume: usize,
        op: IoOp,
        range: ByteRange,
        fua: bool,
        again: Option<u8>,
    ) -> Result<(), Failure> {
        let tag = self.choose_tag(op);
        let copy = again.and_then(|which| self.copied(volume, range, usize::from(which)));
        let model = &mut self.models[volume];
        let (mut op, mut range) = (op, copy.map_or(range, |(_, range)| range));
        if op.changes_data() && !model.is_free(range) {
            op = IoOp::Read;
        }
        let (mut token, mut changed) = (None, None);
        let mut buf = IoBuf::empty();
        match op {
            IoOp::Read => {
                token = Some(model.begin_read());
                buf = IoBuf::zeroed(range.len as usize);
            }
            IoOp::Flush => token = Some(model.begin_flush()),
            IoOp::Prefetch => {}
            IoOp::Write | IoOp::WriteZeroes | IoOp::Discard => {
                let change = match op {
                    IoOp::Write => copy.map_or(Change::Stamp, |(change, _)| change),
                    IoOp::WriteZeroes => Change::Zero,
                    _ => Change::Discard,
                };
                let data = model.begin_write(tag, range, change).or_else(|| {
                    range = widened(range);
                    model.is_free(range).then(|| model.begin_write(tag, range, change)).flatten()
                });
                match data {
                    Some(data) if op == IoOp::Write => buf = IoBuf::copy_of(&data),
                    Some(_) => {}
                    None => return Ok(()),
                }
                changed = Some(change);
            }
        }
        let fua = fua && op.changes_data();
        let copy = copy.is_some() && op == IoOp::Write;
        if let (Some(alone), Some(change)) = (&mut self.alone[volume], changed) {
            alone.begin_as(&self.models[volume], tag, range, change);
        }
        let alone = self.alone[volume].as_mut().filter(|_| op == IoOp::Flush);
        let alone = alone.map(Model::begin_flush);
        let mark = self.note_begun(volume, tag, op, range, changed.is_some());
        let (submitted, switches) = (self.now, self.switches[volume]);
        let client =
            Client { volume, op, range, fua, token, alone, mark, submitted, switches, copy };
        self.clients.insert(tag, client);
        self.trace.line(self.now, || {
            format!("client {tag}: volume {volume} {op:?} {range}{}", if fua { " fua" } else { "" })
        });
        self.trace.mix(&[self.now, tag, op as u64, range.offset, range.len]);
        let flags = IoFlags { fua, ..IoFlags::default() };
        let io = Io { tag: IoTag(tag), op, range, flags, buf };
        if self.setup.takeover {
            self.under_way.begin(tag, &io);
        }
        self.submit(tag, volume, io)
    }

    /// Hands a request to the server.
    pub(crate) fn submit(&mut self, tag: u64, volume: usize, mut io: Io) -> Result<(), Failure> {
        self.mischief.asking(&mut io);
        let mut done = Vec::new();
        let Some(server) = self.server.as_mut() else {
            return Err(self.fail(Kind::Misuse, "no server to ask"));
        };
        let id = self.steering.ids[volume].expect("it is served");
        self.ledger.asked(volume, &io, self.setup.shards);
        server.submit(self.now, tag, id, io, &mut done);
        self.answers(done)?;
        self.wake();
        Ok(())
    }

    /// The number of a request, which determines the content of a write. Where blocks are stored
    /// against similar ones, clients write many similar blocks.
    fn choose_tag(&mut self, op: IoOp) -> u64 {
        let mut tag = self.next_tag;
        let alike = self.setup.content == ContentLocality::Similar && op == IoOp::Write;
        if alike && Rng::new(self.setup.seed ^ tag << 8).percent(ALIKE_PERCENT) {
            tag = tag / ALIKE_EVERY * ALIKE_EVERY + ALIKE_EVERY - 1;
        }
        self.next_tag = tag + 1;
        tag
    }

    /// The change and place of a write that repeats an earlier one; `None` if there is none to
    /// repeat, or no whole block in `range`.
    fn copied(&self, volume: usize, range: ByteRange, which: usize) -> Option<(Change, ByteRange)> {
        let block = BLOCK_SIZE as u64;
        let of = self.written.iter().rev().filter(|(of, ..)| *of == volume).nth(which);
        let &(_, of, from) = of?;
        let start = range.offset.next_multiple_of(block);
        let len = (range.end() / block * block).checked_sub(start)?.min(from.len);
        let ahead = (from.offset as i64 - start as i64) / SECTOR_SIZE as i64;
        let change = Change::Copy { of, ahead };
        (len > 0).then_some((change, ByteRange::new(start, len)))
    }

    /// Takes the answer to a request.
    pub(crate) fn answer(&mut self, done: Done) -> Result<(), Failure> {
        let tag = done.client.0;
        if self.under_way.end(tag, self.volume_of(done.volume)) {
            return Ok(());
        }
        let Some(client) = self.clients.remove(&tag) else {
            return Err(self.fail(Kind::Misuse, format!("request {tag} is answered twice")));
        };
        let Client { volume, op, range, fua, token, copy, submitted, .. } = client;
        self.check_haste(volume, self.now - submitted)?;
        self.check_delay(volume, op, self.now - submitted)?;
        let completion = done.completion;
        let ok = completion.result.is_ok();
        if ok && op == IoOp::Write && !copy && range.is_aligned(BLOCK_SIZE as u64) {
            self.written.push_back((volume, tag, range));
            if self.written.len() > COPIED_MAX {
                self.written.pop_front();
            }
        }
        self.tally.requests += 1;
        if op.changes_data() {
            self.ledger.changed(volume, range, self.now);
        }
        if op == IoOp::Write {
            self.tally.slowest_write = self.tally.slowest_write.max(self.now - submitted);
        }
        self.answer_alone(tag, &client, ok);
        self.note_ended(tag, &client, ok);
        self.trace.mix(&[self.now, tag, u64::from(ok)]);
        self.trace.mix_bytes(&completion.buf);
        self.trace.line(self.now, || match &completion.result {
            Ok(()) => format!("client {tag}: {op:?} ok"),
            Err(error) => format!("client {tag}: {op:?} failed: {error}"),
        });
        let model = &mut self.models[volume];
        match (op, token) {
            (IoOp::Read, Some(token)) => {
                let data = ok.then_some(&completion.buf[..]);
                self.tally.checked += range.len;
                if let (true, Some(data)) = (self.strict, data) {
                    let verdict = unmixed(model, range, data);
                    verdict.map_err(|violation| self.violated(&violation))?;
                }
                let model = &mut self.models[volume];
                let verdict = model.end_read(token, range, data);
                verdict.map_err(|violation| self.violated(&violation))?;
            }
            (IoOp::Flush, Some(token)) if ok => model.end_flush(token),
            (IoOp::Flush, _) => model.fail_flush(),
            (IoOp::Prefetch, _) => {}
            _ => model.end_write(tag, ok, fua),
        }
        // The mode may not allow a prefetch, or the log have no room.
        let kinds = [ErrorKind::Unsupported, ErrorKind::NoSpace];
        let refused = |error: &IoError| op == IoOp::Prefetch && kinds.contains(&error.kind());
        if let Err(error) = completion.result
            && !refused(&error)
        {
            self.tally.failed += 1;
            let may_fail = self.setup.outcome().errors && self.concerned.contains(&volume);
            if !(self.broken && may_fail) {
                let what = format!("{op:?} of {range} on volume {volume} failed: {error}");
                let kind = match error.kind() {
                    ErrorKind::Corrupt => Kind::Corrupt,
                    _ => Kind::Error,
                };
                return Err(self.fail(kind, what));
            }
        }
        Ok(())
    }

    /// Checks that no request waits for longer than the disks explain, where nothing was wrong
    /// since the first start, and no rate is set.
    fn check_delay(&self, volume: usize, op: IoOp, took: u64) -> Result<(), Failure> {
        let Setup { cache, primary, .. } = &self.setup;
        let slow = [cache, primary].into_iter().filter(|disk| disk.slow_percent > 0);
        let slowest = slow.map(|disk| disk.latency.1.max(disk.flush.1) * SLOWER).max();
        let beside = if self.was_broken { DELAY_BESIDE_FAULT } else { 0 };
        let most = DELAY_MAX + SLOW_REQUESTS * slowest.unwrap_or(0) + beside;
        let bound = self.setup.volumes[volume].pace.rate.is_some();
        // With a primary that is away for good there is another rule.
        let is_exempt = self.concerned.contains(&volume) || self.away.is_some() || bound;
        if is_exempt || took <= most {
            return Ok(());
        }
        let (took, most) = (took / 1_000_000, most / 1_000_000);
        let what = format!("{op:?} on volume {volume} took {took} ms, which is more than {most}");
        Err(self.fail(Kind::Stuck, what))
    }

    /// Records in the history of an ordered volume that a request was submitted.
    fn note_begun(
        &mut self,
        volume: usize,
        tag: u64,
        op: IoOp,
        range: ByteRange,
        changes: bool,
    ) -> Option<FlushMark> {
        let history = self.histories[volume].as_mut()?;
        if changes {
            history.begin_write(self.now, &self.models[volume], tag, range);
        }
        (op == IoOp::Flush).then(|| history.begin_flush(self.now))
    }

    /// Records there that a request has ended.
    fn note_ended(&mut self, tag: u64, client: &Client, ok: bool) {
        let Client { volume, op, fua, mark, .. } = *client;
        let Some(history) = self.histories[volume].as_mut() else { return };
        match (op, mark) {
            (IoOp::Read | IoOp::Prefetch, _) => {}
            (IoOp::Flush, Some(mark)) if ok => history.end_flush(self.now, mark),
            (IoOp::Flush, _) => history.doubt(self.now),
            _ => history.end_write(self.now, tag, ok, fua),
        }
    }

    /// Updates the model of the primary alone: the write is complete at once, or after a flush, if
    /// the mode promises this from submission to answer.
    fn answer_alone(&mut self, tag: u64, client: &Client, ok: bool) {
        let Client { volume, op, fua, switches, .. } = *client;
        let promised =
            self.setup.volumes[volume].mode.is_complete() && self.switches[volume] == switches;
        let Some(model) = &mut self.alone[volume] else { return };
        match (op, client.alone) {
            (IoOp::Read | IoOp::Prefetch, _) => {}
            (IoOp::Flush, Some(token)) if ok && promised => model.end_flush(token),
            (IoOp::Flush, _) => {}
            _ => model.end_write(tag, ok, fua && promised),
        }
    }

    /// Describes a hang: the request that has waited longest, and how full the shards are.
    pub(crate) fn what_hangs(&self) -> String {
        let mut text = self.oldest_request();
        let stats = self.server.as_ref().map(|server| server.stats(self.now)).unwrap_or_default();
        for s in stats {
            text += &format!(
                "; {} of {} segments free, {} blocks dirty (limit {}), {} cached, {} fenced",
                s.segments_free,
                s.segments,
                s.dirty_blocks,
                s.dirty_limit_blocks,
                s.cached_blocks,
                s.fenced_blocks
            );
        }
        text
    }

    fn oldest_request(&self) -> String {
        match self.clients.iter().min_by_key(|(_, client)| client.submitted) {
            Some((tag, c)) => format!(
                "request {tag}, {:?} of {} on volume {}, waits for {} ms",
                c.op,
                c.range,
                c.volume,
                (self.now - c.submitted) / 1_000_000
            ),
            None => "no request waits".into(),
        }
    }
}

/// The whole sectors that `range` touches.
fn widened(range: ByteRange) -> ByteRange {
    let start = range.offset / 512 * 512;
    ByteRange::new(start, range.end().next_multiple_of(512) - start)
}

/// Checks each whole block of the first read after a crash.
fn unmixed(model: &Model, range: ByteRange, data: &[u8]) -> Result<(), Violation> {
    let whole = range.offset.div_ceil(4096)..range.end() / 4096;
    for block in whole {
        let at = (block * 4096 - range.offset) as usize;
        model.check_unmixed(block, &data[at..at + 4096])?;
    }
    Ok(())
}
