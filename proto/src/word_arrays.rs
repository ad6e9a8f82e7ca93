//! Arrays of little-endian 4-byte words.

/// Replaces the contents of `frame` by `words`.
pub fn fill(frame: &mut Vec<u8>, words: &[u32]) {
    fill_records(frame, words, |&word| [word]);
}

/// `words` as a frame of their own.
pub fn frame(words: &[u32]) -> Vec<u8> {
    let mut frame = Vec::new();
    fill(&mut frame, words);
    frame
}

/// Replaces the contents of `frame` by `records` of `N` words each.
pub fn fill_records<T, const N: usize>(
    frame: &mut Vec<u8>,
    records: &[T],
    words_of: impl Fn(&T) -> [u32; N],
) {
    frame.clear();
    push_records(frame, records, words_of);
}

/// Appends `records` of `N` words each to `frame`.
pub fn push_records<T, const N: usize>(
    frame: &mut Vec<u8>,
    records: &[T],
    words_of: impl Fn(&T) -> [u32; N],
) {
    let start = frame.len();
    frame.resize(start + records.len() * N * 4, 0);
    for (bytes, record) in frame[start..].chunks_exact_mut(N * 4).zip(records) {
        for (byte, word) in bytes
            .as_chunks_mut::<4>()
            .0
            .iter_mut()
            .zip(words_of(record))
        {
            *byte = word.to_le_bytes();
        }
    }
}

/// The words of a frame whose size is a whole number of them.
pub fn read(frame: &[u8]) -> Vec<u32> {
    let (words, _) = frame.as_chunks::<4>();
    words
        .iter()
        .map(|bytes| u32::from_le_bytes(*bytes))
        .collect()
}
