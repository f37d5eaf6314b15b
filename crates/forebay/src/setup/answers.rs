//! What is wanted: from flags, or from answers to questions. Everything is checked here: a primary
//! that is in use, and a cache device that holds anything, are refused.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use forebay_control::units::{Size, Time};

use crate::WrongUsage;
use crate::host::Host;
use crate::host::devices::Device;
use crate::host::overlap::Span;
use crate::server::cache::foreign;
use crate::server::flags;

use super::SetupArgs;
use super::ask::Questions;

/// RAM: this part of the machine's memory, and not less than this.
const RAM_SHARE: u64 = 8;
const RAM_LEAST: u64 = 256 << 20;
/// Sizes of RAM are multiples of this.
const RAM_STEP: u64 = 64 << 20;
/// The usual depth of the write cache.
const DEPTH: Duration = Duration::from_secs(30);

/// What is wanted.
pub struct Answers {
    pub primary: String,
    /// The file or device of the primary, unless it is on a network.
    pub primary_path: Option<PathBuf>,
    /// What is on it, as far as it is known.
    pub content: Option<&'static str>,
    pub name: String,
    pub cache: PathBuf,
    pub cache_size: Option<Size>,
    /// The cache device holds something that was given up by name.
    pub overwrite: bool,
    pub ram: Size,
    /// `None` is write-through.
    pub depth: Option<Time>,
    pub mount: Option<PathBuf>,
}

/// Finds all answers.
pub fn find(args: &SetupArgs, host: &Host, ask: &mut Questions) -> anyhow::Result<Answers> {
    let missing = match (&args.primary, &args.cache) {
        _ if ask.has_someone() => "",
        (None, None) => "--primary and --cache",
        (None, _) => "--primary",
        (_, None) => "--cache",
        _ => "",
    };
    if !missing.is_empty() {
        let what = format!("nobody can be asked here; give {missing} (forebay setup --help)");
        return Err(WrongUsage(what).into());
    }
    if ask.has_someone() && (args.primary.is_none() || args.cache.is_none()) {
        eprintln!("disks of this host:");
        Device::all(host).iter().for_each(|device| eprintln!("  {}", device.described()));
    }
    let (primary, primary_path, content) = primary(args, host, ask)?;
    let (cache, cache_size, overwrite) = cache(args, host, ask)?;
    if primary_path.as_deref().is_some_and(|path| has_bytes_of(path, &cache)) {
        bail!("{} cannot be both the slow volume and its cache", cache.display());
    }
    let name = name(args, &primary, ask)?;
    let most = host.memory().unwrap_or(RAM_LEAST * RAM_SHARE);
    let usual = Size((most / RAM_SHARE / RAM_STEP * RAM_STEP).max(RAM_LEAST));
    let ram = value(args.ram, ask, "memory for recent blocks", usual)?;
    if ram.0 >= most {
        bail!("{ram} of memory are more than this machine has ({})", Size(most));
    }
    let question = "how long may a write wait in the cache (0s: not at all)";
    let Time(depth) = value(args.write_cache_depth, ask, question, Time(DEPTH))?;
    let mount = mount(args, primary_path.is_some(), content, ask)?;
    let depth = (!depth.is_zero()).then_some(Time(depth));
    Ok(Answers {
        primary,
        primary_path,
        content,
        name,
        cache,
        cache_size,
        overwrite,
        ram,
        depth,
        mount,
    })
}

/// The value of a flag, or of an answer, or the default.
fn value<T: Copy + std::fmt::Display + std::str::FromStr>(
    given: Option<T>,
    ask: &mut Questions,
    question: &str,
    usual: T,
) -> anyhow::Result<T>
where
    T::Err: std::fmt::Display,
{
    if let Some(given) = given {
        return Ok(given);
    }
    loop {
        let Some(answer) = ask.ask(question, &usual.to_string())? else { return Ok(usual) };
        match answer.parse() {
            Ok(value) => return Ok(value),
            Err(error) => eprintln!("{error}"),
        }
    }
}

type Primary = (String, Option<PathBuf>, Option<&'static str>);

/// The primary, if it can be used: it is there, and nobody else uses it.
fn primary(args: &SetupArgs, host: &Host, ask: &mut Questions) -> anyhow::Result<Primary> {
    let given = match &args.primary {
        Some(given) => given.clone(),
        None => ask.ask("the slow volume", "")?.unwrap_or_default(),
    };
    let Some(path) = local(&given) else { return Ok((given, None, None)) };
    let shown = path.display();
    let device = Device::at(host, &path).with_context(|| format!("primary {shown}"))?;
    let content = foreign::at(&path).with_context(|| format!("primary {shown}"))?;
    if content == Some(foreign::CACHE) {
        bail!("primary {shown}: it is a cache of Forebay; name the slow volume");
    }
    let Some(device) = device else {
        let whole = path.canonicalize().with_context(|| format!("primary {shown}"))?;
        return Ok((whole.display().to_string(), Some(whole), content));
    };
    unused(host, &device).with_context(|| format!("primary {shown}"))?;
    let stable = device.stable_name(host).unwrap_or_else(|| path.clone());
    Ok((stable.display().to_string(), Some(path), content))
}

/// The path of a primary on this host.
fn local(primary: &str) -> Option<PathBuf> {
    let remote = primary.starts_with("nbd") && primary.contains("://");
    (!remote).then(|| PathBuf::from(primary.strip_prefix("file:").unwrap_or(primary)))
}

/// Fails if the device or a partition of it is in use.
fn unused(host: &Host, device: &Device) -> anyhow::Result<()> {
    if let Some(place) = device.mounted(host).first() {
        let place = place.display();
        bail!("it is mounted at {place}; stop its users, then: umount {place}");
    }
    if let Some(holder) = device.holders().first() {
        bail!("it is part of {holder}; name that device, or remove it first");
    }
    if let Some(swap) = device.swaps(host).first() {
        bail!("it is used as swap; first: swapoff {swap}");
    }
    Ok(())
}

/// The cache device, if it is free.
fn cache(
    args: &SetupArgs,
    host: &Host,
    ask: &mut Questions,
) -> anyhow::Result<(PathBuf, Option<Size>, bool)> {
    let given = match &args.cache {
        Some(given) => given.clone(),
        None => ask.ask("the SSD for the cache", "")?.unwrap_or_default(),
    };
    let (path, size) =
        flags::cache(&given).map_err(|error| WrongUsage(format!("--cache: {error}")))?;
    let shown = path.display().to_string();
    if !path.exists() {
        let whole = std::path::absolute(&path)?;
        if size.is_none() || whole.starts_with("/dev") {
            let hint = format!("a new file needs a size: {shown},size=10GiB");
            bail!("cache {shown}: there is no such device; {hint}");
        }
        return Ok((whole, size, false));
    }
    let context = || format!("cache {shown}");
    let content = foreign::at(&path).with_context(context)?;
    let device = Device::at(host, &path).with_context(context)?;
    if let Some(device) = &device {
        unused(host, device).with_context(context)?;
    }
    // A cache of Forebay is left to the server: it knows whose it is.
    let foreign = content.filter(|content| *content != foreign::CACHE);
    let overwrite = match foreign {
        Some(content) => given_up(args, &path, content, ask)?,
        None => false,
    };
    let stable = device.and_then(|device| device.stable_name(host));
    Ok((stable.map_or_else(|| path.canonicalize(), Ok)?, size, overwrite))
}

/// Whether the content of the cache device was given up, by its name.
fn given_up(
    args: &SetupArgs,
    path: &Path,
    content: &str,
    ask: &mut Questions,
) -> anyhow::Result<bool> {
    if args.overwrite.as_deref().is_some_and(|named| is_same(named, path)) {
        return Ok(true);
    }
    let shown = path.display().to_string();
    eprintln!("{shown} holds {content}, which would be lost");
    let question = format!("type {shown} to overwrite it, or anything else to stop");
    if ask.ask(&question, "")?.as_deref() == Some(shown.as_str()) {
        return Ok(true);
    }
    bail!("cache {shown}: it holds {content}; to lose that, add --overwrite {shown}")
}

/// Whether two devices have bytes in common.
fn has_bytes_of(one: &Path, other: &Path) -> bool {
    Span::of(one).zip(Span::of(other)).is_some_and(|(one, other)| one.overlaps(&other))
}

fn is_same(one: &Path, other: &Path) -> bool {
    one == other || one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|o| o == one))
}

fn name(args: &SetupArgs, primary: &str, ask: &mut Questions) -> anyhow::Result<String> {
    if let Some(name) = &args.name {
        return Ok(name.clone());
    }
    let usual = flags::name_of(args.primary.as_deref().unwrap_or(primary));
    Ok(ask.ask("what to call the volume", &usual)?.unwrap_or(usual))
}

/// Where to mount the file system that is on the primary. One on a network is not looked into.
fn mount(
    args: &SetupArgs,
    is_local: bool,
    content: Option<&str>,
    ask: &mut Questions,
) -> anyhow::Result<Option<PathBuf>> {
    let has_files = content.is_some_and(|content| content.contains("file system"));
    let place = match &args.mount {
        Some(place) => place.clone(),
        None if has_files => match ask.ask("where to mount it (empty: nowhere)", "")? {
            Some(answer) if !answer.is_empty() => PathBuf::from(answer),
            _ => return Ok(None),
        },
        None => return Ok(None),
    };
    let shown = place.display();
    if is_local && !has_files {
        let holds = content.unwrap_or("nothing");
        bail!(
            "--mount {shown}: the primary holds {holds}, not a file system; leave it out, then: \
             forebay attach, mkfs, forebay attach --mount"
        );
    }
    if !place.is_absolute() {
        bail!("--mount {shown}: name it from the root");
    }
    if place.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
        bail!("--mount {shown}: the directory is not empty");
    }
    Ok(Some(place))
}
