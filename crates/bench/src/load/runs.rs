//! The runs RD1 to RD4 of vdbench, as published for host-side caches: random requests of 16 KiB
//! from 32 loops.

use crate::load::content::Content;

/// Length of a request in bytes, and number of loops.
pub const BLOCK: u64 = 16 << 10;
pub const LOOPS: usize = 32;

/// The flags of the server with which TPC-C is measured, too: more may be dirty, for longer.
pub const FLAGS: [&str; 2] = ["--dirty-limit=90%", "--write-cache-depth=600s"];
/// What is read and written. The published runs wrote data that compresses; their ratio is not
/// known. Half is `compratio=2` of vdbench.
pub const CONTENTS: [(&str, Content); 2] =
    [("random", Content::Random), ("compressible", Content::Half)];

/// The contents with these names, in the order of [`CONTENTS`].
pub fn contents(names: &[String]) -> impl Iterator<Item = (&'static str, Content)> {
    CONTENTS.into_iter().filter(|(name, _)| names.iter().any(|one| one == name))
}

/// A run with its published results.
#[derive(Clone, Copy)]
pub struct Run {
    pub name: &'static str,
    pub read_percent: u64,
    pub hit_percent: u64,
    pub hypercache: f64,
    pub flashsoft: f64,
}

pub const RUNS: [Run; 4] = [
    Run { name: "RD1", read_percent: 100, hit_percent: 90, hypercache: 5.3, flashsoft: 4.9 },
    Run { name: "RD2", read_percent: 100, hit_percent: 100, hypercache: 61.1, flashsoft: 6.1 },
    Run { name: "RD3", read_percent: 80, hit_percent: 90, hypercache: 13.1, flashsoft: 4.0 },
    Run { name: "RD4", read_percent: 80, hit_percent: 100, hypercache: 9.0, flashsoft: 4.0 },
];
