//! Reassembling a damaged log: what its records and footers still say, and which records are lost.
//! Decisions only, as in `survey.rs`, which calls this if a log cannot be read normally.
//!
//! A segment without a good footer is read record by record, across gaps. A record with a good
//! header is known even if its payloads are bad: each bad payload is detected when it is read. A
//! record with a bad header, in a segment whose footer is bad too, is a *hole*. The number of
//! missing records and their LSNs are known, since the records around the hole are numbered and
//! linked, but their blocks are unknown. A hole below `clean` loses nothing: the primaries have all
//! of its blocks. Records that no record or footer proves to have been durable are no loss either:
//! they are a torn tail.
//!
//! A hole is filled with placeholders, so that the segment can get a footer again. The next start
//! then finds a log without a gap, and still knows of the hole.

use std::collections::BTreeMap;

use forebay_block::{ByteRange, VolumeId};
use forebay_format::{
    CELL_BYTES, ENTRY_CELLS, Entry, EntryKind, FOOTER_TRAILER_BYTES, Lsn, PAGE, SegmentSeq,
    cells_of,
};

use crate::recovery::scan::{Link, Scanned};
use crate::recovery::survey::{SegmentForm, Survey};

/// Lost records whose blocks are unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hole {
    /// The segment of the last of these records.
    pub seq: SegmentSeq,
    /// Number of records; 0 if unknown because the device cannot read the place.
    pub records: u64,
    /// LSN of the last of these records.
    pub last: Lsn,
}

/// The entry that stands for a lost record: a dirty checkpoint, which no real record has.
#[must_use]
pub fn placeholder() -> Entry {
    Entry {
        volume: VolumeId(0),
        block: 0,
        kind: EntryKind::Checkpoint,
        dirty: true,
        first: true,
        offset: 0,
        len: 0,
        count: 1,
        crc: 0,
        shared: None,
        stored: None,
        base: None,
    }
}

/// Whether an entry stands for a lost record.
#[must_use]
pub fn is_placeholder(entry: &Entry) -> bool {
    entry.kind == EntryKind::Checkpoint && entry.dirty
}

/// The remains of a segment.
struct Piece {
    seq: SegmentSeq,
    /// Whether it has a good footer, and stays as it is.
    sealed: bool,
    /// The links before its first remaining record and of its last one.
    ends: Option<(Link, Link)>,
    /// Bytes before its first remaining record.
    lead: u32,
    used: u32,
    entries: Vec<Entry>,
    start: SegmentSeq,
    clean: Lsn,
    /// Number of placeholders before and after its entries.
    front: u64,
    back: u64,
}

impl Piece {
    fn empty(seq: SegmentSeq) -> Self {
        Self {
            seq,
            sealed: false,
            ends: None,
            lead: 0,
            used: 0,
            entries: Vec::new(),
            start: SegmentSeq(0),
            clean: Lsn(0),
            front: 0,
            back: 0,
        }
    }

    /// Number of placeholders for which it has room, in addition to its entries.
    fn room(&self, form: SegmentForm) -> u64 {
        let pages = (form.size - self.used) / PAGE as u32;
        let bytes = (pages as usize * PAGE).saturating_sub(FOOTER_TRAILER_BYTES);
        let taken = cells_of(&self.entries, form.unit_entries);
        let left = (bytes / CELL_BYTES).saturating_sub(taken) / ENTRY_CELLS;
        (left as u64).saturating_sub(self.front + self.back)
    }
}

/// The records of a segment across its gaps, up to LSN `most`. Gaps are allowed only where the
/// missing records were durable.
fn gather(seq: SegmentSeq, scanned: Scanned, most: Lsn, durable: Lsn) -> Piece {
    let mut piece = Piece::empty(seq);
    // An older start may have left records after the end of the records of a newer one.
    let mut epoch = scanned.epoch;
    if let Some((before, last)) = scanned.before.zip(scanned.last) {
        piece.ends = Some((before, last));
        piece.used = scanned.used;
        piece.entries = scanned.entries;
        piece.start = scanned.start;
        piece.clean = scanned.clean;
    }
    for beyond in scanned.beyond {
        let header = beyond.record.header;
        let lsn = header.lsn;
        if header.epoch < epoch || header.at < piece.used || lsn > most {
            continue;
        }
        epoch = header.epoch;
        let certain = beyond.good || lsn <= durable;
        let before = Link { lsn: Lsn(lsn.0 - 1), crc: header.prev_crc };
        let gone = match piece.ends {
            Some((_, last)) if lsn <= last.lsn => continue,
            Some((_, last)) if last.lsn == before.lsn && last != before => continue,
            Some((_, last)) => before.lsn.0 - last.lsn.0,
            None => 0,
        };
        let pages = u64::from(header.at - piece.used) / PAGE as u64;
        if gone > pages || gone > 0 && before.lsn > durable || !certain {
            break;
        }
        piece.entries.extend((0..gone).map(|_| placeholder()));
        piece.entries.extend(beyond.record.entries);
        if piece.ends.is_none() {
            piece.lead = header.at;
        }
        let first = piece.ends.map_or(before, |(first, _)| first);
        piece.ends = Some((first, Link { lsn, crc: beyond.record.crc }));
        piece.used = header.at + u32::from(header.pages) * PAGE as u32;
        piece.start = piece.start.max(header.start);
        piece.clean = header.clean;
    }
    piece
}

impl Survey {
    /// Reassembles the log from its remains.
    ///
    /// # Errors
    /// If the remains contradict each other.
    pub(crate) fn salvage(&mut self) -> Result<(), String> {
        let sealed: BTreeMap<SegmentSeq, usize> = self
            .found
            .iter()
            .enumerate()
            .filter(|(_, found)| found.sealed)
            .filter_map(|(i, found)| found.seq().map(|seq| (seq, i)))
            .collect();
        let mut durable = Lsn(0);
        let mut start = SegmentSeq(1);
        for found in &self.found {
            if let Some(scanned) = &found.scanned {
                durable = durable.max(scanned.durable);
            }
        }
        match sealed.last_key_value() {
            Some((_, &i)) => {
                let footer = self.found[i].tail.as_ref().expect("sealed").footer;
                durable = durable.max(footer.last_lsn);
                start = footer.start;
            }
            None => {
                let told = self.found.iter().filter_map(|found| found.scanned.as_ref());
                start = start.max(told.map(told_start).max().unwrap_or_default());
            }
        }
        let read = self.unsealed.keys().chain(self.suspects.keys()).chain(sealed.keys());
        let newest = read.max().copied().unwrap_or_default();
        if newest.0.saturating_sub(start.0) >= self.found.len() as u64 {
            return Err(format!("the log cannot reach from {start} to {newest}"));
        }
        let mut pieces = self.pieces(start, newest, &sealed, durable);
        let last = self.join(&mut pieces, durable)?;
        self.finish(pieces, last)
    }

    /// The remains of each segment, oldest first.
    fn pieces(
        &mut self,
        start: SegmentSeq,
        newest: SegmentSeq,
        sealed: &BTreeMap<SegmentSeq, usize>,
        durable: Lsn,
    ) -> Vec<Piece> {
        let mut pieces = Vec::new();
        // The remains of a torn tail in a segment are not part of the log: the next segment says
        // where the log continued.
        let mut most = Lsn(u64::MAX);
        for seq in (start.0..=newest.0).rev().map(SegmentSeq) {
            let i = self.position(seq);
            let found = &mut self.found[i];
            let piece = if sealed.contains_key(&seq) {
                let footer = found.tail.as_ref().expect("sealed").footer;
                let before = Link { lsn: Lsn(footer.first_lsn.0 - 1), crc: footer.first_prev_crc };
                let last = Link { lsn: footer.last_lsn, crc: footer.last_crc };
                Piece {
                    sealed: true,
                    ends: Some((before, last)),
                    start: footer.start,
                    clean: footer.clean,
                    ..Piece::empty(seq)
                }
            } else {
                let reads = self.unsealed.get(&seq).or(self.suspects.get(&seq)) == Some(&i);
                match found.scanned.take().filter(|_| reads) {
                    Some(scanned) => gather(seq, scanned, most, durable),
                    None => Piece::empty(seq),
                }
            };
            if let Some((before, _)) = piece.ends {
                most = before.lsn;
            }
            pieces.push(piece);
        }
        pieces.reverse();
        pieces
    }

    /// Fills the gaps between segments; returns the last record.
    fn join(&self, pieces: &mut Vec<Piece>, durable: Lsn) -> Result<Link, String> {
        let mut end: Option<(usize, Link)> = None;
        let mut i = 0;
        while i < pieces.len() {
            let Some((before, last)) = pieces[i].ends else {
                i += 1;
                continue;
            };
            match end {
                None => {
                    // The number of records before this one is unknown: assume one for each gap.
                    pieces[i].front = u64::from(pieces[i].lead > 0);
                    pieces[..i].iter_mut().for_each(|piece| piece.front = 1);
                    if before.lsn.0 < i as u64 + pieces[i].front {
                        return Err(format!("{} cannot begin after {}", pieces[i].seq, before.lsn));
                    }
                }
                Some((a, link)) if before.lsn > link.lsn && before.lsn <= durable => {
                    self.fill(pieces, a, i, before.lsn.0 - link.lsn.0)?;
                }
                Some((a, link)) if before != link || i > a + 1 => {
                    if before.lsn <= durable {
                        return Err(format!("{} does not follow {}", pieces[i].seq, link.lsn));
                    }
                    pieces.truncate(a + 1);
                    break;
                }
                Some(_) => {}
            }
            end = Some((i, last));
            i += 1;
        }
        let Some((a, mut last)) = end else {
            return Err(format!("no record is left of the log up to {durable}"));
        };
        pieces.truncate(a + 1);
        if durable > last.lsn {
            let mut gone = durable.0 - last.lsn.0;
            last = Link { lsn: durable, crc: 0 };
            for more in 0.. {
                let piece = &mut pieces[a + more];
                let room = if piece.sealed { 0 } else { piece.room(self.form()) };
                piece.back = gone.min(room);
                gone -= piece.back;
                if gone == 0 {
                    break;
                }
                if a + more + 1 >= self.found.len() {
                    return Err(format!("no room for the records up to {durable}"));
                }
                let next = piece.seq.next();
                pieces.push(Piece::empty(next));
            }
        }
        Ok(last)
    }

    /// Places `gone` lost records between the remains of segments `a` and `b`: as many as fit in
    /// `b`, the rest in the segments before it.
    fn fill(&self, pieces: &mut [Piece], a: usize, b: usize, mut gone: u64) -> Result<(), String> {
        let form = self.form();
        let lead = u64::from(pieces[b].lead) / PAGE as u64;
        let room = if pieces[b].sealed { 0 } else { pieces[b].room(form).min(lead) };
        pieces[b].front = gone.min(room);
        gone -= pieces[b].front;
        for i in (a..b).rev() {
            let piece = &mut pieces[i];
            let room = if piece.sealed { 0 } else { piece.room(form) };
            piece.back = gone.min(room);
            gone -= piece.back;
        }
        if gone > 0 {
            return Err(format!("{gone} records are missing before {}", pieces[b].seq));
        }
        Ok(())
    }

    /// Makes the pieces the log.
    fn finish(&mut self, pieces: Vec<Piece>, last: Link) -> Result<(), String> {
        self.log.clear();
        self.holes.clear();
        self.last = last;
        self.start = pieces.iter().map(|piece| piece.start).max().unwrap_or_default();
        self.start = self.start.max(pieces[0].seq);
        self.clean = pieces.iter().rev().find(|p| p.ends.is_some()).map_or(Lsn(0), |p| p.clean);
        let first = pieces.iter().position(|piece| piece.ends.is_some()).expect("one was found");
        let before = pieces[first].ends.expect("it has").0.lsn.0;
        let unknown: u64 = pieces[..=first].iter().map(|piece| piece.front).sum();
        let mut link = Link { lsn: Lsn(before - unknown), crc: 0 };
        for i in 0..pieces.len() {
            let piece = &pieces[i];
            let real = piece.ends.filter(|_| piece.front == 0).map(|(before, _)| before);
            let before = real.unwrap_or(link);
            let inner = piece.ends.map_or(0, |(before, last)| last.lsn.0 - before.lsn.0);
            let end = Lsn(before.lsn.0 + piece.front + inner + piece.back);
            // The link of the next record tells the CRC of this one.
            let next = pieces.get(i + 1).and_then(|next| next.ends.filter(|_| next.front == 0));
            let own = piece.ends.filter(|_| piece.back == 0).map(|(_, last)| last.crc);
            let crc = own.or(next.map(|(before, _)| before.crc)).unwrap_or(0);
            link = Link { lsn: end, crc };
            if i + 1 == pieces.len() {
                self.last = link;
            }
            self.place(piece, before, link);
        }
        if !self.log.contains_key(&self.start) {
            return Err(format!("{} is missing", self.start));
        }
        self.log = self.log.split_off(&self.start);
        self.holes.retain(|hole| hole.seq >= self.start);
        Ok(())
    }

    /// Adds a segment to the log, and notes its holes.
    fn place(&mut self, piece: &Piece, before: Link, last: Link) {
        let (seq, i) = (piece.seq, self.position(piece.seq));
        self.log.insert(seq, i);
        if piece.sealed {
            return;
        }
        let placeholders = |count: u64| (0..count).map(|_| placeholder());
        let entries: Vec<Entry> = placeholders(piece.front)
            .chain(piece.entries.iter().copied())
            .chain(placeholders(piece.back))
            .collect();
        self.note_holes(seq, before.lsn, &entries);
        self.found[i].scanned = Some(Scanned {
            before: Some(before),
            last: Some(last),
            first_lsn: before.lsn.next(),
            entries,
            used: piece.used,
            start: piece.start,
            clean: piece.clean,
            ..Scanned::default()
        });
    }

    fn note_holes(&mut self, seq: SegmentSeq, before: Lsn, entries: &[Entry]) {
        let mut lsn = before;
        for entry in entries.iter().filter(|entry| entry.first) {
            lsn = lsn.next();
            if !is_placeholder(entry) {
                continue;
            }
            match self.holes.last_mut() {
                Some(hole) if hole.last.next() == lsn => {
                    *hole = Hole { seq, records: hole.records + 1, last: lsn };
                }
                _ => self.holes.push(Hole { seq, records: 1, last: lsn }),
            }
        }
    }

    /// Mends a segment whose footer tells its first and last record, but not its entries.
    pub(crate) fn mend(&mut self, i: usize, seq: SegmentSeq, scanned: Scanned) -> bool {
        let Some(tail) = self.found[i].tail else { return false };
        let (first, last) = (tail.footer.first_lsn, tail.footer.last_lsn);
        let before = Link { lsn: Lsn(first.0 - 1), crc: tail.footer.first_prev_crc };
        let mut piece = gather(seq, scanned, last, last);
        let (front, back) = match piece.ends {
            Some((begin, _)) if begin.lsn < before.lsn => return false,
            Some((begin, end)) => (begin.lsn.0 - before.lsn.0, last.0.saturating_sub(end.lsn.0)),
            None => (last.0 - before.lsn.0, 0),
        };
        if piece.ends.is_some_and(|(_, end)| end.lsn > last)
            || piece.room(self.form()) < front + back
        {
            return false;
        }
        (piece.front, piece.back) = (front, back);
        self.place(&piece, before, Link { lsn: last, crc: tail.footer.last_crc });
        true
    }
}

fn told_start(scanned: &Scanned) -> SegmentSeq {
    let beyond = scanned.beyond.iter().map(|beyond| beyond.record.header.start);
    beyond.chain([scanned.start]).max().unwrap_or_default()
}

/// Lost blocks of a volume: their newest version was dirty and cannot be read back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LostRange {
    /// The volume.
    pub volume: VolumeId,
    /// The byte range on the volume.
    pub range: ByteRange,
}
