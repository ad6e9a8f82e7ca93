//! Fingerprints of the schema and of a configuration: peers must have the same.

use std::sync::LazyLock;

use sha2::{Digest, Sha256};

/// The first 16 bytes of a SHA-256.
pub type Fingerprint = [u8; 16];

const SCHEMA: &str = include_str!("../plait_proto/schema.txt");

static SCHEMA_FINGERPRINT: LazyLock<Fingerprint> = LazyLock::new(|| fingerprint(SCHEMA.as_bytes()));

/// Of `proto/plait_proto/schema.txt`, which lists every message with its fields.
pub fn schema_fingerprint() -> Fingerprint {
    *SCHEMA_FINGERPRINT
}

/// Of a worker's configuration file.
pub fn config_fingerprint(config: &[u8]) -> Fingerprint {
    fingerprint(config)
}

fn fingerprint(bytes: &[u8]) -> Fingerprint {
    let digest: [u8; 32] = Sha256::digest(bytes).into();
    *digest.first_chunk().expect("32 bytes hold 16")
}
