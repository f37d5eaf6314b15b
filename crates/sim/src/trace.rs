//! The events of a run: hashed into one number, and printed as lines if requested.

/// Hashes every event: two runs of a seed are equal if their hashes are.
#[derive(Debug)]
pub struct Trace {
    hash: u64,
    /// Whether lines are printed.
    pub verbose: bool,
}

impl Trace {
    /// An empty trace.
    #[must_use]
    pub fn new(verbose: bool) -> Self {
        Self { hash: 0xcbf2_9ce4_8422_2325, verbose }
    }

    /// Hashes numbers that describe an event.
    pub fn mix(&mut self, numbers: &[u64]) {
        for &number in numbers {
            self.hash = (self.hash ^ number).wrapping_mul(0x0000_0100_0000_01b3);
            self.hash ^= self.hash >> 29;
        }
    }

    /// Hashes some bytes of a buffer.
    pub fn mix_bytes(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(512) {
            let head =
                chunk.iter().take(24).fold(0u64, |sum, &b| sum.rotate_left(9) ^ u64::from(b));
            self.mix(&[head]);
        }
    }

    /// Prints a line if `verbose` is set.
    pub fn line(&self, now: u64, text: impl FnOnce() -> String) {
        if self.verbose {
            println!("{:>12.6} ms  {}", now as f64 / 1e6, text());
        }
    }

    /// The hash of all events so far.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }
}
