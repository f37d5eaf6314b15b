//! NBD replies as a client reads them: headers, and the payloads of chunks.
#![no_main]

use forebay_nbd_wire::{BlockStatus, ChunkKind, ErrorChunk, Hole, ReplyHead};
use libfuzzer_sys::fuzz_target;

fn payload(kind: ChunkKind, bytes: &[u8]) {
    match kind {
        ChunkKind::OFFSET_HOLE => {
            if let Ok(hole) = Hole::decode(bytes) {
                assert_eq!(hole.encode(), bytes);
            }
        }
        ChunkKind::BLOCK_STATUS => {
            if let Ok(status) = BlockStatus::decode(bytes) {
                assert_eq!(status.extents().count() * 8 + 4, bytes.len());
                assert!(status.extents().all(|extent| extent.len > 0));
            }
        }
        kind if kind.is_error() => {
            if let Ok(error) = ErrorChunk::decode(kind, bytes) {
                assert!(error.message.len() + 6 <= bytes.len());
            }
        }
        _ => {}
    }
}

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    while let Ok(Some((head, len))) = ReplyHead::decode(rest) {
        rest = &rest[len..];
        match head {
            ReplyHead::Simple(reply) => assert!(data.len() >= reply.encode().len()),
            ReplyHead::Chunk(chunk) => {
                let Some((bytes, next)) = rest.split_at_checked(chunk.len as usize) else { return };
                payload(chunk.kind, bytes);
                rest = next;
            }
        }
    }
    for kind in [ChunkKind::OFFSET_HOLE, ChunkKind::BLOCK_STATUS, ChunkKind::ERROR_OFFSET] {
        payload(kind, data);
    }
});
