//! `forebay setup`: a few questions, or flags; then the configuration, the units, and the first
//! start. `answers.rs` finds out what is wanted, `plan.rs` decides what to write, and this file
//! writes it. Nothing on a device is changed, unless a flag or an answer names the device.

mod answers;
mod ask;
mod plan;

use std::fs::{self, File};
use std::io::{ErrorKind, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use clap::Args;
use forebay_control::config::{Config, ConfigError, check_name};
use forebay_control::units::{Size, Time};
use rustix::fs::OFlags;

use crate::client::Daemon;
use crate::host::Host;
use crate::output;
use crate::server::cache::foreign;

use ask::Questions;
use plan::Plan;

/// The configuration of the service.
pub const CONFIG: &str = "/etc/forebay/forebay.toml";

/// Arguments of `forebay setup`.
#[derive(Args, Debug)]
pub struct SetupArgs {
    /// The slow volume: a device, a file, or the URI of an NBD server
    #[arg(long, value_name = "URI")]
    primary: Option<String>,
    /// What clients and commands call the volume [default: the last part of the primary's name]
    #[arg(long, value_parser = volume_name)]
    name: Option<String>,
    /// The cache: an SSD, a partition of one, or a file on one
    #[arg(long, value_name = "PATH[,size=SIZE]")]
    cache: Option<String>,
    /// Memory for recent blocks [default: an eighth of the machine's]
    #[arg(long, value_name = "SIZE")]
    ram: Option<Size>,
    /// The longest that a write waits in the cache before it goes to the primary; 0s for not at all
    /// (write-through) [default: 30s]
    #[arg(long, value_name = "TIME")]
    write_cache_depth: Option<Time>,
    /// Make the volume a disk, and mount its file system here, also after each boot
    #[arg(long, value_name = "DIR")]
    mount: Option<PathBuf>,
    /// Ask nothing: flags that are missing have their defaults
    #[arg(long)]
    yes: bool,
    /// Overwrite what is on this device, which must be the cache
    #[arg(long, value_name = "DEVICE")]
    overwrite: Option<PathBuf>,
    /// Replace the configuration that exists; a copy of it is kept
    #[arg(long)]
    replace: bool,
    /// Only write the files, and print the commands that start the server
    #[arg(long)]
    no_start: bool,
    /// The configuration to write
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// Where the settings of units go
    #[arg(long, value_name = "DIR", default_value = "/etc/systemd/system", hide = true)]
    units: PathBuf,
}

/// Takes the name of a volume, so that a wrong one is wrong usage, and nothing is asked first.
fn volume_name(text: &str) -> Result<String, ConfigError> {
    check_name(text).map(|()| text.to_owned())
}

/// Asks, writes, starts, and shows the first status.
pub fn run(args: &SetupArgs) -> anyhow::Result<()> {
    let host = Host::default();
    if !rustix::process::geteuid().is_root() {
        bail!("setup writes to {} and starts a service; run it as root", args.config.display());
    }
    if !args.no_start && Daemon::default().client().status().is_ok() {
        let config = args.config.display();
        bail!(
            "a server runs, and setup would interrupt it; to change it: edit {config}, then \
             systemctl reload forebay; to begin again: forebay stop --drain"
        );
    }
    let mut questions = Questions::on_terminal(!args.yes);
    let answers = answers::find(args, &host, &mut questions)?;
    let plan = Plan::new(&answers, &host)?;
    // What `serve` would refuse is refused before anything is written.
    Config::parse(&args.config, &plan.configuration)?;
    let replaces = args.config.exists();
    if replaces && !args.replace && !questions.agrees("a configuration exists; replace it")? {
        let shown = args.config.display();
        bail!("{shown} exists; nothing was changed; --replace replaces it and keeps a copy");
    }
    output::print(&plan.summary(&answers, args))?;
    if !questions.confirms("write this and start the server")? {
        bail!("nothing was changed");
    }
    if answers.overwrite {
        blank(&answers.cache)?;
    }
    write(args, &plan)?;
    if args.no_start || !host.has_systemd() {
        output::line("start it with:")?;
        return Ok(output::print(&plan.commands(&args.config, host.has_systemd()))?);
    }
    start(&plan)?;
    let status = Daemon::default().client().status()?;
    output::print(&forebay_control::text::pool(&status))?;
    Ok(output::print(&plan.next_steps(&answers))?)
}

/// Overwrites both ends of the cache device, by which a file system or partition table is known.
/// The kernel opens no device that is in use, not even by one of its partitions.
fn blank(path: &Path) -> anyhow::Result<()> {
    let shown = || format!("{}", path.display());
    let alone = OFlags::EXCL.bits() as i32;
    let opened = File::options().read(true).write(true).custom_flags(alone).open(path);
    let file = match opened {
        Err(error) if error.kind() == ErrorKind::ResourceBusy => bail!(
            "{}: it or a partition of it is in use, perhaps mounted in a container; nothing was \
             overwritten",
            path.display()
        ),
        opened => opened.with_context(shown)?,
    };
    let size = (&file).seek(SeekFrom::End(0)).with_context(shown)?;
    let zeros = vec![0; usize::try_from(foreign::EXAMINED.min(size)).unwrap_or(0)];
    file.write_all_at(&zeros, 0).with_context(shown)?;
    file.write_all_at(&zeros, size - zeros.len() as u64).with_context(shown)?;
    file.sync_all().with_context(shown)?;
    Ok(output::line(&format!("overwritten: both ends of {}", path.display()))?)
}

/// Writes the configuration, with a copy of the one before, and the settings of the units.
fn write(args: &SetupArgs, plan: &Plan) -> anyhow::Result<()> {
    if args.config.exists() {
        let copy = free_name(&args.config);
        fs::copy(&args.config, &copy).with_context(|| copy.display().to_string())?;
        output::line(&format!("kept: {}", copy.display()))?;
    }
    replace(&args.config, &plan.configuration)?;
    for (path, text) in plan.unit_files(args) {
        replace(&path, text)?;
    }
    if let Some(place) = plan.mount.as_deref() {
        fs::create_dir_all(place).with_context(|| place.display().to_string())?;
    }
    if let Some(place) = &plan.fuse {
        fs::create_dir_all(place).with_context(|| place.display().to_string())?;
    }
    Ok(())
}

/// A name for a copy that no file has.
fn free_name(path: &Path) -> PathBuf {
    let numbered = (1..).map(|number| PathBuf::from(format!("{}.before-{number}", path.display())));
    numbered.into_iter().find(|name| !name.exists()).expect("numbers do not end")
}

/// Replaces a file by one step, with its directory.
fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let shown = || path.display().to_string();
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(directory).with_context(shown)?;
    let beside = path.with_extension("new");
    let mut file = File::create(&beside).with_context(shown)?;
    file.set_permissions(fs::Permissions::from_mode(0o644)).with_context(shown)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(shown)?;
    fs::rename(&beside, path).with_context(shown)?;
    Ok(output::line(&format!("written: {}", path.display()))?)
}

/// Starts the units, and lets them start at each boot.
fn start(plan: &Plan) -> anyhow::Result<()> {
    systemctl(&["daemon-reload"])?;
    systemctl(&["enable", "--quiet", "forebay.service"])?;
    let see = "the server does not start; its last lines are in: journalctl -u forebay -n 20";
    systemctl(&["restart", "forebay.service"]).context(see)?;
    let Some(unit) = &plan.attach else { return Ok(()) };
    systemctl(&["enable", "--quiet", unit])?;
    let see = format!("the disk cannot be made; the reason is in: journalctl -u {unit} -n 20");
    systemctl(&["restart", unit]).context(see)
}

fn systemctl(words: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("systemctl").args(words).output().context("systemctl")?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    bail!("systemctl {}: {}", words.join(" "), said.lines().next().unwrap_or("failed").trim())
}
