//! Builds libzmq 4.3.5 statically, with CURVE from libsodium.

use std::env;

use zeromq_src::{Build, LibLocation};

/// Features of Linux that libzmq's own build detects. Without them TCP keepalive options have no effect, and
/// each wake-up of a thread goes through a pair of sockets.
const LINUX_HAS: [&str; 7] = [
    "SO_KEEPALIVE",
    "TCP_KEEPCNT",
    "TCP_KEEPIDLE",
    "TCP_KEEPINTVL",
    "EVENTFD",
    "EVENTFD_CLOEXEC",
    "SOCK_CLOEXEC",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    add_flags("-w");
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        let defines = LINUX_HAS.map(|feature| format!("-DZMQ_HAVE_{feature}=1"));
        add_flags(&defines.join(" "));
    }
    Build::new().with_libsodium(Some(libsodium())).build();
}

/// -w because cargo shows the warnings of a path dependency, and those are about libzmq's code.
fn add_flags(more: &str) {
    let flags = env::var("CXXFLAGS").unwrap_or_default();
    // SAFETY: this program has one thread so far.
    unsafe { env::set_var("CXXFLAGS", format!("{flags} {more}")) };
}

/// Where libsodium-sys-stable put the library that it built: cargo hands its `links` metadata over.
fn libsodium() -> LibLocation {
    LibLocation::new(
        sodium_metadata("DEP_SODIUM_LIB"),
        sodium_metadata("DEP_SODIUM_INCLUDE"),
    )
}

fn sodium_metadata(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| {
        panic!(
            "{name} is not set: libsodium-sys-stable did not build libsodium from its own source. \
             Unset SODIUM_LIB_DIR and SODIUM_USE_PKG_CONFIG and build again."
        )
    })
}
