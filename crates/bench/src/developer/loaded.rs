//! A disk with a database under TPC-C, for parts in which servers die: how it is made, and the
//! load.

use std::time::Duration;

use crate::dbms::mariadb::MariaDb;
use crate::dbms::{Dbms as _, Setting};
use crate::report::progress;
use crate::rig::image;
use crate::rig::place::Place;
use crate::tpcc::{self, Plan, Scale};

/// The database.
pub const DATABASE: &str = "tpcc";

/// A small buffer pool for a database that keeps what it has committed, or a large one to load
/// fast.
pub fn setting(durable: bool) -> Setting {
    Setting {
        buffer_pool: if durable { 16 << 20 } else { 256 << 20 },
        redo_log: 32 << 20,
        durable,
        connections: 64,
        page_cache: None,
        more: Vec::new(),
    }
}

/// Makes the file `primary` of a disk of `size` bytes with a loaded database, of image `made_of`.
pub fn make_primary(place: &Place, made_of: &str, size: u64, scale: Scale) -> anyhow::Result<()> {
    progress("loading");
    let image = image::prepare(&place.path(""), "image", made_of, size, |at, run| {
        let data = at.join("data");
        MariaDb::install(&data)?;
        let server = MariaDb::start(&data, run, &setting(false))?;
        server.create(DATABASE)?;
        tpcc::load(|| server.connect(DATABASE), scale, |_| {})?;
        server.stop()
    })?;
    Ok(std::fs::rename(&image.path, place.path("primary"))?)
}

/// The load of a round, and the milliseconds of it before something happens: `least`, and up to
/// half of that more. The load goes on for long after that.
pub fn plan(round: u32, least: u64, terminals: u32, scale: Scale) -> (u64, Plan) {
    let millis = least + u64::from(round) * 7_919 % (least / 2 + 1);
    let plan = Plan {
        scale,
        terminals,
        ramp: Duration::ZERO,
        measured: Duration::from_millis(millis) + Duration::from_secs(600),
        seed: u64::from(round) * 1000,
    };
    (millis, plan)
}
