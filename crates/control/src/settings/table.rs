//! The table of settings: one entry for each.

use forebay_block::{CLIENTS_MAX, SHARDS_MAX};
use forebay_engine::{
    ContentLocality, DIRTY_MAX_PERCENT, Eviction, GUARANTEED_MAX_PERCENT, Mode, Setting,
};

use crate::config::{FuseTransport, TlsPolicy};
use crate::peer::ChangesBy;

use super::Flag::{Key, Named as As, None as InFile, Off, Part};
use super::Initial::{Required, Unset, Value};
use super::Kind::{Bool, Choice, List, Number, Percent, Share, Size, Text, Time};
use super::Place::{Server, Volume};
use super::{Initial, Kind, Named, Online, Place, Range, Section, Spec};

const SECOND: u64 = 1_000;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A setting with a flag of the same name, which is changed by a hand-over.
const fn spec(
    section: Section,
    key: &'static str,
    kind: Kind,
    default: Initial,
    field: Place,
    help: &'static str,
) -> Spec {
    Spec { section, key, flag: Key, kind, default, online: Online::HandOver, help, more: "", field }
}

/// Every setting, section by section, in the order of the reference.
pub static TABLE: &[Spec] = &[
    // [cache]
    Spec {
        online: Online::NewCache,
        flag: Part("--cache PATH[,size=SIZE]"),
        more: "A file is created if it does not exist and a size is given.",
        ..spec(
            Section::Cache,
            "path",
            Text("PATH"),
            Required,
            Server(|config| &mut config.cache.path),
            "The cache device: a block device or a file",
        )
    },
    Spec {
        online: Online::NewCache,
        flag: Part("--cache"),
        ..spec(
            Section::Cache,
            "size",
            Size(Range::least(1).or_else("leave it out to use all of the device")),
            Unset("the whole device"),
            Server(|config| &mut config.cache.size),
            "How much of the device to use",
        )
    },
    Spec {
        online: Online::Restart,
        flag: As("state"),
        more: "It must not be on the cache device.",
        ..spec(
            Section::Cache,
            "state_dir",
            Text("DIR"),
            Value("/var/lib/forebay"),
            Server(|config| &mut config.cache.state_dir),
            "Where the host keeps what it must know should the cache device fail",
        )
    },
    Spec {
        online: Online::Cache(|config| Setting::Eviction(config.cache.eviction)),
        more: "See [tuning](tuning.md#eviction).",
        ..spec(
            Section::Cache,
            "eviction",
            Choice(Eviction::names),
            Value("frequency"),
            Server(|config| &mut config.cache.eviction),
            "Which blocks enter the cache and which leave it",
        )
    },
    Spec {
        online: Online::Cache(|config| Setting::DirtyLimit(config.cache.dirty_limit.0)),
        more: "Writes slow down on the way to it.",
        ..spec(
            Section::Cache,
            "dirty_limit",
            Share(Range::within(1, DIRTY_MAX_PERCENT as u64)),
            Value("50%"),
            Server(|config| &mut config.cache.dirty_limit),
            "Share of the cache that may be dirty, or bytes",
        )
    },
    Spec {
        online: Online::Cache(|config| Setting::DirtyTarget(config.cache.dirty_target.0)),
        more: "Above it, the more there is the faster; below it, only what is old.",
        ..spec(
            Section::Cache,
            "dirty_target",
            Share(Range::within(0, DIRTY_MAX_PERCENT as u64)),
            Value("50%"),
            Server(|config| &mut config.cache.dirty_target),
            "Share of dirty_limit above which dirty data is written to its primary",
        )
    },
    Spec {
        online: Online::Cache(|config| Setting::IdleDestage(config.cache.idle_destage())),
        more: "Reads that the cache serves do not count; each shard decides for itself. Databases \
               pause for some seconds when their log is full; then more writes would make the next \
               requests wait.",
        ..spec(
            Section::Cache,
            "idle_destage",
            Time(Range::ANY.or_zero("0s for never")),
            Value("5s"),
            Server(|config| &mut config.cache.idle_destage),
            "After this long without writes and misses of clients all dirty data is written to its \
             primary; 0s is never",
        )
    },
    Spec {
        online: Online::Cache(|config| Setting::FillRate(config.cache.fill_rate())),
        more: "Counted before compression. Blocks that clients write are not bound, nor is moving \
               blocks within the cache. See [tuning](tuning.md#wear-of-the-ssd).",
        ..spec(
            Section::Cache,
            "fill_rate",
            Size(Range::least(64 * KIB).or_zero("0 for no bound")),
            Value("0"),
            Server(|config| &mut config.cache.fill_rate),
            "The most bytes per second that misses bring into the cache device; 0 is no bound",
        )
    },
    Spec {
        online: Online::Cache(|config| Setting::WearBudget(config.cache.wear_budget())),
        more: "The more of it is used up, the more often a block must be requested to enter the \
               cache device or to stay there. Writes of clients are never refused nor slowed. See \
               [tuning](tuning.md#wear-of-the-ssd).",
        ..spec(
            Section::Cache,
            "wear_budget",
            Size(Range::least(GIB).or_zero("0 for no budget")),
            Value("0"),
            Server(|config| &mut config.cache.wear_budget),
            "Bytes per day that the cache may write to its device; 0 is no budget",
        )
    },
    Spec {
        online: Online::NewCache,
        more: "Fixed when the cache is created. See [tuning](tuning.md#wear-of-the-ssd).",
        ..spec(
            Section::Cache,
            "spare",
            Percent(Range::within(0, 50)),
            Value("10%"),
            Server(|config| &mut config.cache.spare),
            "Share of a new cache's device that is never written, so that the SSD has room",
        )
    },
    Spec {
        online: Online::NewCache,
        more: "Fixed when the cache is created. The rest is its store, where blocks lie that stay \
               for long. 100% makes a cache without a store, as earlier versions did.",
        ..spec(
            Section::Cache,
            "log_share",
            // The entries of a full store take less than half of the smallest log.
            Percent(Range::within(8, 100)),
            Value("8%"),
            Server(|config| &mut config.cache.log_share),
            "Share of a new cache that is its log",
        )
    },
    Spec {
        online: Online::Cache(|config| Setting::WriteCacheDepth(config.cache.write_cache_depth.0)),
        ..spec(
            Section::Cache,
            "write_cache_depth",
            Time(Range::least(1).or_else("mode = \"write-through\" for no dirty blocks")),
            Value("30s"),
            Server(|config| &mut config.cache.write_cache_depth),
            "The longest that a dirty block waits before it is written to its primary",
        )
    },
    Spec {
        online: Online::Cache(|config| Setting::Content(config.cache.content)),
        more: "See [tuning](tuning.md#how-blocks-are-stored).",
        ..spec(
            Section::Cache,
            "content",
            Choice(ContentLocality::names),
            Value("rewrite"),
            Server(|config| &mut config.cache.content),
            "How blocks are stored that equal or resemble others",
        )
    },
    Spec {
        online: Online::Rules,
        flag: InFile,
        more: "See [rules](rules.md).",
        ..spec(
            Section::Cache,
            "rules",
            List("RULE"),
            Unset("none"),
            Server(|config| &mut config.cache.rules),
            "Which requests are cached, by who sends them, where they go and how long they are",
        )
    },
    Spec {
        flag: Off("no-compression", "Store blocks uncompressed"),
        ..spec(
            Section::Cache,
            "compress",
            Bool,
            Value("true"),
            Server(|config| &mut config.cache.compress),
            "Whether blocks are compressed, on the cache device and in RAM",
        )
    },
    Spec {
        flag: Off("no-discard", "Never discard anything on the cache device"),
        more: "Only of a block device: the space of a file stays allocated. See \
               [tuning](tuning.md#discards).",
        ..spec(
            Section::Cache,
            "discard",
            Bool,
            Value("true"),
            Server(|config| &mut config.cache.discard),
            "Whether the cache device is told what is free, if it takes discards",
        )
    },
    // [memory]
    Spec {
        more: "The index comes in addition. Each block held compressed needs about 50 more bytes.",
        ..spec(
            Section::Memory,
            "ram",
            Size(Range::ANY),
            Value("256MiB"),
            Server(|config| &mut config.memory.ram),
            "The RAM tier: memory for recent blocks",
        )
    },
    Spec {
        online: Online::NewCache,
        more: "It needs up to 13 MiB per GiB of cache device, as blocks come in. If this is too \
               little, only part of the device is used, and the log and `forebay status` say how \
               much.",
        ..spec(
            Section::Memory,
            "index",
            Size(Range::ANY),
            Unset("half of the machine's memory"),
            Server(|config| &mut config.memory.index),
            "The most memory that the index of a new cache may take",
        )
    },
    Spec {
        flag: As("lock-memory"),
        ..spec(
            Section::Memory,
            "lock",
            Bool,
            Value("false"),
            Server(|config| &mut config.memory.lock),
            "Lock all memory, so that the server never waits for its own swap",
        )
    },
    // [server]
    Spec {
        online: Online::NewCache,
        more: "Fixed when the cache is created. A new cache has half as many as processors, at \
               most 4.",
        ..spec(
            Section::Server,
            "shards",
            Number(Range::within(1, SHARDS_MAX as u64)),
            Unset("as the cache was created"),
            Server(|config| &mut config.server.shards),
            "Threads",
        )
    },
    Spec {
        more: "A list of [endpoints](nbd.md#endpoints).",
        ..spec(
            Section::Server,
            "nbd",
            List("ENDPOINT"),
            Unset(""),
            Server(|config| &mut config.server.nbd),
            "Where NBD clients connect: unix:PATH or tcp:HOST:PORT; the flag may be repeated. For \
             this endpoint alone, add ,tls=POLICY; for Unix sockets ,mode=0660 ,owner=NAME \
             ,group=NAME",
        )
    },
    Spec {
        online: Online::Restart,
        more: "See [files and disks](disks.md).",
        ..spec(
            Section::Server,
            "fuse",
            Text("DIR"),
            Unset(""),
            Server(|config| &mut config.server.fuse),
            "Mount a file system with a file for each volume in this empty directory; needs root",
        )
    },
    Spec {
        online: Online::Restart,
        ..spec(
            Section::Server,
            "fuse_transport",
            Choice(FuseTransport::names),
            Value("auto"),
            Server(|config| &mut config.server.fuse_transport),
            "How the kernel passes requests to those files; auto is the device, or io-uring \
             without a keeper",
        )
    },
    Spec {
        more: "See [TLS](nbd.md#tls).",
        ..spec(
            Section::Server,
            "tls",
            Choice(TlsPolicy::names),
            Value("off"),
            Server(|config| &mut config.server.tls),
            "Whether TCP clients may or must use TLS; with --tls-cert the default is required",
        )
    },
    spec(
        Section::Server,
        "tls_cert",
        Text("FILE"),
        Unset(""),
        Server(|config| &mut config.server.tls_cert),
        "The server's certificate chain, PEM",
    ),
    spec(
        Section::Server,
        "tls_key",
        Text("FILE"),
        Unset(""),
        Server(|config| &mut config.server.tls_key),
        "The key of the first certificate, PEM",
    ),
    spec(
        Section::Server,
        "tls_ca",
        Text("FILE"),
        Unset(""),
        Server(|config| &mut config.server.tls_ca),
        "The authority that signs client certificates, PEM; if set, clients must present one",
    ),
    Spec {
        more: "See [places](nbd.md#places).",
        ..spec(
            Section::Server,
            "max_clients",
            Number(Range::within(1, CLIENTS_MAX as u64)),
            Value("128"),
            Server(|config| &mut config.server.max_clients),
            "NBD clients at once; more are refused",
        )
    },
    Spec {
        more: "See [memory](nbd.md#memory).",
        ..spec(
            Section::Server,
            "client_memory",
            // The largest request must fit twice.
            Size(Range::least(16 * MIB)),
            Value("256MiB"),
            Server(|config| &mut config.server.client_memory),
            "Memory for the requests and answers of all clients together",
        )
    },
    Spec {
        online: Online::Clients,
        ..spec(
            Section::Server,
            "client_stall_timeout",
            Time(Range::least(SECOND)),
            Value("1m"),
            Server(|config| &mut config.server.client_stall_timeout),
            "Disconnect a client that has taken no byte of its answers, or sent no byte of a write \
             it began, for this long",
        )
    },
    Spec {
        online: Online::Clients,
        ..spec(
            Section::Server,
            "idle_timeout",
            Time(Range::least(SECOND).or_zero("0s for never")),
            Value("0s"),
            Server(|config| &mut config.server.idle_timeout),
            "Disconnect a client that has sent no request for this long; 0s is never",
        )
    },
    Spec {
        online: Online::Cache(|config| Setting::Patience(config.server.patience.0)),
        flag: InFile,
        more: "With less than 7s it may also fail when an NBD server is just back, since changes \
               may wait for 6 s then. A request that a device has not answered for this long is \
               reported as slow.",
        ..spec(
            Section::Server,
            "patience",
            Time(Range::least(SECOND)),
            Value("30s"),
            Server(|config| &mut config.server.patience),
            "How long a write at the dirty limit waits for a primary that is away before it fails",
        )
    },
    // [[volume]]
    Spec {
        more: "At most 64 bytes.",
        ..spec(
            Section::Volume,
            "name",
            Text("NAME"),
            Required,
            Volume(|volume| &mut volume.name),
            "What clients and commands call the volume; the flag's default is the last part of the \
             primary's name",
        )
    },
    Spec {
        more: "See [primaries](primaries.md).",
        ..spec(
            Section::Volume,
            "primary",
            Text("URI"),
            Required,
            Volume(|volume| &mut volume.primary),
            "Where the data is: a path, file:PATH, nbd://HOST:PORT/EXPORT or \
             nbd+unix:///EXPORT?socket=PATH; with ?emulate=PROFILE added, slowed down like a disk",
        )
    },
    Spec {
        online: Online::Volume(|id, volume| Setting::Mode(id, volume.mode)),
        more: "See [modes](#modes).",
        ..spec(
            Section::Volume,
            "mode",
            Choice(Mode::names),
            Value("write-back"),
            Volume(|volume| &mut volume.mode),
            "What the cache does with reads and writes",
        )
    },
    Spec {
        online: Online::Streams,
        more: "Writes below 64 KiB never bypass it.",
        ..spec(
            Section::Volume,
            "sequential_threshold",
            // With a smaller value every request would be a stream.
            Size(Range::least(64 * KIB).or_zero("0 to cache streams too")),
            Value("512KiB"),
            Volume(|volume| &mut volume.sequential_threshold),
            "After this many bytes a sequential stream bypasses the cache; 0 is never",
        )
    },
    spec(
        Section::Volume,
        "read_only",
        Bool,
        Value("false"),
        Volume(|volume| &mut volume.read_only),
        "Refuse writes",
    ),
    Spec {
        online: Online::Volume(|id, volume| Setting::CacheShare(id, volume.cache_share())),
        flag: InFile,
        more: "All guarantees together are at most 90%. See \
               [tuning](tuning.md#sharing-the-cache).",
        ..spec(
            Section::Volume,
            "cache_guarantee",
            Share(Range::within(0, GUARANTEED_MAX_PERCENT as u64)),
            Unset("none"),
            Volume(|volume| &mut volume.cache_guarantee),
            "Share of the cache down to which other volumes displace no blocks of this one",
        )
    },
    Spec {
        online: Online::Volume(|id, volume| Setting::CacheShare(id, volume.cache_share())),
        flag: InFile,
        more: "Dirty blocks count, but never leave for it: dirty_limit bounds these.",
        ..spec(
            Section::Volume,
            "cache_limit",
            Share(Range::within(1, 100).or_else("mode = \"pass-through\" for no blocks")),
            Unset("none"),
            Volume(|volume| &mut volume.cache_limit),
            "Share of the cache at which new blocks of this volume displace its own",
        )
    },
    Spec {
        online: Online::Volume(|id, volume| Setting::DirtyShare(id, volume.share())),
        flag: InFile,
        more: "All guarantees together are at most 100%.",
        ..spec(
            Section::Volume,
            "dirty_guarantee",
            Share(Range::within(0, 100)),
            Unset("an equal part of half of the dirty limit"),
            Volume(|volume| &mut volume.dirty_guarantee),
            "Share of the cache's dirty_limit that no other volume can take",
        )
    },
    Spec {
        online: Online::Volume(|id, volume| Setting::DirtyShare(id, volume.share())),
        flag: InFile,
        ..spec(
            Section::Volume,
            "dirty_limit",
            Share(Range::within(1, 100).or_else("mode = \"write-around\" for no dirty blocks")),
            Unset("what the guarantees of the others leave"),
            Volume(|volume| &mut volume.dirty_limit),
            "Share of the cache's dirty_limit at which writes to this volume wait, however little \
             the others use",
        )
    },
    Spec {
        online: Online::Volume(|id, volume| Setting::Pace(id, volume.pace())),
        flag: InFile,
        more: "While even the fastest request of 100 ms takes longer, fewer destage writes are in \
               flight. \"disks\" is 75ms, \"ssd\" is 2ms.",
        ..spec(
            Section::Volume,
            "latency_target",
            Time(Range::least(1)),
            Unset("\"disks\" for disks, \"ssd\" for others"),
            Volume(|volume| &mut volume.latency_target),
            "The latency of client requests at the primary that destaging leaves them",
        )
    },
    Spec {
        online: Online::Volume(|id, volume| Setting::Pace(id, volume.pace())),
        flag: InFile,
        more: "At the dirty limit, clients write no faster than this. A drain keeps to it too. \
               Not bound are writes that something waits for: room in the log, a change of the \
               mode, or a device that failed.",
        ..spec(
            Section::Volume,
            "destage_rate",
            Size(Range::least(64 * KIB).or_zero("0 for no bound")),
            Value("0"),
            Volume(|volume| &mut volume.destage_rate),
            "The most bytes per second that are written to the primary from the cache; 0 is no \
             bound",
        )
    },
    Spec {
        online: Online::Volume(|id, volume| Setting::Pace(id, volume.pace())),
        flag: InFile,
        more: "Where the cache has all of a stripe, all of it is written: see \
               [tuning](tuning.md#arrays-with-parity).",
        ..spec(
            Section::Volume,
            "stripe_size",
            Size(Range::within(8 * KIB, 16 * MIB).power_of_two().or_zero("0 for none")),
            Unset("the preferred size that the primary gives"),
            Volume(|volume| &mut volume.stripe_size),
            "Bytes that an array writes at once on all of its disks; 0 is none",
        )
    },
    Spec {
        online: Online::Pins,
        flag: InFile,
        more: "Half of the cache at most. See [pins](rules.md#pins).",
        ..spec(
            Section::Volume,
            "pinned",
            List("PIN"),
            Unset("none"),
            Volume(|volume| &mut volume.pinned),
            "Bytes of the volume that stay in the cache once they have been read: FROM..TO, or \
             NAME=FROM..TO,FROM..TO",
        )
    },
    Spec {
        more: "Its writes are destaged in an order that keeps the primary usable if the cache \
               device is lost: [tuning](tuning.md#ordered-volumes). As many bytes of dirty data \
               are the most that it may have.",
        ..spec(
            Section::Volume,
            "ordered",
            Size(Range::least(4 * MIB).or_zero("0 for any order")),
            Value("0"),
            Volume(|volume| &mut volume.ordered),
            "Bytes of RAM for the blocks of an ordered volume on their way to the primary; 0 is \
             not ordered",
        )
    },
    // [control]
    Spec {
        online: Online::Restart,
        flag: As("control"),
        ..spec(
            Section::Control,
            "socket",
            Text("PATH"),
            Unset(
                "$FOREBAY_CONTROL, or /run/forebay/forebay.sock; if not root, \
                 $XDG_RUNTIME_DIR/forebay.sock",
            ),
            Server(|config| &mut config.control.socket),
            "Path of the control socket",
        )
    },
    Spec {
        online: Online::Restart,
        flag: InFile,
        ..spec(
            Section::Control,
            "mode",
            Text("MODE"),
            Value("0600"),
            Server(|config| &mut config.control.mode),
            "Permission bits of the control socket, in octal",
        )
    },
    Spec {
        online: Online::Restart,
        flag: InFile,
        more: "A name or a number.",
        ..spec(
            Section::Control,
            "owner",
            Text("NAME"),
            Unset("the server's own"),
            Server(|config| &mut config.control.owner),
            "Owner of the control socket",
        )
    },
    Spec {
        online: Online::Restart,
        flag: InFile,
        more: "A name or a number.",
        ..spec(
            Section::Control,
            "group",
            Text("NAME"),
            Unset("the server's own"),
            Server(|config| &mut config.control.group),
            "Group of the control socket",
        )
    },
    Spec {
        flag: InFile,
        more: "`owner` is root, the server's user, and the owner of the socket. Everyone who may \
               connect may read.",
        ..spec(
            Section::Control,
            "changes",
            Choice(ChangesBy::names),
            Value("owner"),
            Server(|config| &mut config.control.changes),
            "Who may change settings, drain or stop the server through the control socket",
        )
    },
    // [web]
    Spec {
        flag: As("web"),
        more: "See [the page](page.md).",
        ..spec(
            Section::Web,
            "listen",
            Text("HOST:PORT"),
            Unset("none"),
            Server(|config| &mut config.web.listen),
            "Where metrics, statistics, events and a page can be read, and nothing can be changed: \
             HOST:PORT with a token, or unix:PATH, to which ,mode=0660 ,owner=NAME ,group=NAME may \
             be added",
        )
    },
    Spec {
        flag: As("web-token"),
        more: "Only its owner and group may read it.",
        ..spec(
            Section::Web,
            "token_file",
            Text("FILE"),
            Unset("none"),
            Server(|config| &mut config.web.token_file),
            "The file whose first line is the token that HOST:PORT demands",
        )
    },
    Spec {
        flag: InFile,
        ..spec(
            Section::Web,
            "hosts",
            List("NAME"),
            Unset("none"),
            Server(|config| &mut config.web.hosts),
            "Names of this host that requests to HOST:PORT may use, besides its addresses and \
             localhost",
        )
    },
    // [events]
    Spec {
        flag: InFile,
        more: "See [events](events.md#consumers).",
        ..spec(
            Section::Events,
            "command",
            List("WORD"),
            Unset("none"),
            Server(|config| &mut config.events.command),
            "A program, with its arguments, that gets each event as JSON on standard input",
        )
    },
    Spec {
        flag: InFile,
        more: "See [events](events.md#consumers).",
        ..spec(
            Section::Events,
            "webhook",
            Text("URL"),
            Unset("none"),
            Server(|config| &mut config.events.webhook),
            "A web server, http://HOST[:PORT]/PATH, that gets each event as JSON with POST",
        )
    },
];
