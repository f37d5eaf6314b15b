//! The survey of the cache device, segment by segment, and which of them are the log: the decisions
//! of recovery, without its I/O. The offline tools use the same decisions.

use std::collections::BTreeMap;

use forebay_format::{
    Entry, FooterTrailer, Lsn, NUMBER_MAX, SegmentSeq, cells_of, decode_footer,
    decode_footer_trailer, decode_record,
};

use crate::api::event::Recovered;
use crate::recovery::salvage::Hole;
use crate::recovery::scan::scan_segment;
pub use crate::recovery::scan::{Beyond, Link, Owner, Scanned};

/// The findings in one segment's place.
#[derive(Default, Debug)]
pub struct Found {
    /// Number of the segment that its first page begins.
    pub head: Option<SegmentSeq>,
    /// The number that it should have, if its first page does not tell.
    pub expected: Option<SegmentSeq>,
    /// The trailer of its footer.
    pub tail: Option<FooterTrailer>,
    /// Whether its footer is at least as new as its first page.
    pub sealed: bool,
    /// Its records, if they had to be read.
    pub scanned: Option<Scanned>,
    /// The entries of its footer.
    pub entries: Option<Vec<Entry>>,
    /// Whether its trailer is good but its entries are not.
    pub unreadable_footer: bool,
    /// Whether neither its footer nor its records can be read.
    pub damaged: bool,
    /// Whether the device failed to read a part of it.
    pub unreadable: bool,
}

impl Found {
    /// The segment's number in the log.
    pub fn seq(&self) -> Option<SegmentSeq> {
        match &self.tail {
            Some(tail) if self.sealed => Some(tail.footer.seq),
            _ => self.head,
        }
    }

    /// Gives the entries back to the records that had to be read, so that they can be applied
    /// again.
    pub(crate) fn restore_entries(&mut self) {
        if let Some(scanned) = self.scanned.as_mut().filter(|scanned| scanned.entries.is_empty()) {
            scanned.entries = self.entries.take().unwrap_or_default();
        }
    }

    /// The number of entries in its records, according to its footer if it has one.
    pub fn entries(&self) -> u64 {
        match (&self.scanned, &self.tail) {
            (Some(scanned), _) => scanned.entries.len() as u64,
            (None, Some(tail)) => u64::from(tail.footer.entries),
            _ => 0,
        }
    }

    /// Length of its entries in the footer that it has or, if these are the ones of records that
    /// had to be read, will get, with or without unit entries; in cells.
    pub fn cells(&self, entries: &[Entry], unit_entries: bool) -> usize {
        match (&self.scanned, &self.tail) {
            (None, Some(tail)) => tail.cells,
            _ => cells_of(entries, unit_entries),
        }
    }

    /// The link of the record before its first one.
    pub fn first(&self) -> Option<Link> {
        match (&self.scanned, &self.tail) {
            (Some(scanned), _) => scanned.before,
            (None, Some(FooterTrailer { footer, .. })) if self.sealed => {
                Some(Link { lsn: Lsn(footer.first_lsn.0 - 1), crc: footer.first_prev_crc })
            }
            _ => None,
        }
    }

    /// The link of its last record.
    pub fn last(&self) -> Option<Link> {
        match (&self.scanned, &self.tail) {
            (Some(scanned), _) => scanned.last,
            (None, Some(FooterTrailer { footer, .. })) if self.sealed => {
                Some(Link { lsn: footer.last_lsn, crc: footer.last_crc })
            }
            _ => None,
        }
    }
}

/// The form of the segments of a log.
#[derive(Clone, Copy, Debug)]
pub struct SegmentForm {
    /// Size of a segment, in bytes.
    pub size: u32,
    /// Whether its footers may have unit entries.
    pub unit_entries: bool,
}

/// All segments of a shard's area, and the log among them.
#[derive(Debug)]
pub struct Survey {
    owner: Owner,
    form: SegmentForm,
    /// All segments, indexed by position.
    pub found: Vec<Found>,
    /// Positions of the segments of the log, by number.
    pub log: BTreeMap<SegmentSeq, usize>,
    /// Positions of the segments to read record by record, by number.
    pub unsealed: BTreeMap<SegmentSeq, usize>,
    /// Positions where a segment of that number should begin but does not. They are read too, since
    /// a later record in the segment may know that its beginning was durable.
    pub suspects: BTreeMap<SegmentSeq, usize>,
    /// Positions of segments that never became part of the log.
    pub orphans: Vec<usize>,
    /// The oldest segment of the log.
    pub start: SegmentSeq,
    /// The LSN below which every entry of a record is clean.
    pub clean: Lsn,
    /// The last record.
    pub last: Link,
    /// Lost records of the log, in order.
    pub holes: Vec<Hole>,
    /// Number of records that are missing at its end.
    pub cut_off: u64,
}

impl Survey {
    /// Starts with nothing known.
    pub fn new(owner: Owner, segments: usize, form: SegmentForm) -> Self {
        Self {
            owner,
            form,
            found: (0..segments).map(|_| Found::default()).collect(),
            log: BTreeMap::new(),
            unsealed: BTreeMap::new(),
            suspects: BTreeMap::new(),
            orphans: Vec::new(),
            start: SegmentSeq(0),
            clean: Lsn(0),
            last: Link { lsn: Lsn(0), crc: 0 },
            holes: Vec::new(),
            cut_off: 0,
        }
    }

    /// The findings, for the event.
    pub fn summary(&self) -> Recovered {
        let accepted = || self.log.range(self.start..).map(|(_, &i)| &self.found[i]);
        let first = accepted().next().and_then(Found::first);
        Recovered {
            segments: accepted().count() as u64,
            unsealed: accepted().filter(|found| found.scanned.is_some()).count() as u64,
            erased: self.orphans.len() as u64,
            records: first.map_or(0, |before| self.last.lsn.0.saturating_sub(before.lsn.0)),
            ..Recovered::default()
        }
    }

    /// The form of segments that are written now.
    pub fn form(&self) -> SegmentForm {
        self.form
    }

    /// Lost records that may have held dirty blocks.
    pub fn lost(&self) -> impl Iterator<Item = &Hole> {
        self.holes.iter().filter(|hole| hole.last >= self.clean)
    }

    /// Takes the first page of the segment at position `i`.
    pub fn take_head(&mut self, i: usize, page: &[u8]) {
        let (owner, segments) = (self.owner, self.found.len() as u64);
        self.found[i].unreadable |= page.is_empty();
        self.found[i].head = decode_record(page)
            .ok()
            .map(|record| record.header)
            .filter(|h| h.pool == owner.pool && h.shard == owner.shard && h.at == 0)
            .map(|h| h.seq)
            .filter(|seq| seq.0 % segments == i as u64);
    }

    /// Takes the last page of the segment at position `i`.
    pub fn take_tail(&mut self, i: usize, page: &[u8]) {
        let (owner, segments) = (self.owner, self.found.len() as u64);
        let size = u64::from(self.form.size);
        self.found[i].unreadable |= page.is_empty();
        self.found[i].tail = decode_footer_trailer(page).ok().filter(|t| {
            t.footer.pool == owner.pool
                && t.footer.shard == owner.shard
                && t.footer.seq.0 % segments == i as u64
                && t.bytes as u64 <= size
                && t.footer.first_lsn.0 > 0
        });
    }

    /// Takes all bytes of the segment at position `i`, which must be read record by record.
    pub fn take_segment(&mut self, i: usize, bytes: &[u8]) {
        let found = &mut self.found[i];
        found.unreadable |= bytes.is_empty();
        let seq = if found.sealed { found.seq() } else { found.expected.or(found.head) };
        let scanned = scan_segment(bytes, self.owner, seq.unwrap_or_default());
        if !found.sealed || scanned.last == found.last() {
            found.scanned = Some(scanned);
        } else if !self.mend(i, seq.unwrap_or_default(), scanned) {
            self.found[i].damaged = true;
        }
    }

    /// Takes the footer of the segment at position `i`.
    pub fn take_footer(&mut self, i: usize, bytes: &[u8]) {
        let found = &mut self.found[i];
        let seq = found.seq();
        match decode_footer(bytes).ok().filter(|(footer, _)| Some(footer.seq) == seq) {
            Some((_, entries)) => found.entries = Some(entries),
            None => found.unreadable_footer = true,
        }
    }

    /// Decides, when every first and last page is known, which segments are sealed and which must
    /// be read record by record.
    pub fn classify(&mut self) {
        for (i, found) in self.found.iter_mut().enumerate() {
            let sealed = found.tail.as_ref().map(|tail| tail.footer.seq);
            match (found.head, sealed) {
                (Some(head), sealed) if sealed.is_none_or(|sealed| head > sealed) => {
                    self.unsealed.insert(head, i);
                }
                (_, Some(sealed)) => {
                    found.sealed = true;
                    self.log.insert(sealed, i);
                }
                (_, None) => {}
            }
        }
        let footer = self.log.last_key_value().map(|(_, &i)| &self.found[i].tail);
        let start = footer.and_then(|tail| tail.as_ref()).map_or(SegmentSeq(1), |t| t.footer.start);
        let sealed = self.log.last_key_value().map_or(SegmentSeq(0), |(&seq, _)| seq);
        let newest = self.unsealed.last_key_value().map_or(sealed, |(&seq, _)| seq).max(sealed);
        let oldest = start.0.max((newest.0 + 2).saturating_sub(self.found.len() as u64));
        for seq in (oldest..=newest.0 + 1).map(SegmentSeq) {
            let i = self.position(seq);
            let found = &mut self.found[i];
            let is_live = found.sealed && found.seq() >= Some(start);
            if !self.unsealed.contains_key(&seq) && !is_live {
                // The remains of an earlier lap say nothing.
                found.expected = Some(seq);
                found.sealed = false;
                self.suspects.insert(seq, i);
            }
        }
        self.log.retain(|_, &mut i| self.found[i].sealed);
        self.unsealed.retain(|_, &mut i| self.found[i].expected.is_none());
    }

    pub(crate) fn position(&self, seq: SegmentSeq) -> usize {
        (seq.0 % self.found.len() as u64) as usize
    }

    /// Positions of the segments to read record by record.
    pub fn to_scan(&self) -> Vec<usize> {
        self.unsealed.values().chain(self.suspects.values()).copied().collect()
    }

    /// Assembles the log from the findings. If it is damaged, records may be missing: see
    /// [`Survey::lost`]. Fails if the remains contradict each other.
    pub fn assemble(&mut self) -> Result<(), String> {
        if let Err(damage) = self.assemble_whole() {
            self.salvage().map_err(|why| format!("{damage}; {why}"))?;
            let seq = self.log.last_key_value().map_or(SegmentSeq(1), |(seq, _)| seq.next());
            if self.found[self.position(seq)].unreadable {
                // It may hold the next records.
                self.holes.push(Hole { seq, records: 0, last: Lsn(u64::MAX) });
            }
        }
        self.check_end()?;
        let log = &self.log;
        self.orphans = self
            .unsealed
            .iter()
            .filter(|(seq, _)| !log.contains_key(seq))
            .map(|(_, &i)| i)
            .collect();
        Ok(())
    }

    /// Checks that the log can go on for longer than any log does.
    fn check_end(&self) -> Result<(), String> {
        let seq = self.log.last_key_value().map_or(SegmentSeq(0), |(&seq, _)| seq);
        match seq.0.max(self.last.lsn.0) > NUMBER_MAX / 2 {
            true => Err(format!("the log ends at {} in {seq}: no log is that long", self.last.lsn)),
            false => Ok(()),
        }
    }

    /// Notes the end that a stop has recorded. If the log ends before it, records are lost.
    pub fn expect_end(&mut self, end: Lsn) {
        self.cut_off = end.0.saturating_sub(self.last.lsn.0);
        if self.cut_off > 0 {
            let seq = self.log.last_key_value().map_or(SegmentSeq(1), |(seq, _)| *seq);
            self.holes.push(Hole { seq, records: self.cut_off, last: end });
        }
    }

    /// A message about lost records that may have held dirty blocks, if there are any.
    pub fn loss(&self) -> Option<String> {
        let first = self.lost().next()?;
        if self.cut_off > 0 && self.holes.len() == 1 {
            return Some(format!(
                "the log ends {} records before the end that the last stop has recorded: the cache \
                 device has lost them, or is an older copy; they are lost",
                self.cut_off
            ));
        }
        let records: u64 = self.lost().map(|hole| hole.records).sum();
        let count = match records {
            0 => "a part of the log that the device cannot read is lost".to_owned(),
            1 => "1 record of the log is lost".to_owned(),
            _ => format!("{records} records of the log are lost"),
        };
        Some(format!("{count}, the first in {}", first.seq))
    }

    /// Assembles a log from which nothing is missing.
    fn assemble_whole(&mut self) -> Result<(), String> {
        let mut durable = Lsn(0);
        for i in self.to_scan() {
            durable = durable.max(self.found[i].scanned.as_ref().map_or(Lsn(0), |s| s.durable));
        }
        let newest = self.log.last_key_value().map(|(&seq, &i)| (seq, i));
        if let Some((newest, i)) = newest {
            let footer = self.found[i].tail.as_ref().expect("sealed").footer;
            self.start = footer.start;
            self.clean = footer.clean;
            self.last = Link { lsn: footer.last_lsn, crc: footer.last_crc };
            self.log = self.log.split_off(&footer.start);
            // Segments before the newest footer are durable even if they lost their own.
            for (&seq, &i) in self.unsealed.range(footer.start..newest) {
                self.log.insert(seq, i);
            }
            self.extend(newest.next())?;
            self.check_links(newest)?;
        } else {
            self.start = SegmentSeq(1);
            self.extend(SegmentSeq(1))?;
        }
        if durable > self.last.lsn {
            return Err(format!(
                "the log ends at {}, but records up to {} were durable",
                self.last.lsn, durable
            ));
        }
        Ok(())
    }

    /// Accepts unsealed segments from `next` on, as long as each continues the one before.
    fn extend(&mut self, mut next: SegmentSeq) -> Result<(), String> {
        loop {
            let i = self.position(next);
            let found = &self.found[i];
            let scanned = found.scanned.as_ref().filter(|_| self.unsealed.contains_key(&next));
            let links = scanned.and_then(|s| s.before.zip(s.last));
            let Some((_, last)) = links.filter(|(before, _)| *before == self.last) else {
                // A place that cannot be read may hold the next records.
                return match found.unreadable {
                    true => Err(format!("{next} cannot be read from the cache device")),
                    false => Ok(()),
                };
            };
            let scanned = scanned.expect("it has links");
            self.start = self.start.max(scanned.start);
            self.clean = scanned.clean;
            self.last = last;
            self.log.insert(next, i);
            next = next.next();
        }
    }

    /// Checks that every segment from `start` up to `newest` is there and links to the next.
    fn check_links(&mut self, newest: SegmentSeq) -> Result<(), String> {
        let mut seq = newest;
        while seq > self.start {
            let this = self.log.get(&seq).and_then(|&i| self.found[i].first());
            let before = SegmentSeq(seq.0 - 1);
            let last = self.log.get(&before).and_then(|&i| self.found[i].last());
            if this.is_none() || this != last {
                if self.drop_damaged(before) {
                    return Ok(());
                }
                return Err(format!("{before} is missing or damaged, and may hold dirty blocks"));
            }
            seq = before;
        }
        if !self.log.contains_key(&self.start) {
            return Err(format!("{} is missing", self.start));
        }
        Ok(())
    }

    /// Drops a damaged segment and all before it from the log, if everything in them is clean.
    pub fn drop_damaged(&mut self, seq: SegmentSeq) -> bool {
        let after = seq.next();
        let Some(first) = self.log.get(&after).and_then(|&i| self.found[i].first()) else {
            return false;
        };
        if first.lsn >= self.clean {
            return false;
        }
        self.start = after;
        self.log = self.log.split_off(&after);
        true
    }
}
