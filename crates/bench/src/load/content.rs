//! The content of writes: incompressible and half-compressible bytes, database rows, and text.

use std::io::Write as _;

use forebay_block::testing::Numbers;

/// Kinds of content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Incompressible.
    Random,
    /// Compresses 2 to 1, wherever a block begins: half of each sector is incompressible, the other
    /// half zeros.
    Half,
    /// Rows as in sysbench's tables: an ID, a number, 120 and 60 digits.
    Database,
    /// The same rows, in blocks whose second half is free.
    Pages,
    /// Words, some more frequent than others.
    Text,
}

impl Content {
    /// The kinds that are measured separately, with their names.
    pub const ALL: [(&'static str, Self); 3] =
        [("random", Self::Random), ("database", Self::Database), ("text", Self::Text)];

    /// `len` bytes of this kind, the same in every run.
    pub fn bytes(self, len: usize) -> Vec<u8> {
        let mut numbers = Numbers::new(11);
        let mut out = Vec::with_capacity(len + 4096);
        let mut row = 0u32;
        while out.len() < len {
            row += 1;
            match self {
                Self::Random | Self::Half => out.extend_from_slice(&numbers.next().to_le_bytes()),
                Self::Database | Self::Pages => push_row(&mut out, row, &mut numbers),
                Self::Text => push_word(&mut out, &mut numbers),
            }
        }
        out.truncate(len);
        if self == Self::Half {
            out.chunks_exact_mut(512).for_each(|sector| sector[256..].fill(0));
        }
        if self == Self::Pages {
            out.chunks_exact_mut(4096).for_each(|block| block[2048..].fill(0));
        }
        out
    }
}

fn push_row(out: &mut Vec<u8>, id: u32, numbers: &mut Numbers) {
    // A row's header as InnoDB writes it: lengths, flags, transaction, position of the old version.
    out.extend_from_slice(&[60, 120, 0, 0, (id >> 8) as u8, id as u8, 0, 190]);
    out.extend_from_slice(&(id | 1 << 31).to_be_bytes());
    out.extend_from_slice(&[0, 0, 0, 9, 0x5e, 0xb2, 0, 0, 1, 0x24, 1, 0x10, 0x80]);
    out.extend_from_slice(&(numbers.below(1 << 23) as u32).to_be_bytes());
    for (groups, end) in [(10, 120), (5, 60)] {
        let start = out.len();
        for _ in 0..groups {
            let group = numbers.below(100_000_000_000);
            write!(out, "{group:011}-").expect("writing to memory never fails");
        }
        out.resize(start + end, b' ');
    }
}

fn push_word(out: &mut Vec<u8>, numbers: &mut Numbers) {
    const WORDS: u64 = 4096;
    // The product of two uniform numbers below one favors small values, like the ranks of words.
    let rank = numbers.below(WORDS) * numbers.below(WORDS) / WORDS;
    let mut letters = Numbers::new(rank + 1);
    for _ in 0..2 + letters.below(8) {
        out.push(b'a' + letters.below(26) as u8);
    }
    out.push(if numbers.below(12) == 0 { b'\n' } else { b' ' });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_a_block_is_zeros_wherever_it_begins() {
        let bytes = Content::Half.bytes(64 << 10);
        for start in [0, 512, 4096 + 1536] {
            let block = &bytes[start..start + 4096];
            let zeros = block.iter().filter(|&&byte| byte == 0).count();
            assert!((2048..2080).contains(&zeros), "{zeros} zeros");
        }
    }
}
