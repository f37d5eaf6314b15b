//! The handshake: greeting, flags and options, until an export is chosen.
//!
//! Incomplete options are not stored, and their length is limited. If the header alone leads to a
//! refusal, the option's data is skipped.

use std::sync::Arc;

use forebay_block::{DeviceInfo, Export, REQUEST_MAX};
use forebay_nbd_wire::{
    BASE_ALLOCATION, ClientFlags, ExportReply, Greeting, HandshakeFlags, Info, InfoKind,
    InfoRequest, MetaContext, MetaRequest, OptionCode, OptionHeader, OptionReplyKind as Kind,
    PAYLOAD_MAX, ServerEntry, TransmissionFlags, WireError, encode_option_reply,
};

use crate::Tls;
use crate::server::Shared;

/// Maximum length of an option in bytes: a name and some queries.
pub(crate) const OPTION_MAX: u32 = 32 << 10;
/// The number of the only metadata context.
pub(crate) const ALLOCATION_CONTEXT: u32 = 1;

/// Minimum preferred block size that the protocol allows, in bytes.
const PREFERRED_MIN: u32 = 512;

/// The result of the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Agreement {
    /// Index of the export.
    pub export: usize,
    /// Whether data and errors are sent in chunks.
    pub structured: bool,
    /// Whether `base:allocation` was negotiated.
    pub allocation: bool,
}

/// The step after an option.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Read more options.
    Options,
    /// Start TLS.
    StartTls,
    /// Begin the transmission phase.
    Transmit(Agreement),
    /// Close the connection, for a reason if the client made a mistake.
    Close(Option<String>),
}

/// The client made this mistake.
fn close(why: impl Into<String>) -> Next {
    Next::Close(Some(why.into()))
}

pub(crate) struct Handshake {
    shared: Arc<Shared>,
    in_tls: bool,
    flags: Option<ClientFlags>,
    options: u32,
    skip: u32,
    structured: bool,
    /// Index of the export for which `base:allocation` was last chosen.
    allocation: Option<usize>,
    /// Why this client is not served; every option is answered with it.
    refusal: Option<&'static str>,
}

impl Handshake {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            in_tls: false,
            flags: None,
            options: 0,
            skip: 0,
            structured: false,
            allocation: None,
            refusal: None,
        }
    }

    /// A handshake that refuses every option.
    pub fn refusing(shared: Arc<Shared>, why: &'static str) -> Self {
        Self { refusal: Some(why), ..Self::new(shared) }
    }

    /// Forgets everything negotiated without TLS, except the client's flags, which are not sent
    /// again.
    pub fn enter_tls(&mut self) {
        *self = Self { in_tls: true, flags: self.flags, ..Self::new(Arc::clone(&self.shared)) };
    }

    pub fn greet(out: &mut Vec<u8>) {
        let flags = HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES;
        out.extend_from_slice(&Greeting { flags }.encode());
    }

    /// Consumes bytes of `bytes`; returns the number consumed, and the next step.
    pub fn receive(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> (usize, Next) {
        let mut rest = bytes;
        loop {
            let skipped = rest.len().min(self.skip as usize);
            rest = &rest[skipped..];
            self.skip -= skipped as u32;
            let step = match self.flags {
                None => self.client_flags(rest),
                Some(flags) => self.option(flags, rest, out),
            };
            let Some((used, next)) = step else { return (bytes.len() - rest.len(), Next::Options) };
            rest = &rest[used..];
            if next != Next::Options {
                return (bytes.len() - rest.len(), next);
            }
        }
    }

    fn client_flags(&mut self, bytes: &[u8]) -> Option<(usize, Next)> {
        let flags = ClientFlags::decode(bytes.first_chunk()?);
        let known = ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES;
        let unknown = flags.without(known);
        if unknown != ClientFlags::NONE {
            let why = format!("it set unknown handshake flags {:#x}", unknown.0);
            return Some((ClientFlags::BYTES, close(why)));
        }
        self.flags = Some(flags);
        Some((ClientFlags::BYTES, Next::Options))
    }

    /// Parses one option; `None` if it is incomplete.
    fn option(
        &mut self,
        flags: ClientFlags,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Option<(usize, Next)> {
        let (head, rest) = bytes.split_first_chunk()?;
        let header = match OptionHeader::decode(head) {
            Ok(header) => header,
            Err(error) => {
                return Some((bytes.len(), close(format!("it sent no option: {error}"))));
            }
        };
        if let Some(next) = self.judge(flags, header, out) {
            self.options += 1;
            self.skip = header.len;
            return Some((OptionHeader::BYTES, next));
        }
        let data = rest.get(..header.len as usize)?;
        self.options += 1;
        Some((OptionHeader::BYTES + data.len(), self.act(flags, header.code, data, out)))
    }

    /// The step after an option, if the header alone determines it.
    fn judge(&self, flags: ClientFlags, header: OptionHeader, out: &mut Vec<u8>) -> Option<Next> {
        let code = header.code;
        let is_export_name = code == OptionCode::EXPORT_NAME;
        let must_start_tls = matches!(self.shared.tls, Tls::Required(_)) && !self.in_tls;
        if self.options >= self.shared.limits.options {
            return Some(close(format!("it sent more than {} options", self.options)));
        }
        if !flags.has(ClientFlags::FIXED_NEWSTYLE) && !is_export_name {
            return Some(close(format!("it sent option {code} without fixed newstyle")));
        }
        if code == OptionCode::ABORT {
            encode_option_reply(out, code, Kind::ACK, |_| ());
            return Some(Next::Close(None));
        }
        if let Some(why) = self.refusal {
            if is_export_name {
                // The answer to this option cannot carry a reason.
                return Some(Next::Close(None));
            }
            return Some(refuse(out, code, Kind::ERR_POLICY, why));
        }
        if must_start_tls && code != OptionCode::STARTTLS {
            if is_export_name {
                return Some(close("it chose an export without the TLS that it needs"));
            }
            return Some(refuse(out, code, Kind::ERR_TLS_REQD, "this server needs TLS"));
        }
        if header.len > OPTION_MAX {
            if is_export_name {
                return Some(close("the name of its export is longer than 32 KiB"));
            }
            return Some(refuse(out, code, Kind::ERR_TOO_BIG, "the option is longer than 32 KiB"));
        }
        None
    }

    fn act(
        &mut self,
        flags: ClientFlags,
        code: OptionCode,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Next {
        match code {
            OptionCode::EXPORT_NAME => self.export_name(flags, data, out),
            OptionCode::INFO | OptionCode::GO => self.info(code, data, out),
            OptionCode::LIST_META_CONTEXT | OptionCode::SET_META_CONTEXT => {
                self.meta_context(code, data, out)
            }
            OptionCode::LIST | OptionCode::STRUCTURED_REPLY | OptionCode::STARTTLS
                if !data.is_empty() =>
            {
                refuse(out, code, Kind::ERR_INVALID, "the option takes no data")
            }
            OptionCode::LIST => self.list(out),
            OptionCode::STRUCTURED_REPLY => {
                self.structured = true;
                acknowledge(out, code)
            }
            OptionCode::STARTTLS => self.start_tls(out),
            _ => refuse(out, code, Kind::ERR_UNSUP, "the option is not known to this server"),
        }
    }

    fn start_tls(&mut self, out: &mut Vec<u8>) -> Next {
        let code = OptionCode::STARTTLS;
        if self.in_tls {
            return refuse(out, code, Kind::ERR_INVALID, "TLS is already in use");
        }
        if matches!(self.shared.tls, Tls::Off) {
            return refuse(out, code, Kind::ERR_POLICY, "this server has no TLS certificate");
        }
        acknowledge(out, code);
        Next::StartTls
    }

    fn export_name(&mut self, flags: ClientFlags, data: &[u8], out: &mut Vec<u8>) -> Next {
        let name = std::str::from_utf8(data).ok();
        let Some(export) = name.and_then(|name| self.shared.find(name)) else {
            return close("it asked for an unknown export");
        };
        let (size, flags_of) = (self.shared.exports[export].info.size, self.flags_of(export));
        out.extend_from_slice(&ExportReply { size, flags: flags_of }.encode());
        if !flags.has(ClientFlags::NO_ZEROES) {
            out.extend_from_slice(&[0; ExportReply::ZEROES]);
        }
        self.agree(export)
    }

    fn list(&self, out: &mut Vec<u8>) -> Next {
        for export in &self.shared.exports {
            encode_option_reply(out, OptionCode::LIST, Kind::SERVER, |out| {
                ServerEntry { name: &export.name, description: &export.description }.encode(out);
            });
        }
        acknowledge(out, OptionCode::LIST)
    }

    fn info(&mut self, code: OptionCode, data: &[u8], out: &mut Vec<u8>) -> Next {
        let request = match InfoRequest::decode(data) {
            Ok(request) => request,
            Err(error) => return invalid(out, code, error),
        };
        let Some(place) = self.shared.find(request.name) else {
            return unknown_export(out, code, request.name);
        };
        let export = &self.shared.exports[place];
        let mut tell = |info: Info<'_>| {
            encode_option_reply(out, code, Kind::INFO, |out| info.encode(out));
        };
        tell(Info::Export { size: export.info.size, flags: self.flags_of(place) });
        if request.wants(InfoKind::NAME) {
            tell(Info::Name(&export.name));
        }
        if request.wants(InfoKind::DESCRIPTION) {
            tell(Info::Description(&export.description));
        }
        if request.wants(InfoKind::BLOCK_SIZE) {
            let (preferred, maximum) = (preferred_block(export), PAYLOAD_MAX);
            tell(Info::BlockSize { minimum: 1, preferred, maximum });
        }
        acknowledge(out, code);
        if code == OptionCode::GO { self.agree(place) } else { Next::Options }
    }

    fn meta_context(&mut self, code: OptionCode, data: &[u8], out: &mut Vec<u8>) -> Next {
        let choose = code == OptionCode::SET_META_CONTEXT;
        if choose {
            self.allocation = None;
        }
        if !self.structured {
            let message = "structured replies must be negotiated first";
            return refuse(out, code, Kind::ERR_INVALID, message);
        }
        let request = match MetaRequest::decode(data) {
            Ok(request) => request,
            Err(error) => return invalid(out, code, error),
        };
        let Some(export) = self.shared.find(request.name) else {
            return unknown_export(out, code, request.name);
        };
        let asked = request.queries().any(|q| q == BASE_ALLOCATION || (!choose && q == "base:"));
        if asked || (!choose && request.count == 0) {
            let id = if choose { ALLOCATION_CONTEXT } else { 0 };
            encode_option_reply(out, code, Kind::META_CONTEXT, |out| {
                MetaContext { id, name: BASE_ALLOCATION }.encode(out);
            });
            if choose {
                self.allocation = Some(export);
            }
        }
        acknowledge(out, code)
    }

    fn agree(&self, export: usize) -> Next {
        let allocation = self.allocation == Some(export);
        Next::Transmit(Agreement { export, structured: self.structured, allocation })
    }

    fn flags_of(&self, export: usize) -> TransmissionFlags {
        flags_of(&self.shared.exports[export].info, self.structured)
    }
}

/// The flags of an export for its clients.
pub(crate) fn flags_of(info: &DeviceInfo, structured: bool) -> TransmissionFlags {
    type T = TransmissionFlags;
    let always = T::HAS_FLAGS | T::SEND_FLUSH | T::SEND_FUA | T::SEND_CACHE;
    // All connections to an export reach the same volume, and its flush covers them all.
    (always | T::CAN_MULTI_CONN)
        .with_if(info.read_only, T::READ_ONLY)
        .with_if(info.rotational, T::ROTATIONAL)
        .with_if(info.discard && !info.read_only, T::SEND_TRIM)
        .with_if(!info.read_only, T::SEND_WRITE_ZEROES | T::SEND_FAST_ZERO)
        .with_if(structured, T::SEND_DF)
}

fn preferred_block(export: &Export) -> u32 {
    let wanted = export.preferred_block.clamp(PREFERRED_MIN, REQUEST_MAX as u32);
    1 << wanted.ilog2()
}

fn acknowledge(out: &mut Vec<u8>, code: OptionCode) -> Next {
    encode_option_reply(out, code, Kind::ACK, |_| ());
    Next::Options
}

fn refuse(out: &mut Vec<u8>, code: OptionCode, kind: Kind, message: &str) -> Next {
    encode_option_reply(out, code, kind, |out| out.extend_from_slice(message.as_bytes()));
    Next::Options
}

fn invalid(out: &mut Vec<u8>, code: OptionCode, error: WireError) -> Next {
    refuse(out, code, Kind::ERR_INVALID, &error.to_string())
}

fn unknown_export(out: &mut Vec<u8>, code: OptionCode, name: &str) -> Next {
    let shown: String = name.chars().take(64).collect();
    refuse(out, code, Kind::ERR_UNKNOWN, &format!("there is no export {shown:?}"))
}
