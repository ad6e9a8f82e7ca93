//! Writes `golden/NAME.bin` for every `golden/NAME.json`: `cargo run -p plait-proto --example golden`.

use std::error::Error;
use std::fs;
use std::path::Path;

use plait_proto::{Frames, encode};

fn main() -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("golden"))? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            let message = serde_json::from_str(&fs::read_to_string(&path)?)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            fs::write(path.with_extension("bin"), joined(&encode(&message))?)?;
        }
    }
    Ok(())
}

/// Each frame after its length.
fn joined(frames: &Frames) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut bytes = Vec::new();
    for frame in frames {
        bytes.extend(u32::try_from(frame.len())?.to_le_bytes());
        bytes.extend(frame);
    }
    Ok(bytes)
}
