//! Read misses: one read of the primary serves all operations that miss the same block; admission
//! follows after the clients have been answered.
//!
//! A fetch that overlaps in time with a write lock on a block is stale for that block. It answers
//! the reads that waited for it, since they overlap with the write themselves. But its bytes never
//! enter RAM or the log, and no read joins it later. The same holds for a block that is on its way
//! to the primary although a discard has removed it from the cache.
//!
//! While the cache has never been full, the neighborhood of a missed block on a slow primary is
//! read with it and put into the log ([`forebay_policy::ReadAround`]), so that the cache warms up
//! sooner.

use forebay_block::{
    BLOCK_SIZE, BlockRange, Completion, ErrorKind, Instant, Io, IoBuf, IoError, VolumeId,
};
use forebay_policy::{ReadAround, Standing};

use crate::api::{Effects, Health, Target, Tier};
use crate::cache::Cache;
use crate::key::Key;
use crate::limits::BLOCKS_AROUND_MAX;
use crate::request::Requests;
use crate::slab::Id;
use crate::store::UNIT_BLOCKS;
use crate::ticket::Ticket;

/// Whether missed blocks enter the cache.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Admit {
    /// They do not.
    Never,
    /// If the policy admits them.
    Weighed,
    /// They do, at once.
    Always,
}

/// A read of a primary.
#[derive(Debug)]
pub struct Fetch {
    volume: VolumeId,
    /// The blocks that are read: the missed ones, and possibly more around them.
    blocks: BlockRange,
    /// For each block, whether the fetch overlapped with a write.
    stale: Vec<bool>,
    /// What the waiting reads want; the largest counts.
    admit: Admit,
    /// Whether a client waits, so that destaging makes way.
    foreground: bool,
    /// Whether missed blocks may be in the part of the log that was not loaded when the fetch
    /// began.
    may_be_cached: bool,
    /// Reads that wait, each with its blocks.
    waiters: Vec<(Id, BlockRange)>,
}

impl Fetch {
    fn is_asked_for(&self, block: u64) -> bool {
        self.waiters.iter().any(|(_, run)| run.contains(block))
    }
}

impl Requests {
    /// Reads missed blocks from the primary for `op`, or joins fetches in flight.
    pub fn fetch(
        &mut self,
        cache: &mut Cache,
        op: Id,
        volume: VolumeId,
        blocks: BlockRange,
        admit: Admit,
        fx: &mut Effects,
    ) {
        self.wait_for(op, Tier::Primary);
        let mut first = blocks.first;
        while first < blocks.end() {
            let joined = self.fetching.get(&Key::new(volume, first)).copied();
            let mut end = first + 1;
            while end < blocks.end() && self.fetching.get(&Key::new(volume, end)).copied() == joined
            {
                end += 1;
            }
            let run = BlockRange { first, count: end - first };
            self.add_part(op);
            match joined {
                Some(fetch) => {
                    let fetch = self.fetches.get_mut(fetch);
                    fetch.waiters.push((op, run));
                    fetch.admit = fetch.admit.max(admit);
                }
                None => self.start_fetch(cache, op, volume, run, admit, fx),
            }
            first = end;
        }
    }

    fn start_fetch(
        &mut self,
        cache: &mut Cache,
        op: Id,
        volume: VolumeId,
        missed: BlockRange,
        admit: Admit,
        fx: &mut Effects,
    ) {
        let foreground = admit != Admit::Always;
        let blocks = match admit {
            Admit::Weighed => self.around(cache, volume, missed),
            Admit::Never | Admit::Always => missed,
        };
        let keys = blocks.iter().map(|block| Key::new(volume, block));
        let changes = |key| cache.locks.is_locked(key) || cache.contents.dirty().is_destaging(key);
        let stale: Vec<bool> = keys.clone().map(changes).collect();
        let fresh: Vec<Key> =
            keys.zip(&stale).filter(|(_, stale)| !**stale).map(|(key, _)| key).collect();
        let waiters = vec![(op, missed)];
        let may_be_cached = Self::may_be_cached(cache, volume, missed);
        let fetch = Fetch { volume, blocks, stale, admit, foreground, may_be_cached, waiters };
        let id = self.fetches.insert(fetch);
        for key in fresh {
            self.fetching.insert(key, id);
        }
        let range = cache.bytes_on_volume(volume, blocks);
        let buf = cache.config.buffers.get((blocks.count as usize) * BLOCK_SIZE);
        let mut buf = buf;
        buf.set_len(range.len as usize);
        if foreground {
            cache.note_foreground();
            let now = cache.now;
            let state = cache.volume_mut(volume);
            state.flow.pacer.begin_foreground();
            state.around.begin(now, blocks.count > missed.count);
        }
        let ticket = Ticket::Fetch(id);
        cache.send(fx, Target::Primary(volume), ticket, |tag| Io::read(tag, range, buf));
    }

    /// The blocks to read for a miss. While the cache has never been full, and if a longer read
    /// costs the primary little, they include the surrounding blocks, up to the first that is
    /// cached or being fetched.
    fn around(&self, cache: &Cache, id: VolumeId, missed: BlockRange) -> BlockRange {
        let volume = cache.volume(id);
        let around = &volume.around;
        let many = self.fetching.len() as u64 + around.chunk() > BLOCKS_AROUND_MAX;
        if !has_room(cache) || !around.pays() || many {
            return missed;
        }
        let blocks = volume.config.size.div_ceil(BLOCK_SIZE as u64);
        around.around(missed, blocks, |block| {
            let key = Key::new(id, block);
            let cached = cache.ram.contains(key) || cache.contents.get(key).is_some();
            !cached && !cache.locks.is_locked(key) && !self.fetching.contains_key(&key)
        })
    }

    /// Marks the block as stale in a fetch in flight: a write is about to change it, and the old
    /// content must not enter the cache.
    pub fn spoil_fetch(&mut self, key: Key) {
        if self.fetching.is_empty() {
            return;
        }
        if let Some(id) = self.fetching.remove(&key) {
            let fetch = self.fetches.get_mut(id);
            fetch.stale[(key.block() - fetch.blocks.first) as usize] = true;
        }
    }

    /// Handles the end of a read of a primary.
    pub fn fetched(
        &mut self,
        cache: &mut Cache,
        id: Id,
        sent: Instant,
        done: Completion,
        fx: &mut Effects,
    ) {
        let fetch = self.fetches.remove(id);
        if fetch.foreground {
            let now = cache.now;
            let state = cache.volume_mut(fetch.volume);
            state.flow.pacer.end_foreground(now, now.since(sent));
            state.around.end(now);
            cache.note_foreground();
        }
        for (block, stale) in fetch.blocks.iter().zip(&fetch.stale) {
            if !stale {
                self.fetching.remove(&Key::new(fetch.volume, block));
            }
        }
        let Completion { result, mut buf, .. } = done;
        if result.is_ok() {
            pad_to_blocks(&mut buf, fetch.blocks.count as usize * BLOCK_SIZE);
        }
        let brought = match &result {
            Ok(()) if fetch.admit == Admit::Always => Self::bring_in(cache, &fetch, &buf, fx),
            _ => Ok(()),
        };
        for &(op, run) in &fetch.waiters {
            if let Err(error) = &result {
                if fetch.may_be_cached {
                    self.parked.push((op, fetch.volume, run));
                } else if run == fetch.blocks {
                    self.part_done(cache, op, Err(error.clone()), fx);
                } else {
                    // The blocks that could not be read may not be among the requested ones.
                    self.fetch(cache, op, fetch.volume, run, Admit::Never, fx);
                    self.part_done(cache, op, Ok(()), fx);
                }
                continue;
            }
            for block in run.iter() {
                let start = (block - fetch.blocks.first) as usize * BLOCK_SIZE;
                self.fill_read(op, block, &buf[start..start + BLOCK_SIZE]);
            }
            if self.is_prefetch(op) {
                self.part_done(cache, op, brought.clone(), fx);
            } else {
                self.note_taken(cache, op, fetch.volume, (Tier::Primary, run.count));
                self.part_done(cache, op, Ok(()), fx);
            }
        }
        if result.is_ok() && fetch.admit == Admit::Weighed {
            Self::take_in(cache, &fetch, &buf, fx);
        }
    }

    /// Puts prefetched blocks into the store or the log. Bounds on what enters hold back the
    /// prefetches after this one, since its blocks have been read.
    ///
    /// # Errors
    /// `NoSpace` if some of them have no room now, or may not enter.
    fn bring_in(
        cache: &mut Cache,
        fetch: &Fetch,
        buf: &IoBuf,
        fx: &mut Effects,
    ) -> Result<(), IoError> {
        let may_enter = !cache.is_at_limit(fetch.volume);
        let (mut blocks, mut entered) = (Vec::new(), 0);
        for (i, block) in fetch.blocks.iter().enumerate() {
            let key = Key::new(fetch.volume, block);
            if !fetch.stale[i] && cache.contents.get(key).is_none() {
                blocks.push((key, &buf[i * BLOCK_SIZE..(i + 1) * BLOCK_SIZE]));
            }
        }
        if may_enter {
            entered = Self::admit(cache, &blocks, fx);
        }
        cache.stats_of(fetch.volume).prefetched_blocks += entered;
        let all = entered == blocks.len() as u64;
        if all { Ok(()) } else { Err(ErrorKind::NoSpace.into()) }
    }

    /// Puts blocks that were read from the primary, in ascending order, into the store or the log.
    /// Returns the number of those that are on their way.
    fn admit(cache: &mut Cache, blocks: &[(Key, &[u8])], fx: &mut Effects) -> u64 {
        let (mut rest, mut entered) = (blocks, 0);
        while let Some(&(first, _)) = rest.first() {
            let near = rest.iter().take_while(|(key, _)| key.0 - first.0 < UNIT_BLOCKS).count();
            let group;
            (group, rest) = rest.split_at(near);
            entered += cache.admit_group(group, fx);
        }
        entered
    }

    /// Whether missed blocks may turn out to be cached when all of the log is loaded.
    fn may_be_cached(cache: &Cache, volume: VolumeId, blocks: BlockRange) -> bool {
        let waits = cache.contents.is_loading() && cache.is_serving();
        let mut keys = blocks.iter().map(|block| Key::new(volume, block));
        waits && cache.health() == Health::Good && keys.any(|key| !cache.contents.is_settled(key))
    }

    /// Reads blocks again that were missed while the log was being loaded, and that could not be
    /// read from the primary.
    pub fn pump_parked(&mut self, cache: &mut Cache, fx: &mut Effects) {
        let is_over = |&mut (_, volume, blocks): &mut (Id, VolumeId, BlockRange)| {
            !Self::may_be_cached(cache, volume, blocks)
        };
        for (op, volume, blocks) in self.parked.extract_if(.., is_over).collect::<Vec<_>>() {
            match self.is_prefetch(op) {
                true => self.fetch_uncached(cache, op, volume, blocks, fx),
                false => _ = self.read_blocks(cache, op, volume, blocks, fx),
            }
            self.part_done(cache, op, Ok(()), fx);
        }
    }

    /// Puts the requested blocks into RAM, and all blocks into the store or the log unless
    /// admission waits for RAM to evict them. Skips blocks that a write has changed since.
    fn take_in(cache: &mut Cache, fetch: &Fetch, buf: &IoBuf, fx: &mut Effects) {
        let first = Key::new(fetch.volume, fetch.blocks.first).0;
        let waits = cache.policy.chooses() && cache.ram.frames() > 0;
        let refusal = match waits {
            true => None,
            false => cache.may_enter(first..first + fetch.blocks.count).err(),
        };
        let enters = !waits && refusal.is_none();
        let standing = if enters { Standing::Doubled } else { Standing::Alone };
        let mut entering = Vec::new();
        for (i, block) in fetch.blocks.iter().enumerate() {
            let key = Key::new(fetch.volume, block);
            if fetch.stale[i] {
                cache.stats_of(fetch.volume).stale_fills += 1;
                continue;
            }
            let bytes = &buf[i * BLOCK_SIZE..(i + 1) * BLOCK_SIZE];
            if cache.contents.get(key).is_some() {
                continue;
            }
            if fetch.is_asked_for(block) {
                cache.make_way(key, fx);
                cache.ram.put(key, bytes, standing);
            } else {
                cache.stats_of(fetch.volume).read_around_blocks += 1;
            }
            if waits {
                cache.ram.alone().note();
            } else if let Some(why) = refusal {
                cache.note_unadmitted(fetch.volume, why, 1);
            } else {
                entering.push((key, bytes));
            }
        }
        // Some may have lost their place in RAM to the others.
        entering.retain(|(key, _)| cache.is_alone(key.0));
        Self::admit(cache, &entering, fx);
    }
}

/// Whether the cache has room for blocks that nobody has requested.
fn has_room(cache: &Cache) -> bool {
    let (store, log, index) = (&cache.store, &cache.log, cache.contents.index());
    // A log before a store is full from its first lap on.
    let area_has_room = match store.exists() {
        true => {
            let pages = u64::from(store.pages());
            store.has_plenty() && ReadAround::has_room(pages, store.free_pages())
        }
        false => ReadAround::has_room(log.len(), log.free()),
    };
    let places = index.capacity();
    !cache.contents.is_loading()
        && area_has_room
        && ReadAround::has_room(places, places.saturating_sub(index.len()))
}

/// Pads the last block of a volume, which may be short on the primary, with zeros.
fn pad_to_blocks(buf: &mut IoBuf, len: usize) {
    let have = buf.len();
    if have < len {
        buf.set_len(len);
        buf[have..].fill(0);
    }
}

#[cfg(test)]
mod tests;
