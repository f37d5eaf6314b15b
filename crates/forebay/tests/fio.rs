//! fio writes blocks with checksums through the server, which is killed right after the last flush.
//! After a restart fio must find every block as it wrote it, and after a drain also on the primary
//! alone.

mod support;
#[path = "support/tools.rs"]
mod tools;

use support::{Place, client};
use tools::have;

const SIZE: &str = "--size=24m";

/// The job that writes; with `more`, the job that verifies the data.
fn fio(engine: &[&str], more: &[&str]) {
    let job = [
        "--name=verify",
        "--rw=randwrite",
        "--bs=4k",
        SIZE,
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--randseed=4711",
    ];
    let said = client("fio", &[&job[..], engine, more].concat());
    assert!(said.contains("err= 0"), "{said}");
}

fn survives_a_kill(mode: &str) {
    if !have(&["fio"]) {
        return;
    }
    let (place, mut arguments) = Place::with_disk();
    arguments.push(format!("--mode={mode}"));
    let uri = format!("--uri={}", place.uri());
    let nbd = ["--ioengine=nbd", &uri, "--iodepth=16"];

    let server = place.start(&arguments);
    fio(&nbd, &["--do_verify=0", "--end_fsync=1"]);
    server.kill();
    if mode == "write-through" {
        let filename = format!("--filename={}", place.text("disk.img"));
        fio(&["--ioengine=psync", &filename], &["--verify_only"]);
    }
    let server = place.start(&arguments);
    fio(&nbd, &["--verify_only"]);
    server.stop(&["--drain"]);
    let filename = format!("--filename={}", place.text("disk.img"));
    fio(&["--ioengine=psync", &filename], &["--verify_only"]);
}

#[test]
fn fio_finds_what_it_flushed_before_a_kill_in_write_back() {
    survives_a_kill("write-back");
}

#[test]
fn fio_finds_what_it_flushed_before_a_kill_in_write_through() {
    survives_a_kill("write-through");
}

/// A check that cannot fail proves nothing: fio must detect one wrong byte.
#[test]
fn fio_would_see_a_wrong_byte() {
    if !have(&["fio"]) {
        return;
    }
    let place = Place::new();
    place.make("disk.img", 24 << 20);
    let filename = format!("--filename={}", place.text("disk.img"));
    fio(&["--ioengine=psync", &filename], &["--do_verify=0"]);
    fio(&["--ioengine=psync", &filename], &["--verify_only"]);
    let file = std::fs::File::options().write(true).open(place.path("disk.img"));
    let file = file.expect("it is there");
    std::os::unix::fs::FileExt::write_all_at(&file, b"!", 4_000_000).expect("it is written");
    let job = ["--name=verify", "--rw=randwrite", "--bs=4k", SIZE, "--verify=crc32c"];
    let more = ["--verify_fatal=1", "--verify_state_save=0", "--randseed=4711", "--verify_only"];
    let seen = std::process::Command::new("fio")
        .args(job)
        .args(more)
        .args(["--ioengine=psync", &filename])
        .current_dir(place.path(""))
        .output()
        .expect("fio runs");
    assert!(!seen.status.success(), "fio did not look");
}
