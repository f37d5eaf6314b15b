//! Options of the NBD handshake and their answers: decoders are total, and accepted input encodes
//! to the same bytes.
#![no_main]

use forebay_nbd_wire::{
    ExportReply, Greeting, Info, InfoKind, InfoRequest, MetaContext, MetaRequest, OptionHeader,
    OptionReplyHeader, ServerEntry,
};
use libfuzzer_sys::fuzz_target;

/// Encodes into an empty buffer and compares.
fn same(data: &[u8], encode: impl FnOnce(&mut Vec<u8>)) {
    let mut out = Vec::new();
    encode(&mut out);
    assert_eq!(out, data);
}

fuzz_target!(|data: &[u8]| {
    if let Ok(request) = InfoRequest::decode(data) {
        let kinds: Vec<InfoKind> = request.kinds().collect();
        same(data, |out| InfoRequest::encode(request.name, &kinds, out));
    }
    if let Ok(request) = MetaRequest::decode(data) {
        let queries: Vec<&str> = request.queries().collect();
        assert_eq!(queries.len(), request.count as usize);
        same(data, |out| MetaRequest::encode(request.name, &queries, out));
    }
    if let Ok(entry) = ServerEntry::decode(data) {
        same(data, |out| entry.encode(out));
    }
    if let Ok(context) = MetaContext::decode(data) {
        same(data, |out| context.encode(out));
    }
    match Info::decode(data) {
        Err(_) | Ok(Info::Other(_)) => {}
        Ok(info) => same(data, |out| info.encode(out)),
    }
    if let Some(Ok(header)) = data.first_chunk().map(OptionHeader::decode) {
        assert!(data.starts_with(&header.encode()));
    }
    if let Some(Ok(header)) = data.first_chunk().map(OptionReplyHeader::decode) {
        assert!(data.starts_with(&header.encode()));
    }
    if let Some(Ok(greeting)) = data.first_chunk().map(Greeting::decode) {
        assert!(data.starts_with(&greeting.encode()));
    }
    if let Some(reply) = data.first_chunk().map(ExportReply::decode) {
        assert!(data.starts_with(&reply.encode()));
    }
});
