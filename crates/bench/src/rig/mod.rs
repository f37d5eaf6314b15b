//! The things that a benchmark sets up on this machine, measures and takes away again: directories,
//! images, disks, servers as processes. [`cleanup`] undoes all of it, whatever happens.

pub mod cleanup;
pub mod disk;
pub mod image;
pub mod needs;
pub mod place;
pub mod san;
pub mod server;
pub mod setup;
pub mod watch;

use std::path::PathBuf;

/// What every command with a server is asked.
#[derive(clap::Args, Clone)]
#[group(skip)]
pub struct Common {
    /// The binary of Forebay [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    pub forebay: Option<PathBuf>,
    /// Where files are made [default: the system's directory for temporary files]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}
