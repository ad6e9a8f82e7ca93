//! libzmq 4.3.5 with CURVE, for crate `zmq` 0.10: the released `zmq-sys` builds the same library without it.
//!
//! `bindings.rs` is bindgen's output for the `zmq.h` that crate `zeromq-src` carries, written once so that a build
//! needs no libclang:
//!
//! ```text
//! bindgen zmq.h --with-derive-default --allowlist-item '(zmq|ZMQ)_.*' --rust-target 1.88 --rust-edition 2024 \
//!     --raw-line '// budget: generated, one item per name in zmq.h'
//! ```

#[allow(
    missing_docs,
    non_camel_case_types,
    clippy::all,
    clippy::pedantic,
    reason = "generated from a C header; zmq.h documents it"
)]
mod bindings;
pub mod errno;

pub use bindings::*;

/// Socket option of libzmq's draft API, a bitmap of `ZMQ_NOTIFY_...`: a ROUTER gets an empty message of each peer
/// that has come or left. Only peers whose handshake was complete count.
pub const ZMQ_ROUTER_NOTIFY: u32 = 97;
/// Of peers that have left.
pub const ZMQ_NOTIFY_DISCONNECT: u32 = 2;
pub use std::os::unix::io::RawFd;

#[cfg(test)]
mod tests {
    use super::{zmq_curve_keypair, zmq_has, zmq_version};

    #[test]
    fn libzmq_is_the_version_that_the_bindings_were_made_for() {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: libzmq writes one int through each of the three pointers.
        unsafe { zmq_version(&raw mut major, &raw mut minor, &raw mut patch) };
        assert_eq!(
            (
                major.cast_unsigned(),
                minor.cast_unsigned(),
                patch.cast_unsigned()
            ),
            (
                super::ZMQ_VERSION_MAJOR,
                super::ZMQ_VERSION_MINOR,
                super::ZMQ_VERSION_PATCH
            )
        );
    }

    #[test]
    fn curve_and_ipc_are_built_in() {
        for capability in [c"curve", c"ipc"] {
            // SAFETY: the name is a C string that outlives the call.
            assert_eq!(unsafe { zmq_has(capability.as_ptr()) }, 1, "{capability:?}");
        }
    }

    #[test]
    fn two_key_pairs_differ() {
        let pair = || {
            let (mut public, mut secret) = ([0; 41], [0; 41]);
            // SAFETY: libzmq writes 40 characters and a zero into each buffer.
            assert_eq!(
                unsafe { zmq_curve_keypair(public.as_mut_ptr(), secret.as_mut_ptr()) },
                0
            );
            (public, secret)
        };
        assert_ne!(pair(), pair());
    }
}
