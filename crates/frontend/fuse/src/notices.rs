//! Messages to the kernel about files that are no longer as it knows them: another server has taken
//! over the mount, with other volumes.

use forebay_fuse_wire::{forget_inode, forget_name};

use crate::tree::{ROOT, VOLUME_TEXTS, volume_file, volume_text};

/// A volume's file as the kernel knows it, or as it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KnownFile {
    /// The volume's id, by which the kernel knows the file.
    pub id: u8,
    /// Its name.
    pub name: String,
    /// Its size, in bytes.
    pub size: u64,
}

/// The messages that make the kernel forget what is no longer so: `before` are the files it knows,
/// `now` those that there are. It answers a message about something that it has not cached with
/// `ENOENT`.
#[must_use]
pub fn notices(before: &[KnownFile], now: &[KnownFile]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for file in before {
        let same = now.iter().find(|one| one.id == file.id);
        if same.is_none_or(|same| same.name != file.name) {
            all.push(forget_name(ROOT, &file.name));
            all.push(forget_name(VOLUME_TEXTS, &file.name));
        }
        if same.is_none_or(|same| same.size != file.size) {
            all.push(forget_inode(volume_file(file.id), false));
            all.push(forget_inode(volume_text(file.id), false));
        }
    }
    if before != now {
        // Their lists of names.
        all.extend([ROOT, VOLUME_TEXTS].map(|directory| forget_inode(directory, true)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(id: u8, name: &str, size: u64) -> KnownFile {
        KnownFile { id, name: name.to_owned(), size }
    }

    #[test]
    fn the_kernel_forgets_what_has_changed_and_nothing_else() {
        let before =
            [file(0, "stays", 1), file(1, "grows", 1), file(2, "old", 1), file(3, "gone", 1)];
        let now =
            [file(0, "stays", 1), file(1, "grows", 2), file(2, "new", 1), file(4, "added", 1)];
        assert!(notices(&before, &before).is_empty());
        let name = |name| [forget_name(1, name), forget_name(3, name)];
        let inode = |id: u64| [forget_inode(0x1000 + id, false), forget_inode(0x2000 + id, false)];
        let lists = [forget_inode(1, true), forget_inode(3, true)];
        let wanted = [inode(1), name("old"), name("gone"), inode(3), lists].concat();
        assert_eq!(notices(&before, &now), wanted);
    }

    /// As in `struct fuse_notify_inval_inode_out` and `struct fuse_notify_inval_entry_out` of the
    /// kernel's `include/uapi/linux/fuse.h`.
    #[test]
    fn a_notice_has_the_kernels_form() {
        let inode = forget_inode(0x1002, false);
        assert_eq!(inode[..16], [40, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(inode[16..24], 0x1002_u64.to_le_bytes());
        assert_eq!((&inode[24..32], &inode[32..]), (&[0xff; 8][..], &[0; 8][..]));
        let entry = forget_name(1, "db");
        assert_eq!(entry[..16], [35, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(entry[16..24], 1_u64.to_le_bytes());
        assert_eq!(entry[24..], [2, 0, 0, 0, 0, 0, 0, 0, b'd', b'b', 0]);
    }
}
