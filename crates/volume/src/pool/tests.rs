//! The table of `pool`, row by row.

use super::*;

fn spec(name: &str, size: u64) -> VolumeSpec {
    let identity = format!("file:/{name}");
    VolumeSpec {
        name: name.into(),
        size,
        path: identity.clone(),
        identity,
        fingerprint: Some(7),
        blank: false,
        sampled: None,
        accepted: false,
        was_here: None,
    }
}

/// A division in two shards.
fn divided(spare_percent: u8, log_percent: u8) -> Division {
    Division { shards: 2, spare_percent, log_percent }
}

fn request<'a>(
    copies: [&'a [u8]; 2],
    volumes: &'a [VolumeSpec],
    witnesses: &'a [Witness],
) -> OpenRequest<'a> {
    OpenRequest {
        device_size: 1 << 30,
        copies,
        announcement: BLANK,
        volumes,
        witnesses,
        absent: &[],
        division: divided(SPARE_PERCENT, ALL_LOG),
        kept_ids: &[],
        forgotten: &[],
        reset: false,
        keeps_format: false,
        uuid: [9; 16],
        now_unix: 1,
    }
}

fn encoded(superblock: &Superblock) -> Vec<u8> {
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    superblock.encode(&mut bytes);
    bytes
}

const BLANK: &[u8] = &[0; SUPERBLOCK_BYTES];

fn stopped(volumes: &[VolumeSpec]) -> Superblock {
    let opened = open(&request([BLANK, BLANK], volumes, &[])).expect("a blank device is taken");
    closed(opened.superblock, &[(VolumeId(0), Some(7))])
}

fn why(result: Result<Opened, Refusal>) -> String {
    result.expect_err("it is refused").to_string()
}

/// The program before, which may come back after a hand-over, may not know the newest format.
#[test]
fn a_pool_gets_the_newest_format_unless_the_program_before_may_come_back() {
    let volumes = [spec("a", 1 << 20)];
    let division = divided(SPARE_PERCENT, 8);
    let made = open(&OpenRequest { division, ..request([BLANK, BLANK], &volumes, &[]) });
    let made = made.expect("a blank device is taken").superblock;
    assert!(made.log_segments.is_some() && made.unit_entries);
    let before = encoded(&Superblock { unit_entries: false, ..made.clone() });
    let log = encoded(&Superblock { unit_entries: false, log_segments: None, ..made.clone() });
    let newest = encoded(&made);
    for (pool, keeps_format, unit_entries) in [
        (&before, true, false),
        (&before, false, true),
        (&newest, true, true),
        (&newest, false, true),
        (&log, true, false),
        (&log, false, false),
    ] {
        let copies = [&pool[..], BLANK];
        let again = open(&OpenRequest { keeps_format, ..request(copies, &volumes, &[]) });
        assert_eq!(again.expect("it is the same pool").superblock.unit_entries, unit_entries);
    }
}

#[test]
fn a_blank_device_becomes_a_pool_and_is_found_again() {
    let volumes = [spec("a", 1 << 20), spec("b", 512)];
    let opened = open(&request([BLANK, BLANK], &volumes, &[])).expect("a blank device is taken");
    assert!(opened.fresh && opened.superblock.epoch == 1 && opened.copy == 0);
    assert_eq!(opened.ids, [VolumeId(0), VolumeId(1)]);
    let first = encoded(&opened.superblock);
    let again = open(&request([&first, BLANK], &volumes, &[])).expect("the pool is there");
    assert!(!again.fresh && again.superblock.epoch == 2 && again.copy == 1);
    let second = encoded(&again.superblock);
    let third = open(&request([&first, &second], &volumes, &[])).expect("the newer copy counts");
    assert_eq!((third.superblock.generation, third.copy), (3, 0));
    let mut torn = second.clone();
    torn[100] ^= 1;
    let back = open(&request([&first, &torn], &volumes, &[])).expect("one copy is enough");
    assert_eq!((back.superblock.generation, back.copy), (2, 1));
}

#[test]
fn a_pool_of_more_shards_than_are_served_is_refused() {
    let volumes = [spec("a", 1 << 20)];
    let mut made = stopped(&volumes);
    let area = made.shards[0];
    made.segment_size = 64 << 10;
    let segment = u64::from(made.segment_size);
    let len = area.len / 65 / segment * segment;
    let areas = (0..65).map(|at| ShardArea { offset: area.offset + at * len, len });
    made.shards = areas.collect();
    let said = why(open(&request([&encoded(&made), BLANK], &volumes, &[])));
    assert!(said.contains("65 shards") && said.contains("--reset-cache"), "{said}");
    made.shards.pop();
    open(&request([&encoded(&made), BLANK], &volumes, &[])).expect("64 are served");
}

#[test]
fn the_copy_of_a_start_that_was_flushed_is_not_written_over() {
    let volumes = [spec("a", 1 << 20)];
    let mut first = stopped(&volumes);
    first.clean = false;
    let witness = |epoch| {
        let (uuid, trust) = (first.uuid, Trust::Full);
        [Witness { uuid, epoch, trust, dirty: true, primaries: None }]
    };
    let a = encoded(&first);
    let second = open(&request([&a, BLANK], &volumes, &witness(1))).expect("the pool is there");
    let b = encoded(&second.superblock);
    assert_eq!((second.superblock.epoch, second.copy), (2, 1));
    // The second start's flush failed, so its witness was not stored: its copy may be gone after a
    // crash.
    let third = open(&request([&a, &b], &volumes, &witness(1))).expect("both are good");
    assert_eq!((third.superblock.epoch, third.copy), (3, 1));
    let third = open(&request([&b, &a], &volumes, &witness(1))).expect("both are good");
    assert_eq!((third.superblock.epoch, third.copy), (3, 0));
    // The second start's copy was flushed: the older one is overwritten.
    let third = open(&request([&a, &b], &volumes, &witness(2))).expect("both are good");
    assert_eq!((third.superblock.epoch, third.copy), (3, 0));
    // The copy of a stop may not have been flushed, so it is overwritten.
    let stop = encoded(&closed(second.superblock.clone(), &[]));
    let third = open(&request([&stop, &b], &volumes, &witness(2))).expect("both are good");
    assert_eq!((third.superblock.generation, third.copy), (second.superblock.generation + 2, 0));
    // A copy of another pool is useless for this one.
    let other = Superblock { uuid: [8; 16], generation: 9, ..first.clone() };
    let fourth = open(&request([&encoded(&other), &a], &volumes, &witness(1)));
    assert_eq!(fourth.map(|opened| opened.copy), Ok(1));
}

#[test]
fn what_is_not_ours_is_not_overwritten() {
    let volumes = [spec("a", 1 << 20)];
    let other = vec![0x5a; SUPERBLOCK_BYTES];
    assert!(why(open(&request([&other, BLANK], &volumes, &[]))).contains("--reset-cache"));
    let forced = OpenRequest { reset: true, ..request([&other, BLANK], &volumes, &[]) };
    assert!(open(&forced).expect("it was asked for").fresh);
    let mut damaged = encoded(&stopped(&volumes));
    damaged[200] ^= 1;
    assert!(why(open(&request([&damaged, &damaged], &volumes, &[]))).contains("damaged"));
}

#[test]
fn an_interrupted_first_start_is_begun_again() {
    let volumes = [spec("a", 1 << 20)];
    let opened = open(&request([BLANK, BLANK], &volumes, &[])).expect("a blank device is taken");
    let garbage = vec![0x5a; SUPERBLOCK_BYTES];
    let writes = opened.writes();
    let places: Vec<u64> = writes.iter().map(|(at, _)| *at).collect();
    assert_eq!(places, [ANNOUNCEMENT_OFFSET, 0, SUPERBLOCK_OFFSETS[1], ANNOUNCEMENT_OFFSET]);
    let all = ByteRange::new(AREA_OFFSET, opened.superblock.device_size - AREA_OFFSET);
    assert_eq!(opened.discard(), Some(all));
    // Each write is interrupted in turn; garbage may be in its place.
    for cut in 0..writes.len() {
        let mut device = vec![0; AREA_OFFSET as usize];
        for (i, (at, bytes)) in writes[..=cut].iter().enumerate() {
            let bytes = if i == cut { &garbage[..] } else { &bytes[..] };
            device[*at as usize..*at as usize + bytes.len()].copy_from_slice(bytes);
        }
        let at = |at: u64| &device[at as usize..at as usize + SUPERBLOCK_BYTES];
        let copies = SUPERBLOCK_OFFSETS.map(at);
        let announcement = at(ANNOUNCEMENT_OFFSET);
        let again = OpenRequest { announcement, ..request(copies, &volumes, &[]) };
        let again = open(&again).expect("nothing was served");
        assert_eq!(again.fresh, cut < 2, "cut off in write {cut}");
        assert!(again.announced, "what is left goes");
    }
    // Without an announcement, there may have been data.
    let mut torn = encoded(&stopped(&volumes));
    torn[100] ^= 1;
    assert!(why(open(&request([&torn, BLANK], &volumes, &[]))).contains("damaged"));
    assert!(why(open(&request([BLANK, &torn], &volumes, &[]))).contains("damaged"));
}

#[test]
fn what_a_start_leaves_over_goes_with_the_next() {
    let volumes = [spec("a", 1 << 20)];
    let copy = encoded(&stopped(&volumes));
    let clean = open(&request([&copy, BLANK], &volumes, &[])).expect("the pool is there");
    assert_eq!((clean.writes().len(), clean.discard()), (1, None));
    let left = OpenRequest { announcement: &copy, ..request([&copy, BLANK], &volumes, &[]) };
    let opened = open(&left).expect("the pool is there");
    let writes = opened.writes();
    let places: Vec<u64> = writes.iter().map(|(at, _)| *at).collect();
    assert_eq!(places, [SUPERBLOCK_OFFSETS[1], ANNOUNCEMENT_OFFSET]);
    assert!(writes[1].1.iter().all(|&byte| byte == 0));
}

#[test]
fn a_cache_follows_its_primary_only() {
    let volumes = [spec("a", 1 << 20)];
    let copy = encoded(&stopped(&volumes));
    let try_with = |change: &dyn Fn(&mut VolumeSpec)| {
        let mut volumes = volumes.clone();
        change(&mut volumes[0]);
        open(&request([&copy, BLANK], &volumes, &[]))
    };
    assert!(try_with(&|_| {}).is_ok());
    assert!(try_with(&|v| v.size = 2 << 20).is_ok());
    assert!(try_with(&|v| v.fingerprint = None).is_ok());
    assert!(try_with(&|v| v.identity = "file:/moved".into()).is_ok());
    assert!(why(try_with(&|v| v.size = 512)).contains("shrunk from 1048576 to 512"));
    assert!(why(try_with(&|v| v.fingerprint = Some(8))).contains("changed since"));
    let other = |v: &mut VolumeSpec| {
        (v.identity, v.path) = ("file:/other".into(), "file:/other".into());
        v.fingerprint = Some(8);
    };
    assert!(why(try_with(&other)).contains("belongs to primary file:/a"));
    let renamed = try_with(&|v| v.name = "z".into()).expect("it is known by its primary");
    assert_eq!(renamed.superblock.volumes[0].name, "z");
}

/// Regression: disks exchanged their names at a boot, and the clients of each volume used another
/// one's disk. A configuration that has other names on purpose has other addresses, too.
#[test]
fn disks_that_exchange_their_names_are_not_served_as_each_other() {
    let paths = ["/dev/sdb", "/dev/sdc", "/dev/sdd"];
    let wwids = ["wwid:x", "wwid:y", "wwid:z"];
    let disk = |name: &str, wwid: usize, path: usize, was_here: Option<u8>| VolumeSpec {
        identity: wwids[wwid].into(),
        path: paths[path].into(),
        was_here: was_here.map(VolumeId),
        ..spec(name, 1 << 20)
    };
    let names = ["a", "b", "c"];
    let volumes: Vec<_> = (0..3).map(|at| disk(names[at], at, at, None)).collect();
    let copy = encoded(&stopped(&volumes));
    let start = |volumes: &[VolumeSpec], absent: &[Absent]| {
        open(&OpenRequest { absent, ..request([&copy, BLANK], volumes, &[]) })
    };
    let with = |names: [&str; 3], wwids: [usize; 3], paths: [usize; 3]| {
        let one = |at: usize| disk(names[at], wwids[at], paths[at], Some(paths[at] as u8));
        start(&[one(0), one(1), one(2)], &[])
    };
    let same = [0, 1, 2];
    for found in [[1, 0, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1]] {
        let said = why(with(names, found, same));
        assert!(said.contains("exchanged their names") && said.contains("by-id"), "{said}");
        // The configuration is corrected: each volume has its own disk again.
        let paths = same.map(|disk| found.iter().position(|&at| at == disk).expect("one has it"));
        with(names, same, paths).expect("each volume has its disk");
        // Nobody renames a volume to another one's name without its address.
        assert!(why(with(["d", "e", "f"], found, same)).contains("exchanged"));
        // Volumes exchange their names on purpose, and the addresses go along.
        with(names, found, found).expect("they are renamed");
    }
    let said = why(with(names, [1, 0, 2], same));
    for word in ["volume a: /dev/sdb", "wwid:y, the primary of volume b", "wwid:x, the primary"] {
        assert!(said.contains(word), "{said}");
    }
    with(["d", "e", "f"], same, same).expect("they are renamed");
    // Only one of them is configured any more.
    let gone = |id| Absent { id: VolumeId(id), dirty: 0, forget: false };
    let alone = [disk("a", 1, 0, Some(0))];
    assert!(why(start(&alone, &[gone(0), gone(2)])).contains("exchanged"));
    // It is not known where the primaries were.
    let renamed = |name: usize, wwid: usize| disk(names[name], wwid, name, None);
    start(&[renamed(0, 1), renamed(1, 0), renamed(2, 2)], &[])
        .expect("they are known by their primaries");
}

#[test]
fn the_witness_overrules_the_device() {
    let volumes = [spec("a", 1 << 20)];
    let old = stopped(&volumes);
    let copy = encoded(&old);
    let open_with = |epoch, trust| {
        let witness = [Witness { uuid: old.uuid, epoch, trust, dirty: true, primaries: None }];
        open(&request([&copy, BLANK], &volumes, &witness))
    };
    assert!(!open_with(1, Trust::Full).expect("the same start").fresh);
    assert!(why(open_with(2, Trust::Full)).contains("older copy"));
    assert_eq!(open_with(1, Trust::DirtyOnly).map(|o| o.trust), Ok(Trust::DirtyOnly));
    assert!(open_with(1, Trust::Nothing).expect("made anew").fresh);
}

#[test]
fn a_blank_device_in_the_place_of_a_cache_with_dirty_blocks_is_refused() {
    let volumes = [spec("a", 1 << 20)];
    let known = |identity: &str| Witness {
        uuid: [3; 16],
        epoch: 5,
        trust: Trust::Full,
        dirty: true,
        primaries: Some(vec!["file:/b".into(), identity.into()]),
    };
    let with = |witness: Witness, reset| {
        open(&OpenRequest { reset, ..request([BLANK, BLANK], &volumes, &[witness]) })
    };
    let text = why(with(known("file:/a"), false));
    assert!(text.contains("is blank") && text.contains("file:/a"), "{text}");
    assert!(text.contains("0303") && text.contains("--reset-cache"), "{text}");
    for harmless in [
        known("file:/c"),
        Witness { dirty: false, ..known("file:/a") },
        Witness { trust: Trust::Nothing, ..known("file:/a") },
        Witness { primaries: None, ..known("file:/a") },
    ] {
        assert!(with(harmless, false).expect("nothing is known to be lost").fresh);
    }
    // The new pool takes the primary over from the old one.
    let opened = with(known("file:/a"), true).expect("it was asked for");
    let [old, new] = &opened.witnesses[..] else { panic!("{:?}", opened.witnesses) };
    assert_eq!(old.primaries, Some(vec!["file:/b".into()]));
    assert_eq!((new.uuid, new.epoch, new.dirty), (opened.superblock.uuid, 1, true));
    assert_eq!(new.primaries, Some(vec!["file:/a".into()]));
    // An existing pool does not take the primary over without being told to.
    let two = [spec("a", 1 << 20), spec("z", 512)];
    let copy = encoded(&stopped(&two[1..]));
    let text = why(open(&request([&copy, BLANK], &two[..], &[known("file:/a")])));
    assert!(text.contains("another cache") && text.contains("state directory"), "{text}");
}

#[test]
fn a_cache_whose_primary_was_served_with_another_is_refused() {
    let volumes = [spec("a", 1 << 20)];
    let old = Superblock { epoch: 2, ..stopped(&volumes) };
    let copy = encoded(&old);
    let open_with = |epoch, primaries: &[&str], fingerprint| {
        let mut volumes = volumes.clone();
        volumes[0].fingerprint = fingerprint;
        let primaries = Some(primaries.iter().map(|&name| name.into()).collect());
        let (uuid, trust) = (old.uuid, Trust::Full);
        let witness = [Witness { uuid, epoch, trust, dirty: true, primaries }];
        open(&request([&copy, BLANK], &volumes, &witness))
    };
    assert!(open_with(2, &["file:/a"], None).is_ok());
    assert!(why(open_with(2, &["file:/b"], None)).contains("another cache since"));
    assert!(open_with(2, &[], Some(7)).is_ok(), "the content is what it was");
    assert!(open_with(1, &[], None).is_ok(), "a crash between superblock and witness");
    // After such a crash another cache had the primary.
    let own = |uuid, dirty| {
        let primaries = Some(vec!["file:/a".to_owned()]);
        Witness { uuid, epoch: 1, trust: Trust::Full, dirty, primaries }
    };
    for dirty in [false, true] {
        let both = [own(old.uuid, true), own([5; 16], dirty)];
        let found = open(&request([&copy, BLANK], &volumes, &both));
        assert_eq!(found.is_err(), dirty, "{:?}", found.err());
    }
}

/// A start that makes a pool stores a witness of no start first, and one of its own before it
/// serves.
#[test]
fn a_pool_that_was_made_and_never_served_is_made_again() {
    let volumes = [spec("a", 1 << 20)];
    let made = open(&request([BLANK, BLANK], &volumes, &[])).expect("a new one");
    let copy = encoded(&made.superblock);
    let own = |epoch, dirty| {
        let (uuid, trust) = (made.superblock.uuid, Trust::Full);
        Witness { uuid, epoch, trust, dirty, primaries: Some(vec!["file:/a".into()]) }
    };
    // Whether one copy was written, or both, and though another pool has had the primary since.
    let unnamed = Witness { primaries: Some(Vec::new()), ..own(0, false) };
    for copies in [[&copy, BLANK], [BLANK, &copy], [&copy, &copy]] {
        for first in [own(0, false), unnamed.clone()] {
            let again = open(&request(copies, &volumes, &[first])).expect("nothing is in it");
            assert!(again.fresh && again.notes.iter().any(|note| note.contains("interrupted")));
        }
    }
    let other = Witness { uuid: [5; 16], ..own(3, true) };
    let said = why(open(&request([&copy, &copy], &volumes, &[unnamed, other])));
    assert!(
        said.contains("holds no data") && said.contains("may have the newest version"),
        "{said}"
    );
    // One that serves, and one that has stopped, even if the copy of the stop is lost.
    let stopped = encoded(&closed(made.superblock.clone(), &[]));
    for (copy, witness) in
        [(&copy, own(1, true)), (&stopped, own(1, false)), (&copy, own(1, false))]
    {
        assert!(!open(&request([copy, copy], &volumes, &[witness])).expect("it is good").fresh);
    }
}

#[test]
fn configuration_and_sizes_are_checked() {
    let twice = [spec("a", 512), spec("a", 512)];
    assert!(why(open(&request([BLANK, BLANK], &twice, &[]))).contains("twice"));
    let odd = [spec("a", 513)];
    assert!(why(open(&request([BLANK, BLANK], &odd, &[]))).contains("513"));
    let volumes = [spec("a", 512)];
    let small = OpenRequest { device_size: 1 << 20, ..request([BLANK, BLANK], &volumes, &[]) };
    let text = why(open(&small));
    let least: u64 = text.split(' ').next_back().and_then(|n| n.parse().ok()).expect("a number");
    assert!(geometry(least, divided(SPARE_PERCENT, ALL_LOG)).is_ok(), "{text}");
    for size in [least, 100 << 20, 1 << 30, 1 << 40, 64 << 40] {
        for (spare, percent) in [(10, 1), (10, 8), (10, ALL_LOG), (0, 8), (0, ALL_LOG)] {
            let made = geometry(size, divided(spare, percent)).expect("it is large enough");
            let last = made.shards.last().expect("there are shards");
            assert!(last.offset + last.len <= size);
            let used = size - u64::from(spare) * size / 100;
            let rest = AREA_OFFSET + 2 * u64::from(made.segment_size) + 100;
            let area = 2 * last.len;
            assert!(
                area <= used && area + rest >= used || size > 32 << 40,
                "{size} {spare}: {area}"
            );
            let segments = last.len / u64::from(made.segment_size);
            assert!((SEGMENTS_MIN..=SEGMENTS_MAX).contains(&segments));
            let log = made.log_segments.map_or(segments, u64::from);
            assert!(log >= SEGMENTS_MIN && log <= segments);
            assert_eq!(made.log_segments.is_none(), log == segments, "{size} {percent}");
        }
    }
    let copy = encoded(&stopped(&volumes));
    let smaller = OpenRequest { device_size: 1 << 29, ..request([&copy, BLANK], &volumes, &[]) };
    assert!(why(open(&smaller)).contains("restore its size"));
}

/// Identity and content of a primary compared with its record: the table of `primary.rs`.
#[test]
fn a_primary_is_known_by_what_it_is_and_by_its_content() {
    const TIME: u64 = 1 << 32;
    let stopped = |identity: &str, fingerprint| {
        let mut one = spec("a", 1 << 20);
        one.identity = identity.into();
        let opened = open(&request([BLANK, BLANK], &[one], &[])).expect("a blank device is taken");
        encoded(&closed(opened.superblock, &[(VolumeId(0), fingerprint)]))
    };
    let disk = |identity: &str, path: &str, change: &dyn Fn(&mut VolumeSpec)| {
        let (identity, path) = (identity.into(), path.into());
        let mut found = VolumeSpec { identity, path, ..spec("a", 1 << 20) };
        change(&mut found);
        found
    };
    let same = |_: &mut VolumeSpec| {};
    let unknown = |v: &mut VolumeSpec| v.fingerprint = None;
    let sampled = |v: &mut VolumeSpec| (v.fingerprint, v.sampled) = (None, Some(None));
    let differs = |v: &mut VolumeSpec| (v.fingerprint, v.sampled) = (None, Some(Some(8192)));
    let touched = |v: &mut VolumeSpec| v.fingerprint = Some(TIME | 7);
    let changed = |v: &mut VolumeSpec| v.fingerprint = Some(8);
    let blank = |v: &mut VolumeSpec| v.blank = true;
    let grown = |v: &mut VolumeSpec| (v.size, v.fingerprint) = (2 << 20, Some(TIME | 7));
    let grown_and_changed = |v: &mut VolumeSpec| (v.size, v.fingerprint) = (2 << 20, Some(8));
    type Change<'a> = &'a dyn Fn(&mut VolumeSpec);
    // Recorded identity, current identity, current path, current content; refusal or suspect.
    type Case<'a> = (&'a str, &'a str, &'a str, Change<'a>, Result<bool, &'a str>);
    let table: &[Case<'_>] = &[
        ("wwid:1", "wwid:1", "/dev/sdz", &same, Ok(false)),
        ("wwid:1", "wwid:1", "/dev/sdz", &unknown, Ok(true)),
        ("wwid:1", "wwid:1", "/dev/sdz", &sampled, Ok(true)),
        ("wwid:1", "wwid:1", "/dev/sdz", &touched, Ok(true)),
        ("wwid:1", "wwid:1", "/dev/sdz", &grown, Ok(true)),
        ("wwid:1", "wwid:1", "/dev/sda", &changed, Err("was changed since")),
        ("wwid:1", "wwid:1", "/dev/sda", &differs, Err("in the block at 8192")),
        ("wwid:1", "wwid:1", "/dev/sda", &grown_and_changed, Err("was changed since")),
        // Another disk is refused, even with the same content.
        ("wwid:1", "wwid:2", "/dev/sda", &same, Err("belongs to primary wwid:1")),
        ("wwid:1", "wwid:2", "/dev/sda", &unknown, Err("belongs to primary wwid:1")),
        ("wwid:1", "wwid:2", "/dev/sda", &sampled, Err("belongs to primary wwid:1")),
        // An earlier version recorded a path, which is upgraded.
        ("/dev/sda", "wwid:1", "/dev/sda", &same, Ok(false)),
        ("/dev/sda", "wwid:1", "/dev/sda", &unknown, Ok(true)),
        ("/dev/sda", "wwid:1", "/dev/sdb", &same, Ok(false)),
        ("/dev/sda", "wwid:1", "/dev/sdb", &blank, Err("belongs to primary /dev/sda")),
        ("/dev/sda", "wwid:1", "/dev/sdb", &unknown, Err("belongs to primary /dev/sda")),
        // The primary has no lasting identity.
        ("name:/dev/vda", "name:/dev/vda", "/dev/vda", &unknown, Ok(true)),
        ("name:/dev/vda", "name:/dev/vdb", "/dev/vdb", &sampled, Ok(true)),
        ("name:/dev/vda", "name:/dev/vdb", "/dev/vdb", &unknown, Err("belongs to")),
        ("name:/dev/vda", "name:/dev/vdb", "/dev/vdb", &blank, Err("belongs to")),
        ("name:/dev/vda", "serial:x", "/dev/vda", &sampled, Ok(true)),
        // Files and exports.
        ("/a.img", "/b.img", "/b.img", &same, Ok(false)),
        ("/a.img", "/b.img", "/b.img", &sampled, Err("belongs to primary /a.img")),
        ("/a.img", "/b.img", "/b.img", &touched, Err("belongs to primary /a.img")),
        ("nbd://a/x", "nbd://b/x", "nbd://b/x", &same, Ok(false)),
        ("nbd://a/x", "nbd://b/x", "nbd://b/x", &unknown, Err("belongs to")),
    ];
    for (i, (recorded, identity, path, change, expected)) in table.iter().enumerate() {
        let copy = stopped(recorded, Some(7));
        let mut volumes = [disk(identity, path, change)];
        let found = open(&request([&copy, BLANK], &volumes, &[]));
        match (found, expected) {
            (Ok(opened), Ok(suspect)) => {
                assert_eq!(!opened.suspect.is_empty(), *suspect, "row {i}");
                assert_eq!(opened.superblock.volumes[0].identity, *identity, "row {i}");
                assert_eq!(opened.trust, Trust::Full, "row {i}");
            }
            (Err(refusal), Err(part)) => {
                let text = refusal.to_string();
                assert!(text.contains(part) && text.contains("--accept-primary a"), "{i}: {text}");
                // If accepted, the primary gets the dirty blocks, and nothing else of the cache is
                // used.
                volumes[0].accepted = true;
                let opened = open(&request([&copy, BLANK], &volumes, &[])).expect("accepted");
                assert_eq!(opened.trust, Trust::DirtyOnly, "row {i}");
                assert!(opened.witnesses.iter().all(|one| one.trust == Trust::DirtyOnly));
                // Also if the start ends before the witness of its own is stored. Samples are void
                // then.
                let void = VolumeSpec { fingerprint: None, sampled: None, ..volumes[0].clone() };
                volumes[0] = VolumeSpec { accepted: false, ..void };
                let before = [opened.distrust.expect("it is stored before the superblock")];
                let half = encoded(&opened.superblock);
                let next = open(&request([&copy, &half], &volumes, &before)).expect("accepted");
                assert_eq!(next.trust, Trust::DirtyOnly, "row {i}");
            }
            (found, _) => panic!("row {i}: {:?}", found.map(|opened| opened.suspect)),
        }
    }
}

#[test]
fn a_device_that_is_used_in_part_has_an_index_that_fits() {
    for budget in [16 << 20, 100 << 20, 1 << 30, 12 << 30_u64] {
        for spare in [0, SPARE_PERCENT, 50] {
            let size = device_for_index(budget, spare);
            let made = geometry(size, divided(spare, ALL_LOG)).expect("it is large enough");
            let taken: u64 = made.shards.into_iter().map(index_bytes).sum();
            assert!(taken <= budget, "{taken} of {budget}");
            assert!(taken > budget / 10 * 9, "most of it is used: {taken} of {budget}");
        }
    }
}

/// A division is known from the areas of a pool, and never taken for another one that is the same
/// but for rounding.
#[test]
fn a_pool_keeps_its_division_and_tells_it() {
    let volumes = [spec("a", 1 << 20)];
    let made = |size: u64, division: Division| {
        let request = request([BLANK, BLANK], &volumes, &[]);
        let request = OpenRequest { device_size: size, division, ..request };
        open(&request).expect("a blank device is taken").superblock
    };
    let all = [(0, 8), (10, 8), (10, 20), (10, ALL_LOG), (50, 8), (50, ALL_LOG)];
    for size in [64 << 20, 100 << 20, (1 << 30) + 4097, 1 << 40] {
        for (spare, log) in all {
            let pool = made(size, divided(spare, log));
            let mut older = pool.clone();
            // As with other rules for the length of a segment.
            older.segment_size /= 2;
            older.log_segments = pool.log_segments.map(|log| 2 * log);
            for wanted in all {
                let found = divided(wanted.0, wanted.1).found_in(&pool);
                let near = |a: u8, b: u8| a.abs_diff(b) <= 1;
                assert!(near(found.spare_percent, spare), "{size} {spare} {log}: {found:?}");
                let least =
                    SEGMENTS_MIN * 100 / (pool.shards[0].len / u64::from(pool.segment_size));
                let log = log.max(least as u8);
                assert!(near(found.log_percent, log), "{size} {spare} {log}: {found:?}");
            }
            for pool in [pool, older] {
                assert_eq!(divided(spare, log).found_in(&pool), divided(spare, log), "{size}");
            }
        }
    }
    let pool = encoded(&closed(made(1 << 30, divided(10, ALL_LOG)), &[]));
    let request = OpenRequest { division: divided(0, 8), ..request([&pool, BLANK], &volumes, &[]) };
    let notes = open(&request).expect("it is known").notes.join(" ");
    assert!(notes.contains("10% of the device spare and a log of 100% of the rest"), "{notes}");
}

/// A pool of volumes a, b and c.
fn of_three() -> (Vec<VolumeSpec>, Superblock) {
    let volumes: Vec<_> = ["a", "b", "c"].map(|name| spec(name, 1 << 20)).into();
    let opened = open(&request([BLANK, BLANK], &volumes, &[])).expect("a blank device is taken");
    (volumes, opened.superblock)
}

#[test]
fn volumes_are_known_by_their_primaries_whatever_they_are_called() {
    let (mut volumes, made) = of_three();
    for (volume, name) in volumes.iter_mut().zip(["b", "a", "z"]) {
        volume.name = name.into();
    }
    volumes.rotate_left(1);
    let opened = open(&request([&encoded(&made), BLANK], &volumes, &[])).expect("all are there");
    assert_eq!(opened.ids, [VolumeId(1), VolumeId(2), VolumeId(0)]);
    let now = opened.superblock.volumes.iter().map(|one| (one.name.as_str(), &*one.identity));
    assert!(now.eq([("b", "file:/a"), ("a", "file:/b"), ("z", "file:/c")]));
    assert_eq!(opened.notes.len(), 3, "{:?}", opened.notes);
}

#[test]
fn a_volume_is_removed_when_nothing_of_it_is_dirty_and_its_id_never_comes_back() {
    let (volumes, made) = of_three();
    let bytes = encoded(&made);
    let less = [volumes[0].clone(), volumes[2].clone()];
    let found = super::absent(&made, &less);
    assert_eq!(found.iter().map(|record| record.id).collect::<Vec<_>>(), [VolumeId(1)]);
    let ask =
        |absent: &[Absent]| open(&OpenRequest { absent, ..request([&bytes, BLANK], &less, &[]) });
    assert!(why(ask(&[])).contains("not configured"));
    let dirty = Absent { id: VolumeId(1), dirty: 7, forget: false };
    let said = why(ask(&[dirty]));
    assert!(said.contains("volume b") && said.contains("--forget-volume b"), "{said}");
    ask(&[Absent { forget: true, ..dirty }]).expect("it was asked for");
    let opened = ask(&[Absent { dirty: 0, ..dirty }]).expect("nothing is lost");
    assert_eq!(opened.ids, [VolumeId(0), VolumeId(2)]);
    assert!(super::absent(&opened.superblock, &less).is_empty(), "it is removed once");

    // The same volume is new when it is added again: none of its old blocks come back.
    let again = encoded(&opened.superblock);
    let back = open(&request([&again, BLANK], &volumes, &[])).expect("there is room");
    assert_eq!(back.ids, [VolumeId(0), VolumeId(3), VolumeId(2)]);
    // Also if the start that removed it was killed before it had a witness.
    let primaries = Some(volumes.iter().map(|spec| spec.identity.clone()).collect());
    let (uuid, epoch, trust) = (made.uuid, made.epoch, Trust::Full);
    let witness = [Witness { uuid, epoch, trust, dirty: true, primaries }];
    let killed = open(&request([&again, BLANK], &volumes, &witness)).expect("there is room");
    assert_eq!(killed.ids, back.ids);
    let third = encoded(&back.superblock);
    let third = open(&request([&third, BLANK], &volumes, &[])).expect("it is as it was");
    assert_eq!(third.ids, back.ids);

    // Until the log has forgotten it.
    let forgotten = &[VolumeId(1), VolumeId(2)];
    let without = encoded(&opened.superblock);
    let request = request([&without, BLANK], &volumes, &[]);
    let back = open(&OpenRequest { forgotten, ..request }).expect("there is room");
    assert_eq!(back.ids, [VolumeId(0), VolumeId(1), VolumeId(2)]);
}

/// A primary that appears while its volume is served is judged by the record from before the start;
/// accepting it takes another start.
#[test]
fn a_primary_that_comes_later_must_be_the_one_on_record_and_unchanged() {
    let old = spec("a", 1 << 20);
    let made = open(&request([BLANK, BLANK], std::slice::from_ref(&old), &[])).unwrap();
    let mut record = made.superblock.volumes[0].clone();
    record.fingerprint = Some(7);
    let witness = &made.witnesses[0];
    let judged = |spec: &VolumeSpec| rejoin(&record, spec, Some(witness)).map_err(|e| e.0);
    assert_eq!(judged(&old), Ok(()));
    assert_eq!(judged(&VolumeSpec { size: 2 << 20, ..old.clone() }), Ok(()), "it may be larger");
    let sampled = VolumeSpec { fingerprint: None, sampled: Some(None), ..old.clone() };
    assert_eq!(judged(&sampled), Ok(()));
    let wrong = [
        (VolumeSpec { fingerprint: Some(8), accepted: true, ..old.clone() }, "--accept-primary a"),
        (VolumeSpec { sampled: Some(Some(4096)), accepted: true, ..old.clone() }, "block at 4096"),
        (VolumeSpec { identity: "wwid:x".into(), path: "/x".into(), ..sampled.clone() }, "belongs"),
        (VolumeSpec { size: 1 << 19, ..old.clone() }, "shrunk"),
        (VolumeSpec { size: 1000, ..old.clone() }, "multiple of 512"),
        (VolumeSpec { size: (4 << 50) + 512, ..old.clone() }, "4 PiB"),
    ];
    for (spec, word) in wrong {
        let why = judged(&spec).unwrap_err();
        assert!(why.contains(word), "{why}");
    }
    // Another cache has served the primary in the meantime.
    let without = Witness { primaries: Some(Vec::new()), ..witness.clone() };
    let why = rejoin(&record, &sampled, Some(&without)).unwrap_err().0;
    assert!(why.contains("another cache"), "{why}");
}

/// Found by an audit: check, salvage and serve aborted on a superblock with a valid checksum whose
/// log was too short for the engine.
#[test]
fn a_geometry_that_the_engine_cannot_use_is_refused() {
    let volumes = [spec("a", 1 << 20)];
    let made = stopped(&volumes);
    let whole = made.shards[0].len / u64::from(made.segment_size);
    let with_log = |log: u32| Superblock { log_segments: Some(log), ..made.clone() };
    let with_segment = |segment_size: u32, segments: u64| {
        let len = segments * u64::from(segment_size);
        let shards = vec![ShardArea { offset: AREA_OFFSET, len }];
        Superblock { segment_size, shards, device_size: 1 << 40, ..made.clone() }
    };
    let ask = |pool: &Superblock| {
        let bytes = encoded(pool);
        let device_size = 1 << 40;
        open(&OpenRequest { device_size, ..request([&bytes, BLANK], &volumes, &[]) })
    };
    for good in [with_log(8), with_log(whole as u32 - 1), with_segment(64 << 10, 8)] {
        ask(&good).expect("it can be used");
    }
    let (few, wrong) = ("number of", "a segment size of");
    let cases = [
        (with_log(2), few),
        (with_log(7), few),
        (with_segment(64 << 10, 7), few),
        (with_segment(64 << 10, (1 << 20) + 1), few),
        (with_segment(16 << 10, 64), wrong),
        (with_segment(28 << 10, 64), wrong),
        (with_segment(8 << 20, 64), wrong),
    ];
    for (pool, word) in cases {
        let said = why(ask(&pool));
        assert!(said.contains(word) && said.contains("--reset-cache"), "{said}");
        let bytes = encoded(&pool);
        let mut read = |at: u64, out: &mut [u8]| {
            out.copy_from_slice(if at == 0 { &bytes } else { BLANK });
            Ok(())
        };
        assert_eq!(crate::offline::examine(&mut read, true), Err(said));
    }
}

#[test]
fn what_a_large_device_has_more_than_its_shards_take_is_told() {
    let volumes = [spec("a", 1 << 20)];
    let notes = |shards: u16| {
        let division = Division { shards, ..divided(SPARE_PERCENT, ALL_LOG) };
        let request = request([BLANK, BLANK], &volumes, &[]);
        open(&OpenRequest { device_size: 16 << 40, division, ..request }).expect("it fits").notes
    };
    let said = notes(1).join("");
    assert!(said.contains("10649 GiB of the cache device stay unused"), "{said}");
    assert!(said.contains("4096 GiB at most"), "{said}");
    assert_eq!(notes(4), Vec::<String>::new());
}
