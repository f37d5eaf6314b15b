//! `forebay clients`: who uses the server over sockets.

use clap::Args;
use forebay_control::text;

use crate::client::Daemon;
use crate::client::status::print;

/// Arguments of `forebay clients`.
#[derive(Args, Debug)]
pub struct ClientsArgs {
    /// Only clients of this volume
    volume: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Shows the clients.
pub fn run(args: &ClientsArgs) -> anyhow::Result<()> {
    let client = args.daemon.client();
    let mut all = client.clients()?;
    if let Some(name) = &args.volume {
        // An unknown name is an error, not an empty list.
        client.volume(name)?;
        all.retain(|one| one.volume.as_ref() == Some(name));
    }
    print(args.json, &all, || text::clients(&all))
}
