//! A whole answer in one JSON body.

use super::choice::{Choice, Rules};
use super::envelope::{Api, Envelope, Usage};
use super::fields::{
    write_finish, write_logprobs, write_prompt_logprobs, write_prompt_token_ids, write_token_ids,
};
use super::json::write_str;

/// Appends the body; every choice has ended.
pub(super) fn write(
    rules: &Rules,
    envelope: &Envelope,
    choices: &mut [Choice],
    usage: Usage,
    out: &mut Vec<u8>,
) {
    envelope.begin_body(out);
    for (index, choice) in choices.iter_mut().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write_choice(rules, envelope, index, choice, out);
    }
    envelope.end_body(&about_prompt(rules, envelope.api, choices), usage, out);
}

fn write_choice(
    rules: &Rules,
    envelope: &Envelope,
    index: usize,
    choice: &mut Choice,
    out: &mut Vec<u8>,
) {
    envelope.begin_choice(index, out);
    match envelope.api {
        Api::Chat => {
            out.extend_from_slice(b"\"message\":{\"role\":\"assistant\",\"content\":");
            write_str(&choice.unsent.text, out);
            out.extend_from_slice(b",\"refusal\":null},");
        }
        Api::Completion => {
            out.extend_from_slice(b"\"text\":");
            write_str(&choice.unsent.text, out);
            out.push(b',');
        }
    }
    write_logprobs(rules, envelope.api, choice, out);
    out.push(b',');
    let reason = choice
        .ended
        .expect("a body is written when all choices ended");
    write_finish(rules, reason, choice.stopped_by, out);
    write_token_ids(rules, choice, out);
    if envelope.api == Api::Completion {
        write_prompt_token_ids(rules, choice, out);
        write_prompt_logprobs(rules, choice, out);
    }
    out.push(b'}');
}

/// A chat has one prompt, and what is told about it stands beside the choices.
fn about_prompt(rules: &Rules, api: Api, choices: &[Choice]) -> Vec<u8> {
    let mut fields = Vec::new();
    if let (Api::Chat, [choice, ..]) = (api, choices) {
        write_prompt_logprobs(rules, choice, &mut fields);
        write_prompt_token_ids(rules, choice, &mut fields);
    }
    fields
}
