//! The formats by name, and how they are told apart.
//!
//! | name | content |
//! |---|---|
//! | `forebay` | the output of `forebay trace record`; see `own` |
//! | `csv` | `t_us,rwbs,sector,nsect`: microseconds, blktrace's letters, 512-byte sectors |
//! | `msr` | MSR Cambridge: `timestamp,host,disk,type,offset,size,response` |
//! | `cloudphysics` | `version,time,op,size,lbn`: seconds, SCSI operation codes, 512-byte blocks |
//! | `vscsi1`, `vscsi2` | the same traces as VMware's binary records of 32 and 40 bytes |
//! | `blkparse` | the default text output of `blkparse` |
//! | `iolog` | fio, versions 2 and 3 |

pub mod blkparse;
pub mod csv;
pub mod iolog;
pub mod own;
pub mod text;
pub mod vscsi;

/// A trace's format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Forebay's own, binary.
    Forebay,
    /// Forebay's CSV: `t_us,rwbs,sector,nsect`.
    Csv,
    /// CSV of MSR Cambridge.
    Msr,
    /// CSV of CloudPhysics.
    CloudPhysics,
    /// CloudPhysics, binary records of 32 bytes.
    Vscsi1,
    /// CloudPhysics, binary records of 40 bytes.
    Vscsi2,
    /// Text output of `blkparse`.
    Blkparse,
    /// fio's iolog, versions 2 and 3.
    Iolog,
}

impl Format {
    /// Every format with its name.
    pub const NAMES: [(&'static str, Self); 8] = [
        ("forebay", Self::Forebay),
        ("csv", Self::Csv),
        ("msr", Self::Msr),
        ("cloudphysics", Self::CloudPhysics),
        ("vscsi1", Self::Vscsi1),
        ("vscsi2", Self::Vscsi2),
        ("blkparse", Self::Blkparse),
        ("iolog", Self::Iolog),
    ];

    /// The format's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    /// The format named `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, format)| format)
    }

    /// Guesses the format from the first bytes of a trace.
    #[must_use]
    pub fn guess(head: &[u8]) -> Option<Self> {
        if head.starts_with(&own::MAGIC) {
            return Some(Self::Forebay);
        }
        if let Some(version) = vscsi::guess(head) {
            return Some(version);
        }
        let mut lines = head.split(|&byte| byte == b'\n');
        let first = lines.find_map(|line| {
            let line = std::str::from_utf8(line.trim_ascii()).ok()?;
            (!line.is_empty()).then_some(line)
        })?;
        if iolog::version(first).is_some() {
            Some(Self::Iolog)
        } else if csv::is_csv(first) {
            Some(Self::Csv)
        } else if csv::is_msr(first) {
            Some(Self::Msr)
        } else if csv::is_cloudphysics(first) {
            Some(Self::CloudPhysics)
        } else {
            blkparse::is_one(first).then_some(Self::Blkparse)
        }
    }
}
