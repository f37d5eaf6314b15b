//! Consistency check: recomputes the counts and compares them.

use forebay_format::EntryKind;

use crate::contents::{Base, Contents, Segment};
use crate::key::Key;

impl Contents {
    /// Compares the counts with the index and the bases, and the dirty set with both.
    ///
    /// # Errors
    /// Describes the first inconsistency.
    pub fn check(&self) -> Result<(), String> {
        let empty = |segment: &Segment| Segment { live: 0, dirty: 0, ..*segment };
        let mut segments: Vec<Segment> = self.segments.iter().map(empty).collect();
        let mut dirty_of = vec![0; self.dirty_of.len()];
        let mut held = vec![0; self.held.len()];
        let (mut bytes, mut stored, mut dirty) = (0, [0; EntryKind::NUMBERS], 0);
        let own = |base: &&Base| !base.of_another;
        let places = self.index.iter().map(|(_, place)| place);
        for place in places.chain(self.bases.values().filter(own).map(|base| base.place)) {
            stored[place.kind as usize] += 1;
            bytes += u64::from(place.len);
        }
        let bases = self.bases.iter().map(|(&key, base)| (key, base.place));
        for (key, place) in self.index.iter().chain(bases) {
            let index = place.segment as usize;
            let segment = &mut segments[index];
            segment.live += 1;
            segment.dirty += u32::from(place.dirty);
            if self.volumes > 1 {
                let volume = usize::from(key.volume().0);
                dirty_of[index * self.volumes + volume] += u32::from(place.dirty);
            }
        }
        if let Some(at) = (0..segments.len()).find(|&at| segments[at] != self.segments[at]) {
            return Err(format!("segment {at} is {:?}, not {:?}", segments[at], self.segments[at]));
        }
        if (bytes, stored) != (self.payload_bytes, self.stored) {
            let (ours, kinds) = (self.payload_bytes, self.stored);
            return Err(format!("{bytes} bytes are stored as {stored:?}, not {ours} as {kinds:?}"));
        }
        for (key, place) in self.index.iter() {
            dirty += u64::from(place.dirty);
            held[usize::from(key.volume().0)] += 1;
            if place.dirty != self.dirty.contains(key) {
                return Err(format!("{key:?} is dirty in the index or in the set, not in both"));
            }
            let base = self.bases.get(&key);
            if base.is_some() != place.kind.is_associate() {
                return Err(format!("{key:?} is stored as {:?}, its base is {base:?}", place.kind));
            }
            if base.is_some_and(|base| base.place.dirty != place.dirty) {
                return Err(format!("the base of {key:?} is not as dirty as the block"));
            }
        }
        if dirty != self.dirty.blocks() {
            return Err(format!("{dirty} blocks are dirty, not {}", self.dirty.blocks()));
        }
        if held != self.held {
            return Err(format!("the volumes hold {held:?} blocks, not {:?}", self.held));
        }
        self.dirty.check()?;
        if let Some(key) = self.fenced.iter().find(|key| !self.dirty.contains(**key)) {
            return Err(format!("{key:?} is fenced and not dirty"));
        }
        if dirty_of != self.dirty_of {
            return Err("the dirty blocks of a volume in a segment are others".to_owned());
        }
        if let Some(error) = self.page_without_use() {
            return Err(error);
        }
        let stored = |key: &Key| self.get(*key).is_some_and(|place| self.pages.has(&place));
        if let Some(key) =
            self.unnamed.keys().find(|key| !stored(key) || self.dirty.contains(**key))
        {
            return Err(format!("{key:?} is not named, and no clean block of the store"));
        }
        if !self.sharers_add_up() {
            return Err(format!("{} sharers are not all there are", self.sharers()));
        }
        Ok(())
    }

    /// Describes a page of the store with fewer uses than payloads.
    fn page_without_use(&self) -> Option<String> {
        let mut needed = vec![0u32; self.pages.len() as usize];
        let bases = self.bases.values().filter(|base| !base.of_another).map(|base| base.place);
        for place in self.index.iter().map(|(_, place)| place).chain(bases) {
            if self.pages.has(&place) {
                self.pages.of(&place).for_each(|page| needed[page as usize] += 1);
            }
        }
        let short =
            (0..self.pages.len()).find(|&page| self.pages.uses(page) < needed[page as usize])?;
        let uses = self.pages.uses(short);
        Some(format!("page {short} has {uses} uses, not {}", needed[short as usize]))
    }
}
