//! `forebay attach` and `detach` by FUSE: a disk, its file systems, refused commands, and a server
//! killed under a mounted file system.

#[path = "support/disk.rs"]
mod disk;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use disk::{
    Cleanup, FILE_SYSTEMS, attach, can_attach, can_mount, disk_of, file_content, has_ublk,
    mount_point, open, refused, run,
};
use forebay_bench::rig::san::San;
use support::{Place, Server, client, forebay, noise};
use tools::{have, skip};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 512 * MIB;

/// Disks of a killed server are identified by their volume's name, which is the same in all tests:
/// so only one test at a time may have them.
static DEAD_DISKS: Mutex<()> = Mutex::new(());

/// The right to make disks; nothing where this machine does not let a test make them.
fn alone() -> Option<MutexGuard<'static, ()>> {
    let tools = ["mkfs.xfs", "xfs_repair", "mkfs.ext4", "e2fsck", "git", "tar", "diff"];
    let can = can_attach() && have(&tools);
    can.then(|| DEAD_DISKS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Unpacks this project's own source from git into a directory.
fn unpack(into: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let git = |words: &[&str]| {
        let mut git = Command::new("git");
        git.arg("-C").arg(&root).args(["-c", "safe.directory=*"]).args(words);
        git
    };
    let mut archive = git(&["archive", "HEAD"]).stdout(Stdio::piped()).spawn().expect("git runs");
    let mut tar = Command::new("tar");
    tar.arg("-x").arg("-C").arg(into).stdin(archive.stdout.take().expect("it was asked for"));
    assert!(tar.status().expect("tar runs").success());
    assert!(archive.wait().expect("it is our child").success());
}

/// The kernel sends no flush to a loop device whose write cache was switched off, and remembers
/// that for the device's later files. A disk made of such a device gets its flushes all the same.
#[test]
fn flushes_arrive_through_a_device_that_had_its_write_cache_off() {
    let Some(_alone) = alone() else { return };
    let (place, _cleanup, arguments) = disk_of(SIZE);
    let server = place.start(&arguments);
    let switch = |device: &str| {
        let name = Path::new(device).file_name().expect("a device has a name");
        Path::new("/sys/block").join(name).join("queue/write_cache")
    };
    let flushes = || server.status()["counters"]["flushes"].as_u64().expect("it is counted");
    let mut switched_off = Vec::new();
    // Programs beside this one may take the number of the device.
    for _ in 0..20 {
        let device = attach(&server, &[]);
        let state = fs::read_to_string(switch(&device)).expect("the kernel shows it");
        assert_eq!(state.trim(), "write back");
        let before = flushes();
        let mut disk = fs::OpenOptions::new().write(true).open(&device).expect("root may");
        disk.write_all(&[7; 4096]).and_then(|()| disk.sync_all()).expect("it is a disk");
        drop(disk);
        assert!(flushes() > before, "fsync of {device} is a flush");
        let again = switched_off.contains(&device);
        let set = if again { Ok(()) } else { fs::write(switch(&device), "write through") };
        server.ask(&["detach", "disk"]);
        if let Err(error) = set {
            skip(&format!("{}: {error}", switch(&device).display()));
            return;
        }
        if again {
            switched_off.iter().for_each(|device| {
                let _ = fs::write(switch(device), "write back");
            });
            return;
        }
        switched_off.push(device);
    }
    panic!("none of {switched_off:?} came back");
}

#[test]
fn file_systems_hold_what_was_put_there() {
    let Some(_alone) = alone() else { return };
    for (kind, make, check) in FILE_SYSTEMS {
        let (place, _cleanup, arguments) = disk_of(SIZE);
        let server = place.start(&arguments);
        let device = attach(&server, &[]);
        run(make, &device);
        server.ask(&["detach", "disk"]);
        let (mounted, mount) = mount_point(&place);
        attach(&server, &[&mount]);
        let reference = place.path("reference");
        for into in [mounted.join("tree"), reference.clone()] {
            fs::create_dir_all(&into).expect("a directory can be made");
            unpack(&into);
        }
        fs::write(mounted.join("large"), noise(9, 40 << 20)).expect("it is written");
        let (tree, reference) = (mounted.join("tree"), reference.to_string_lossy().into_owned());
        // Read through the file system, then again from the disk.
        for round in 0..2 {
            client("diff", &["-r", &tree.to_string_lossy(), &reference]);
            let large = fs::read(mounted.join("large")).expect("it is there");
            assert!(large == noise(9, 40 << 20), "{kind}: round {round}");
            if round == 0 {
                server.ask(&["detach", "disk"]);
                attach(&server, &[&mount]);
            }
        }
        // Free space, as fstrim reports it; then only the disk is checked.
        fs::remove_file(mounted.join("large")).expect("it is there");
        client("sync", &[]);
        let _ = Command::new("fstrim").arg(&mounted).output();
        server.ask(&["detach", "disk"]);
        let device = attach(&server, &[]);
        run(check, &device);
        server.ask(&["detach", "disk"]);
        server.stop(&["--drain"]);
        // The primary alone is complete, too.
        run(check, &place.text("primary"));
    }
}

/// Creates files and makes them durable; the names are kept in a list outside of the volume.
fn flushed_files(directory: PathBuf, stop: std::sync::mpsc::Receiver<()>) -> Vec<(String, u64)> {
    let mut flushed = Vec::new();
    for seed in 0.. {
        let name = format!("file-{seed}");
        let write = || -> std::io::Result<()> {
            let mut file = fs::File::create(directory.join(&name))?;
            file.write_all(&file_content(seed))?;
            file.sync_all()?;
            fs::File::open(&directory)?.sync_all()
        };
        match write() {
            Ok(()) => flushed.push((name, seed)),
            Err(_) => break,
        }
        if stop.try_recv().is_ok() {
            break;
        }
    }
    flushed
}

#[test]
fn a_killed_server_loses_no_flushed_file() {
    let Some(_alone) = alone() else { return };
    for (kind, make, check) in FILE_SYSTEMS {
        let (place, _cleanup, arguments) = disk_of(SIZE);
        let mut server = place.start(&arguments);
        let device = attach(&server, &[]);
        run(make, &device);
        server.ask(&["detach", "disk"]);
        let (mounted, mount) = mount_point(&place);
        let mut all: Vec<(String, u64, String)> = Vec::new();
        for round in 0..2 {
            attach(&server, &[&mount]);
            let below = format!("round-{round}");
            let directory = mounted.join(&below);
            fs::create_dir_all(&directory).expect("a directory can be made");
            let (tell, hear) = std::sync::mpsc::channel();
            let writer = thread::spawn(move || flushed_files(directory, hear));
            thread::sleep(Duration::from_millis(1500));
            server.kill();
            // A file system may notice late: continue until it does.
            thread::sleep(Duration::from_millis(100));
            let _ = tell.send(());
            let flushed = writer.join().expect("the writer ends");
            assert!(flushed.len() > 3, "{kind}: {} files are no load", flushed.len());
            all.extend(flushed.into_iter().map(|(name, seed)| (below.clone(), seed, name)));
            server = place.start(&arguments);
            server.ask(&["detach", "disk"]);
            // The file system replays its journal, and is consistent afterwards.
            attach(&server, &[&mount]);
            for (below, seed, name) in &all {
                let path = mounted.join(below).join(name);
                let found = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                let expected = file_content(*seed);
                assert!(found == expected, "{kind}: {} is not whole", path.display());
            }
            server.ask(&["detach", "disk"]);
            let device = attach(&server, &[]);
            run(check, &device);
            server.ask(&["detach", "disk"]);
        }
        server.stop(&[]);
    }
}

#[test]
fn what_is_in_use_stays_and_is_named() {
    let Some(_alone) = alone() else { return };
    let (place, _cleanup, arguments) = disk_of(128 * MIB);
    let server = place.start(&arguments);
    let said = refused(&server, &["attach", "nothing"]);
    assert!(said.contains("\"nothing\"") || said.contains("nothing"), "{said}");
    assert!(said.contains("disk"), "it lists the volumes: {said}");
    assert!(refused(&server, &["detach", "disk"]).contains("not attached"));
    let said = refused(&server, &["attach", "disk", "--mount=/nowhere/at/all"]);
    assert!(said.contains("/nowhere/at/all"), "{said}");
    // There is nothing to mount yet: the failed command must leave nothing attached.
    let (mounted, mount) = mount_point(&place);
    let said = refused(&server, &["attach", "disk", &mount]);
    assert!(said.contains("make one"), "{said}");
    assert_eq!(server.status()["volumes"][0]["devices"], serde_json::json!([]));

    let device = attach(&server, &[]);
    let sectors = client("blockdev", &["--getss", &device]);
    assert_eq!(sectors.trim(), "4096", "a new disk has the sectors of the cache");
    assert_eq!(server.status()["volumes"][0]["devices"], serde_json::json!([device]));
    assert!(server.ask(&["status"]).contains(&device));
    assert!(refused(&server, &["attach", "disk"]).contains(&device));
    let said = refused(&server, &["stop"]);
    assert!(said.contains(&device) && said.contains("detach"), "{said}");
    // A process that had the disk open without a file system was not seen, and the disk was ended.
    let raw = fs::File::open(&device).expect("it is a disk");
    let said = refused(&server, &["detach", "disk"]);
    assert!(said.contains(&format!("is open in process {} (", std::process::id())), "{said}");
    assert_eq!(server.status()["volumes"][0]["devices"], serde_json::json!([device]));
    drop(raw);
    run(&["mkfs.ext4", "-q"], &device);
    client("mount", &[&device, &mounted.to_string_lossy()]);
    let said = refused(&server, &["attach", "disk"]);
    assert!(said.contains(&mounted.to_string_lossy().into_owned()), "{said}");
    let held = fs::File::create(mounted.join("held")).expect("it is made");
    let said = refused(&server, &["detach", "disk"]);
    assert!(said.contains("busy") && said.contains("stays attached"), "{said}");
    drop(held);
    let out: serde_json::Value =
        serde_json::from_str(&server.ask(&["detach", "disk", "--json"])).expect("it is JSON");
    assert_eq!(out[0]["device"], serde_json::json!(device));
    assert_eq!(out[0]["mounted"], serde_json::json!(mounted.to_string_lossy()));
    assert!(!Path::new(&device.replace("/dev/", "/sys/block/")).join("loop").exists());
    server.stop(&[]);
}

/// Writes a file without a flush, stops the server by a signal, starts another one, and reads the
/// file. Returns that server, and the device, which is attached and mounted as before.
fn stop_by_signal(
    place: &Place,
    server: Server,
    arguments: &[String],
    (mounted, mount): (&Path, &str),
) -> (Server, String) {
    fs::write(mounted.join("never-flushed"), noise(4, 3 << 20)).expect("it is written");
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    let server = place.start(arguments);
    server.ask(&["detach", "disk"]);
    let device = attach(&server, &[mount]);
    let found = fs::read(mounted.join("never-flushed")).expect("it is there");
    assert!(found == noise(4, 3 << 20));
    (server, device)
}

/// A signal stops the server although a file system is mounted; all data written to it, flushed or
/// not, is on the volume.
#[test]
fn a_signal_writes_back_what_mounted_file_systems_have() {
    let Some(_alone) = alone() else { return };
    let (place, _cleanup, arguments) = disk_of(128 * MIB);
    let server = place.start(&arguments);
    run(&["mkfs.ext4", "-q"], &attach(&server, &[]));
    server.ask(&["detach", "disk"]);
    let (mounted, mount) = mount_point(&place);
    attach(&server, &[&mount]);
    let (server, _) = stop_by_signal(&place, server, &arguments, (&mounted, &mount));
    server.ask(&["detach", "disk"]);
    server.stop(&[]);
}

/// A mounted btrfs has numbers that are no device's. It is seen all the same: written back at a
/// signal, named, and unmounted by `detach`, also if the disk is the second of its devices.
#[test]
fn a_mounted_btrfs_is_seen() {
    let Some(_alone) = alone() else { return };
    if !have(&["mkfs.btrfs", "btrfs"]) {
        return;
    }
    let (place, _cleanup, arguments) = disk_of(256 * MIB);
    let server = place.start(&arguments);
    let device = attach(&server, &[]);
    run(&["mkfs.btrfs", "-q"], &device);
    let (mounted, mount) = mount_point(&place);
    let shown = mounted.to_string_lossy().into_owned();
    let mounting = Command::new("mount").args([&device, &shown]).output().expect("it runs");
    if !mounting.status.success() {
        skip("this kernel has no btrfs");
        return;
    }
    let said = refused(&server, &["attach", "disk"]);
    assert!(said.contains(&shown), "{said}");
    run(&["btrfs", "-q", "subvolume", "create"], &mounted.join("sub").to_string_lossy());
    let again = place.path("again");
    fs::create_dir_all(&again).expect("a directory can be made");
    let again = again.to_string_lossy().into_owned();
    client("mount", &["-o", "subvol=sub", &device, &again]);
    let said = refused(&server, &["detach", "disk"]);
    assert!(said.contains("several places") && said.contains(&again), "{said}");
    client("umount", &[&again]);
    let out: serde_json::Value =
        serde_json::from_str(&server.ask(&["detach", "disk", "--json"])).expect("it is JSON");
    assert_eq!(out[0]["mounted"], serde_json::json!(shown));
    attach(&server, &[&mount]);
    let (server, device) = stop_by_signal(&place, server, &arguments, (&mounted, &mount));
    // The kernel names the first device of a file system as the source of its mount.
    client("umount", &[&shown]);
    place.make("first", 256 * MIB);
    let first = run(&["losetup", "--find", "--show"], &place.text("first")).trim().to_owned();
    client("mkfs.btrfs", &["-q", "-f", "-d", "raid0", &first, &device]);
    client("mount", &[&first, &shown]);
    let out: serde_json::Value =
        serde_json::from_str(&server.ask(&["detach", "disk", "--json"])).expect("it is JSON");
    client("losetup", &["-d", &first]);
    assert_eq!(out[0]["mounted"], serde_json::json!(shown));
    server.stop(&[]);
}

#[test]
fn without_files_or_root_nothing_is_attached() {
    let place = Place::new();
    place.make("primary", 8 * MIB);
    place.make("cache", 256 * MIB);
    let server = place.start(&place.serve("primary", "cache"));
    if can_mount() && !has_ublk() {
        let said = refused(&server, &["attach", "disk"]);
        assert!(said.contains("--fuse DIR"), "{said}");
        let said = refused(&server, &["detach", "disk"]);
        assert!(said.contains("--fuse DIR"), "{said}");
    }
    if can_mount() && have(&["setpriv"]) {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--clear-groups", env!("CARGO_BIN_EXE_forebay")]);
        let output = command.args(["attach", "disk"]).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // If the binary must not even be started, setpriv fails with another code.
        if output.status.code() != Some(126) && output.status.code() != Some(127) {
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains("needs root"), "{said}");
        }
    }
    let output = forebay(&["attach", "disk", "--control=/nowhere/forebay.sock"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("/nowhere/forebay.sock") || said.contains("root"), "{said}");
    server.stop(&[]);
}

/// Regression: `detach` said `detached`, with the exit code 0, although the primary's flush had
/// failed, or its reads failed.
#[test]
fn a_disk_that_has_lost_writes_stays_attached_and_says_so() {
    let Some(_alone) = alone() else { return };
    let place = Place::new();
    let _cleanup = Cleanup::of(&place, &[]);
    let san = San::start(&place.path("san.sock"), 64 << 20);
    let mut arguments = disk::serve(&place, "unused", &["--mode=write-around"]);
    arguments[1] = format!("--primary=nbd+unix:///?socket={}", place.text("san.sock"));
    let server = place.start(&arguments);
    let device = attach(&server, &[]);
    let from = format!("if={}", place.text("block"));
    // The server may have been slow, and have flushed on its own.
    let is_lost = |round: u64| {
        let block = noise(round, 4096);
        fs::write(place.path("block"), &block).expect("it is written");
        let to = format!("of={device}");
        client("dd", &[&from, &to, "bs=4096", "seek=100", "oflag=direct", "status=none"]);
        san.cut_power();
        san.durable(100 << 12, 4096) != block
    };
    assert!((0..20).any(is_lost), "the power never failed in time");
    let said = refused(&server, &["detach", "disk"]);
    assert!(said.contains("not all writes") && said.contains("stays attached"), "{said}");
    assert_eq!(server.status()["volumes"][0]["devices"], serde_json::json!([device]));
    server.ask(&["detach", "disk"]);
    server.stop(&[]);
}

/// Without ublk, a disk is made by FUSE, unless ublk is asked for by name.
#[test]
fn without_ublk_a_disk_is_a_loop_device() {
    let Some(_alone) = alone() else { return };
    if has_ublk() {
        skip("this kernel has ublk; tools/guest/ublk tests that");
        return;
    }
    let (place, _cleanup, arguments) = disk_of(128 * MIB);
    let server = place.start(&arguments);
    let said = refused(&server, &["attach", "disk", "--via=ublk"]);
    for word in ["disk", "/dev/ublk-control", "modprobe ublk_drv", "--via fuse"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert_eq!(server.status()["volumes"][0]["devices"], serde_json::json!([]));
    let out = server.ask(&["attach", "disk", "--json"]);
    let out: serde_json::Value = serde_json::from_str(&out).expect("it is JSON");
    assert_eq!(out["via"], "fuse");
    assert!(out["device"].as_str().expect("a path").starts_with("/dev/loop"), "{out}");
    server.ask(&["detach", "disk"]);
    server.stop(&[]);
}

/// Regression: `fstrim` does nothing where the server refuses large holes, and nobody said so: the
/// kernel keeps the refusal to itself.
#[test]
fn attach_says_where_a_loop_device_takes_no_discards() {
    let Some(_alone) = alone() else { return };
    let (place, _cleanup, _) = disk_of(64 * MIB);
    for (primary, takes) in [("primary?emulate=cloud", false), ("primary", true)] {
        let server = place.start(&disk::serve(&place, primary, &[]));
        let control = server.control_argument();
        let done = forebay(&["attach", "disk", "--via=fuse", &control]);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{said}");
        assert_eq!(!said.contains("takes no discards"), takes, "{said}");
        server.ask(&["detach", "disk"]);
        server.stop(&["--drain"]);
    }
}

/// A disk made for sectors of 512 bytes keeps them.
#[test]
fn small_sectors_stay_small() {
    let Some(_alone) = alone() else { return };
    let (place, _cleanup, arguments) = disk_of(128 * MIB);
    let server = place.start(&arguments);
    let path = disk::file(&place);
    client("mkfs.ext4", &["-q", "-F", "-b", "1024", &path.to_string_lossy()]);
    let (mounted, mount) = mount_point(&place);
    let device = attach(&server, &[&mount]);
    assert_eq!(client("blockdev", &["--getss", &device]).trim(), "512");
    fs::write(mounted.join("file"), "kept").expect("it is written");
    server.ask(&["detach", "disk"]);
    let mut start = [0; 2048];
    open(&path, 0).read_exact(&mut start).expect("it is read");
    assert_eq!(start[1080..1082], [0x53, 0xef]);
    server.stop(&[]);
}
