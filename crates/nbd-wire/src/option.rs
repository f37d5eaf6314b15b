//! Options: the client's requests during the handshake.

use crate::numbers::codes;
use crate::read::Reader;
use crate::{OPTION_MAGIC, WireError, WireResult};

codes! {
    /// The number of an option.
    pub struct OptionCode: u32 {
        /// Choose an export and start; the only possible refusal is closing the connection.
        EXPORT_NAME = 1,
        /// End the handshake.
        ABORT = 2,
        /// List the exports.
        LIST = 3,
        /// Continue in TLS.
        STARTTLS = 5,
        /// Get information about an export.
        INFO = 6,
        /// Choose an export and start.
        GO = 7,
        /// Use structured replies.
        STRUCTURED_REPLY = 8,
        /// List the metadata contexts.
        LIST_META_CONTEXT = 9,
        /// Choose metadata contexts.
        SET_META_CONTEXT = 10,
        /// 64-bit lengths; not supported.
        EXTENDED_HEADERS = 11,
    }
}

codes! {
    /// The kind of a piece of information about an export.
    pub struct InfoKind: u16 {
        /// Size and transmission flags; always sent.
        EXPORT = 0,
        /// The canonical name.
        NAME = 1,
        /// A description for people.
        DESCRIPTION = 2,
        /// Constraints on the sizes of requests.
        BLOCK_SIZE = 3,
    }
}

/// The header of each option; `len` bytes of data follow.
///
/// ```text
/// 0          8            12        16
/// IHAVEOPT   | option u32 | len u32 |
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OptionHeader {
    /// The option.
    pub code: OptionCode,
    /// Length of the data in bytes, as announced: check it against a limit.
    pub len: u32,
}

impl OptionHeader {
    /// Length of the header, in bytes.
    pub const BYTES: usize = 16;

    /// The encoded header.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.code.0.to_be_bytes());
        out[12..16].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// When the magic number is wrong: the stream is out of sync beyond recovery.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> WireResult<Self> {
        let mut r = Reader(bytes);
        WireError::expect("option magic", r.u64("option")?, OPTION_MAGIC)?;
        Ok(Self { code: OptionCode(r.u32("option")?), len: r.u32("option")? })
    }
}

/// The data of `INFO` and `GO`: an export, and the kinds of information requested.
#[derive(Clone, Debug)]
pub struct InfoRequest<'a> {
    /// The export's name; empty for the default one.
    pub name: &'a str,
    kinds: &'a [u8],
}

impl<'a> InfoRequest<'a> {
    /// Appends the data of a request for `kinds` about export `name`.
    pub fn encode(name: &str, kinds: &[InfoKind], out: &mut Vec<u8>) {
        out.extend_from_slice(&len_u32(name.len()));
        out.extend_from_slice(name.as_bytes());
        let count = u16::try_from(kinds.len()).expect("there are few kinds of information");
        out.extend_from_slice(&count.to_be_bytes());
        for kind in kinds {
            out.extend_from_slice(&kind.0.to_be_bytes());
        }
    }

    /// Decodes the data of an option.
    ///
    /// # Errors
    /// When lengths are inconsistent or the name is not a valid string.
    pub fn decode(data: &'a [u8]) -> WireResult<Self> {
        let mut r = Reader(data);
        let len = r.u32("export name length")?;
        let name = r.string(len as usize, "export name")?;
        let count = r.u16("information count")?;
        let kinds = r.bytes(usize::from(count) * 2, "information list")?;
        r.end("bytes after the information list")?;
        Ok(Self { name, kinds })
    }

    /// The kinds of information requested, known or unknown.
    pub fn kinds(&self) -> impl Iterator<Item = InfoKind> + use<'a> {
        self.kinds.as_chunks().0.iter().map(|pair| InfoKind(u16::from_be_bytes(*pair)))
    }

    /// Whether `kind` was requested.
    #[must_use]
    pub fn wants(&self, kind: InfoKind) -> bool {
        self.kinds().any(|k| k == kind)
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`: an export, and queries.
#[derive(Clone, Debug)]
pub struct MetaRequest<'a> {
    /// The export's name; empty for the default one.
    pub name: &'a str,
    /// Number of queries.
    pub count: u32,
    queries: &'a [u8],
}

impl<'a> MetaRequest<'a> {
    /// Appends the data of a request with `queries` about export `name`.
    pub fn encode(name: &str, queries: &[&str], out: &mut Vec<u8>) {
        out.extend_from_slice(&len_u32(name.len()));
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(&len_u32(queries.len()));
        for query in queries {
            out.extend_from_slice(&len_u32(query.len()));
            out.extend_from_slice(query.as_bytes());
        }
    }

    /// Decodes the data of an option.
    ///
    /// # Errors
    /// When lengths are inconsistent, or a name or query is not a valid string.
    pub fn decode(data: &'a [u8]) -> WireResult<Self> {
        let mut r = Reader(data);
        let len = r.u32("export name length")?;
        let name = r.string(len as usize, "export name")?;
        let count = r.u32("query count")?;
        let queries = r.0;
        for _ in 0..count {
            query(&mut r)?;
        }
        r.end("bytes after the queries")?;
        Ok(Self { name, count, queries })
    }

    /// The queries.
    pub fn queries(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let mut r = Reader(self.queries);
        std::iter::from_fn(move || query(&mut r).ok())
    }
}

fn query<'a>(r: &mut Reader<'a>) -> WireResult<&'a str> {
    let len = r.u32("query length")?;
    r.string(len as usize, "query")
}

/// The encoded length of a string of our own.
pub(crate) fn len_u32(len: usize) -> [u8; 4] {
    u32::try_from(len).expect("strings of ours are short").to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_the_one_of_the_specification() {
        let header = OptionHeader { code: OptionCode::GO, len: 6 };
        assert_eq!(&header.encode(), b"IHAVEOPT\0\0\0\x07\0\0\0\x06");
        assert_eq!(OptionHeader::decode(&header.encode()), Ok(header));
        assert_eq!(
            OptionHeader::decode(b"IHAVEOPS\0\0\0\x07\0\0\0\x06").unwrap_err().what,
            "option magic"
        );
        assert_eq!(OptionCode::GO.to_string(), "GO");
        assert_eq!(OptionCode(77).to_string(), "0x4d");
    }

    #[test]
    fn info_request_round_trips() {
        let mut data = Vec::new();
        InfoRequest::encode("disk", &[InfoKind::BLOCK_SIZE, InfoKind(99)], &mut data);
        assert_eq!(data, b"\0\0\0\x04disk\0\x02\0\x03\0\x63");
        let request = InfoRequest::decode(&data).unwrap();
        assert_eq!(request.name, "disk");
        assert!(request.wants(InfoKind::BLOCK_SIZE) && request.wants(InfoKind(99)));
        assert!(!request.wants(InfoKind::NAME));
    }

    #[test]
    fn wrong_info_requests_say_what_is_wrong() {
        let what = |data: &[u8]| InfoRequest::decode(data).unwrap_err().what;
        assert_eq!(what(b"\0\0"), "export name length");
        assert_eq!(what(b"\0\0\0\x05disk"), "export name");
        assert_eq!(what(b"\xff\xff\xff\xffdisk\0\0"), "export name");
        let text = |data: &[u8]| InfoRequest::decode(data).unwrap_err().to_string();
        assert_eq!(text(b"\0\0\0\x03v\0c\0\0"), "export name: byte 1 is NUL");
        assert_eq!(text(b"\0\0\0\x02\xff\xfe\0\0"), "export name: byte 0 is not UTF-8");
        assert_eq!(what(b"\0\0\0\0\0"), "information count");
        assert_eq!(what(b"\0\0\0\0\0\x02\0\x01\0"), "information list");
        assert_eq!(what(b"\0\0\0\0\0\0x"), "bytes after the information list");
    }

    #[test]
    fn meta_request_round_trips() {
        let mut data = Vec::new();
        MetaRequest::encode("disk", &["base:allocation", "", "x:"], &mut data);
        let request = MetaRequest::decode(&data).unwrap();
        assert_eq!((request.name, request.count), ("disk", 3));
        assert_eq!(request.queries().collect::<Vec<_>>(), ["base:allocation", "", "x:"]);
        let what = |data: &[u8]| MetaRequest::decode(data).unwrap_err().what;
        assert_eq!(what(b"\0\0\0\0\0\0\0\x01"), "query length");
        assert_eq!(what(b"\0\0\0\0\0\0\0\x01\0\0\0\x02x"), "query");
        assert_eq!(what(b"\0\0\0\0\0\0\0\0x"), "bytes after the queries");
        assert_eq!(what(b"\0\0\0\0\xff\xff\xff\xff"), "query length");
    }
}
