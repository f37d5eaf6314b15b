//! Volumes as disks of this machine: [`attach`] makes them and takes them away, with the machine's
//! loop devices, mounts and sector sizes.

pub mod attach;
pub mod loops;
pub mod mounts;
mod sectors;
