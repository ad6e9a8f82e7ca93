//! Receives a message's frames.

use plait_proto::{Frames, MAX_FRAMES};

/// A message's first frame, if one has come; never blocks.
pub fn next_frame(socket: &zmq::Socket) -> Option<Vec<u8>> {
    socket.recv_bytes(zmq::DONTWAIT).ok()
}

/// The frames after the first. One frame beyond the cap is kept, so that decoding rejects the message.
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
