//! The world's interface to a shard's engine: the real one, or a plain one that tests the world.

use forebay_block::Instant;
use forebay_engine::{Engine, ShardConfig};

pub use forebay_engine::Shard;

/// Creates the engine of a shard.
pub type Maker = fn(ShardConfig, Instant) -> Box<dyn Shard>;

/// Creates the real engine.
#[must_use]
pub fn real(config: ShardConfig, now: Instant) -> Box<dyn Shard> {
    Box::new(Engine::new(config, now))
}
