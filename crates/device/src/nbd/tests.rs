//! The NBD device against real servers: nbdkit with its memory plugin, plain, slow, old and dying.
//! Skipped, with a printed reason, if nbdkit is not installed.

use std::fmt::Debug;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant as Wall};

use forebay_block::{ByteRange, ErrorKind, Io, IoFlags, IoOp};
use forebay_codec::crc32c;

use super::STRAGGLE_MAX;
use crate::layer::watch::Watch;
use crate::testing::{Bench, TempPath, exercise, exercise_in_units};
use crate::uri::open_primary;

/// A server on a Unix socket, killed on drop.
struct Nbdkit {
    child: Child,
    socket: PathBuf,
    _path: TempPath,
}

impl Nbdkit {
    fn start(arguments: &[&str]) -> Option<Self> {
        let path = TempPath::new();
        let child = Self::spawn(&path.0, arguments)?;
        Some(Self { child, socket: path.0.clone(), _path: path })
    }

    fn spawn(socket: &std::path::Path, arguments: &[&str]) -> Option<Child> {
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(socket).args(arguments);
        let mut child = match command.stdin(Stdio::null()).stderr(Stdio::null()).spawn() {
            Ok(child) => child,
            Err(error) => {
                println!("skipped: nbdkit cannot be started: {error}");
                return None;
            }
        };
        let deadline = Wall::now() + Duration::from_secs(10);
        while std::os::unix::net::UnixStream::connect(socket).is_err() {
            assert!(child.try_wait().unwrap().is_none(), "nbdkit ended: {arguments:?}");
            assert!(Wall::now() < deadline, "nbdkit does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(child)
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_export_behaves_as_a_device_does() {
    let Some(server) = Nbdkit::start(&["memory", "8M"]) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    assert_eq!(device.info().size, 8 << 20);
    exercise(&*device, 21);
    exercise_in_units(&*device, 22, 1);
}

/// `prepare` makes the connections, so queues open later although the server has stopped accepting
/// connections.
#[test]
fn queues_that_were_prepared_open_without_the_server() {
    let Some(server) = Nbdkit::start(&["memory", "8M"]) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    device.prepare(2).unwrap();
    std::fs::remove_file(&server.socket).unwrap();
    let mut both = [Bench::new(&*device), Bench::new(&*device)];
    for bench in &mut both {
        bench.write(0, &[1; 4096]).unwrap();
    }
    let Some(server) =
        Nbdkit::start(&["--filter=multi-conn", "memory", "8M", "multi-conn-mode=disable"])
    else {
        return;
    };
    let device = open_primary(&server.uri("")).unwrap();
    device.prepare(1).unwrap();
    let refused = device.prepare(2).unwrap_err().to_string();
    assert!(refused.contains("use one shard"), "{refused}");
}

/// Regression: another export of the same size behind the same address was taken for the one of
/// before, and two disks were mixed.
#[test]
fn another_export_at_the_same_address_is_not_used() {
    let disks = [TempPath::new(), TempPath::new()];
    std::fs::write(&disks[0].0, vec![1; 8 << 20]).unwrap();
    std::fs::write(&disks[1].0, vec![2; 8 << 20]).unwrap();
    let file = |at: usize| disks[at].0.to_string_lossy().into_owned();
    let Some(mut server) = Nbdkit::start(&["file", &file(0)]) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    let places = vec![ByteRange::new(0, 4096), ByteRange::new(1 << 20, 4096)];
    let sum = crc32c(&[1; 4096]);
    let record = Arc::new(Watch::new(places, &[Some(sum), Some(sum)]));
    device.recognize_by(&record);
    let mut bench = Bench::new(&*device);
    assert_eq!(bench.read(4096, 512).unwrap(), [1; 512]);

    let mut serve = |at: usize| {
        server.kill();
        server.child = Nbdkit::spawn(&server.socket, &["file", &file(at)]).unwrap();
    };
    serve(1);
    let until = Wall::now() + Duration::from_secs(2);
    while Wall::now() < until {
        assert!(bench.read(4096, 512).is_err(), "it is another one");
        thread::sleep(Duration::from_millis(20));
    }
    let why = device.open_queue(&bench.ring).map(drop).unwrap_err().to_string();
    assert!(why.contains("is not what it was"), "{why}");
    serve(0);
    let until = Wall::now() + Duration::from_secs(10);
    while bench.read(4096, 512).is_err() {
        assert!(Wall::now() < until, "it is the one of before");
        thread::sleep(Duration::from_millis(20));
    }
    // What the owner changes itself tells nothing.
    record.release(0);
    record.release(1);
    serve(1);
    let until = Wall::now() + Duration::from_secs(10);
    while !bench.read(4096, 512).is_ok_and(|found| found == [2; 512]) {
        assert!(Wall::now() < until, "nothing is on record");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn servers_that_can_do_less_serve_too() {
    for lacks in [
        &["--no-sr", "memory", "8M"][..],
        &["--filter=nozero", "memory", "8M"],
        &["--mask-handshake=0", "memory", "8M"],
        &["--mask-handshake=1", "memory", "8M"],
    ] {
        let Some(server) = Nbdkit::start(lacks) else { return };
        match open_primary(&server.uri("")) {
            Ok(device) => exercise(&*device, 23),
            Err(error) => {
                assert_eq!(lacks[0], "--mask-handshake=0", "{error}");
                assert!(error.to_string().contains("too old"), "{error}");
            }
        }
    }
}

#[test]
fn large_requests_and_many_at_once() {
    let Some(server) = Nbdkit::start(&["memory", "128M"]) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    let mut bench = Bench::new(&*device);
    let data: Vec<u8> = (0..32u32 << 20).map(|i| (i / 4093) as u8).collect();
    bench.write(12_345 * 512, &data).unwrap();
    assert!(bench.read(12_345 * 512, 32 << 20).unwrap() == data);
    let ios: Vec<Io> = (0..2000u64).map(|i| bench.write_io(i * 4096, &[i as u8; 4096])).collect();
    assert!(bench.run(ios).iter().all(|end| end.result.is_ok()));
    let ios: Vec<Io> = (0..2000u64).map(|i| bench.read_io(i * 4096, 4096)).collect();
    for (i, end) in bench.run(ios).into_iter().enumerate() {
        end.result.unwrap();
        assert_eq!(&end.buf[..], [i as u8; 4096]);
    }
}

#[test]
fn requests_overlap_on_a_slow_server() {
    let slow = ["--filter=delay", "memory", "8M", "rdelay=50ms"];
    let Some(server) = Nbdkit::start(&slow) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    let mut bench = Bench::new(&*device);
    let started = bench.clock.now();
    let ios: Vec<Io> = (0..16u64).map(|i| bench.read_io(i * 4096, 4096)).collect();
    assert!(bench.run(ios).iter().all(|end| end.result.is_ok()));
    let took = bench.clock.now().since(started);
    assert!(took < Duration::from_millis(650), "16 reads of 50 ms took {took:?}");
}

#[test]
fn errors_of_the_server_are_passed_on() {
    let failing = ["--filter=error", "memory", "8M", "error-pread=ENOSPC", "error-pread-rate=100%"];
    let Some(server) = Nbdkit::start(&failing) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    let mut bench = Bench::new(&*device);
    assert_eq!(bench.read(0, 4096).unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(bench.write(0, &[1; 4096]).is_ok());
}

#[test]
fn opening_says_what_the_server_said() {
    let Some(server) = Nbdkit::start(&[
        "--filter=exportname",
        "memory",
        "8M",
        "exportname=a",
        "exportname-strict=true",
    ]) else {
        return;
    };
    assert!(open_primary(&server.uri("a")).is_ok());
    let error = open_primary(&server.uri("b")).err().unwrap().to_string();
    assert!(error.contains("\"b\""), "{error}");
    let Some(odd) = Nbdkit::start(&["memory", "1000"]) else { return };
    let error = open_primary(&odd.uri("")).err().unwrap().to_string();
    assert!(error.contains("1000 bytes"), "{error}");
    let Some(coarse) =
        Nbdkit::start(&["--filter=blocksize-policy", "memory", "8M", "blocksize-minimum=4096"])
    else {
        return;
    };
    let error = open_primary(&coarse.uri("")).err().unwrap().to_string();
    assert!(error.contains("units of 4096"), "{error}");
}

#[test]
fn a_read_only_export_refuses_writes_here() {
    let Some(server) = Nbdkit::start(&["--read-only", "memory", "8M"]) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    assert!(device.info().read_only);
    let mut bench = Bench::new(&*device);
    assert_eq!(bench.write(0, &[1; 512]).unwrap_err().kind(), ErrorKind::ReadOnly);
}

/// The server dies with a write completed and not flushed. Everything fails until it is back; then
/// the first flush fails, since the write may be lost; after that everything works.
#[test]
fn a_server_that_dies_and_comes_back_is_not_trusted_with_what_it_had() {
    let slow = ["--filter=delay", "memory", "8M", "rdelay=300ms"];
    let Some(mut server) = Nbdkit::start(&slow) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    let mut bench = Bench::new(&*device);
    bench.write(0, &[1; 4096]).unwrap();
    bench.bare(IoOp::Flush, ByteRange::default()).unwrap();
    bench.write(4096, &[2; 4096]).unwrap();
    let in_flight = bench.read_io(0, 4096);
    bench.queue.submit(bench.clock.now(), in_flight).unwrap();
    bench.ring.wait(&bench.clock, Some(bench.clock.now())).unwrap();
    server.kill();
    let write = bench.write_io(8192, &[3; 4096]);
    // Both the read in flight and the new write fail with the same error.
    let ends = bench.run_with_extra(vec![write], 1);
    for end in ends {
        assert_eq!(end.result.unwrap_err().kind(), ErrorKind::DeviceGone);
    }
    assert_eq!(bench.read(0, 512).unwrap_err().kind(), ErrorKind::DeviceGone);
    server.child = Nbdkit::spawn(&server.socket, &slow).unwrap();
    let deadline = bench.clock.now() + Duration::from_secs(20);
    while bench.write(8192, &[4; 4096]).is_err() {
        assert!(bench.clock.now() < deadline, "not connected again");
        bench.ring.wait(&bench.clock, Some(bench.clock.now() + Duration::from_millis(50))).unwrap();
    }
    let flush = bench.bare(IoOp::Flush, ByteRange::default());
    assert_eq!(flush.unwrap_err().kind(), ErrorKind::DeviceGone);
    bench.write(4096, &[2; 4096]).unwrap();
    bench.bare(IoOp::Flush, ByteRange::default()).unwrap();
    assert_eq!(bench.read(4096, 4096).unwrap(), [2; 4096]);
}

#[test]
fn a_server_that_comes_back_smaller_is_not_used() {
    let Some(mut server) = Nbdkit::start(&["memory", "8M"]) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    let mut bench = Bench::new(&*device);
    bench.write(0, &[1; 512]).unwrap();
    server.kill();
    server.child = Nbdkit::spawn(&server.socket, &["memory", "4M"]).unwrap();
    let deadline = bench.clock.now() + Duration::from_secs(1);
    while bench.clock.now() < deadline {
        assert!(bench.read(0, 512).is_err());
        bench.ring.wait(&bench.clock, Some(bench.clock.now() + Duration::from_millis(50))).unwrap();
    }
}

#[test]
fn zeroes_that_must_be_fast_are_refused_where_they_are_not() {
    let Some(server) = Nbdkit::start(&["--filter=nozero", "memory", "8M"]) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    let mut bench = Bench::new(&*device);
    let tag = bench.tag();
    let mut io = Io::bare(tag, IoOp::WriteZeroes, ByteRange::new(0, 4096));
    io.flags = IoFlags { fast_only: true, ..IoFlags::default() };
    let result = bench.one(io).result;
    assert_eq!(result.is_ok(), device.info().fast_zero, "{result:?}");
}

#[test]
fn one_connection_only_where_the_server_does_not_share() {
    let single = ["--filter=multi-conn", "memory", "8M", "multi-conn-mode=disable"];
    let Some(server) = Nbdkit::start(&single) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    let bench = Bench::new(&*device);
    let refused = device.open_queue(&bench.ring).err().unwrap().to_string();
    assert!(refused.contains("one shard"), "{refused}");
    drop(bench);
    Bench::new(&*device).write(0, &[1; 512]).unwrap();
    let Some(server) = Nbdkit::start(&["memory", "8M"]) else { return };
    let device = open_primary(&server.uri("")).unwrap();
    let (mut first, mut second) = (Bench::new(&*device), Bench::new(&*device));
    first.write(0, &[5; 512]).unwrap();
    assert_eq!(second.read(0, 512).unwrap(), [5; 512]);
}

/// The handshake of a server with one export of 1 MiB; then its first request is received.
fn shake_hands(client: &mut UnixStream) {
    client.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
    let mut head = [0; 16];
    client.read_exact(&mut head[..4]).unwrap();
    loop {
        client.read_exact(&mut head).unwrap();
        let (option, len) = (head[11], u32::from_be_bytes(*head.last_chunk().unwrap()));
        client.read_exact(&mut vec![0; len as usize]).unwrap();
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
            bytes.extend(u32::from(option).to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            client.write_all(&bytes).unwrap();
        };
        if option == 7 {
            let export = [&[0; 2][..], &(1u64 << 20).to_be_bytes(), &[0, 1]].concat();
            reply(3, &export);
            reply(1, &[]);
            break;
        }
        reply(1 << 31 | 1, &[]);
    }
    client.read_exact(&mut [0; 28]).unwrap();
}

/// A log that keeps the errors in its lines.
#[derive(Clone, Default)]
struct Errors(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Errors {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

impl tracing::field::Visit for Errors {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        if field.name() == "error" {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

#[test]
fn the_log_says_why_a_connection_broke() {
    for (answer, why) in [
        (&b"garbage!"[..], "the server broke the protocol: reply magic: found 0x67617262"),
        (b"", "the server hung up"),
    ] {
        let path = TempPath::new();
        let listener = UnixListener::bind(&path.0).unwrap();
        let server = thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            shake_hands(&mut client);
            client.write_all(answer).unwrap();
        });
        let device = open_primary(&format!("nbd+unix:///?socket={}", path.0.display())).unwrap();
        let mut bench = Bench::new(&*device);
        let log = Errors::default();
        let read = tracing::subscriber::with_default(log.clone(), || bench.read(0, 4096));
        assert_eq!(read.unwrap_err().kind(), ErrorKind::DeviceGone);
        let errors = log.0.lock().unwrap();
        assert!(errors[0].starts_with(why), "{errors:?}");
        server.join().unwrap();
    }
}

/// Regression: a server that was stopped reads, when it goes on, what it had received on the broken
/// connection, while the next one is in use.
#[test]
fn changes_wait_after_a_server_that_did_not_hang_up_is_back() {
    let path = TempPath::new();
    let listener = UnixListener::bind(&path.0).unwrap();
    let server = thread::spawn(move || {
        let (mut old, _) = listener.accept().unwrap();
        shake_hands(&mut old);
        // It never answers the change, and keeps the connection.
        old.write_all(b"garbage!").unwrap();
        let (mut new, _) = listener.accept().unwrap();
        let back = Wall::now();
        shake_hands(&mut new);
        back.elapsed()
    });
    let device = open_primary(&format!("nbd+unix:///?socket={}", path.0.display())).unwrap();
    let mut bench = Bench::new(&*device);
    let mut straggles = true;
    while !server.is_finished() {
        assert!(bench.write(0, &[1; 4096]).is_err(), "it is never answered");
        straggles &= device.has_stragglers();
        thread::sleep(Duration::from_millis(20));
    }
    let waited = server.join().unwrap();
    assert!(waited >= STRAGGLE_MAX, "only {waited:?}");
    assert!(straggles, "another server would have to wait, too");
}
