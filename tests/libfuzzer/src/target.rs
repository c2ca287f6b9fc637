//! One target of libFuzzer: which one, its executable's name says.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| svc_libfuzzer::check(env!("CARGO_BIN_NAME"), input));
