//! Every format: a small trace, and the errors in malformed ones.

// The crate itself opens no files; its tests do.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_types)]

use std::io::BufReader;
use std::path::Path;

use forebay_block::{ByteRange, IoOp};
use forebay_trace::{Format, TraceError, TraceReader, TraceRequest, TraceWriter};
use proptest::prelude::*;

fn read_as(bytes: &[u8], format: Option<Format>) -> Result<Vec<TraceRequest>, TraceError> {
    TraceReader::new(bytes, format)?.collect()
}

fn read(text: &str) -> Vec<TraceRequest> {
    read_as(text.as_bytes(), None).unwrap()
}

fn request(micros: u64, op: IoOp, sector: u64, count: u64) -> TraceRequest {
    let range = ByteRange::new(sector * 512, count * 512);
    TraceRequest { nanos: micros * 1000, op, fua: false, range }
}

/// The error for a trace that cannot be read.
fn refusal(bytes: &[u8], format: Option<Format>) -> String {
    read_as(bytes, format).expect_err("it is wrong").to_string()
}

#[test]
fn csv() {
    let text = "t_us,rwbs,sector,nsect\n100,RS,8,16\n\n150,FWFS,32,8\r\n160,FWS,0,0\n170,DS,0,64\n";
    let fua = TraceRequest { fua: true, ..request(50, IoOp::Write, 32, 8) };
    let expected = [
        request(0, IoOp::Read, 8, 16),
        TraceRequest::flush(50_000),
        fua,
        TraceRequest::flush(60_000),
        request(70, IoOp::Discard, 0, 64),
    ];
    assert_eq!(read(text), expected);
    let (_, body) = text.split_once('\n').unwrap();
    assert_eq!(read(body), expected, "without its head too");
}

#[test]
fn msr() {
    let text = "128166372003061629,hm,0,Read,383496192,32768,1331\n\
                128166372013061629,hm,0,Write,2822144,4096,1331\n";
    let expected = [
        request(0, IoOp::Read, 383_496_192 / 512, 64),
        request(1_000_000, IoOp::Write, 2_822_144 / 512, 8),
    ];
    assert_eq!(read(text), expected);
}

#[test]
fn cloudphysics() {
    let text = "version,time,op,size,lbn\n1,33898,2a,512,42932745\n1,33898.5,28,4096,8\n\
                1,33899,12,36,0\n1,33899,35,0,0\n";
    let expected = [
        request(0, IoOp::Write, 42_932_745, 1),
        request(500_000, IoOp::Read, 8, 8),
        TraceRequest::flush(1_000_000_000),
    ];
    assert_eq!(read(text), expected);
}

fn vscsi(version: u16, command: u16, lbn: u64, bytes: u32, micros: u64) -> Vec<u8> {
    let mut record = Vec::new();
    let (tag, sequence) = (version << 8, 7u32);
    if version == 2 {
        record.extend(command.to_le_bytes());
        record.extend(tag.to_le_bytes());
        record.extend(sequence.to_le_bytes());
        record.extend(bytes.to_le_bytes());
        record.extend(1u32.to_le_bytes());
    } else {
        record.extend(sequence.to_le_bytes());
        record.extend(bytes.to_le_bytes());
        record.extend(1u32.to_le_bytes());
        record.extend(command.to_le_bytes());
        record.extend(tag.to_le_bytes());
    }
    record.extend(lbn.to_le_bytes());
    record.extend(micros.to_le_bytes());
    if version == 2 {
        record.extend(99u64.to_le_bytes());
    }
    record
}

#[test]
fn a_flush_has_no_range() {
    assert_eq!(read("3,333.1,35,66,3"), [TraceRequest::flush(0)]);
    let mut trace = vscsi(1, 0x35, 8, 4096, 1);
    trace.extend(vscsi(1, 0x2a, 8, 4096, 1));
    let expected = [TraceRequest::flush(0), request(0, IoOp::Write, 8, 8)];
    assert_eq!(read_as(&trace, None).unwrap(), expected);
}

#[test]
fn vscsi_of_both_versions() {
    for version in [1, 2] {
        let mut trace = vscsi(version, 0x2a, 42_932_745, 512, 5_000);
        trace.extend(vscsi(version, 0x28, 8, 4096, 5_010));
        let expected = [request(0, IoOp::Write, 42_932_745, 1), request(10, IoOp::Read, 8, 8)];
        assert_eq!(read_as(&trace, None).unwrap(), expected, "version {version}");
        let name = format!("vscsi{version}");
        let format = Format::from_name(&name);
        trace.pop();
        let size = if version == 1 { 32 } else { 40 };
        let words = [format!("byte {size} "), format!("{} of the {size}", size - 1)];
        let text = refusal(&trace, format);
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        let mut other = vscsi(version, 0x2a, 1, 512, 1);
        other.extend(vscsi(version, 0x1234, 1, 512, 1));
        let text = refusal(&other, format);
        assert!(text.contains("0x1234") && text.contains(&format!("byte {size} ")), "{text}");
    }
}

#[test]
fn blkparse() {
    let text = "  8,0    3        1     0.000000000   697  G   W 223490 + 8 [kjournald]\n\
  8,0    3        2     0.000001829   697  Q   W 223490 + 8 [kjournald]\n\
  8,0    3        3     0.000003829   697  D   W 223490 + 8 [kjournald]\n\
  8,0    1        4     0.000101829   697  Q FWFS 64 + 8 [jbd2/sda 1]\n\
  8,0    1        5     0.000201829   697  Q  FN [jbd2/sda 1]\n\
  8,0    1        6     0.001001829   697  Q  RA 16 + 8 [mysqld]\n\
CPU3 (sda):\n Reads Queued: 1\n";
    let fua = TraceRequest { fua: true, ..request(100, IoOp::Write, 64, 8) };
    let expected = [
        request(0, IoOp::Write, 223_490, 8),
        TraceRequest::flush(100_000),
        fua,
        TraceRequest::flush(200_000),
        request(1000, IoOp::Read, 16, 8),
    ];
    assert_eq!(read(text), expected);
}

#[test]
fn iolog_of_both_versions() {
    let three = "fio version 3 iolog\n18 x.bin add\n207 x.bin open\n212 x.bin read 61440 4096\n\
                 797 x.bin write 491520 512\n1060 x.bin sync 954368 0\n2017 x.bin trim 0 4096\n\
                 3583 x.bin close\n";
    let expected = [
        request(0, IoOp::Read, 120, 8),
        request(585, IoOp::Write, 960, 1),
        TraceRequest::flush(848_000),
        request(1805, IoOp::Discard, 0, 8),
    ];
    assert_eq!(read(three), expected);
    let two = "fio version 2 iolog\nx add\nx open\nx read 61440 4096\nx wait 585 0\n\
               x write 491520 512\nx datasync 0 0\nx close\n";
    let expected = [
        request(0, IoOp::Read, 120, 8),
        request(585, IoOp::Write, 960, 1),
        TraceRequest::flush(585_000),
    ];
    assert_eq!(read(two), expected);
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    let cases: [(&str, &[&str]); 17] = [
        ("hello\nworld\n", &["no known format", "blkparse"]),
        ("", &["no known format"]),
        ("0,R,8,8\n1,R,9\n", &["line 2", "3 fields", "\"1,R,9\""]),
        ("0,R,8,8\n1,R,9,1,1\n", &["line 2", "5 fields"]),
        ("0,R,8,8\n1,R,x,1\n", &["line 2", "sector", "\"x\""]),
        ("0,R,8,8\n1,Q,8,1\n", &["line 2", "\"Q\"", "letter"]),
        ("0,R,8,8\n1,R,36028797018963968,1\n", &["line 2", "36028797018963968", "2^64"]),
        ("0,R,8,8\n1,R,0,9999999999\n", &["line 2", "5119999999488 bytes"]),
        ("0,R,8,8\n18446744073709551615,R,0,1\n", &["line 2", "too large"]),
        ("1,h,0,Read,0,512,1\n1,h,1,Read,0,512,1\n", &["line 2", "disk 1 of h", "split"]),
        ("1,h,0,Read,0,512,1\n1,h,0,Trim,0,512,1\n", &["line 2", "\"Trim\""]),
        ("1,2,2a,512,8\n1,2,zz,512,8\n", &["line 2", "\"zz\"", "SCSI"]),
        ("1,2,2a,512,8\n1,-2,2a,512,8\n", &["line 2", "\"-2\"", "seconds"]),
        ("fio version 3 iolog\n0 x add\n5 x reed 0 1\n", &["line 3", "\"reed\""]),
        ("fio version 3 iolog\n5 x read 0\n", &["line 2", "no length"]),
        ("fio version 2 iolog\nx read 0 1\ny read 0 1\n", &["line 3", "\"y\"", "\"x\""]),
        ("8,0 3 1 0.0 697 Q W 8 + 8 [a]\n8,0 3 1 0.1 697 Q W [a]\n", &["line 2", "sector"]),
    ];
    for (text, words) in cases {
        let said = refusal(text.as_bytes(), None);
        assert!(words.iter().all(|word| said.contains(word)), "{text:?}: {said}");
    }
    let long = format!("0,R,8,8\n{}\n", "1".repeat(5000));
    assert!(refusal(long.as_bytes(), None).contains("line 2"));
    assert!(refusal(b"0,R,8,8\n\xff\xfe\n", None).contains("line 2"));
    let said = refusal(b"1,h,0,Read,0,512,1\n", Some(Format::Csv));
    assert!(said.contains("7 fields"), "the format that was asked for counts: {said}");
}

fn written(requests: &[TraceRequest]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = TraceWriter::new("db", 1 << 30, 1_700_000_000, &mut bytes);
    requests.iter().for_each(|request| writer.push(*request, &mut bytes));
    writer.set_dropped(3);
    writer.finish(&mut bytes);
    bytes
}

/// The bytes of a small trace, as `docs/user/tracing.md` shows them: they never change.
#[test]
fn own_golden() {
    let fua = TraceRequest { fua: true, ..request(1, IoOp::Write, 24, 8) };
    let odd = TraceRequest { range: ByteRange::new(5, 3), ..request(1, IoOp::Read, 0, 0) };
    let requests = [request(0, IoOp::Read, 8, 16), fua, TraceRequest::flush(1500), odd];
    let bytes = written(&requests);
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, include_str!("data/own.hex").trim());
    assert_eq!(read_as(&bytes, None).unwrap().len(), 4);
}

#[test]
fn own_says_what_it_is_of_and_what_was_dropped() {
    let bytes = written(&[request(0, IoOp::Read, 8, 16)]);
    let mut reader = TraceReader::new(&bytes[..], None).unwrap();
    assert_eq!(reader.format(), Format::Forebay);
    assert_eq!(reader.next_request().unwrap(), Some(request(0, IoOp::Read, 8, 16)));
    assert_eq!((reader.volume_size(), reader.dropped()), (Some(1 << 30), 3));
    assert_eq!(reader.next_request().unwrap(), None);
}

#[test]
fn own_that_was_damaged_or_cut_is_refused_with_the_place() {
    let requests: Vec<_> = (0..9000).map(|i| request(i, IoOp::Read, i * 3, 8)).collect();
    let whole = written(&requests);
    assert_eq!(read_as(&whole, None).unwrap(), requests);
    for (at, word) in [(9, "version"), (20, "checksum"), (45, "checksum"), (100, "checksum")] {
        let mut bad = whole.clone();
        bad[at] ^= 0x40;
        let said = refusal(&bad, None);
        assert!(said.contains(word) && said.contains("byte"), "{at}: {said}");
    }
    let said = refusal(&whole[..whole.len() - 40], None);
    assert!(said.contains("ends within a chunk"), "{said}");
    let mut huge = whole.clone();
    huge[32..36].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(refusal(&huge, None).contains("a name of 4294967295 bytes"));
}

fn any_request() -> impl Strategy<Value = TraceRequest> {
    let op = prop::sample::select(vec![
        IoOp::Read,
        IoOp::Write,
        IoOp::Flush,
        IoOp::Discard,
        IoOp::WriteZeroes,
    ]);
    let fields = (0u64..1 << 40, op, any::<bool>(), 0u64..1 << 44, 0u64..1 << 25, any::<bool>());
    fields.prop_map(|(nanos, op, fua, offset, len, sectors)| {
        let unit = if sectors { 512 } else { 1 };
        let range = match op {
            IoOp::Flush => ByteRange::default(),
            _ => ByteRange::new(offset * unit, len / 512 * unit),
        };
        TraceRequest { nanos, op, fua, range }
    })
}

proptest! {
    #[test]
    fn own_comes_back_as_it_was(mut requests in prop::collection::vec(any_request(), 0..200)) {
        requests.sort_by_key(|request| request.nanos);
        prop_assert_eq!(read_as(&written(&requests), None).unwrap(), requests);
    }

    #[test]
    fn no_input_does_harm(bytes in prop::collection::vec(any::<u8>(), 0..2000), at in 0usize..8) {
        let format = Format::NAMES[at].1;
        let _ = read_as(&bytes, Some(format));
        let _ = read_as(&bytes, None);
    }
}

fn small(name: &str) -> Vec<TraceRequest> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    let file = std::fs::read(path).unwrap();
    let bytes = match name.ends_with(".zst") {
        true => zstd::decode_all(&file[..]).unwrap(),
        false => file,
    };
    read_as(&bytes, None).unwrap()
}

#[test]
fn cuts_of_real_traces() {
    let mysql = small("own_mysql_oltp_rw.csv.zst");
    let reads = mysql.iter().filter(|request| request.op == IoOp::Read).count();
    assert_eq!((mysql.len(), reads), (401, 367));
    assert_eq!(mysql[1], request(11_252, IoOp::Read, 1_074_176, 32));
    let postgres = small("own_pg_bench.csv");
    let flushes = postgres.iter().filter(|request| request.op == IoOp::Flush).count();
    assert!(flushes > 0 && postgres.len() > flushes, "{flushes} of {}", postgres.len());
}

/// Compares the number of requests in the traces in the folder that `FOREBAY_TRACES` names with the
/// numbers in its README (in thousands); a flush before a write counts separately.
#[test]
fn shared_traces() {
    let Some(folder) = std::env::var_os("FOREBAY_TRACES") else {
        eprintln!("skipped: FOREBAY_TRACES names no folder with the shared traces");
        return;
    };
    for (name, thousands) in [("arc_P3", 239), ("ms_wsrch_small", 25), ("cloudphysics_vscsi", 114)]
    {
        let path = Path::new(&folder).join(format!("{name}.csv.zst"));
        let file = std::fs::File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let bytes = BufReader::new(zstd::Decoder::new(file).unwrap());
        let reader = TraceReader::new(bytes, None).unwrap();
        let count = reader.collect::<Result<Vec<_>, _>>().unwrap().len();
        assert_eq!((count + 500) / 1000, thousands, "{name}");
    }
}
