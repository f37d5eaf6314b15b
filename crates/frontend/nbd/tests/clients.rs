//! Real clients against the server: libnbd's tools and shell, QEMU's, and fio.
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect")]

mod support;

use forebay_block::IoOp;
use forebay_block::testing::noise;
use forebay_frontend_nbd::{Limits, Tls};
use support::daemon::{Daemon, fail, have, run, succeed};
use support::server;

fn daemon() -> Daemon {
    Daemon::start(&server(Limits::default(), Tls::Off))
}

#[test]
fn nbdinfo_sees_what_is_served() {
    if !have(&["nbdinfo"]) {
        return;
    }
    let daemon = daemon();
    let json = succeed("nbdinfo", &["--json", &daemon.uri("plain")]);
    for expected in [
        "\"protocol\": \"newstyle-fixed\"",
        "\"TLS\": false",
        "\"structured\": true",
        "\"export-size\": 1048576",
        "\"description\": \"the plain volume\"",
        "\"base:allocation\"",
        "\"can_cache\": true",
        "\"can_df\": true",
        "\"can_fast_zero\": true",
        "\"can_flush\": true",
        "\"can_fua\": true",
        "\"can_multi_conn\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"is_read_only\": false",
        "\"is_rotational\": false",
        "\"block_size_minimum\": 1",
        "\"block_size_preferred\": 4096",
        "\"block_size_maximum\": 33554432",
    ] {
        assert!(json.contains(expected), "{expected} in {json}");
    }
    let list = succeed("nbdinfo", &["--list", &daemon.uri("")]);
    for name in ["plain", "archive", "tape", "long"] {
        assert!(list.contains(&format!("export=\"{name}\"")), "{name} in {list}");
    }
    let map = succeed("nbdinfo", &["--map", &daemon.uri("archive")]);
    let fields: Vec<&str> = map.split_whitespace().collect();
    assert_eq!(fields, ["0", "4608", "0", "data"]);
    let complaint = fail("nbdinfo", &[&daemon.uri("nothing")]);
    assert!(complaint.contains("No such file or directory for export: nothing"), "{complaint}");
}

#[test]
fn nbdcopy_brings_and_fetches_an_image() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let daemon = daemon();
    let (image, copy) = (daemon.path("image"), daemon.path("copy"));
    let mut bytes = noise(1, 1 << 20);
    bytes[300_000..500_000].fill(0);
    std::fs::write(&image, &bytes).unwrap();
    let (image, copy) = (image.to_str().unwrap(), copy.to_str().unwrap());
    succeed("nbdcopy", &["--flush", image, &daemon.uri("plain")]);
    assert!(daemon.devices[0].lock().unwrap().bytes == bytes);
    let flushed = daemon.devices[0].lock().unwrap().log.iter().any(|l| l.0 == IoOp::Flush);
    assert!(flushed, "nbdcopy --flush flushes");
    succeed("nbdcopy", &["--connections=4", "--requests=16", &daemon.uri("plain"), copy]);
    assert!(std::fs::read(copy).unwrap() == bytes);
    fail("nbdcopy", &[image, &daemon.uri("archive")]);
}

/// Python run by nbdsh; `h` is a handle and `uri` the export.
fn nbdsh(daemon: &Daemon, export: &str, script: &str) {
    let head = format!("import nbd, errno\nuri = '{}'\n", daemon.uri(export));
    let helper = "\
def refused(number, call, *args, **kw):
    try:
        call(*args, **kw)
    except nbd.Error as ex:
        assert ex.errnum == number, (ex.errnum, number, str(ex))
        return
    raise AssertionError('it was not refused')
h.set_strict_mode(0)
";
    succeed("nbdsh", &["-c", &head, "-c", helper, "-c", script]);
}

#[test]
fn nbdsh_speaks_every_command() {
    if !have(&["nbdsh"]) {
        return;
    }
    for structured in ["True", "False"] {
        let daemon = daemon();
        let script = format!(
            "\
h.set_request_structured_replies({structured})
h.add_meta_context('base:allocation')
h.connect_uri(uri)
assert h.get_structured_replies_negotiated() == {structured}
assert h.get_size() == 1048576
data = bytes(range(256)) * 40
h.pwrite(data, 777, nbd.CMD_FLAG_FUA)
assert h.pread(len(data), 777) == data
assert h.pread(3, 778) == data[1:4]
h.zero(1000, 1000)
assert h.pread(1002, 999) == data[222:223] + bytes(1000) + data[1223:1224]
h.zero(512, 0, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_FUA)
h.trim(4096, 8192, nbd.CMD_FLAG_FUA)
h.cache(4096, 0)
h.flush()
if {structured}:
    assert h.pread(512, 0, nbd.CMD_FLAG_DF) == bytes(512)
    seen = []
    h.block_status(65536, 0, lambda *a: seen.append(a[:3]))
    assert seen == [('base:allocation', 0, [65536, 0])], seen
else:
    refused(errno.EINVAL, h.block_status, 512, 0, lambda *a: 0)
refused(errno.EINVAL, h.pread, 2, 1048575)
refused(errno.ENOSPC, h.pwrite, b'xy', 1048575)
refused(errno.ENOSPC, h.zero, 2, 1048575)
refused(errno.EINVAL, h.trim, 2, 1048575)
refused(errno.EINVAL, h.pwrite, b'x', 0, 1 << 9)
cookies = [h.aio_pread(nbd.Buffer(4096), i * 4096) for i in range(200)]
while h.aio_in_flight() > 0:
    h.poll(-1)
h.shutdown()
"
        );
        nbdsh(&daemon, "plain", &script);
    }
    let daemon = daemon();
    let script = "\
h.connect_uri(uri)
assert h.is_read_only() and h.is_rotational() and not h.can_trim()
refused(errno.EPERM, h.pwrite, b'x' * 512, 0)
refused(errno.EPERM, h.zero, 512, 0)
assert h.pread(512, 4096) == bytes(512)
";
    nbdsh(&daemon, "archive", script);
}

#[test]
fn nbdsh_haggles_over_options() {
    if !have(&["nbdsh"]) {
        return;
    }
    let daemon = daemon();
    let script = "\
h.set_opt_mode(True)
h.connect_uri(uri)
names = []
h.opt_list(lambda name, description: names.append(name))
assert names == ['plain', 'archive', 'tape', 'long'], names
contexts = []
h.opt_list_meta_context(lambda name: contexts.append(name))
assert contexts == ['base:allocation'], contexts
h.set_export_name('nothing')
refused(errno.ENOENT, h.opt_info)
refused(errno.ENOENT, h.opt_go)
h.set_export_name('tape')
h.opt_info()
assert h.get_size() == 8192
h.opt_go()
refused(errno.ENOTSUP, h.zero, 512, 0, nbd.CMD_FLAG_FAST_ZERO)
h.shutdown()
g = nbd.NBD()
g.set_opt_mode(True)
g.connect_uri(uri)
g.opt_abort()
";
    nbdsh(&daemon, "", script);
}

#[test]
fn nbdsh_takes_the_old_ways_in() {
    if !have(&["nbdsh"]) {
        return;
    }
    let daemon = daemon();
    for flags in ["0", "nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE", "nbd.HANDSHAKE_FLAG_NO_ZEROES"] {
        let script = format!(
            "\
h.set_handshake_flags({flags})
h.connect_uri(uri)
assert h.get_size() == 4608
assert h.pread(4608, 0) == bytes(4608)
"
        );
        nbdsh(&daemon, "archive", &script);
    }
}

#[test]
fn qemu_converts_compares_and_verifies() {
    if !have(&["qemu-img", "qemu-io"]) {
        return;
    }
    let daemon = daemon();
    let image = daemon.path("image");
    std::fs::write(&image, noise(1, 1 << 20)).unwrap();
    let (image, uri) = (image.to_str().unwrap(), daemon.uri("plain"));
    let info = succeed("qemu-img", &["info", "--output=json", "-f", "raw", &uri]);
    assert!(info.contains("\"virtual-size\": 1048576"), "{info}");
    succeed("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", image, &uri]);
    succeed("qemu-img", &["compare", "-f", "raw", "-F", "raw", image, &uri]);
    let map = succeed("qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
    assert!(map.contains("\"data\": true"), "{map}");
    let script = [
        "write -P 0xab 1000 5000",
        "read -P 0xab 1000 5000",
        "write -f -P 0xcd 64k 64k",
        "write -z 70k 4k",
        "read -P 0 70k 4k",
        "read -P 0xcd 64k 6k",
        "discard 128k 64k",
        "flush",
        "aio_write -P 0x11 256k 256k",
        "aio_write -P 0x22 512k 256k",
        "aio_flush",
        "read -P 0x11 256k 256k",
        "read -P 0x22 512k 256k",
    ];
    let mut arguments = vec!["-f", "raw", "-t", "none", &uri];
    arguments.extend(script.iter().flat_map(|line| ["-c", line]));
    let said = succeed("qemu-io", &arguments);
    assert!(!said.contains("verification failed") && !said.contains("error"), "{said}");
    let differs = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", image, &uri]);
    assert_eq!(differs.status.code(), Some(1));
    let said =
        succeed("qemu-io", &["-r", "-f", "raw", "-c", "read 4096 512", &daemon.uri("archive")]);
    assert!(said.contains("read 512/512 bytes"), "{said}");
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !have(&["fio"]) {
        return;
    }
    let daemon = daemon();
    let uri = format!("--uri={}", daemon.uri("plain"));
    let output = run(
        "fio",
        &[
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=512-32k",
            "--bs_unaligned=1",
            "--size=1m",
            "--io_size=8m",
            "--iodepth=32",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--fsync=50",
            "--norandommap=0",
        ],
    );
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("engine nbd not loadable") {
        eprintln!("skipped: fio has no NBD engine here");
        return;
    }
    assert!(output.status.success(), "{said}{errors}");
    assert!(said.contains("err= 0"), "{said}");
}
