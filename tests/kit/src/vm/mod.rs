//! Virtual machines as the provider's servers: QEMU, a Debian disk image, and user-data as a NoCloud seed.
//!
//! Requires root on Debian, because the image is built with Debian's package tools. A missing program that cannot be
//! installed is an error, never a skipped check. A machine is killed when the process that started it ends.
//!
//! | file | content |
//! |---|---|
//! | `tools` | required programs, installed if missing |
//! | `image` | the base disk for all machines, built once |
//! | `accel` | KVM detection |
//! | `machine` | a machine's disk and power |
//! | `qmp` | the power button |
//! | `shell` | commands on a machine, as root over SSH |

mod accel;
mod image;
mod machine;
mod qmp;
mod shell;
mod tools;

pub use self::accel::Accel;
pub use self::image::Image;
pub use self::machine::{Machine, MachineSize, MachineSpec};
pub use self::shell::ShellOutput;

/// Address of this host in QEMU's user network.
pub const HOST_FROM_GUEST: &str = "10.0.2.2";
