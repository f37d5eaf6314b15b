//! NBD requests as a server reads them: a stream of headers, each of which encodes to its own
//! bytes.
#![no_main]

use forebay_nbd_wire::{Command, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    while let Some((head, tail)) = rest.split_first_chunk() {
        let Ok(request) = Request::decode(head) else { return };
        assert_eq!(request.encode(), *head);
        let payload = if request.command == Command::WRITE { request.len as usize } else { 0 };
        let Some(next) = tail.get(payload..) else { return };
        rest = next;
    }
});
