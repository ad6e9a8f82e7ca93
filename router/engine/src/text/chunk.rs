//! Server-sent events: what a choice has to say since the last one.

use plait_core::FinishReason;

use super::choice::{Choice, Rules};
use super::envelope::{Api, Envelope};
use super::fields::{write_finish, write_logprobs, write_prompt_token_ids, write_token_ids};
use super::json::write_str;

/// Appends a chunk with the choice's news, if there are any; in chat the role comes first.
pub(super) fn write_news(
    rules: &Rules,
    envelope: &Envelope,
    index: usize,
    choice: &mut Choice,
    out: &mut Vec<u8>,
) {
    if !choice.spoke && envelope.api == Api::Chat {
        write_role(rules, envelope, index, choice, out);
    }
    if !choice.unsent.is_empty() {
        write_text(rules, envelope, index, choice, out);
        choice.unsent.clear();
    }
}

/// Appends the chunk that says why the choice ended.
pub(super) fn write_end(
    rules: &Rules,
    envelope: &Envelope,
    index: usize,
    choice: &mut Choice,
    reason: FinishReason,
    out: &mut Vec<u8>,
) {
    envelope.begin_chunk(index, out);
    out.extend_from_slice(match envelope.api {
        Api::Chat => b"\"delta\":{},\"logprobs\":null,",
        Api::Completion => b"\"text\":\"\",\"logprobs\":null,",
    });
    write_finish(rules, reason, choice.stopped_by, out);
    write_ids(rules, choice, out);
    envelope.end_chunk(&[], out);
}

fn write_role(
    rules: &Rules,
    envelope: &Envelope,
    index: usize,
    choice: &mut Choice,
    out: &mut Vec<u8>,
) {
    envelope.begin_chunk(index, out);
    out.extend_from_slice(b"\"delta\":{\"role\":\"assistant\",\"content\":\"\"},");
    out.extend_from_slice(b"\"logprobs\":null,\"finish_reason\":null");
    let mut prompt_ids = Vec::new();
    write_prompt_token_ids(rules, choice, &mut prompt_ids);
    envelope.end_chunk(&prompt_ids, out);
    choice.spoke = true;
}

fn write_text(
    rules: &Rules,
    envelope: &Envelope,
    index: usize,
    choice: &mut Choice,
    out: &mut Vec<u8>,
) {
    envelope.begin_chunk(index, out);
    match envelope.api {
        Api::Chat => {
            out.extend_from_slice(b"\"delta\":{\"content\":");
            write_str(&choice.unsent.text, out);
            out.extend_from_slice(b"},");
        }
        Api::Completion => {
            out.extend_from_slice(b"\"text\":");
            write_str(&choice.unsent.text, out);
            out.push(b',');
        }
    }
    write_logprobs(rules, envelope.api, choice, out);
    out.extend_from_slice(b",\"finish_reason\":null");
    write_ids(rules, choice, out);
    envelope.end_chunk(&[], out);
}

/// The chunk's token ids; those of the prompt too in the choice's first chunk (in chat that is the
/// role's, and they stand beside the choices).
fn write_ids(rules: &Rules, choice: &mut Choice, out: &mut Vec<u8>) {
    if !choice.spoke {
        write_prompt_token_ids(rules, choice, out);
    }
    write_token_ids(rules, choice, out);
    choice.spoke = true;
}
