//! Options of sockets between machines, which the `zmq` crate lacks or which go together.

/// Seconds after which TCP keepalive probes an idle connection.
const KEEPALIVE_IDLE: i32 = 1;
/// Seconds from probe to probe.
const KEEPALIVE_INTERVAL: i32 = 1;
/// Unanswered probes after which the connection is closed.
const KEEPALIVE_PROBES: i32 = 1;
/// Time for which sent bytes may stay unacknowledged (`TCP_USER_TIMEOUT`); the system's default is a quarter of an hour.
const UNACKNOWLEDGED_MILLIS: i32 = 2000;

/// Has the kernel close a connection 2 s after the other machine has gone silent: kernels acknowledge, however busy the
/// processes are. libzmq's own heartbeats abort the process if a queue is full (its issues 3937 and 4767). The Python
/// side has the same numbers (`plait_proto.silent_links`).
pub fn close_half_open(socket: &mut zmq::Socket) -> Result<(), zmq::Error> {
    socket.set_tcp_keepalive(1)?;
    socket.set_tcp_keepalive_idle(KEEPALIVE_IDLE)?;
    socket.set_tcp_keepalive_intvl(KEEPALIVE_INTERVAL)?;
    socket.set_tcp_keepalive_cnt(KEEPALIVE_PROBES)?;
    set(socket, zmq_sys::ZMQ_TCP_MAXRT, UNACKNOWLEDGED_MILLIS)
}

/// Has libzmq put the end of each connection into a ROUTER's queue; see [`is_left`].
pub fn report_disconnects(socket: &mut zmq::Socket) -> Result<(), zmq::Error> {
    let events = i32::try_from(zmq_sys::ZMQ_NOTIFY_DISCONNECT).expect("a small bitmap");
    set(socket, zmq_sys::ZMQ_ROUTER_NOTIFY, events)
}

/// What libzmq puts into the queue of a connection that was closed: one empty frame. Only a connection whose
/// handshake was complete gets one.
pub fn is_left(frames: &[Vec<u8>]) -> bool {
    matches!(frames, [only] if only.is_empty())
}

fn set(socket: &mut zmq::Socket, option: u32, value: i32) -> Result<(), zmq::Error> {
    let option = i32::try_from(option).expect("a small number");
    // SAFETY: the socket is open, and the option's value is a C int of the given size.
    let status = unsafe {
        zmq_sys::zmq_setsockopt(
            socket.as_mut_ptr(),
            option,
            (&raw const value).cast(),
            size_of_val(&value),
        )
    };
    if status == 0 {
        Ok(())
    } else {
        Err(zmq::Error::EINVAL)
    }
}
