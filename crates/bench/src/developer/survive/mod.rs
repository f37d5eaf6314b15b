//! Real programs use a server that is killed and upgraded: nobody may notice more than a pause. The
//! server has its keeper, as by default; SIGKILL goes to the server, never to the keeper.
//!
//! | file | holds |
//! |---|---|
//! | `events.rs` | kills and upgrades at random times |
//! | `probe.rs` | a client that checks every answer, and shows when none came |
//! | `pauses.rs` | the figures: pauses, and how soon the rate is back |
//! | `mariadb.rs`, `fsx.rs`, `nbd.rs` | the parts with clients |
//! | `reconfigure.rs` | MariaDB while volumes, sizes and the cache device change |
//! | `parts.rs` | what a pause consists of |

mod events;
pub mod fsx;
pub mod mariadb;
mod nbd;
mod parts;
mod pauses;
mod probe;
mod reconfigure;

use clap::Subcommand;

/// The parts.
#[derive(Subcommand)]
pub enum Part {
    /// MariaDB under TPC-C on an attached disk, over kills and upgrades
    Mariadb(mariadb::Args),
    /// fsx on XFS and ext4 on attached disks, over kills and upgrades
    Fsx(fsx::Args),
    /// fio with verification over NBD: upgrades, and kills with a client that connects again
    Nbd(nbd::Args),
    /// MariaDB under TPC-C on an attached disk, while volumes, sizes and the cache device change
    Reconfigure(reconfigure::Args),
    /// The parts of a pause after a kill, with a full cache
    Pause(parts::Args),
}

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    part: Part,
}

/// Runs one part.
///
/// # Errors
/// When something was noticed, lost or wrong, or the part is not possible here.
pub fn run(args: &Args) -> anyhow::Result<()> {
    match &args.part {
        Part::Mariadb(args) => mariadb::run(args),
        Part::Fsx(args) => fsx::run(args),
        Part::Nbd(args) => nbd::run(args),
        Part::Reconfigure(args) => reconfigure::run(args),
        Part::Pause(args) => parts::run(args),
    }
}
