//! Another program takes over from a server: its clients see a pause and no error, and a program
//! that cannot leaves all as it was.

#[path = "support/disk.rs"]
mod disk;
mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use disk::{attach, can_attach, can_mount, disk_of, mount_point, open, run, write_files};
use forebay_bench::rig::san::San;
use support::nbd::Nbd;
use support::{Place, Server, client, noise, until};
use tools::have;

const MIB: u64 = 1 << 20;
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// One test at a time makes disks.
static DISKS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    DISKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Another build: a copy of the program.
fn another_build(place: &Place) -> PathBuf {
    let bytes = fs::read(own()).expect("it is there");
    program(place, "forebay-next", &bytes)
}

fn own() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_forebay"))
}

/// The program that serves, if one does.
fn serving(server: &Server) -> Option<PathBuf> {
    let control = server.control_argument();
    let said = support::forebay(&["status", "--json", &control]).stdout;
    let status: serde_json::Value = serde_json::from_slice(&said).ok()?;
    fs::read_link(format!("/proc/{}/exe", status["pid"])).ok()
}

/// Makes an executable file.
fn program(place: &Place, name: &str, content: &[u8]) -> PathBuf {
    let path = place.path(name);
    let mut file = fs::File::create(&path).expect("it is made");
    file.write_all(content).expect("it is written");
    file.set_permissions(fs::Permissions::from_mode(0o755)).expect("it is ours");
    path
}

/// Upgrades, which must succeed.
fn upgrade(server: &Server, program: &Path) -> String {
    server.ask(&["upgrade", &program.to_string_lossy()])
}

/// Tries to upgrade; returns the error. The server before must serve.
fn refused(server: &Server, program: &Path) -> String {
    let control = server.control_argument();
    let output = support::forebay(&["upgrade", &program.to_string_lossy(), &control]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(serving(server).as_deref(), Some(own()));
    assert_eq!(server.status()["state"], "serving");
    said
}

/// Regression: an upgrade that was begun during the drain of a stop was accepted, and never ended:
/// its command waited for a server that was gone.
#[test]
fn a_server_that_is_stopping_refuses_to_be_upgraded() {
    let (place, mut arguments) = Place::with_disk();
    arguments[1] += "?delay=1s";
    let server = place.start_kept(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    nbd.write(0, &[7; 4096], true).expect("it is written");
    let control = server.control_argument();
    let stop = thread::spawn(move || support::forebay(&["stop", "--drain", &control]));
    until("it is stopping", || server.status()["state"] == "stopping");
    let output =
        support::forebay(&["upgrade", &own().to_string_lossy(), &server.control_argument()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the server is stopping"), "{said}");
    assert_eq!(stop.join().expect("it ends").status.code(), Some(0));
    assert_eq!(server.wait(), Some(0));
}

/// A program that takes this many seconds to begin with its checks, and writes its process id to
/// the file `pid` first.
fn slow_program(place: &Place, seconds: u32) -> PathBuf {
    let (pid, own) = (place.text("pid"), own().display());
    let sleep = format!("sleep {seconds} < /dev/null > /dev/null 2>&1");
    let text = format!("#!/bin/sh\necho $$ > {pid}\n{sleep}\nexec {own} \"$@\"\n");
    program(place, "slow", text.as_bytes())
}

/// Begins an upgrade to this program, and waits until it runs; returns its process id.
fn begin(server: &Server, place: &Place, program: &Path) -> (thread::JoinHandle<Output>, String) {
    let (program, control) = (program.to_string_lossy().into_owned(), server.control_argument());
    let upgrade = thread::spawn(move || support::forebay(&["upgrade", &program, &control]));
    let pid = || fs::read_to_string(place.path("pid")).unwrap_or_default();
    until("the program runs", || pid().ends_with('\n'));
    (upgrade, pid().trim().to_owned())
}

/// Regression: the next program was ready during the drain of a stop, and 20 seconds later the
/// server was killed, since it had not left.
#[test]
fn a_stop_while_the_next_program_checks_ends_that_program() {
    let (place, mut arguments) = Place::with_disk();
    arguments[1] += "?delay=1s";
    let server = place.start_kept(&arguments);
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it serves");
    nbd.write(0, &[7; 4096], true).expect("it is written");
    let (upgrade, pid) = begin(&server, &place, &slow_program(&place, 30));
    let control = server.control_argument();
    let stop = thread::spawn(move || support::forebay(&["stop", "--drain", &control]));
    until("it is stopping", || server.status()["state"] == "stopping");
    until("the program is ended", || !Path::new(&format!("/proc/{pid}")).exists());
    assert_eq!(server.status()["state"], "stopping", "it drains");
    let output = upgrade.join().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("the server is stopping"), "{said}");
    assert_eq!(stop.join().expect("it ends").status.code(), Some(0));
    assert_eq!(server.wait(), Some(0));
}

/// Regression: a configuration that came into force while the next program checked was lost: that
/// program had read the file of before. What is set stays in force.
#[test]
fn a_file_is_not_applied_during_an_upgrade_and_a_setting_stays() {
    let (place, _) = Place::with_disk();
    let config = place.configure("dirty_limit = \"40%\"");
    let server = place.start_kept(&["serve".to_owned(), format!("--config={config}")]);
    let (upgrade, _) = begin(&server, &place, &slow_program(&place, 3));
    place.configure("dirty_limit = \"50%\"");
    let control = server.control_argument();
    let output = support::forebay(&["apply", &config, &control]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("an upgrade is under way"), "{said}");
    server.ask(&["set", "write_cache_depth=7s"]);
    assert_eq!(upgrade.join().expect("it ends").status.code(), Some(0));
    assert_eq!(server.shown(None, "write_cache_depth"), ("7s".to_owned(), "set".to_owned()));
    server.ask(&["apply", &config]);
    assert_eq!(server.shown(None, "dirty_limit").0, "50%");
    server.stop(&[]);
}

#[test]
fn a_file_system_does_not_notice_an_upgrade() {
    if !can_attach() || !have(&["mkfs.xfs", "xfs_repair"]) {
        return;
    }
    let _alone = alone();
    let (place, _cleanup, arguments) = disk_of(512 * MIB);
    let server = place.start_kept(&arguments);
    let device = attach(&server, &[]);
    run(&["mkfs.xfs", "-q"], &device);
    let (mounted, _) = mount_point(&place);
    client("mount", &[&device, &mounted.to_string_lossy()]);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (mounted, stop) = (mounted.clone(), Arc::clone(&stop));
        thread::spawn(move || write_files(&mounted, &stop))
    };
    let next = another_build(&place);
    let keeper = server.status()["keeper_pid"].clone();
    for round in 0..6 {
        thread::sleep(Duration::from_millis(300));
        let program = if round % 2 == 0 { &*next } else { own() };
        let pid = server.status()["pid"].clone();
        let said = upgrade(&server, program);
        assert!(
            said.contains(&format!("upgraded to version {VERSION}: clients waited 0.")),
            "{said}"
        );
        let status = server.status();
        assert_eq!(serving(&server).as_deref(), Some(program));
        assert_eq!(status["keeper_pid"], keeper);
        assert_ne!(status["pid"], pid);
    }
    stop.store(true, Ordering::Relaxed);
    let count = writer.join().expect("no file saw an error");
    assert!(count > 20, "{count} files are no load");
    client("umount", &[&mounted.to_string_lossy()]);
    run(&["xfs_repair", "-n"], &device);
    server.ask(&["detach", "disk"]);
    server.stop(&[]);
}

/// A program that cannot take over leaves the server as it was.
#[test]
fn a_program_that_cannot_take_over_changes_nothing() {
    let (place, arguments) = Place::with_disk();
    let server = place.start_kept(&arguments);
    let pid = server.status()["pid"].clone();
    let mut nbd = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it is served");
    nbd.write(0, &noise(3, 8192), true).expect("it is written");
    let script = |name: &str, text: &str| program(&place, name, text.as_bytes());
    let cases = [
        (
            script("ends", "#!/bin/sh\nexit 3\n"),
            "exit code 3 without a word; it is perhaps no program",
        ),
        (script("panics", "#!/bin/sh\nkill -ABRT $$\n"), "SIGABRT"),
        (script("talks", "#!/bin/sh\necho nonsense >&0\nsleep 60\n"), "expected"),
        (program(&place, "garbage", &noise(1, 4096)), "Exec format error"),
        (place.path("absent"), "No such file"),
        (place.path("disk.img"), "is no program"),
        (place.path("."), "is no program"),
    ];
    for (program, why) in cases {
        let said = refused(&server, &program);
        assert!(said.contains(why), "{}: {said}", program.display());
    }
    let open_to_all = script("open", "#!/bin/sh\n");
    fs::set_permissions(&open_to_all, fs::Permissions::from_mode(0o777)).expect("it is ours");
    let said = refused(&server, &open_to_all);
    assert!(said.contains("others may write it"), "{said}");
    assert_eq!(server.status()["pid"], pid, "the same server serves");
    let mut found = vec![0; 8192];
    nbd.read(0, &mut found).expect("its connections are those of before");
    assert!(found == noise(3, 8192));
    server.stop(&[]);

    let server = place.start(&arguments);
    let said = refused(&server, own());
    assert!(said.contains("has no keeper"), "{said}");
    server.stop(&[]);
}

/// The configuration is read again; one that is wrong, or cannot be served, is refused.
#[test]
fn a_configuration_that_cannot_be_served_is_refused() {
    let (place, _) = Place::with_disk();
    let config = place.path("forebay.toml");
    let text = |ram: &str, nbd: &str, more: &str| {
        format!(
            "[cache]\npath = \"{}\"\nsize = \"32MiB\"\nstate_dir = \"{}\"\n[memory]\nram = \
             \"{ram}\"\n[control]\nsocket = \"{}\"\n[server]\nnbd = [{nbd}]\n\
             [[volume]]\nname = \"disk\"\nprimary = \"{}\"\n{more}",
            place.text("cache.img"),
            place.text("state"),
            place.text("control.sock"),
            place.text("disk.img"),
        )
    };
    let write = |text: &str| fs::write(&config, text).expect("it is written");
    let unix = format!("\"unix:{}\"", place.text("nbd.sock"));
    write(&text("4MiB", &unix, ""));
    let server = place.start_kept(&["serve".to_owned(), format!("--config={}", config.display())]);
    let ram = |server: &Server| {
        let all = server.status()["settings"].clone();
        let all = all.as_array().expect("a list").clone();
        let found = all.into_iter().find(|one| one["name"] == "ram").expect("it is listed");
        found["value"].clone()
    };
    let pid = server.status()["pid"].clone();
    write("[cache]\npath = half a");
    assert!(refused(&server, own()).contains("forebay.toml"));
    write(&text("4MiB", &unix, "").replace("name = \"disk\"", "name = \"other\""));
    let said = refused(&server, own());
    assert!(said.contains("volume disk is served, and no longer configured"), "{said}");
    assert_eq!(server.status()["pid"], pid, "the same server serves");

    // This one shows only when the sockets are bound: then the program before comes back.
    write(&text("8MiB", &format!("{unix}, \"unix:/nowhere/at.sock\""), ""));
    let said = refused(&server, own());
    assert!(said.contains("it did not serve"), "{said}");
    assert_ne!(server.status()["pid"], pid);
    assert_eq!(ram(&server), "4MiB", "it has its own configuration");

    // The sockets are found whatever their order.
    let second = format!("\"unix:{}\"", place.text("second.sock"));
    for both in [format!("{unix}, {second}"), format!("{second}, {unix}")] {
        write(&text("4MiB", &both, ""));
        upgrade(&server, own());
        for name in ["nbd.sock", "second.sock"] {
            Nbd::connect(&place.path(name), "disk").expect("it is served");
        }
    }
    write(&text("8MiB", &unix, ""));
    upgrade(&server, own());
    assert_eq!(ram(&server), "8MiB");
    // A death so soon is blamed on the upgrade: program and configuration are those of before.
    server.kill_kept();
    until("another server", || serving(&server).is_some());
    assert_eq!(ram(&server), "4MiB");
    server.stop(&[]);
    assert!(!place.path("nbd.sock").exists() && !place.path("control.sock").exists());
}

/// A program that dies soon after it took over is replaced by the one before it.
#[test]
fn the_program_before_comes_back_if_the_next_one_dies() {
    if !can_mount() {
        return;
    }
    let _alone = alone();
    let (place, _cleanup, arguments) = disk_of(64 * MIB);
    let server = place.start_kept(&arguments);
    let file = open(&disk::file(&place), 0);
    file.write_all_at(&noise(7, 70_000), 4096).expect("it is written");
    let next = another_build(&place);
    let text = format!("#!/bin/sh\n(sleep 2; kill -9 $$) &\nexec {} \"$@\"\n", next.display());
    let dies = program(&place, "dies", text.as_bytes());
    upgrade(&server, &dies);
    server.log("back to the one before it");
    until("the program before", || serving(&server).as_deref() == Some(own()));
    let mut found = vec![0; 70_000];
    file.read_exact_at(&mut found, 4096).expect("it is read");
    assert!(found == noise(7, 70_000));
    drop(file);
    server.stop(&[]);
}

/// Writes are held back near the dirty limit while the primary does not answer. A server that
/// leaves cannot finish them in time; it answered them with an error, so that a file system failed.
#[test]
fn writes_that_wait_for_the_primary_are_left_to_the_next_program() {
    if !can_mount() {
        return;
    }
    const PIECE: u64 = MIB;
    let _alone = alone();
    let (place, _cleanup, mut arguments) = disk_of(64 * MIB);
    let san = San::start(&place.path("san.sock"), 64 << 20);
    let primary = format!("--primary=nbd+unix:///?socket={}", place.text("san.sock"));
    let cache = format!("--cache={},size=32MiB", place.text("small"));
    arguments.retain(|one| !one.starts_with("--primary") && !one.starts_with("--cache"));
    arguments.extend([primary, cache]);
    let server = place.start_kept(&arguments);
    let file = open(&disk::file(&place), 0);
    let frozen = thread::spawn(move || san.freeze(Duration::from_secs(9)));
    thread::sleep(Duration::from_millis(200));
    let writers: Vec<_> = (0..48)
        .map(|at| {
            let file = file.try_clone().expect("a descriptor");
            thread::spawn(move || file.write_all_at(&noise(at, PIECE as usize), at * PIECE))
        })
        .collect();
    thread::sleep(Duration::from_secs(2));
    assert!(!writers.iter().all(thread::JoinHandle::is_finished), "no write waits");
    upgrade(&server, &another_build(&place));
    eprintln!("{}", server.log("upgraded: this"));
    frozen.join().expect("it answers again");
    for writer in writers {
        writer.join().expect("it ends").expect("no write fails");
    }
    let mut found = vec![0; PIECE as usize];
    for at in 0..48 {
        file.read_exact_at(&mut found, at * PIECE).expect("it is read");
        assert!(found == noise(at, PIECE as usize), "piece {at}");
    }
    drop(file);
    server.stop(&[]);
}

/// A client keeps its connection: requests that it has sent in part, or sends meanwhile, are
/// answered by the next server.
#[test]
fn connections_are_handed_over() {
    let (place, mut arguments) = Place::with_disk();
    arguments.push("--nbd=tcp:127.0.0.1:0".to_owned());
    let server = place.start_kept(&arguments);
    let mut unix = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it is served");
    let mut tcp = Nbd::connect_tcp(server.port(), "disk").expect("it is served");
    let mut idle = Nbd::connect(&place.path("nbd.sock"), "disk").expect("it is served");
    let data = noise(4, 1 << 20);
    unix.begin_write(4096, 1 << 20, &data[..300_000]).expect("it is sent");
    let sender = {
        let (mut twin, rest) = (unix.twin().expect("a socket"), data[300_000..].to_vec());
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            twin.send_raw(&rest).expect("it is sent");
        })
    };
    tcp.write(2 << 20, &noise(5, 8192), false).expect("it is written");
    upgrade(&server, &another_build(&place));
    sender.join().expect("it has sent");
    unix.finish(&mut []).expect("the write is answered");
    let mut found = vec![0; 1 << 20];
    tcp.read(4096, &mut found).expect("it is read");
    assert!(found == data);
    idle.read(2 << 20, &mut found[..8192]).expect("it is read");
    assert!(found[..8192] == noise(5, 8192));
    assert_eq!(server.status()["clients"], 3);
    idle.flush().expect("it is durable");
    server.stop(&[]);
}

/// fio keeps requests under way over NBD, and verifies all that it reads.
#[test]
fn clients_under_load_do_not_notice_upgrades() {
    if !have(&["fio"]) {
        return;
    }
    let (place, arguments) = Place::with_disk();
    let server = place.start_kept(&arguments);
    let next = another_build(&place);
    let fio = Command::new("fio")
        .args(["--name=verified", "--rw=randrw", "--bsrange=512-256k", "--size=48M"])
        .args(["--ioengine=nbd", "--iodepth=16", "--verify=crc32c", "--verify_backlog=64"])
        .args(["--fsync=50", "--time_based", "--runtime=8", "--output-format=json"])
        .arg(format!("--uri={}", place.uri()))
        .current_dir(place.path("."))
        .stdout(Stdio::piped())
        .spawn()
        .expect("fio runs");
    for round in 0..10 {
        thread::sleep(Duration::from_millis(200 + 37 * round));
        upgrade(&server, if round % 2 == 0 { &next } else { own() });
    }
    let output = fio.wait_with_output().expect("it is our child");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    let json = said.find('{').map_or("", |at| &said[at..]);
    let done: serde_json::Value = serde_json::from_str(json).expect("fio prints JSON");
    let writes = done["jobs"][0]["write"]["total_ios"].as_u64();
    assert!(writes.is_some_and(|writes| writes > 200), "{said}");
    server.stop(&[]);
}
