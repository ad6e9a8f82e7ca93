//! The golden files, read.

use std::fs;
use std::path::Path;

use plait_proto::Frames;
use serde_json::Value;

pub struct Golden {
    pub name: String,
    pub description: Value,
    pub frames: Frames,
}

pub fn all() -> Vec<Golden> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let entries = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut bins: Vec<_> = entries
        .filter(|path| path.extension().unwrap() == "bin")
        .collect();
    bins.sort();
    bins.iter().map(|bin| read(bin)).collect()
}

fn read(bin: &Path) -> Golden {
    let json = fs::read_to_string(bin.with_extension("json")).unwrap();
    Golden {
        name: bin.file_stem().unwrap().to_string_lossy().into_owned(),
        description: serde_json::from_str(&json).unwrap(),
        frames: split(&fs::read(bin).unwrap()),
    }
}

fn split(mut bytes: &[u8]) -> Frames {
    let mut frames = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let (frame, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
        frames.push(frame.to_vec());
        bytes = rest;
    }
    assert!(bytes.is_empty(), "a length needs four bytes");
    frames
}
