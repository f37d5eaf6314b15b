//! NBD endpoints and their settings: `unix:PATH` or `tcp:HOST:PORT`, followed by settings of this
//! endpoint, each after a comma.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::access::{SocketAccess, SocketMode};
use crate::config::TlsPolicy;
use crate::settings::{Value, parse_named};

/// Settings that may follow the address, for messages.
const SETTINGS: &str = "tls=POLICY, and for Unix sockets mode=0660, owner=NAME, group=NAME";

/// An NBD endpoint.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Listen {
    /// Its address.
    pub at: Place,
    /// Whether its clients may or must use TLS; see [`Listen::tls_by`] when absent.
    pub tls: Option<TlsPolicy>,
    /// Permissions; for Unix sockets only.
    pub access: SocketAccess,
}

/// The address of an endpoint.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Place {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port of a host, as the resolver understands it; IPv6 addresses without brackets.
    Tcp(String, u16),
}

impl Listen {
    /// Whether its clients may or must use TLS if `general` is the server's setting, which applies
    /// to TCP. Access to a Unix socket is controlled by its permissions.
    #[must_use]
    pub fn tls_by(&self, general: TlsPolicy) -> TlsPolicy {
        self.tls.unwrap_or(match self.at {
            Place::Unix(_) => TlsPolicy::Off,
            Place::Tcp(..) => general,
        })
    }
}

impl From<Place> for Listen {
    fn from(at: Place) -> Self {
        Self { at, tls: None, access: SocketAccess::default() }
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut listen = Self::from(parts.next().unwrap_or_default().parse::<Place>()?);
        for part in parts {
            let refused = |why: String| format!("endpoint {text:?}: {why}");
            let Some((key, value)) = part.split_once('=') else {
                let what = format!("{part:?} after the comma is not a setting; known: {SETTINGS}");
                return Err(refused(what));
            };
            match key {
                "tls" => listen.tls = Some(parse_named(value).map_err(refused)?),
                "mode" | "owner" | "group" if matches!(listen.at, Place::Tcp(..)) => {
                    return Err(refused(format!("{key} is for Unix sockets")));
                }
                "mode" => listen.access.mode = Some(value.parse().map_err(refused)?),
                "owner" => listen.access.owner = Some(value.to_owned()),
                "group" => listen.access.group = Some(value.to_owned()),
                _ => return Err(refused(format!("unknown setting {key:?}; known: {SETTINGS}"))),
            }
        }
        Ok(listen)
    }
}

/// The text from which it can be read again.
impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, tls, access: SocketAccess { mode, owner, group } } = self;
        write!(f, "{at}")?;
        tls.map_or(Ok(()), |tls| write!(f, ",tls={}", Value::text(&tls)))?;
        mode.map_or(Ok(()), |SocketMode(mode)| write!(f, ",mode={mode:04o}"))?;
        owner.as_ref().map_or(Ok(()), |owner| write!(f, ",owner={owner}"))?;
        group.as_ref().map_or(Ok(()), |group| write!(f, ",group={group}"))
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused =
            |why: &str| format!("{text:?} is no endpoint: {why}; use unix:PATH or tcp:HOST:PORT");
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err(refused("the path is missing"));
            }
            return Ok(Self::Unix(PathBuf::from(path)));
        }
        let address = text.strip_prefix("tcp:").ok_or_else(|| refused("unknown kind"))?;
        let (host, port) = address.rsplit_once(':').ok_or_else(|| refused("no port"))?;
        let port = port.parse().map_err(|_| refused("the port is not from 0 to 65535"))?;
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(refused("the host is missing; for every address write 0.0.0.0"));
        }
        Ok(Self::Tcp(host.to_owned(), port))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(host, port) if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::SocketMode;

    #[test]
    fn settings_of_an_endpoint_are_read_and_others_are_refused() {
        let read = |text: &str| text.parse::<Listen>();
        let place = Place::Unix(PathBuf::from("/run/s"));
        assert_eq!(read("unix:/run/s"), Ok(Listen::from(place.clone())));
        let whole = read("unix:/run/s,tls=required,mode=0600,owner=qemu,group=78").unwrap();
        assert_eq!((whole.at, whole.tls), (place, Some(TlsPolicy::Required)));
        let (owner, group) = (Some("qemu".to_owned()), Some("78".to_owned()));
        assert_eq!(whole.access, SocketAccess { mode: Some(SocketMode(0o600)), owner, group });
        let refused = [
            ("tcp:h:1,tls=on", "off, allowed, required"),
            ("tcp:h:1,tsl=off", "unknown setting \"tsl\""),
            ("tcp:h:1,mode=0600", "mode is for Unix sockets"),
            ("unix:/a,mode=rw", "octal"),
            ("unix:/a,b", "\"b\" after the comma is not a setting"),
        ];
        for (text, word) in refused {
            let message = read(text).expect_err(text);
            assert!(message.contains(word) && message.contains(text), "{message}");
        }
    }

    #[test]
    fn an_endpoint_is_written_as_it_is_read() {
        for text in [
            "tcp:0.0.0.0:10809",
            "tcp:[::1]:1,tls=required",
            "unix:/run/a.sock",
            "unix:/run/a.sock,tls=allowed,mode=0660,owner=db,group=12",
        ] {
            assert_eq!(text.parse::<Listen>().expect("it is right").to_string(), text);
        }
    }

    #[test]
    fn the_general_setting_is_for_tcp_and_an_endpoint_may_say_otherwise() {
        let of = |text: &str| text.parse::<Listen>().unwrap().tls_by(TlsPolicy::Required);
        assert_eq!(of("unix:/run/s"), TlsPolicy::Off);
        assert_eq!(of("unix:/run/s,tls=required"), TlsPolicy::Required);
        assert_eq!(of("tcp:h:1"), TlsPolicy::Required);
        assert_eq!(of("tcp:h:1,tls=allowed"), TlsPolicy::Allowed);
    }
}
