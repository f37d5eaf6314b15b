//! Completion times of requests to an emulated device: pure arithmetic, no I/O, no clock.
//!
//! Requests are submitted, and ends are queried, with the current time. The same requests at the
//! same times end at the same times: the seed determines the initial angle of the platters. A flush
//! ends when all requests before it have ended.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use forebay_block::{ByteRange, Instant, IoOp};

use super::Profile;
use super::spindle::{Part, Spindle};
use crate::random::Numbers;

/// Length of an array's stripe unit, in bytes.
pub(super) const STRIPE_UNIT: u64 = 64 << 10;
/// Number of mirrored pairs that an array stripes over.
const PAIRS: u64 = 2;
/// Number of stripe units with data in a stripe of an array with parity.
const DATA_DISKS: u64 = 4;
/// Length of the data of such a stripe, in bytes.
pub(super) const FULL_STRIPE: u64 = DATA_DISKS * STRIPE_UNIT;
/// Latency that the network in front of an array adds to each request.
const SAN_LATENCY: Duration = Duration::from_micros(500);
/// Latency of a cloud volume per request.
const CLOUD_LATENCY: Duration = Duration::from_millis(1);
/// Operations per second of a cloud volume.
const CLOUD_OPERATIONS: u64 = 3000;
/// Bytes per second of a cloud volume.
const CLOUD_BYTES: u64 = 125_000_000;
/// Maximum number of bytes that a cloud volume counts as one operation.
const CLOUD_OPERATION_BYTES: u64 = 256 << 10;
const NANOS: u64 = 1_000_000_000;

/// The submitter of a request, and its name for the request.
pub(super) type Ticket = (usize, u64);

/// Timing of one emulated device, for all its queues.
pub(super) struct Model {
    medium: Medium,
    /// Latency added to each request.
    latency: Duration,
    serial: u64,
    outstanding: BTreeMap<u64, Outstanding>,
    /// Requests with a known end, soonest first.
    ends: BinaryHeap<Reverse<(Instant, u64)>>,
}

struct Outstanding {
    ticket: Ticket,
    /// Number of parts not yet served.
    parts: u32,
    /// The latest end of its parts.
    end: Instant,
    /// Whether it is a flush whose end is not known yet.
    is_waiting_flush: bool,
}

enum Medium {
    /// One disk.
    Disk(Spindle),
    /// Pairs of mirrors, striped.
    Array(Vec<[Spindle; 2]>),
    /// Disks of which each stripe has parity on another.
    Parity(Vec<Spindle>),
    /// Two leaky buckets.
    Buckets { operations: Instant, bytes: Instant },
}

impl Model {
    /// A device of `size` bytes with the timing of `profile`; `seed` sets the angle of its
    /// platters.
    pub(super) fn new(profile: Profile, size: u64, seed: u64) -> Self {
        let mut phases = Numbers::new(seed);
        let medium = match profile {
            Profile::Hdd => Medium::Disk(Spindle::new(size, phases.next())),
            Profile::Raid10x4 | Profile::San => {
                let share = size.div_ceil(PAIRS);
                let mut disk = || Spindle::new(share, phases.next());
                Medium::Array((0..PAIRS).map(|_| [disk(), disk()]).collect())
            }
            Profile::Raid5x5 => {
                let share = size.div_ceil(DATA_DISKS);
                let disks = (0..=DATA_DISKS).map(|_| Spindle::new(share, phases.next()));
                Medium::Parity(disks.collect())
            }
            Profile::Cloud => Medium::Buckets { operations: Instant(0), bytes: Instant(0) },
        };
        let latency = match profile {
            Profile::Hdd | Profile::Raid10x4 | Profile::Raid5x5 => Duration::ZERO,
            Profile::San => SAN_LATENCY,
            Profile::Cloud => CLOUD_LATENCY,
        };
        let (outstanding, ends) = (BTreeMap::new(), BinaryHeap::new());
        Self { medium, latency, serial: 0, outstanding, ends }
    }

    /// Submits a request at `now`, which must not be before any earlier `now`.
    pub(super) fn submit(&mut self, now: Instant, ticket: Ticket, op: IoOp, range: ByteRange) {
        self.serve(now);
        let serial = self.serial;
        self.serial += 1;
        let is_waiting_flush = op == IoOp::Flush && !self.outstanding.is_empty();
        let mut entry = Outstanding { ticket, parts: 0, end: now, is_waiting_flush };
        if !matches!(op, IoOp::Flush | IoOp::Discard) && !range.is_empty() {
            self.dispatch(now, serial, op, range, &mut entry);
        }
        if entry.parts == 0 && !is_waiting_flush {
            self.ends.push(Reverse((entry.end + self.latency, serial)));
        }
        self.outstanding.insert(serial, entry);
    }

    fn dispatch(
        &mut self,
        now: Instant,
        serial: u64,
        op: IoOp,
        range: ByteRange,
        entry: &mut Outstanding,
    ) {
        let part = |at, len, updates| Part { serial, at, len, updates, arrived: now };
        match &mut self.medium {
            Medium::Disk(disk) => {
                disk.push(part(range.offset, range.len, false));
                entry.parts = 1;
            }
            Medium::Array(pairs) => {
                for (pair, mirrors) in pairs.iter_mut().enumerate() {
                    let share = share_of_pair(range, pair as u64);
                    if share.is_empty() {
                        continue;
                    }
                    let part = part(share.offset, share.len, false);
                    if op == IoOp::Read {
                        nearer(mirrors, part.at).push(part);
                        entry.parts += 1;
                    } else {
                        mirrors.iter_mut().for_each(|mirror| mirror.push(part));
                        entry.parts += 2;
                    }
                }
            }
            Medium::Parity(disks) => {
                let mut push = |disk: usize, at: u64, len: u64, updates: bool| {
                    disks[disk].push(part(at, len, updates));
                    entry.parts += 1;
                };
                for row in range.offset / FULL_STRIPE..range.end().div_ceil(FULL_STRIPE) {
                    parts_of_row(range, row, op == IoOp::Read, &mut push);
                }
            }
            Medium::Buckets { operations, bytes } => {
                let start = now.max(*operations).max(*bytes);
                let count = range.len.div_ceil(CLOUD_OPERATION_BYTES);
                *operations = Instant(start.0 + count * NANOS / CLOUD_OPERATIONS);
                let drip = u128::from(range.len) * u128::from(NANOS) / u128::from(CLOUD_BYTES);
                *bytes = Instant(start.0 + drip as u64);
                entry.end = start;
            }
        }
    }

    /// Appends the requests that have ended by `now`, in the order of their ends.
    pub(super) fn ended(&mut self, now: Instant, tickets: &mut Vec<Ticket>) {
        self.serve(now);
        while let Some(&Reverse((end, serial))) = self.ends.peek() {
            if end > now {
                break;
            }
            self.ends.pop();
            let entry = self.outstanding.remove(&serial);
            tickets.push(entry.expect("an end is of a request outstanding").ticket);
            // A flush with no request before it any more ends with the last of them.
            if let Some(mut first) = self.outstanding.first_entry()
                && std::mem::take(&mut first.get_mut().is_waiting_flush)
            {
                self.ends.push(Reverse((end, *first.key())));
            }
        }
    }

    /// The time of the next known end.
    pub(super) fn next_event(&self) -> Option<Instant> {
        let known = self.ends.peek().map(|&Reverse((end, _))| end);
        let served = match &self.medium {
            Medium::Disk(disk) => disk.next_end(),
            Medium::Array(pairs) => pairs.iter().flatten().filter_map(Spindle::next_end).min(),
            Medium::Parity(disks) => disks.iter().filter_map(Spindle::next_end).min(),
            Medium::Buckets { .. } => None,
        };
        known.into_iter().chain(served).min()
    }

    /// Advances the disks to `now`.
    fn serve(&mut self, now: Instant) {
        let Self { medium, latency, outstanding, ends, .. } = self;
        let mut ended = |serial: u64, end: Instant| {
            let entry = outstanding.get_mut(&serial);
            let entry = entry.expect("a part is of a request outstanding");
            entry.parts -= 1;
            entry.end = entry.end.max(end);
            if entry.parts == 0 {
                ends.push(Reverse((entry.end + *latency, serial)));
            }
        };
        match medium {
            Medium::Disk(disk) => disk.advance(now, &mut ended),
            Medium::Array(pairs) => {
                pairs.iter_mut().flatten().for_each(|disk| disk.advance(now, &mut ended));
            }
            Medium::Parity(disks) => {
                disks.iter_mut().for_each(|disk| disk.advance(now, &mut ended));
            }
            Medium::Buckets { .. } => {}
        }
    }
}

/// The part of a range on each disk of a pair. Stripe units alternate between the pairs, so a
/// pair's part of a range is contiguous.
fn share_of_pair(range: ByteRange, pair: u64) -> ByteRange {
    let place = |byte: u64| {
        let (row, within) = (byte / (STRIPE_UNIT * PAIRS), byte % (STRIPE_UNIT * PAIRS));
        row * STRIPE_UNIT + within.saturating_sub(pair * STRIPE_UNIT).min(STRIPE_UNIT)
    };
    let start = place(range.offset);
    ByteRange { offset: start, len: place(range.end()) - start }
}

/// Calls `push` with disk, place, length and whether it updates, for the work of a read or a write
/// of `range` on each disk in one row of an array with parity. The parity moves by a disk from row
/// to row. A write of a whole row writes all of it; any other reads old data and old parity first.
fn parts_of_row(
    range: ByteRange,
    row: u64,
    is_read: bool,
    push: &mut impl FnMut(usize, u64, u64, bool),
) {
    let disks = DATA_DISKS + 1;
    let parity = disks - 1 - row % disks;
    let start = row * FULL_STRIPE;
    // The bytes of each unit, from its start.
    let within = |unit: u64| {
        let from = start + unit * STRIPE_UNIT;
        let first = range.offset.clamp(from, from + STRIPE_UNIT) - from;
        let end = range.end().clamp(from, from + STRIPE_UNIT) - from;
        (first, end)
    };
    let is_full = range.offset <= start && range.end() >= start + FULL_STRIPE;
    let (mut first_of_all, mut end_of_all) = (STRIPE_UNIT, 0);
    for unit in 0..DATA_DISKS {
        let (first, end) = within(unit);
        if first < end {
            let disk = (parity + 1 + unit) % disks;
            push(disk as usize, row * STRIPE_UNIT + first, end - first, !is_read && !is_full);
            (first_of_all, end_of_all) = (first_of_all.min(first), end_of_all.max(end));
        }
    }
    if !is_read && first_of_all < end_of_all {
        let (at, len) = (row * STRIPE_UNIT + first_of_all, end_of_all - first_of_all);
        push(parity as usize, at, len, !is_full);
    }
}

/// The mirror to read from: the one that continues a stream, has less load, or is nearer, in this
/// order.
fn nearer(mirrors: &mut [Spindle; 2], at: u64) -> &mut Spindle {
    let cost = |disk: &Spindle| {
        let distance = disk.distance(at);
        (distance != 0, disk.load(), distance)
    };
    let second = cost(&mirrors[1]) < cost(&mirrors[0]);
    &mut mirrors[usize::from(second)]
}

#[cfg(test)]
mod tests;
