//! The kernel's side of the disks: `/dev/ublk-control`, and the files of each device.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_device::{ControlCall, UblkControl};
use forebay_ublk_wire::{Control, DevInfo, FEATURES_BYTES, Params, flags};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

const CONTROL: &str = "/dev/ublk-control";
/// Every ublk device of this machine, as `ublkcN`.
const DEVICES: &str = "/sys/class/ublk-char";
/// How long the kernel may take for a command, and a device's file to appear.
const PATIENCE: Duration = Duration::from_secs(8);
/// How long a dead server's end may take: the kernel first ends what it had under way.
const END_PATIENCE: Duration = Duration::from_secs(30);
const STEP: Duration = Duration::from_millis(5);

/// Why the kernel did not carry out a command.
#[derive(Debug)]
pub struct Refusal {
    control: Control,
    device: Option<u32>,
    /// Its error.
    pub error: Errno,
}

impl Refusal {
    /// Whether a removal has got so far that the disk may have ended.
    pub fn has_ended_the_disk(&self) -> bool {
        match self.control {
            Control::Stop => self.error == Errno::TIMEDOUT,
            Control::Delete | Control::DeleteLater => true,
            _ => false,
        }
    }

    /// Whether there is no such device.
    pub fn is_gone(&self) -> bool {
        self.error == Errno::NODEV
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { control, device, error } = self;
        write!(f, "the kernel refuses {}", control.name())?;
        if let Some(number) = device {
            write!(f, " for {}", block_path(*number))?;
        }
        write!(f, ": {error}; see the kernel's log")
    }
}

impl std::error::Error for Refusal {}

/// The path of a disk.
pub fn block_path(number: u32) -> String {
    format!("/dev/ublkb{number}")
}

/// Whether this machine has ublk.
pub fn exists() -> bool {
    Path::new(CONTROL).exists()
}

/// Devices of this machine.
pub struct Devices {
    /// Those that the kernel has described.
    pub known: Vec<DevInfo>,
    /// Whether these are all.
    pub complete: bool,
}

/// The open control device.
pub struct Kernel {
    control: UblkControl,
    features: u64,
}

impl Kernel {
    /// Opens it, or says why this server makes no disks by ublk.
    pub fn open() -> Result<Self, String> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let device =
            rustix::fs::open(CONTROL, flags, Mode::empty()).map_err(|error| match error {
                Errno::NOENT | Errno::NODEV | Errno::NXIO => format!(
                    "there is no {CONTROL}: this kernel has no ublk (Linux 6.5 with \
                 CONFIG_BLK_DEV_UBLK), or it is not loaded (modprobe ublk_drv)"
                ),
                Errno::PERM | Errno::ACCESS => format!("{CONTROL}: {error}: the server needs root"),
                _ => format!("{CONTROL}: {error}"),
            })?;
        let control = UblkControl::new(&device, PATIENCE).map_err(|error| error.to_string())?;
        let mut kernel = Self { control, features: 0 };
        let features = kernel.ask_features().unwrap_or(0);
        kernel.features = features;
        if features & flags::NEEDED != flags::NEEDED {
            return Err(format!(
                "this kernel's ublk is too old: it has the features {features:#x}, and {:#x} are \
                 needed (Linux 6.5)",
                flags::NEEDED
            ));
        }
        Ok(kernel)
    }

    fn call(
        &mut self,
        control: Control,
        device: Option<u32>,
        data: u64,
        buffer: Vec<u8>,
    ) -> Result<Vec<u8>, Refusal> {
        let call = ControlCall { control, device, data, buffer };
        self.control.call(call).map_err(|error| Refusal { control, device, error })
    }

    fn ask_features(&mut self) -> Option<u64> {
        let answer = self.call(Control::GetFeatures, None, 0, vec![0; FEATURES_BYTES]).ok()?;
        answer.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
    }

    /// The ublk devices of this machine, of whichever server.
    pub fn devices(&mut self) -> Devices {
        let mut devices = Devices { known: Vec::new(), complete: true };
        let numbers = numbers().unwrap_or_else(|error| {
            tracing::warn!(%error, "{DEVICES}");
            devices.complete = false;
            Vec::new()
        });
        for number in numbers {
            match self.info(number) {
                Ok(info) => devices.known.push(info),
                // It is gone by now.
                Err(refusal) if refusal.is_gone() => {}
                Err(error) => {
                    tracing::warn!(%error, "a ublk device is left out");
                    devices.complete = false;
                }
            }
        }
        devices
    }

    /// A device's description.
    pub fn info(&mut self, number: u32) -> Result<DevInfo, Refusal> {
        self.described(Control::GetInfo, Some(number), DevInfo::empty())
    }

    /// Whether there still is the device with this number and mark.
    pub fn has(&mut self, number: u32, mark: u64) -> Result<bool, Refusal> {
        match self.info(number) {
            Ok(info) => Ok(info.mark == mark),
            Err(refusal) if refusal.is_gone() => Ok(false),
            Err(refusal) => Err(refusal),
        }
    }

    /// Makes a device, without a disk; returns it as the kernel has made it.
    pub fn add(&mut self, wanted: DevInfo) -> Result<DevInfo, Refusal> {
        self.described(Control::Add, None, wanted)
    }

    fn described(
        &mut self,
        control: Control,
        device: Option<u32>,
        info: DevInfo,
    ) -> Result<DevInfo, Refusal> {
        let answer = self.call(control, device, 0, info.as_bytes().to_vec())?;
        let info = DevInfo::read_from_bytes(&answer);
        info.map_err(|_| Refusal { control, device, error: Errno::PROTO })
    }

    /// Sets the size and the limits of a device's disk.
    pub fn set_params(&mut self, number: u32, params: &Params) -> Result<(), Refusal> {
        self.call(Control::SetParams, Some(number), 0, params.encode().to_vec()).map(drop)
    }

    /// Makes a device's disk, once its slots are served.
    pub fn start(&mut self, number: u32) -> Result<(), Refusal> {
        self.call(Control::Start, Some(number), own_pid(), Vec::new()).map(drop)
    }

    /// Whether a device can be taken over whose last server died while it took the device over.
    /// Older kernels lose track of such a device, and may even follow a null pointer
    /// (`ublk_queue_reinit` of Linux 6.12).
    pub fn repeats_recovery(&self) -> bool {
        self.features & flags::QUIESCE != 0
    }

    /// Makes a device whose server is gone ready for this one, once the kernel has ended what that
    /// server had under way.
    pub fn start_recovery(&mut self, number: u32) -> Result<(), Refusal> {
        let deadline = Instant::now() + END_PATIENCE;
        loop {
            let begun = self.call(Control::StartRecovery, Some(number), 0, Vec::new());
            match begun {
                Err(Refusal { error: Errno::BUSY, .. }) if Instant::now() < deadline => {
                    std::thread::sleep(STEP);
                }
                begun => return begun.map(drop),
            }
        }
    }

    /// Ends that, once the device's slots are served: requests continue.
    pub fn end_recovery(&mut self, number: u32) -> Result<(), Refusal> {
        self.call(Control::EndRecovery, Some(number), own_pid(), Vec::new()).map(drop)
    }

    /// Removes a device and its disk, and waits until nobody has it open.
    pub fn remove(&mut self, number: u32) -> Result<(), Refusal> {
        self.call(Control::Stop, Some(number), 0, Vec::new())?;
        self.call(Control::Delete, Some(number), 0, Vec::new()).map(drop)
    }

    /// Removes a device's disk now, with the requests that wait for a server, and the device when
    /// nobody has it open any more.
    pub fn abandon(&mut self, number: u32) -> Result<(), Refusal> {
        self.call(Control::Stop, Some(number), 0, Vec::new())?;
        self.call(Control::DeleteLater, Some(number), 0, Vec::new()).map(drop)
    }
}

/// The numbers of this machine's ublk devices.
fn numbers() -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(DEVICES)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("ublkc"));
        numbers.extend(number.and_then(|number| number.parse::<u32>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

fn own_pid() -> u64 {
    u64::from(std::process::id())
}

/// Opens a device for its server; udev may take a moment to make the file.
pub fn open_device(number: u32) -> Result<OwnedFd, String> {
    let path = format!("/dev/ublkc{number}");
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(device) => {
                let found =
                    rustix::fs::fstat(&device).map_err(|error| format!("{path}: {error}"))?;
                let device_file =
                    FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice;
                return device_file.then_some(device).ok_or(format!("{path} is no device"));
            }
            Err(Errno::NOENT | Errno::ACCESS) if Instant::now() < deadline => {
                std::thread::sleep(STEP);
            }
            Err(Errno::BUSY) => return Err(format!("{path} is open in another process")),
            Err(error) => return Err(format!("{path}: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a removal that was not done in time was said to have changed nothing.
    #[test]
    fn a_removal_ends_the_disk_once_the_kernel_was_told_to_stop_it() {
        let has_ended =
            |control, error| Refusal { control, device: Some(0), error }.has_ended_the_disk();
        assert!(!has_ended(Control::Stop, Errno::PERM));
        assert!(has_ended(Control::Stop, Errno::TIMEDOUT));
        assert!(has_ended(Control::Delete, Errno::TIMEDOUT));
        assert!(has_ended(Control::DeleteLater, Errno::INTR));
        assert!(!has_ended(Control::GetInfo, Errno::TIMEDOUT));
    }
}
