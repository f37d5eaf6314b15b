//! The agreement of a connection as text, for the server that goes on with it:
//! `nbd STRUCTURED ALLOCATION FLAGS SIZE NAME`, and after a NUL, which no name has, the identity of
//! the primary. Servers of earlier versions leave the identity out.

use std::fmt;

use forebay_block::Export;
use forebay_nbd_wire::TransmissionFlags;

use crate::handshake::{Agreement, flags_of};

/// What client and server have agreed on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Agreed {
    structured: bool,
    allocation: bool,
    /// The export's flags as the client knows them, its size in bytes, and its name.
    flags: u16,
    size: u64,
    name: String,
    /// The primary behind the export; `None` if an earlier version has not told.
    identity: Option<String>,
}

impl Agreed {
    pub fn of(agreement: Agreement, exports: &[Export]) -> Self {
        let export = &exports[agreement.export];
        let Agreement { structured, allocation, .. } = agreement;
        let TransmissionFlags(flags) = flags_of(&export.info, structured);
        let (size, name) = (export.info.size, export.name.clone());
        let identity = Some(export.info.identity.clone());
        Self { structured, allocation, flags, size, name, identity }
    }

    /// Parses the text of another server.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(6, ' ');
        if parts.next() != Some("nbd") {
            return None;
        }
        let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok());
        let (structured, allocation) = (number()? == 1, number()? == 1);
        let (flags, size) = (u16::try_from(number()?).ok()?, number()?);
        let rest = parts.next()?;
        let (name, identity) = match rest.split_once('\0') {
            Some((name, identity)) => (name, Some(identity.to_owned())),
            None => (rest, None),
        };
        Some(Self { structured, allocation, flags, size, name: name.to_owned(), identity })
    }

    /// The agreement here, if the export is still as the client knows it, over the same primary: of
    /// two volumes that swap their names only the primaries differ. The export may have grown: the
    /// protocol has no way to tell that, so until it connects again the client uses as much as it
    /// knows of.
    pub fn agreement(&self, exports: &[Export]) -> Option<Agreement> {
        let export = exports.iter().position(|export| export.name == self.name)?;
        let (structured, allocation) = (self.structured, self.allocation);
        let agreement = Agreement { export, structured, allocation };
        let here = Self::of(agreement, exports);
        let fits = here.size >= self.size;
        let is_same = self.identity.is_none() || self.identity == here.identity;
        let identity = self.identity.clone();
        let same_terms = Self { size: self.size, identity, ..here } == *self;
        (fits && is_same && same_terms).then_some(agreement)
    }
}

impl fmt::Display for Agreed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { structured, allocation, flags, size, name, identity } = self;
        let (structured, allocation) = (u8::from(*structured), u8::from(*allocation));
        write!(f, "nbd {structured} {allocation} {flags} {size} {name}")?;
        identity.iter().try_for_each(|identity| write!(f, "\0{identity}"))
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::DeviceInfo;

    use super::*;

    /// Exports of these names, sizes and primaries.
    fn exports(all: [(&str, u64, &str); 2]) -> Vec<Export> {
        let export = |(name, size, primary): (&str, u64, &str)| Export {
            name: name.to_owned(),
            description: String::new(),
            info: DeviceInfo::plain(size, primary),
            preferred_block: 4096,
        };
        all.map(export).into()
    }

    #[test]
    fn a_client_goes_on_only_with_the_primary_that_it_knows() {
        let before = exports([("a", 4096, "/p 1"), ("b", 4096, "/p 2")]);
        let agreement = Agreement { export: 0, structured: true, allocation: false };
        let text = Agreed::of(agreement, &before).to_string();
        let here = |all| Agreed::parse(&text).expect("it is whole").agreement(&exports(all));
        let place = |all| here(all).map(|agreement| agreement.export);
        assert_eq!(place([("b", 4096, "/p 2"), ("a", 4096, "/p 1")]), Some(1));
        assert_eq!(place([("a", 8192, "/p 1"), ("b", 4096, "/p 2")]), Some(0), "it has grown");
        assert_eq!(place([("a", 2048, "/p 1"), ("b", 4096, "/p 2")]), None, "it has shrunk");
        assert_eq!(place([("a", 4096, "/p 2"), ("b", 4096, "/p 1")]), None, "they are swapped");
        assert_eq!(place([("c", 4096, "/p 1"), ("b", 4096, "/p 2")]), None, "it is renamed");
        // A server of an earlier version has not told the primary.
        let (earlier, _) = text.split_once('\0').expect("a primary");
        let earlier = Agreed::parse(earlier).expect("it is whole");
        assert!(earlier.agreement(&before).is_some());
    }

    #[test]
    fn what_was_agreed_on_is_read_back() {
        let agreed = Agreed {
            structured: true,
            allocation: false,
            flags: 0x5ed,
            size: u64::MAX,
            name: "a b  c".to_owned(),
            identity: Some("/a primary".to_owned()),
        };
        assert_eq!(Agreed::parse(&agreed.to_string()), Some(agreed));
        for text in
            ["", "nbd", "nbd 1 1 65536 0 x", "nbd 1 1 1 1", "nbd x 1 1 1 d", "ftp 1 1 1 1 d"]
        {
            assert_eq!(Agreed::parse(text), None, "{text}");
        }
    }
}
