//! The test kit: the services that the tests run against, and the tests' other tools. A service stops when its test
//! ends, or with the test run if tests share it.
//!
//! | module | contents |
//! |---|---|
//! | [`pg`] | PostgreSQL 16: a fresh database per test on a shared server, or a dedicated server |
//! | [`s3`] | an S3 server with atomic conditional writes, and faults on demand |
//! | [`moto`] | a third-party S3 server, for tests of racing conditional writes |
//! | [`seaweed`] | SeaweedFS, whose `If-Match` is not always atomic |
//! | [`stores`] | the choice among these three |
//! | [`hcloud`] | the provider's own clients, in Python and Go |
//! | [`fail_points`] | detection of executables that were built with fail points |
//! | [`restic`] | stock restic, which must read the repositories of the file backup |
//! | [`provider`] | a cloud provider simulator: its API, and servers as records, local processes or virtual machines |
//! | [`vm`] | virtual machines that boot Debian with user-data |
//! | [`idp`] | an identity provider: discovery, JWKS, rotation, valid and invalid session tokens |
//! | [`ca`] | a certificate authority |
//! | [`pebble`] | a certificate authority that speaks ACME |
//! | [`net`] | free ports, and a TCP proxy that delays or withholds data, and resets or refuses connections |
//! | [`incomplete_requests`] | HTTPS connections with incomplete request heads, and their memory cost |
//! | [`fetch`] | tools fetched once into `target/tools` |
//! | [`scenario`] | the main scenario, run on all of these |
//! | [`mod@bundle`] | host bundles, in their published form |
//! | [`browser`] | browser tests of the web pages, in Chromium |
//! | [`dev`] | the demo services, kept running for a developer |
//! | [`deb`] | the Debian packages, built, and installed by dpkg in a chroot |
//! | [`model_stub`] | scripted model APIs for coding agents |
//! | [`apt`] | Debian packages, installed on this machine |
//! | [`disk`] | a directory in memory, and a small tmpfs for full-disk tests |
//! | [`packages`] | Debian and npm packages, unpacked under `target/tools` |
//! | [`s3_process`] | third-party S3 servers as child processes |
//! | [`checkers`] | Debian programs that check units, user-data and shell scripts |
//! | [`long_tests`] | figures from the long tests, and their totals |
//! | [`quoted_commands`] | command lines quoted in documentation, checked against a program's definition |
//! | [`skip`] | records of tests that cannot run here |
//! | [`child`] | child processes that cannot outlive the process that started them |
//!
//! The kit never links against the product: it uses the product's public interfaces, as users do.

pub mod apt;
pub mod browser;
pub mod bundle;
pub mod ca;
pub mod checkers;
pub mod child;
pub mod deb;
pub mod dev;
pub mod disk;
pub mod fail_points;
pub mod fetch;
pub mod hcloud;
pub mod idp;
pub mod incomplete_requests;
pub mod long_tests;
pub mod model_stub;
pub mod moto;
pub mod net;
pub mod packages;
pub mod pebble;
pub mod pg;
pub mod provider;
pub mod quoted_commands;
pub mod restic;
pub mod s3;
pub mod s3_process;
pub mod scenario;
pub mod seaweed;
pub mod skip;
pub mod stores;
pub mod vm;

mod runtime;
