//! The engine against ranks that speak the real protocol over real sockets.

mod failures;
mod flow;
mod model;
mod rig;
mod streams;
mod worker;
