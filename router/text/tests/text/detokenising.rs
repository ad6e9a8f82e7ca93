//! What is streamed is what decoding everything at once gives.

use proptest::prelude::*;
use serde_json::Value;
use tokenizers::Tokenizer;

use plait_text::{ModelText, Parsed, Parsing, TextStart, TextStyle};

use crate::model_folder::{Folder, byte_fallback, byte_level};

fn decoded(tokenizer: &Value, ids: &[u32]) -> String {
    let tokenizer = Tokenizer::from_bytes(tokenizer.to_string()).unwrap();
    tokenizer.decode(ids, true).unwrap()
}

/// What each token shows, and what the end shows.
fn streamed(model: &ModelText, ids: &[u32]) -> Vec<String> {
    let mut output = model.output_text(TextStyle::plain(TextStart::Fresh), Parsing::default());
    let mut shown = Vec::new();
    for id in ids {
        let mut piece = String::new();
        let mut emit = |parsed: Parsed<'_>| piece.push_str(text_of(parsed));
        assert_eq!(output.push(model.vocabulary(), &[], *id, &mut emit), None);
        shown.push(piece);
    }
    let mut rest = String::new();
    let mut emit = |parsed: Parsed<'_>| rest.push_str(text_of(parsed));
    assert_eq!(output.finish(model.vocabulary(), &[], &mut emit), None);
    shown.push(rest);
    shown
}

fn text_of(parsed: Parsed<'_>) -> &str {
    match parsed {
        Parsed::Text(text) => text,
        other => panic!("{other:?} without a parser"),
    }
}

fn assert_streams_what_decoding_gives(tokenizer: &Value, ids: &[u32]) {
    let model = Folder::new(tokenizer).load();
    let shown = streamed(&model, ids).concat();
    assert_eq!(shown, decoded(tokenizer, ids), "{ids:?}");
}

/// Ids of UTF-8's first and last bytes among others, with specials and ids that do not exist.
fn ids(num_tokens: u32, num_model: u32) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![8 => 0..num_tokens, 1 => 0..num_model], 0..40)
}

/// Texts whose bytes come one a token.
fn bytes_of_texts(first: u32) -> impl Strategy<Value = Vec<u32>> {
    let text = prop::collection::vec(any::<char>(), 0..12);
    text.prop_map(move |letters| {
        let text: String = letters.into_iter().collect();
        text.bytes().map(|byte| first + u32::from(byte)).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn byte_level_tokens_stream_as_they_decode(ids in ids(261, 300)) {
        assert_streams_what_decoding_gives(&byte_level(), &ids);
    }

    #[test]
    fn byte_fallback_tokens_stream_as_they_decode(ids in ids(268, 300)) {
        assert_streams_what_decoding_gives(&byte_fallback(), &ids);
    }

    #[test]
    fn characters_in_byte_tokens_stream_as_they_decode(
        mut ids in bytes_of_texts(3),
        cut in 0..48_usize,
    ) {
        ids.truncate(cut);
        assert_streams_what_decoding_gives(&byte_fallback(), &ids);
    }
}

fn id(tokenizer: &Value, token: &str) -> u32 {
    let id = tokenizer["model"]["vocab"][token].as_u64().unwrap();
    u32::try_from(id).unwrap()
}

#[test]
fn a_character_is_never_split() {
    let tokenizer = byte_level();
    let model = Folder::new(&tokenizer).load();
    let ids = ["ð", "Ł", "ĺ", "Ģ", "a"].map(|letter| id(&tokenizer, letter));
    let shown = streamed(&model, &ids);
    assert_eq!(shown, ["", "", "", "\u{1f600}", "a", ""]);
}

#[test]
fn an_answer_that_ends_within_a_character_ends_with_the_replacement_character() {
    let tokenizer = byte_level();
    let model = Folder::new(&tokenizer).load();
    let ids = ["h", "ð", "Ł"].map(|letter| id(&tokenizer, letter));
    assert_eq!(streamed(&model, &ids).concat(), "h\u{fffd}");
}
