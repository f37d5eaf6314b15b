//! A stand-in for a device that is not there: it has the size and the identity that are on record
//! of it, and fails every request.

use std::io;
use std::rc::Rc;

use forebay_block::{Completion, DeviceInfo, ErrorKind, Instant, Io, IoQueue};

use crate::device::BlockDevice;
use crate::ring::Ring;

/// A device that is not there.
#[derive(Debug)]
pub struct AwayDevice {
    info: DeviceInfo,
    why: String,
}

impl AwayDevice {
    /// In the place of the device `identity` of `size` bytes, which could not be opened for `why`.
    #[must_use]
    pub fn new(size: u64, identity: &str, name: &str, why: String) -> Self {
        let info = DeviceInfo { name: name.to_owned(), ..DeviceInfo::plain(size, identity) };
        Self { info, why }
    }
}

impl BlockDevice for AwayDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn remark(&self) -> Option<&str> {
        Some(&self.why)
    }

    fn is_away(&self) -> bool {
        true
    }

    fn open_queue(&self, _ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        Ok(Box::new(AwayQueue { info: self.info.clone(), failed: Vec::new() }))
    }
}

struct AwayQueue {
    info: DeviceInfo,
    failed: Vec<Io>,
}

impl IoQueue for AwayQueue {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, _now: Instant, io: Io) -> Result<(), Io> {
        self.failed.push(io);
        Ok(())
    }

    fn poll(&mut self, _now: Instant, completions: &mut Vec<Completion>) {
        let failed = self.failed.drain(..);
        completions.extend(failed.map(|io| io.complete(Err(ErrorKind::DeviceGone.into()))));
    }

    fn deadline(&self) -> Option<Instant> {
        (!self.failed.is_empty()).then_some(Instant::default())
    }
}
