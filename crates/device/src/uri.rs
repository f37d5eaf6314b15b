//! Devices by name: the meaning of a primary's URI and of a cache's path.
//!
//! | URI | device |
//! |---|---|
//! | `PATH` | a regular file or block device; taken as it stands |
//! | `file:PATH`, `file:///PATH` | the same; `%XX` stands for a byte |
//! | `nbd://HOST[:PORT]/EXPORT` | an export of an NBD server; port 10809 if absent |
//! | `nbd+unix:///EXPORT?socket=PATH` | the same on a Unix socket |
//!
//! Parameters follow a `?` and are joined by `&`:
//!
//! | parameter | of | means |
//! |---|---|---|
//! | `emulate=PROFILE` | any | give it the time of `hdd`, `raid10x4`, `raid5x5`, `san` or `cloud` |
//! | `delay=TIME` | any | make every request take that much longer, as `2ms` or `1s` |
//! | `fault=OP:SHARE` | any | fail a share of its requests, as `read:0.01` or `write:0.05,flush:1` |
//! | `seed=N` | `emulate`, `fault` | the model's platters at the start, the requests that fail; 0 if absent |
//! | `socket=PATH` | `nbd+unix` | where the server listens |
//!
//! A path whose name has a `?` is written `file:` with `%3F`; one with a `:` before its first `/`
//! begins with `./`. Anything else is rejected with a message that names the value and the valid
//! ones.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::device::BlockDevice;
use crate::emulate::{EmulatedDevice, Profile};
use crate::error::OpenError;
use crate::file::{FileDevice, OpenMode, extent};
use crate::layer::delay::DelayDevice;
use crate::layer::fault::{FaultDevice, Faults};
use crate::nbd::{Address, HANDSHAKE_PATIENCE, NbdDevice, Peer};

/// The schemes of primary URIs.
const SCHEMES: [(&str, Scheme); 3] =
    [("file", Scheme::File), ("nbd", Scheme::Nbd), ("nbd+unix", Scheme::NbdUnix)];
/// The default port of an NBD server.
const NBD_PORT: u16 = 10809;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scheme {
    File,
    Nbd,
    NbdUnix,
}

/// Opens the primary that `uri` names.
///
/// # Errors
/// When the URI is invalid, or the device cannot be opened.
pub fn open_primary(uri: &str) -> Result<Arc<dyn BlockDevice>, OpenError> {
    open_primary_within(uri, HANDSHAKE_PATIENCE)
}

/// Opens the primary that `uri` names. A server on a network must answer in this time.
///
/// # Errors
/// As for [`open_primary`].
pub fn open_primary_within(
    uri: &str,
    patience: Duration,
) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let mut parsed = Uri::parse(uri)?;
    let layers = parsed.layers()?;
    let device: Arc<dyn BlockDevice> = match parsed.scheme {
        None => {
            let path = PathBuf::from(parsed.rest);
            parsed.finish()?;
            Arc::new(FileDevice::open(&path, OpenMode::default())?)
        }
        Some(Scheme::File) => {
            let path = parsed.file_path()?;
            parsed.finish()?;
            Arc::new(FileDevice::open(&path, OpenMode::default())?)
        }
        Some(scheme @ (Scheme::Nbd | Scheme::NbdUnix)) => {
            let address = parsed.nbd_address(scheme)?;
            parsed.finish()?;
            Arc::new(NbdDevice::open(address, patience)?)
        }
    };
    Ok(layers.over(device))
}

/// The size in bytes of the file or block device that `uri` names, whoever is using it; `None` for
/// a server on a network.
///
/// # Errors
/// When the URI is invalid, or the device cannot be opened.
pub fn primary_size(uri: &str) -> Result<Option<u64>, OpenError> {
    primary_path(uri)?.map(|path| extent(&path)).transpose()
}

/// The path of the file or block device that `uri` names; `None` for a server on a network.
///
/// # Errors
/// When the URI is invalid.
pub fn primary_path(uri: &str) -> Result<Option<PathBuf>, OpenError> {
    let mut parsed = Uri::parse(uri)?;
    parsed.layers()?;
    let path = match parsed.scheme {
        None => PathBuf::from(parsed.rest),
        Some(Scheme::File) => parsed.file_path()?,
        Some(Scheme::Nbd | Scheme::NbdUnix) => return Ok(None),
    };
    parsed.finish()?;
    Ok(Some(path))
}

/// The identity of the primary that `uri` names, if it can be told without the primary: that of a
/// server on a network. `None` for a file or block device.
///
/// # Errors
/// When the URI is invalid.
pub fn network_identity(uri: &str) -> Result<Option<String>, OpenError> {
    let mut parsed = Uri::parse(uri)?;
    parsed.layers()?;
    let Some(scheme @ (Scheme::Nbd | Scheme::NbdUnix)) = parsed.scheme else { return Ok(None) };
    let address = parsed.nbd_address(scheme)?;
    parsed.finish()?;
    Ok(Some(address.identity()))
}

/// Layers over a device, lowest first: faults come first, so that a failed request takes time too.
#[derive(Debug, Default)]
struct Layers {
    faults: Option<Faults>,
    profile: Option<Profile>,
    delay: Option<Duration>,
    seed: u64,
}

impl Layers {
    fn over(self, mut device: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
        if let Some(faults) = self.faults {
            device = Arc::new(FaultDevice::new(device, faults, self.seed));
        }
        if let Some(profile) = self.profile {
            device = Arc::new(EmulatedDevice::new(device, profile, self.seed));
        }
        if let Some(delay) = self.delay {
            device = Arc::new(DelayDevice::new(device, delay));
        }
        device
    }
}

/// Parses a number with its unit: `us`, `ms` or `s`.
fn time(text: &str) -> Option<Duration> {
    let unit = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit);
    let number: u32 = number.parse().ok()?;
    let one = match unit {
        "us" => Duration::from_micros(1),
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        _ => return None,
    };
    Some(one * number)
}

/// Opens a cache device. A file that does not exist or is empty is created with `size` bytes; of a
/// block device, `size` bytes from its start are used.
///
/// # Errors
/// When it cannot be opened, is in use, or is not of the requested size.
pub fn open_cache(path: &Path, size: Option<u64>) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let mode = OpenMode { create_size: size, ..OpenMode::default() };
    Ok(Arc::new(FileDevice::open(path, mode)?))
}

/// Opens a cache device for inspection: nothing is written, and no process may be using it.
///
/// # Errors
/// When it cannot be opened or is in use.
pub fn open_cache_read_only(path: &Path) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let mode = OpenMode { read_only: true, ..OpenMode::default() };
    Ok(Arc::new(FileDevice::open(path, mode)?))
}

/// A URI in its parts; parameters are removed as they are parsed.
#[derive(Debug)]
struct Uri<'a> {
    whole: &'a str,
    /// `None` for a bare path.
    scheme: Option<Scheme>,
    /// The text between the scheme and the parameters, as written.
    rest: &'a str,
    parameters: Vec<(&'a str, String)>,
    /// Names of the parameters looked up so far, for the error about unknown ones.
    known: Vec<&'static str>,
}

impl<'a> Uri<'a> {
    fn parse(whole: &'a str) -> Result<Self, OpenError> {
        let (before, query) = whole.split_once('?').unwrap_or((whole, ""));
        let (scheme, rest) = match split_scheme(before) {
            None => (None, before),
            Some((name, rest)) => match SCHEMES.iter().find(|(known, _)| *known == name) {
                Some(&(_, scheme)) => (Some(scheme), rest),
                None => {
                    return Err(bad(whole, unknown_scheme(name, rest)));
                }
            },
        };
        let mut uri = Self { whole, scheme, rest, parameters: Vec::new(), known: Vec::new() };
        if rest.is_empty() {
            return Err(uri.bad("it names no device"));
        }
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let Some((name, value)) = parameter.split_once('=') else {
                return Err(uri.bad(format!("parameter {parameter:?} has no value")));
            };
            if uri.parameters.iter().any(|(other, _)| *other == name) {
                return Err(uri.bad(format!("parameter {name:?} is given twice")));
            }
            let value = uri.decode(value)?;
            uri.parameters.push((name, value));
        }
        Ok(uri)
    }

    fn bad(&self, reason: impl Into<String>) -> OpenError {
        bad(self.whole, reason)
    }

    /// Removes and returns a parameter.
    fn take(&mut self, name: &'static str) -> Option<String> {
        self.known.push(name);
        let at = self.parameters.iter().position(|(other, _)| *other == name)?;
        Some(self.parameters.remove(at).1)
    }

    /// Rejects the remaining parameters.
    fn finish(&self) -> Result<(), OpenError> {
        let Some((name, _)) = self.parameters.first() else { return Ok(()) };
        let known = self.known.join(", ");
        Err(self.bad(format!("unknown parameter {name:?}; known here are {known}")))
    }

    /// Removes and parses the parameters of layers.
    fn layers(&mut self) -> Result<Layers, OpenError> {
        let profile = match self.take("emulate") {
            None => None,
            Some(name) => Some(Profile::from_name(&name).ok_or_else(|| {
                let known: Vec<&str> = Profile::NAMES.iter().map(|&(known, _)| known).collect();
                self.bad(format!("unknown profile {name:?}; known are {}", known.join(", ")))
            })?),
        };
        let delay = match self.take("delay") {
            None => None,
            Some(text) => {
                let wrong = || self.bad(format!("delay {text:?} is not a time, as 2ms or 1s"));
                Some(time(&text).ok_or_else(wrong)?)
            }
        };
        let faults = self.take("fault").map(|text| Faults::parse(&text));
        let faults = faults.transpose().map_err(|reason| self.bad(reason))?;
        if profile.is_none() && faults.is_none() {
            self.known.push("seed (with emulate or fault)");
            return Ok(Layers { delay, ..Layers::default() });
        }
        let seed = match self.take("seed") {
            None => 0,
            Some(text) => text
                .parse()
                .map_err(|_| self.bad(format!("seed {text:?} is not a whole number")))?,
        };
        Ok(Layers { faults, profile, delay, seed })
    }

    /// The path of a `file:` URI.
    fn file_path(&self) -> Result<PathBuf, OpenError> {
        let Some(authority) = self.rest.strip_prefix("//") else {
            return Ok(PathBuf::from(self.decode(self.rest)?));
        };
        let at = authority.find('/').unwrap_or(authority.len());
        let (host, path) = authority.split_at(at);
        if !host.is_empty() && host != "localhost" {
            return Err(self.bad(format!("file: names host {host:?}; only this one serves files")));
        }
        if path.is_empty() {
            return Err(self.bad("it names no device"));
        }
        Ok(PathBuf::from(self.decode(path)?))
    }

    /// Address and export of an `nbd:` or `nbd+unix:` URI.
    fn nbd_address(&mut self, scheme: Scheme) -> Result<Address, OpenError> {
        let Some(authority) = self.rest.strip_prefix("//") else {
            return Err(self.bad("write nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH"));
        };
        let (host, export) = authority.split_once('/').unwrap_or((authority, ""));
        let export = self.decode(export)?;
        let peer = if scheme == Scheme::Nbd {
            self.tcp_peer(host)?
        } else {
            if !host.is_empty() {
                return Err(self.bad(format!("nbd+unix: names host {host:?}; it takes none")));
            }
            let socket = self.take("socket");
            Peer::Unix(socket.ok_or_else(|| self.bad("parameter \"socket\" is missing"))?.into())
        };
        // The device without its parameters.
        let uri = match &peer {
            Peer::Tcp { .. } => format!("nbd://{host}/{export}"),
            Peer::Unix(path) => format!("nbd+unix:///{export}?socket={}", path.display()),
        };
        Ok(Address { uri, peer, export })
    }

    fn tcp_peer(&self, authority: &str) -> Result<Peer, OpenError> {
        // The colons of an IPv6 address are within brackets.
        let after = authority.find(']').map_or(0, |at| at + 1);
        let (host, port) = match authority[after..].find(':') {
            Some(colon) => {
                let (host, port) = authority.split_at(after + colon);
                let port = &port[1..];
                let number = port.parse();
                (host, number.map_err(|_| self.bad(format!("port {port:?} is not a port")))?)
            }
            None => (authority, NBD_PORT),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(self.bad("it names no host"));
        }
        Ok(Peer::Tcp { host: host.to_owned(), port })
    }

    /// Replaces `%XX` by its byte.
    fn decode(&self, text: &str) -> Result<String, OpenError> {
        let wrong =
            || self.bad(format!("{text:?} has a % that two hexadecimal digits do not follow"));
        let mut bytes = Vec::with_capacity(text.len());
        let mut rest = text.bytes();
        while let Some(byte) = rest.next() {
            if byte != b'%' {
                bytes.push(byte);
                continue;
            }
            let mut digit = || {
                let digit = char::from(rest.next()?).to_digit(16)?;
                u8::try_from(digit).ok()
            };
            let (high, low) = (digit().ok_or_else(wrong)?, digit().ok_or_else(wrong)?);
            bytes.push(high << 4 | low);
        }
        String::from_utf8(bytes).map_err(|_| self.bad(format!("{text:?} is not UTF-8")))
    }
}

fn bad(uri: &str, reason: impl Into<String>) -> OpenError {
    OpenError::BadUri { uri: uri.to_owned(), reason: reason.into() }
}

/// Why a scheme cannot be used, with the alternatives.
fn unknown_scheme(name: &str, rest: &str) -> String {
    if name.starts_with("nbds") {
        return format!(
            "TLS to a primary is not supported yet ({name:?}); use nbd:// on a private network or \
             through a tunnel, or nbd+unix:// to a proxy on this host"
        );
    }
    let known: Vec<&str> = SCHEMES.iter().map(|&(known, _)| known).collect();
    let hint = if rest.starts_with("//") {
        "other storage must be a block device, a file, or an NBD export, as nbdkit provides"
            .to_owned()
    } else {
        format!("write ./{name}:{rest} for a path")
    };
    format!("unknown scheme {name:?}; known are {}; {hint}", known.join(", "))
}

/// Splits `scheme:rest`. Returns `None` for a path: with a `/` before the `:`, or no valid scheme.
fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (name, rest) = text.split_once(':')?;
    let fits = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    let begins = name.starts_with(|c: char| c.is_ascii_alphabetic());
    (begins && name.chars().all(fits)).then_some((name, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempPath;

    fn refusal(uri: &str) -> String {
        open_primary(uri).err().expect("the URI is refused").to_string()
    }

    fn made() -> TempPath {
        let path = TempPath::new();
        std::fs::File::create(&path.0).unwrap().set_len(1 << 20).unwrap();
        path
    }

    #[test]
    fn paths_open_in_each_spelling() {
        let file = made();
        let path = file.0.to_str().unwrap();
        let escaped = path.replace('-', "%2d");
        for uri in [
            path.to_owned(),
            format!("file:{path}"),
            format!("file://{path}"),
            format!("file://localhost{path}"),
            format!("file:{escaped}"),
            format!("{path}?emulate=raid10x4&seed=7"),
            format!("file:{path}?emulate=cloud"),
            format!("{path}?delay=2ms&fault=read:0.01,flush:1&seed=3"),
        ] {
            let device = open_primary(&uri).unwrap_or_else(|e| panic!("{uri}: {e}"));
            assert_eq!(device.info().size, 1 << 20);
            assert_eq!(device.info().rotational, uri.contains("raid"));
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_what_would_be_right() {
        let file = made();
        let path = file.0.to_str().unwrap();
        for (uri, words) in [
            ("ftp://x/y".to_owned(), &["\"ftp\"", "file"][..]),
            ("disk:1".to_owned(), &["\"disk\"", "./disk:1"]),
            (String::new(), &["names no device"]),
            ("file:".to_owned(), &["names no device"]),
            ("file://far/x".to_owned(), &["\"far\""]),
            (format!("{path}?emulate=floppy"), &["\"floppy\"", "hdd", "cloud"]),
            (format!("{path}?emulate=hdd&seed=x"), &["\"x\"", "whole number"]),
            (format!("{path}?emulate"), &["\"emulate\"", "no value"]),
            (format!("{path}?speed=1"), &["\"speed\"", "emulate"]),
            (format!("{path}?seed=1"), &["\"seed\"", "emulate", "fault"]),
            (format!("{path}?delay=2"), &["\"2\"", "2ms"]),
            (format!("{path}?fault=trim:1"), &["\"trim\"", "flush"]),
            (format!("{path}?emulate=hdd&emulate=san"), &["twice"]),
            ("file:/a%2".to_owned(), &["hexadecimal"]),
            ("nbd:x".to_owned(), &["nbd://HOST:PORT/EXPORT"]),
            ("nbd:///x".to_owned(), &["no host"]),
            ("nbd://h:99999/x".to_owned(), &["\"99999\"", "not a port"]),
            ("nbd+unix:///x".to_owned(), &["\"socket\"", "missing"]),
            ("nbd+unix://h/x?socket=/s".to_owned(), &["\"h\""]),
            ("nbd://127.0.0.1:1/x?sokcet=1".to_owned(), &["\"sokcet\""]),
            ("nbd+unix:///?socket=/nowhere".to_owned(), &["cannot connect"]),
            ("/nowhere/at/all".to_owned(), &["/nowhere/at/all", "cannot open"]),
        ] {
            let text = refusal(&uri);
            assert!(words.iter().all(|word| text.contains(word)), "{uri}: {text}");
        }
    }

    #[test]
    fn nbd_addresses_are_taken_apart() {
        for (uri, host, port, export) in [
            ("nbd://a.b/c", "a.b", 10809, "c"),
            ("nbd://a:1/", "a", 1, ""),
            ("nbd://a:1", "a", 1, ""),
            ("nbd://[::1]:2/x%20y/z", "::1", 2, "x y/z"),
            ("nbd://[::1]/x", "::1", 10809, "x"),
        ] {
            let address = Uri::parse(uri).unwrap().nbd_address(Scheme::Nbd).unwrap();
            let Peer::Tcp { host: found, port: number } = &address.peer else { panic!("{uri}") };
            assert_eq!((found.as_str(), *number, address.export.as_str()), (host, port, export));
        }
        let uri = "nbd+unix:///a?emulate=hdd&socket=/s%20t&seed=1";
        let address = Uri::parse(uri).unwrap().nbd_address(Scheme::NbdUnix).unwrap();
        assert_eq!(address.uri, "nbd+unix:///a?socket=/s t");
    }

    #[test]
    fn a_cache_is_made_once_and_locked() {
        let path = TempPath::new();
        let cache = open_cache(&path.0, Some(1 << 20)).unwrap();
        assert_eq!(cache.info().size, 1 << 20);
        assert!(matches!(open_cache_read_only(&path.0), Err(OpenError::InUse { .. })));
        drop(cache);
        assert!(open_cache_read_only(&path.0).unwrap().info().read_only);
        assert!(open_cache(&path.0, None).is_ok());
        assert!(open_cache(&path.0, Some(2 << 20)).is_err());
    }
}
