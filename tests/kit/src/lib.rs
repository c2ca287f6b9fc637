//! The test kit: the real parts that this software is tried against, each on loopback, each gone when the test is.
//!
//! | module | what it gives |
//! |---|---|
//! | [`pg`] | PostgreSQL 16: a server per test process with a fresh database per test, or servers of one's own |
//! | [`s3`] | an S3 server with exact conditional writes, and faults on demand |
//! | [`moto`] | another S3 server, not ours, for races of conditional writes |
//! | [`seaweed`] | SeaweedFS, whose `If-Match` is not exact |
//! | [`provider`] | the cloud provider: its API, and servers that are records, processes of a host, or virtual machines |
//! | [`vm`] | virtual machines that boot a Debian with user-data |
//! | [`idp`] | an identity provider: discovery, JWKS, rotation, good and bad session tokens |
//! | [`ca`] | a certificate authority |
//! | [`net`] | free ports and a TCP proxy that cuts, delays, resets |
//! | [`heads`] | HTTPS connections whose request heads do not end, and what they cost |
//! | [`fetch`] | tools fetched once into `target/tools` |
//! | [`story`] | the whole main job, played on all of these |
//! | [`lab`] | the main job on virtual machines, and what only a machine shows |
//! | [`mod@bundle`] | host bundles, as they are published |
//! | [`browser`] | the pages that people see, in Chromium |
//! | [`dev`] | the story's parts, kept running for a developer |
//! | [`deb`] | the Debian packages, and what dpkg does with them in a root of their own |
//! | [`mod@bench`] | measurements beside peers, in rounds |
//! | [`checkers`] | programs that check what is written for a machine |
//! | [`long`] | figures of the long tests, and their sums |
//! | [`child`] | bounded child processes that cannot outlive the test run |
//!
//! The kit never links the product: it speaks to it as its users do.

pub mod bench;
pub mod browser;
pub mod bundle;
pub mod ca;
pub mod checkers;
pub mod child;
pub mod deb;
pub mod dev;
pub mod disk;
pub mod fetch;
pub mod heads;
pub mod idp;
pub mod lab;
pub mod long;
pub mod moto;
pub mod net;
pub mod packages;
pub mod pg;
pub mod provider;
pub mod s3;
pub mod s3_process;
pub mod seaweed;
pub mod story;
pub mod vm;

mod runtime;
