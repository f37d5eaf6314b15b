//! Superblocks: decoding any bytes ends in a result. A valid superblock with any fields changed is
//! rejected, or is another valid one that encodes to exactly the same bytes.
#![no_main]

use forebay_block::VolumeId;
use forebay_format::{AREA_OFFSET, SUPERBLOCK_BYTES, ShardArea, Superblock, VolumeRecord, newest};
use forebay_fuzz::{change, reseal};
use libfuzzer_sys::fuzz_target;

/// Offset of the volume table: changes are folded into the used part.
const VOLUMES_AT: usize = 4224;

fn sound(log_segments: Option<u32>) -> Superblock {
    let volume = |id| VolumeRecord {
        id: VolumeId(id),
        name: format!("v{id}"),
        size: 1 << 30,
        identity: format!("file:{id}"),
        fingerprint: (id == 1).then_some(9),
    };
    Superblock {
        pool: 1,
        uuid: [2; 16],
        generation: 3,
        epoch: 4,
        segment_size: 1 << 20,
        device_size: 1 << 30,
        shards: vec![ShardArea { offset: AREA_OFFSET, len: 64 << 20 }],
        log_segments,
        unit_entries: log_segments == Some(9),
        volumes: vec![volume(0), volume(1)],
        clean: false,
        created_unix: 5,
    }
}

fuzz_target!(|data: &[u8]| {
    let whole = Superblock::decode(data);
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    let log_segments = [None, Some(8), Some(9)][data.first().map_or(0, |byte| byte % 3) as usize];
    sound(log_segments).encode(&mut bytes);
    let (to_head, to_volumes) = data.split_at(data.len() / 2);
    change(&mut bytes[..160], to_head);
    change(&mut bytes[VOLUMES_AT..][..1024], to_volumes);
    bytes[..8].copy_from_slice(b"ForebayS");
    reseal(&mut bytes);
    let changed = Superblock::decode(&bytes);
    if let Ok(superblock) = &changed {
        let mut again = vec![0xee; SUPERBLOCK_BYTES];
        superblock.encode(&mut again);
        assert!(again == bytes);
    }
    let sound_again = changed.is_ok();
    assert_eq!(newest(whole, changed).is_ok(), sound_again);
});
