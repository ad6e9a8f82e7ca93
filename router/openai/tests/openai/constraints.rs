//! Requests that constrain their answers.

use plait_grammar::CompileError;
use plait_openai::GenerateRequest;
use serde_json::{Value, json};

use crate::model_folder::{Folder, byte_level};
use crate::support::{chat, completion, constrained, prepare};

fn asked(constraint: &Value, changes: &Value) -> GenerateRequest {
    let mut fields = changes.clone();
    fields["constraint"] = constraint.clone();
    completion(&fields)
}

fn regex(text: &str) -> Value {
    json!({"param": "structured_outputs.regex", "constraint": "regex", "text": text})
}

fn rejection(request: &GenerateRequest) -> (String, &'static str, String) {
    let model = Folder::new(&byte_level()).load();
    let error = constrained(&model, request).unwrap_err();
    assert_eq!(error.status, 400);
    let param = error.param.unwrap().into_owned();
    (param, error.code.unwrap(), error.message)
}

#[test]
fn every_choice_of_a_constrained_request_has_its_grammar_and_others_have_none() {
    let model = Folder::new(&byte_level()).load();
    let prepared = constrained(
        &model,
        &asked(&regex("a+"), &json!({"prompts": ["hi", "ho"], "n": 2})),
    );
    let prepared = prepared.unwrap();
    assert_eq!(prepared.prompts.len(), 2);
    for prompt in &prepared.prompts {
        assert!(prompt.request.is_masked && prompt.choices.len() == 2);
        assert!(prompt.choices.iter().all(|choice| choice.grammar.is_some()));
    }
    let free = prepare(&model, &chat(&json!({}))).unwrap();
    let free = &free.prompts[0];
    assert!(free.choices[0].grammar.is_none() && !free.request.is_masked);
}

#[test]
fn a_grammar_is_made_of_the_models_own_tokens() {
    let model = Folder::new(&byte_level()).load();
    let prepared = constrained(&model, &asked(&regex("he*"), &json!({}))).unwrap();
    let grammar = prepared.prompts[0].choices[0].grammar.as_ref().unwrap();
    let mut mask = vec![0; grammar.num_mask_words()];
    grammar.matcher().allowed(&mut mask).unwrap();
    for token in 0..model.vocab_size() {
        let piece = model.vocabulary().piece(token);
        let text = std::str::from_utf8(piece.bytes).unwrap_or_default();
        let begins = text.starts_with('h') && text[1..].bytes().all(|it| it == b'e');
        let is_text = piece.kind != plait_text::PieceKind::Hidden;
        let is_allowed = mask[token as usize / 32] >> (token % 32) & 1 == 1;
        assert_eq!(is_allowed, begins && is_text, "{token} {text:?}");
    }
}

#[test]
fn a_constraint_of_an_answer_without_tokens_is_checked_and_masks_nothing() {
    let model = Folder::new(&byte_level()).load();
    let empty = |text| asked(&regex(text), &json!({"max_tokens": 0, "echo": true}));
    let prompt = constrained(&model, &empty("a+")).unwrap().prompts.remove(0);
    assert!(!prompt.request.is_masked && prompt.choices[0].grammar.is_none());
    assert!(constrained(&model, &empty("(a")).is_err());
}

#[test]
fn a_server_without_a_thread_to_compile_asks_the_client_to_come_again() {
    let model = Folder::new(&byte_level()).load();
    let prepared = prepare(&model, &asked(&regex("a"), &json!({}))).unwrap();
    let error = prepared.constraint.unwrap().refusal(&CompileError::Busy);
    assert_eq!((error.status, error.retry_after_seconds), (429, Some(2)));
}

#[test]
fn a_refusal_names_the_clients_field_and_says_what_to_do() {
    for (constraint, code, said) in [
        (
            regex(&"a".repeat(9000)),
            "constraint_too_large",
            "9000 bytes, where at most 8192",
        ),
        (regex("(a"), "invalid_value", "unclosed group"),
        (regex("(?=a)"), "unsupported_value", "look-around"),
    ] {
        let (param, given, message) = rejection(&asked(&constraint, &json!({})));
        assert_eq!(
            (&param[..], given),
            ("structured_outputs.regex", code),
            "{message}"
        );
        assert!(
            message.starts_with("`structured_outputs.regex` "),
            "{message}"
        );
        assert!(message.contains(said) && message.contains(';'), "{message}");
    }
}

#[test]
fn what_closes_tokens_on_its_own_does_not_go_with_a_constraint() {
    for (field, value) in [
        ("min_tokens", json!(1)),
        ("allowed_token_ids", json!([1])),
        ("bad_words", json!(["a"])),
    ] {
        let (param, _, message) = rejection(&asked(&regex("a"), &json!({(field): value})));
        assert_eq!(param, field);
        assert!(message.contains("leave one out"), "{message}");
    }
}
