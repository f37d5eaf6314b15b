//! What a request must be: a GET without a body, to a name of this server, with the token. And the
//! headers of every answer.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;

use super::super::Refusal;
use crate::api::ErrorBody;

/// Lengths of a token, in bytes.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=256;
/// Most bytes of a token's file.
const FILE_BYTES_MAX: u64 = 1024;

/// The page may load its own files and talk to its own server; nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Headers of every answer.
const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// What a client must know.
pub struct Token(Vec<u8>);

impl Token {
    /// Reads the token from a file: its first line.
    ///
    /// # Errors
    /// If it cannot be read, others may read or write it, or it is too short or too long.
    pub fn read(path: &Path) -> Result<Self, String> {
        use std::os::unix::fs::MetadataExt;
        let refused = |why: String| {
            let shown = path.display();
            format!(
                "token file {shown}: {why}; make it with (umask 077; head -c 24 /dev/urandom | \
                 base64 > {shown})"
            )
        };
        let found = std::fs::metadata(path).map_err(|error| refused(error.to_string()))?;
        if !found.is_file() || found.len() > FILE_BYTES_MAX {
            return Err(refused(format!("is no file of at most {FILE_BYTES_MAX} bytes")));
        }
        if found.mode() & 0o027 != 0 {
            return Err(refused(format!("mode {:04o} lets others use it", found.mode() & 0o7777)));
        }
        let text = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
        let token = text.lines().next().unwrap_or_default().trim();
        if !TOKEN_BYTES.contains(&token.len()) || !token.bytes().all(|byte| byte.is_ascii_graphic())
        {
            let what = format!(
                "its first line has {} bytes; use {} to {} printable ones without spaces",
                token.len(),
                TOKEN_BYTES.start(),
                TOKEN_BYTES.end()
            );
            return Err(refused(what));
        }
        Ok(Self(token.as_bytes().to_owned()))
    }

    /// Whether a request has it, in a time that does not depend on where it differs.
    fn is_in(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let given = given.and_then(|value| value.strip_prefix(b"Bearer "));
        given.is_some_and(|given| given.ct_eq(&self.0).into())
    }
}

/// The checks of a listener.
pub struct Guard {
    tcp: bool,
    token: Option<Token>,
    hosts: Vec<String>,
}

impl Guard {
    /// Of a listener that is reached over TCP or not, and has these names.
    pub fn new(tcp: bool, token: Option<Token>, hosts: Vec<String>) -> Self {
        Self { tcp, token, hosts }
    }

    /// Whether a request names this server. A page whose name was bound to this address sends that
    /// name; an address cannot be bound to another one.
    fn knows(&self, headers: &HeaderMap) -> bool {
        if !self.tcp {
            return true;
        }
        let hosts: Vec<_> = headers.get_all(header::HOST).iter().collect();
        let [host] = hosts[..] else { return false };
        let Ok(host) = host.to_str() else { return false };
        let name = without_port(host);
        let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        bare.parse::<IpAddr>().is_ok()
            || name.eq_ignore_ascii_case("localhost")
            || self.hosts.iter().any(|known| name.eq_ignore_ascii_case(known))
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Refuses what is no GET to this server, and adds the headers to every answer.
pub async fn request(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let has_body = headers.contains_key(header::TRANSFER_ENCODING)
        || headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != "0");
    let mut answer = if !guard.knows(headers) {
        let what = "this server does not know the name in Host";
        let hint = "use its address, or add the name to hosts of [web]";
        refusal(StatusCode::MISDIRECTED_REQUEST, what, hint)
    } else if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let what = "this listener only answers GET";
        refusal(StatusCode::METHOD_NOT_ALLOWED, what, "use the control socket to change something")
    } else if has_body {
        refusal(StatusCode::PAYLOAD_TOO_LARGE, "a GET has no body here", "send none")
    } else {
        next.run(request).await
    };
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

/// Refuses requests without the token.
pub async fn token(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    if guard.token.as_ref().is_some_and(|token| !token.is_in(request.headers())) {
        let what = "the token is missing or wrong";
        let hint = "send it as Authorization: Bearer TOKEN; it is in token_file of [web]";
        let mut answer = refusal(StatusCode::UNAUTHORIZED, what, hint);
        let challenge = HeaderValue::from_static("Bearer");
        answer.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        return answer;
    }
    next.run(request).await
}

fn refusal(status: StatusCode, error: &str, hint: &str) -> Response {
    let body = ErrorBody { error: error.to_owned(), hint: hint.to_owned() };
    Refusal(status, body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(host: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::HOST, HeaderValue::from_str(host).expect("a value"))])
    }

    #[test]
    fn only_its_own_names_are_answered() {
        let guard = Guard::new(true, None, vec!["cache.lan".to_owned()]);
        let good = ["127.0.0.1:7331", "10.0.0.9", "[::1]:7331", "LocalHost:7331", "cache.lan:80"];
        good.iter().for_each(|host| assert!(guard.knows(&named(host)), "{host}"));
        let bad = [
            "evil.example",
            "evil.example:7331",
            "127.0.0.1.evil.example",
            "",
            "localhost.x",
            "cache.lan:x",
        ];
        bad.iter().for_each(|host| assert!(!guard.knows(&named(host)), "{host}"));
        assert!(!guard.knows(&HeaderMap::new()), "a name is needed");
        let mut two = named("127.0.0.1");
        two.append(header::HOST, HeaderValue::from_static("localhost"));
        assert!(!guard.knows(&two), "and only one");
    }

    #[test]
    fn a_token_is_compared_whole() {
        let token = Token(b"0123456789abcdef".to_vec());
        let with = |value: &'static str| {
            HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(value))])
        };
        assert!(token.is_in(&with("Bearer 0123456789abcdef")));
        for value in
            ["Bearer 0123456789abcde", "Bearer 0123456789abcdefg", "0123456789abcdef", "Bearer "]
        {
            assert!(!token.is_in(&with(value)), "{value}");
        }
        assert!(!token.is_in(&HeaderMap::new()));
    }
}
