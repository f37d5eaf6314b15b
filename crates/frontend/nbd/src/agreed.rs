//! The agreement of a connection as text, for the server that goes on with it.

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
}

impl Agreed {
    pub fn of(agreement: Agreement, exports: &[Export]) -> Self {
        let export = &exports[agreement.export];
        let Agreement { structured, allocation, .. } = agreement;
        let TransmissionFlags(flags) = flags_of(&export.info, structured);
        Self { structured, allocation, flags, size: export.info.size, name: export.name.clone() }
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
        let name = parts.next()?.to_owned();
        Some(Self { structured, allocation, flags, size, name })
    }

    /// The agreement here, if the export is still as the client knows it. It may have grown: the
    /// protocol has no way to tell that, so until it connects again the client uses as much as it
    /// knows of.
    pub fn agreement(&self, exports: &[Export]) -> Option<Agreement> {
        let export = exports.iter().position(|export| export.name == self.name)?;
        let (structured, allocation) = (self.structured, self.allocation);
        let agreement = Agreement { export, structured, allocation };
        let here = Self::of(agreement, exports);
        let fits = here.size >= self.size;
        (fits && Self { size: self.size, ..here } == *self).then_some(agreement)
    }
}

impl fmt::Display for Agreed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { structured, allocation, flags, size, name } = self;
        let (structured, allocation) = (u8::from(*structured), u8::from(*allocation));
        write!(f, "nbd {structured} {allocation} {flags} {size} {name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_agreed_on_is_read_back() {
        let agreed = Agreed {
            structured: true,
            allocation: false,
            flags: 0x5ed,
            size: u64::MAX,
            name: "a b  c".to_owned(),
        };
        assert_eq!(Agreed::parse(&agreed.to_string()), Some(agreed));
        for text in
            ["", "nbd", "nbd 1 1 65536 0 x", "nbd 1 1 1 1", "nbd x 1 1 1 d", "ftp 1 1 1 1 d"]
        {
            assert_eq!(Agreed::parse(text), None, "{text}");
        }
    }
}
