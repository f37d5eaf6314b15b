//! Resources that a benchmark creates on this machine, measures and removes: directories, images,
//! disks, server processes. [`cleanup`] removes all of them in every case.

pub mod cleanup;
pub mod disk;
pub mod full_cache;
pub mod image;
pub mod kept;
pub mod kernel_log;
pub mod needs;
pub mod place;
pub mod san;
pub mod server;
pub mod setup;
pub mod watch;

use std::path::PathBuf;

/// Arguments common to all commands with a server.
#[derive(clap::Args, Clone)]
#[group(skip)]
pub struct Common {
    /// The binary of Forebay [default: the one next to this program]
    #[arg(long, value_name = "PATH")]
    pub forebay: Option<PathBuf>,
    /// Directory for files [default: the system's directory for temporary files]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}
