//! The kernel's messages about one block device since a moment.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::Context as _;
use rustix::fs::OFlags;

const LOG: &str = "/dev/kmsg";
/// Maximum length of one message, in bytes.
const MESSAGE: usize = 8192;

/// The log, from the moment on at which this was made.
pub struct KernelLog(File);

impl KernelLog {
    /// Begins now.
    pub fn from_now() -> anyhow::Result<Self> {
        let flags = i32::try_from(OFlags::NONBLOCK.bits())?;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(LOG);
        let mut file = opened.with_context(|| format!("{LOG}: run it as root"))?;
        file.seek(SeekFrom::End(0)).context(LOG)?;
        Ok(Self(file))
    }

    /// The messages since the last call that name this device, except that its size has changed.
    ///
    /// # Errors
    /// When the kernel has overwritten messages that were not read yet.
    pub fn about(&mut self, device: &Path) -> anyhow::Result<Vec<String>> {
        let name = device.file_name().context("a device has a name")?.to_string_lossy();
        let mut found = Vec::new();
        let mut message = vec![0; MESSAGE];
        loop {
            match self.0.read(&mut message) {
                Ok(len) => {
                    let line = String::from_utf8_lossy(&message[..len]);
                    let text = line.split_once(';').map_or(&*line, |(_, text)| text);
                    let text = text.lines().next().unwrap_or_default();
                    if names(text, &name) {
                        found.push(text.to_owned());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(found),
                Err(error) => return Err(error).context("messages of the kernel are lost"),
            }
        }
    }
}

/// Whether a message is about trouble with a device.
fn names(text: &str, device: &str) -> bool {
    let of_device = |at: usize| {
        let (before, after) = (&text[..at], &text[at + device.len()..]);
        !before.ends_with(char::is_alphanumeric) && !after.starts_with(char::is_alphanumeric)
    };
    let harmless = [
        "detected capacity change",
        "Mounting V5",
        "Ending clean mount",
        "Unmounting",
        "mounted filesystem",
        "unmounting filesystem",
    ];
    text.match_indices(device).any(|(at, _)| of_device(at))
        && !harmless.iter().any(|known| text.contains(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_with_this_device_is_found() {
        for text in [
            "I/O error, dev loop1, sector 8 op 0x1:(WRITE) flags 0x800",
            "Buffer I/O error on dev loop1, logical block 3, async page read",
            "XFS (loop1): log I/O error -5",
        ] {
            assert!(names(text, "loop1"), "{text}");
            assert!(!names(text, "loop"), "{text}");
            assert!(!names(text, "loop11"), "{text}");
        }
        assert!(!names("I/O error, dev loop12, sector 8", "loop1"));
        assert!(!names("XFS (loop1): Mounting V5 Filesystem 4a", "loop1"));
        assert!(!names("loop1: detected capacity change from 0 to 16384", "loop1"));
    }
}
