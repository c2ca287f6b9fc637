#!/bin/sh
# The compiler of the workspace's own crates while `cargo xtask fuzz` builds: `svc` alone gets libFuzzer's counters and traces
# of comparisons. They need no nightly compiler, and all other crates stay as every other command has built them.
case " $* " in
*" --crate-name svc "*)
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
