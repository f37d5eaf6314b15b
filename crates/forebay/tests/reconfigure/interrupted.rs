//! Changes that do not come to their end: a server, a keeper or both end, or the file is edited.

use super::*;

/// Begins to apply the plan, and waits until it is on record: the keeper, which has stopped, never
/// learns of it. Returns the server's process id.
fn apply_half(plan: &Plan, server: &Server) -> (Child, String) {
    let pid = server.status()["pid"].to_string();
    server.signal("STOP");
    let mut apply = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let apply = apply.args(["apply", &plan.write(), &server.control_argument()]);
    let apply = apply.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs");
    until("it is on record", || plan.on_record(".applying").is_some());
    (apply, pid)
}

/// The same, and then a signal ends the server, and its keeper is killed.
fn applied_half(plan: &Plan, server: Server, signal: &str) {
    let (mut apply, _) = apply_half(plan, &server);
    end_both(server, signal);
    let _ = apply.kill();
    apply.wait().expect("it is our child");
}

/// Ends a server with this signal, and then its keeper, which does not see that.
fn end_both(server: Server, signal: &str) {
    let pid = server.status()["pid"].to_string();
    server.signal("STOP");
    client("kill", &["-s", signal, &pid]);
    let stat = format!("/proc/{pid}/stat");
    let ended = || fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") Z "));
    until("the server has ended", ended);
    server.kill();
    // The first thread may be the first to end.
    until("all of the server has ended", || !Path::new(&format!("/proc/{pid}")).exists());
}

/// A power failure, or a stop, after an apply that makes a new cache was on record and before the
/// old cache was given up: each later start refused to serve, and told to apply it once more.
#[test]
fn a_start_after_an_interrupted_apply_serves_the_cache_of_before() {
    let mut plan = Plan::new(&["a"]);
    let path = plan.place.text("cache.img");
    let cache = |size: &str, more: &str| format!("path = {path:?}\nsize = {size:?}\n{more}");
    plan.cache = cache("64MiB", "");
    let mut server = plan.start();
    let cases = [
        ("KILL", cache("64MiB", "log_share = \"20%\"")),
        ("TERM", cache("64MiB", "log_share = \"30%\"")),
        ("KILL", cache("96MiB", "log_share = \"30%\"")),
        ("TERM", cache("48MiB", "log_share = \"30%\"")),
    ];
    for (round, (signal, cache)) in (0..).zip(cases) {
        plan.connect("a").write(0, &noise(round, 6 << 20), true).expect("it is written");
        plan.cache = cache;
        applied_half(&plan, server, signal);
        server = plan.start();
        server.log("apply it once more");
        plan.is_over();
        assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == noise(round, 6 << 20), "{round}");
        plan.apply(&server);
        assert_eq!(server.ask(&["apply", &plan.file()]), "nothing differs\n");
        assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == noise(round, 6 << 20), "{round}");
    }
    server.stop(&[]);
}

/// Regression: the same during the drain, which takes hours with a large cache and a slow primary:
/// the next start found a cache of another size than its file says, and refused to serve.
#[test]
fn a_start_after_a_stop_during_the_drain_of_an_apply_serves_the_cache_of_before() {
    let mut plan = Plan::new(&["a"]);
    let path = plan.place.text("cache.img");
    let cache = |size: &str| {
        let depth = "write_cache_depth = \"1h\"\nidle_destage = \"0s\"\nlog_share = \"30%\"";
        format!("path = {path:?}\nsize = {size:?}\n{depth}")
    };
    plan.cache = cache("64MiB");
    plan.volumes[0].1 = "a?delay=200ms";
    let server = plan.start();
    let mut a = plan.connect("a");
    // No two are destaged together.
    for offset in (0..2000).map(|at| at * 2 * 4096) {
        a.write(offset, &noise(offset, 4096), false).expect("it is written");
    }
    plan.cache = cache("96MiB");
    let mut apply = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let apply = apply.args(["apply", &plan.write(), &server.control_argument()]);
    let apply = apply.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it runs");
    until("the drain", || volumes(&server)[0].2 == "write-around");
    server.stop(&[]);
    let output = apply.wait_with_output().expect("it is our child");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("the server is stopping") && !said.contains("serves on"), "{said}");
    let server = plan.start();
    server.log("apply it once more");
    assert!(read(&mut plan.connect("a"), 0, 4096) == noise(0, 4096));
    plan.apply(&server);
    assert_eq!(server.ask(&["apply", &plan.file()]), "nothing differs\n");
    server.stop(&[]);
}

/// On another device the new cache has none of the dirty blocks: the start is refused, and does
/// what it takes to go on.
#[test]
fn a_start_after_an_interrupted_apply_to_another_device_says_how_to_go_on() {
    let mut plan = Plan::new(&["a"]);
    let before = plan.cache.clone();
    let server = plan.start();
    plan.connect("a").write(0, &noise(1, 6 << 20), true).expect("it is written");
    plan.cache = before.replace("cache.img", "second.img");
    applied_half(&plan, server, "KILL");
    let said = plan.place.refuse(&["serve".to_owned(), format!("--config={}", plan.write())]);
    assert!(said.contains("the last configuration-*.toml in the state directory"), "{said}");
    assert!(!plan.place.path("second.img").exists());
    let names = fs::read_dir(plan.place.path("state")).expect("it is there");
    let names = names.map(|entry| entry.expect("an entry").path());
    let kept = names.filter(|path| path.to_string_lossy().contains("/configuration-")).max();
    fs::copy(kept.expect("one is kept"), plan.file()).expect("it is copied");
    let serve = ["serve".to_owned(), format!("--config={}", plan.file())];
    let server = plan.place.start_kept(&serve);
    assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == noise(1, 6 << 20));
    plan.apply(&server);
    assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == noise(1, 6 << 20));
    server.stop(&[]);
}

/// A server whose keeper was killed while it applied a file wrote around the cache for good, and
/// took no other change: it waited for an answer of the keeper.
#[test]
fn a_server_whose_keeper_dies_during_an_apply_goes_on_as_before() {
    let mut plan = Plan::new(&["a"]);
    let server = plan.start();
    let mut a = plan.connect("a");
    plan.cache += "\nlog_share = \"20%\"";
    let (mut apply, pid) = apply_half(&plan, &server);
    assert_eq!(volumes(&server)[0].2, "write-around");
    server.signal("KILL");
    assert!(!apply.wait().expect("it is our child").success());
    server.log("no hand-over: the keeper is gone");
    until("it serves as before", || volumes(&server)[0].2 == "write-back");
    plan.is_over();
    server.ask(&["set", "dirty_limit=40%"]);
    a.write(0, &noise(1, 6 << 20), true).expect("it is written");
    assert_ne!(server.status()["dirty_bytes"], 0);
    assert!(plan.refused(&server).contains("the keeper is gone"));
    assert_eq!(server.status()["pid"].to_string(), pid);
    server.ask(&["stop"]);
    until("the server ends", || !Path::new(&format!("/proc/{pid}")).exists());
}

/// The file was compared only before the drain. If it was edited meanwhile, the cache was given up,
/// and the next server knew nothing of the apply.
#[test]
fn a_file_that_is_edited_during_the_drain_is_not_applied() {
    let mut plan = Plan::new(&["a"]);
    let socket = plan.place.path("san.sock");
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["--foreground", "--unix", &socket.to_string_lossy(), "--filter=delay", "file"]);
    nbdkit.arg(plan.place.path("a")).arg("wdelay=3");
    let mut nbdkit = nbdkit.spawn().expect("nbdkit runs (make setup)");
    until("nbdkit listens", || UnixStream::connect(&socket).is_ok());
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    plan.volumes = vec![("a", uri.leak(), "")];
    plan.cache += "\nwrite_cache_depth = \"1h\"\nidle_destage = \"0s\"";
    let server = plan.start();
    let mut a = plan.connect("a");
    a.write(0, &noise(1, 65536), true).expect("it is written");

    plan.cache += "\nlog_share = \"20%\"";
    let mut apply = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let apply = apply.args(["apply", &plan.write(), &server.control_argument()]);
    let apply = apply.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it runs");
    until("the drain", || volumes(&server)[0].2 == "write-around");
    let pid = server.status()["pid"].clone();
    let text = fs::read_to_string(plan.file()).expect("it is there");
    fs::write(plan.file(), text + "# edited\n").expect("it can be written");
    let output = apply.wait_with_output().expect("it is our child");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("changed while it was applied"), "{said}");
    until("it serves as before", || volumes(&server)[0].2 == "write-back");
    plan.is_over();
    assert_eq!(server.status()["pid"], pid);
    plan.apply(&server);
    assert!(read(&mut a, 0, 65536) == noise(1, 65536));
    server.stop(&[]);
    nbdkit.kill().expect("it is our child");
    nbdkit.wait().expect("it is our child");
}

/// A server that dies there has the same configuration when the keeper starts it again, if the
/// apply was to divide the cache as the file has always said.
#[test]
fn a_restart_after_an_interrupted_apply_of_the_same_file_serves() {
    let mut plan = Plan::new(&["a"]);
    let usual = plan.cache.clone();
    plan.cache = format!("{usual}\nlog_share = \"100%\"");
    let server = plan.start();
    plan.connect("a").write(0, &noise(1, 6 << 20), true).expect("it is written");
    server.stop(&[]);
    plan.cache = usual;
    let server = plan.start();
    let (mut apply, pid) = apply_half(&plan, &server);
    client("kill", &["-s", "KILL", &pid]);
    server.signal("CONT");
    // The server may have died before it asked the keeper: then there is no outcome to wait for.
    let _ = apply.kill();
    apply.wait().expect("it is our child");
    server.log("the server serves again");
    assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == noise(1, 6 << 20));
    plan.apply(&server);
    server.stop(&[]);
}

/// A power failure when the new cache is made, and its server has not noted that it is.
#[test]
fn a_start_after_an_apply_that_was_done_but_for_its_record_serves_the_new_cache() {
    let mut plan = Plan::new(&["a"]);
    plan.cache += "\nlog_share = \"100%\"";
    let server = plan.start();
    plan.connect("a").write(0, &noise(1, 6 << 20), true).expect("it is written");
    plan.cache = plan.cache.replace("100%", "20%").replace("64MiB", "96MiB");
    let (mut apply, _) = apply_half(&plan, &server);
    let record = plan.on_record(".applying").expect("it is on record");
    let aside = plan.place.path("applying");
    fs::copy(&record, &aside).expect("it is copied");
    server.signal("CONT");
    assert!(apply.wait().expect("it is our child").success());
    end_both(server, "KILL");
    fs::copy(&aside, &record).expect("it is copied");
    let server = plan.start();
    assert_eq!(server.status()["cache"]["device_size"], 96 * MIB);
    assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == noise(1, 6 << 20));
    assert_eq!(server.ask(&["apply", &plan.file()]), "nothing differs\n");
    plan.is_over();
    server.stop(&[]);
}

/// The starts that the superblocks of a cache are of, by its id.
fn starts(cache: &Path) -> Vec<([u8; 16], u32)> {
    let Ok(file) = fs::File::open(cache) else { return Vec::new() };
    let copies = forebay_format::SUPERBLOCK_OFFSETS.map(|offset| {
        let mut bytes = vec![0; forebay_format::SUPERBLOCK_BYTES];
        file.read_exact_at(&mut bytes, offset).ok()?;
        forebay_format::Superblock::decode(&bytes).ok().map(|found| (found.uuid, found.epoch))
    });
    copies.into_iter().flatten().collect()
}

/// Kills the server after the one with the id `before` as soon as a superblock of this cache is of
/// its start, which is shortly before it serves.
fn kill_successor(keeper: u32, before: &str, (cache, last): (&Path, &[([u8; 16], u32)])) {
    let limit = Instant::now() + Duration::from_secs(30);
    while starts(cache) == last {
        assert!(Instant::now() < limit, "the next one does not start");
        thread::sleep(Duration::from_micros(200));
    }
    let children = format!("/proc/{keeper}/task/{keeper}/children");
    let all = fs::read_to_string(&children).expect("the keeper runs");
    let successor = all.split_whitespace().find(|&pid| pid != before);
    client("kill", &["-s", "KILL", successor.expect("there is one")]);
}

/// Regression: a server whose new cache on another device might have dirty blocks failed before it
/// served. The keeper went back to the configuration of before, with which no server can start.
#[test]
fn a_server_that_fails_once_clients_may_write_to_its_new_cache_is_started_again() {
    let mut plan = Plan::new(&["a"]);
    let server = plan.start();
    plan.connect("a").write(0, &noise(1, 6 << 20), true).expect("it is written");
    // Such a file is removed after all else, shortly before a server serves.
    let obstacle = plan.place.path("state").join("warm-up");
    fs::create_dir(&obstacle).expect("it is made");
    plan.cache = plan.cache.replace("cache.img", "second.img");
    let mut apply = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let apply = apply.args(["apply", &plan.write(), &server.control_argument()]);
    let mut apply = apply.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs");
    let log = server.log("the server does not start");
    assert!(!log.contains("back to the one before it"), "{log}");
    fs::remove_dir(&obstacle).expect("it is there");
    assert!(apply.wait().expect("it is our child").success());
    let second = plan.place.text("second.img");
    assert_eq!(server.status()["cache"]["path"], second.as_str());
    plan.is_over();
    assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == noise(1, 6 << 20));
    plan.connect("a").write(0, &noise(2, 6 << 20), true).expect("it is written");
    server.kill_kept();
    until("another server", || forebay(&["status", &server.control_argument()]).status.success());
    assert!(read(&mut plan.connect("a"), 0, 6 * MIB) == noise(2, 6 << 20));
    assert_eq!(server.ask(&["apply", &plan.file()]), "nothing differs\n");
    server.stop(&["--drain"]);
}

/// Regression: the server before, which the keeper starts again if the next one fails, was refused
/// with a mount, since a volume was gone or had grown, and with a cache on another device, whose
/// witness said that it might have dirty blocks. It also forgot what had been set.
#[test]
fn the_server_before_comes_back_when_the_next_one_dies_at_its_start() {
    if !can_attach() {
        return;
    }
    let _alone = alone();
    let mut returned = 0;
    // The cache stays, on another device, or is made again.
    for new_cache in ["", "second.img", "log_share = \"30%\""] {
        let mut plan = Plan::new(&["a", "b"]);
        fs::create_dir(plan.place.path("volumes")).expect("it is made");
        let _cleanup = Cleanup::of(&plan.place, &[]);
        plan.more = format!("fuse = {:?}", plan.place.text("volumes"));
        let server = plan.start();
        server.ask(&["set", "dirty_limit=35%"]);
        let a = open(&plan.place.path("volumes").join("a"), 0);
        a.write_all_at(&noise(1, 70_000), 4096).expect("it is written");
        a.sync_all().expect("it is flushed");
        plan.connect("b").write(0, &noise(2, 70_000), true).expect("it is written");

        let before = server.status()["pid"].clone();
        let mut cache = plan.place.path("cache.img");
        if new_cache.ends_with(".img") {
            cache = plan.place.path(new_cache);
            plan.cache = plan.cache.replace("cache.img", new_cache);
        } else {
            plan.cache += &format!("\n{new_cache}");
        }
        let last = starts(&cache);
        plan.volumes.pop();
        let primary = OpenOptions::new().write(true).open(plan.place.path("a"));
        primary.and_then(|file| file.set_len(24 * MIB)).expect("it grows");
        let mut apply = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let apply = apply.args(["apply", &plan.write(), &server.control_argument()]);
        let mut apply = apply.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs");
        kill_successor(server.id(), &before.to_string(), (&cache, &last));
        until("one serves again", || {
            let output = forebay(&["status", "--json", &server.control_argument()]);
            let status = serde_json::from_slice::<Value>(&output.stdout);
            status.is_ok_and(|status| status["pid"] != before)
        });
        let _ = apply.kill();
        apply.wait().expect("it is our child");

        let mut found = vec![0; 70_000];
        a.read_exact_at(&mut found, 4096).expect("it is served");
        assert!(found == noise(1, 70_000));
        a.write_all_at(&noise(3, 70_000), 4096).expect("it is served");
        a.sync_all().expect("it is served");
        assert!(read(&mut plan.connect("a"), 4096, 70_000) == noise(3, 70_000));
        if volumes(&server).len() == 2 {
            returned += 1;
            assert!(read(&mut plan.connect("b"), 0, 70_000) == noise(2, 70_000));
            let limit = ("35%".to_owned(), "set".to_owned());
            assert_eq!(server.shown(None, "dirty_limit"), limit);
            assert_eq!(listed(&plan), [".forebay", "a", "b"]);
            plan.is_over();
            plan.apply(&server);
        }
        assert!(read(&mut plan.connect("a"), 4096, 70_000) == noise(3, 70_000));
        drop(a);
        server.stop(&[]);
    }
    println!("the server before came back {returned} times of 3");
    assert!(returned > 0, "each successor has served, or this shows nothing");
}
