//! libzmq.
