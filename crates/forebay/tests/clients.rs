//! Third-party clients through the whole server, each once: they read back what they wrote, and
//! after a drain the primary alone holds the content that they saw last.

mod support;
#[path = "support/tools.rs"]
mod tools;

use std::fs;
use std::process::Command;

use support::{Place, Server, client, noise};
use tools::have;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 48 * MIB;

/// A server of 48 MiB with a cache of 32 MiB, so that not all data fits.
fn serve() -> (Place, Server) {
    let place = Place::new();
    place.make("disk.img", SIZE);
    let server = place.start(&place.serve("disk.img", "cache.img,size=32MiB"));
    (place, server)
}

/// A file of `len` bytes with a hole of zeros in it.
fn image(place: &Place, seed: u64, len: u64) -> String {
    let mut bytes = noise(seed, len as usize);
    let at = bytes.len() / 3;
    bytes[at..at + 300_000].fill(0);
    fs::write(place.path("image"), &bytes).expect("a file can be written");
    place.text("image")
}

/// Stops the server with a drain; the primary alone must hold the content that clients saw.
fn finish(place: &Place, server: Server) {
    let seen = place.text("seen");
    client("nbdcopy", &[&place.uri(), &seen]);
    server.stop(&["--drain"]);
    let seen = fs::read(seen).expect("it was copied");
    let primary = fs::read(place.path("disk.img")).expect("it is there");
    let differs = seen.iter().zip(&primary).position(|(a, b)| a != b);
    assert_eq!((seen.len(), differs), (primary.len(), None), "the first byte that differs");
}

#[test]
fn nbdinfo_sees_what_is_served() {
    if !have(&["nbdinfo", "nbdcopy"]) {
        return;
    }
    let (place, server) = serve();
    let info = client("nbdinfo", &["--json", &place.uri()]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("it prints JSON");
    assert_eq!(info["structured"], true);
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], SIZE);
    for able in ["can_flush", "can_fua", "can_multi_conn", "can_zero", "can_cache", "can_df"] {
        assert_eq!(export[able], true, "{able}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["block_size_minimum"], 1);
    assert_eq!(export["contexts"][0], "base:allocation");
    let list = format!("nbd+unix:///?socket={}", place.text("nbd.sock"));
    assert!(client("nbdinfo", &["--list", &list]).contains("export=\"disk\""));
    let map = client("nbdinfo", &["--map", &place.uri()]);
    let whole: u64 =
        map.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum();
    assert_eq!(whole, SIZE, "{map}");
    finish(&place, server);
}

#[test]
fn nbdcopy_brings_and_fetches_an_image() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let (place, server) = serve();
    let image = image(&place, 1, SIZE);
    let many = ["--connections=4", "--requests=16"];
    client("nbdcopy", &[&many[..], &["--flush", &image, &place.uri()]].concat());
    let copy = place.text("copy");
    client("nbdcopy", &[&many[..], &[&place.uri(), &copy]].concat());
    let same = fs::read(&image).expect("it is there") == fs::read(&copy).expect("it was copied");
    assert!(same, "the copy differs");
    finish(&place, server);
}

#[test]
fn nbdsh_speaks_every_command() {
    if !have(&["nbdsh", "nbdcopy"]) {
        return;
    }
    let (place, server) = serve();
    let script = format!(
        "\
h.set_strict_mode(0)
h.add_meta_context('base:allocation')
h.connect_uri('{}')
assert h.get_size() == {SIZE}
data = bytes(range(256)) * 4000
h.pwrite(data, 777, nbd.CMD_FLAG_FUA)
assert h.pread(len(data), 777) == data
h.zero(100000, 1000)
assert h.pread(100002, 999) == data[222:223] + bytes(100000) + data[100223:100224]
h.zero(512, 0, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
h.pwrite(data, 2097152 - 100)
h.trim(65536, 2097152, nbd.CMD_FLAG_FUA)
assert h.pread(100, 2097152 - 100) == data[:100]
assert h.pread(4096, 2097152 + 65536) == data[65636:65636 + 4096]
h.cache(1048576, 8388608)
h.flush()
assert h.pread(512, 512, nbd.CMD_FLAG_DF) == bytes(265) + data[:223] + bytes(24)
seen = []
h.block_status(65536, 0, lambda *a: seen.append(a[:3]))
assert seen[0][0] == 'base:allocation', seen
try:
    h.pwrite(b'xy', {SIZE} - 1)
    raise AssertionError('a write beyond the end')
except nbd.Error as ex:
    assert ex.errno == 'ENOSPC', ex
cookies = [h.aio_pread(nbd.Buffer(4096), i * 4096) for i in range(200)]
while h.aio_in_flight() > 0:
    h.poll(-1)
h.shutdown()
",
        place.uri()
    );
    // The system's Python comes first, since libnbd's module belongs to it.
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("nbdsh")
        .args(["-c", &script])
        .env("PATH", format!("/usr/bin:/bin:{path}"))
        .output()
        .expect("nbdsh runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    finish(&place, server);
}

#[test]
fn qemu_converts_compares_and_verifies() {
    if !have(&["qemu-img", "qemu-io", "nbdcopy"]) {
        return;
    }
    let (place, server) = serve();
    let (image, uri) = (image(&place, 2, SIZE), place.uri());
    let info = client("qemu-img", &["info", "--output=json", "-f", "raw", &uri]);
    assert!(info.contains(&format!("\"virtual-size\": {SIZE}")), "{info}");
    client("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &image, &uri]);
    client("qemu-img", &["compare", "-f", "raw", "-F", "raw", &image, &uri]);
    let back = place.text("back.qcow2");
    client("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, &back]);
    client("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &image, &back]);
    let script = [
        "write -P 0xab 1000 5000",
        "read -P 0xab 1000 5000",
        "write -f -P 0xcd 64k 64k",
        "write -z 70k 4k",
        "read -P 0 70k 4k",
        "read -P 0xcd 64k 6k",
        "discard 128k 64k",
        "flush",
        "aio_write -P 0x11 2000k 256k",
        "aio_write -P 0x22 4000k 256k",
        "aio_flush",
        "read -P 0x11 2000k 256k",
        "read -P 0x22 4000k 256k",
    ];
    let mut arguments = vec!["-f", "raw", "-t", "none", &uri];
    arguments.extend(script.iter().flat_map(|line| ["-c", line]));
    let said = client("qemu-io", &arguments);
    assert!(!said.contains("verification failed") && !said.contains("error"), "{said}");
    let differs = Command::new("qemu-img")
        .args(["compare", "-f", "raw", "-F", "raw", &image, &uri])
        .output()
        .expect("qemu-img runs");
    assert_eq!(differs.status.code(), Some(1), "the image is another now");
    finish(&place, server);
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !have(&["fio", "nbdcopy"]) {
        return;
    }
    let (place, server) = serve();
    let uri = format!("--uri={}", place.uri());
    let job = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--rw=randrw",
        "--bsrange=512-32k",
        "--bs_unaligned=1",
        "--size=24m",
        "--io_size=32m",
        "--iodepth=32",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--fsync=50",
    ];
    let said = client("fio", &job);
    assert!(said.contains("err= 0"), "{said}");
    finish(&place, server);
}
