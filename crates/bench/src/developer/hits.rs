//! Shared parts of the measurements of hits: arguments, data, turns of two servers, and the check
//! that all requests were hits.

use std::time::Duration;

use anyhow::ensure;

use crate::load::content::Content;
use crate::load::{Load, Pattern};
use crate::report::progress;
use crate::rig::Common;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, Status};

/// Requests in flight.
pub const DEPTH: usize = 32;

/// Arguments common to all measurements of hits.
#[derive(clap::Args)]
#[group(skip)]
pub struct Hits {
    #[command(flatten)]
    pub common: Common,
    /// Turns of each server
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Seconds of each turn
    #[arg(long, default_value_t = 3)]
    pub seconds: u64,
    /// MiB of data to read
    #[arg(long, default_value_t = 256)]
    mib: u64,
}

/// Servers measured in turns: requests per second of each, and CPU time per request in
/// microseconds, turn by turn.
pub struct Turns<const N: usize> {
    pub rates: [Vec<f64>; N],
    pub costs: [Vec<f64>; N],
}

impl Hits {
    /// Size of the data, in bytes.
    pub fn size(&self) -> u64 {
        self.mib << 20
    }

    /// A server in write-back of a new `primary` of that size, which it caches whole. `ram` is in
    /// bytes; requests in sequence are cached too.
    pub fn setting(&self, place: &Place, shards: u16, ram: u64) -> anyhow::Result<Setting> {
        place.sparse("primary", self.size())?;
        Ok(Setting {
            primary: place.text("primary"),
            cache: ("cache".to_owned(), self.size() * 3),
            mode: "write-back",
            ram,
            shards,
            more: vec!["--sequential-threshold=0".to_owned()],
        })
    }

    /// Measures servers in turns. `one` gets the numbers of the server and the turn; it returns
    /// requests per second, and the server's CPU time.
    pub fn in_turns<const N: usize>(
        &self,
        name: &str,
        mut one: impl FnMut(usize, usize) -> anyhow::Result<(f64, Duration)>,
    ) -> anyhow::Result<Turns<N>> {
        let none = || std::array::from_fn(|_| Vec::new());
        let mut turns = Turns { rates: none(), costs: none() };
        for round in 0..self.rounds {
            progress(&format!("{name}, turn {} of {}", round + 1, self.rounds));
            for server in 0..N {
                let (rate, cpu) = one(server, round)?;
                turns.rates[server].push(rate);
                turns.costs[server].push(cpu.as_secs_f64() * 1e6 / (rate * self.seconds as f64));
            }
        }
        progress("");
        Ok(turns)
    }
}

/// Writes every block once, with incompressible data.
pub fn fill(size: u64) -> Load {
    Load {
        loops: 16,
        connections: 1,
        block: 64 << 10,
        pattern: Pattern::Sequential { read: false, start: 0, end: size },
        time: Duration::from_secs(3600),
        seed: 1,
        content: Content::Random,
    }
}

/// Fails unless every block since `before` came from RAM.
pub fn ensure_ram(server: &Server, before: &Status) -> anyhow::Result<()> {
    let after = server.status()?;
    let read = |name| after.counter(name) - before.counter(name);
    let (ssd, primary) = (read("ssd_hit_blocks"), read("primary_read_blocks"));
    ensure!(ssd == 0 && primary == 0, "not all hit RAM: {ssd} SSD hits, {primary} misses");
    Ok(())
}
