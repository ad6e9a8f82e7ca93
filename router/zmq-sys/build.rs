//! Builds libzmq 4.3.5 statically, with CURVE from libsodium.
//!
//! One source file changes on its way to the compiler: see `limited_session.inc`. The compiler that libzmq's
//! build runs is therefore this program, which calls the real one.

use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::{env, fs};

use zeromq_src::{Build, LibLocation};

/// What libzmq's own build turns on or detects on Linux. Without `SO_KEEPALIVE` and the like TCP keepalive options
/// have no effect; without `EVENTFD` each wake-up of a thread goes through a pair of sockets. The draft API has
/// `ZMQ_ROUTER_NOTIFY`, which names the peer that has left.
const DEFINES: [&str; 8] = [
    "ZMQ_BUILD_DRAFT_API",
    "ZMQ_HAVE_SO_KEEPALIVE",
    "ZMQ_HAVE_TCP_KEEPCNT",
    "ZMQ_HAVE_TCP_KEEPIDLE",
    "ZMQ_HAVE_TCP_KEEPINTVL",
    "ZMQ_HAVE_EVENTFD",
    "ZMQ_HAVE_EVENTFD_CLOEXEC",
    "ZMQ_HAVE_SOCK_CLOEXEC",
];

/// The file that changes, and where the class goes in it.
const CHANGED: &str = "session_base.cpp";
const BEFORE: &str = "zmq::session_base_t *zmq::session_base_t::create (";
const SESSION_CLASS: &str = include_str!("limited_session.inc");

/// Holds the real compiler's path.
const COMPILER: &str = "PLAIT_ZMQ_CXX";

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if !arguments.is_empty() {
        compile(arguments);
    }
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=limited_session.inc");
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        let defines = DEFINES.map(|name| format!("-D{name}=1"));
        // -w because cargo shows the warnings of a path dependency, and those are about libzmq's code.
        add_flags(&format!("-w {}", defines.join(" ")));
    }
    stand_in_for_compiler();
    Build::new().with_libsodium(Some(libsodium())).build();
}

fn add_flags(more: &str) {
    let flags = env::var("CXXFLAGS").unwrap_or_default();
    set("CXXFLAGS", &format!("{flags} {more}"));
}

fn stand_in_for_compiler() {
    let real = cc::Build::new().cpp(true).get_compiler();
    set(COMPILER, &real.path().display().to_string());
    let this = env::current_exe().expect("a build script has a path");
    let target = env::var("TARGET").expect("cargo sets it");
    set(&format!("CXX_{target}"), &this.display().to_string());
}

fn set(name: &str, value: &str) {
    // SAFETY: this program has one thread so far.
    unsafe { env::set_var(name, value) };
}

/// Runs the real compiler, on the changed source where it is asked for the original.
fn compile(mut arguments: Vec<String>) -> ! {
    for argument in &mut arguments {
        if Path::new(argument.as_str()).ends_with(CHANGED) {
            *argument = change(Path::new(argument.as_str())).display().to_string();
        }
    }
    let compiler = env::var_os(COMPILER).expect("the build script's first run sets it");
    let status = Command::new(compiler).args(arguments).status();
    exit(status.ok().and_then(|status| status.code()).unwrap_or(1));
}

fn change(source: &Path) -> PathBuf {
    let original = fs::read_to_string(source).expect("libzmq's source can be read");
    let (before, after) = original
        .split_once(BEFORE)
        .expect("libzmq 4.3.5 creates its sessions here");
    let after = after.replace(
        "session_base_t (io_thread_, active_",
        "limited_session_t (io_thread_, active_",
    );
    let after = after.replace(
        "session_base_t (\n                  io_thread_, active_",
        "limited_session_t (\n                  io_thread_, active_",
    );
    let changed = format!("{before}{SESSION_CLASS}{BEFORE}{after}");
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let path = folder.join(CHANGED);
    fs::write(&path, changed).expect("OUT_DIR can be written");
    path
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
