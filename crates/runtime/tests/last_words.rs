//! A shard's last events are in the log when the pool has stopped, before anyone reads the log or
//! ends the process.

#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use forebay_block::{Arena, VolumeId};
use forebay_device::{BlockDevice, MemoryDevice};
use forebay_engine::Shard;
use forebay_runtime::{MakeShard, Pool, PoolConfig};
use forebay_volume::{Registry, Volume};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};

#[path = "support/shard.rs"]
mod shard;
use shard::Passing;

/// Lines written about omitted events.
static WRITTEN: AtomicUsize = AtomicUsize::new(0);

/// A slow log.
struct Slow;

impl Subscriber for Slow {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut Lines);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Lines;

impl Visit for Lines {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        if format!("{value:?}").contains("7 more events") {
            thread::sleep(Duration::from_millis(300));
            WRITTEN.fetch_add(1, Ordering::SeqCst);
        }
    }
}

#[test]
fn what_a_shard_tells_last_is_written_before_the_pool_has_stopped() {
    tracing::subscriber::set_global_default(Slow).unwrap();
    let make: MakeShard =
        Box::new(|_| -> Box<dyn Shard> { Box::new(Passing { tells: true, ..Passing::default() }) });
    let primary: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(1 << 20));
    let volume = Volume::new(VolumeId(0), "a".to_owned(), primary.info().clone());
    let registry = Registry::new(vec![volume]).unwrap();
    let config = PoolConfig::new(registry, vec![primary], vec![make], Arena::new(4 << 20));
    let pool = Pool::start(config).unwrap();
    assert!(pool.stop(false).complete);
    assert_eq!(WRITTEN.load(Ordering::SeqCst), 1);
}
