//! The form in which a block is stored, depending on the state of RAM, the log and other blocks.

use forebay_block::testing::noise;
use forebay_codec::crc32c;
use forebay_format::{EntryKind, SegmentSeq};

use super::*;
use crate::api::ContentLocality;
use crate::cache::Cache;
use crate::contents::{Place, base_key};
use crate::log::builder::{Expect, Payload, Pending};
use crate::testing::rooms::{BLOCKS, Rooms, key};
use forebay_policy::Standing;

/// Forms, and the rooms around them.
struct Bed {
    rooms: Rooms,
    forms: Forms,
}

impl Bed {
    fn new(content: ContentLocality, compress: bool) -> Self {
        let mut rooms = Rooms::new(16);
        (rooms.config.content, rooms.config.compress) = (content, compress);
        let forms = Forms::new(content == ContentLocality::Similar, BLOCKS);
        Self { rooms, forms }
    }

    /// Blocks are stored uncompressed, or against versions and blocks that RAM has.
    fn rewriting() -> Self {
        Self::new(ContentLocality::Rewrite, false)
    }

    fn store(&mut self, store: impl FnOnce(&mut Forms, &mut Context<'_>)) -> Pending {
        let Cache { config, now, contents, ram, log, locks, stats, .. } = &mut self.rooms.cache;
        let now = *now;
        let mut cx = Context { now, config, contents, ram, log, locks, stats };
        store(&mut self.forms, &mut cx);
        *self.rooms.log.builder().pending.last().expect("it was stored")
    }

    /// Stores a block as a client's write does, which also puts it into RAM.
    fn write(&mut self, block: u64, bytes: &[u8]) -> Pending {
        let pending = self.store(|forms, cx| forms.store_written(cx, key(block), bytes));
        assert_eq!((pending.key, pending.count, pending.dirty), (key(block), 1, true));
        self.rooms.ram.put(key(block), bytes, Standing::Doubled);
        pending
    }

    /// Writes a block in a record of its own; returns its place.
    fn written(&mut self, block: u64, bytes: &[u8]) -> Place {
        self.write(block, bytes);
        self.rooms.closed();
        self.rooms.contents.get(key(block)).expect("it is in the log")
    }

    fn copy(&mut self, copy: Copied, now: Place) -> Pending {
        let pending = self.store(|forms, cx| forms.store_copy(cx, &copy, now));
        assert_eq!((pending.expect, pending.dirty), (Expect::At(now), now.dirty));
        pending
    }
}

/// A block that compresses well.
fn text(seed: u64) -> Vec<u8> {
    let words = noise(seed, 64);
    (0..BLOCK_SIZE).map(|at| words[(at / 3 + at % 7 * 5) % words.len()]).collect()
}

/// The same block with some bytes changed.
fn changed(block: &[u8], at: usize) -> Vec<u8> {
    let mut changed = block.to_vec();
    changed[at..at + 8].copy_from_slice(&[0x5a; 8]);
    changed
}

#[test]
fn zeros_are_an_entry_without_payload() {
    for content in [ContentLocality::Independent, ContentLocality::Rewrite] {
        let mut bed = Bed::new(content, true);
        let pending = bed.write(1, &[0; BLOCK_SIZE]);
        assert_eq!((pending.kind, pending.len, pending.crc), (EntryKind::Zero, 0, 0));
        assert!(matches!(pending.payload, Payload::None), "{pending:?}");
        assert_eq!(pending.expect, Expect::Always);
    }
}

#[test]
fn a_block_alone_is_stored_as_zstd_lz4_or_as_it_is() {
    let mut bed = Bed::new(ContentLocality::Independent, true);
    let raw = bed.write(1, &noise(1, BLOCK_SIZE));
    assert_eq!((raw.kind, usize::from(raw.len)), (EntryKind::Raw, BLOCK_SIZE));
    assert_eq!(raw.crc, crc32c(&noise(1, BLOCK_SIZE)));
    let zstd = bed.write(2, &text(2));
    assert_eq!(zstd.kind, EntryKind::Zstd);
    bed.forms.background.charge(bed.rooms.now, std::time::Duration::from_secs(1));
    let lz4 = bed.write(3, &text(3));
    assert_eq!(lz4.kind, EntryKind::Lz4, "the time for zstd is spent");
    bed.rooms.config.compress = false;
    assert_eq!(bed.write(4, &text(4)).kind, EntryKind::Raw);
    let record = bed.rooms.closed();
    let start = record.offset as usize % crate::testing::SEGMENT as usize;
    for (block, bytes) in [(1, noise(1, BLOCK_SIZE)), (2, text(2)), (3, text(3)), (4, text(4))] {
        let place = bed.rooms.contents.get(key(block)).expect("it is in the log");
        let at = place.offset as usize - start;
        let payload = &record.buf[at..at + usize::from(place.len)];
        let mut room = [0; BLOCK_SIZE];
        assert_eq!(decode(&place, payload, &mut room), Some(&bytes[..]), "{:?}", place.kind);
    }
}

/// Closing the record ended the process: the base was gone.
#[test]
fn a_block_that_the_same_record_says_is_gone_is_no_base() {
    let mut bed = Bed::rewriting();
    let old = noise(1, BLOCK_SIZE);
    bed.written(1, &old);
    bed.rooms.mark_clean(1);
    bed.rooms.log.builder().push_bare(key(1), 1, EntryKind::Invalidate, false, Expect::Always);
    let whole = bed.write(1, &changed(&old, 100));
    assert_eq!((whole.kind, whole.expect), (EntryKind::Raw, Expect::Always));
    bed.rooms.closed();
    assert_eq!(bed.rooms.contents.get(key(1)).map(|place| place.kind), Some(EntryKind::Raw));
}

#[test]
fn a_rewrite_is_a_delta_against_the_version_that_ram_has() {
    let mut bed = Bed::rewriting();
    let old = noise(1, BLOCK_SIZE);
    let base = bed.written(1, &old);
    for at in [100, 900] {
        let delta = bed.write(1, &changed(&old, at));
        assert_eq!((delta.kind, delta.expect), (EntryKind::Delta, Expect::Over(base)));
        assert!(delta.len < 64, "{delta:?}");
        let kept = bed.rooms.ram.peek(base_key(key(1)), <[u8]>::to_vec);
        assert_eq!(kept, Some(old.clone()), "RAM keeps the base for the next one");
        bed.rooms.closed();
        let now = bed.rooms.contents.get(key(1)).expect("it is in the log");
        assert_eq!(now.kind, EntryKind::Delta);
        assert!(bed.rooms.contents.base_of_associate(key(1)).is_same_version(&base));
    }
    assert_eq!((bed.rooms.stats.delta_tries, bed.rooms.stats.delta_blocks), (2, 2));
    let whole = bed.write(1, &noise(2, BLOCK_SIZE));
    assert_eq!((whole.kind, whole.expect), (EntryKind::Raw, Expect::Always), "nothing is alike");
    bed.rooms.closed();
    assert!(!bed.rooms.contents.has_base(key(1)));
    assert!(!bed.rooms.ram.contains(base_key(key(1))), "a base that is not needed leaves RAM");
}

#[test]
fn a_rewrite_without_a_usable_base_is_stored_whole() {
    let old = noise(1, BLOCK_SIZE);
    let rewrite = |spoil: &dyn Fn(&mut Bed)| {
        let mut bed = Bed::rewriting();
        bed.written(1, &old);
        spoil(&mut bed);
        bed.write(1, &changed(&old, 100)).kind
    };
    assert_eq!(rewrite(&|_| ()), EntryKind::Delta);
    assert_eq!(rewrite(&|bed| bed.rooms.ram.remove(key(1))), EntryKind::Raw, "not in RAM");
    let leaves = |bed: &mut Bed| bed.rooms.log.set_leaving(Some(SegmentSeq(1)), None);
    assert_eq!(rewrite(&leaves), EntryKind::Raw, "its segment is being reclaimed");
    let copied = |bed: &mut Bed| {
        let now = bed.rooms.contents.get(key(1)).expect("it is in the log");
        bed.copy(Copied::new(key(1), now, noise(1, BLOCK_SIZE)), now);
    };
    assert_eq!(rewrite(&copied), EntryKind::Raw, "the base is about to move");
    let independent = |bed: &mut Bed| bed.rooms.config.content = ContentLocality::Independent;
    assert_eq!(rewrite(&independent), EntryKind::Raw);
    let mut bed = Bed::rewriting();
    bed.write(1, &old);
    assert_eq!(bed.write(1, &changed(&old, 100)).kind, EntryKind::Raw, "no place in the log yet");
}

#[test]
fn equal_blocks_share_a_payload() {
    let mut bed = Bed::rewriting();
    let bytes = noise(1, BLOCK_SIZE);
    let first = bed.written(1, &bytes);
    let second = bed.write(2, &bytes);
    let Payload::Shared(shared) = second.payload else { panic!("{second:?}") };
    assert_eq!((shared.seq, shared.segment, shared.offset), (SegmentSeq(1), 1, first.offset));
    assert_eq!((second.kind, second.len, second.crc), (EntryKind::Raw, first.len, first.crc));
    assert_eq!(bed.rooms.stats.duplicate_blocks, 1);
    bed.rooms.closed();
    let place = bed.rooms.contents.get(key(2)).expect("it is in the log");
    assert!(place.is_same_version(&first));
    assert!(bed.rooms.contents.unsettled(key(2)).is_some());
    assert_eq!(bed.rooms.contents.check(), Ok(()));
}

/// Otherwise reclaim of a segment would have no bound: a fill pattern may be in millions of blocks.
#[test]
fn few_blocks_share_the_payloads_of_one_segment() {
    let mut bed = Bed::new(ContentLocality::Rewrite, false);
    let bytes = noise(1, BLOCK_SIZE);
    let first = bed.written(1, &bytes);
    bed.rooms.seal_open_segment();
    let shares =
        |bed: &mut Bed, block| matches!(bed.write(block, &bytes).payload, Payload::Shared(_));
    let most = u64::from(crate::testing::SEGMENT / crate::limits::SHARERS_ONE_IN);
    for block in 0..most {
        assert!(shares(&mut bed, 100 + block), "{block}");
        assert!(bed.rooms.ram.get(key(1)).is_some(), "it stays in RAM");
        bed.rooms.log_record();
    }
    assert!(!shares(&mut bed, 90), "that is enough");
    bed.rooms.log_record();
    assert_ne!(bed.rooms.contents.get(key(90)).map(|at| at.segment), Some(first.segment));
    assert!(shares(&mut bed, 91), "the next ones share the newest payload");
}

#[test]
fn a_block_that_only_looks_equal_has_a_payload_of_its_own() {
    let bytes = noise(1, BLOCK_SIZE);
    let is_shared = |spoil: &dyn Fn(&mut Bed)| {
        let mut bed = Bed::rewriting();
        bed.written(1, &bytes);
        spoil(&mut bed);
        matches!(bed.write(2, &bytes).payload, Payload::Shared(_))
    };
    assert!(is_shared(&|_| ()));
    assert!(!is_shared(&|bed| bed.rooms.ram.remove(key(1))), "nothing to compare with");
    assert!(
        !is_shared(&|bed| bed.rooms.ram.put(key(1), &noise(2, BLOCK_SIZE), Standing::Doubled)),
        "other bytes"
    );
    let locked = |bed: &mut Bed| assert!(bed.rooms.locks.acquire(key(1), crate::slab::Id(1)));
    assert!(!is_shared(&locked), "RAM may have a version that is not in the log");
    assert!(
        !is_shared(&|bed| bed.rooms.log.set_leaving(Some(SegmentSeq(1)), None)),
        "its segment goes"
    );
    let rewritten = |bed: &mut Bed| {
        let other = changed(&noise(1, BLOCK_SIZE), 9);
        for bytes in [other, noise(1, BLOCK_SIZE)] {
            assert_eq!(bed.written(1, &bytes).kind, EntryKind::Delta);
        }
    };
    assert!(!is_shared(&rewritten), "a delta is no whole block");
    let independent = |bed: &mut Bed| bed.rooms.config.content = ContentLocality::Independent;
    assert!(!is_shared(&independent));
}

#[test]
fn a_copy_keeps_the_checksum_of_the_first_write() {
    let mut bed = Bed::rewriting();
    let now = bed.written(1, &noise(1, BLOCK_SIZE));
    // The bytes were corrupted after they were verified: readers of the copy must notice.
    let damaged = changed(&noise(1, BLOCK_SIZE), 700);
    for compress in [false, true] {
        bed.rooms.config.compress = compress;
        for kind in [EntryKind::Raw, EntryKind::Lz4, EntryKind::Zstd] {
            let place = Place { kind, crc: 0x0bad_cafe, ..now };
            let copy = bed.copy(Copied::new(key(1), place, damaged.clone()), place);
            assert_eq!((copy.kind, copy.crc), (kind, place.crc), "compress {compress}");
            bed.rooms.log.builder().clear();
        }
    }
}

#[test]
fn a_copy_is_made_denser_if_it_can_be() {
    let mut bed = Bed::rewriting();
    let now = bed.written(1, &text(1));
    let copy = |bed: &mut Bed| bed.copy(Copied::new(key(1), now, text(1)), now);
    assert_eq!(copy(&mut bed).kind, EntryKind::Raw);
    bed.rooms.config.compress = true;
    let dense = copy(&mut bed);
    assert_eq!(dense.kind, EntryKind::Zstd);
    assert!(dense.crc != now.crc && dense.len < now.len / 2, "{dense:?}");
}

#[test]
fn a_block_whose_base_goes_is_copied_whole() {
    let mut bed = Bed::rewriting();
    let old = noise(1, BLOCK_SIZE);
    bed.written(1, &old);
    let delta = bed.written(1, &changed(&old, 100));
    assert_eq!(delta.kind, EntryKind::Delta);
    let (kind, len) = (EntryKind::Raw, BLOCK_SIZE as u16);
    for (bytes, expected) in
        [(changed(&old, 100), EntryKind::Raw), (vec![0; BLOCK_SIZE], EntryKind::Zero)]
    {
        let place = Place { kind, len, crc: crc32c(&bytes), ..delta };
        assert_eq!(bed.copy(Copied::new(key(1), place, bytes), delta).kind, expected);
    }
}

#[test]
fn a_miss_is_stored_against_a_block_like_it_where_that_is_wanted() {
    let old = noise(1, BLOCK_SIZE);
    let admit = |bed: &mut Bed, block: u64, bytes: &[u8]| {
        bed.forms.begin_turn();
        let pending = bed.store(|forms, cx| forms.store_admitted(cx, key(block), bytes));
        assert_eq!((pending.dirty, pending.expect), (false, Expect::Absent));
        bed.rooms.ram.put(key(block), bytes, Standing::Doubled);
        bed.rooms.closed();
        bed.rooms.settle();
        pending
    };
    for content in [ContentLocality::Rewrite, ContentLocality::Similar] {
        let mut bed = Bed::new(content, false);
        // Blocks in the oldest segment, the next to be reclaimed, are not used as bases.
        for block in 100..107 {
            admit(&mut bed, block, &noise(block, BLOCK_SIZE));
        }
        let wanted = content == ContentLocality::Similar;
        let first = admit(&mut bed, 1, &old);
        assert_eq!((first.kind, first.against.is_some()), (EntryKind::Raw, false));
        let similar = admit(&mut bed, 2, &changed(&old, 2000));
        let expected = if wanted { EntryKind::Similar } else { EntryKind::Raw };
        assert_eq!((similar.kind, similar.against.is_some()), (expected, wanted));
        let equal = admit(&mut bed, 3, &old);
        assert_eq!(matches!(equal.payload, Payload::Shared(_)), wanted);
        assert_eq!(bed.rooms.contents.check(), Ok(()));
    }
}
