//! An NBD server whose power can be cut: all or some of the answered but unflushed writes are lost,
//! and every connection breaks. It is up again at once, or when told.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::mem;
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const GO: u32 = 7;
const ACK: u32 = 1;
const INFO: u32 = 3;
const ERR_UNSUP: u32 = 1 << 31 | 1;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
/// Flags: flush is supported, and several connections may share the export.
const FLAGS: u16 = 1 | 1 << 2 | 1 << 8;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;

/// Length of the units that are lost or kept, in bytes.
const CHUNK: usize = 4096;

/// The server and its content.
#[derive(Clone)]
pub struct San(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// The content of the medium.
    durable: Vec<u8>,
    /// The content including the writes answered since the last flush.
    view: Vec<u8>,
    /// Chunks in which the two may differ.
    unflushed: BTreeSet<usize>,
    off: bool,
    /// Whether flushes are answered without being done.
    lies: bool,
    connections: Vec<UnixStream>,
    /// Number of writes until the power fails, right after the answer to the last.
    writes_left: Option<u64>,
    cuts: u64,
    /// A write to hold back.
    hold: Option<Hold>,
}

/// A write that lands after its client is gone.
#[derive(Clone, Copy)]
struct Hold {
    /// Its offset.
    at: u64,
    /// Time from the end of its connection until it lands.
    late: Duration,
    /// Whether its connection breaks at once.
    breaks: bool,
}

impl San {
    /// Serves `size` zero bytes at the Unix socket `path` until the process ends.
    ///
    /// # Panics
    /// If the socket cannot be created.
    pub fn start(path: &Path, size: usize) -> Self {
        let state = State { durable: vec![0; size], view: vec![0; size], ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let listener = UnixListener::bind(path).expect("a socket can be made");
        let theirs = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if locked(&theirs).off {
                    continue;
                }
                let state = Arc::clone(&theirs);
                thread::spawn(move || {
                    // Broken connections are the purpose of this server.
                    let _ = serve(stream, &state);
                });
            }
        });
        Self(state)
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        locked(&self.0)
    }

    /// Cuts the power and restores it.
    pub fn cut_power(&self) {
        self.locked().cut(|_| false);
    }

    /// Cuts the power; for each unflushed chunk, `kept` decides whether the medium has it.
    pub fn cut_some(&self, kept: impl FnMut(usize) -> bool) {
        self.locked().cut(kept);
    }

    /// Breaks the connections without losing anything.
    pub fn cut_links(&self) {
        self.locked().hang_up();
    }

    /// While it is off, nobody can connect. Existing connections stay.
    pub fn set_off(&self, off: bool) {
        self.locked().off = off;
    }

    /// Stops answering for this time.
    pub fn freeze(&self, time: Duration) {
        let _held = self.locked();
        thread::sleep(time);
    }

    /// From now on flushes are answered without being done.
    pub fn lie(&self) {
        self.locked().lies = true;
    }

    /// Changes the medium directly.
    pub fn change(&self, offset: u64, bytes: &[u8]) {
        let mut state = self.locked();
        let range = offset as usize..offset as usize + bytes.len();
        state.durable[range.clone()].copy_from_slice(bytes);
        state.view[range].copy_from_slice(bytes);
    }

    /// Makes the power fail each time that `writes` writes were answered; `None` ends that.
    pub fn cut_after(&self, writes: Option<u64>) {
        self.locked().writes_left = writes;
    }

    /// Number of power failures.
    pub fn cuts(&self) -> u64 {
        self.locked().cuts
    }

    /// The content of the medium at `offset`.
    pub fn durable(&self, offset: u64, len: usize) -> Vec<u8> {
        self.locked().durable[offset as usize..][..len].to_vec()
    }

    /// The data that a read would return.
    pub fn shown(&self, offset: u64, len: usize) -> Vec<u8> {
        self.locked().view[offset as usize..][..len].to_vec()
    }

    /// Breaks the connection at the next write at `offset`; the write lands `late` after the client
    /// has closed, and the client sees the end of the connection only then.
    pub fn hold(&self, offset: u64, late: Duration) {
        self.locked().hold = Some(Hold { at: offset, late, breaks: true });
    }

    /// Does not answer the next write at `offset`, nor anything after it on its connection; it
    /// lands `late` after the client is gone.
    pub fn outlive(&self, offset: u64, late: Duration) {
        self.locked().hold = Some(Hold { at: offset, late, breaks: false });
    }

    /// Whether the write to hold back has come.
    pub fn holds(&self) -> bool {
        self.locked().hold.is_none()
    }
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("nobody panics with it")
}

fn chunk(number: usize, size: usize) -> Range<usize> {
    number * CHUNK..size.min((number + 1) * CHUNK)
}

impl State {
    fn cut(&mut self, mut kept: impl FnMut(usize) -> bool) {
        self.cuts += 1;
        for number in mem::take(&mut self.unflushed) {
            let range = chunk(number, self.view.len());
            if kept(number) {
                self.durable[range.clone()].copy_from_slice(&self.view[range]);
            } else {
                self.view[range.clone()].copy_from_slice(&self.durable[range]);
            }
        }
        self.hang_up();
    }

    fn flush(&mut self) {
        for number in mem::take(&mut self.unflushed) {
            let range = chunk(number, self.view.len());
            self.durable[range.clone()].copy_from_slice(&self.view[range]);
        }
    }

    fn write(&mut self, range: Range<usize>, data: &[u8]) {
        self.unflushed.extend(range.start / CHUNK..range.end.div_ceil(CHUNK));
        self.view[range].copy_from_slice(data);
    }

    fn hang_up(&mut self) {
        for stream in self.connections.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn serve(mut stream: UnixStream, state: &Mutex<State>) -> io::Result<()> {
    let size = locked(state).view.len();
    handshake(&mut stream, size as u64)?;
    let copy = stream.try_clone()?;
    locked(state).connections.push(copy);
    let mut head = [0; 28];
    loop {
        stream.read_exact(&mut head)?;
        assert_eq!(head[..4], REQUEST_MAGIC.to_be_bytes());
        let command = u16::from_be_bytes([head[6], head[7]]);
        let at = u64::from_be_bytes(head[16..24].try_into().expect("eight bytes"));
        let len = u32::from_be_bytes(head[24..28].try_into().expect("four bytes")) as usize;
        let range = at as usize..at as usize + len;
        let mut data = vec![0; if command == WRITE { len } else { 0 }];
        stream.read_exact(&mut data)?;
        let mut answer = [REPLY_MAGIC.to_be_bytes(), [0; 4]].concat();
        answer.extend_from_slice(&head[8..16]);
        let mut state_now = locked(state);
        match command {
            READ => answer.extend_from_slice(&state_now.view[range]),
            WRITE => {
                if let Some(hold) = state_now.hold.take_if(|hold| hold.at == at) {
                    drop(state_now);
                    return land_late(&stream, state, (range, &data), hold);
                }
                state_now.write(range, &data);
            }
            FLUSH if state_now.lies => {}
            FLUSH => state_now.flush(),
            DISC => return Ok(()),
            other => panic!("command {other} is not known here"),
        }
        stream.write_all(&answer)?;
        if command == WRITE
            && let Some(left) = &mut state_now.writes_left
        {
            *left -= 1;
            if *left == 0 {
                state_now.writes_left = None;
                state_now.cut(|_| false);
            }
        }
    }
}

/// Stops answering; carries the write out some time after the client has closed the connection.
fn land_late(
    mut stream: &UnixStream,
    state: &Mutex<State>,
    (range, data): (Range<usize>, &[u8]),
    hold: Hold,
) -> io::Result<()> {
    if hold.breaks {
        // A protocol violation makes the client give up the connection.
        stream.write_all(&[0xff; 16])?;
    }
    let mut rest = Vec::new();
    // A client that was killed may have left answers unread, which is an error here.
    let _ = stream.read_to_end(&mut rest);
    thread::sleep(hold.late);
    locked(state).write(range, data);
    Ok(())
}

fn handshake(stream: &mut UnixStream, size: u64) -> io::Result<()> {
    stream.write_all(&[&b"NBDMAGIC"[..], OPTION_MAGIC, &3u16.to_be_bytes()].concat())?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let option = u32::from_be_bytes(head[8..12].try_into().expect("four bytes"));
        let len = u32::from_be_bytes(head[12..16].try_into().expect("four bytes"));
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend(option.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            stream.write_all(&bytes)
        };
        if option != GO {
            reply(ERR_UNSUP, &[])?;
            continue;
        }
        let export = [&0u16.to_be_bytes()[..], &size.to_be_bytes(), &FLAGS.to_be_bytes()];
        reply(INFO, &export.concat())?;
        return reply(ACK, &[]);
    }
}
