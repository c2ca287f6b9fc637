//! Virtual machines that stand for a provider's servers: QEMU, a Debian cloud image, user-data as a NoCloud seed.
//!
//! Needs root on a Debian, because the image is made with its package tools; where QEMU cannot be had, that is an error
//! and never a skipped check. A machine dies with the process that started it.
//!
//! | file | what it owns |
//! |---|---|
//! | `tools` | the programs that this needs, installed where they are missing |
//! | `image` | the disk that all machines start from, built once |
//! | `accel` | whether KVM can be used |
//! | `machine` | one machine: its disk, its power |
//! | `qmp` | the power button |
//! | `shell` | commands in a machine, as root, by SSH |

mod accel;
mod image;
mod machine;
mod qmp;
mod shell;
mod tools;

pub use self::accel::Accel;
pub use self::image::Image;
pub use self::machine::{Machine, Plan, Size};
pub use self::shell::Said;

/// How a machine reaches this one: QEMU's user network puts it there.
pub const HOST_FROM_GUEST: &str = "10.0.2.2";
