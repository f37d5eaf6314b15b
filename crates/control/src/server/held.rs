//! A connection that has one of a limited number of places.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep};

/// A connection, with its permit. It breaks if it is idle for too long: a place belongs to those
/// who use it.
pub(super) struct Held<S> {
    stream: S,
    /// How long it may be idle.
    limit: Duration,
    /// Ends when it has been idle for so long.
    idle: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl<S> Held<S> {
    /// A connection that may be idle for `limit`.
    pub(super) fn new(stream: S, limit: Duration, place: OwnedSemaphorePermit) -> Self {
        Self { stream, limit, idle: Box::pin(sleep(limit)), _place: place }
    }

    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    /// Notes that bytes have come or gone.
    fn is_used(&mut self) {
        let until = Instant::now() + self.limit;
        self.idle.as_mut().reset(until);
    }

    /// Waits for bytes to come or go, or fails when none have for too long.
    fn wait<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        self.idle.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Held<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(context, buf);
        if read.is_ready() {
            self.is_used();
            return read;
        }
        self.wait(context)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Held<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        if written.is_ready() {
            self.is_used();
            return written;
        }
        self.wait(context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Write;
    use std::sync::Arc;

    use tokio::net::UnixStream;
    use tokio::sync::Semaphore;

    use super::*;

    /// A connection with this limit, its client, and the places, of which it has the only one.
    async fn held(
        limit: Duration,
    ) -> (Held<UnixStream>, std::os::unix::net::UnixStream, Arc<Semaphore>) {
        let places = Arc::new(Semaphore::new(1));
        let place = Arc::clone(&places).acquire_owned().await.expect("it is free");
        let pair = std::os::unix::net::UnixStream::pair();
        let (client, server) = pair.expect("two sockets");
        server.set_nonblocking(true).expect("it is a socket");
        let server = UnixStream::from_std(server).expect("it is a socket");
        (Held::new(server, limit, place), client, places)
    }

    async fn read(held: &mut Held<UnixStream>) -> io::Result<()> {
        let mut byte = [0];
        let mut buf = ReadBuf::new(&mut byte);
        poll_fn(|context| Pin::new(&mut *held).poll_read(context, &mut buf)).await
    }

    /// Regression: clients that connected and said nothing kept all places.
    #[test]
    fn an_idle_connection_ends_and_gives_its_place_back() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let (mut held, mut client, places) = held(Duration::from_millis(300)).await;
            let began = Instant::now();
            for _ in 0..4 {
                sleep(Duration::from_millis(100)).await;
                client.write_all(&[7]).expect("it is sent");
                read(&mut held).await.expect("it is used");
            }
            let error = read(&mut held).await.expect_err("nothing comes");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(began.elapsed() >= Duration::from_millis(700));
            drop(held);
            assert_eq!(places.available_permits(), 1);
        });
    }

    /// Clients that sent requests and took no answer kept all places.
    #[test]
    fn a_connection_that_takes_nothing_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let (mut held, _client, _places) = held(Duration::from_millis(100)).await;
            let error = loop {
                let bytes = [7; 4096];
                let write =
                    |context: &mut Context<'_>| Pin::new(&mut held).poll_write(context, &bytes);
                if let Err(error) = poll_fn(write).await {
                    break error;
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }
}
