//! Messages between rooms. A room whose work leads to work of a higher room leaves a note, which
//! the engine delivers when the room's call has returned. So no room calls one above it, and no
//! room is entered while it is in the middle of something.

use forebay_block::{IoResult, VolumeId};
use forebay_format::Lsn;

use crate::form::Associate;
use crate::key::Key;
use crate::slab::Id;

/// A message for a higher room.
#[derive(Debug)]
pub(crate) enum Note {
    /// The record with the last part of this write has been placed.
    Placed(Id, Lsn),
    /// A block that is stored against another one has been put together.
    Made(Box<Associate>),
    /// A dirty block is on its primary, or could not be written there: for a write that waits.
    OnPrimary(Id, IoResult<()>),
    /// A part of a flush has ended.
    FlushPart(Id, IoResult<()>),
    /// A write waits for a dirty block to be on its primary.
    WaitPrimary(Key, Id),
    /// A write waits until its stripe, the one of this block, is detached.
    WaitDetached(Key, Id),
    /// A flush waits for the stripes of its volume that are being detached.
    FlushDetached(VolumeId, Id),
    /// The primary has flushed a write over blocks that were kept.
    Restore(Id),
    /// The cache device cannot be written any more.
    CacheFailed,
}
