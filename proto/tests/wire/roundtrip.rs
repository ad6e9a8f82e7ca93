//! Every message comes back from its frames as it went in.

use plait_proto::{decode, encode};
use proptest::prelude::*;

use crate::arbitrary;

proptest! {
    #[test]
    fn a_message_survives_its_frames(message in arbitrary::message()) {
        let frames = encode(&message);
        prop_assert_eq!(decode(&frames), Ok(message));
    }
}
