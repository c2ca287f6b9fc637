//! The kernel's records as they are kept by a process that may end at any moment.

mod exact;
mod sum;
