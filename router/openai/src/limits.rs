//! The limits of a request. Each is checked here and nowhere else.
//!
//! Python checks types, and what the engine never sees: the key, the body's size and depth, `user` and
//! `cache_salt`. Sampling ranges are in `plait-text`, as a generation_config.json has them too.

use std::fmt::Display;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;

use plait_text::{EncodeError, Message, OutOfRange, RESERVED_NAMES};

use crate::error::RequestError;
use crate::prepare::Pooled;
use crate::request::{
    EmbeddingFields, GenerateRequest, Input, LogitFields, MaxTokensField, StopFields,
};
use crate::tools;

const MESSAGES: RangeInclusive<usize> = 1..=4096;
const DOCUMENTS: RangeInclusive<usize> = 0..=256;
const PROMPTS: RangeInclusive<usize> = 1..=128;
/// Of each prompt.
const CHOICES: RangeInclusive<u32> = 1..=128;
/// Of all prompts of a call together.
const MAX_CHOICES: usize = 256;
/// Prompts of a call for embeddings.
const EMBEDDED: RangeInclusive<usize> = 1..=2048;
const DIMENSIONS: RangeInclusive<u32> = 1..=1 << 20;
const TEMPLATE_ARGUMENTS: RangeInclusive<usize> = 0..=32;
const STOP_STRINGS: RangeInclusive<usize> = 0..=16;
const STOP_BYTES: RangeInclusive<usize> = 1..=256;
const STOP_IDS: RangeInclusive<usize> = 0..=64;
const BEST_TOKENS: RangeInclusive<u32> = 0..=20;
const SCORED_IDS: RangeInclusive<usize> = 0..=128;
/// Of a chat.
const MAX_TOKENS: RangeInclusive<u32> = 1..=0x7fff_ffff;
/// Of a completion; with 0 its prompt is computed and nothing else.
const COMPLETION_MAX_TOKENS: RangeInclusive<u32> = 0..=0x7fff_ffff;
const MIN_TOKENS: RangeInclusive<u32> = 0..=0x7fff_ffff;
const THOUGHT_TOKENS: RangeInclusive<u32> = 0..=0x7fff_ffff;
const BIASES: RangeInclusive<usize> = 0..=1024;
const BIAS: RangeInclusive<f64> = -100.0..=100.0;
const ALLOWED_IDS: RangeInclusive<usize> = 1..=4096;
const BAD_WORDS: RangeInclusive<usize> = 0..=256;
const BAD_WORD_BYTES: RangeInclusive<usize> = 1..=256;
/// The worker looks back at so many tokens.
pub(crate) const MAX_BAD_WORD_TOKENS: usize = 16;
const TRUNCATED_TOKENS: RangeInclusive<i32> = 1..=i32::MAX;
/// A prompt that is truncated may have so many contexts' worth of tokens before.
pub(crate) const MAX_TRUNCATED: usize = 4;
const PRIORITIES: RangeInclusive<i32> = i32::MIN..=i32::MAX;
/// Text of one call of `/detokenize`. A token may stand for hundreds of bytes.
pub(crate) const MAX_DETOKENISED_BYTES: usize = 8 << 20;
/// Log-probabilities of prompt tokens in one answer: each takes about 100 bytes of its JSON.
const MAX_PROMPT_LOGPROBS: usize = 1 << 19;
/// Bytes of prompts, as text and as ids, in the choices of one answer: more would hold up the thread that writes all
/// answers.
const MAX_REPEATED_BYTES: usize = 1 << 24;

/// A request's numbers in range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    /// Answers to each prompt.
    pub(crate) num_choices: NonZeroU32,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) max_tokens_field: MaxTokensField,
    pub(crate) min_tokens: u32,
    pub(crate) logprobs: Option<u32>,
    pub(crate) prompt_logprobs: Option<u32>,
    /// Tokens of a prompt that are kept, where not all are.
    pub(crate) truncation: Option<Truncation>,
    pub(crate) priority: i32,
}

/// Tokens of a prompt that are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Truncation {
    /// So many.
    To(usize),
    /// As many as the context has room for.
    ToContext,
}

impl Numbers {
    /// Best tokens that come with each prompt token, for `prompt_logprobs` and for the log-probabilities of an echo,
    /// and the field that asks for most of them.
    pub(crate) fn of_prompts(&self, input: &Input) -> (&'static str, Option<u32>) {
        let echoed = self.logprobs.filter(|_| input.is_echoed());
        match echoed > self.prompt_logprobs {
            true => ("logprobs", echoed),
            false => ("prompt_logprobs", self.prompt_logprobs),
        }
    }
}

/// Checks all that needs no model; the first limit that is broken is the error.
pub(crate) fn check(request: &GenerateRequest) -> Result<Numbers, RequestError> {
    match (&request.input, request.report.embedding) {
        (Input::Completion { prompts, .. }, Some(_)) => check_prompts(prompts.len(), EMBEDDED)?,
        (input, _) => check_input(input)?,
    }
    request.sampling.check().map_err(out_of_range)?;
    check_stops(&request.end)?;
    let numbers = check_numbers(request)?;
    if request.stream && numbers.prompt_logprobs.is_some() {
        let message =
            "`prompt_logprobs` is not available in a stream; send `stream`: false, or leave it out";
        return Err(RequestError::invalid("prompt_logprobs", message));
    }
    if request.stream && request.input.is_echoed() && numbers.logprobs.is_some() {
        let message = "`echo` with `logprobs` is not available in a stream; send `stream`: false, or leave one out";
        return Err(RequestError::invalid("echo", message));
    }
    Ok(numbers)
}

/// What is to be answered or counted.
pub(crate) fn check_input(input: &Input) -> Result<(), RequestError> {
    match input {
        Input::Chat {
            messages,
            chat_template_kwargs,
            continue_final_message,
            tools: fields,
            documents,
            ..
        } => {
            check_count(
                "documents",
                documents.len(),
                "documents",
                DOCUMENTS,
                SEND_FEWER,
            )?;
            let advice = Advice {
                too_few: "send at least one",
                too_many: "send the latest ones",
            };
            check_count("messages", messages.len(), "messages", MESSAGES, advice)?;
            let (param, num) = ("chat_template_kwargs", chat_template_kwargs.len());
            check_count(param, num, "names", TEMPLATE_ARGUMENTS, SEND_FEWER)?;
            let mut names = chat_template_kwargs.keys();
            match names.find(|name| RESERVED_NAMES.contains(&name.as_str())) {
                Some(name) => return Err(reserved_name_error(name)),
                None if *continue_final_message => check_continued(messages.last())?,
                None => {}
            }
            tools::check(fields, messages)
        }
        Input::Completion { prompts, .. } => check_prompts(prompts.len(), PROMPTS),
    }
}

fn check_prompts(num: usize, allowed: RangeInclusive<usize>) -> Result<(), RequestError> {
    let advice = Advice {
        too_few: "send a text or token ids",
        too_many: "send the others in further requests",
    };
    check_count("prompt", num, "prompts", allowed, advice)
}

fn check_continued(last: Option<&Message>) -> Result<(), RequestError> {
    let role = last.and_then(|message| message.get("role")?.as_str());
    match role {
        Some("assistant") => Ok(()),
        role => {
            let message = format!(
                "`continue_final_message` is true, and the last message is the {}'s, where only the assistant's can be \
                 continued; end with one of these, or leave the field out",
                role.unwrap_or("unknown role")
            );
            Err(RequestError::invalid("continue_final_message", message))
        }
    }
}

fn reserved_name_error(name: &str) -> RequestError {
    let param = format!("chat_template_kwargs.{name}");
    let problem = "is a name that the server gives to the template; leave it out";
    let message = format!("`{param}` {problem}");
    RequestError::invalid(param, message)
}

fn check_stops(end: &StopFields) -> Result<(), RequestError> {
    check_count(
        "stop",
        end.stop.len(),
        "stop strings",
        STOP_STRINGS,
        SEND_FEWER,
    )?;
    for stop in &end.stop {
        let advice = Advice {
            too_few: "leave the empty one out",
            too_many: "send a shorter one",
        };
        check_count(
            "stop",
            stop.len(),
            "bytes in a stop string",
            STOP_BYTES,
            advice,
        )?;
    }
    let num_ids = end.stop_token_ids.len();
    check_count("stop_token_ids", num_ids, "ids", STOP_IDS, SEND_FEWER)
}

fn check_numbers(request: &GenerateRequest) -> Result<Numbers, RequestError> {
    let (end, report) = (&request.end, request.report);
    let (logprobs, max_tokens) = match request.input {
        Input::Chat { .. } => ("top_logprobs", MAX_TOKENS),
        Input::Completion { .. } => ("logprobs", COMPLETION_MAX_TOKENS),
    };
    Ok(Numbers {
        num_choices: num_choices(request)?,
        max_tokens: in_range(end.max_tokens_field.name(), end.max_tokens, max_tokens)?,
        max_tokens_field: end.max_tokens_field,
        min_tokens: in_range("min_tokens", end.min_tokens, MIN_TOKENS)?.unwrap_or(0),
        logprobs: in_range(logprobs, report.logprobs, BEST_TOKENS)?,
        prompt_logprobs: in_range("prompt_logprobs", report.prompt_logprobs, BEST_TOKENS)?,
        truncation: truncation(request.prompt.truncate_prompt_tokens)?,
        priority: in_range("priority", Some(request.client.priority), PRIORITIES)?
            .unwrap_or_default(),
    })
}

fn num_choices(request: &GenerateRequest) -> Result<NonZeroU32, RequestError> {
    let num = in_range("n", request.choices.n, CHOICES)?.and_then(NonZeroU32::new);
    let num = num.unwrap_or(NonZeroU32::MIN);
    let num_prompts = match &request.input {
        Input::Chat { .. } => 1,
        Input::Completion { prompts, .. } => prompts.len(),
    };
    if request.report.embedding.is_some() {
        return Ok(NonZeroU32::MIN);
    }
    let in_all = num_prompts * num.get() as usize;
    if in_all <= MAX_CHOICES {
        return Ok(num);
    }
    let message = format!(
        "`n` is {num} with {num_prompts} prompts, which makes {in_all} choices, where {MAX_CHOICES} are allowed in one \
         call; lower it, or send the others in further requests"
    );
    Err(RequestError::invalid("n", message))
}

/// How prompts are pooled, if they are.
pub(crate) fn check_embedding(
    asked: Option<EmbeddingFields>,
) -> Result<Option<Pooled>, RequestError> {
    let Some(asked) = asked else {
        return Ok(None);
    };
    let dimensions = in_range("dimensions", asked.dimensions, DIMENSIONS)?;
    let pooling = asked.pooling;
    Ok(Some(Pooled {
        pooling,
        dimensions,
    }))
}

fn truncation(given: Option<i64>) -> Result<Option<Truncation>, RequestError> {
    if given == Some(-1) {
        return Ok(Some(Truncation::ToContext));
    }
    let param = "truncate_prompt_tokens";
    match given.map(i32::try_from) {
        None => Ok(None),
        Some(Ok(num)) if TRUNCATED_TOKENS.contains(&num) => {
            Ok(Some(Truncation::To(num.unsigned_abs() as usize)))
        }
        Some(_) => {
            let allowed = format!("-1 or 1 to {}", TRUNCATED_TOKENS.end());
            Err(not_allowed(param, given.unwrap_or_default(), &allowed))
        }
    }
}

/// Tokens that a thought may have.
pub(crate) fn check_thinking_token_budget(given: Option<i64>) -> Result<Option<u32>, RequestError> {
    in_range("thinking_token_budget", given, THOUGHT_TOKENS)
}

/// The answer's least and most tokens; `max_tokens` is what holds without the request's own.
pub(crate) fn check_min_tokens(numbers: &Numbers, max_tokens: u32) -> Result<(), RequestError> {
    if numbers.min_tokens <= max_tokens {
        return Ok(());
    }
    let field = numbers.max_tokens_field.name();
    let message = format!(
        "`min_tokens` is {}, where `{field}` is {max_tokens}; lower it, or raise `{field}`",
        numbers.min_tokens
    );
    Err(RequestError::invalid("min_tokens", message))
}

/// What needs no model of the changes of logits.
pub(crate) fn check_logits(fields: &LogitFields) -> Result<(), RequestError> {
    check_count(
        "logit_bias",
        fields.logit_bias.len(),
        "tokens",
        BIASES,
        SEND_FEWER,
    )?;
    let mut biases = fields.logit_bias.values();
    if let Some(bias) = biases.find(|bias| !BIAS.contains(bias)) {
        return Err(not_allowed("logit_bias", bias, "-100 to 100 for a token"));
    }
    if let Some(allowed) = &fields.allowed_token_ids {
        let advice = Advice {
            too_few: "allow some, or leave it out",
            too_many: "send fewer",
        };
        check_count(
            "allowed_token_ids",
            allowed.len(),
            "ids",
            ALLOWED_IDS,
            advice,
        )?;
    }
    check_count(
        "logprob_token_ids",
        fields.logprob_token_ids.len(),
        "ids",
        SCORED_IDS,
        SEND_FEWER,
    )?;
    check_count(
        "bad_words",
        fields.bad_words.len(),
        "words",
        BAD_WORDS,
        SEND_FEWER,
    )?;
    for word in &fields.bad_words {
        let advice = Advice {
            too_few: "leave words of spaces out",
            too_many: "send a shorter one",
        };
        let num_bytes = word.trim_start().len();
        check_count(
            "bad_words",
            num_bytes,
            "bytes in a word",
            BAD_WORD_BYTES,
            advice,
        )?;
    }
    Ok(())
}

/// A name of `logit_bias` that is no number.
pub(crate) fn not_a_token_id(param: &'static str, name: &str) -> RequestError {
    let shown: String = name.chars().take(64).collect();
    let message =
        format!("`{param}` has the name {shown:?}, where token ids are allowed; send ids as names");
    RequestError::invalid(param, message)
}

/// A bad word of no tokens or of too many.
pub(crate) fn bad_word_error(param: &str, word: &str) -> RequestError {
    let message = format!(
        "`{param}` is {word:?}, where words of 1 to {MAX_BAD_WORD_TOKENS} tokens are allowed; send a shorter one"
    );
    RequestError::invalid(param.to_owned(), message)
}

/// What the answer says of all prompts' tokens, each `num_times`, if it fits; `param` asks for it.
pub(crate) fn check_prompt_logprobs(
    num_tokens: usize,
    num_times: usize,
    (param, num_top): (&'static str, Option<u32>),
) -> Result<usize, RequestError> {
    let Some(num_top) = num_top else {
        return Ok(0);
    };
    let given = num_tokens.saturating_mul(num_times * (1 + num_top as usize));
    if given <= MAX_PROMPT_LOGPROBS {
        return Ok(given);
    }
    let in_choices = match num_times {
        1 => String::new(),
        _ => format!(" in each of {num_times} choices"),
    };
    let message = format!(
        "`{param}` is {num_top}: with {num_tokens} prompt tokens{in_choices} that makes {given} log-probabilities in \
         one answer, where {MAX_PROMPT_LOGPROBS} are allowed; ask for fewer, or send the prompts one by one"
    );
    Err(RequestError::invalid(param, message))
}

/// Bytes that each choice repeats of its prompt; `num_bytes` of all prompts.
pub(crate) fn check_repeated(num_bytes: usize, numbers: &Numbers) -> Result<(), RequestError> {
    let num_choices = numbers.num_choices.get();
    let in_all = num_bytes.saturating_mul(num_choices as usize);
    if num_choices == 1 || in_all <= MAX_REPEATED_BYTES {
        return Ok(());
    }
    let message = format!(
        "`n` is {num_choices}, and each choice repeats its prompt, which makes {in_all} bytes in one answer, where \
         {MAX_REPEATED_BYTES} are allowed; lower it, or leave `echo` and `return_token_ids` out"
    );
    Err(RequestError::invalid("n", message))
}

/// A prompt needs room for one token after it, or for `max_tokens` if the request gives them.
pub(crate) fn check_length(
    param: &str,
    num_prompt: usize,
    numbers: &Numbers,
    max_model_len: u32,
) -> Result<(), RequestError> {
    if num_prompt == 0 {
        let problem = format!("`{param}` has no tokens; send at least one, or leave it out");
        return Err(RequestError::invalid(param.to_owned(), problem));
    }
    let num_output = numbers.max_tokens.unwrap_or(1) as usize;
    if num_prompt.saturating_add(num_output) <= max_model_len as usize {
        return Ok(());
    }
    let field = numbers.max_tokens_field.name();
    let (param, problem) = match numbers.max_tokens {
        Some(_) if num_prompt < max_model_len as usize => {
            let problem = format!(
                "`{param}` has {num_prompt} tokens and `{field}` is {num_output}, but the context \
                 holds {max_model_len} in all; ask for at most {} or shorten the prompt",
                max_model_len as usize - num_prompt
            );
            (field, problem)
        }
        _ => {
            let problem = format!(
                "`{param}` has {num_prompt} tokens, the context holds {max_model_len}, and at least \
                 one is for the answer; shorten the prompt"
            );
            (param, problem)
        }
    };
    Err(RequestError::new(
        param.to_owned(),
        "context_length_exceeded",
        problem,
    ))
}

/// A text that cannot fit into the context whatever its tokens are.
pub(crate) fn too_many_bytes(param: &str, max_bytes: usize, max_model_len: u32) -> RequestError {
    let problem = format!(
        "`{param}` has more than {max_bytes} bytes, so it cannot fit into a context of \
         {max_model_len} tokens; shorten it"
    );
    RequestError::new(param.to_owned(), "context_length_exceeded", problem)
}

/// A text that the tokenizer does not take.
pub(crate) fn encode_error(
    param: &str,
    error: EncodeError,
    max_model_len: u32,
    is_truncated: bool,
) -> RequestError {
    let (code, problem) = match error {
        EncodeError::TooMany if is_truncated => (
            "context_length_exceeded",
            format!(
                "`{param}` has more than {MAX_TRUNCATED} times the {max_model_len} tokens that the context holds, too \
                 many to truncate; shorten it"
            ),
        ),
        EncodeError::TooMany => (
            "context_length_exceeded",
            format!(
                "`{param}` has more tokens than the {max_model_len} that the context holds, and at least one is for \
                 the answer; shorten the prompt"
            ),
        ),
        EncodeError::Run { max_bytes } => (
            "invalid_value",
            format!(
                "`{param}` has a run of more than {max_bytes} bytes without a space or another break for the \
                 tokenizer; break it up, or send token ids"
            ),
        ),
        EncodeError::Failed(problem) => (
            "invalid_value",
            format!("`{param}` cannot be tokenised: {problem}; send another text"),
        ),
    };
    RequestError::new(param.to_owned(), code, problem)
}

/// What to do about each end of a range.
#[derive(Clone, Copy)]
struct Advice {
    too_few: &'static str,
    too_many: &'static str,
}

/// Of ranges that begin at 0.
const SEND_FEWER: Advice = Advice {
    too_few: "send more",
    too_many: "send fewer",
};

fn check_count(
    param: &'static str,
    given: usize,
    what: &str,
    allowed: RangeInclusive<usize>,
    advice: Advice,
) -> Result<(), RequestError> {
    if allowed.contains(&given) {
        return Ok(());
    }
    let (least, most) = allowed.into_inner();
    let advice = match given < least {
        true => advice.too_few,
        false => advice.too_many,
    };
    let message =
        format!("`{param}` has {given} {what}, where {least} to {most} are allowed; {advice}");
    Err(RequestError::invalid(param, message))
}

/// A number that is given, if it is in range.
fn in_range<T: Copy + PartialOrd + Display + TryFrom<i64>>(
    param: &'static str,
    given: Option<i64>,
    allowed: RangeInclusive<T>,
) -> Result<Option<T>, RequestError> {
    let Some(given) = given else { return Ok(None) };
    match T::try_from(given) {
        Ok(number) if allowed.contains(&number) => Ok(Some(number)),
        _ => {
            let (least, most) = allowed.into_inner();
            Err(not_allowed(param, given, &format!("{least} to {most}")))
        }
    }
}

fn out_of_range(error: OutOfRange) -> RequestError {
    not_allowed(error.field, error.given, error.allowed)
}

fn not_allowed(param: &'static str, given: impl Display, allowed: &str) -> RequestError {
    let message =
        format!("`{param}` is {given}, where {allowed} is allowed; send that or leave it out");
    RequestError::invalid(param, message)
}
