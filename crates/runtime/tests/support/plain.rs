//! A protocol for tests, with a server and a client of it: a request is an operation, an
//! offset, a length and the data; an answer is a status and the data.

#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_block::{
    Arena, BufPool, ByteRange, Completion, DeviceInfo, Endpoint, Io, IoBuf, IoOp, IoTag, Outbox,
    Session, VolumeId,
};
use forebay_device::{BlockDevice, MemoryDevice};
use forebay_runtime::{Access, Address, Listener, MakeShard, Pool, PoolConfig, Uncached};
use forebay_volume::{Registry, Volume};

const HEAD: usize = 14;

/// One connection: a request's head consists of endpoint, operation, offset and length.
struct Plain {
    buffers: BufPool,
    in_flight: usize,
    greeted: bool,
    /// The client said goodbye: the connection closes when everything is answered.
    leaves: bool,
    ended: bool,
}

impl Session for Plain {
    fn start(&mut self, out: &mut Outbox) {
        out.bytes.extend(b"hello");
    }

    fn receive(&mut self, mut bytes: &[u8], out: &mut Outbox) -> usize {
        let all = bytes.len();
        while bytes.len() >= HEAD && self.wants_input() {
            self.greeted = true;
            let (endpoint, op) = (Endpoint(usize::from(bytes[0])), bytes[1]);
            let offset = u64::from_le_bytes(bytes[2..10].try_into().unwrap());
            let len = u32::from_le_bytes(bytes[10..14].try_into().unwrap()) as usize;
            let range = ByteRange { offset, len: len as u64 };
            let mut used = HEAD;
            let io = match op {
                0 => Io::read(IoTag(len as u64), range, self.buffers.get(len)),
                1 if bytes.len() < HEAD + len => break,
                1 => {
                    used += len;
                    Io::write(IoTag(0), offset, IoBuf::copy_of(&bytes[HEAD..used]))
                }
                2 => Io::flush(IoTag(0)),
                4 => {
                    self.leaves = true;
                    out.close = self.in_flight == 0;
                    return all;
                }
                _ => Io::bare(IoTag(0), IoOp::Discard, range),
            };
            out.ios.push((endpoint, io));
            self.in_flight += 1;
            bytes = &bytes[used..];
        }
        all - bytes.len()
    }

    fn complete(&mut self, done: Completion, out: &mut Outbox) {
        self.in_flight -= 1;
        out.bytes.push(done.result.map_or_else(|error| error.kind() as u8 + 1, |()| 0));
        if done.tag.0 > 0 {
            out.bytes.extend(&done.buf[..]);
        }
        out.close |= self.leaves && self.in_flight == 0;
    }

    fn wants_input(&self) -> bool {
        !self.ended && !self.leaves && self.in_flight < 64
    }

    fn is_negotiating(&self) -> bool {
        !self.greeted
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn shutdown(&mut self, out: &mut Outbox) {
        self.ended = true;
        out.bytes.extend(b"bye");
    }
}

/// A pool with a Unix socket and a TCP port.
pub struct Server {
    pub pool: Pool,
    pub path: PathBuf,
    pub tcp: SocketAddr,
}

impl Server {
    pub fn start(shards: usize, volumes: &[u64], change: impl FnOnce(&mut PoolConfig)) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("forebay-pool-{}-{serial}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut config = config(shards, volumes);
        change(&mut config);
        let buffers = BufPool::new(Arc::clone(&config.arena));
        let pool = Pool::start(config).unwrap();
        let unix = Address::Unix { path: path.clone(), access: Access::mode(0o600) };
        let tcp = Address::Tcp("127.0.0.1:0".parse().unwrap());
        let listeners = [&unix, &tcp].map(|address| Listener::bind(address).unwrap());
        let Address::Tcp(tcp) = *listeners[1].address() else { panic!("a TCP listener") };
        let factory = move || -> Box<dyn Session> {
            let buffers = buffers.clone();
            Box::new(Plain { buffers, in_flight: 0, greeted: false, leaves: false, ended: false })
        };
        pool.listen(listeners.into(), Arc::new(factory)).unwrap();
        Self { pool, path, tcp }
    }

    pub fn connect(&self) -> Client<UnixStream> {
        Client::greet(UnixStream::connect(&self.path).unwrap())
    }
}

pub fn config(shards: usize, volumes: &[u64]) -> PoolConfig {
    let table = volumes.iter().zip(0..).map(|(&size, id)| {
        Volume::new(VolumeId(id), format!("v{id}"), DeviceInfo::plain(size, "memory"))
    });
    let registry = Registry::new(table.collect()).unwrap();
    let primaries = volumes.iter().map(|&size| memory(size)).collect();
    let makers = (0..shards).map(|_| -> MakeShard { Box::new(|_| Box::<Uncached>::default()) });
    PoolConfig::new(registry, primaries, makers.collect(), Arena::new(8 << 20))
}

fn memory(size: u64) -> Arc<dyn BlockDevice> {
    Arc::new(MemoryDevice::new(size))
}

/// A client that has been greeted, or does not care.
pub struct Client<S>(pub S);

impl<S: Read + Write> Client<S> {
    pub fn greet(stream: S) -> Self {
        let mut client = Self(stream);
        assert_eq!(client.take(5), b"hello");
        client
    }

    pub fn send(&mut self, volume: u8, op: u8, offset: u64, len: usize, data: &[u8]) {
        let mut head = vec![volume, op];
        head.extend(offset.to_le_bytes());
        head.extend((len as u32).to_le_bytes());
        head.extend(data);
        self.0.write_all(&head).unwrap();
    }

    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn write(&mut self, volume: u8, offset: u64, data: &[u8]) -> u8 {
        self.send(volume, 1, offset, data.len(), data);
        self.take(1)[0]
    }

    pub fn read(&mut self, volume: u8, offset: u64, len: usize) -> Vec<u8> {
        self.send(volume, 0, offset, len, &[]);
        assert_eq!(self.take(1), [0]);
        self.take(len)
    }
}
