//! How the RAM tier is split between raw and compressed blocks. One function decides, from what
//! was counted since it last did; the tier follows frame by frame.
//!
//! *A frame of 4 KiB holds one raw block, or c compressed ones.* A hit in the compressed part saves
//! a read of the cache device, some 100 µs. It costs 5 µs of processor time that a raw hit does
//! not: the block is decoded, and another one compressed for it. Of the *victims* that the raw part
//! gives up a share p is kept in compressed form; the others are lost, since they do not compress,
//! or there is no time for it. So if the raw part gave up one frame more,
//!
//! - the compressed part would reach further back, by c blocks less the share p of the one that
//!   comes in: worth 100 µs for each hit that its oldest blocks get now;
//! - one block at the end of the raw part would leave it: for each hit that the newest compressed
//!   blocks get now, that costs 5 µs if it is kept (p), and 100 µs if it is not (1 - p).
//!
//! Whichever is more moves the split by 1/64 of the frames, but not on before the last step has
//! been taken; the compressed part has no fewer than 1/64 of them and no more than 3/4. "Oldest"
//! and "newest" are a quarter of it each, so their hits compare as they are. A decision is made
//! every 16 to 4096 victims, a quarter of the tier.
//!
//! Compression that its hits do not pay for (at 5 and 100 µs: fewer than one hit for 20 blocks
//! compressed), although the compressed part is full or most of them are not kept, is done less
//! often: for every second victim, every fourth, down to one in 64. What is kept then stays for
//! longer. When hits pay twice, it is done more often again. That is decided for every 256 tries.

/// What a hit in the compressed part saves, and what a block costs that is compressed, in
/// microseconds.
const SAVED: u64 = 100;
const COST: u64 = 5;
/// Steps from no frame to all.
const STEPS: usize = 64;
/// The compressed part has two frames at least, so that a payload may lie across them while the
/// oldest frame is dropped.
const SHARE_MIN: usize = 2;
/// A tier with fewer frames compresses nothing.
const FRAMES_MIN: usize = 8;
/// One victim in this many is compressed where that pays least.
const ONE_IN_MAX: u32 = 64;
/// Blocks compressed between two decisions on that.
const TRIES_WINDOW: u64 = 256;
/// Victims between two decisions on the split.
const WINDOW: std::ops::RangeInclusive<u64> = 16..=4096;

/// The part of the compressed part that a block was found in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Age {
    /// The oldest quarter.
    Oldest,
    /// The two in the middle.
    Between,
    /// The newest quarter.
    Newest,
}

/// What happened since the last decision.
#[derive(Clone, Copy, Default, Debug)]
struct Window {
    /// Blocks that the raw part gave up.
    victims: u64,
    /// Those that are in the compressed part since.
    kept: u64,
    /// Hits in the compressed part's quarters at the ends.
    oldest: u64,
    newest: u64,
}

/// The share of the frames that the compressed part may take.
#[derive(Debug)]
pub struct Split {
    frames: usize,
    share: usize,
    one_in: u32,
    skipped: u32,
    window: Window,
    /// Blocks compressed, those kept, and hits, since it was last decided how many to compress.
    tried: u64,
    kept: u64,
    hits: u64,
}

impl Split {
    /// A tier of this many frames, half of them for compressed blocks; none if nothing is to be
    /// compressed, or there are too few.
    pub fn new(frames: usize, compress: bool) -> Self {
        let share = if compress && frames >= FRAMES_MIN { frames / 2 } else { 0 };
        let window = Window::default();
        Self { frames, share, one_in: 1, skipped: 0, window, tried: 0, kept: 0, hits: 0 }
    }

    /// Frames that the compressed part may take; zero if there is to be none.
    pub fn share(&self) -> usize {
        self.share
    }

    /// Whether the next victim is to be compressed.
    pub fn wants_next(&mut self) -> bool {
        if self.share == 0 {
            return false;
        }
        self.skipped = (self.skipped + 1) % self.one_in;
        self.skipped == 0
    }

    /// Notes a hit in the compressed part.
    pub fn note_hit(&mut self, age: Age) {
        self.hits += 1;
        self.window.oldest += u64::from(age == Age::Oldest);
        self.window.newest += u64::from(age == Age::Newest);
    }

    /// Notes that a victim is compressed, whether or not it is kept.
    pub fn note_try(&mut self) {
        self.tried += 1;
    }

    /// Notes a victim, and decides when there have been enough. The compressed part has this many
    /// `blocks` in this many `frames`.
    pub fn note_victim(&mut self, kept: bool, blocks: usize, frames: usize) {
        self.window.victims += 1;
        self.window.kept += u64::from(kept);
        self.kept += u64::from(kept);
        if self.tried >= TRIES_WINDOW {
            self.set_one_in(frames);
        }
        let enough = (self.frames as u64 / 4).clamp(*WINDOW.start(), *WINDOW.end());
        if self.window.victims >= enough && self.share > 0 {
            let window = std::mem::take(&mut self.window);
            self.step(&window, blocks, frames);
        }
    }

    fn set_one_in(&mut self, frames: usize) {
        let (gain, cost) = (self.hits * SAVED, self.tried * COST);
        let in_vain = self.kept < self.tried / 2;
        (self.tried, self.kept, self.hits) = (0, 0, 0);
        if gain < cost && (in_vain || self.is_full(frames)) {
            self.one_in = (self.one_in * 2).min(ONE_IN_MAX);
        } else if gain > 2 * cost {
            self.one_in = (self.one_in / 2).max(1);
        }
    }

    fn step_frames(&self) -> usize {
        (self.frames / STEPS).max(1)
    }

    /// Whether the compressed part has its share, but for the last step.
    fn is_full(&self, frames: usize) -> bool {
        frames + self.step_frames() >= self.share
    }

    fn step(&mut self, window: &Window, blocks: usize, frames: usize) {
        let step = self.step_frames();
        if grows(window, blocks as u64, frames as u64) {
            if self.is_full(frames) {
                self.share = (self.share + step).min(self.frames / 4 * 3);
            }
        } else if frames <= self.share + step {
            let min = (self.frames / STEPS).max(SHARE_MIN);
            self.share = self.share.saturating_sub(step).max(min);
        }
    }
}

/// Whether another frame gains more in the compressed part than it costs in the raw part. Both
/// sides are multiplied by victims and frames.
fn grows(window: &Window, blocks: u64, frames: u64) -> bool {
    let Window { victims, kept, oldest, newest, .. } = *window;
    let more = (blocks * victims).saturating_sub(kept * frames);
    let gain = u128::from(more) * u128::from(oldest * SAVED);
    let lost = kept * COST + (victims - kept) * SAVED;
    let cost = u128::from(newest * frames) * u128::from(lost);
    gain > cost
}

const _: () = assert!(FRAMES_MIN / 2 >= SHARE_MIN && FRAMES_MIN / 4 * 3 < FRAMES_MIN);

#[cfg(test)]
mod tests {
    use super::*;

    /// Decides as long as it takes, where the compressed part has its share at once.
    fn settle(split: &mut Split, window: &Window, blocks_per_frame: usize) -> usize {
        for _ in 0..2 * STEPS {
            split.step(window, split.share * blocks_per_frame, split.share);
        }
        split.share
    }

    #[test]
    fn the_share_follows_what_it_brings() {
        let mut split = Split::new(640, true);
        let window = Window { victims: 100, kept: 100, oldest: 2, newest: 5 };
        assert_eq!(settle(&mut split, &window, 3), 480, "the oldest are hit as well");
        let window = Window { oldest: 0, ..window };
        assert_eq!(settle(&mut split, &window, 3), 10, "the oldest are not");
        let window = Window { oldest: 5, ..window };
        assert_eq!(settle(&mut split, &window, 1), 10, "a frame holds no more than before");
        assert_eq!(settle(&mut split, &window, 2), 480);
        let window = Window { kept: 10, oldest: 1, ..window };
        assert_eq!(settle(&mut split, &window, 2), 10, "what is not kept would be missed more");
    }

    #[test]
    fn no_step_before_the_last_is_taken() {
        let mut split = Split::new(640, true);
        let window = Window { victims: 100, kept: 100, oldest: 2, newest: 2 };
        split.step(&window, 200, 100);
        assert_eq!(split.share(), 320);
        split.step(&window, 620, 310);
        assert_eq!(split.share(), 330);
        split.step(&Window { oldest: 0, ..window }, 620, 345);
        assert_eq!(split.share(), 330);
        split.step(&Window { oldest: 0, ..window }, 200, 100);
        assert_eq!(split.share(), 320);
    }

    #[test]
    fn what_does_not_pay_is_done_seldom() {
        let mut split = Split::new(64, true);
        assert!((0..10).all(|_| split.wants_next()));
        for _ in 0..10 * TRIES_WINDOW {
            split.note_try();
            split.note_victim(true, 100, split.share());
        }
        let wanted = (0..6400).filter(|_| split.wants_next()).count();
        assert_eq!(wanted, 100);
        for _ in 0..10 * TRIES_WINDOW {
            split.note_try();
            split.note_hit(Age::Newest);
            split.note_victim(true, 100, 32);
        }
        assert!((0..10).all(|_| split.wants_next()));
        assert!(!Split::new(64, false).wants_next());
    }
}
