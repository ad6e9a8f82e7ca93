//! A message's frames off a socket.

use plait_proto::{Frames, MAX_FRAMES};

/// A message's first frame, if one has come; never blocks.
pub fn next_frame(socket: &zmq::Socket) -> Option<Vec<u8>> {
    socket.recv_bytes(zmq::DONTWAIT).ok()
}

/// The frames behind the first; of what is over the cap one frame is kept, so that decoding says so.
pub fn rest_of_message(socket: &zmq::Socket) -> Frames {
    let mut frames = Frames::new();
    while socket.get_rcvmore().unwrap_or(false) {
        let Some(frame) = next_frame(socket) else {
            break;
        };
        if frames.len() <= MAX_FRAMES {
            frames.push(frame);
        }
    }
    frames
}
