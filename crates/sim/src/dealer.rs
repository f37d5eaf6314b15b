//! The fates of writes that a crash leaves uncertain.

use crate::disk::Fate;
use crate::rng::Rng;

/// Deals out fates at a crash: each crash leans one way, since mixed ways hide each other.
pub(crate) struct Dealer {
    rng: Rng,
    style: u64,
    scripted: Option<std::vec::IntoIter<Fate>>,
    /// The fates dealt so far.
    pub(crate) dealt: Vec<Fate>,
}

impl Dealer {
    pub(crate) fn new(mut rng: Rng, scripted: Option<Vec<Fate>>) -> Self {
        let style = rng.below(6);
        Self { rng, style, scripted: scripted.map(Vec::into_iter), dealt: Vec::new() }
    }

    pub(crate) fn deal(&mut self, sectors: u64) -> Fate {
        let fate = match &mut self.scripted {
            Some(fates) => fates.next().unwrap_or(Fate::Drop),
            None => self.draw(sectors),
        };
        self.dealt.push(fate);
        fate
    }

    fn draw(&mut self, sectors: u64) -> Fate {
        let rng = &mut self.rng;
        match self.style {
            0 => Fate::Drop,
            1 => Fate::Keep,
            2 if rng.percent(80) => Fate::Keep,
            3 if rng.percent(80) => Fate::Drop,
            _ => match rng.below(6) {
                0 | 1 => Fate::Keep,
                2 => Fate::Drop,
                3 => Fate::Prefix(rng.below(sectors + 1)),
                4 => Fate::Scatter(rng.number()),
                _ => Fate::Garble(rng.number()),
            },
        }
    }
}
