//! The new content of a write, block by block, with the old content at its edges.

use forebay_block::{BLOCK_SIZE, BlockRange, IoBuf, IoOp};

use crate::request::op::WriteOp;

/// The new content of one block.
pub enum BlockBytes<'a> {
    /// Zeros.
    Zero,
    /// A whole block of bytes.
    Whole(&'a [u8]),
    /// A short last block, padded with zeros.
    Short(Box<[u8; BLOCK_SIZE]>),
}

/// Returns the new content of one block of a write whose edges have been merged.
pub fn block_bytes<'a>(
    write: &WriteOp,
    data: &'a [u8],
    edges: &'a [Option<IoBuf>; 2],
    block: u64,
) -> BlockBytes<'a> {
    let [head, tail] = edges;
    if block == write.blocks.first
        && let Some(head) = head
    {
        return BlockBytes::Whole(head);
    }
    if block + 1 == write.blocks.end()
        && let Some(tail) = tail
    {
        return BlockBytes::Whole(tail);
    }
    if write.op == IoOp::WriteZeroes {
        return BlockBytes::Zero;
    }
    let whole = BlockRange { first: block, count: 1 }.bytes();
    let part = whole.intersection(&write.range);
    let from = (part.offset - write.range.offset) as usize;
    let bytes = &data[from..from + part.len as usize];
    if bytes.len() == BLOCK_SIZE {
        return BlockBytes::Whole(bytes);
    }
    // The short last block of a volume.
    let mut padded = Box::new([0; BLOCK_SIZE]);
    padded[..bytes.len()].copy_from_slice(bytes);
    BlockBytes::Short(padded)
}

impl WriteOp {
    /// Copies the client's bytes over the old content of the edges.
    pub fn merge(&mut self) {
        let blocks = [self.blocks.first, self.blocks.end() - 1];
        for (edge, block) in self.edges.iter_mut().zip(blocks) {
            let Some(old) = edge else { continue };
            let whole = BlockRange { first: block, count: 1 }.bytes();
            let part = whole.intersection(&self.range);
            let to = (part.offset - whole.offset) as usize;
            let from = (part.offset - self.range.offset) as usize;
            let room = &mut old[to..to + part.len as usize];
            match self.op {
                IoOp::Write => room.copy_from_slice(&self.buf[from..from + room.len()]),
                _ => room.fill(0),
            }
        }
    }
}
