//! Broken inputs, made from those of the corpus.

use crate::random::Random;

/// Longest input that is made.
const MAX_BYTES: usize = 1 << 20;
/// Changes to one input at most.
const MAX_CHANGES: usize = 6;
/// A repeated range repeats up to 2^13 times: brackets in brackets, keys after keys.
const MAX_DOUBLINGS: usize = 14;

/// Words and lengths at which arithmetic goes wrong.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    u64::MAX >> 1,
    u64::MAX,
];

/// Numbers in text at which arithmetic goes wrong.
const NUMBERS: [&[u8]; 10] = [
    b"0",
    b"-1",
    b"2147483648",
    b"4294967296",
    b"9223372036854775808",
    b"18446744073709551616",
    b"1e308",
    b"1e999",
    b"-0.0",
    b"0.00000000000000000001",
];

/// Texts that break readers of texts.
const TEXTS: [&[u8]; 8] = [
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    "\u{feff}".as_bytes(),
    "\u{1f469}\u{200d}\u{1f680}".as_bytes(),
    b"\"",
    b"\r\n",
];

/// Spoils `input`: one to six changes. `words` are those of its format, `others` more inputs of the corpus.
pub fn mutate(input: &mut Vec<u8>, words: &[&[u8]], others: &[Vec<u8>], random: &mut Random) {
    for _ in 0..=random.below(MAX_CHANGES) {
        change(input, words, others, random);
        input.truncate(MAX_BYTES);
    }
}

fn change(input: &mut Vec<u8>, words: &[&[u8]], others: &[Vec<u8>], random: &mut Random) {
    let at = random.below(input.len() + 1);
    let end = input.len().min(at + 1 + random.below(32));
    match random.below(13) {
        0 | 1 => {
            if let Some(byte) = input.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        2 => input.truncate(at),
        3 => drop(input.drain(at..end)),
        4 => repeat(input, at, end, 1, random),
        5 => repeat(input, at, end, MAX_DOUBLINGS, random),
        6 | 7 if !words.is_empty() => put(input, at, at, random.one_of::<&[u8]>(words)),
        8 => {
            let width = *random.one_of(&[1, 2, 4, 8]);
            let edge = random.one_of(&EDGES).to_le_bytes();
            put(input, at, input.len().min(at + width), &edge[..width]);
        }
        9 => {
            let number = random.one_of(&NUMBERS);
            let (begin, end) = number_at(input, at);
            put(input, begin, end, number);
        }
        10 => {
            let other = random.one_of::<Vec<u8>>(others).as_slice();
            splice(input, at, other, random);
        }
        11 => put(input, at, end, random.one_of::<&[u8]>(&TEXTS)),
        _ => {
            let noise: Vec<u8> = (0..=random.below(8)).map(|_| random.byte()).collect();
            put(input, at, at, &noise);
        }
    }
}

fn put(input: &mut Vec<u8>, begin: usize, end: usize, bytes: &[u8]) {
    drop(input.splice(begin..end, bytes.iter().copied()));
}

fn repeat(
    input: &mut Vec<u8>,
    begin: usize,
    end: usize,
    max_doublings: usize,
    random: &mut Random,
) {
    let range = input[begin..end].to_vec();
    let times = (1 << random.below(max_doublings + 1)).min(MAX_BYTES / range.len().max(1));
    put(input, begin, begin, &range.repeat(times));
}

/// Goes on with another input from some place of it.
fn splice(input: &mut Vec<u8>, at: usize, other: &[u8], random: &mut Random) {
    let from = random.below(other.len() + 1);
    input.truncate(at);
    input.extend_from_slice(&other[from..]);
}

/// The digits around a place; nothing, if there are none.
fn number_at(input: &[u8], at: usize) -> (usize, usize) {
    let is_digit = |byte: &u8| byte.is_ascii_digit();
    let before = input[..at]
        .iter()
        .rev()
        .take_while(|it| is_digit(it))
        .count();
    let after = input[at..].iter().take_while(|it| is_digit(it)).count();
    (at - before, at + after)
}
