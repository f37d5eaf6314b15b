//! Databases on a disk: an image with a loaded database is copied, put behind a set-up, mounted,
//! and loaded through a dedicated database server. Then everything is killed, and the content of
//! the primary alone is checked.

use std::path::Path;

use anyhow::Context as _;

use crate::dbms::{Dbms, Setting};
use crate::report::progress;
use crate::report::{BASELINE, Measured, Report};
use crate::rig::cleanup;
use crate::rig::disk::{Disk, Medium};
use crate::rig::image::{self, Image};
use crate::rig::place::Place;
use crate::rig::setup::SetUp;
use crate::rig::watch::watch;
use crate::user::options::Shared;

/// Size of the buffer pool for loading and checking, in bytes.
const LARGE_POOL: u64 = 1 << 30;
/// Arguments common to the database benchmarks.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Args {
    /// Arguments common to all benchmarks.
    #[command(flatten)]
    pub shared: Shared,
    /// Seconds of ramp-up for each set-up; not counted
    #[arg(long, default_value_t = 60)]
    pub ramp: u64,
    /// Seconds measured for each set-up
    #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u64).range(5..))]
    pub seconds: u64,
    /// Connections, each with one statement at a time
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    /// MiB of the buffer pool [default: a twentieth of the data]
    #[arg(long, value_name = "MIB")]
    pub buffer_pool_mib: Option<u64>,
    /// MiB of the redo log; should be much smaller than the cache, as it is in practice
    #[arg(long, value_name = "MIB", default_value_t = 48)]
    pub redo_log_mib: u64,
    /// An additional setting of the database server, such as --setting innodb-io-capacity=2000; may
    /// be repeated
    #[arg(long = "setting", alias = "mariadb", value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
}

/// The result of a load, before the observations are added.
pub struct Loaded {
    /// The rate in each second, ramp-up included, in the benchmark's unit.
    pub per_second: Vec<f64>,
    /// Latencies of the transactions.
    pub latency: crate::load::sample::Latency,
    /// Additional figures.
    pub figures: Vec<(String, f64)>,
}

impl Args {
    /// The server's settings for measuring a database of `data` bytes.
    pub fn server(&self, data: u64) -> Setting {
        let least = 16 << 20;
        let pool = self.buffer_pool_mib.map_or((data / 20).max(least), |mib| mib << 20);
        Setting {
            // In whole MiB, so that the report is exact.
            buffer_pool: pool >> 20 << 20,
            redo_log: self.redo_log_mib << 20,
            durable: true,
            // Checks need a few more.
            connections: self.threads + 8,
            page_cache: Some(pool),
            more: self.settings.clone(),
        }
    }

    /// The settings for loading and checking, as fast as possible.
    pub fn fast_server(&self) -> Setting {
        Setting {
            buffer_pool: LARGE_POOL,
            redo_log: self.redo_log_mib << 20,
            durable: false,
            connections: 16,
            page_cache: None,
            more: Vec::new(),
        }
    }

    /// Size of the cache for `data` bytes of data: bytes, in whole MiB.
    pub fn cache(&self, data: u64) -> u64 {
        (data * self.shared.cache_percent / 100) >> 20 << 20
    }

    /// Adds the settings to a report.
    pub fn describe<D: Dbms>(&self, report: &mut Report, image: &Image) {
        self.shared.describe(report);
        report.set("data", format!("{} MiB", image.data >> 20));
        report.set("disk", format!("{} MiB, XFS", image.size >> 20));
        report.set("cache", format!("{} MiB", self.cache(image.data) >> 20));
        report.set("connections", self.threads);
        report.set("time", format!("{} s of ramp-up, {} s measured", self.ramp, self.seconds));
        report.set(D::NAME, D::describe(&self.server(image.data)));
    }

    /// Measures one set-up on a copy of an image. Afterwards the database is killed and the cache
    /// drained, and `check` gets a server on the primary alone, together with the result of the
    /// load.
    ///
    /// # Errors
    /// When any step fails, including a check.
    pub fn measure<D: Dbms, T>(
        &self,
        image: &Image,
        setup: SetUp,
        load: impl FnOnce(&D) -> anyhow::Result<(Loaded, T)>,
        check: impl FnOnce(&D, T) -> anyhow::Result<()>,
    ) -> anyhow::Result<Measured> {
        let place = Place::new(Some(&self.shared.directory()?))?;
        let name = setup.name();
        image.copy(&place, "primary")?;
        let medium = self.medium(image)?;
        let (mut measured, left) = {
            progress(&format!("{name}: starting"));
            let disk = Disk::start(&place, setup, &medium)?;
            let mounted = cleanup::mount(disk.device(), &place.path("mnt"))?;
            let (data, run) = (place.path("mnt/data"), place.path("run"));
            let server = D::start(&data, &run, &self.server(image.data))?;
            let programs = programs(&disk, &server);
            let (loaded, observed) = watch(&programs, disk.cache(), || load(&server));
            let (loaded, left) = loaded.context(name)?;
            let mut measured = self.measured(setup, loaded);
            observed.enter(&mut measured);
            progress(&format!("{name}: killing the database, unmounting"));
            server.kill();
            drop(mounted);
            disk.stop()?;
            (measured, left)
        };
        if let Some(mode) = setup.mode() {
            progress(&format!("{name}: draining"));
            medium.drain(&place, mode)?;
        }
        progress(&format!("{name}: checking what the primary alone holds"));
        let check = |server: &D| check(server, left);
        self.alone(&place, check).with_context(|| format!("{name}: the primary alone"))?;
        let rate = mean(&measured.per_second[measured.ramp.min(measured.per_second.len())..]);
        measured.rate = rate;
        Ok(measured)
    }

    /// Runs a load for the ramp-up and then for the measured time, and shows the transactions of
    /// each second. Returns the results of both parts.
    pub fn in_parts<S>(
        &self,
        setup: SetUp,
        mut run_for: impl FnMut(u64, &dyn Fn(usize, f64)) -> anyhow::Result<S>,
    ) -> anyhow::Result<(S, S)> {
        let (name, ramp, all) = (setup.name(), self.ramp, self.ramp + self.seconds);
        let warm = run_for(ramp, &|second, count| {
            progress(&format!("{name}: {second}/{all} s, {count:.0} tps, ramp-up"));
        })?;
        let said = run_for(self.seconds, &|second, count| {
            progress(&format!("{name}: {}/{all} s, {count:.0} tps", ramp as usize + second));
        })?;
        Ok((warm, said))
    }

    /// The counts per second of both parts.
    pub fn seconds_of(&self, mut warm: Vec<f64>, mut measured: Vec<f64>) -> Vec<f64> {
        warm.resize(self.ramp as usize, 0.0);
        warm.append(&mut measured);
        warm
    }

    fn medium(&self, image: &Image) -> anyhow::Result<Medium> {
        Ok(Medium {
            binary: self.shared.binary()?,
            primary: "primary".to_owned(),
            model: self.shared.model.clone(),
            cache: self.cache(image.data),
            ram: self.shared.ram_mib << 20,
            shards: self.shared.shards,
            more: self.shared.serve.clone(),
        })
    }

    fn measured(&self, setup: SetUp, loaded: Loaded) -> Measured {
        Measured {
            setup: setup.name().to_owned(),
            ramp: self.ramp as usize,
            per_second: loaded.per_second,
            latency: loaded.latency,
            figures: loaded.figures.into_iter().collect(),
            ..Measured::default()
        }
    }

    /// Runs `check` with a server directly on the primary of a place.
    fn alone<D: Dbms>(
        &self,
        place: &Place,
        check: impl FnOnce(&D) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (device, _attached) = cleanup::loop_device(&place.path("primary"))?;
        let _mounted = cleanup::mount(&device, &place.path("mnt"))?;
        let (data, run) = (place.path("mnt/data"), place.path("run"));
        let server = D::start(&data, &run, &self.fast_server())?;
        check(&server)?;
        server.stop()
    }
}

fn programs<'a, D: Dbms>(disk: &Disk, server: &D) -> Vec<(&'a str, u32)> {
    let mut all = vec![(D::NAME, server.process().pid()), ("client", std::process::id())];
    all.extend(disk.processes().iter().map(|(name, process)| (*name, process.pid())));
    all
}

/// The mean of the numbers; 0 if there are none.
pub fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// Creates an image with a database that `fill` fills.
pub fn prepare<D: Dbms>(
    args: &Args,
    name: &str,
    made_of: &str,
    size: u64,
    fill: impl FnOnce(&D) -> anyhow::Result<()>,
) -> anyhow::Result<Image> {
    let dir = args.shared.directory()?;
    // A disk has whole sectors, whatever their size.
    let size = size.next_multiple_of(1 << 20);
    let load = |at: &Path, run: &Path| {
        let data = at.join("data");
        progress("making a data directory");
        D::install(&data)?;
        let server = D::start(&data, run, &args.fast_server())?;
        fill(&server)?;
        progress("stopping the loaded database");
        server.stop()
    };
    let made_of = format!("{made_of}, redo log {} MiB", args.redo_log_mib);
    image::prepare(&dir, name, &made_of, size, load)
}

/// Adds the targets common to the database benchmarks.
pub fn targets(report: &mut Report, gains: [(&str, f64); 2]) {
    let Some(group) = report.groups.first().cloned() else { return };
    for (mode, wanted) in gains {
        let Some(found) = group.ratio(mode, BASELINE) else { continue };
        let or =
            group.ratio(mode, "bare-ssd").map(|share| ("of the bare SSD".to_owned(), share, 0.9));
        let what = format!("{mode} / no-cache");
        report.targets.push(crate::report::Target { what, found, wanted, or });
    }
    let peer = group.ratio("write-through", "nbdkit");
    report.target("write-through / nbdkit's cache filter in write-through", peer, 3.0);
}
