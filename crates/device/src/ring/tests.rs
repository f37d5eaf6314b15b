//! The ring alone: files, sockets, wake-ups, and closing with operations in flight.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::thread;

use forebay_block::{BufPool, IoBuf};

use super::*;

fn finish(ring: &Ring, client: &Client, count: usize) -> Vec<Done> {
    let clock = Clock::start();
    let mut done = Vec::new();
    while done.len() < count {
        assert!(clock.now() < Instant::default() + Duration::from_secs(10), "nothing completes");
        ring.wait(&clock, Some(clock.now() + Duration::from_millis(200))).unwrap();
        client.reap(&mut done);
    }
    done
}

#[test]
fn written_bytes_are_read_back_from_heap_and_arena() {
    let arena = Arena::new(3 << 20);
    let pool = BufPool::new(Arc::clone(&arena));
    let ring = Ring::new(32, Some(arena)).unwrap();
    let client = ring.client();
    let file = ring.register(crate::testing::temp_file(1 << 20)).unwrap();
    for (token, mut buf) in [(1, pool.get(4096)), (2, IoBuf::zeroed(4096))] {
        buf.fill(token as u8);
        let op = Op::Write { offset: token * 4096, buf, span: 0..4096, durable: token == 1 };
        client.submit(&file, token, op).unwrap();
    }
    let done = finish(&ring, &client, 2);
    assert!(done.iter().all(|d| d.result == Ok(4096) && !d.more));
    let op = Op::Read { offset: 4096, buf: pool.get(8192), span: 0..8192 };
    client.submit(&file, 3, op).unwrap();
    let done = finish(&ring, &client, 1).remove(0);
    let Payload::Buf(buf) = done.payload else { panic!("a read hands its buffer back") };
    assert!(buf[..4096].iter().all(|&b| b == 1) && buf[4096..].iter().all(|&b| b == 2));
}

#[test]
fn a_wake_from_another_thread_ends_the_wait_and_is_never_lost() {
    let ring = Ring::new(8, None).unwrap();
    let clock = Clock::start();
    let sent = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let (waker, counter) = (ring.waker(), Arc::clone(&sent));
    let thread = thread::spawn(move || {
        for _ in 0..20_000 {
            counter.fetch_add(1, std::sync::atomic::Ordering::Release);
            waker.wake();
        }
    });
    let mut seen = 0;
    while seen < 20_000 {
        ring.wait(&clock, Some(clock.now() + Duration::from_secs(20))).unwrap();
        seen = sent.load(std::sync::atomic::Ordering::Acquire);
    }
    assert!(clock.now() < Instant::default() + Duration::from_secs(19), "a wake-up was lost");
    thread.join().unwrap();
}

#[test]
fn wait_returns_at_its_time_without_events() {
    let ring = Ring::new(8, None).unwrap();
    let clock = Clock::start();
    let until = clock.now() + Duration::from_millis(20);
    while clock.now() < until {
        ring.wait(&clock, Some(until)).unwrap();
    }
    assert!(clock.now().since(until) < Duration::from_secs(2));
}

#[test]
fn sockets_send_receive_and_report_the_end() {
    let ring = Ring::new(8, None).unwrap();
    let client = ring.client();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let file = ring.register(&ours).unwrap();
    client.submit(&file, 1, Op::Send { bytes: b"xhello".to_vec(), span: 1..6 }).unwrap();
    assert_eq!(finish(&ring, &client, 1)[0].result, Ok(5));
    let mut got = [0; 5];
    theirs.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
    client.submit(&file, 2, Op::Receive { bytes: vec![0; 16], span: 4..16 }).unwrap();
    theirs.write_all(b"answer").unwrap();
    let done = finish(&ring, &client, 1).remove(0);
    assert_eq!(done.result, Ok(6));
    let Payload::Bytes(bytes) = done.payload else { panic!("a receive hands its bytes back") };
    assert_eq!(&bytes[4..10], b"answer");
    drop(theirs);
    client.submit(&file, 3, Op::Receive { bytes, span: 0..16 }).unwrap();
    assert_eq!(finish(&ring, &client, 1)[0].result, Ok(0));
}

#[test]
fn one_accept_takes_many_connections() {
    let ring = Ring::new(8, None).unwrap();
    let client = ring.client();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let file = ring.register(&listener).unwrap();
    client.submit(&file, 1, Op::Accept).unwrap();
    ring.wait(&Clock::start(), Some(Instant(0))).unwrap();
    let address = listener.local_addr().unwrap();
    let peers: Vec<_> = (0..3).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
    let done = finish(&ring, &client, peers.len());
    assert!(done.iter().all(|d| d.more && matches!(d.payload, Payload::Socket(_))));
}

#[test]
fn dropping_a_socket_cancels_what_waits_on_it_and_frees_its_place() {
    let ring = Ring::new(8, None).unwrap();
    let client = ring.client();
    for round in 0..FILES_MAX + 10 {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let file = ring.register(&ours).unwrap();
        let op = Op::Receive { bytes: vec![0; 16], span: 0..16 };
        client.submit(&file, u64::from(round), op).unwrap();
        drop((file, ours));
        let done = finish(&ring, &client, 1).remove(0);
        assert_eq!(done.result, Err(Errno::CANCELED));
        assert_eq!(theirs.read(&mut [0; 1]).unwrap(), 0, "the connection is closed");
    }
}

#[test]
fn a_dropped_client_gets_nothing_and_its_place_is_used_again() {
    let ring = Ring::new(8, None).unwrap();
    let clock = Clock::start();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let file = ring.register(&ours).unwrap();
    let first = ring.client();
    first.submit(&file, 7, Op::Receive { bytes: vec![0; 4], span: 0..4 }).unwrap();
    let place = first.id;
    drop(first);
    let second = ring.client();
    assert_ne!(second.id, place, "a place with an operation in flight is not given away");
    theirs.write_all(b"late").unwrap();
    for _ in 0..5 {
        ring.wait(&clock, Some(clock.now() + Duration::from_millis(20))).unwrap();
    }
    let mut done = Vec::new();
    second.reap(&mut done);
    assert!(done.is_empty());
    assert_eq!(ring.client().id, place);
}

#[test]
fn operations_in_flight_are_limited() {
    let ring = Ring::new(8, None).unwrap();
    let client = ring.client();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let file = ring.register(&ours).unwrap();
    let mut taken = 0;
    while client.submit(&file, 0, Op::Poll { events: libc::POLLIN as u32 }).is_ok() {
        taken += 1;
        assert!(taken <= 32, "no limit");
    }
    assert_eq!(taken, 32);
    assert_eq!(client.in_flight(), 32);
}

#[test]
fn a_ring_may_be_dropped_with_operations_in_flight() {
    let ring = Ring::new(8, None).unwrap();
    let client = ring.client();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let file = ring.register(&ours).unwrap();
    client.submit(&file, 1, Op::Receive { bytes: vec![0; 16], span: 0..16 }).unwrap();
    let started = Clock::start();
    drop((client, file, ring));
    assert!(
        started.now() < Instant::default() + Duration::from_secs(2),
        "cancelled, not waited for"
    );
}

/// Set-ups for kernels without the newest features.
#[test]
fn older_set_ups_serve_too() {
    let all = SETUPS;
    for (setup, wide) in all.into_iter().flat_map(|setup| [(setup, false), (setup, true)]) {
        let ring = Ring::with_setups(8, None, &[setup], wide).unwrap();
        assert_eq!((ring.setup(), ring.is_wide()), (setup, wide));
        let client = ring.client();
        let file = ring.register(crate::testing::temp_file(1 << 20)).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = ring.register(&ours).unwrap();
        client.submit(&socket, 0, Op::Receive { bytes: vec![0; 8], span: 0..8 }).unwrap();
        for token in 1..100 {
            let op = Op::Read { offset: 0, buf: IoBuf::zeroed(4096), span: 0..4096 };
            client.submit(&file, token, op).unwrap_or_else(|_| panic!("{setup:?}: {token}"));
            assert_eq!(finish(&ring, &client, 1)[0].token, token);
        }
        theirs.write_all(b"x").unwrap();
        assert_eq!(finish(&ring, &client, 1)[0].token, 0);
        let waker = ring.waker();
        let thread = thread::spawn(move || waker.wake());
        let clock = Clock::start();
        ring.wait(&clock, Some(clock.now() + Duration::from_secs(10))).unwrap();
        assert!(clock.now() < Instant::default() + Duration::from_secs(9));
        thread.join().unwrap();
    }
}

#[test]
fn a_refusal_says_what_to_do() {
    let text = |error| explained(&io::Error::from_raw_os_error(error)).to_string();
    assert!(text(libc::ENOSYS).contains("5.19") && text(libc::EINVAL).contains("too old"));
    assert!(text(libc::EPERM).contains("io_uring_disabled"));
}
