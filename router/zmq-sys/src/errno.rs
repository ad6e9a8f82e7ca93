//! The error numbers of libzmq, as crate `zmq` expects them: the system's where it has one.

pub use libc::{
    EACCES, EADDRINUSE, EADDRNOTAVAIL, EAGAIN, EBUSY, ECONNREFUSED, EFAULT, EHOSTUNREACH,
    EINPROGRESS, EINTR, EINVAL, EMFILE, EMSGSIZE, ENAMETOOLONG, ENETDOWN, ENOBUFS, ENODEV, ENOENT,
    ENOMEM, ENOTCONN, ENOTSOCK, ENOTSUP, EPROTO, EPROTONOSUPPORT,
};

use crate::bindings::ZMQ_HAUSNUMERO;

const NATIVE: i32 = ZMQ_HAUSNUMERO.cast_signed();

/// The socket is not in a state for this operation.
pub const EFSM: i32 = NATIVE + 51;
/// The transport is not compatible with the socket type.
pub const ENOCOMPATPROTO: i32 = NATIVE + 52;
/// The context was terminated.
pub const ETERM: i32 = NATIVE + 53;
/// No I/O thread is there for the task.
pub const EMTHREAD: i32 = NATIVE + 54;

/// `ENOTSUP` on a platform that has no such number.
pub const ENOTSUP_ALT: i32 = NATIVE + 1;
/// `EPROTONOSUPPORT` on a platform that has no such number.
pub const EPROTONOSUPPORT_ALT: i32 = NATIVE + 2;
/// `ENOBUFS` on a platform that has no such number.
pub const ENOBUFS_ALT: i32 = NATIVE + 3;
/// `ENETDOWN` on a platform that has no such number.
pub const ENETDOWN_ALT: i32 = NATIVE + 4;
/// `EADDRINUSE` on a platform that has no such number.
pub const EADDRINUSE_ALT: i32 = NATIVE + 5;
/// `EADDRNOTAVAIL` on a platform that has no such number.
pub const EADDRNOTAVAIL_ALT: i32 = NATIVE + 6;
/// `ECONNREFUSED` on a platform that has no such number.
pub const ECONNREFUSED_ALT: i32 = NATIVE + 7;
/// `EINPROGRESS` on a platform that has no such number.
pub const EINPROGRESS_ALT: i32 = NATIVE + 8;
/// `ENOTSOCK` on a platform that has no such number.
pub const ENOTSOCK_ALT: i32 = NATIVE + 9;
/// `EMSGSIZE` on a platform that has no such number.
pub const EMSGSIZE_ALT: i32 = NATIVE + 10;
