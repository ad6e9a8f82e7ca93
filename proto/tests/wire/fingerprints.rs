//! Fingerprints are the first half of SHA-256.

use plait_proto::{config_fingerprint, schema_fingerprint};

#[test]
fn a_fingerprint_is_the_start_of_sha_256() {
    let expected = [
        0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d, 0xae, 0x22,
        0x23,
    ];
    assert_eq!(config_fingerprint(b"abc"), expected);
}

#[test]
fn the_schema_is_the_file_that_python_reads() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/plait_proto/schema.txt");
    assert_eq!(
        schema_fingerprint(),
        config_fingerprint(&std::fs::read(path).unwrap())
    );
}
