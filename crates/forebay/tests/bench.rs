//! `forebay bench`: wrong usage and missing programs give clear errors; a short run of a benchmark
//! with every kind of setup leaves a complete report and nothing else; a database on a mounted disk
//! survives the simultaneous death of server and cache; a database and file systems do not notice
//! that a server with a keeper is killed and upgraded.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Once;

use forebay_bench::developer::{crash, survive};
use forebay_bench::report::{Measured, Report};
use forebay_bench::rig::cleanup;

/// A command `forebay bench` with these arguments.
fn forebay(arguments: &[&str]) -> Command {
    BUILT.call_once(build);
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.arg("bench").args(arguments);
    command
}

static BUILT: Once = Once::new();

/// Builds `forebay-bench` next to `forebay`: cargo does so by itself only for the whole workspace.
fn build() {
    let directory = Path::new(env!("CARGO_BIN_EXE_forebay")).parent().expect("a directory");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package=forebay-bench", "--bin=forebay-bench"]);
    cargo.arg("--target-dir").arg(directory.parent().expect("the target directory"));
    if directory.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo runs").success(), "forebay-bench is not built");
    assert!(directory.join("forebay-bench").exists(), "not in {}", directory.display());
}

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (status.code(), text(stdout), text(stderr))
}

/// A directory used by one test only.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    fn text(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn help_is_that_of_the_benchmarks() {
    let calls: [(&[&str], &[&str]); 3] = [
        (&["--help"], &["Usage: forebay bench <COMMAND>", "tpcc", "burst"]),
        (&["tpcc", "--help"], &["Usage: forebay bench tpcc [OPTIONS]", "--warehouses"]),
        (&["help", "oltp"], &["Usage: forebay bench oltp [OPTIONS]", "--tables"]),
    ];
    for (arguments, words) in calls {
        let (code, out, said) = run(&mut forebay(arguments));
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
        for word in words {
            assert!(out.contains(word), "{arguments:?}: {word:?} is missing from {out}");
        }
    }
    let (code, out, _) = run(Command::new(env!("CARGO_BIN_EXE_forebay")).args(["demo", "-h"]));
    assert!(code == Some(0) && out.contains("Usage: forebay demo [OPTIONS]"), "{out}");
}

#[test]
fn without_the_second_binary_the_error_says_what_to_install() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("alone-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory");
    let alone = dir.join("forebay");
    fs::hard_link(env!("CARGO_BIN_EXE_forebay"), &alone).expect("a second name");
    for command in ["bench", "demo"] {
        let (code, out, said) = run(Command::new(&alone).arg(command).env("PATH", "/nonexistent"));
        assert_eq!(code, Some(1), "{said}");
        assert!(out.is_empty() && said.lines().count() == 1, "{said}");
        assert!(said.contains("forebay-bench") && said.contains("install it next to"), "{said}");
    }
    fs::remove_dir_all(&dir).expect("it can be removed");
}

#[test]
fn wrong_usage_is_2_and_says_what_is_known() {
    let refused: [(&[&str], &str); 10] = [
        (&["tpcd"], "tpcc"),
        (&[], "vdbench"),
        (&["tpcc", "--setups=writeback"], "write-back"),
        (&["tpcc", "--model=ssd"], "raid10x4"),
        (&["tpcc", "--seconds=0"], "0"),
        (&["oltp", "--access=zipf"], "pareto"),
        (&["pgbench", "--access=pareto"], "zipfian"),
        (&["burst", "--burst-mib=100000"], "--burst-mib 100000"),
        (&["vdbench", "--mib=256", "--hit-kib=262144"], "--hit-kib 262144"),
        (&["fileio", "--threads=0"], "0"),
    ];
    for (arguments, word) in refused {
        let (code, out, said) = run(&mut forebay(arguments));
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
        assert!(out.is_empty() && said.contains(word), "{arguments:?}: {said}");
    }
    let dir = Dir::new("compare");
    let old = dir.0.join("old.json");
    fs::write(&old, "{\"version\": 7}").expect("a file");
    let flag = format!("--compare={}", old.display());
    let (code, _, said) = run(&mut forebay(&["burst", &flag]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("old.json"), "{said}");
}

#[test]
fn what_is_missing_is_1_and_says_what_to_do() {
    let dir = Dir::new("missing");
    let place = format!("--dir={}", dir.text());
    // A search path without any program.
    let setups = "--setups=no-cache,nbdkit";
    let (code, _, said) = run(forebay(&["vdbench", setups, &place]).env("PATH", &dir.0));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("nbdkit is not installed") && said.contains("apt-get install"), "{said}");
    let (code, _, said) = run(forebay(&["burst", "--mib=900000000", &place]).arg("--burst-mib=64"));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("MiB are free") && said.contains("--dir"), "{said}");
    let (code, _, said) = run(&mut forebay(&["burst", "--dir=/proc/nowhere"]));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("/proc/nowhere"), "{said}");
    let (code, _, said) = run(&mut forebay(&["burst", "--compare=/nonexistent/old.json"]));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("/nonexistent/old.json"), "{said}");
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can give up being root");
        return;
    }
    // Without root, mounting is not allowed.
    let binary = env!("CARGO_BIN_EXE_forebay");
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", binary, "bench", "fileio"]);
    let (code, _, said) = run(&mut command);
    assert!(code == Some(1) || said.contains("ermission denied"), "{said}");
    assert!(said.contains("not root") || said.contains("ermission denied"), "{said}");
}

/// Checks that the page is complete and loads nothing from outside.
fn check_page(path: &Path) {
    let page = fs::read_to_string(path).expect("a page");
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</body></html>\n"));
    for word in ["http", "src=", "@import", "url(", "<script", "<link", "NaN", "inf"] {
        let found = page.find(word).map(|at| &page[at.saturating_sub(40)..at + 20]);
        assert!(found.is_none(), "{word}: {found:?}");
    }
    let mut open: Vec<&str> = Vec::new();
    for tag in page.split('<').skip(1).filter_map(|rest| rest.split('>').next()) {
        let name = tag.trim_start_matches('/').split([' ', '\n']).next().unwrap_or_default();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "{tag}");
        } else if !tag.ends_with('/') && !["!DOCTYPE", "meta"].contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
    assert!(page.contains("<svg") && page.contains("<path"), "there are charts");
}

/// The files in a directory whose names have this ending.
fn files(dir: &Path, end: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(dir).expect("a directory").filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<_> = all.filter(|path| path.to_string_lossy().ends_with(end)).collect();
    found.sort();
    found
}

#[test]
fn a_benchmark_leaves_a_whole_report_and_nothing_else() {
    let (work, out) = (Dir::new("work"), Dir::new("out"));
    let (dir, to) = (format!("--dir={}", work.text()), format!("--out={}", out.text()));
    let small = ["vdbench", "--mib=256", "--seconds=3", "--baseline-seconds=3", "--runs=RD1,RD4"];
    let more = ["--hit-kib=1024", "--ram-mib=8", "--content=compressible", &dir, &to];
    let (code, first, said) = run(&mut forebay(&[&small[..], &more].concat()));
    assert_eq!(code, Some(0), "{said}");
    assert!(first.contains("write-through") && first.contains("report: "), "{first}");
    let json = files(&out.0, ".json");
    let text = fs::read_to_string(&json[0]).expect("figures");
    let report: Report = serde_json::from_str(&text).expect("they are a report");
    assert_eq!(report.groups.len(), 2);
    for group in &report.groups {
        let names: Vec<_> = group.results.iter().map(|one| one.setup.as_str()).collect();
        assert_eq!(names, ["no-cache", "write-back", "write-through", "nbdkit", "bare-ssd"]);
        for one in &group.results {
            assert!(one.rate > 0.0 && one.latency.p99_ms >= one.latency.p50_ms, "{one:?}");
            assert!(one.latency.count > 0 && !one.per_second.is_empty(), "{one:?}");
        }
        let back = group.of("write-back").expect("it was measured");
        assert!(back.hit_ratio.is_some_and(|ratio| ratio > 0.5), "{back:?}");
        assert!(back.points.iter().any(|point| point.dirty.is_some()), "{back:?}");
        assert!(back.cpu.contains_key("forebay"), "{back:?}");
    }
    check_page(&files(&out.0, ".html")[0]);

    // A second run, compared with the first.
    let old = format!("--compare={}", json[0].display());
    let again = ["--setups=no-cache,write-back", "--seconds=2", "--baseline-seconds=2", &old];
    let few = ["vdbench", "--mib=256", "--runs=RD1"];
    let (code, second, said) = run(&mut forebay(&[&few[..], &more, &again].concat()));
    assert_eq!(code, Some(0), "{said}");
    assert!(
        second.contains("compared with the run of") && second.contains("differs: time"),
        "{second}"
    );
    let pages = files(&out.0, ".html");
    check_page(pages.last().expect("a second page"));
    let left: Vec<_> = fs::read_dir(&work.0).expect("it is there").collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_signal_in_the_middle_leaves_nothing_behind() {
    let (work, out) = (Dir::new("signal"), Dir::new("signal-out"));
    let (dir, to) = (format!("--dir={}", work.text()), format!("--out={}", out.text()));
    let mut command = forebay(&["burst", "--mib=512", "--burst-mib=48", &dir, &to]);
    let mut child = command.spawn().expect("the binary runs");
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(30);
    // Until a server is running.
    while files_deep(&work.0, ".nbd").is_empty() {
        assert!(std::time::Instant::now() < limit, "no server in time");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it can be told");
    assert_eq!(child.wait().expect("it ends").code(), Some(1));
    let left: Vec<_> = fs::read_dir(&work.0).expect("it is there").collect();
    assert!(left.is_empty(), "{left:?}");
    let running = Command::new("pgrep").arg("-f").arg(work.text()).output();
    let running = running.map(|output| output.stdout).unwrap_or_default();
    assert!(running.is_empty(), "{}", String::from_utf8_lossy(&running));
}

fn files_deep(dir: &Path, end: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let inner = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir());
    inner.flat_map(|inner| files(&inner, end)).collect()
}

/// The database's own checks are part of the benchmark: committed rows, sums, page checksums.
#[test]
fn postgres_on_each_way_to_store_blocks_is_whole() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: root and FUSE are needed for a disk");
        return;
    }
    if let Err(error) = cleanup::memory_group("forebay-test", 1 << 30) {
        eprintln!("skipped: {error:#}");
        return;
    }
    let (work, out) = (Dir::new("pg"), Dir::new("pg-out"));
    let (dir, to) = (format!("--dir={}", work.text()), format!("--out={}", out.text()));
    let setups = "--setups=write-back,independent,raw";
    let small = ["pgbench", "--scale=2", "--ramp=2", "--seconds=5", "--threads=4"];
    let (code, shown, said) = run(&mut forebay(&[&small[..], &[setups, &dir, &to]].concat()));
    assert_eq!(code, Some(0), "{said}");
    assert!(shown.contains("SSD/byte"), "{shown}");
    let text = fs::read_to_string(&files(&out.0, ".json")[0]).expect("figures");
    let report: Report = serde_json::from_str(&text).expect("they are a report");
    let of = |setup| {
        let one = report.groups[0].of(setup).expect("it was measured");
        assert!(one.rate > 0.0 && one.latency.count > 0, "{one:?}");
        assert!(one.written_per_byte().is_some_and(|bytes| bytes > 0.0), "{one:?}");
        one
    };
    let (back, independent, raw) = (of("write-back"), of("independent"), of("raw"));
    // The forms themselves: bytes written depend also on how many transactions share a flush.
    let held = |one: &Measured| one.held_per_byte().expect("something is cached");
    assert!(back.figures["delta_blocks"] > 0.0, "{back:?}");
    assert_eq!(independent.figures["delta_blocks"], 0.0, "{independent:?}");
    assert!(held(back) > 1.5 * held(raw), "{back:?} {raw:?}");
    assert!(held(independent) > 1.5 * held(raw), "{independent:?} {raw:?}");
    assert!(held(raw) < 1.2, "{raw:?}");
}

#[test]
fn a_database_survives_the_death_of_server_and_cache_together() {
    if !can_have_disks() {
        return;
    }
    let args = crash::quick(PathBuf::from(env!("CARGO_BIN_EXE_forebay")));
    if let Err(error) = crash::run(&args) {
        panic!("{error:#}");
    }
}

/// A volume of one's own is only read: by itself, behind a cache, and at a running server.
#[test]
fn ones_own_volume_is_read_and_never_written() {
    let dir = Dir::new("own");
    let path = |name: &str| format!("{}/{name}", dir.text());
    let disk = path("disk.img");
    let content: Vec<u8> = (0..64 << 20).map(|at: u32| (at >> 12) as u8).collect();
    fs::write(&disk, &content).expect("it can be written");
    let read_only = fs::Permissions::from_mode(0o444);
    fs::set_permissions(&disk, read_only).expect("it is ours");
    let written = fs::metadata(&disk).and_then(|found| found.modified()).expect("it is there");
    let out = format!("--out={}", path("out"));
    let usual = ["own", "--seconds=1", "--mib=32", &out];
    let primary = format!("--primary={disk}");
    let check = |arguments: &[&str]| {
        let (code, shown, said) = run(&mut forebay(&[&usual[..], arguments].concat()));
        assert_eq!(code, Some(0), "{said}");
        for setup in ["no-cache", "cache, first pass", "cache, second pass"] {
            assert!(shown.contains(setup), "{setup}: {shown}");
        }
        let now = fs::metadata(&disk).and_then(|found| found.modified()).expect("it is there");
        assert_eq!(now, written, "{arguments:?}");
        assert!(fs::read(&disk).expect("it is there") == content, "{arguments:?}: it has changed");
    };
    check(&[&primary, &format!("--dir={}", dir.text())]);

    fs::set_permissions(&disk, fs::Permissions::from_mode(0o644)).expect("it is ours");
    // At a running server, whose own writes are none either: nothing is dirty.
    let control = format!("--control={}", path("c.sock"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["serve", &primary, "--read-only", "--name=db", "--ram=16MiB", &control]);
    command.arg(format!("--cache={},size=64MiB", path("cache.img")));
    command.arg(format!("--nbd=unix:{}", path("n.sock"))).arg(format!("--state={}", path("state")));
    let mut server = command.env("FOREBAY_NO_KEEPER", "1").stdout(Stdio::piped()).spawn();
    let server = server.as_mut().expect("the binary runs");
    let mut ready = String::new();
    let mut output = BufReader::new(server.stdout.take().expect("it was asked for"));
    output.read_line(&mut ready).expect("it can be read");
    assert!(ready.starts_with("ready "), "{ready}");
    check(&["--volume=db", &control]);
    let (code, _, said) = run(&mut forebay(&["own", "--volume=none", &control]));
    assert!(code == Some(1) && said.contains("served: db"), "{said}");
    server.kill().expect("it is our child");
    server.wait().expect("it is our child");
}

#[test]
fn a_database_does_not_notice_kills_and_upgrades() {
    if !can_have_disks() {
        return;
    }
    let args = survive::mariadb::quick(PathBuf::from(env!("CARGO_BIN_EXE_forebay")));
    if let Err(error) = survive::mariadb::run(&args) {
        panic!("{error:#}");
    }
}

#[test]
fn file_systems_under_fsx_do_not_notice_kills_and_upgrades() {
    if !can_have_disks() {
        return;
    }
    let args = survive::fsx::quick(PathBuf::from(env!("CARGO_BIN_EXE_forebay")));
    if let Err(error) = survive::fsx::run(&args) {
        panic!("{error:#}");
    }
}

/// Whether this machine lets a benchmark make disks; prints why if not.
fn can_have_disks() -> bool {
    let can = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("skipped: root and FUSE are needed for a disk");
    }
    can
}
