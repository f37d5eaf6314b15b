//! Pools of threads over devices in RAM: clients, their limits, the start and the stop.

#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use forebay_block::{DeviceInfo, IoQueue, Session};
use forebay_device::{BlockDevice, Ring};
use forebay_engine::Trust;
use forebay_runtime::detached::DetachedList;
use forebay_runtime::{Address, Listener, Pool, Record, Shard, StartError, Witness};

#[path = "support/odd.rs"]
mod odd;
#[path = "support/plain.rs"]
mod plain;
#[path = "support/shard.rs"]
mod shard;

use plain::{Client, Server, config};
use shard::Passing;

const MIB: u64 = 1 << 20;

#[test]
fn clients_on_every_thread_see_the_same_volumes() {
    let server = Server::start(3, &[64 * MIB, 8 * MIB], |_| ());
    let mut clients: Vec<_> = (0..6).map(|_| server.connect()).collect();
    for (i, client) in (1u8..).zip(&mut clients) {
        let offset = u64::from(i) * 8 * MIB - 1000;
        assert_eq!(client.write(0, offset, &[i; 2000]), 0);
        assert_eq!(client.write(1, u64::from(i) * MIB - 1, &[100 + i; 2]), 0);
    }
    let mut tcp = Client::greet(TcpStream::connect(server.tcp).unwrap());
    tcp.send(0, 2, 0, 0, &[]);
    assert_eq!(tcp.take(1), [0], "a flush is answered by all shards");
    for i in 1..=6u8 {
        assert_eq!(tcp.read(0, u64::from(i) * 8 * MIB - 1000, 2000), [i; 2000]);
        assert_eq!(tcp.read(1, u64::from(i) * MIB - 1, 2), [100 + i; 2]);
    }
    let stats = server.pool.stats().unwrap();
    assert_eq!(stats.clients, 7);
    assert!(stats.shards.iter().all(|shard| shard.connections >= 2), "spread evenly");
    assert_eq!(stats.volumes[0].latencies[0].count(), 6);
    assert_eq!(stats.volumes[1].latencies[1].count(), 6);
    assert_eq!(stats.total.lookups, stats.total.bypasses);
    let stopped = server.pool.stop(false);
    assert!(stopped.complete);
    assert!(server.pool.stats().is_none());
}

#[test]
fn many_requests_at_once_are_all_answered() {
    let server = Server::start(2, &[64 * MIB], |_| ());
    let threads: Vec<_> = (0..4u8)
        .map(|i| {
            let mut writer = server.connect();
            let mut reader = Client(writer.0.try_clone().unwrap());
            thread::spawn(move || {
                let sender = thread::spawn(move || {
                    for n in 0..5000u64 {
                        let offset = (n * 4096 * 7 + u64::from(i) * 16 * MIB) % (60 * MIB);
                        writer.send(0, 0, offset, 4096, &[]);
                    }
                    writer
                });
                for _ in 0..5000 {
                    let answer = reader.take(4097);
                    assert_eq!(answer, [0; 4097]);
                }
                sender.join().unwrap();
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let stats = server.pool.stats().unwrap();
    assert_eq!(stats.volumes[0].latencies[0].count(), 20_000);
    assert_eq!(stats.total.reads, 20_000);
}

#[test]
fn errors_reach_the_client_that_asked() {
    let server = Server::start(2, &[4 * MIB], |_| ());
    let mut client = server.connect();
    let out_of_range = forebay_block::ErrorKind::OutOfRange as u8 + 1;
    assert_eq!(client.write(0, 4 * MIB - 10, &[1; 20]), out_of_range);
    assert_eq!(client.write(0, 4 * MIB - 20, &[1; 20]), 0);
    assert_eq!(client.read(0, 4 * MIB - 21, 21)[0], 0);
}

#[test]
fn more_clients_than_the_limit_are_refused_until_one_leaves() {
    let server = Server::start(2, &[MIB], |config| config.clients = 3);
    let mut clients: Vec<_> = (0..3).map(|_| server.connect()).collect();
    let mut refused = UnixStream::connect(&server.path).unwrap();
    assert_eq!(refused.read(&mut [0; 1]).unwrap(), 0, "closed without a word");
    assert_eq!(server.pool.stats().unwrap().clients_refused, 1);
    clients.pop();
    let deadline = Instant::now() + Duration::from_secs(30);
    while server.pool.stats().unwrap().clients == 3 {
        assert!(Instant::now() < deadline, "the place of a client that left is not free");
        thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(server.connect().read(0, 0, 1), [0]);
}

#[test]
fn clients_over_tcp_leave_places_to_the_unix_socket_and_to_those_who_choose_a_volume() {
    let server = Server::start(2, &[MIB], |config| config.clients = 9);
    let connect = || Client::greet(TcpStream::connect(server.tcp).unwrap());
    let is_refused = || TcpStream::connect(server.tcp).unwrap().read(&mut [0; 1]).unwrap() == 0;
    let mut clients: Vec<_> = (0..4).map(|_| connect()).collect();
    assert!(is_refused(), "half of TCP's places are for those that have not chosen a volume");
    for client in &mut clients {
        assert_eq!(client.read(0, 0, 1), [0]);
    }
    clients.extend((0..4).map(|_| connect()));
    assert!(is_refused(), "and one of all places is the Unix socket's");
    assert_eq!(server.connect().read(0, 0, 1), [0]);
    assert_eq!(server.pool.stats().unwrap().clients_refused, 2);
}

#[test]
fn a_client_that_asks_for_nothing_is_disconnected_if_that_is_wished() {
    let idle = Some(Duration::from_millis(300));
    let server = Server::start(2, &[MIB], |config| config.idle = idle);
    let (mut quiet, mut busy) = (server.connect(), server.connect());
    assert_eq!(quiet.read(0, 0, 1), [0]);
    quiet.0.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    // It receives a farewell, and then the end of the stream.
    while !matches!(quiet.0.read(&mut [0; 16]), Ok(0)) {
        assert!(Instant::now() < deadline, "it is not disconnected");
        assert_eq!(busy.read(0, 0, 1), [0], "one that asks stays");
    }
}

#[test]
fn a_client_that_never_chooses_a_volume_is_disconnected() {
    let server = Server::start(2, &[MIB], |config| config.handshake = Duration::from_millis(200));
    let mut idle = server.connect();
    let mut busy = server.connect();
    assert_eq!(busy.read(0, 0, 1), [0]);
    let mut rest = Vec::new();
    idle.0.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    idle.0.read_to_end(&mut rest).unwrap();
    assert_eq!(busy.read(0, 0, 1), [0], "one that has chosen stays");
}

/// A client that said goodbye with requests in flight got their answers, but its connection never
/// closed, and its place was lost.
#[test]
fn a_goodbye_behind_requests_in_flight_closes_the_connection_after_their_answers() {
    let server = Server::start(2, &[64 * MIB], |config| config.clients = 1);
    for requests in [0, 1, 40] {
        let mut client = server.connect();
        for i in 0..requests {
            client.send(0, 0, i * MIB, 4096, &[]);
        }
        client.send(0, 4, 0, 0, &[]);
        client.0.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut all = Vec::new();
        client.0.read_to_end(&mut all).expect("the server hangs up");
        assert_eq!(all.len() as u64, requests * 4097 + 3, "every answer, and a farewell");
        let deadline = Instant::now() + Duration::from_secs(30);
        while server.pool.stats().unwrap().clients > 0 {
            assert!(Instant::now() < deadline, "its place is lost");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn a_stop_answers_what_is_in_flight_and_says_farewell() {
    let server = Server::start(2, &[64 * MIB], |_| ());
    let mut client = server.connect();
    for i in 0..32 {
        client.send(0, 0, i * MIB + 1000, 4096, &[]);
    }
    let first = client.take(4097);
    assert_eq!(first[0], 0);
    assert!(server.pool.stop(false).complete);
    let mut rest = Vec::new();
    client.0.read_to_end(&mut rest).unwrap();
    assert!(rest.windows(3).any(|three| three == b"bye"));
    assert_eq!((rest.len() - 3) % 4097, 0, "answers are whole");
    assert!(!server.path.exists());
    assert!(UnixStream::connect(&server.path).is_err());
}

#[test]
fn a_client_that_does_not_read_is_cut_off_at_a_stop_and_costs_little_before() {
    let server = Server::start(1, &[64 * MIB], |config| {
        config.farewell = Duration::from_millis(300);
    });
    let mut client = server.connect();
    client.0.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut head = vec![0, 0];
    head.extend(0u64.to_le_bytes());
    head.extend((MIB as u32).to_le_bytes());
    let mut taken = 0;
    while taken < 1_000_000 && client.0.write_all(&head).is_ok() {
        taken += 1;
    }
    assert!(taken < 1_000_000, "a client that does not read is not read from");
    let reads = server.pool.stats().unwrap().total.reads;
    assert!(reads <= 256, "{reads} MiB of answers were made for nobody");
    let before = Instant::now();
    assert!(server.pool.stop(false).complete);
    assert!(before.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_pool_that_is_dropped_ends_its_threads() {
    let server = Server::start(2, &[MIB], |_| ());
    let mut client = server.connect();
    assert_eq!(client.read(0, 0, 1), [0]);
    drop(server);
    let mut rest = Vec::new();
    client.0.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"bye");
}

#[test]
fn clients_that_leave_in_the_middle_leave_nothing_behind() {
    let server = Server::start(3, &[64 * MIB], |config| config.clients = 64);
    let path = server.path.clone();
    let threads: Vec<_> = (0..6u64)
        .map(|i| {
            let path = path.clone();
            thread::spawn(move || {
                for round in 0..40u64 {
                    let mut client = Client(UnixStream::connect(&path).unwrap());
                    let n = i * 40 + round;
                    match n % 4 {
                        0 => {}
                        1 => client.send(0, 1, n * 4096, 100_000, &[1; 5000]),
                        2 => (0..20).for_each(|k| client.send(0, 0, k * MIB + 7, 65_536, &[])),
                        _ => {
                            client.send(0, 2, 0, 0, &[]);
                            client.send(0, 3, n * MIB % (60 * MIB), MIB as usize, &[]);
                            client.take(6);
                        }
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let stats = server.pool.stats().unwrap();
        let left: usize = stats.shards.iter().map(|shard| shard.connections).sum();
        if stats.clients == 0 && left == 0 && stats.total.requests_in_flight == 0 {
            break;
        }
        assert!(Instant::now() < deadline, "{left} connections are left");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.connect().read(0, 0, 1), [0]);
}

#[test]
fn what_shards_want_recorded_is_recorded_before_they_are_told() {
    let dir = std::env::temp_dir().join(format!("forebay-witness-{}", std::process::id()));
    let witness = Witness::open(&dir).unwrap();
    let (trust, primaries) = (Trust::Full, Some(vec!["file:/disk".to_owned()]));
    let record = Record { uuid: [7; 16], epoch: 3, trust, dirty: true, primaries };
    let told: Vec<_> = (0..2).map(|_| Arc::new(Mutex::new(Vec::new()))).collect();
    // The first record cannot be written: a directory is in its place.
    let aside = dir.join(format!("{:032x}.witness.new", u128::from_be_bytes([7; 16])));
    std::fs::create_dir(&aside).unwrap();
    let server = Server::start(2, &[MIB], |config| {
        let (list, _) = DetachedList::open(witness.state(), record.uuid).unwrap();
        config.witness = Some((witness.clone(), record.clone(), list));
        for (shard, told) in config.shards.iter_mut().zip(&told) {
            let told = Arc::clone(told);
            *shard = Box::new(|_| -> Box<dyn Shard> { Box::new(odd::Failing::new(told)) });
        }
    });
    thread::sleep(Duration::from_millis(100));
    assert!(told.iter().all(|told| told.lock().unwrap().is_empty()), "told without a record");
    std::fs::remove_dir(&aside).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while told.iter().any(|told| told.lock().unwrap().last() != Some(&Trust::Nothing)) {
        assert!(Instant::now() < deadline, "{told:?}");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(witness.load([7; 16]).unwrap(), Some(Record { trust: Trust::Nothing, ..record }));
    for told in &told {
        assert_eq!(told.lock().unwrap().first(), Some(&Trust::DirtyOnly), "one step at a time");
    }
    assert!(server.pool.stop(false).complete);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// A device that refuses to open a queue.
struct Stubborn(DeviceInfo);

impl BlockDevice for Stubborn {
    fn info(&self) -> &DeviceInfo {
        &self.0
    }

    fn open_queue(&self, _ring: &Rc<Ring>) -> io::Result<Box<dyn IoQueue>> {
        Err(io::Error::other("no queue today"))
    }
}

#[test]
fn a_device_without_a_queue_fails_the_start_at_once() {
    let mut config = config(3, &[MIB]);
    config.primaries[0] = Arc::new(Stubborn(DeviceInfo::plain(MIB, "stubborn")));
    let before = Instant::now();
    let Err(error) = Pool::start(config) else { panic!("it started") };
    assert!(matches!(error, StartError::Io(_)));
    assert!(error.to_string().contains("no queue today"), "{error}");
    assert!(before.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_shard_that_refuses_its_cache_fails_the_start() {
    let mut config = config(3, &[MIB]);
    config.shards[1] = Box::new(|_| -> Box<dyn Shard> { Box::new(odd::Refusing::default()) });
    let Err(error) = Pool::start(config) else { panic!("it started") };
    assert_eq!(error.to_string(), "shard 1 cannot use the cache: it is someone else's");
}

#[test]
fn what_becomes_dirty_while_the_shards_stop_is_counted() {
    let server = Server::start(2, &[MIB], |config| {
        for shard in &mut config.shards {
            *shard = Box::new(|_| -> Box<dyn Shard> {
                Box::new(Passing { dirty_at_stop: 3, ..Passing::default() })
            });
        }
    });
    let stopped = server.pool.stop(false);
    assert!(stopped.complete);
    assert_eq!(stopped.dirty_blocks, 6);
}

#[test]
fn a_drain_before_a_stop_can_be_watched_and_given_up() {
    let server = Server::start(2, &[MIB], |config| {
        for shard in &mut config.shards {
            *shard = Box::new(|_| -> Box<dyn Shard> {
                Box::new(Passing { dirty: 7, ..Passing::default() })
            });
        }
    });
    let pool = server.pool.clone();
    let stop = thread::spawn(move || pool.stop(true));
    let deadline = Instant::now() + Duration::from_secs(30);
    while UnixStream::connect(&server.path).is_ok() {
        assert!(Instant::now() < deadline, "clients are still taken");
        thread::sleep(Duration::from_millis(2));
    }
    let stats = server.pool.stats().expect("it can be asked while it drains");
    assert_eq!(stats.shards.iter().map(|shard| shard.dirty_blocks).sum::<u64>(), 14);
    assert!(!stop.is_finished());
    // Ending the drain of a volume must not end the stop's drain.
    for volume in server.pool.registry().volumes() {
        server.pool.set_drain(volume.id, false);
    }
    thread::sleep(Duration::from_millis(200));
    assert!(!stop.is_finished(), "the stop's own drain goes on");
    // The stop begins its drain shortly after it has closed the listeners.
    while !stop.is_finished() {
        assert!(Instant::now() < deadline, "the drain is not given up");
        server.pool.give_up_drain();
        thread::sleep(Duration::from_millis(2));
    }
    let stopped = stop.join().unwrap();
    let late = Listener::bind(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
    let factory = || -> Box<dyn Session> { unreachable!("nobody is served any more") };
    assert!(server.pool.listen(vec![late], Arc::new(factory)).is_err());
    assert!(stopped.complete);
    assert_eq!(stopped.dirty_blocks, 14);
    assert_eq!(server.pool.stop(false), stopped, "a second stop gives the same answer");
}
