//! Builds libzmq 4.3.5 statically, with CURVE from libsodium.

use std::env;

use zeromq_src::{Build, LibLocation};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    silence_the_compiler();
    Build::new().with_libsodium(Some(libsodium())).build();
}

/// Warnings about libzmq's code are not ours to mend, and cargo shows those of a path dependency.
fn silence_the_compiler() {
    let flags = env::var("CXXFLAGS").unwrap_or_default();
    // SAFETY: this program has one thread so far.
    unsafe { env::set_var("CXXFLAGS", format!("{flags} -w")) };
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
