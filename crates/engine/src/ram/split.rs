//! The split of the RAM tier between raw and compressed blocks. One function decides, from the
//! counts since its last decision; the tier follows frame by frame.
//!
//! *A frame of 4 KiB holds one raw block, or c compressed ones.* A hit in the compressed part saves
//! a read of the cache device, about 100 µs. It costs 5 µs of CPU time more than a raw hit: the
//! block is decoded, and another one is compressed in its place. A share p of the *victims* that
//! the raw part gives up is kept in compressed form. The others are lost, because they do not
//! compress or there is no time. So if the raw part gave up one more frame:
//!
//! - the compressed part would reach further back, by c blocks minus the share p of the block that
//!   comes in: worth 100 µs for each hit that its oldest blocks get now;
//! - one block at the end of the raw part would leave it: for each hit that the newest compressed
//!   blocks get now, that costs 5 µs if it is kept (p), and 100 µs if it is not (1 - p).
//!
//! The larger of the two moves the split by 1/64 of the frames, but only after the previous step
//! has been completed. The compressed part has at least 1/64 of the frames and at most 3/4.
//! "Oldest" and "newest" are a quarter of it each, so their hits can be compared directly. A
//! decision is made after as many victims as a quarter of the tier's frames, within 16 to 4096.
//!
//! If its hits do not pay for compression (at 5 and 100 µs: fewer than one hit for 20 blocks
//! compressed), although the compressed part is full or most victims are not kept, fewer victims
//! are compressed: every second one, every fourth, down to one in 64. The blocks that are kept then
//! stay longer. When the hits pay twice the cost, more are compressed again. That decision is made
//! after every 256 tries.

/// Time that a hit in the compressed part saves, and time that compressing a block costs, in
/// microseconds.
const SAVED: u64 = 100;
const COST: u64 = 5;
/// Number of steps from no frames to all.
const STEPS: usize = 64;
/// The compressed part has at least two frames, so that a payload may span them while the oldest
/// frame is dropped.
const SHARE_MIN: usize = 2;
/// A tier with fewer frames compresses nothing.
const FRAMES_MIN: usize = 8;
/// At the lowest rate, one victim in this many is compressed.
const ONE_IN_MAX: u32 = 64;
/// Number of blocks compressed between two decisions on that rate.
const TRIES_WINDOW: u64 = 256;
/// Number of victims between two decisions on the split.
const WINDOW: std::ops::RangeInclusive<u64> = 16..=4096;

/// The age of a block in the compressed part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Age {
    /// The oldest quarter.
    Oldest,
    /// The two quarters in the middle.
    Between,
    /// The newest quarter.
    Newest,
}

/// The counts since the last decision.
#[derive(Clone, Copy, Default, Debug)]
struct Window {
    /// Number of blocks that the raw part gave up.
    victims: u64,
    /// Number of these victims that were kept in the compressed part.
    kept: u64,
    /// Number of hits in the oldest and in the newest quarter of the compressed part.
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
    /// Numbers of blocks compressed, blocks kept, and hits since the last decision on the rate.
    tried: u64,
    kept: u64,
    hits: u64,
}

impl Split {
    /// The split of a tier with `frames` frames: half of them are for compressed blocks; none if
    /// `compress` is false or there are too few frames.
    pub fn new(frames: usize, compress: bool) -> Self {
        let share = if compress && frames >= FRAMES_MIN { frames / 2 } else { 0 };
        let window = Window::default();
        Self { frames, share, one_in: 1, skipped: 0, window, tried: 0, kept: 0, hits: 0 }
    }

    /// Number of frames that the compressed part may take; zero if there is no such part.
    pub fn share(&self) -> usize {
        self.share
    }

    /// Whether to compress the next victim.
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

    /// Notes that a victim was compressed, whether or not it was kept.
    pub fn note_try(&mut self) {
        self.tried += 1;
    }

    /// Notes a victim, and decides after enough of them. The compressed part has `blocks` blocks in
    /// `frames` frames.
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

    /// Whether the compressed part has its share, except for the last step.
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

    /// Decides until the share is stable; the compressed part follows its share immediately.
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
