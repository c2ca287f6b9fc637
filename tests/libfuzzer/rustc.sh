#!/bin/sh
# Compiles the workspace's own crates for `cargo xtask fuzz`: only the product gets libFuzzer's counters and comparison
# traces. The flags need no nightly compiler, and all other crates are identical to those in every other build.
case " $* " in
*" --crate-name svc_libfuzzer "*)
    exec "$@"
    ;;
*" --crate-name svc "* | *" --crate-name svc_"*)
    exec "$@" -Copt-level=1 -Cpasses=sancov-module \
        -Cllvm-args=-sanitizer-coverage-level=4 \
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
        -Cllvm-args=-sanitizer-coverage-pc-table \
        -Cllvm-args=-sanitizer-coverage-trace-compares
    ;;
*)
    exec "$@"
    ;;
esac
