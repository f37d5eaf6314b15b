//! Decoding a payload of the log to the block that it holds.

use forebay_block::BLOCK_SIZE;
use forebay_codec::{crc32c, decompress, decompress_dense};
use forebay_format::EntryKind;

use crate::contents::Place;

/// Verifies a payload's checksum and returns its block, decoded into `room` if necessary.
pub fn decode<'a>(
    place: &Place,
    payload: &'a [u8],
    room: &'a mut [u8; BLOCK_SIZE],
) -> Option<&'a [u8]> {
    if crc32c(payload) != place.crc {
        return None;
    }
    decode_unchecked(place, payload, room)
}

/// Decodes without verifying the checksum, if something else tells whether it is the right block.
pub fn decode_unchecked<'a>(
    place: &Place,
    payload: &'a [u8],
    room: &'a mut [u8; BLOCK_SIZE],
) -> Option<&'a [u8]> {
    match place.kind {
        EntryKind::Raw => Some(payload),
        EntryKind::Lz4 => decompress(payload, &mut room[..]).ok().map(|()| &room[..]),
        EntryKind::Zstd => decompress_dense(payload, &mut room[..]).then_some(&room[..]),
        _ => None,
    }
}
