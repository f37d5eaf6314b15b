//! The samples on record. A record that is out of date would make the next start take the server's
//! own changes for foreign ones, so one that cannot be replaced is made void before a change.
//!
//! | the file | the record |
//! |---|---|
//! | can be replaced | on record |
//! | can only be removed | there is none |
//! | can be neither, and the cache device can be written | void: the superblock gets a generation that is newer than the file's |
//! | nothing of this | out of date: the next start may refuse the primary |

use std::io::{self, ErrorKind};
use std::sync::Arc;

use forebay_runtime::StateDir;

use crate::server::primaries::samples::Table;
use crate::server::state_health::StateHealth;

/// Writes a superblock of a newer generation, durably, and returns that generation.
pub type NewGeneration = Box<dyn FnMut() -> anyhow::Result<u64> + Send>;

/// Where the samples are stored.
pub struct Store {
    state: StateDir,
    health: Arc<StateHealth>,
    new_generation: NewGeneration,
    /// Whether the file may hold samples that the next start believes.
    on_record: bool,
}

impl Store {
    /// The file in `state`, which is `on_record`, or void.
    pub fn new(
        state: StateDir,
        health: Arc<StateHealth>,
        new_generation: NewGeneration,
        on_record: bool,
    ) -> Self {
        Self { state, health, new_generation, on_record }
    }

    /// Whether there is a record, which must be replaced before anything in it is changed.
    pub fn is_on_record(&self) -> bool {
        self.on_record
    }

    /// Makes the table durable; returns whether it is. If not, nothing is on record, as far as that
    /// can be had: changes do not wait for a state directory that fails.
    pub fn put(&mut self, table: &mut Table) -> bool {
        let stored = table.store(&self.state);
        self.health.note(&stored);
        self.on_record = match &stored {
            Ok(()) => true,
            Err(error) => !self.is_void_after(error, table),
        };
        stored.is_ok()
    }

    /// Makes void what is on record, after it could not be replaced.
    fn is_void_after(&mut self, error: &io::Error, table: &mut Table) -> bool {
        if table.remove(&self.state).is_ok() {
            return true;
        }
        // Nothing was written to a directory that is read-only, so what was void is.
        if !self.on_record && error.kind() == ErrorKind::ReadOnlyFilesystem {
            return true;
        }
        match (self.new_generation)() {
            Ok(generation) => {
                table.generation = generation;
                tracing::warn!("the samples of the primaries are not kept for now");
                true
            }
            Err(why) => {
                tracing::error!(
                    %error,
                    "the samples of the primaries are out of date, and so they stay ({why:#}); \
                     repair the state directory before the next start, or use --accept-primary then"
                );
                false
            }
        }
    }
}
