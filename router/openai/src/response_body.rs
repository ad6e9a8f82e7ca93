//! A whole answer in one JSON body.

use std::borrow::Cow;

use plait_core::TokenId;
use serde::Serialize;

use crate::answer_parts::Unsent;
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
    /// null in a message of nothing but calls.
    content: Option<&'a str>,
    refusal: (),
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    /// vLLM's newer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<ToolCall<'a>>>,
    /// The older name of a message's only call.
    #[serde(skip_serializing_if = "Option::is_none")]
    function_call: Option<Function<'a>>,
}

#[derive(Debug, Serialize)]
struct ToolCall<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function<'a>,
}

#[derive(Debug, Serialize)]
struct Function<'a> {
    name: &'a str,
    arguments: &'a str,
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
        message: message(context, &choice.unsent),
        logprobs: ChatLogprobs::of(context.names(), &choice.unsent.scored),
        finish_reason: finish_word(context, choice),
        stop_reason: choice.stop_reason(context),
        token_ids: choice.token_ids(context),
    }
}

fn message<'a>(context: &ResponseContext, parts: &'a Unsent) -> Message<'a> {
    let thought = Some(parts.thought.as_str()).filter(|thought| !thought.is_empty());
    let calls = parts.calls.iter().filter_map(|call| {
        let head = call.head.as_ref()?;
        let (name, arguments) = (&head.name, &call.arguments);
        Some((head.id.as_str(), Function { name, arguments }))
    });
    let mut message = Message {
        role: "assistant",
        content: Some(parts.text.as_str())
            .filter(|text| !text.is_empty() || parts.calls.is_empty()),
        refusal: (),
        reasoning_content: thought,
        reasoning: thought,
        tool_calls: None,
        function_call: None,
    };
    if context.calls.are_functions {
        message.function_call = calls.map(|(_, function)| function).next();
    } else if !parts.calls.is_empty() {
        let calls = calls.map(|(id, function)| ToolCall {
            id,
            kind: "function",
            function,
        });
        message.tool_calls = Some(calls.collect());
    }
    message
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
        finish_reason: finish_word(context, choice),
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

fn finish_word(context: &ResponseContext, choice: &ChoiceState) -> FinishWord {
    let word = choice.finish_word(context);
    word.expect("a body is written when all choices ended")
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
