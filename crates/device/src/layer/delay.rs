//! A slower device: every completion is delayed. `?delay=TIME` in a primary's URI.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{Completion, DeviceInfo, Instant, Io, IoQueue, IoTag};

use super::{Layer, Layered, Slots};
use crate::device::BlockDevice;

/// A slower device.
pub(crate) type DelayDevice = Layered<Delay>;

/// The time that is added to every request.
pub(crate) struct Delay(Duration);

impl DelayDevice {
    /// Adds `delay` to every request of `below`.
    pub(crate) fn new(below: Arc<dyn BlockDevice>, delay: Duration) -> Self {
        Self { below, layer: Delay(delay) }
    }
}

impl Layer for Delay {
    fn queue(&self, below: Box<dyn IoQueue>) -> Box<dyn IoQueue> {
        Box::new(DelayQueue {
            inner: below,
            delay: self.0,
            slots: Slots::default(),
            held: Slots::default(),
            dues: BinaryHeap::new(),
            below: Vec::new(),
        })
    }
}

struct DelayQueue {
    inner: Box<dyn IoQueue>,
    delay: Duration,
    /// Requests at the device below, with the earliest time of their completion.
    slots: Slots<Instant>,
    /// Delayed completions.
    held: Slots<Completion>,
    /// The due times of the delayed completions, with the slot of each.
    dues: BinaryHeap<Reverse<(Instant, u64)>>,
    /// Scratch space; empty between uses.
    below: Vec<Completion>,
}

impl IoQueue for DelayQueue {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&mut self, now: Instant, io: Io) -> Result<(), Io> {
        let passed = self.slots.pass(&mut *self.inner, now, io, now + self.delay);
        passed.map_err(|(io, _)| io)
    }

    fn poll(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.inner.poll(now, &mut self.below);
        for mut end in self.below.drain(..) {
            let (tag, due) = self.slots.take(end.tag);
            end.tag = tag;
            if due <= now {
                done.push(end);
            } else {
                let place = self.held.put(tag, end);
                self.dues.push(Reverse((due, place.0)));
            }
        }
        while let Some(&Reverse((due, place))) = self.dues.peek() {
            if due > now {
                break;
            }
            self.dues.pop();
            done.push(self.held.take(IoTag(place)).1);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let held = self.dues.peek().map(|&Reverse((due, _))| due);
        self.inner.deadline().into_iter().chain(held).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDevice;
    use crate::testing::{Bench, exercise};

    fn slow(delay: Duration) -> DelayDevice {
        DelayDevice::new(Arc::new(MemoryDevice::new(1 << 20)), delay)
    }

    #[test]
    fn it_is_the_device_below_with_and_without_delay() {
        exercise(&slow(Duration::ZERO), 41);
        exercise(&slow(Duration::from_micros(200)), 42);
    }

    #[test]
    fn every_request_has_the_delay_and_they_overlap() {
        let ms = Duration::from_millis;
        let device = slow(ms(100));
        let mut bench = Bench::new(&device);
        let reads = (0..10).map(|i| bench.read_io(i * 512, 512)).collect();
        let started = bench.clock.now();
        assert!(bench.run(reads).iter().all(|end| end.result.is_ok()));
        let time = bench.clock.now().since(started);
        assert!(time >= ms(100) && time < ms(700), "ten reads of 100 ms took {time:?}");
    }
}
