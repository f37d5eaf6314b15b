//! The bytes of a simulated disk: pages that copies of the disk share until one is changed.

use std::rc::Rc;

use forebay_codec::{crc32c, is_zero};

const PAGE: usize = 4096;

/// An image; pages never written are zeros. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Pages {
    pages: Vec<Option<Rc<[u8; PAGE]>>>,
}

impl Pages {
    /// An image of `size` zero bytes.
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self { pages: vec![None; (size as usize).div_ceil(PAGE)] }
    }

    /// The same image cut off, or followed by zeros, at `size` bytes.
    #[must_use]
    pub fn resized(mut self, size: u64) -> Self {
        self.pages.resize((size as usize).div_ceil(PAGE), None);
        self
    }

    /// Reads bytes at `offset` into `out`.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        for (page, at, part) in parts(offset, out.len()) {
            let len = part.len();
            match &self.pages[page] {
                Some(bytes) => out[part].copy_from_slice(&bytes[at..at + len]),
                None => out[part].fill(0),
            }
        }
    }

    /// Writes `data` at `offset`.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        for (page, at, part) in parts(offset, data.len()) {
            let len = part.len();
            let bytes = self.pages[page].get_or_insert_with(|| Rc::new([0; PAGE]));
            Rc::make_mut(bytes)[at..at + len].copy_from_slice(&data[part]);
        }
    }

    /// Writes `len` zeros at `offset`.
    pub fn zero(&mut self, offset: u64, len: u64) {
        for (page, at, part) in parts(offset, len as usize) {
            if part.len() == PAGE {
                self.pages[page] = None;
            } else if let Some(bytes) = &mut self.pages[page] {
                Rc::make_mut(bytes)[at..at + part.len()].fill(0);
            }
        }
    }

    /// A hash of the content.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut digest = 0u64;
        for (number, page) in self.pages.iter().enumerate() {
            let Some(bytes) = page.as_ref().filter(|bytes| !is_zero(&bytes[..])) else { continue };
            let place = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            digest = digest.rotate_left(7) ^ place ^ u64::from(crc32c(&bytes[..]));
        }
        digest
    }

    /// Inverts a bit.
    pub fn flip(&mut self, offset: u64, bit: u32) {
        let mut byte = [0];
        self.read(offset, &mut byte);
        self.write(offset, &[byte[0] ^ 1 << (bit % 8)]);
    }
}

/// The pages that a range touches: page, first byte in it, and the part of the range on it.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>)> {
    let offset = offset as usize;
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = (offset + done) % PAGE;
        let take = (PAGE - at).min(len - done);
        let item = ((offset + done) / PAGE, at, done..done + take);
        done += take;
        Some(item)
    })
}
