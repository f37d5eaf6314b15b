//! Files on the temporary directory's file system and on tmpfs, and block devices where the machine
//! allows tests to create them.

use std::path::PathBuf;
use std::process::Command;

use forebay_block::{ByteRange, ErrorKind, Io, IoFlags, IoOp};

use super::*;
use crate::testing::{Bench, TempPath, exercise, exercise_in_units};

const SIZE: u64 = 8 << 20;

fn created(path: &Path, direct: Direct) -> FileDevice {
    let mode = OpenMode { direct, create_size: Some(SIZE), read_only: false };
    FileDevice::open(path, mode).unwrap()
}

#[test]
fn a_file_behaves_as_a_device_does_with_and_without_the_page_cache() {
    for direct in [Direct::Auto, Direct::Off] {
        let path = TempPath::new();
        let device = created(&path.0, direct);
        assert!(direct == Direct::Auto || !device.is_direct());
        exercise(&device, 7);
        exercise_in_units(&device, 8, 1);
    }
}

#[test]
fn tmpfs_serves_too() {
    let path = PathBuf::from(format!("/dev/shm/forebay-device-{}", std::process::id()));
    if !Path::new("/dev/shm").is_dir() {
        println!("skipped: no /dev/shm");
        return;
    }
    let device = created(&path, Direct::Auto);
    let done = std::panic::catch_unwind(|| exercise(&device, 9));
    std::fs::remove_file(&path).unwrap();
    assert!(done.is_ok());
}

/// A loop device over a temporary file.
struct Loop {
    device: PathBuf,
    file: TempPath,
}

impl Loop {
    fn new(logical: u32) -> Option<Self> {
        Self::sized(logical, SIZE)
    }

    fn sized(logical: u32, size: u64) -> Option<Self> {
        let file = TempPath::new();
        File::create(&file.0).unwrap().set_len(size).unwrap();
        let made = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &logical.to_string()])
            .arg(&file.0)
            .output();
        match made {
            Ok(output) if output.status.success() => {
                let device = String::from_utf8(output.stdout).unwrap().trim().into();
                Some(Self { device, file })
            }
            other => {
                println!("skipped: no loop device here: {other:?}");
                None
            }
        }
    }
}

impl Loop {
    /// The switch of its write cache. The kernel remembers it for the device's later files.
    fn write_cache(&self) -> PathBuf {
        let name = self.device.file_name().unwrap();
        Path::new("/sys/block").join(name).join("queue/write_cache")
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // Left as it was found: without this, later disks on this machine would get no flush.
        let _ = std::fs::write(self.write_cache(), "write back");
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}

/// The mounted file system of a loop device.
struct Mounted(PathBuf);

impl Mounted {
    fn new(disk: &Loop) -> Self {
        let place = Self(TempPath::new().0.clone());
        std::fs::create_dir(&place.0).unwrap();
        let mounted = Command::new("mount").args([&disk.device, &place.0]).status().unwrap();
        assert!(mounted.success());
        place
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn block_devices_of_both_sector_sizes_serve_any_sector() {
    for logical in [512, 4096] {
        let Some(disk) = Loop::new(logical) else { return };
        let device = FileDevice::open(&disk.device, OpenMode::default()).unwrap();
        assert!(device.is_direct());
        assert_eq!(device.info().logical_block, logical);
        assert_eq!(device.info().size, SIZE);
        drop(device);
        let mode = |size| OpenMode { create_size: Some(size), ..OpenMode::default() };
        assert!(FileDevice::open(&disk.device, mode(SIZE + 4096)).is_err());
        let device = FileDevice::open(&disk.device, mode(SIZE / 2)).unwrap();
        assert_eq!(device.info().size, SIZE / 2);
        exercise(&device, 11);
        exercise_in_units(&device, 12, 1);
    }
}

/// A file without data on a file system whose disk has sectors of 4 KiB: reads of its holes may be
/// of any size, so they do not tell how it must be written.
#[test]
fn a_sparse_file_on_large_sectors_serves_any_sector() {
    for tool in ["mkfs.ext4", "mkfs.xfs"] {
        let Some(disk) = Loop::sized(4096, 320 << 20) else { return };
        let made = Command::new(tool).arg("-q").arg(&disk.device).status();
        if !made.is_ok_and(|status| status.success()) {
            println!("skipped: {tool} does not work here");
            continue;
        }
        let place = Mounted::new(&disk);
        for size in [SIZE, SIZE + 512] {
            let path = place.0.join(size.to_string());
            File::create(&path).unwrap().set_len(size).unwrap();
            let device = FileDevice::open(&path, OpenMode::default()).unwrap();
            let is_direct = size.is_multiple_of(4096);
            assert_eq!(device.is_direct(), is_direct, "{tool}, {:?}", device.remark());
            assert_eq!(device.info().logical_block, if is_direct { 4096 } else { 512 });
            exercise(&device, 13);
        }
    }
}

/// Write requests completed by a block device, from its counters.
fn writes_to(device: &Path) -> u64 {
    let name = device.file_name().unwrap().to_string_lossy().into_owned();
    let stat = std::fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
    stat.split_whitespace().nth(4).unwrap().parse().unwrap()
}

/// A disk with 4 KiB sectors that reports no volatile write cache. A part of it of any size is used
/// with direct I/O; if the page cache is used instead, a flush is needed and reaches the disk.
#[test]
fn a_disk_that_needs_no_flush_gets_one_through_the_page_cache() {
    let Some(disk) = Loop::new(4096) else { return };
    if let Err(error) = std::fs::write(disk.write_cache(), "write through") {
        println!("skipped: {error}");
        return;
    }
    let odd = OpenMode { create_size: Some(SIZE - 512), ..OpenMode::default() };
    let device = FileDevice::open(&disk.device, odd).unwrap();
    assert!(device.is_direct() && !device.info().volatile_cache && device.remark().is_none());
    assert_eq!((device.info().size, device.info().logical_block), (SIZE - 512, 4096));
    exercise(&device, 13);
    drop(device);
    let device = FileDevice::open(&disk.device, OpenMode { direct: Direct::Off, ..odd }).unwrap();
    assert!(device.info().volatile_cache, "the page cache is lost with the power");
    assert!(device.remark().unwrap().contains("page cache"), "{:?}", device.remark());
    let mut bench = Bench::new(&device);
    bench.write(0, &[7; 4096]).unwrap();
    let before = writes_to(&disk.device);
    bench.bare(IoOp::Flush, ByteRange::default()).unwrap();
    assert!(writes_to(&disk.device) > before, "a flush of the page cache writes to the disk");
}

#[test]
fn a_block_device_discards_and_is_locked() {
    let Some(disk) = Loop::new(4096) else { return };
    let device = FileDevice::open(&disk.device, OpenMode::default()).unwrap();
    assert!(device.info().discard);
    let mut bench = Bench::new(&device);
    bench.write(0, &[7; 65536]).unwrap();
    bench.bare(IoOp::Discard, ByteRange::new(100, 40_000)).unwrap();
    // Whole blocks within the range are discarded, and read as zeros on a loop device; the edges
    // are kept.
    assert_eq!(bench.read(0, 4096).unwrap(), [7; 4096]);
    assert_eq!(bench.read(4096, 32768).unwrap(), [0; 32768]);
    assert_eq!(bench.read(36864, 4096).unwrap(), [7; 4096]);
    let again = FileDevice::open(&disk.device, OpenMode::default());
    assert!(matches!(again, Err(OpenError::InUse { .. })), "{:?}", again.err());
}

/// Regression: a disk that is removed while it is open was reported as full, or as ended, and
/// writes past the cache failed. The kernel gives it the size 0, as this loop device.
#[test]
fn a_block_device_that_is_removed_is_gone_until_it_is_back() {
    let Some(disk) = Loop::new(4096) else { return };
    let device = FileDevice::open(&disk.device, OpenMode::default()).unwrap();
    let mut bench = Bench::new(&device);
    bench.write(8192, &[7; 4096]).unwrap();
    let resize = |size| {
        OpenOptions::new().write(true).open(&disk.file.0).unwrap().set_len(size).unwrap();
        let told = Command::new("losetup").arg("--set-capacity").arg(&disk.device).status();
        assert!(told.unwrap().success());
    };
    resize(0);
    assert_eq!(bench.write(8192, &[8; 4096]).unwrap_err().kind(), ErrorKind::DeviceGone);
    assert_eq!(bench.write(8200, &[8; 100]).unwrap_err().kind(), ErrorKind::DeviceGone);
    assert_eq!(bench.read(8192, 4096).unwrap_err().kind(), ErrorKind::DeviceGone);
    // One that has shrunk is there.
    resize(8192);
    assert_eq!(bench.write(8192, &[8; 4096]).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(bench.read(8192, 4096).unwrap_err().kind(), ErrorKind::Media);
    resize(SIZE);
    bench.write(8192, &[9; 4096]).unwrap();
    assert_eq!(bench.read(8192, 4096).unwrap(), [9; 4096]);
}

/// Regression: a partition of a removed disk keeps its size, and its errors counted as answers of
/// the medium.
#[test]
fn a_partition_of_a_disk_that_is_removed_is_gone() {
    let Some(disk) = Loop::new(512) else { return };
    let part = PathBuf::from(format!("{}p1", disk.device.display()));
    let made = Command::new("addpart").arg(&disk.device).args(["1", "64", "1024"]).status();
    if !made.is_ok_and(|status| status.success()) || !part.exists() {
        println!("skipped: no partitions of loop devices here");
        return;
    }
    let device = FileDevice::open(&part, OpenMode::default()).unwrap();
    let found = std::panic::catch_unwind(|| {
        let mut bench = Bench::new(&device);
        bench.read(0, 4096).unwrap();
        OpenOptions::new().write(true).open(&disk.file.0).unwrap().set_len(0).unwrap();
        let told = Command::new("losetup").arg("--set-capacity").arg(&disk.device).status();
        assert!(told.unwrap().success());
        bench.read(0, 4096).unwrap_err().kind()
    });
    drop(device);
    let _ = Command::new("delpart").arg(&disk.device).arg("1").status();
    assert_eq!(found.unwrap(), ErrorKind::DeviceGone);
}

/// Sectors of one 4 KiB block written concurrently: each must survive the read-modify-write of the
/// others. Then the whole block and one sector, in that order.
#[test]
fn partial_writes_of_one_block_do_not_undo_each_other() {
    let Some(disk) = Loop::new(4096) else { return };
    let device = FileDevice::open(&disk.device, OpenMode::default()).unwrap();
    let mut bench = Bench::new(&device);
    for round in 1..30u8 {
        let mut batch: Vec<Io> = (0..16)
            .map(|sector| bench.write_io(sector * 512, &[round ^ (sector as u8) << 3; 512]))
            .collect();
        batch.push(bench.write_io(8192, &[round; 4096]));
        batch.push(bench.write_io(8192 + 512, &[!round; 512]));
        batch.push(bench.write_io(8192 + 300, &[round; 100]));
        assert!(bench.run(batch).iter().all(|end| end.result.is_ok()));
        for sector in 0..16u64 {
            let expected = [round ^ (sector as u8) << 3; 512];
            assert_eq!(bench.read(sector * 512, 512).unwrap(), expected);
        }
        let block = [vec![round; 512], vec![!round; 512], vec![round; 3072]].concat();
        assert_eq!(bench.read(8192, 4096).unwrap(), block);
    }
}

#[test]
fn many_more_requests_than_the_ring_takes_all_complete() {
    let path = TempPath::new();
    let device = created(&path.0, Direct::Auto);
    let mut bench = Bench::new(&device);
    let ios: Vec<Io> =
        (0..2000u64).map(|i| bench.write_io(i * 4096 % SIZE, &[i as u8; 4096])).collect();
    assert!(bench.run(ios).iter().all(|end| end.result.is_ok()));
}

#[test]
fn zeroes_may_be_refused_when_they_must_be_fast() {
    let Some(disk) = Loop::new(4096) else { return };
    let device = FileDevice::open(&disk.device, OpenMode::default()).unwrap();
    let mut bench = Bench::new(&device);
    let tag = bench.tag();
    let mut io = Io::bare(tag, IoOp::WriteZeroes, ByteRange::new(512, 512));
    io.flags = IoFlags { fast_only: true, ..IoFlags::default() };
    assert_eq!(bench.one(io).result.unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn a_file_that_shrinks_under_us_gives_an_error_not_zeros() {
    let path = TempPath::new();
    let device = created(&path.0, Direct::Auto);
    File::options().write(true).open(&path.0).unwrap().set_len(SIZE / 2).unwrap();
    let mut bench = Bench::new(&device);
    assert!(bench.read(0, 4096).is_ok());
    assert_eq!(bench.read(SIZE / 2, 4096).unwrap_err().kind(), ErrorKind::Media);
    assert_eq!(bench.read(SIZE / 2 - 4096, 8192).unwrap_err().kind(), ErrorKind::Media);
}

#[test]
fn opening_says_what_is_wrong() {
    let path = TempPath::new();
    let text = |result: Result<FileDevice, OpenError>| result.err().unwrap().to_string();
    let opened = FileDevice::open(&path.0, OpenMode::default());
    assert!(text(opened).contains("cannot open"));
    let size = |size| OpenMode { create_size: Some(size), ..OpenMode::default() };
    assert!(text(FileDevice::open(&path.0, size(1000))).contains("not a multiple of 512"));
    assert!(!path.0.exists(), "a file that could not be set up is not left behind");
    assert!(text(FileDevice::open(Path::new("/dev/null"), size(512))).contains("neither a file"));

    let first = FileDevice::open(&path.0, size(8192)).unwrap();
    assert!(text(FileDevice::open(&path.0, size(8192))).contains("in use by another process"));
    let reader = OpenMode { read_only: true, ..OpenMode::default() };
    assert!(text(FileDevice::open(&path.0, reader)).contains("in use by another process"));
    drop(first);
    assert!(text(FileDevice::open(&path.0, size(4096))).contains("8192 bytes, not the 4096"));
    File::create(&path.0).unwrap();
    assert!(text(FileDevice::open(&path.0, OpenMode::default())).contains("is empty"));
}

#[test]
fn readers_share_a_file_and_cannot_change_it() {
    let path = TempPath::new();
    drop(created(&path.0, Direct::Auto));
    let mode = OpenMode { read_only: true, ..OpenMode::default() };
    let (first, _second) =
        (FileDevice::open(&path.0, mode).unwrap(), FileDevice::open(&path.0, mode).unwrap());
    let mut bench = Bench::new(&first);
    assert!(bench.read(0, 512).is_ok());
    assert_eq!(bench.write(0, &[1; 512]).unwrap_err().kind(), ErrorKind::ReadOnly);
    let zero = bench.bare(IoOp::WriteZeroes, ByteRange::new(0, 512));
    assert_eq!(zero.unwrap_err().kind(), ErrorKind::ReadOnly);
}

/// Found by an audit: probing whether the file system can free ranges changed the timestamps of a
/// file that the server may write but does not own, so every later start was refused.
#[test]
fn opening_a_file_changes_none_of_its_times() {
    use std::os::unix::fs::MetadataExt as _;
    let path = TempPath::new();
    std::fs::write(&path.0, vec![0; 1 << 20]).unwrap();
    let times = || {
        let found = std::fs::metadata(&path.0).unwrap();
        [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()]
    };
    let before = times();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let device = FileDevice::open(&path.0, OpenMode::default()).unwrap();
    let known = device.info().discard;
    drop(device);
    assert!(known && times() == before, "not on a file system that is known?");
}
