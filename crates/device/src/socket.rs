//! What the kernel knows of a connected socket's peer.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes sent that have not been taken: by the peer on a Unix socket, where the kernel's own memory
/// for them counts too, and by the peer's kernel over TCP (`SIOCOUTQ`, unix(7) and tcp(7)).
///
/// # Errors
/// When the kernel does not tell.
pub fn untaken(socket: impl AsFd) -> io::Result<u64> {
    let mut count: c_int = 0;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the call writes one int.
    let result = unsafe { libc::ioctl(socket, libc::TIOCOUTQ, &raw mut count) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(count).unwrap_or(0))
}

/// Whether the peer has closed its side, or is gone.
#[must_use]
pub fn has_hung_up(socket: impl AsFd) -> bool {
    let socket = socket.as_fd();
    let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_peer_takes_bytes_and_hangs_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let (mut unix, mut other) = UnixStream::pair().unwrap();
        assert!(!has_hung_up(&unix) && !has_hung_up(&tcp));
        unix.write_all(&[0; 100]).unwrap();
        let before = untaken(&unix).unwrap();
        assert!(before >= 100, "{before}");
        other.read_exact(&mut [0; 100]).unwrap();
        assert_eq!(untaken(&unix).unwrap(), 0);
        (&tcp).write_all(&[0; 100]).unwrap();
        peer.read_exact(&mut [0; 100]).unwrap();
        assert!(untaken(&tcp).unwrap() <= 100);
        drop(other);
        peer.shutdown(Shutdown::Write).unwrap();
        assert_eq!((&tcp).read(&mut [0]).unwrap(), 0, "the end has arrived");
        assert!(has_hung_up(&unix) && has_hung_up(&tcp));
    }
}
