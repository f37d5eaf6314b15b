//! A server with a keeper is killed at any time: its clients see a pause and no error.

#[path = "support/disk.rs"]
mod disk;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use disk::{
    FILE_SYSTEMS, O_DSYNC, attach, can_attach, can_mount, disk_of, file_content, mount_point, open,
    run, write_files,
};
use support::nbd::Nbd;
use support::{Place, Server, client, noise, until};
use tools::have;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// One test at a time makes disks.
static DISKS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    DISKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills the server, and waits until the next one serves.
fn kill_and_wait(server: &Server) {
    let pid = server.kill_kept();
    until("another server", || {
        let status = status(server);
        status.is_some_and(|status| status["pid"] != pid && status["state"] == "serving")
    });
}

/// The status, if a server answers.
fn status(server: &Server) -> Option<serde_json::Value> {
    let control = server.control_argument();
    let output = support::forebay(&["status", "--json", &control]);
    serde_json::from_slice(&output.stdout).ok()
}

#[test]
fn file_systems_do_not_notice_that_the_server_dies() {
    let tools = ["mkfs.xfs", "xfs_repair", "mkfs.ext4", "e2fsck"];
    if !can_attach() || !have(&tools) {
        return;
    }
    let _alone = alone();
    for (kind, make, check) in FILE_SYSTEMS {
        let (place, _cleanup, arguments) = disk_of(512 * MIB);
        let server = place.start_kept(&arguments);
        let device = attach(&server, &[]);
        run(make, &device);
        let (mounted, _) = mount_point(&place);
        client("mount", &[&device, &mounted.to_string_lossy()]);
        let stop = Arc::new(AtomicBool::new(false));
        let writer = {
            let (mounted, stop) = (mounted.clone(), Arc::clone(&stop));
            thread::spawn(move || write_files(&mounted, &stop))
        };
        for round in 0..6 {
            thread::sleep(Duration::from_millis(150 + 170 * round));
            kill_and_wait(&server);
        }
        stop.store(true, Ordering::Relaxed);
        let count = writer.join().expect("no file saw an error");
        assert!(count > 20, "{kind}: {count} files are no load");
        client("umount", &[&mounted.to_string_lossy()]);
        client("mount", &[&device, &mounted.to_string_lossy()]);
        for number in 0..count {
            let found = fs::read(mounted.join(format!("file-{number}"))).expect("it is there");
            assert!(found == file_content(number), "{kind}: file {number}");
        }
        client("umount", &[&mounted.to_string_lossy()]);
        run(check, &device);
        server.ask(&["detach", "disk"]);
        server.stop(&[]);
    }
}

/// fio keeps requests under way at each kill, and verifies all that it reads.
#[test]
fn requests_under_way_are_done_by_the_next_server() {
    if !can_attach() || !have(&["fio"]) {
        return;
    }
    let _alone = alone();
    let (place, _cleanup, arguments) = disk_of(256 * MIB);
    let server = place.start_kept(&arguments);
    let device = attach(&server, &[]);
    let fio = Command::new("fio")
        .args(["--name=verified", "--direct=1", "--rw=randrw", "--bs=4k-64k", "--size=200M"])
        .args(["--ioengine=io_uring", "--iodepth=16", "--verify=crc32c", "--verify_backlog=64"])
        .args(["--fsync=50", "--time_based", "--runtime=14", "--output-format=json"])
        .arg(format!("--filename={device}"))
        .current_dir(place.path("."))
        .stdout(Stdio::piped())
        .spawn()
        .expect("fio runs");
    for round in 0..8 {
        thread::sleep(Duration::from_millis(400 + 130 * round));
        kill_and_wait(&server);
    }
    let output = fio.wait_with_output().expect("it is our child");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    let done: serde_json::Value = serde_json::from_str(&said).expect("fio prints JSON");
    let writes = done["jobs"][0]["write"]["total_ios"].as_u64();
    assert!(writes.is_some_and(|writes| writes > 1000), "{said}");
    server.ask(&["detach", "disk"]);
    server.stop(&[]);
}

/// What was opened before a kill works after it: a volume's file, and texts, which the next server
/// makes again.
#[test]
fn open_files_stay_open() {
    if !can_mount() {
        return;
    }
    let _alone = alone();
    let (place, _cleanup, arguments) = disk_of(64 * MIB);
    let server = place.start_kept(&arguments);
    let file = open(&disk::file(&place), O_DSYNC);
    let texts = place.path("volumes").join(".forebay");
    let mut text = fs::File::open(texts.join("status")).expect("a text");
    let mut before = [0; 8];
    text.read_exact(&mut before).expect("it is read");
    file.write_all_at(&noise(1, 70_000), 12_345).expect("it is written");
    kill_and_wait(&server);
    let mut found = vec![0; 70_000];
    file.read_exact_at(&mut found, 12_345).expect("it is read");
    assert!(found == noise(1, 70_000));
    file.write_all_at(&noise(2, 70_000), 12_345).expect("it is written");
    file.read_exact_at(&mut found, 12_345).expect("it is read");
    assert!(found == noise(2, 70_000));
    text.seek(SeekFrom::Start(0)).expect("a file");
    let mut again = String::new();
    text.read_to_string(&mut again).expect("it is read");
    assert_eq!(&again.as_bytes()[..8], before, "{again}");
    let fresh = fs::read_to_string(texts.join("metrics")).expect("it is read");
    assert!(fresh.contains("forebay_uptime_seconds"));
    drop((file, text));
    server.stop(&[]);
}

/// A client that connects while there is no server waits for the next one.
#[test]
fn clients_can_connect_while_there_is_no_server() {
    let (place, mut arguments) = Place::with_disk();
    arguments.push("--nbd=tcp:127.0.0.1:0".to_owned());
    let server = place.start_kept(&arguments);
    let port = server.port();
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it is served");
    nbd.write(0, &noise(3, 8192), false).expect("it is written");
    server.kill_kept();
    // Nobody has flushed: what was answered is in the log all the same.
    let mut found = vec![0; 8192];
    let mut next = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it waits");
    next.read(0, &mut found).expect("it is read");
    assert!(found == noise(3, 8192));
    let mut tcp = Nbd::connect_tcp(port, "disk").expect("the port stays");
    tcp.read(4096, &mut found[..4096]).expect("it is read");
    server.stop(&[]);
    assert!(!place.path("nbd.sock").exists(), "the socket goes with the last server");
}

/// A restart has the settings of the server that died, not those of a file that somebody edits.
#[test]
fn a_restart_does_not_read_the_configuration_again() {
    let (place, _) = Place::with_disk();
    let config = place.path("forebay.toml");
    let text = format!(
        "[cache]\npath = \"{}\"\nsize = \"32MiB\"\nstate_dir = \"{}\"\n[memory]\nram = \"4MiB\"\n\
         [control]\nsocket = \"{}\"\n[server]\nnbd = [\"unix:{}\"]\n\
         [[volume]]\nname = \"disk\"\nprimary = \"{}\"\n",
        place.text("cache.img"),
        place.text("state"),
        place.text("control.sock"),
        place.text("nbd.sock"),
        place.text("disk.img"),
    );
    fs::write(&config, &text).expect("it is written");
    let server = place.start_kept(&["serve".to_owned(), format!("--config={}", config.display())]);
    fs::write(&config, "[cache]\npath = half a").expect("it is written");
    kill_and_wait(&server);
    assert_eq!(server.status()["volumes"][0]["name"], "disk");
    server.stop(&[]);
}

/// Flags for one start are for one start: the next server must find what this one has written.
#[test]
fn a_restart_does_not_discard_the_cache_again() {
    let (place, mut arguments) = Place::with_disk();
    arguments.push("--reset-cache".to_owned());
    let server = place.start_kept(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it is served");
    nbd.write(4096, &noise(5, 4096), true).expect("it is written");
    kill_and_wait(&server);
    let mut found = vec![0; 4096];
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it is served");
    nbd.read(4096, &mut found).expect("it is read");
    assert!(found == noise(5, 4096));
    server.stop(&[]);
}

/// Regression: no server could start any more, and all clients were cut off.
#[test]
fn a_directory_that_was_unmounted_by_hand_is_mounted_by_the_next_server() {
    if !can_mount() {
        return;
    }
    let _alone = alone();
    let place = Place::new();
    let _cleanup = disk::Cleanup::of(&place, &[]);
    place.make("primary", 16 * MIB);
    fs::create_dir_all(place.path("volumes")).expect("a directory can be made");
    let mut arguments = place.serve("primary", "cache.img,size=32MiB");
    arguments.push(format!("--fuse={}", place.text("volumes")));
    let server = place.start_kept(&arguments);
    client("umount", &[&place.text("volumes")]);
    assert!(!disk::file(&place).exists());
    kill_and_wait(&server);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    nbd.read(0, &mut [0; BLOCK as usize]).expect("it is read");
    server.log("was unmounted while it was served");
    let file = open(&disk::file(&place), 0);
    file.write_all_at(&[7; BLOCK as usize], 0).expect("it is served again");
    drop(file);
    server.stop(&[]);
}

/// A server that does not start is tried again, and its clients wait.
#[test]
fn clients_wait_while_no_server_can_start() {
    if !can_mount() {
        return;
    }
    let _alone = alone();
    let (place, _cleanup, arguments) = disk_of(64 * MIB);
    let server = place.start_kept(&arguments);
    let file = open(&disk::file(&place), 0);
    let (primary, away) = (place.path("primary"), place.path("away"));
    fs::rename(&primary, &away).expect("it is there");
    server.kill_kept();
    let reader = thread::spawn(move || {
        let mut block = [1; BLOCK as usize];
        file.read_exact_at(&mut block, 0).map(|()| block)
    });
    server.log("the server does not start");
    assert!(!reader.is_finished());
    fs::rename(&away, &primary).expect("it is there");
    let block = reader.join().expect("it ends").expect("no error");
    assert_eq!(block, [0; BLOCK as usize]);
    server.log("serves again");
    server.stop(&[]);
}

/// A log on a full file system, or whose reader was gone, ended server and keeper: the failure was
/// reported on the same standard error, with a panic.
#[test]
fn a_log_that_cannot_be_written_ends_no_service() {
    let full = || Stdio::from(fs::File::create("/dev/full").expect("every Linux has it"));
    let closed = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        Stdio::from(writer)
    };
    for log in [full(), closed()] {
        let (place, arguments) = Place::with_disk();
        let server = place.start_kept_logging(&arguments, log);
        let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
        nbd.write(0, &noise(1, 1 << 20), true).expect("it is written");
        kill_and_wait(&server);
        let mut found = vec![0; 1 << 20];
        let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
        nbd.read(0, &mut found).expect("it is read");
        assert!(found == noise(1, 1 << 20));
        server.stop(&["--drain"]);
    }
    // Nor is a refused start a crash.
    let (place, mut arguments) = Place::with_disk();
    arguments[1] = format!("--primary={}", place.text("absent.img"));
    for log in [full(), closed()] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(&arguments).stdout(Stdio::null()).stderr(log);
        let ended = command.status().expect("the binary runs");
        assert_eq!(ended.code(), Some(1), "{ended}");
    }
}

#[test]
fn a_signal_to_the_keeper_stops_the_server_in_order() {
    let (place, arguments) = Place::with_disk();
    for signal in ["TERM", "INT"] {
        let server = place.start_kept(&arguments);
        let status = server.status();
        assert_eq!(status["keeper_pid"], server.id());
        assert_ne!(status["pid"], server.id());
        server.signal("HUP");
        server.log("SIGHUP is ignored");
        server.signal(signal);
        assert_eq!(server.wait(), Some(0));
    }
    // A service manager may signal both: that is one stop in order, not two signals.
    let server = place.start_kept(&arguments);
    let pid = server.status()["pid"].to_string();
    client("kill", &["-s", "TERM", &pid, &server.id().to_string()]);
    server.log("stopped");
    assert_eq!(server.wait(), Some(0));
    // Without a keeper, the process is the server.
    let server = place.start(&arguments);
    let status = server.status();
    assert_eq!(status["pid"], server.id());
    assert_eq!(status["keeper_pid"], serde_json::Value::Null);
    server.stop(&[]);
}

/// The keeper's exit code is the server's, and the server says why.
#[test]
fn a_start_that_fails_ends_the_keeper() {
    let (place, arguments) = Place::with_disk();
    let mut wrong = arguments.clone();
    wrong.push("--dirty-limit=100%".to_owned());
    for (arguments, code, said) in [(wrong, 2, "90%"), (arguments, 1, "disk.img")] {
        fs::remove_file(place.path("disk.img")).ok();
        let output = support::forebay(&arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert_eq!(
            error.matches("forebay: ").count() + error.matches("error: ").count(),
            1,
            "{error}"
        );
        assert!(error.contains(said), "{error}");
    }
}

/// A server whose keeper is killed serves on, and says so.
#[test]
fn a_server_outlives_its_keeper() {
    let (place, arguments) = Place::with_disk();
    let server = place.start_kept(&arguments);
    let pid = server.status()["pid"].as_u64().expect("a number");
    server.signal("KILL");
    until("the keeper is gone", || {
        status(&server).is_some_and(|status| status["keeper_pid"].is_null())
    });
    let text = server.ask(&["status"]);
    assert!(text.contains("the keeper is gone"), "{text}");
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it is served");
    nbd.write(0, &noise(6, 4096), true).expect("it is written");
    server.ask(&["stop"]);
    until("the server ends", || !PathBuf::from(format!("/proc/{pid}")).exists());
}

#[test]
fn what_is_no_keeper_is_refused() {
    let (_place, mut arguments) = Place::with_disk();
    arguments.push("--kept".to_owned());
    let output = support::forebay(&arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("--kept"), "{error}");
}
