//! The harness of the engine's tests, with blocks whose content tells their version.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test uses a part; it ends at the first thing it did not expect"
)]

use std::ops::{Deref, DerefMut};

use forebay_block::testing::Numbers;
use forebay_block::{BLOCK_SIZE, ByteRange, IoOp};
pub use forebay_engine::testing::Devices;
use forebay_engine::testing::{Harness, config};
use forebay_engine::{ContentLocality, ShardConfig, Trust};

pub const BLOCK: u64 = BLOCK_SIZE as u64;
pub const BLOCKS: u64 = 400;
pub const SIZE: u64 = 4000 * BLOCK;
pub const AREA: u64 = 6 << 20;

/// The content of one version of a block: most of it is the same in every version.
pub fn content(block: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK_SIZE];
    if version > 0 {
        Numbers::new(block + 1).fill(&mut bytes);
        bytes[..8].copy_from_slice(&block.to_le_bytes());
        bytes[8..16].copy_from_slice(&version.to_le_bytes());
    }
    bytes
}

/// Devices without content.
pub fn blank() -> Devices {
    Devices::new(AREA, SIZE)
}

/// A harness that has settled after its start.
pub struct World(Harness);

impl Deref for World {
    type Target = Harness;

    fn deref(&self) -> &Harness {
        &self.0
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Harness {
        &mut self.0
    }
}

impl World {
    pub fn start(
        devices: Devices,
        fresh: bool,
        trust: Trust,
        accept_loss: bool,
        epoch: u32,
    ) -> Self {
        let settings = ShardConfig { fresh, trust, accept_loss, epoch, ..settings() };
        Self::start_as(settings, devices)
    }

    /// Starts when nothing proves that the primary was not changed.
    pub fn start_suspect(devices: Devices, epoch: u32) -> Self {
        let mut settings = ShardConfig { fresh: false, epoch, ..settings() };
        settings.volumes[0].suspect = true;
        Self::start_as(settings, devices)
    }

    fn start_as(settings: ShardConfig, devices: Devices) -> Self {
        let mut world = Self(Harness::start(settings, devices));
        world.settle();
        world
    }

    /// The devices as a crash would leave them now.
    pub fn into_devices(self) -> Devices {
        self.0.devices
    }

    pub fn write(&mut self, block: u64, version: u64) {
        let range = ByteRange::new(block * BLOCK, BLOCK);
        assert!(self.ask(IoOp::Write, range, &content(block, version)).is_some());
    }

    pub fn flush(&mut self) {
        assert!(self.ask(IoOp::Flush, ByteRange::default(), &[]).is_some());
    }

    /// The version of a block that a read returns, or `None` if the read fails.
    pub fn version(&mut self, block: u64) -> Option<u64> {
        let range = ByteRange::new(block * BLOCK, BLOCK);
        let buf = self.ask(IoOp::Read, range, &[])?;
        let version = u64::from_le_bytes(buf[8..16].try_into().unwrap());
        assert!(*buf == *content(block, version), "block {block} shows no version of it");
        Some(version)
    }

    pub fn versions(&mut self) -> Vec<Option<u64>> {
        (0..BLOCKS).map(|block| self.version(block)).collect()
    }
}

fn settings() -> ShardConfig {
    ShardConfig { compress: true, content: ContentLocality::Rewrite, ..config(AREA, SIZE) }
}
