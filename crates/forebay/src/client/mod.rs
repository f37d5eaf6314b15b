//! The commands that query and control a running server through its control socket.

pub mod apply;
pub mod clients;
pub mod config;
pub mod drain;
pub mod events;
pub mod pin;
mod place;
pub mod prefetch;
pub mod retire;
pub mod rules;
pub mod set;
pub mod status;
pub mod stop;
pub mod top;
pub mod upgrade;

use std::path::PathBuf;

use clap::Args;
use forebay_control::{Client, default_socket};

/// The server that a command talks to.
#[derive(Args, Debug, Clone, Default)]
pub struct Daemon {
    /// The server's control socket [default: $FOREBAY_CONTROL, or /run/forebay/forebay.sock; if
    /// not root, $XDG_RUNTIME_DIR/forebay.sock]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl Daemon {
    /// A client of its control socket.
    pub fn client(&self) -> Client {
        Client::new(self.control.clone().unwrap_or_else(default_socket))
    }
}
