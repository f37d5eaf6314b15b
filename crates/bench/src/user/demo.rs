//! The demonstration: takes a few minutes, and needs no disks.
//!
//! First the gains: RD1 to RD4, scaled down, with and without the cache. Then the promise: a file
//! system's image is copied through the cache, the server is killed, started again and drained, and
//! the primary alone is compared with the image, bit for bit. Finally a database on a mounted disk,
//! without and with the cache.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::Parser as _;

use crate::dbms::{MARIADB, TOOLS};
use crate::report::progress;
use crate::rig::cleanup::tool;
use crate::rig::needs;
use crate::rig::place::Place;
use crate::rig::server::{Server, Setting, binary};
use crate::rig::setup::SetUp;

/// Size of the image, and of the volume that it is copied to, in bytes.
const IMAGE_BYTES: u64 = 192 << 20;
const VOLUME_BYTES: u64 = 256 << 20;
/// Maximum size of the files in the image, in bytes.
const FILES_BYTES: u64 = 96 << 20;
/// Directories with files on most machines; the first ones that supply enough are used.
const SOURCES: [&str; 4] = ["/usr/share", "/usr/lib", "/usr/include", "/usr/bin"];
/// Bytes compared at a time.
const CHUNK: usize = 1 << 20;

/// Arguments of the command.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The binary of Forebay [default: the one that runs this command]
    #[arg(long, value_name = "PATH", hide = true)]
    forebay: Option<PathBuf>,
    /// Directory for files, on an SSD [default: forebay-bench in the directory for temporary files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Directory for the figures and the reports
    #[arg(long, value_name = "DIR", default_value = "forebay-bench")]
    out: PathBuf,
    /// Seconds of TPC-C without and with the cache; 0 skips the database
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// Parses a benchmark's command line.
#[derive(clap::Parser)]
struct Asked {
    #[command(subcommand)]
    command: crate::user::Command,
}

impl Args {
    /// A benchmark with these flags in addition to the common ones.
    fn bench(&self, words: &[&str]) -> anyhow::Result<crate::user::Command> {
        let mut all: Vec<std::ffi::OsString> = vec!["forebay".into()];
        all.extend(words.iter().map(Into::into));
        all.extend(["--out".into(), self.out.clone().into()]);
        for (flag, value) in [("--dir", &self.dir), ("--forebay", &self.forebay)] {
            all.extend(value.iter().flat_map(|value| [flag.into(), value.clone().into()]));
        }
        Ok(Asked::try_parse_from(all)?.command)
    }
}

/// Runs all parts; an error if anything was lost.
pub fn run(args: &Args) -> anyhow::Result<()> {
    needs::tools(&[("nbdkit", "nbdkit"), ("nbdcopy", "libnbd-bin"), ("mke2fs", "e2fsprogs")])?;
    let mut pages = Vec::new();
    println!("1. The gains. Four disks in RAID 10, as a model of their times, and a cache of a");
    println!("quarter of their size: random requests of 16 KiB from 32 loops.");
    let vdbench = args.bench(&[
        "vdbench",
        "--mib=1024",
        "--seconds=8",
        "--baseline-seconds=4",
        "--hit-kib=1024",
        "--runs=RD1,RD2,RD3,RD4",
        "--setups=no-cache,write-back,bare-ssd",
    ])?;
    pages.push(crate::user::dispatch(&vdbench)?);
    println!("\n2. The promise. A file system goes through the cache; then the power fails.");
    {
        let place = Place::new(args.dir.as_deref())?;
        survive(&place, &binary(args.forebay.as_deref())?)?;
    }
    println!(
        "\n3. A database. MariaDB on a disk that is mounted, TPC-C without and with the cache."
    );
    if let Err(reason) = database_can_run(args) {
        println!("skipped: {reason:#}");
    } else {
        let (warehouses, seconds) = ("--warehouses=3", format!("--seconds={}", args.seconds));
        let setups = "--setups=no-cache,write-back";
        let tpcc = args.bench(&["tpcc", warehouses, &seconds, "--ramp=20", setups])?;
        pages.push(crate::user::dispatch(&tpcc)?);
    }
    println!();
    for page in pages {
        println!("report: {}", page.display());
    }
    Ok(())
}

fn database_can_run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.seconds > 0, "--seconds 0");
    needs::tools(&[&MARIADB[..], &TOOLS].concat())?;
    needs::disk_can_be_made(&[SetUp::NoCache])
}

fn survive(place: &Place, binary: &Path) -> anyhow::Result<()> {
    progress("making the image");
    let files = gather(place)?;
    let image = make_image(place, &files)?;
    let primary = place.sparse("primary", VOLUME_BYTES)?;
    let setting = Setting {
        // Slow enough that most of the image is still only in the cache when the server is killed.
        primary: format!("{}?emulate=raid10x4", primary.display()),
        cache: ("cache".to_owned(), VOLUME_BYTES * 4),
        mode: "write-back",
        ram: 32 << 20,
        shards: 2,
        more: vec!["--sequential-threshold=0".to_owned()],
    };
    let server = Server::forebay(binary, place, &setting)?;
    progress("copying the image");
    let copied = tool("nbdcopy")
        .arg("--flush")
        .args([image.as_os_str(), server.uri().as_ref()])
        .output()
        .context("starting nbdcopy")?;
    ensure!(copied.status.success(), "nbdcopy: {}", String::from_utf8_lossy(&copied.stderr));
    let risk = server.status()?.counter("dirty_blocks") * 4096;
    server.kill();
    progress("");
    println!("copied an ext4 image of {} MiB and flushed it", IMAGE_BYTES >> 20);
    println!("killed the server with {} MiB not yet on the primary", risk >> 20);
    match first_difference(&image, &primary)? {
        Some(at) => println!("the primary alone differs from the image, first at byte {at}"),
        None => println!("the primary alone already has everything"),
    }

    let server = Server::forebay(binary, place, &setting)?;
    println!("started again in {:.3} s", server.started_in.as_secs_f64());
    progress("draining");
    server.drain()?;
    server.stop()?;
    progress("");
    if let Some(at) = first_difference(&image, &primary)? {
        bail!("the primary differs from the image at byte {at}: data was lost");
    }
    let checked = tool("e2fsck").args(["-fn"]).arg(&primary).output();
    if let Ok(output) = checked {
        ensure!(output.status.success(), "e2fsck: {}", String::from_utf8_lossy(&output.stdout));
        println!("e2fsck finds no fault in the file system on the primary");
    }
    println!("drained and stopped: the primary alone holds the image, bit for bit");
    Ok(())
}

/// Copies files of this machine into a directory, up to a limit.
fn gather(place: &Place) -> anyhow::Result<PathBuf> {
    let target = place.path("files");
    fs::create_dir_all(&target)?;
    let mut waiting: Vec<PathBuf> = SOURCES.iter().rev().map(PathBuf::from).collect();
    let (mut bytes, mut count) = (0, 0u32);
    while let Some(directory) = waiting.pop() {
        // Unreadable directories are skipped.
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        let mut entries: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        entries.sort_unstable();
        for path in entries {
            let Ok(info) = fs::symlink_metadata(&path) else { continue };
            if info.is_dir() {
                waiting.push(path);
            } else if info.is_file() && bytes + info.len() <= FILES_BYTES {
                let folder = target.join(format!("{:03}", count / 100));
                fs::create_dir_all(&folder)?;
                let name = path.file_name().context("a file has a name")?;
                let name = format!("{count}-{}", name.to_string_lossy());
                if fs::copy(&path, folder.join(name)).is_ok() {
                    bytes += info.len();
                    count += 1;
                }
            }
        }
        if bytes >= FILES_BYTES / 10 * 9 {
            break;
        }
    }
    ensure!(count > 0, "no files found in {SOURCES:?}");
    Ok(target)
}

/// An ext4 file system that contains these files.
fn make_image(place: &Place, files: &Path) -> anyhow::Result<PathBuf> {
    let image = place.sparse("image", IMAGE_BYTES)?;
    let output = tool("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-d"])
        .args([files, &image])
        .output()
        .context("starting mke2fs")?;
    ensure!(output.status.success(), "mke2fs: {}", String::from_utf8_lossy(&output.stderr));
    fs::remove_dir_all(files)?;
    Ok(image)
}

/// The first byte at which `other` differs from `image`.
fn first_difference(image: &Path, other: &Path) -> anyhow::Result<Option<u64>> {
    let (image, other) = (fs::File::open(image)?, fs::File::open(other)?);
    let (mut ours, mut theirs) = (vec![0; CHUNK], vec![0; CHUNK]);
    let size = image.metadata()?.len();
    let mut at = 0;
    while at < size {
        let len = CHUNK.min(usize::try_from(size - at)?);
        image.read_exact_at(&mut ours[..len], at)?;
        other.read_exact_at(&mut theirs[..len], at)?;
        let differing = ours[..len].iter().zip(&theirs[..len]).position(|(a, b)| a != b);
        if let Some(place) = differing {
            return Ok(Some(at + place as u64));
        }
        at += len as u64;
    }
    Ok(None)
}
