//! Following the events of a server: server-sent events over the control socket.

use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::{Client, ClientError};
use crate::api::{Acknowledged, ErrorBody, Event};

/// The server says every 15 s that it is alive.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Most bytes of a message.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// A message of the stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Followed {
    /// An event.
    Event(Event),
    /// Somebody has acknowledged an event.
    Acknowledged(Acknowledged),
}

impl Client {
    /// Hands every event with a number above `after` to `take`, then new ones as they happen, until
    /// `take` returns false or the server ends the stream.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub fn follow(
        &self,
        after: u64,
        mut take: impl FnMut(Followed) -> bool,
    ) -> Result<(), ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|source| self.io(source))?;
        runtime.block_on(async {
            let mut body = self.stream(after).await?;
            let mut pending = Vec::new();
            loop {
                let next = tokio::time::timeout(SILENCE_MAX, body.frame()).await;
                let next = next.map_err(|_| ClientError::Timeout {
                    path: self.socket.clone(),
                    after: SILENCE_MAX,
                })?;
                let Some(Ok(frame)) = next else { return Ok(()) };
                let Ok(bytes) = frame.into_data() else { continue };
                pending.extend_from_slice(&bytes);
                if pending.len() > MESSAGE_BYTES_MAX {
                    return Err(self.unexpected("a message is too long"));
                }
                while let Some(end) = pending.windows(2).position(|two| two == b"\n\n") {
                    let message: Vec<u8> = pending.drain(..end + 2).collect();
                    let message = parse(&String::from_utf8_lossy(&message));
                    let message = message.map_err(|error| self.unexpected(error))?;
                    if message.is_some_and(|message| !take(message)) {
                        return Ok(());
                    }
                }
            }
        })
    }

    async fn stream(&self, after: u64) -> Result<Incoming, ClientError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|source| self.io(source))?;
        let other = |error: hyper::Error| self.io(std::io::Error::other(error));
        let connected = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = connected.map_err(other)?;
        tokio::spawn(connection);
        let request = Request::get(format!("/v1/events/stream?after={after}"))
            .header("host", "forebay")
            .body(Full::new(Bytes::new()))
            .map_err(|error| self.unexpected(error))?;
        let answer = sender.send_request(request).await.map_err(other)?;
        if answer.status().is_success() {
            return Ok(answer.into_body());
        }
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.map_err(other)?.to_bytes();
        let refused: Result<ErrorBody, _> = serde_json::from_slice(&body);
        let ErrorBody { error, hint } = refused.map_err(|error| self.unexpected(error))?;
        Err(ClientError::Refused { status, error, hint })
    }
}

/// A message; `None` if it is a sign of life, or of an unknown kind.
fn parse(message: &str) -> Result<Option<Followed>, serde_json::Error> {
    let field = |name: &str| {
        let mut lines = message.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim_start()))
    };
    match (field("event"), field("data")) {
        (Some("event"), Some(data)) => Ok(Some(Followed::Event(serde_json::from_str(data)?))),
        (Some("acknowledged"), Some(data)) => {
            Ok(Some(Followed::Acknowledged(serde_json::from_str(data)?)))
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_of_life_are_no_messages() {
        assert_eq!(parse(":\n\n").expect("it is good"), None);
        assert_eq!(parse("event: later\ndata: {}\n\n").expect("it is good"), None);
        let who = Acknowledged { id: 3, by: "me".to_owned() };
        let text = "event: acknowledged\ndata: {\"id\":3,\"by\":\"me\"}\n\n";
        assert_eq!(parse(text).expect("it is good"), Some(Followed::Acknowledged(who)));
        parse("event: event\ndata: {}\n\n").expect_err("an event has fields");
    }
}
