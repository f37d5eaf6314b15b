//! The sector size that a disk's content requires: 512 or 4096 bytes.

/// Bytes at the start of a disk that are examined.
pub const LOOKED_AT: usize = 8 << 10;

/// The sector size for a disk of `size` bytes that begins with `start`. Content made for small
/// sectors cannot be used on large ones; an empty disk gets large ones, the cache's unit.
pub fn fitting(start: &[u8], size: u64) -> u32 {
    let at = |from: usize, length: usize| start.get(from..from + length).unwrap_or(&[]);
    if !size.is_multiple_of(4096) {
        return 512;
    }
    if at(0, 4) == b"XFSB" {
        let sector = at(102, 2).first_chunk().map_or(512, |bytes| u16::from_be_bytes(*bytes));
        return if sector >= 4096 { 4096 } else { 512 };
    }
    if at(1080, 2) == [0x53, 0xef] {
        // ext2 to ext4, with the size of their blocks.
        let shift = at(1048, 4).first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        return if shift >= 2 { 4096 } else { 512 };
    }
    if at(4096, 8) == b"EFI PART" {
        return 4096;
    }
    if start.iter().all(|&byte| byte == 0) { 4096 } else { 512 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut start = vec![0; LOOKED_AT];
        for (at, bytes) in parts {
            start[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        start
    }

    #[test]
    fn what_is_on_the_disk_decides() {
        let size = 1 << 30;
        let large: [&[(usize, &[u8])]; 4] = [
            &[],
            &[(0, b"XFSB"), (102, &[0x10, 0])],
            &[(1080, &[0x53, 0xef]), (1048, &[2, 0, 0, 0])],
            &[(510, &[0x55, 0xaa]), (4096, b"EFI PART")],
        ];
        for parts in large {
            assert_eq!(fitting(&disk(parts), size), 4096, "{parts:?}");
        }
        let small: [&[(usize, &[u8])]; 4] = [
            &[(0, b"XFSB"), (102, &[2, 0])],
            &[(1080, &[0x53, 0xef]), (1048, &[0, 0, 0, 0])],
            &[(510, &[0x55, 0xaa]), (512, b"EFI PART")],
            &[(100, b"something")],
        ];
        for parts in small {
            assert_eq!(fitting(&disk(parts), size), 512, "{parts:?}");
        }
        assert_eq!(fitting(&disk(&[]), size + 512), 512);
        assert_eq!(fitting(&[], size), 4096);
    }
}
