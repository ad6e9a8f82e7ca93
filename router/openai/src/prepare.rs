//! A request on its way in: checked, rendered, tokenised.

use std::borrow::Cow;
use std::fmt::Display;
use std::num::NonZeroU32;
use std::sync::Arc;

use plait_core::{Request, TenantId, TokenId};
use plait_proto::SamplingParams;
use plait_text::{Chat, ModelText, PieceKind, RenderError, TextStart};

use crate::choice_state::{ChoiceState, ResponseContext};
use crate::error::{ApiError, RequestError};
use crate::limits::{self, Numbers};
use crate::logprobs_budget::LogprobsBudget;
use crate::request::{GenerateRequest, Input, Prompt, StopFields};
use crate::response_writer::ResponseWriter;

/// What OpenAI gives a completion that does not say.
const COMPLETION_TOKENS: u32 = 16;

/// A prompt in tokens.
type Tokens = Arc<[TokenId]>;

/// A request ready for the scheduler, and what will write its answer.
#[derive(Debug)]
pub struct Prepared {
    /// One for each choice of the answer, in order.
    pub choices: Vec<PreparedChoice>,
    /// Turns the choices' tokens into bytes.
    pub response: ResponseWriter,
    /// Log-probabilities of prompt tokens that the answer will hold.
    num_prompt_logprobs: usize,
}

impl Prepared {
    /// Takes the answer's share of `budget` until it is written; an error (429) if too much is under way.
    pub fn reserve(&mut self, budget: &LogprobsBudget) -> Result<(), ApiError> {
        if self.num_prompt_logprobs == 0 {
            return Ok(());
        }
        self.response.reservation = budget.reserve(self.num_prompt_logprobs);
        if self.response.reservation.is_some() {
            return Ok(());
        }
        Err(ApiError::overloaded(format!(
            "`prompt_logprobs` asks for {} log-probabilities, and the answers under way hold as many as may be held \
             at a time; try again later, or ask for fewer",
            self.num_prompt_logprobs
        )))
    }
}

/// One choice of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedChoice {
    /// For the scheduler.
    pub request: Request,
    /// For the worker.
    pub sampling: SamplingParams,
}

/// Checks, renders and tokenises a request; `random_seed` gives a seed to each choice without one.
///
/// Prompt and `max_tokens` must fit into `max_model_len`. Nothing is tokenised that is so long that it
/// cannot fit. Errors name the field, what was given, what is allowed and what to do.
pub fn prepare(
    model: &ModelText,
    request: &GenerateRequest,
    max_model_len: u32,
    random_seed: &mut impl FnMut() -> u64,
) -> Result<Prepared, RequestError> {
    let numbers = limits::check(request)?;
    let stop_ids = stop_ids(model, &request.end)?;
    let prompts = tokenise_prompts(model, &request.input, max_model_len)?;
    for (index, (prompt, _)) in prompts.iter().enumerate() {
        let param = prompt_param(&request.input, index);
        limits::check_length(&param, prompt.len(), &numbers, max_model_len)?;
    }
    let num_tokens = prompts.iter().map(|(prompt, _)| prompt.len()).sum();
    let num_prompt_logprobs = limits::check_prompt_logprobs(num_tokens, numbers.prompt_logprobs)?;
    let choices = prompts.iter().map(|(prompt, _)| PreparedChoice {
        request: Request {
            prompt: prompt.clone(),
            max_tokens: max_tokens(&request.input, &numbers),
            stop_ids: stop_ids.clone(),
            prompt_logprobs: numbers.prompt_logprobs.is_some(),
            priority: numbers.priority,
            tenant: TenantId(request.client.tenant),
            weight: request.client.weight.unwrap_or(NonZeroU32::MIN),
            salt: request.client.salt,
        },
        sampling: SamplingParams {
            seed: request
                .seed
                .map_or_else(&mut *random_seed, i64::cast_unsigned),
            logprobs: numbers.logprobs,
            prompt_logprobs: numbers.prompt_logprobs,
            ..request.sampling.or(model.generation_defaults())
        },
    });
    Ok(Prepared {
        choices: choices.collect(),
        response: response_writer(model, request, prompts),
        num_prompt_logprobs,
    })
}

fn response_writer(
    model: &ModelText,
    request: &GenerateRequest,
    prompts: Vec<(Tokens, TextStart)>,
) -> ResponseWriter {
    let context = ResponseContext {
        vocabulary: model.vocabulary().clone(),
        eos_token_ids: model.eos_token_ids().clone(),
        stops: request.end.stop.clone(),
        report: request.report,
    };
    let choices = prompts
        .into_iter()
        .map(|(prompt, start)| ChoiceState::new(&context, prompt, model.output_text(start)))
        .collect();
    ResponseWriter::new(request, context, choices)
}

fn tokenise_prompts(
    model: &ModelText,
    input: &Input,
    max_model_len: u32,
) -> Result<Vec<(Tokens, TextStart)>, RequestError> {
    match input {
        Input::Chat {
            messages,
            chat_template_kwargs,
            add_generation_prompt,
        } => {
            let chat = Chat {
                messages,
                kwargs: chat_template_kwargs,
                add_generation_prompt: *add_generation_prompt,
            };
            let prompt = tokenise_chat(model, chat, max_model_len)?;
            Ok(vec![(prompt, TextStart::Fresh)])
        }
        Input::Completion { prompts } => {
            let prompts = prompts.iter().enumerate().map(|(index, prompt)| {
                let param = prompt_param(input, index);
                tokenise_completion(model, &param, prompt, max_model_len)
            });
            prompts.collect()
        }
    }
}

/// The name of a prompt in errors: with its index where there are several.
fn prompt_param(input: &Input, index: usize) -> Cow<'static, str> {
    match input {
        Input::Chat { .. } => "messages".into(),
        Input::Completion { prompts } if prompts.len() == 1 => "prompt".into(),
        Input::Completion { .. } => format!("prompt[{index}]").into(),
    }
}

fn tokenise_chat(
    model: &ModelText,
    chat: Chat<'_>,
    max_model_len: u32,
) -> Result<Tokens, RequestError> {
    let max_bytes = model.max_prompt_bytes(max_model_len);
    let text = model
        .render(chat, max_bytes)
        .map_err(|error| render_error(error, max_bytes, max_model_len))?;
    // The template writes the beginning-of-text token itself.
    tokenise(model, "messages", &text, false, max_model_len)
}

fn tokenise_completion(
    model: &ModelText,
    param: &str,
    prompt: &Prompt,
    max_model_len: u32,
) -> Result<(Tokens, TextStart), RequestError> {
    let tokens: Tokens = match prompt {
        Prompt::Text(text) => {
            let max_bytes = model.max_prompt_bytes(max_model_len);
            if text.len() > max_bytes {
                return Err(limits::too_many_bytes(param, max_bytes, max_model_len));
            }
            tokenise(model, param, text, true, max_model_len)?
        }
        Prompt::Tokens(ids) => check_ids(model, param, ids)?,
    };
    let is_shown = |&id: &TokenId| model.vocabulary().piece(id).kind != PieceKind::Hidden;
    let start = if tokens.iter().any(is_shown) {
        TextStart::Continued
    } else {
        TextStart::Fresh
    };
    Ok((tokens, start))
}

fn tokenise(
    model: &ModelText,
    param: &str,
    text: &str,
    add_special_tokens: bool,
    max_model_len: u32,
) -> Result<Tokens, RequestError> {
    let tokens = model
        .encode(text, add_special_tokens, max_model_len as usize)
        .map_err(|error| limits::encode_error(param, error, max_model_len))?;
    // A tokenizer may know tokens that the model's tables have no row for.
    check_ids(model, param, &tokens)
}

/// The ids as the model's tables have them.
fn check_ids<Id: Copy + Display>(
    model: &ModelText,
    param: &str,
    ids: &[Id],
) -> Result<Tokens, RequestError>
where
    TokenId: TryFrom<Id>,
{
    let vocab_size = model.vocab_size();
    let checked = ids.iter().map(|&id| {
        let known = TokenId::try_from(id).ok().filter(|&it| it < vocab_size);
        known.ok_or(id)
    });
    checked.collect::<Result<_, _>>().map_err(|id| {
        let last = vocab_size - 1;
        let message = format!(
            "`{param}` has the token id {id}, where 0 to {last} are allowed; send ids of this model's tokenizer"
        );
        RequestError::invalid(param.to_owned(), message)
    })
}

fn stop_ids(model: &ModelText, end: &StopFields) -> Result<Tokens, RequestError> {
    let own: &[TokenId] = match end.ignore_eos {
        true => &[],
        false => model.eos_token_ids(),
    };
    let asked = check_ids(model, "stop_token_ids", &end.stop_token_ids)?;
    let others = asked.iter().filter(|id| !own.contains(id));
    Ok(own.iter().chain(others).copied().collect())
}

fn max_tokens(input: &Input, numbers: &Numbers) -> u32 {
    let default = match input {
        // The scheduler caps it by what the context has left.
        Input::Chat { .. } => u32::MAX,
        Input::Completion { .. } => COMPLETION_TOKENS,
    };
    numbers.max_tokens.unwrap_or(default)
}

fn render_error(error: RenderError, max_bytes: usize, max_model_len: u32) -> RequestError {
    match error {
        RenderError::NoTemplate => {
            let problem = "this model has no chat template; use /v1/completions";
            RequestError::new("messages", "no_chat_template", problem)
        }
        RenderError::TooLong => limits::too_many_bytes("messages", max_bytes, max_model_len),
        RenderError::Failed(sentence) => {
            let problem =
                format!("the chat template rejects these messages: {sentence}; send others");
            RequestError::new("messages", "chat_template_error", problem)
        }
    }
}
