#!/bin/sh
# Checks that this machine can build Plait. Prints each thing that is missing with the command that brings it,
# and exits 1; otherwise prints the Python to use.
set -u

missing=0

lacks() { # what, command that mends it
    missing=1
    printf 'plait: missing: %s\n    mend it with: %s\n' "$1" "$2" >&2
}

find_python() {
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

# True if version $1 is at least version $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

check_python() {
    python=$(find_python)
    if [ -z "$python" ]; then
        lacks "Python 3.11 or newer (python3 is $(python3 -V 2>/dev/null || echo 'not there'))" \
            "sudo apt install python3 python3-venv   (or: make PYTHON=/path/to/python3.11)"
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        lacks "Python's venv module" "sudo apt install $("$python" -c \
            'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
}

check_compiler() {
    for tool in cc c++ make; do
        command -v "$tool" >/dev/null || { lacks "a C and C++ compiler ($tool)" "sudo apt install build-essential"; return; }
    done
}

# No cargo at all is fine: pip then brings a toolchain of its own. An old one would be used, and fail.
check_cargo() {
    command -v cargo >/dev/null || return 0
    needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    found=$(cargo --version 2>/dev/null | cut -d ' ' -f 2)
    at_least "${found:-0}" "$needed" && return
    if command -v rustup >/dev/null; then
        lacks "Rust $needed or newer (cargo is ${found:-broken})" "rustup update stable && rustup default stable"
    else
        lacks "Rust $needed or newer (cargo is ${found:-broken})" \
            "sudo apt remove cargo rustc   (the build then brings its own; or install rustup from https://rustup.rs)"
    fi
}

check_python
check_compiler
check_cargo
[ "$missing" -eq 0 ] || exit 1
echo "$python"
