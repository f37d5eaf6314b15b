//! The table of volumes: name, id, size, and how clients see each one.

use std::error::Error;
use std::fmt;

use forebay_block::{
    DeviceInfo, Endpoint, Export, NAME_BYTES_MAX, SECTOR_SIZE, VOLUMES_MAX, VolumeId,
};

/// Default length in bytes from which a sequential stream bypasses the cache.
pub const SEQUENTIAL_THRESHOLD: u64 = 512 << 10;

/// One volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Volume {
    /// Its index in the superblock's table.
    pub id: VolumeId,
    /// The name that clients request.
    pub name: String,
    /// Size and capabilities of the primary; the volume has the same size.
    pub info: DeviceInfo,
    /// Whether clients may write.
    pub read_only: bool,
    /// Length in bytes from which a sequential stream bypasses the cache; 0 for never.
    pub sequential_threshold: u64,
}

impl Volume {
    /// Creates a volume over a primary, with the default settings.
    #[must_use]
    pub fn new(id: VolumeId, name: impl Into<String>, info: DeviceInfo) -> Self {
        let read_only = info.read_only;
        let sequential_threshold = SEQUENTIAL_THRESHOLD;
        Self { id, name: name.into(), info, read_only, sequential_threshold }
    }

    /// The volume as clients see it. The cache takes any alignment, discards and zeroes, and loses
    /// unflushed writes at a power failure, whatever its primary does.
    #[must_use]
    pub fn export(&self) -> Export {
        let info = DeviceInfo {
            logical_block: SECTOR_SIZE as u32,
            volatile_cache: true,
            flush_by_queue: false,
            discard: true,
            fast_zero: true,
            rotational: false,
            read_only: self.read_only,
            ..self.info.clone()
        };
        // Nothing of the primary: whoever connects may ask for the list.
        let description = "a volume of Forebay".to_owned();
        Export { name: self.name.clone(), description, info, preferred_block: 4096 }
    }
}

/// Why a table of volumes is rejected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RegistryError {
    /// No volume, or more than [`VOLUMES_MAX`].
    Count(usize),
    /// Two volumes have the same name.
    Name(String),
    /// A name is longer than [`NAME_BYTES_MAX`].
    LongName(String),
    /// Two volumes have the same id.
    Id(VolumeId),
    /// A volume's size is zero or not a multiple of 512.
    Size(String, u64),
}

impl fmt::Display for RegistryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => {
                write!(f, "{count} volumes: a cache serves 1 to {VOLUMES_MAX}")
            }
            Self::Name(name) => write!(f, "two volumes are named '{name}': rename one"),
            Self::LongName(name) => {
                write!(f, "the volume name '{name}' is longer than {NAME_BYTES_MAX} bytes")
            }
            Self::Id(id) => write!(f, "{id} is there twice"),
            Self::Size(name, size) => write!(
                f,
                "volume '{name}' has {size} bytes: a primary has a multiple of 512, above zero"
            ),
        }
    }
}

impl Error for RegistryError {}

/// Every volume of a pool, in the order of the exports that clients see.
#[derive(Clone, Debug)]
pub struct Registry {
    volumes: Vec<Volume>,
}

impl Registry {
    /// Creates the table of `volumes`.
    ///
    /// # Errors
    /// If names or ids repeat, or a size or the number of volumes is out of bounds.
    pub fn new(volumes: Vec<Volume>) -> Result<Self, RegistryError> {
        if volumes.is_empty() || volumes.len() > VOLUMES_MAX {
            return Err(RegistryError::Count(volumes.len()));
        }
        for (i, volume) in volumes.iter().enumerate() {
            let earlier = &volumes[..i];
            if volume.name.len() > NAME_BYTES_MAX {
                return Err(RegistryError::LongName(volume.name.clone()));
            }
            if earlier.iter().any(|other| other.name == volume.name) {
                return Err(RegistryError::Name(volume.name.clone()));
            }
            if earlier.iter().any(|other| other.id == volume.id) {
                return Err(RegistryError::Id(volume.id));
            }
            let size = volume.info.size;
            if size == 0 || !size.is_multiple_of(SECTOR_SIZE as u64) {
                return Err(RegistryError::Size(volume.name.clone(), size));
            }
        }
        Ok(Self { volumes })
    }

    /// The volumes in order.
    #[must_use]
    pub fn volumes(&self) -> &[Volume] {
        &self.volumes
    }

    /// The volume named `name`.
    #[must_use]
    pub fn by_name(&self, name: &str) -> Option<&Volume> {
        self.volumes.iter().find(|volume| volume.name == name)
    }

    /// The volume behind an export.
    ///
    /// # Panics
    /// If the endpoint is not an index into [`Registry::exports`].
    #[must_use]
    pub fn volume_of(&self, endpoint: Endpoint) -> VolumeId {
        self.volumes[endpoint.0].id
    }

    /// The volumes as clients see them; an [`Endpoint`] is an index into this list.
    #[must_use]
    pub fn exports(&self) -> Vec<Export> {
        self.volumes.iter().map(Volume::export).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(id: u8, name: &str, size: u64) -> Volume {
        Volume::new(VolumeId(id), name, DeviceInfo::plain(size, "memory"))
    }

    #[test]
    fn bad_tables_are_refused_by_reason() {
        let err = |volumes| Registry::new(volumes).expect_err("a bad table");
        assert_eq!(err(vec![]), RegistryError::Count(0));
        let many = (0..65).map(|i| volume(i, &i.to_string(), 512)).collect();
        assert_eq!(err(many), RegistryError::Count(65));
        let twice = vec![volume(0, "a", 512), volume(1, "a", 512)];
        assert_eq!(err(twice), RegistryError::Name("a".into()));
        let twice = vec![volume(2, "a", 512), volume(2, "b", 512)];
        assert_eq!(err(twice), RegistryError::Id(VolumeId(2)));
        assert_eq!(err(vec![volume(0, "a", 0)]), RegistryError::Size("a".into(), 0));
        assert_eq!(err(vec![volume(0, "a", 700)]), RegistryError::Size("a".into(), 700));
        let long = "x".repeat(65);
        assert_eq!(err(vec![volume(0, &long, 512)]), RegistryError::LongName(long));
    }

    #[test]
    fn exports_follow_the_volumes() {
        let mut info = DeviceInfo::plain(1536, "file:x");
        info.read_only = true;
        info.logical_block = 4096;
        let volumes = vec![volume(4, "a", 512), Volume::new(VolumeId(9), "b", info)];
        let registry = Registry::new(volumes).expect("a good table");
        let exports = registry.exports();
        assert_eq!(exports[1].name, "b");
        assert!(exports[1].info.read_only && !exports[0].info.read_only);
        let told = format!("{} {}", exports[1].name, exports[1].description);
        assert!(!told.contains("file:x"), "clients are told where the primary is: {told}");
        assert_eq!((exports[1].info.size, exports[1].info.logical_block), (1536, 512));
        assert_eq!(registry.volume_of(Endpoint(1)), VolumeId(9));
        assert_eq!(registry.by_name("a").map(|v| v.id), Some(VolumeId(4)));
        assert!(registry.by_name("c").is_none());
    }
}
