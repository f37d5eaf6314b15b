//! The command line: one declaration of a flag gives its parser, its help and its documentation.
//! The arguments of a command are declared in its own file.

use clap::{Parser, Subcommand};

use crate::analyze::AnalyzeArgs;
use crate::bench::Passed;
use crate::client::apply::ApplyArgs;
use crate::client::clients::ClientsArgs;
use crate::client::config::ConfigArgs;
use crate::client::drain::DrainArgs;
use crate::client::events::EventsArgs;
use crate::client::pin::PinArgs;
use crate::client::prefetch::PrefetchArgs;
use crate::client::retire::RetireArgs;
use crate::client::rules::RulesArgs;
use crate::client::set::SetArgs;
use crate::client::status::StatusArgs;
use crate::client::stop::StopArgs;
use crate::client::top::TopArgs;
use crate::client::upgrade::UpgradeArgs;
use crate::completions::CompletionsArgs;
use crate::disk::attach::AttachArgs;
use crate::disk::detach::DetachArgs;
use crate::doctor::DoctorArgs;
use crate::help::{self, HelpArgs};
use crate::man::ManArgs;
use crate::offline::check::CheckArgs;
use crate::offline::dump::DumpArgs;
use crate::offline::salvage::SalvageArgs;
use crate::removal::RemovalArgs;
use crate::server::args::ServeArgs;
use crate::setup::SetupArgs;
use crate::trace::args::TraceCommand;

/// An SSD cache in front of slow storage, served to NBD clients.
#[derive(Parser, Debug)]
#[command(name = "forebay", version, max_term_width = 100)]
#[command(disable_help_subcommand = true, after_help = help::AFTER)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// Every command.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Ask a few questions, write the configuration, and start the service
    ///
    /// Flags answer the questions; with all of them and --yes it asks nothing. A primary in use is
    /// refused, and so is a cache device that holds anything, unless --overwrite names it.
    #[command(after_help = "Examples:\n  forebay setup\n  \
        forebay setup --primary /dev/sdb --cache /dev/nvme0n1 --mount /srv/db --yes\n  \
        forebay setup --primary /srv/vm.img --cache /ssd/cache.img,size=20GiB --ram 2GiB --yes")]
    Setup(Box<SetupArgs>),
    /// Show what is wrong or unwise on this host, and how to fix it
    ///
    /// Reads only. The exit code is 1 if something is wrong, and 0 if nothing is, or if something
    /// is only unwise.
    #[command(after_help = "Examples:\n  forebay doctor\n  \
        forebay doctor --config /etc/forebay/forebay.toml --json")]
    Doctor(DoctorArgs),
    /// Put a cache in front of one or more primaries and serve them
    ///
    /// When clients may connect, prints one line: `ready` and the endpoints. SIGTERM or SIGINT stop
    /// it in order; SIGHUP applies the configuration file again.
    #[command(override_usage = "forebay serve --primary <URI> --cache <PATH[,size=SIZE]> \
        --nbd <ENDPOINT> [OPTIONS]\n       \
        forebay serve --primary <URI> --cache <PATH[,size=SIZE]> --fuse <DIR> [OPTIONS]\n       \
        forebay serve --config <FILE> [OPTIONS]")]
    #[command(after_help = "Examples:\n  \
        forebay serve --primary /dev/sdb --cache /dev/nvme0n1 --nbd unix:/run/forebay/nbd.sock\n  \
        forebay serve --primary disk.img --cache cache.img,size=1GiB --nbd tcp:127.0.0.1:10809\n  \
        forebay serve --primary /dev/sdb --cache /dev/nvme0n1 --fuse /mnt/forebay\n  \
        forebay serve --config /etc/forebay/forebay.toml")]
    Serve(Box<ServeArgs>),
    /// Show the volumes, how much is cached, and how much is at risk
    #[command(after_help = "Examples:\n  forebay status db --json\n  forebay status --window 5m")]
    Status(StatusArgs),
    /// Show the server live in the terminal
    ///
    /// Keys: up and down choose a volume, w the window, q quits.
    #[command(after_help = "Examples:\n  forebay top\n  forebay top --once --size 100x30")]
    Top(TopArgs),
    /// Show what has happened that an operator must know, and acknowledge it
    #[command(after_help = "Examples:\n  forebay events\n  forebay events --follow --json\n  \
        forebay events ack 12 --by night-shift")]
    Events(EventsArgs),
    /// Show who uses the server over sockets, and what each client has done
    #[command(after_help = "Examples:\n  forebay clients\n  forebay clients db --json")]
    Clients(ClientsArgs),
    /// Write all dirty data of a volume, or of all volumes, to the primary
    ///
    /// The server continues to serve, and to drain if this command is interrupted.
    #[command(after_help = "Examples:\n  forebay drain db\n  forebay drain\n  \
        forebay drain db --background\n  forebay drain --list\n  \
        forebay drain --job 1764540000001 --cancel")]
    Drain(DrainArgs),
    /// Stop the server in order
    ///
    /// Clients are disconnected, and the cache is closed so that the next start finds all of it.
    /// Without --drain, dirty data stays in the cache.
    #[command(after_help = "Example:\n  forebay stop --drain")]
    Stop(StopArgs),
    /// Give up the cache device while it serves: it is emptied, and can then be taken out
    ///
    /// Its dirty data is written to the primaries, which are then used without a cache. There is no
    /// way back: a new cache is made by `forebay apply` with another device, or by the next start.
    #[command(after_help = "Example:\n  forebay retire")]
    Retire(RetireArgs),
    /// Make bytes of a volume, or a file on it, stay in the cache
    ///
    /// They enter whenever they are read, and do not make way for others. A file is pinned where it
    /// lies now: pin it again when it has grown or moved. Half of the cache can be pinned at most.
    #[command(after_help = "Examples:\n  forebay pin db --file /srv/db/orders.ibd --prefetch\n  \
        forebay pin db --range 0..64MiB\n  forebay pin db --list\n  \
        forebay pin db --remove /srv/db/orders.ibd")]
    Pin(PinArgs),
    /// Bring bytes of a volume, or a file on it, into the cache before they are asked for
    ///
    /// The server goes on if this command is interrupted.
    #[command(after_help = "Examples:\n  forebay prefetch db --file /srv/db/orders.ibd\n  \
        forebay prefetch db --all --rate 50MiB --background\n  forebay prefetch db --cancel")]
    Prefetch(PrefetchArgs),
    /// Show the rules for requests, and on how many each has decided
    ///
    /// Rules are the setting `rules`: in the configuration, or by `forebay set`. `forebay help
    /// rules` tells how to write them.
    #[command(after_help = "Examples:\n  forebay rules\n  \
        forebay set rules=\"bypass process=restic; cache volume=db\"")]
    Rules(RulesArgs),
    /// Change settings of a volume or of the whole cache while it serves
    ///
    /// A change is kept for the next starts, until the configuration's own value changes. The value
    /// `default` returns to the configured value.
    #[command(override_usage = "forebay set [OPTIONS] [VOLUME] <KEY=VALUE>...")]
    #[command(after_help = "Examples:\n  forebay set db mode=write-through\n  \
        forebay set eviction=lru\n  forebay set db mode=default")]
    Set(SetArgs),
    /// Bring a configuration file into force while the server serves
    ///
    /// All of it or nothing: it is refused if it has a mistake, or if a setting differs that needs
    /// a restart. Prints each setting that differs from those in force, with both values. Changes
    /// are kept for the next starts like those of `forebay set`.
    #[command(after_help = "Examples:\n  forebay apply /etc/forebay/forebay.toml --dry-run\n  \
        forebay apply /etc/forebay/forebay.toml")]
    Apply(ApplyArgs),
    /// Show the settings in force, and where their values come from
    #[command(after_help = "Examples:\n  forebay config\n  forebay config db --json")]
    Config(ConfigArgs),
    /// Let another program, such as a newer version, take over from the server
    ///
    /// It first checks the configuration and the cache; then it serves, and clients see a short
    /// pause and no error. If it cannot, the server goes on as before, or comes back, and the exit
    /// code is 1. The configuration is read again.
    #[command(after_help = "Examples:\n  forebay upgrade\n  \
        forebay upgrade /usr/local/bin/forebay-1.3")]
    Upgrade(UpgradeArgs),
    /// Make a volume a disk of this machine, and mount it if asked
    ///
    /// Prints the device: /dev/ublkbN where the kernel has ublk, otherwise a loop device over the
    /// volume's file, which `serve --fuse` mounts.
    #[command(after_help = "Examples:\n  forebay attach db\n  \
        forebay attach db --mount /srv/db\n  forebay attach db --via fuse")]
    Attach(AttachArgs),
    /// Unmount an attached volume, and remove its disk
    ///
    /// Everything written is made durable. Refused while the disk is in use.
    #[command(after_help = "Example:\n  forebay detach db")]
    Detach(DetachArgs),
    /// Predict how a cache would store the blocks of a device or file
    ///
    /// Nothing is written to it. With --older, an older version of the same data, it also predicts
    /// how long the deltas would be that store the difference.
    #[command(after_help = "Examples:\n  forebay analyze /dev/sdb\n  \
        forebay analyze today.img --older yesterday.img --json")]
    Analyze(AnalyzeArgs),
    /// Verify a cache device that no server uses: superblocks, log, checksums of all data
    #[command(after_help = "Example:\n  forebay check /dev/nvme0n1")]
    Check(CheckArgs),
    /// List the content of a cache device that no server uses
    #[command(after_help = "Example:\n  forebay dump /dev/nvme0n1 --blocks")]
    Dump(DumpArgs),
    /// Write the dirty data of a cache device to a primary, without a server
    ///
    /// For a cache that cannot be served, or whose host is gone. Nothing is written to the cache
    /// device, so it can be repeated. Lists lost data, and exits with 1 if there is any.
    #[command(after_help = "Examples:\n  forebay salvage /dev/nvme0n1 --list\n  \
        forebay salvage /dev/nvme0n1 --to /dev/sdb\n  \
        forebay salvage /dev/nvme0n1 --volume db --to copy-of-db.img --force")]
    Salvage(SalvageArgs),
    /// Block traces: record, replay, simulate eviction policies over them
    #[command(subcommand, after_help = "Example:\n  forebay trace simulate db.trace --size 10%")]
    Trace(TraceCommand),
    /// Repeat the published evaluations of caches on this machine, with charts
    ///
    /// Each setup is measured in turn in one run: the primary alone, the modes of the cache, the
    /// bare SSD, another cache. The results are a table, the figures as JSON, and a report as a web
    /// page.
    #[command(
        disable_help_flag = true,
        after_help = "Examples:\n  forebay bench tpcc\n  \
        forebay bench tpcc --compare forebay-bench/tpcc-20260131T120000Z.json"
    )]
    Bench(Passed),
    /// See it work in a few minutes, without a spare disk: gains, a kill, a database
    #[command(
        disable_help_flag = true,
        after_help = "Examples:\n  forebay demo\n  forebay demo --dir /ssd/work --seconds 0"
    )]
    Demo(Passed),
    /// Print the script by which a shell completes these commands
    #[command(after_help = "Examples:\n  source <(forebay completions bash)\n  \
        forebay completions fish > ~/.config/fish/completions/forebay.fish")]
    Completions(CompletionsArgs),
    /// Show a short text on a topic, or the help of a command
    #[command(after_help = "Examples:\n  forebay help modes\n  forebay help trace record")]
    Help(HelpArgs),
    /// Write the manual pages of these commands into a directory
    #[command(hide = true, after_help = "Example:\n  forebay man-pages /usr/local/share/man")]
    ManPages(ManArgs),
    /// Tell whether the programs can be removed from this host without harm
    #[command(hide = true, after_help = "Example:\n  forebay may-remove")]
    MayRemove(RemovalArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_declaration_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let call = format!("forebay {}", command.get_name());
            assert!(help.contains(&call), "{}: {help:?}", command.get_name());
        }
    }
}
