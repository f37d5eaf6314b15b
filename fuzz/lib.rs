//! Shared by the targets: changing valid bytes, correcting a CRC so that the checks after the CRC
//! check are reached, and blocks with repetitions, which compress.

use forebay_codec::BLOCK_BYTES;

/// Number of bytes before those that a structure's CRC covers: the magic number and the CRC.
const COVERED_FROM: usize = 12;

/// Overwrites some bytes: `changes` are groups of three bytes, an offset and a value.
pub fn change(bytes: &mut [u8], changes: &[u8]) {
    for group in changes.as_chunks::<3>().0 {
        let at = usize::from(u16::from_le_bytes([group[0], group[1]])) % bytes.len();
        bytes[at] = group[2];
    }
}

/// Corrects the CRC of a structure.
pub fn reseal(structure: &mut [u8]) {
    let crc = crc_fast::crc32_iscsi(&structure[COVERED_FROM..]);
    structure[8..COVERED_FROM].copy_from_slice(&crc.to_le_bytes());
}

/// A block that repeats `texture`, each time without one more byte: this yields runs and repeats of
/// any length.
pub fn block(texture: &[u8]) -> Vec<u8> {
    let mut block = Vec::with_capacity(BLOCK_BYTES + texture.len());
    for lap in 0..BLOCK_BYTES {
        let skip = lap % (texture.len() + 1);
        block.extend_from_slice(&texture[skip..]);
        block.push(lap as u8);
        if block.len() >= BLOCK_BYTES {
            break;
        }
    }
    block.truncate(BLOCK_BYTES);
    block
}
