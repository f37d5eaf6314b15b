//! Who may change something through the control socket. Whoever may connect may read; the kernel
//! says which user is at the other end (`SO_PEERCRED`).

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use axum::Json;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::net::UnixStream;

use crate::api::ErrorBody;

/// Who may change something through the control socket.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ChangesBy {
    /// Root, the server's user, and the owner of the socket.
    #[default]
    Owner,
    /// Everyone who may connect.
    Anyone,
}

/// The user at the other end of a connection; `None` if unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer(Option<u32>);

impl Peer {
    /// The peer of a connection.
    pub fn of(stream: &UnixStream) -> Self {
        Self(stream.peer_cred().ok().map(|credentials| credentials.uid()))
    }
}

/// The users who may change something; `None` is everyone.
#[derive(Clone, Debug)]
pub struct Changers(Option<Arc<[u32]>>);

impl Changers {
    /// Those of the socket at `path`.
    pub fn of(changes: ChangesBy, path: &Path) -> Self {
        if changes == ChangesBy::Anyone {
            return Self(None);
        }
        let owner = std::fs::symlink_metadata(path).ok().map(|found| found.uid());
        let own = rustix::process::geteuid().as_raw();
        Self(Some([0, own].into_iter().chain(owner).collect()))
    }

    fn includes(&self, peer: Peer) -> bool {
        let Self(Some(users)) = self else { return true };
        peer.0.is_some_and(|user| users.contains(&user))
    }
}

/// Refuses requests that change something, unless the peer may. An unknown peer may only read.
pub async fn check(State(changers): State<Changers>, request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<ConnectInfo<Peer>>();
    let peer = peer.map_or(Peer(None), |&ConnectInfo(peer)| peer);
    let reads = [Method::GET, Method::HEAD].contains(request.method());
    if reads || changers.includes(peer) {
        return next.run(request).await;
    }
    let who = peer.0.map_or("an unknown user".to_owned(), |user| format!("user {user}"));
    let error = format!("{who} may read the status of this server, but change nothing");
    let hint = "do it as root or as the owner of the control socket, or let everyone who may \
                connect with [control] changes = \"anyone\"";
    let body = ErrorBody { error, hint: hint.to_owned() };
    (StatusCode::FORBIDDEN, Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_the_servers_user_and_the_owner_may_change() {
        let directory = std::env::temp_dir();
        let owner = std::fs::metadata(&directory).expect("it is there").uid();
        let own = rustix::process::geteuid().as_raw();
        let some = Changers::of(ChangesBy::Owner, &directory);
        for user in [0, own, owner] {
            assert!(some.includes(Peer(Some(user))), "{user}");
        }
        let stranger = Peer(Some(4_000_000_001));
        assert!(!some.includes(stranger) && !some.includes(Peer(None)));
        let all = Changers::of(ChangesBy::Anyone, &directory);
        assert!(all.includes(stranger));
    }
}
