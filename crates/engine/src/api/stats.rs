//! The statistics of one shard, as a table: a row is the field of [`Stats`], the way in which
//! shards add up, the metric, the field in JSON, and the line in `docs/user/statistics.md`
//! (`cargo xtask statistics` writes it there).
//!
//! Conservation: `lookups = hits + partial_hits + misses + bypasses`, counted per read request
//! at a shard. The reasons of bypasses, destages and unadmitted blocks add up to their number.

use crate::api::{Bypass, DestageReason, Refusal};

/// How a statistic behaves, and how its values in shards are combined.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// Never decreases; the pool's value is the sum over shards.
    Counter,
    /// A current value; the pool's value is the sum over shards.
    Level,
    /// A current value; the pool's value is the maximum over shards.
    Greatest,
}

impl Kind {
    /// The value of two shards together.
    fn merged(self, one: u64, other: u64) -> u64 {
        match self {
            Self::Counter | Self::Level => one + other,
            Self::Greatest => one.max(other),
        }
    }
}

/// What a statistic counts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Unit {
    /// Requests, of clients or to a device.
    Requests,
    /// Blocks of 4096 bytes.
    Blocks,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Nanoseconds,
    /// Records of the log.
    Records,
    /// Segments of the log.
    Segments,
    /// Hundredths of the most there can be.
    Percent,
}

impl Unit {
    /// Its name in the documentation.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Blocks => "blocks",
            Self::Bytes => "bytes",
            Self::Nanoseconds => "ns",
            Self::Records => "records",
            Self::Segments => "segments",
            Self::Percent => "percent",
        }
    }
}

/// The numbers of a statistic, and their names outside of [`Stats`].
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// One number.
    One,
    /// A number for each value of a label.
    Labeled {
        /// Name of the metric; followed by a value it is a field in JSON.
        metric: &'static str,
        /// The label.
        label: &'static str,
        /// Its values, in the order of the numbers.
        values: &'static [&'static str],
    },
    /// A number for each bucket of a histogram of sizes in bytes.
    Buckets {
        /// Name of the metric.
        metric: &'static str,
        /// Followed by a bound, and `_bytes`, a field in JSON.
        field: &'static str,
        /// The largest size in each bucket, ascending.
        bounds: &'static [usize],
        /// The sum of all sizes.
        sum: fn(&Stats) -> u64,
    },
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Statistic {
    /// The field of [`Stats`].
    pub name: &'static str,
    /// The table of the documentation that has it.
    pub section: &'static str,
    /// Counter or level.
    pub kind: Kind,
    /// What it counts.
    pub unit: Unit,
    /// Whether it is kept for each volume; the shard's number is then the sum over its volumes.
    pub by_volume: bool,
    /// Its numbers.
    pub shape: Shape,
    /// The comment of the field: one sentence; details in a second paragraph.
    doc: &'static str,
    get: fn(&Stats) -> &[u64],
    get_mut: fn(&mut Stats) -> &mut [u64],
}

impl Statistic {
    /// Its numbers in `stats`: one, unless its shape has more.
    #[must_use]
    pub fn of<'a>(&self, stats: &'a Stats) -> &'a [u64] {
        (self.get)(stats)
    }

    /// Names of its numbers in JSON.
    #[must_use]
    pub fn fields(&self) -> Vec<String> {
        match self.shape {
            Shape::One => vec![self.name.to_owned()],
            Shape::Labeled { metric, values, .. } => {
                values.iter().map(|value| format!("{metric}_{value}")).collect()
            }
            Shape::Buckets { field, bounds, .. } => {
                bounds.iter().map(|bound| format!("{field}_{bound}_bytes")).collect()
            }
        }
    }

    /// Its meaning in one sentence.
    #[must_use]
    pub fn help(&self) -> String {
        self.paragraph(0)
    }

    /// Details for the documentation; may be empty.
    #[must_use]
    pub fn details(&self) -> String {
        self.paragraph(1)
    }

    fn paragraph(&self, number: usize) -> String {
        let lines = self.doc.split("\n\n").nth(number).unwrap_or_default().lines();
        lines.map(str::trim).collect::<Vec<_>>().join(" ")
    }
}

/// A field of [`Stats`]: one number, or several.
trait Numbers {
    fn numbers(&self) -> &[u64];
    fn numbers_mut(&mut self) -> &mut [u64];
}

impl Numbers for u64 {
    fn numbers(&self) -> &[u64] {
        std::slice::from_ref(self)
    }

    fn numbers_mut(&mut self) -> &mut [u64] {
        std::slice::from_mut(self)
    }
}

impl<const N: usize> Numbers for [u64; N] {
    fn numbers(&self) -> &[u64] {
        self
    }

    fn numbers_mut(&mut self) -> &mut [u64] {
        self
    }
}

/// The first argument, or else the default after the semicolon.
macro_rules! or {
    ($given:expr; $default:expr) => {
        $given
    };
    (; $default:expr) => {
        $default
    };
}

/// Whether a row is marked `of volume`.
macro_rules! is_of_volume {
    () => {
        false
    };
    (volume) => {
        true
    };
}

/// The type of a field.
macro_rules! field {
    () => {
        u64
    };
    ($type:ty) => {
        $type
    };
}

/// Declares [`Stats`] and [`STATISTICS`]. A row: the comment, the kind, the unit, the name; `of
/// volume` if it is kept for each volume; if it has several numbers, their type and shape.
macro_rules! statistics {
    ($($section:literal {
        $(
            $(#[doc = $doc:literal])+
            $kind:ident $unit:ident $name:ident $(of $whose:ident)? $(: $type:ty = $shape:expr)?;
        )+
    })+) => {
        /// Counters and levels of a shard, or of all; for a volume, only the rows `of volume`.
        #[derive(Clone, Default, Debug, PartialEq, Eq)]
        pub struct Stats {
            $($($(#[doc = $doc])+ pub $name: field!($($type)?),)+)+
        }

        /// Every statistic, section by section, in the order of the documentation.
        pub static STATISTICS: &[Statistic] = &[
            $($(Statistic {
                name: stringify!($name),
                section: $section,
                kind: Kind::$kind,
                unit: Unit::$unit,
                by_volume: is_of_volume!($($whose)?),
                shape: or!($($shape)?; Shape::One),
                doc: concat!($($doc, "\n"),+),
                get: |stats| stats.$name.numbers(),
                get_mut: |stats| stats.$name.numbers_mut(),
            },)+)+
        ];
    };
}

/// Bounds of the sizes by which deltas are counted, in bytes: the last is the largest there is.
pub const DELTA_SIZES: [usize; 5] = [64, 128, 256, 512, forebay_codec::DELTA_MAX];

/// Names of the reasons, in the order of [`Bypass`].
const BYPASS_REASONS: [&str; Bypass::COUNT] = ["sequential", "mode", "degraded", "rule"];

const BYPASSED: Shape =
    Shape::Labeled { metric: "bypassed", label: "reason", values: &BYPASS_REASONS };

/// Names of the reasons, in the order of [`Refusal`].
const REFUSAL_REASONS: [&str; Refusal::COUNT] =
    ["frequency", "limit", "rate", "wear", "mode", "loading"];

const REFUSED: Shape =
    Shape::Labeled { metric: "unadmitted", label: "reason", values: &REFUSAL_REASONS };

/// Names of the reasons, in the order of [`DestageReason`].
const DESTAGE_REASONS: [&str; DestageReason::COUNT] =
    ["age", "level", "idle", "drain", "room", "mode", "fault", "through"];

const DESTAGED: Shape =
    Shape::Labeled { metric: "destaged_for", label: "reason", values: &DESTAGE_REASONS };

/// Upper bounds of the ages by which dirty blocks are counted, in seconds; the last class has the
/// older ones.
pub const DIRTY_AGES: [u64; 5] = [10, 60, 300, 900, 3600];

const DIRTY_FOR: Shape = Shape::Labeled {
    metric: "dirty_for",
    label: "age",
    values: &["10s", "1m", "5m", "15m", "1h", "longer"],
};

const BY_DELTA_SIZE: Shape = Shape::Buckets {
    metric: "delta_size_bytes",
    field: "deltas_to",
    bounds: &DELTA_SIZES,
    sum: |stats| stats.delta_bytes,
};

statistics! {
    "reads and writes" {
        /// Read requests, each piece at a shard: hits, partial hits, misses and bypasses.
        Counter Requests lookups of volume;
        /// Read requests with all blocks in the cache.
        Counter Requests hits of volume;
        /// Read requests with some blocks in the cache.
        Counter Requests partial_hits of volume;
        /// Read requests with no block in the cache.
        Counter Requests misses of volume;
        /// Read requests that bypassed the cache.
        Counter Requests bypasses of volume;
        /// Reads and writes that bypassed the cache, by reason.
        ///
        /// `sequential`: a stream past its threshold. `mode`: of the volume. `degraded`: the cache
        /// failed, or has no room since a primary takes no blocks. `rule`: one of `rules`.
        Counter Requests bypassed_by of volume: [u64; Bypass::COUNT] = BYPASSED;
        /// Blocks that reads took from RAM.
        Counter Blocks ram_hit_blocks of volume;
        /// Blocks that reads took from the cache device.
        Counter Blocks ssd_hit_blocks of volume;
        /// Blocks that reads took from a primary.
        Counter Blocks primary_read_blocks of volume;
        /// Blocks of which a write that covers them in part needed the old content.
        ///
        /// From any tier. They are in no other counter of blocks.
        Counter Blocks merge_read_blocks of volume;
        /// Read requests of clients.
        Counter Requests reads of volume;
        /// Bytes that clients read.
        Counter Bytes read_bytes of volume;
        /// Write requests of clients.
        Counter Requests writes of volume;
        /// Bytes that clients wrote, write-zeroes included.
        Counter Bytes write_bytes of volume;
        /// Flush requests of clients; each counts at every shard.
        Counter Requests flushes of volume;
        /// Discard requests of clients.
        Counter Requests discards of volume;
        /// CPU time of the shard's thread, in nanoseconds.
        ///
        /// It includes all work of the thread.
        Counter Nanoseconds cpu_nanos;
        /// Requests of clients that are not yet answered.
        Level Requests requests_in_flight;
        /// Time that writes were delayed near the dirty limit, in nanoseconds.
        Counter Nanoseconds throttled_nanos of volume;
    }
    "capacity" {
        /// Blocks in the cache.
        Level Blocks cached_blocks of volume;
        /// Clean blocks dropped to make room.
        Counter Blocks evicted_blocks;
        /// Bytes of RAM that the index takes now.
        Level Bytes index_bytes;
        /// Most blocks in the index; fewer while its memory cannot be had.
        Level Blocks index_capacity;
    }
    "RAM" {
        /// Blocks in RAM.
        ///
        /// 4096 × this ÷ `ram_bytes` is the gain of compression: `held_per_ram_byte` in JSON.
        Level Blocks ram_blocks;
        /// Bytes of RAM that the blocks in RAM take.
        Level Bytes ram_bytes;
        /// Blocks in RAM in compressed form.
        Level Blocks ram_compressed_blocks;
        /// Bytes of RAM that the compressed blocks take.
        Level Bytes ram_compressed_bytes;
        /// Blocks found in RAM in compressed form, for reads and as bases of deltas.
        ///
        /// Those for reads are also in `ram_hit_blocks`.
        Counter Blocks ram_compressed_hit_blocks;
        /// Blocks compressed when their place in RAM was needed.
        Counter Blocks ram_compression_tries;
        /// Blocks dropped from RAM because the CPU budget for compression was used up.
        Counter Blocks ram_compression_refusals;
    }
    "admission" {
        /// Blocks that entered the cache device after a miss.
        ///
        /// At once until it has been full, later when they leave the RAM tier.
        Counter Blocks admitted_blocks of volume;
        /// Neighbors of missed blocks, read from a primary in the same request.
        ///
        /// Only from a slow primary, and until the cache has been full. Also in
        /// `admitted_blocks`, not in `primary_read_blocks`.
        Counter Blocks read_around_blocks of volume;
        /// Blocks that a prefetch brought into the cache device.
        ///
        /// Also in `admitted_blocks`, not in `primary_read_blocks`.
        Counter Blocks prefetched_blocks of volume;
        /// Blocks that did not enter the cache device after a miss.
        Counter Blocks unadmitted_blocks of volume;
        /// The same by reason.
        ///
        /// `frequency`: requested less frequently than what they would displace. `limit`:
        /// `cache_limit`. `rate`: `fill_rate`. `wear`: `wear_budget`. `mode`: of the volume,
        /// changed since the miss. `loading`: the log.
        Counter Blocks unadmitted_by of volume: [u64; Refusal::COUNT] = REFUSED;
        /// How far `wear_budget` is used up.
        ///
        /// The higher, the more frequent a clean block must be to be written; at 100 none is.
        Greatest Percent wear_pressure_percent;
        /// Blocks read from a primary but not cached because a write came in between.
        Counter Blocks stale_fills of volume;
    }
    "forms" {
        /// Cached blocks stored as they are, including bases of deltas.
        ///
        /// A delta counts by the form of its base. The four forms, `fenced_blocks` and
        /// `similar_blocks` add up to `cached_blocks`.
        Level Blocks raw_blocks;
        /// Cached blocks stored as LZ4, including bases of deltas.
        Level Blocks lz4_blocks;
        /// Cached blocks stored as zstd, including bases of deltas.
        Level Blocks zstd_blocks;
        /// Cached blocks of zeros, stored without a payload, including bases of deltas.
        Level Blocks zero_blocks;
        /// Cached blocks stored as deltas or against similar blocks.
        Level Blocks associate_blocks;
        /// Cached blocks stored against similar blocks.
        Level Blocks similar_blocks;
        /// Bytes of the cached blocks on the cache device, including bases of deltas.
        ///
        /// A shared payload counts for each of its blocks.
        Level Bytes payload_bytes;
        /// Blocks written as deltas against their older version.
        Counter Blocks delta_blocks;
        /// Bytes of the deltas written.
        Counter Bytes delta_bytes;
        /// Deltas written, by size in bytes.
        ///
        /// In JSON each number counts the deltas up to its size that are above the size before.
        Counter Blocks deltas_by_size: [u64; DELTA_SIZES.len()] = BY_DELTA_SIZE;
        /// Blocks encoded to find out whether a delta is worth storing.
        ///
        /// If it rarely is, few are tried.
        Counter Blocks delta_tries;
        /// Blocks encoded to find out whether zstd is worth storing.
        ///
        /// If it rarely is, few are tried.
        Counter Blocks dense_tries;
        /// Blocks written without a payload because a recently written block has the same bytes.
        Counter Blocks duplicate_blocks;
        /// Blocks for which a similar block was searched.
        ///
        /// Only with `content = similar`. Where it does not pay for a volume, few searches are
        /// made.
        Counter Blocks similar_searches;
        /// Blocks encoded against a similar block to find out whether that pays.
        Counter Blocks similar_tries;
        /// Blocks written against a similar block.
        Counter Blocks similar_written;
        /// Bytes of the blocks written against a similar block.
        Counter Bytes similar_bytes;
        /// Blocks written as zstd: by clients, after misses, and by reclaim if that made them
        /// shorter.
        Counter Blocks dense_blocks;
        /// Deltas written as whole blocks again because their base was reclaimed.
        Counter Blocks rebased_blocks;
    }
    "store" {
        /// Bytes written to the store.
        Counter Bytes store_bytes;
        /// Blocks written to the store.
        ///
        /// Moved from the log or along with such, and most of those in `admitted_blocks`.
        Counter Blocks stored_blocks;
        /// Bytes of the store in use, including what is not needed any more.
        Level Bytes store_used_bytes;
        /// Bytes of the store that the cache device was told are free.
        ///
        /// Only while serving: the discard of a new cache is not included.
        Counter Bytes discarded_bytes;
    }
    "log" {
        /// Bytes of the segments in use, including garbage.
        ///
        /// 4096 × `cached_blocks` ÷ (this + `store_used_bytes`) is the effective capacity:
        /// `held_per_used_byte` in JSON.
        Level Bytes log_used_bytes;
        /// Records written to the cache device.
        Counter Records log_records;
        /// Bytes written to the log; with `store_bytes`, the wear of the cache device.
        ///
        /// At a start too, and each time that a failed write is repeated.
        Counter Bytes log_bytes;
        /// Blocks put into the log by clients, after misses and by reclaim, except zeros.
        ///
        /// Their payload may be shared. (`log_bytes` + `store_bytes`) ÷ 4096 ÷ (this +
        /// `stored_blocks`) is `written_per_stored_byte` in JSON.
        Counter Blocks log_blocks;
        /// Blocks copied forward by reclaim, or moved to the store, with those that moved along.
        Counter Blocks copied_blocks;
        /// Segments on the cache device.
        Level Segments segments;
        /// Segments whose clean blocks are not loaded yet after a start.
        ///
        /// Until it is zero, reads of clean blocks go to the primary.
        Level Segments unloaded_segments;
        /// Empty segments.
        Level Segments segments_free;
        /// Segments freed by reclaim.
        Counter Segments segments_reclaimed;
        /// Flushes of the cache device.
        Counter Requests cache_flushes;
    }
    "dirty data" {
        /// Blocks that are newer in the cache than on the primary.
        Level Blocks dirty_blocks;
        /// Number of dirty blocks at which writes wait for destaging.
        ///
        /// The dirty limit, or less if the volumes may not have as many together.
        Level Blocks dirty_limit_blocks;
        /// Age of the oldest dirty block, in nanoseconds.
        Greatest Nanoseconds oldest_dirty_nanos;
        /// Dirty blocks by the time for which they have been dirty.
        ///
        /// Up to each age, and older than the age before.
        Level Blocks dirty_by_age of volume: [u64; DIRTY_AGES.len() + 1] = DIRTY_FOR;
        /// Dirty blocks written to a primary.
        Counter Blocks destaged_blocks of volume;
        /// The same by reason.
        ///
        /// See below.
        Counter Blocks destaged_by of volume: [u64; DestageReason::COUNT] = DESTAGED;
        /// Clean blocks made dirty to fill stripes of a primary.
        Counter Blocks stripe_filled_blocks of volume;
        /// Writes to a primary that destaged dirty blocks.
        Counter Requests destage_writes of volume;
        /// Flushes of a primary.
        Counter Requests primary_flushes of volume;
        /// Blocks of the cut of an ordered volume that are not on its primary yet.
        Level Blocks cut_blocks of volume;
        /// Time since an ordered volume was last as its primary is, in nanoseconds.
        ///
        /// 0 if nothing of it is dirty, or if it is not ordered. Changes from before the start of
        /// the server count as if made at the start.
        Greatest Nanoseconds primary_age_nanos of volume;
    }
    "faults" {
        /// Clean blocks that failed their checksum, or could not be read, and were read again from
        /// the primary.
        Counter Blocks corrupt_clean of volume;
        /// Dirty blocks that failed their checksum: data is lost.
        Counter Blocks corrupt_dirty of volume;
        /// Lost blocks, which answer with an error until they are written again.
        Level Blocks fenced_blocks;
        /// Requests that failed on the cache device.
        Counter Requests cache_errors;
        /// Requests that failed on a primary.
        Counter Requests primary_errors;
        /// Writes that failed because they waited longer than `patience`.
        ///
        /// For room, while a primary takes no blocks; or, after the cache device failed, for the
        /// primary or for a record in the state directory. Those of an ordered volume wait for the
        /// device, too.
        Counter Requests given_up_writes of volume;
        /// Requests that the cache device has not answered for longer than `patience`.
        Level Requests slow_cache_ios;
    }
}

impl Stats {
    /// Bytes written to the cache device: to the log and to the store.
    #[must_use]
    pub fn written_bytes(&self) -> u64 {
        self.log_bytes + self.store_bytes
    }

    /// Adds the counters and levels of another shard.
    pub fn merge(&mut self, other: &Self) {
        for row in STATISTICS {
            for (mine, theirs) in (row.get_mut)(self).iter_mut().zip(row.of(other)) {
                *mine = row.kind.merged(*mine, *theirs);
            }
        }
    }

    /// All shards together.
    #[must_use]
    pub fn merged<'a>(shards: impl IntoIterator<Item = &'a Self>) -> Self {
        shards.into_iter().fold(Self::default(), |mut all, shard| {
            all.merge(shard);
            all
        })
    }

    /// What has changed since `before`: counters by how much they grew, levels as they are now.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut change = self.clone();
        for row in STATISTICS.iter().filter(|row| row.kind == Kind::Counter) {
            let numbers = (row.get_mut)(&mut change).iter_mut();
            for (number, before) in numbers.zip(row.of(before)) {
                *number = number.saturating_sub(*before);
            }
        }
        change
    }

    /// The numbers of the rows that are kept by volume, with their names in JSON.
    pub fn volume_fields(&self) -> impl Iterator<Item = (String, u64)> {
        let rows = STATISTICS.iter().filter(|row| row.by_volume);
        rows.flat_map(|row| row.fields().into_iter().zip(row.of(self).iter().copied()))
    }

    /// Every number with its name in JSON.
    pub fn fields(&self) -> impl Iterator<Item = (String, u64)> {
        STATISTICS.iter().flat_map(|row| row.fields().into_iter().zip(row.of(self).iter().copied()))
    }

    /// The statistics with the value that `of` gives for each name in JSON.
    pub fn from_fields(of: impl Fn(&str) -> u64) -> Self {
        let mut stats = Self::default();
        for row in STATISTICS {
            for (number, field) in (row.get_mut)(&mut stats).iter_mut().zip(row.fields()) {
                *number = of(&field);
            }
        }
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_add_up_or_the_greatest_counts() {
        let a =
            Stats { hits: 3, oldest_dirty_nanos: 7, bypassed_by: [1, 0, 2, 0], ..Stats::default() };
        let b =
            Stats { hits: 4, oldest_dirty_nanos: 5, bypassed_by: [1, 5, 0, 0], ..Stats::default() };
        let all =
            Stats { hits: 7, oldest_dirty_nanos: 7, bypassed_by: [2, 5, 2, 0], ..Stats::default() };
        assert_eq!(Stats::merged([&a, &b]), all);
    }

    #[test]
    fn a_change_is_of_counters_and_levels_stay() {
        let before = Stats { hits: 3, dirty_blocks: 9, ..Stats::default() };
        let now = Stats { hits: 5, dirty_blocks: 4, bypassed_by: [0, 1, 0, 0], ..Stats::default() };
        let change = Stats { hits: 2, ..now.clone() };
        assert_eq!(now.since(&before), change);
    }

    #[test]
    fn fields_have_names_of_their_own_and_can_be_read_back() {
        let names: Vec<String> = Stats::default().fields().map(|(name, _)| name).collect();
        let place = |name: &str| names.iter().position(|other| other == name).expect(name) as u64;
        let stats = Stats::from_fields(place);
        assert!(stats.fields().map(|(_, value)| value).eq(0..names.len() as u64));
        assert_eq!(stats.bypassed_by[1], place("bypassed_mode"));
        assert_eq!(stats.deltas_by_size[0], place("deltas_to_64_bytes"));
    }

    #[test]
    fn every_row_has_a_sentence_and_the_unit_of_its_name() {
        for row in STATISTICS {
            let (help, details) = (row.help(), row.details());
            assert!(help.ends_with('.') && !help.contains(". "), "{}: {help}", row.name);
            assert!(details.is_empty() || details.ends_with('.'), "{}: {details}", row.name);
            assert!(row.doc.split("\n\n").count() <= 2, "{}: more paragraphs", row.name);
            assert_eq!(row.fields().len(), row.of(&Stats::default()).len(), "{}", row.name);
            let suffixes =
                [("_blocks", Unit::Blocks), ("_bytes", Unit::Bytes), ("_nanos", Unit::Nanoseconds)];
            for (_, unit) in suffixes.iter().filter(|(suffix, _)| row.name.ends_with(suffix)) {
                assert_eq!(row.unit, *unit, "{}", row.name);
            }
        }
    }
}
