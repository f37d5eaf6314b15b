//! The superblocks of a cache device, read once by a start, and written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use anyhow::{Context, bail};
use forebay_block::{ByteRange, ErrorKind, IoBuf, IoResult};
use forebay_device::BlockDevice;
use forebay_format::{ANNOUNCEMENT_OFFSET, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use forebay_runtime::Blocking;
use forebay_volume::pool::Opened;

/// The content of a cache device's superblock area.
pub struct Superblocks {
    /// The bytes of both copies.
    pub copies: [IoBuf; 2],
    /// The bytes of the announcement.
    pub announcement: IoBuf,
    /// The valid superblocks among the copies.
    pub known: Vec<Superblock>,
}

impl Superblocks {
    /// Reads the area of a device of which `size` bytes may be used.
    ///
    /// # Errors
    /// If the device is too small for it, or cannot be read.
    pub fn read(queue: &mut Blocking, size: u64) -> anyhow::Result<Self> {
        let [first, second] = SUPERBLOCK_OFFSETS;
        if size < second + SUPERBLOCK_BYTES as u64 {
            bail!("the cache device has {size} bytes; it is far too small");
        }
        let mut read = |at| queue.read(ByteRange::new(at, SUPERBLOCK_BYTES as u64));
        let copies = [read(first).context("cache")?, read(second).context("cache")?];
        let announcement = read(ANNOUNCEMENT_OFFSET).context("cache")?;
        let known = copies.iter().filter_map(|copy| Superblock::decode(copy).ok()).collect();
        Ok(Self { copies, announcement, known })
    }

    /// The newest superblock, if there is one.
    pub fn newest(&self) -> Option<&Superblock> {
        self.known.iter().max_by_key(|superblock| superblock.generation)
    }
}

/// The superblock of a device in use.
pub struct InUse {
    device: Arc<dyn BlockDevice>,
    last: Superblock,
    /// Index of the copy to write next.
    next_copy: usize,
}

impl InUse {
    /// Of a device whose copies were written for a start.
    pub fn new(device: Arc<dyn BlockDevice>, opened: &Opened) -> Self {
        let last_written = if opened.fresh { 1 - opened.copy } else { opened.copy };
        Self { device, last: opened.superblock.clone(), next_copy: 1 - last_written }
    }

    /// The last one that was written.
    pub fn last(&self) -> &Superblock {
        &self.last
    }

    /// Replaces it by one of a newer generation; durable when this returns.
    ///
    /// # Errors
    /// If the device cannot be written: the next start may then find the old or the new one.
    pub fn replace(&mut self, superblock: Superblock) -> anyhow::Result<()> {
        assert!(superblock.generation > self.last.generation, "the newer one counts");
        let mut queue = Blocking::open(&*self.device).context("cache")?;
        write(&mut queue, &superblock, self.next_copy).context("cache")?;
        (self.last, self.next_copy) = (superblock, 1 - self.next_copy);
        Ok(())
    }

    /// Replaces it by the same with the next generation, which is returned: files that name the
    /// one before are void.
    ///
    /// # Errors
    /// As [`InUse::replace`].
    pub fn renew(&mut self) -> anyhow::Result<u64> {
        let generation = self.last.generation + 1;
        self.replace(Superblock { generation, ..self.last.clone() })?;
        Ok(generation)
    }
}

/// The bytes of both copies, of a file or device that another process may be using.
///
/// # Errors
/// If it is too small, or cannot be read.
pub fn copies_in(file: &File) -> io::Result<[Vec<u8>; 2]> {
    let mut copies = [(); 2].map(|()| vec![0; SUPERBLOCK_BYTES]);
    for (bytes, offset) in copies.iter_mut().zip(SUPERBLOCK_OFFSETS) {
        file.read_exact_at(bytes, offset)?;
    }
    Ok(copies)
}

/// Writes the superblocks of a start, each write durable before the next.
///
/// # Errors
/// If the device cannot be written, or does not answer.
pub fn write_all(queue: &mut Blocking, opened: &Opened) -> anyhow::Result<()> {
    let failed = "the cache device cannot be written; nothing was changed on the primaries";
    for (at, bytes) in opened.writes() {
        queue.write(at, bytes).and_then(|()| queue.flush()).context(failed)?;
    }
    Ok(())
}

/// Discards a new cache, whose superblocks are durable. Returns whether the device discards: one
/// that fails to is not asked again.
///
/// # Errors
/// If the device does not answer.
pub fn discard(queue: &mut Blocking, opened: &Opened) -> anyhow::Result<bool> {
    let Some(range) = opened.discard() else { return Ok(true) };
    match queue.discard(range) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::Timeout => {
            // It may still be in progress, and would destroy what is written now.
            Err(error).context("the cache device does not end a discard; use --no-discard")
        }
        Err(error) => {
            tracing::info!("the cache device takes no discards: {error}");
            Ok(false)
        }
    }
}

/// Writes one copy, durable when this returns.
///
/// # Errors
/// If the device cannot be written.
fn write(queue: &mut Blocking, superblock: &Superblock, copy: usize) -> IoResult<()> {
    let mut bytes = IoBuf::zeroed(SUPERBLOCK_BYTES);
    superblock.encode(&mut bytes);
    queue.write(SUPERBLOCK_OFFSETS[copy], bytes)?;
    queue.flush()
}
