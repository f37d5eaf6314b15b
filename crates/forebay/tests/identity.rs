//! The identity of primaries, on real block devices: disks that change their names, other disks
//! under old names, and disks and files that were changed without the cache.
//!
//! The disks are loop devices with numbers that nothing else uses, removed at the end.

#[path = "support/disk.rs"]
mod disk;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use support::nbd::Nbd;
use support::{Place, Server, client, noise};
use tools::{have, skip};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
/// Offset at which the client writes.
const DATA: u64 = 9 * MIB;
/// Offsets of a block that is always sampled, and of one that never is.
const SAMPLED: u64 = SIZE - 4096;
const NOT_SAMPLED: u64 = 33 * MIB;
/// How long a loop device may take to disappear.
const PATIENCE: Duration = Duration::from_secs(30);

/// Whether this machine has usable loop devices; prints why if not.
fn can_loop() -> bool {
    let control = Path::new("/dev/loop-control").exists();
    let root = || client("id", &["-u"]).trim() == "0";
    (control || skip("there is no /dev/loop-control"))
        && (root() || skip("only root may attach loop devices"))
        && have(&["losetup"])
}

/// A name of a disk: the loop device is given another file, as if a disk got another name.
struct Name {
    number: u32,
}

impl Name {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        assert!(number < 64, "more names than were planned for");
        Self { number: 4096 + std::process::id() % 4096 * 64 + number }
    }

    fn path(&self) -> String {
        format!("/dev/loop{}", self.number)
    }

    /// Gives the name to the disk in `file`.
    fn give(&self, file: &Path) {
        self.take();
        client("losetup", &[&self.path(), &file.to_string_lossy()]);
    }

    /// Takes the name away. The kernel releases the file later than it reports.
    fn take(&self) {
        let attached = PathBuf::from(format!("/sys/block/loop{}/loop/backing_file", self.number));
        let limit = Instant::now() + PATIENCE;
        while attached.exists() {
            let _ = Command::new("losetup").args(["-d", &self.path()]).output();
            assert!(Instant::now() < limit, "{} stays in use", self.path());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.take();
        }
        let _ = Command::new("losetup").args(["-d", &self.path()]).output();
        // Free the number again.
        let remove = "import fcntl,os,sys\n\
            fcntl.ioctl(os.open('/dev/loop-control', os.O_RDWR), 0x4c81, int(sys.argv[1]))";
        let number = self.number.to_string();
        let _ = Command::new("python3").args(["-c", remove, &number]).output();
    }
}

/// How a server ends.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    Stop,
    Kill,
}

const ENDS: [End; 2] = [End::Stop, End::Kill];

fn end(server: Server, how: End) {
    match how {
        End::Kill => server.kill(),
        End::Stop => {
            server.signal("TERM");
            assert_eq!(server.wait(), Some(0));
        }
    }
}

/// The arguments of a server of the primary `primary`.
fn serve(place: &Place, primary: &str) -> Vec<String> {
    let mut arguments = place.serve("", "cache.img,size=32MiB");
    arguments.retain(|argument| !argument.starts_with("--primary"));
    arguments.push(format!("--primary={primary}"));
    arguments
}

fn accepting(arguments: &[String]) -> Vec<String> {
    [arguments, &["--accept-primary=disk".to_owned()]].concat()
}

fn write(place: &Place, seed: u64) {
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    nbd.write(DATA, &noise(seed, 1 << 16), true).expect("it is written");
}

fn holds(place: &Place, seed: u64) -> bool {
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    let mut found = vec![0; 1 << 16];
    nbd.read(DATA, &mut found).expect("it can be read");
    found == noise(seed, 1 << 16)
}

fn at(path: &Path, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let file = File::open(path).expect("it is there");
    file.read_exact_at(&mut bytes, offset).expect("it is long enough");
    bytes
}

/// Changes a disk or a file without the cache.
fn change(path: impl AsRef<Path>, offset: u64) {
    let file = File::options().write(true).open(path).expect("it is there");
    file.write_all_at(&[0x5a; 512], offset).expect("it is written");
    file.sync_all().expect("it is durable");
}

/// Found by an audit: after a power failure the disks came back in another order, the cached blocks
/// of one went to the other, and the correct disk was refused.
#[test]
fn the_right_disk_is_served_under_another_name_and_another_one_is_refused() {
    if !can_loop() {
        return;
    }
    for how in ENDS {
        let place = Place::new();
        let (right, other) = (place.path("right.img"), place.path("other.img"));
        place.make("right.img", SIZE);
        place.make("other.img", SIZE);
        let names = [Name::new(), Name::new()];
        let link = place.path("by-id");
        let point = |name: &Name| {
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(name.path(), &link).expect("a link can be made");
        };
        names[0].give(&right);
        names[1].give(&other);
        point(&names[0]);
        let server = place.start(&serve(&place, &place.text("by-id")));
        write(&place, 1);
        end(server, how);
        // The disks return in the other order.
        names.iter().for_each(Name::take);
        names[0].give(&other);
        names[1].give(&right);
        let said = place.refuse(&serve(&place, &names[0].path()));
        assert!(said.contains("belongs to primary loop:"), "{how:?}: {said}");
        assert!(said.contains("right.img") && said.contains("other.img"), "{how:?}: {said}");
        assert_eq!(at(&other, DATA, 4096), vec![0; 4096], "{how:?}: another disk was written");
        // The link still points to the correct disk, and so does its new name.
        point(&names[1]);
        let server = place.start(&serve(&place, &place.text("by-id")));
        assert!(holds(&place, 1), "{how:?}");
        end(server, how);
        let server = place.start(&serve(&place, &names[1].path()));
        assert!(holds(&place, 1), "{how:?}");
        server.ask(&["drain", "disk"]);
        end(server, End::Stop);
        assert_eq!(at(&right, DATA, 1 << 16), noise(1, 1 << 16), "{how:?}");
        assert_eq!(at(&other, DATA, 4096), vec![0; 4096], "{how:?}: another disk was written");
    }
}

/// Regression: two volumes of one cache, and their disks exchanged their names at a boot: the
/// clients of each volume read and wrote the other one's disk.
#[test]
fn disks_of_two_volumes_that_exchange_their_names_are_refused() {
    if !can_loop() {
        return;
    }
    for how in ENDS {
        let place = Place::new();
        let files = ["first.img", "second.img"].map(|name| {
            place.make(name, SIZE);
            place.path(name)
        });
        let names = [Name::new(), Name::new()];
        let give = |order: [usize; 2]| {
            names.iter().for_each(Name::take);
            names.iter().zip(order).for_each(|(name, file)| name.give(&files[file]));
        };
        let serve = |volumes: [(&str, &Name); 2]| {
            let mut text = format!(
                "[cache]\npath = {:?}\nsize = \"32MiB\"\nstate_dir = {:?}\n[server]\n\
                 nbd = [\"unix:{}\"]\nshards = 2\n[memory]\nram = \"4MiB\"\n\
                 [control]\nsocket = {:?}\n",
                place.text("cache.img"),
                place.text("state"),
                place.text("nbd.sock"),
                place.text("control.sock"),
            );
            for (volume, name) in volumes {
                let primary = name.path();
                text += &format!("[[volume]]\nname = {volume:?}\nprimary = {primary:?}\n");
            }
            fs::write(place.path("forebay.toml"), text).expect("it can be written");
            ["serve".to_owned(), format!("--config={}", place.text("forebay.toml"))]
        };
        let is_there = |volume: &str, seed: u64| {
            let mut nbd = Nbd::connect(&place.path("nbd.sock"), volume).expect("it serves");
            let mut found = vec![0; 1 << 16];
            nbd.read(DATA, &mut found).expect("it can be read");
            assert!(found == noise(seed, 1 << 16), "{how:?}: {volume} is another volume");
        };
        give([0, 1]);
        let usual = serve([("a", &names[0]), ("b", &names[1])]);
        let server = place.start(&usual);
        for (volume, seed) in [("a", 1), ("b", 2)] {
            let mut nbd = Nbd::connect(&place.path("nbd.sock"), volume).expect("it serves");
            nbd.write(DATA, &noise(seed, 1 << 16), true).expect("it is written");
        }
        end(server, how);
        give([1, 0]);
        for _ in 0..2 {
            let said = place.refuse(&usual);
            assert!(said.contains("volume a: ") && said.contains("of volume b"), "{said}");
            assert!(said.contains("first.img") && said.contains("second.img"), "{said}");
            assert!(said.contains("/dev/disk/by-id"), "{said}");
        }
        // The configuration follows the disks; later it exchanges the names on purpose.
        let server = place.start(&serve([("a", &names[1]), ("b", &names[0])]));
        is_there("a", 1);
        is_there("b", 2);
        end(server, how);
        let server = place.start(&serve([("a", &names[0]), ("b", &names[1])]));
        is_there("a", 2);
        is_there("b", 1);
        server.stop(&["--drain"]);
        for (file, seed) in files.iter().zip([1, 2]) {
            assert_eq!(at(file, DATA, 1 << 16), noise(seed, 1 << 16), "{how:?}");
        }
    }
}

#[test]
fn a_partition_is_known_by_its_disk_and_its_uuid() {
    if !can_loop() || !have(&["addpart"]) {
        return;
    }
    let place = Place::new();
    let names = [Name::new(), Name::new()];
    // A copy of the disk has the same UUIDs.
    for (file, name) in ["a.img", "b.img"].iter().zip(&names) {
        place.make(file, SIZE);
        let disk = File::options().write(true).open(place.path(file)).expect("it is there");
        disk.write_all_at(&0xfeed_beef_u32.to_le_bytes(), 440).expect("it is written");
        disk.write_all_at(&[0x55, 0xaa], 510).expect("it is written");
        name.give(&place.path(file));
        client("addpart", &[&name.path(), "1", "2048", "81920"]);
    }
    let part = |name: &Name| format!("{}p1", name.path());
    if !Path::new(&part(&names[0])).exists() {
        skip("this kernel makes no partitions of loop devices");
        return;
    }
    let server = place.start(&serve(&place, &part(&names[0])));
    write(&place, 2);
    server.kill();
    let said = place.refuse(&serve(&place, &part(&names[1])));
    let uuid = "/partuuid:feedbeef-01";
    assert!(said.contains(&format!("a.img@0{uuid}")), "{said}");
    assert!(said.contains(&format!("b.img@0{uuid}")), "{said}");
    let swapped = place.path("a.img");
    for name in &names {
        client("delpart", &[&name.path(), "1"]);
        name.take();
    }
    names[1].give(&swapped);
    client("addpart", &[&names[1].path(), "1", "2048", "81920"]);
    let server = place.start(&serve(&place, &part(&names[1])));
    assert!(holds(&place, 2));
    end(server, End::Stop);
    client("delpart", &[&names[1].path(), "1"]);
}

/// A change to a primary without the cache, and whether the primary is served afterwards.
type Deed = (&'static str, fn(&Path), bool);

fn nothing(_: &Path) {}

fn touch(file: &Path) {
    let file = File::options().write(true).open(file).expect("it is there");
    file.set_modified(std::time::SystemTime::now()).expect("its time can be set");
}

fn grow(file: &Path) {
    let grown = File::options().write(true).open(file).expect("it is there");
    grown.set_len(2 * SIZE).expect("it can be longer");
}

fn grow_and_change(file: &Path) {
    change(file, SAMPLED);
    grow(file);
}

fn change_sample(file: &Path) {
    change(file, SAMPLED);
}

fn change_elsewhere(file: &Path) {
    change(file, NOT_SAMPLED);
}

const DEEDS: [Deed; 6] = [
    ("nothing", nothing, true),
    ("touched", touch, true),
    ("grown", grow, true),
    ("grown and changed", grow_and_change, false),
    ("changed where it is sampled", change_sample, false),
    // Found later, when clean blocks are compared.
    ("changed elsewhere", change_elsewhere, true),
];

/// Applies each change to a primary with dirty blocks in the cache, after a stop and after a kill,
/// and then starts the server.
fn after_each_deed(is_disk: bool) {
    let all = DEEDS.iter().flat_map(|deed| ENDS.map(|how| (deed, how)));
    for (&(deed, act, served), how) in all {
        let deed = format!("{deed} after {how:?}");
        let place = Place::new();
        place.make("disk.img", SIZE);
        let file = place.path("disk.img");
        let name = Name::new();
        let path = if is_disk { name.path() } else { place.text("disk.img") };
        if is_disk {
            name.give(&file);
        }
        let arguments = serve(&place, &path);
        let server = place.start(&arguments);
        write(&place, 3);
        end(server, how);
        name.take();
        act(&file);
        if is_disk {
            name.give(&file);
        }
        if served {
            let server = place.start(&arguments);
            assert!(holds(&place, 3), "{deed}");
            end(server, End::Stop);
            continue;
        }
        // However often it is tried: a failed start forgets nothing.
        for _ in 0..2 {
            let said = place.refuse(&arguments);
            assert!(said.contains("was changed since"), "{deed}: {said}");
            assert!(said.contains("--accept-primary disk"), "{deed}: {said}");
        }
        let server = place.start(&accepting(&arguments));
        assert!(holds(&place, 3), "{deed}: the dirty blocks are there");
        server.ask(&["drain", "disk"]);
        end(server, End::Stop);
        assert_eq!(at(&file, DATA, 1 << 16), noise(3, 1 << 16), "{deed}: they are kept");
        assert_eq!(at(&file, SAMPLED, 512), [0x5a; 512], "{deed}: so is the change");
        // It does not hinder later starts.
        let server = place.start(&arguments);
        assert!(holds(&place, 3), "{deed}");
        end(server, End::Stop);
    }
}

#[test]
fn what_was_done_to_a_disk_is_seen_after_a_stop_and_after_a_kill() {
    if can_loop() {
        after_each_deed(true);
    }
}

#[test]
fn what_was_done_to_a_file_is_seen_after_a_stop_and_after_a_kill() {
    after_each_deed(false);
}

/// A change that misses every sampled place: it is found when cached clean blocks are compared, and
/// the dirty blocks stay.
#[test]
fn what_was_changed_elsewhere_is_found_and_not_served() {
    for how in ENDS {
        let place = Place::new();
        place.make("disk.img", SIZE);
        let file = place.path("disk.img");
        let arguments = serve(&place, &place.text("disk.img"));
        let server = place.start(&arguments);
        let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
        nbd.write(NOT_SAMPLED / 4096 * 4096, &noise(1, 4096), true).expect("it is written");
        server.ask(&["drain", "disk"]);
        drop(nbd);
        // A kill leaves blocks dirty in the log that have been clean only for a short time.
        end(server, End::Stop);
        let server = place.start(&arguments);
        write(&place, 3);
        end(server, how);
        change(&file, NOT_SAMPLED);
        let server = place.start(&arguments);
        let limit = Instant::now() + Duration::from_secs(60);
        let said = loop {
            let said = server.ask(&["status"]);
            if said.contains("was changed without the cache") {
                break said;
            }
            assert!(Instant::now() < limit, "after {how:?} it must be found: {said}");
            std::thread::sleep(Duration::from_millis(50));
        };
        assert!(said.contains("WRONG") && said.contains("volume disk"), "{said}");
        let mut found = [0; 512];
        let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
        nbd.read(NOT_SAMPLED, &mut found).expect("the primary has it");
        assert_eq!(found, [0x5a; 512], "after {how:?}");
        assert!(holds(&place, 3), "after {how:?} dirty blocks are there");
        drop(nbd);
        end(server, End::Stop);
    }
}

/// The samples stay valid while the server writes: its own changes are not blamed on the primary,
/// and the unchanged places still decide.
#[test]
fn what_the_server_writes_to_sampled_places_is_not_taken_for_somebody_elses() {
    for mode in ["write-back", "write-around"] {
        let place = Place::new();
        place.make("disk.img", SIZE);
        let mut arguments = serve(&place, &place.text("disk.img"));
        arguments.push(format!("--mode={mode}"));
        let mut server = place.start(&arguments);
        for seed in 5..8 {
            let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
            for offset in [0, SAMPLED] {
                nbd.write(offset, &noise(seed + offset, 4096), true).expect("it is written");
            }
            server.ask(&["drain", "disk"]);
            assert_eq!(at(&place.path("disk.img"), SAMPLED, 4096), noise(seed + SAMPLED, 4096));
            server.kill();
            server = place.start(&arguments);
            let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
            for offset in [0, SAMPLED] {
                let mut found = vec![0; 4096];
                nbd.read(offset, &mut found).expect("it can be read");
                assert!(found == noise(seed + offset, 4096), "{mode}: {offset}");
            }
        }
        server.kill();
        change(place.path("disk.img"), 8192);
        let said = place.refuse(&arguments);
        assert!(said.contains("was changed since"), "{mode}: {said}");
        assert!(said.contains("in the block at 8192"), "{mode}: {said}");
    }
}

/// A start that fails after the cache is open, here for lack of FUSE, leaves the records of the
/// primary unchanged.
#[test]
fn a_start_that_fails_forgets_nothing() {
    if !disk::can_mount() || !have(&["unshare"]) {
        return;
    }
    let place = Place::new();
    place.make("disk.img", SIZE);
    let arguments = serve(&place, &place.text("disk.img"));
    let server = place.start(&arguments);
    write(&place, 8);
    end(server, End::Stop);
    fs::create_dir_all(place.path("volumes")).expect("a directory can be made");
    let fuse = format!("--fuse={}", place.text("volumes"));
    let said = without_fuse(&[&arguments[..], &[fuse]].concat());
    assert!(said.contains("not mounted"), "{said}");
    change(place.path("disk.img"), SAMPLED);
    let said = place.refuse(&arguments);
    assert!(said.contains("was changed since"), "{said}");
}

/// Runs a server that cannot mount, after its cache is open; returns its output.
fn without_fuse(arguments: &[String]) -> String {
    let mut command = Command::new("timeout");
    command.args(["60", "unshare", "--mount", "sh", "-c"]);
    command.arg("mount --bind /dev/null /dev/fuse && exec \"$@\"").arg("sh");
    command.arg(env!("CARGO_BIN_EXE_forebay")).args(arguments);
    let output = command.output().expect("it runs");
    assert_ne!(output.status.code(), Some(0));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Accepting a changed primary re-creates the cache in the end; settings changed with `set` stay in
/// force throughout.
#[test]
fn settings_stay_in_force_when_a_changed_primary_is_accepted() {
    let place = Place::new();
    place.make("disk.img", SIZE);
    let arguments = serve(&place, &place.text("disk.img"));
    let server = place.start(&arguments);
    write(&place, 1);
    let set = server.ask(&["set", "disk", "mode=write-through", "eviction=fifo", "--json"]);
    let set: serde_json::Value = serde_json::from_str(&set).expect("it is JSON");
    let expected = serde_json::json!({
        "volume": "disk", "mode": "write-through", "eviction": "fifo", "content": "rewrite",
        "sequential_threshold": "512KiB", "write_cache_depth": "30s", "patience": "30s",
        "client_stall_timeout": "1m", "idle_timeout": "0s", "dirty_target": "50%",
        "idle_destage": "5s", "destage_rate": "0", "fill_rate": "0", "wear_budget": "0",
    });
    assert_eq!(set, expected);
    end(server, End::Stop);
    let mut bytes = fs::read(place.path("disk.img")).expect("it is there");
    bytes[..4096].copy_from_slice(&noise(9, 4096));
    fs::write(place.path("disk.img"), bytes).expect("it can be written");
    assert!(place.refuse(&arguments).contains("--accept-primary disk"));
    let in_force = |server: &Server| {
        let status = server.status();
        assert_eq!(status["volumes"][0]["mode"], "write-through");
        assert_eq!(status["cache"]["eviction"], "fifo");
    };
    let server = place.start(&accepting(&arguments));
    in_force(&server);
    server.stop(&["--drain"]);
    // Now the cache is re-created.
    for how in [End::Kill, End::Stop] {
        let server = place.start(&arguments);
        in_force(&server);
        end(server, how);
    }
}
