//! Random values as specified in clauses 2.1.6 and 4.3.2.

use forebay_block::testing::Numbers;

/// The constants C of NURand: the ones for last names differ between load and run by 100, which
/// clause 2.1.6.1 allows (65 to 119, neither 96 nor 112).
pub const C_LAST_LOAD: u64 = 57;
pub const C_LAST_RUN: u64 = 157;
const C_CUSTOMER: u64 = 417;
const C_ITEM: u64 = 3911;

const SYLLABLES: [&str; 10] =
    ["BAR", "OUGHT", "ABLE", "PRI", "PRES", "ESE", "ANTI", "CALLY", "ATION", "EING"];
const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

/// A source of values.
pub struct Values(Numbers);

impl Values {
    /// The source with the given seed.
    pub fn new(seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        // The first values for similar seeds are similar.
        for _ in 0..8 {
            numbers.next();
        }
        Self(numbers)
    }

    /// A number from `low` to `high`, inclusive.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.0.below(high - low + 1)
    }

    /// True with a probability of `percent` %.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.0.below(100) < percent
    }

    fn nurand(&mut self, a: u64, c: u64, low: u64, high: u64) -> u64 {
        let (first, second) = (self.within(0, a), self.within(low, high));
        (((first | second) + c) % (high - low + 1)) + low
    }

    /// A customer number; some are far more frequent.
    pub fn customer(&mut self, customers: u32) -> u32 {
        self.nurand(1023, C_CUSTOMER, 1, u64::from(customers)) as u32
    }

    /// An item number; some are far more frequent.
    pub fn item(&mut self, items: u32) -> u32 {
        self.nurand(8191, C_ITEM, 1, u64::from(items)) as u32
    }

    /// A customer's last name; with so few customers, names beyond their number do not occur.
    pub fn last_name(&mut self, c: u64, customers: u32) -> String {
        last_name(self.nurand(255, c, 0, u64::from(customers.min(1000)) - 1))
    }

    /// A string of `low` to `high` letters and digits.
    pub fn text(&mut self, low: u64, high: u64) -> String {
        let len = self.within(low, high) as usize;
        let mut out = String::with_capacity(len);
        while out.len() < len {
            let mut number = self.0.next() >> 4;
            for _ in 0..10.min(len - out.len()) {
                out.push(char::from(LETTERS[(number % 62) as usize]));
                number /= 62;
            }
        }
        out
    }

    /// A string of `len` digits.
    pub fn digits(&mut self, len: usize) -> String {
        (0..len).map(|_| char::from(b'0' + self.0.below(10) as u8)).collect()
    }

    /// A zip code: four random digits and 11111.
    pub fn zip(&mut self) -> String {
        self.digits(4) + "11111"
    }

    /// Data of items and stock: one in ten holds the word ORIGINAL.
    pub fn data(&mut self) -> String {
        let mut text = self.text(26, 50);
        if self.chance(10) {
            let at = self.within(0, text.len() as u64 - 8) as usize;
            text.replace_range(at..at + 8, "ORIGINAL");
        }
        text
    }

    /// The numbers 1 to `count` in random order.
    pub fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (1..=count).collect();
        self.shuffle(&mut all);
        all
    }

    /// Shuffles `all`.
    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for i in (1..all.len()).rev() {
            all.swap(i, self.within(0, i as u64) as usize);
        }
    }
}

/// The last name of a number below 1000: a syllable for each of its digits.
pub fn last_name(number: u64) -> String {
    [number / 100, number / 10 % 10, number % 10].map(|digit| SYLLABLES[digit as usize]).concat()
}

/// Cents in the database's notation for money.
pub fn money(cents: i64) -> String {
    let sign = if cents < 0 { "-" } else { "" };
    format!("{sign}{}.{:02}", cents.abs() / 100, cents.abs() % 100)
}

/// The database's notation for money, in cents.
pub fn cents(text: &str) -> i64 {
    let digits: String = text.chars().filter(|c| c.is_ascii_digit() || *c == '-').collect();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_specification() {
        assert_eq!(last_name(371), "PRICALLYOUGHT");
        assert_eq!(last_name(40), "BARPRESBAR");
    }

    #[test]
    fn nurand_stays_in_its_range_and_is_not_uniform() {
        let mut values = Values::new(5);
        let mut counts = vec![0u32; 3001];
        (0..300_000).for_each(|_| counts[values.customer(3000) as usize] += 1);
        assert_eq!(counts[0], 0);
        counts.sort_unstable_by(|a, b| b.cmp(a));
        // With uniform numbers the most frequent tenth would get little more than a tenth.
        let tenth: u32 = counts[..300].iter().sum();
        assert!(tenth > 75_000, "{tenth}");
        let mut values = Values::new(6);
        assert!((0..1000).all(|_| (1..=20).contains(&values.item(20))));
    }

    #[test]
    fn money_is_exact_both_ways() {
        for amount in [0, 1, 99, 100, -1, -1000, 30_000_000] {
            assert_eq!(cents(&money(amount)), amount);
        }
        assert_eq!((money(-5).as_str(), cents("-10.00")), ("-0.05", -1000));
    }

    #[test]
    fn data_is_original_in_one_of_ten() {
        let mut values = Values::new(7);
        let original = (0..10_000).filter(|_| values.data().contains("ORIGINAL")).count();
        assert!((850..1150).contains(&original), "{original}");
    }
}
