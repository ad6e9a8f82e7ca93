//! The fields of a choice that chunks and whole bodies share.

use plait_core::FinishReason;

use super::choice::{Choice, Rules, StoppedBy};
use super::envelope::Api;
use super::json::{write_ids, write_str, write_u64};
use super::logprobs;

/// Appends `"logprobs":...` of what was not sent yet.
pub(super) fn write_logprobs(rules: &Rules, api: Api, choice: &mut Choice, out: &mut Vec<u8>) {
    out.extend_from_slice(b"\"logprobs\":");
    let scored = &choice.unsent.scored;
    match api {
        _ if scored.is_empty() => out.extend_from_slice(b"null"),
        Api::Chat => logprobs::write_chat(&rules.vocabulary, scored, out),
        Api::Completion => {
            let num_chars = &mut choice.num_scored_chars;
            logprobs::write_completion(&rules.vocabulary, scored, num_chars, out);
        }
    }
}

/// Appends `"finish_reason":...,"stop_reason":...`.
pub(super) fn write_finish(
    rules: &Rules,
    reason: FinishReason,
    stopped_by: Option<StoppedBy>,
    out: &mut Vec<u8>,
) {
    let word = match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort => "abort",
    };
    out.extend_from_slice(b"\"finish_reason\":");
    write_str(word, out);
    out.extend_from_slice(b",\"stop_reason\":");
    match stopped_by {
        None => out.extend_from_slice(b"null"),
        Some(StoppedBy::Text(index)) => write_str(&rules.stops[index], out),
        Some(StoppedBy::Token(token)) => write_u64(token.into(), out),
    }
}

/// Appends `,"token_ids":[...]` of what was not sent yet, where they were asked for.
pub(super) fn write_token_ids(rules: &Rules, choice: &Choice, out: &mut Vec<u8>) {
    if rules.report.return_token_ids {
        out.extend_from_slice(b",\"token_ids\":");
        write_ids(&choice.unsent.token_ids, out);
    }
}

/// Appends `,"prompt_token_ids":[...]`, where ids were asked for.
pub(super) fn write_prompt_token_ids(rules: &Rules, choice: &Choice, out: &mut Vec<u8>) {
    if rules.report.return_token_ids {
        out.extend_from_slice(b",\"prompt_token_ids\":");
        write_ids(&choice.prompt, out);
    }
}

/// Appends `,"prompt_logprobs":[...]`, where they were asked for.
pub(super) fn write_prompt_logprobs(rules: &Rules, choice: &Choice, out: &mut Vec<u8>) {
    if rules.report.prompt_logprobs.is_some() {
        out.extend_from_slice(b",\"prompt_logprobs\":");
        let scores = &choice.prompt_scores;
        logprobs::write_prompt(&rules.vocabulary, &choice.prompt, scores, out);
    }
}
