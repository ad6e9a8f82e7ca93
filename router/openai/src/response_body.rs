//! A whole answer in one JSON body.

use std::borrow::Cow;

use plait_core::TokenId;
use serde::Serialize;

use crate::choice_state::{ChoiceState, FinishWord, ResponseContext, StopReason};
use crate::choices::{Choices, PromptScores};
use crate::json::append;
use crate::logprobs::{ChatLogprobs, CompletionLogprobs, PromptLogprobs};
use crate::response_head::{Api, Head, Usage};

/// A whole answer, or a stream's last chunk, which has no choices.
#[derive(Debug, Serialize)]
struct Body<'a, Choice> {
    #[serde(flatten)]
    head: &'a Head,
    choices: Vec<Choice>,
    usage: Usage,
    /// A chat has one prompt, whose fields are the body's; a completion's are its choices'.
    #[serde(flatten)]
    prompt: PromptFields<'a>,
}

#[derive(Debug, Default, Serialize)]
struct PromptFields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
}

/// A whole choice in chat.
#[derive(Debug, Serialize)]
struct ChatChoice<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: FinishWord,
    stop_reason: StopReason<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [TokenId]>,
}

#[derive(Debug, Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: (),
}

/// A whole choice in completions.
#[derive(Debug, Serialize)]
struct CompletionChoice<'a> {
    index: usize,
    text: Cow<'a, str>,
    logprobs: Option<CompletionLogprobs<'a>>,
    finish_reason: FinishWord,
    stop_reason: StopReason<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs<'a>>,
}

/// Appends the body; every choice has ended.
pub(crate) fn write(
    context: &ResponseContext,
    api: Api,
    head: &Head,
    choices: &Choices,
    usage: Usage,
    out: &mut Vec<u8>,
) {
    match api {
        Api::Chat => {
            let prompt = choices.iter().next().map(|(choice, scores)| PromptFields {
                prompt_logprobs: prompt_logprobs(context, choice, scores),
                prompt_token_ids: choice.prompt_token_ids(context),
            });
            let body = Body {
                head,
                choices: (0..)
                    .zip(choices.iter())
                    .map(|(index, (choice, _))| chat_choice(context, index, choice))
                    .collect(),
                usage,
                prompt: prompt.unwrap_or_default(),
            };
            append(&body, out);
        }
        Api::Completion => {
            let body = Body {
                head,
                choices: (0..)
                    .zip(choices.iter())
                    .map(|(index, (choice, scores))| {
                        completion_choice(context, index, choice, scores)
                    })
                    .collect(),
                usage,
                prompt: PromptFields::default(),
            };
            append(&body, out);
        }
    }
}

/// Appends the JSON of a stream's last chunk.
pub(crate) fn write_usage(head: &Head, usage: Usage, out: &mut Vec<u8>) {
    let chunk: Body<'_, ()> = Body {
        head,
        choices: Vec::new(),
        usage,
        prompt: PromptFields::default(),
    };
    append(&chunk, out);
}

fn chat_choice<'a>(
    context: &'a ResponseContext,
    index: usize,
    choice: &'a ChoiceState,
) -> ChatChoice<'a> {
    ChatChoice {
        index,
        message: Message {
            role: "assistant",
            content: &choice.unsent.text,
            refusal: (),
        },
        logprobs: ChatLogprobs::of(context.names(), &choice.unsent.scored),
        finish_reason: finish_word(choice),
        stop_reason: choice.stop_reason(context),
        token_ids: choice.token_ids(context),
    }
}

fn completion_choice<'a>(
    context: &'a ResponseContext,
    index: usize,
    choice: &'a ChoiceState,
    scores: &'a PromptScores,
) -> CompletionChoice<'a> {
    CompletionChoice {
        index,
        text: match &choice.echo {
            None => choice.unsent.text.as_str().into(),
            Some(echo) => format!("{echo}{}", choice.unsent.text).into(),
        },
        logprobs: completion_logprobs(context, choice, scores),
        finish_reason: finish_word(choice),
        stop_reason: choice.stop_reason(context),
        token_ids: choice.token_ids(context),
        prompt_token_ids: choice.prompt_token_ids(context),
        prompt_logprobs: prompt_logprobs(context, choice, scores),
    }
}

fn completion_logprobs<'a>(
    context: &'a ResponseContext,
    choice: &'a ChoiceState,
    scores: &'a PromptScores,
) -> Option<CompletionLogprobs<'a>> {
    let scored = &choice.unsent.scored;
    let Some(num_best) = context.num_echoed() else {
        return CompletionLogprobs::of(context.names(), scored, &mut 0);
    };
    let scores = scores.iter().map(Option::as_ref);
    let prompt = choice.prompt.iter().copied().zip(scores);
    Some(CompletionLogprobs::echoed(
        context.names(),
        prompt,
        num_best,
        scored,
    ))
}

fn finish_word(choice: &ChoiceState) -> FinishWord {
    let reason = choice.ended;
    reason
        .expect("a body is written when all choices ended")
        .into()
}

fn prompt_logprobs<'a>(
    context: &'a ResponseContext,
    choice: &'a ChoiceState,
    scores: &'a PromptScores,
) -> Option<PromptLogprobs<'a>> {
    let num_best = usize::try_from(context.report.prompt_logprobs?).ok()?;
    Some(PromptLogprobs {
        num_best,
        vocabulary: &context.vocabulary,
        prompt: &choice.prompt,
        scores,
    })
}
