//! The possible contents of a volume: for each block, the versions that a read may return.
//!
//! An acknowledged write must be read from then on. A write that failed, or was never answered, may
//! or may not be there. If a primary lost unflushed writes, each write since the last acknowledged
//! FLUSH may or may not be there. Nothing older than that FLUSH may ever be seen again.

use anyhow::bail;

use forebay_block::testing::Numbers;

/// Length of a block, in bytes.
pub const BLOCK: usize = 4096;
/// Number of bytes that differ between versions of a block with small changes.
const SMALL: usize = 96;

/// The content of a block in a version. Version 0 is a blank disk.
pub fn content(salt: u64, block: u64, version: u32) -> Vec<u8> {
    if is_zeros(version) {
        return vec![0; BLOCK];
    }
    let name = (salt << 40) ^ (block << 4) ^ 3;
    let own = |len| noise(name ^ (u64::from(version) << 20) ^ (u64::from(version) << 50), len);
    match version % 4 {
        // Always the same bytes with a small change, so that a delta pays.
        1 => {
            let mut bytes = noise(name, BLOCK);
            let at = Numbers::new(name ^ u64::from(version)).below((BLOCK - SMALL) as u64);
            bytes[at as usize..][..SMALL].copy_from_slice(&own(SMALL));
            bytes
        }
        // Repetitive content.
        2 => own(64).repeat(BLOCK / 64),
        // Nearly the same bytes in all blocks of a write, so that they are similar.
        3 => {
            let mut bytes = noise(u64::from(version) << 8 ^ salt, BLOCK);
            bytes[..SMALL].copy_from_slice(&own(SMALL));
            bytes
        }
        _ => own(BLOCK),
    }
}

/// Whether the content of a version is all zeros, in every block.
pub fn is_zeros(version: u32) -> bool {
    version.is_multiple_of(16)
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut numbers = Numbers::new(seed ^ 0x5bd1_e995);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(numbers.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// The state of a block.
#[derive(Clone, Debug)]
struct Block {
    /// Versions that may be there, oldest first.
    may: Vec<u32>,
    /// Index in `may` of the newest acknowledged version.
    acked: usize,
    /// Whether a read must return the newest version: it was acknowledged, and nothing was lost
    /// since.
    exact: bool,
    how: How,
}

/// Guarantees of an acknowledged write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct How {
    /// Whether a FLUSH makes the primary alone complete.
    pub direct: bool,
    /// Whether the write is in the log, so that the primary may lose it.
    pub logged: bool,
}

/// The possible contents of a volume.
#[derive(Clone, Debug)]
pub struct Model {
    /// Distinguishes its contents from those of other volumes.
    pub salt: u64,
    blocks: Vec<Block>,
    /// Number of versions assigned so far.
    versions: u32,
}

impl Model {
    /// A blank volume of `blocks` blocks.
    pub fn new(salt: u64, blocks: u64) -> Self {
        let blank = Block { may: vec![0], acked: 0, exact: true, how: How::default() };
        Self { salt, blocks: vec![blank; blocks as usize], versions: 0 }
    }

    /// Number of blocks.
    pub fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Assigns a version to the next write.
    pub fn version(&mut self) -> u32 {
        self.versions += 1;
        self.versions
    }

    /// The data of a write.
    pub fn bytes(&self, from: u64, count: u64, version: u32) -> Vec<u8> {
        (from..from + count).flat_map(|block| content(self.salt, block, version)).collect()
    }

    /// Records that a write is sent.
    pub fn writing(&mut self, from: u64, count: u64, version: u32) {
        for block in self.range(from, count) {
            block.may.push(version);
            (block.exact, block.how) = (false, How::default());
        }
    }

    /// Records that the last write sent is acknowledged.
    pub fn written(&mut self, from: u64, count: u64, how: How) {
        for block in self.range(from, count) {
            block.acked = block.may.len() - 1;
            (block.exact, block.how) = (true, how);
        }
    }

    /// Records that a FLUSH is acknowledged, with no write in flight; `direct` if it makes the
    /// primary alone complete. Otherwise the primary may have lost what it covers, if the cache has
    /// it.
    pub fn flushed(&mut self, direct: bool) {
        for block in self.blocks.iter_mut().filter(|block| block.acked > 0) {
            block.may.drain(..block.acked);
            block.acked = 0;
            block.how.direct &= direct;
        }
    }

    /// Records that the primary lost unflushed writes. The server writes them again: a later
    /// successful FLUSH confirms that.
    pub fn slipped(&mut self) {
        for block in self.blocks.iter_mut().filter(|block| block.may.len() > 1) {
            block.exact &= block.how.logged;
        }
    }

    /// Records that a new server started: its FLUSH does not cover unflushed writes of the former
    /// server.
    pub fn restarted(&mut self) {
        for block in &mut self.blocks {
            block.acked = 0;
            block.how.logged = false;
        }
    }

    /// Records that unflushed writes may be lost, and no FLUSH brings them back.
    pub fn lost(&mut self) {
        for block in self.blocks.iter_mut().filter(|block| block.may.len() > 1) {
            block.acked = 0;
            (block.exact, block.how) = (false, How::default());
        }
    }

    /// Records that the primary was changed without the cache; `surely` if no data of the block was
    /// dirty.
    pub fn changed(&mut self, block: u64, version: u32, surely: bool) {
        let block = &mut self.blocks[block as usize];
        if surely {
            *block = Block { may: vec![version], acked: 0, exact: true, how: How::default() };
        } else {
            block.may.push(version);
            block.acked = 0;
            (block.exact, block.how) = (false, How::default());
        }
    }

    /// Records that a loss was accepted: any version ever written may be there.
    pub fn anything(&mut self) {
        for block in &mut self.blocks {
            block.may = (0..=self.versions).collect();
            block.acked = 0;
            (block.exact, block.how) = (false, How::default());
        }
    }

    /// Whether the primary alone must have the block's only version, after a FLUSH.
    pub fn is_direct(&self, block: u64) -> bool {
        let block = &self.blocks[block as usize];
        block.exact && block.how.direct && block.may.len() == 1
    }

    /// Whether the version of the block is known for certain.
    pub fn is_settled(&self, block: u64) -> bool {
        let block = &self.blocks[block as usize];
        block.exact && block.may.len() == 1
    }

    /// Records that a write of the blocks with FUA was acknowledged.
    pub fn durable(&mut self, from: u64, count: u64) {
        for block in self.range(from, count) {
            block.may.drain(..block.acked);
            block.acked = 0;
        }
    }

    /// Checks one block that a reader returned.
    pub fn check(&self, block: u64, found: &[u8]) -> anyhow::Result<()> {
        let known = &self.blocks[block as usize];
        let allowed = if known.exact { &known.may[known.may.len() - 1..] } else { &known.may[..] };
        // The newest first, since it nearly always matches.
        if allowed.iter().rev().any(|&version| content(self.salt, block, version) == found) {
            return Ok(());
        }
        bail!("block {block} has {}; it may have {allowed:?}", self.describe(block, found))
    }

    /// Checks the blocks that a reader returned, starting with `from`.
    pub fn check_all(&self, from: u64, found: &[u8]) -> anyhow::Result<()> {
        let blocks = (from..).zip(found.chunks(BLOCK));
        blocks.into_iter().try_for_each(|(block, found)| self.check(block, found))
    }

    fn describe(&self, block: u64, found: &[u8]) -> String {
        let is = |block, version| content(self.salt, block, version) == found;
        let versions = || (0..=self.versions).rev();
        if found.iter().all(|&byte| byte == 0) {
            return "zeros".to_owned();
        }
        if let Some(version) = versions().find(|&version| is(block, version)) {
            return format!("its version {version} of {}", self.versions);
        }
        let near = block.saturating_sub(16)..self.len().min(block + 16);
        let other = near.flat_map(|other| versions().map(move |version| (other, version)));
        match other.into_iter().find(|&(other, version)| is(other, version)) {
            Some((other, version)) => format!("version {version} of block {other}"),
            None => format!("nothing that was written there: {:02x?}...", &found[..16]),
        }
    }

    fn range(&mut self, from: u64, count: u64) -> &mut [Block] {
        &mut self.blocks[from as usize..][..count as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(model: &Model, block: u64, version: u32) -> bool {
        model.check(block, &content(model.salt, block, version)).is_ok()
    }

    #[test]
    fn what_was_acknowledged_must_be_read_and_what_failed_may() {
        let mut model = Model::new(1, 8);
        let (first, second) = (model.version(), model.version());
        model.writing(2, 2, first);
        assert!(of(&model, 2, 0) && of(&model, 3, first), "on its way");
        model.written(2, 2, How::default());
        assert!(!of(&model, 2, 0) && of(&model, 2, first) && of(&model, 4, 0));
        model.writing(3, 1, second);
        assert!(of(&model, 3, first) && of(&model, 3, second), "failed");
        model.flushed(true);
        assert!(!of(&model, 3, 0) && of(&model, 3, first) && of(&model, 3, second));
        let said = model.check(2, &content(1, 2, second)).expect_err("another").to_string();
        assert!(said.contains("its version 2 of 2; it may have [1]"), "{said}");
    }

    #[test]
    fn a_loss_goes_back_to_the_last_flush_and_no_further() {
        let mut model = Model::new(2, 4);
        for version in 1..=3 {
            assert_eq!(model.version(), version);
            model.writing(0, 1, version);
            model.written(0, 1, How { direct: true, logged: false });
            if version == 2 {
                model.flushed(true);
                assert!(model.is_direct(0));
            }
        }
        let mut slipped = model.clone();
        slipped.slipped();
        assert!(of(&slipped, 0, 2) && of(&slipped, 0, 3), "lost, or not");
        let mut logged = slipped.clone();
        slipped.flushed(true);
        assert!(!of(&slipped, 0, 2), "it was said to be there");
        logged.flushed(false);
        assert!(!of(&logged, 0, 2) && !logged.is_direct(0), "it may be in the log alone");
        model.lost();
        assert!(!of(&model, 0, 1) && of(&model, 0, 2) && of(&model, 0, 3));
        model.flushed(true);
        assert!(of(&model, 0, 2), "a later flush does not bring it back");
    }

    #[test]
    fn versions_differ_and_some_are_zeros() {
        let all: Vec<_> = (0..40).map(|version| content(3, 7, version)).collect();
        for (version, bytes) in all.iter().enumerate() {
            assert_eq!(bytes.len(), BLOCK);
            let zeros = is_zeros(version as u32);
            assert_eq!(bytes.iter().all(|&byte| byte == 0), zeros, "{version}");
            assert_eq!(
                all.iter().filter(|other| *other == bytes).count(),
                if zeros { 3 } else { 1 }
            );
        }
    }
}
