//! A request on its way in: checked, rendered, tokenised.

use std::borrow::Cow;
use std::fmt::Display;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use plait_core::{Request, TenantId, TokenId};
use plait_grammar::Grammar;
use plait_proto::{Adjustment, SamplingParams};
use plait_text::{
    Chat, Message, ModelText, Parsing, PieceKind, ReasoningFormat, RenderError, TextStart,
    TextStyle, ToolFormat, Tools,
};

use crate::adjust;
use crate::answer_parts::{self, CallRules};
use crate::choice_seed::choice_seed;
use crate::choice_state::{ChoiceState, ResponseContext};
use crate::choices::Choices;
use crate::constraint::{AnswerForm, AskedConstraint};
use crate::error::{ApiError, RequestError};
use crate::limits::{self, MAX_TRUNCATED, Numbers, Truncation};
use crate::logprobs_budget::LogprobsBudget;
use crate::request::{GenerateRequest, Input, Prompt, PromptFields, StopFields, TruncationSide};
use crate::response_writer::ResponseWriter;
use crate::tools::{self, ThoughtPlace, ToolMode};

/// What OpenAI gives a completion that does not say.
const COMPLETION_TOKENS: u32 = 16;

/// A family's way of calling, and the tools that may be called.
type FoundCalls = Option<(&'static ToolFormat, Arc<Tools>)>;

/// In an answer's JSON, with its comma, at most for the vocabularies that there are.
const BYTES_OF_ID: usize = 8;

/// A prompt in tokens.
type Tokens = Arc<[TokenId]>;

/// A prompt in tokens, and how its answer begins.
struct Tokenised {
    tokens: Tokens,
    start: TextStart,
    /// The prompt's text, if the answer repeats it.
    echo: Option<Arc<str>>,
    thought: ThoughtPlace,
}

/// A request ready for the scheduler, and what will write its answer.
#[derive(Debug)]
pub struct Prepared {
    /// The prompts in order. Choice i of prompt p is the answer's choice p x n + i.
    pub prompts: Vec<PreparedPrompt>,
    /// Turns the choices' tokens into bytes.
    pub response: ResponseWriter,
    /// What the answers must be; [`Prepared::constrain`] takes its grammar.
    pub constraint: Option<AskedConstraint>,
    /// Log-probabilities of prompt tokens that the answer will hold.
    num_prompt_logprobs: usize,
}

impl Prepared {
    /// Every choice follows the compiled constraint; those of a request that samples nothing have nothing to follow.
    pub fn constrain(&mut self, grammar: &Grammar) {
        let thought = self.constraint.take().and_then(|asked| asked.thought);
        let grammar = thought.map_or_else(|| grammar.clone(), |end| grammar.behind_thought(end));
        let masked = self.prompts.iter_mut().filter(|it| it.request.is_masked);
        for choice in masked.flat_map(|prompt| &mut prompt.choices) {
            choice.grammar = Some(grammar.clone());
        }
    }

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
            "the request asks for {} log-probabilities of its prompts, and the answers under way hold as many as may be \
             held at a time; try again later, or ask for fewer",
            self.num_prompt_logprobs
        )))
    }
}

/// A prompt and the answers to it.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedPrompt {
    /// For the scheduler.
    pub request: Request,
    /// As many as the request has, in order.
    pub choices: Vec<PreparedChoice>,
}

/// One choice of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedChoice {
    /// For the worker.
    pub sampling: SamplingParams,
    /// For the worker: what it changes about the logits, if anything.
    pub adjustment: Option<Arc<Adjustment>>,
    /// For the worker: tokens whose log-probabilities come besides the best ones'.
    pub scored_ids: Arc<[TokenId]>,
    /// What its answer must be, if anything.
    pub grammar: Option<Grammar>,
}

/// Checks, renders and tokenises a request; `random_seed` gives one to each choice of a request without.
///
/// Prompt and `max_tokens` must fit into `max_model_len`. Nothing is tokenised that is so long that it
/// cannot fit, and no constraint is compiled: that may take longest. Errors name the field, what was given, what is allowed and what to do.
pub fn prepare(
    model: &ModelText,
    request: &GenerateRequest,
    max_model_len: u32,
    random_seed: &mut impl FnMut() -> u64,
) -> Result<Prepared, RequestError> {
    let numbers = limits::check(request)?;
    let calls = calls_of(model, &request.input)?;
    let stop_ids = stop_ids(model, &request.end)?;
    limits::check_min_tokens(&numbers, max_tokens(&request.input, &numbers))?;
    let adjustment = adjust::adjustment(model, request, &numbers, &stop_ids)?;
    let scored_ids = scored_ids(model, request, &numbers)?;
    let num_scored = u32::try_from(scored_ids.len()).unwrap_or(u32::MAX);
    let encoder = PromptEncoder::new(model, request, &numbers, max_model_len);
    let prompts = encoder.tokenise(&request.input)?;
    for (index, prompt) in prompts.iter().enumerate() {
        let param = prompt_param(&request.input, index);
        limits::check_length(&param, prompt.tokens.len(), &numbers, max_model_len)?;
    }
    let num_tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let of_prompts = numbers.of_prompts(&request.input);
    let num_times = times_told(&request.input, &numbers);
    let num_prompt_logprobs = limits::check_prompt_logprobs(num_tokens, num_times, of_prompts)?;
    limits::check_repeated(num_repeated_bytes(request, &prompts), &numbers)?;
    let (_, prompt_logprobs) = of_prompts;
    let constraint = asked_constraint(model, request, calls.as_ref(), &prompts)?;
    let is_masked = constraint.is_some() && max_tokens(&request.input, &numbers) > 0;
    let prepared = prompts.iter().map(|prompt| {
        let adjustment = adjustment
            .as_ref()
            .map(|asked| adjust::of_prompt(asked, &prompt.tokens));
        let defaults = model.generation_defaults();
        let choices = (0..numbers.num_choices.get()).map(|choice| PreparedChoice {
            sampling: SamplingParams {
                seed: request.choices.seed.map_or_else(&mut *random_seed, |seed| {
                    choice_seed(seed.cast_unsigned(), choice)
                }),
                logprobs: numbers.logprobs.map(|num| num + num_scored),
                // The first choice's rows compute the prompt.
                prompt_logprobs: prompt_logprobs.filter(|_| choice == 0),
                ..request.sampling.or(defaults)
            },
            adjustment: adjustment.clone(),
            scored_ids: scored_ids.clone(),
            grammar: None,
        });
        PreparedPrompt {
            choices: choices.collect(),
            request: Request {
                prompt: prompt.tokens.clone(),
                max_tokens: max_tokens(&request.input, &numbers),
                stop_ids: stop_ids.clone(),
                num_choices: numbers.num_choices,
                prompt_logprobs: prompt_logprobs.is_some(),
                is_masked,
                num_slot_words: adjustment.as_ref().map_or(0, |it| num_words(it)),
                priority: numbers.priority,
                tenant: TenantId(request.client.tenant),
                weight: request.client.weight.unwrap_or(NonZeroU32::MIN),
                salt: request.client.salt,
            },
        }
    });
    Ok(Prepared {
        prompts: prepared.collect(),
        response: response_writer(model, request, &prompts, (&numbers, calls)),
        constraint,
        num_prompt_logprobs,
    })
}

/// How often the answer tells of each prompt's log-probabilities: a chat once, a completion in each choice.
fn times_told(input: &Input, numbers: &Numbers) -> usize {
    match input {
        Input::Chat { .. } => 1,
        Input::Completion { .. } => numbers.num_choices.get() as usize,
    }
}

/// Bytes of the prompts that each choice tells: their texts, and their ids, which a whole chat tells once.
fn num_repeated_bytes(request: &GenerateRequest, prompts: &[Tokenised]) -> usize {
    let has_ids = request.stream || matches!(request.input, Input::Completion { .. });
    let bytes_of_id = match request.report.return_token_ids && has_ids {
        true => BYTES_OF_ID,
        false => 0,
    };
    let each = prompts.iter().map(|prompt| {
        prompt.echo.as_ref().map_or(0, |text| text.len()) + prompt.tokens.len() * bytes_of_id
    });
    each.sum()
}

fn num_words(adjustment: &Adjustment) -> u32 {
    u32::try_from(adjustment.num_words()).unwrap_or(u32::MAX)
}

/// How the answer's calls are found, if it may have some.
fn calls_of(model: &ModelText, input: &Input) -> Result<FoundCalls, RequestError> {
    match input {
        Input::Chat { tools, .. } => tools.parsed_as(model.formats()),
        Input::Completion { .. } => Ok(None),
    }
}

/// What the answer must be, if anything.
fn asked_constraint(
    model: &ModelText,
    request: &GenerateRequest,
    calls: Option<&(&'static ToolFormat, Arc<Tools>)>,
    prompts: &[Tokenised],
) -> Result<Option<AskedConstraint>, RequestError> {
    let form = AnswerForm {
        calls: calls.map(|(format, tools)| (*format, &**tools)),
        reasoning: reasoning_of(model, &request.input),
        thought: thought_of(&request.input, prompts),
        thinking_token_budget: thinking_token_budget(model, request)?,
    };
    AskedConstraint::of_request(request, &form)
}

/// How thoughts are found in the answer, if they are.
fn reasoning_of(model: &ModelText, input: &Input) -> Option<&'static ReasoningFormat> {
    let is_chat = matches!(input, Input::Chat { .. });
    model.formats().reasoning.filter(|_| is_chat)
}

/// A model that is told not to think begins no thought before what it is held to.
fn thought_of(input: &Input, prompts: &[Tokenised]) -> ThoughtPlace {
    let is_off =
        matches!(input, Input::Chat { reasoning_effort: Some(effort), .. } if effort == "none");
    match prompts
        .first()
        .map_or(ThoughtPlace::Nowhere, |it| it.thought)
    {
        ThoughtPlace::First if is_off => ThoughtPlace::Nowhere,
        place => place,
    }
}

fn thinking_token_budget(
    model: &ModelText,
    request: &GenerateRequest,
) -> Result<Option<u32>, RequestError> {
    let budget = limits::check_thinking_token_budget(request.logits.thinking_token_budget)?;
    if budget.is_some() && model.formats().reasoning.is_none() {
        let message = "`thinking_token_budget` is given, and this model's chat template shows no thoughts; leave it out, or \
                       start the server with --reasoning-parser";
        return Err(RequestError::new(
            "thinking_token_budget",
            "unsupported_value",
            message,
        ));
    }
    Ok(budget)
}

fn call_rules(request: &GenerateRequest, calls: &FoundCalls) -> CallRules {
    match (&request.input, calls) {
        (Input::Chat { tools, .. }, Some((format, _))) => CallRules {
            is_single: tools.end_after_one(),
            is_named: tools.tool_choice.mode == ToolMode::Named,
            are_functions: tools.are_functions,
            ids: Some(format.ids),
            id_seed: answer_parts::id_seed(&request.id),
        },
        _ => CallRules::default(),
    }
}

fn response_writer(
    model: &ModelText,
    request: &GenerateRequest,
    prompts: &[Tokenised],
    (numbers, calls): (&Numbers, FoundCalls),
) -> ResponseWriter {
    let reasoning = reasoning_of(model, &request.input);
    let context = ResponseContext {
        vocabulary: model.vocabulary().clone(),
        eos_token_ids: model.eos_token_ids().clone(),
        stops: request.end.stop.clone(),
        echo: request.input.is_echoed(),
        min_tokens: numbers.min_tokens,
        report: request.report,
        calls: call_rules(request, &calls),
        finds_thoughts: reasoning.is_some(),
    };
    let outputs = prompts.iter().flat_map(|prompt| {
        let style = TextStyle {
            start: prompt.start,
            skips_special: request.report.skip_special_tokens,
            shows_stop: request.report.include_stop_str_in_output,
        };
        let parsing = Parsing {
            reasoning,
            starts_in_thought: prompt.thought == ThoughtPlace::Open,
            tools: calls.clone(),
        };
        (0..numbers.num_choices.get())
            .map(move |_| (prompt, model.output_text(style, parsing.clone())))
    });
    let choices = outputs.enumerate().map(|(index, (prompt, output))| {
        let (tokens, echo) = (&prompt.tokens, &prompt.echo);
        ChoiceState::new(tokens.clone(), echo.clone(), (index, output))
    });
    let choices = Choices::new(&context, choices.collect(), numbers.num_choices);
    ResponseWriter::new(request, context, choices)
}

/// Renders and tokenises the prompts of one request.
struct PromptEncoder<'a> {
    model: &'a ModelText,
    fields: PromptFields,
    /// Tokens that are kept of each prompt.
    num_kept: Option<usize>,
    max_model_len: u32,
}

impl<'a> PromptEncoder<'a> {
    fn new(
        model: &'a ModelText,
        request: &GenerateRequest,
        numbers: &Numbers,
        max_model_len: u32,
    ) -> Self {
        let num_output = numbers.max_tokens.unwrap_or(1);
        let room = max_model_len.saturating_sub(num_output) as usize;
        let num_kept = numbers.truncation.map(|truncation| match truncation {
            Truncation::To(num) => num,
            // Without room the prompt's length is refused, which says what is too much.
            Truncation::ToContext => room.max(1),
        });
        Self {
            model,
            fields: request.prompt,
            num_kept,
            max_model_len,
        }
    }

    fn tokenise(&self, input: &Input) -> Result<Vec<Tokenised>, RequestError> {
        match input {
            Input::Chat {
                messages,
                chat_template_kwargs,
                add_generation_prompt,
                continue_final_message,
                reasoning_effort,
                documents,
                tools,
            } => {
                let prompt = self.tokenise_chat(Chat {
                    messages,
                    tools: &tools.offered(),
                    documents,
                    kwargs: chat_template_kwargs,
                    add_generation_prompt: *add_generation_prompt,
                    continue_final_message: *continue_final_message,
                    reasoning_effort: reasoning_effort.as_deref(),
                });
                Ok(vec![prompt?])
            }
            Input::Completion { prompts, echo } => {
                let prompts = prompts.iter().enumerate().map(|(index, prompt)| {
                    self.tokenise_completion(&prompt_param(input, index), prompt, *echo)
                });
                prompts.collect()
            }
        }
    }

    fn tokenise_chat(&self, chat: Chat<'_>) -> Result<Tokenised, RequestError> {
        let max_bytes = self.model.max_prompt_bytes(self.max_model_len);
        let text = self
            .model
            .render(chat, max_bytes)
            .map_err(|error| render_error(error, max_bytes, self.max_model_len))?;
        let continued = chat
            .continue_final_message
            .then(|| last_content(chat.messages));
        let reasoning = self.model.formats().reasoning;
        let thought = tools::thought_place(reasoning, &text, continued);
        // The template writes the beginning-of-text token itself.
        let tokens = self.encode("messages", &text, false)?;
        let start = match chat.continue_final_message {
            true => TextStart::Continued,
            false => TextStart::Fresh,
        };
        Ok(Tokenised {
            tokens,
            start,
            echo: None,
            thought,
        })
    }

    fn tokenise_completion(
        &self,
        param: &str,
        prompt: &Prompt,
        echo: bool,
    ) -> Result<Tokenised, RequestError> {
        let tokens: Tokens = match prompt {
            Prompt::Text(text) => {
                let max_bytes = self.model.max_prompt_bytes(self.max_model_len);
                if text.len() > max_bytes {
                    return Err(limits::too_many_bytes(param, max_bytes, self.max_model_len));
                }
                self.encode(param, text, true)?
            }
            Prompt::Tokens(ids) => self.truncated(check_ids(self.model, param, ids)?, 0..0),
        };
        let is_shown = |&id: &TokenId| self.model.vocabulary().piece(id).kind != PieceKind::Hidden;
        let start = if tokens.iter().any(is_shown) {
            TextStart::Continued
        } else {
            TextStart::Fresh
        };
        let echo = echo.then(|| match prompt {
            Prompt::Text(text) if self.num_kept.is_none() => text.as_str().into(),
            _ => self.model.decode(&tokens).into(),
        });
        Ok(Tokenised {
            tokens,
            start,
            echo,
            thought: ThoughtPlace::Nowhere,
        })
    }

    fn encode(&self, param: &str, text: &str, is_framed: bool) -> Result<Tokens, RequestError> {
        let is_framed = self.fields.add_special_tokens.unwrap_or(is_framed);
        let is_truncated = self.num_kept.is_some();
        let most = self.max_model_len as usize * if is_truncated { MAX_TRUNCATED } else { 1 };
        let tokens = self.model.encode(text, is_framed, most).map_err(|error| {
            limits::encode_error(param, error, self.max_model_len, is_truncated)
        })?;
        // A tokenizer may know tokens that the model's tables have no row for.
        let tokens = check_ids(self.model, param, &tokens)?;
        let [before, after] = self.model.special_frame();
        let text = match is_framed {
            true => before.len()..tokens.len() - after.len(),
            false => 0..tokens.len(),
        };
        Ok(self.truncated(tokens, text))
    }

    /// The tokens that are kept: those around the text, and of the text as many as fit.
    fn truncated(&self, tokens: Tokens, text: Range<usize>) -> Tokens {
        let Some(num_kept) = self.num_kept.filter(|num| *num < tokens.len()) else {
            return tokens;
        };
        let text = match text.is_empty() {
            true => 0..tokens.len(),
            false => text,
        };
        let num_around = tokens.len() - text.len();
        let (before, rest) = tokens.split_at(text.start);
        let (text, after) = rest.split_at(text.len());
        let num_kept = num_kept.saturating_sub(num_around);
        let kept = match self.fields.truncation_side {
            TruncationSide::Left => &text[text.len() - num_kept..],
            TruncationSide::Right => &text[..num_kept],
        };
        [before, kept, after].concat().into()
    }
}

fn last_content(messages: &[Message]) -> &str {
    let content = messages
        .last()
        .and_then(|message| message.get("content")?.as_str());
    content.unwrap_or_default()
}

/// The name of a prompt in errors: with its index where there are several.
fn prompt_param(input: &Input, index: usize) -> Cow<'static, str> {
    match input {
        Input::Chat { .. } => "messages".into(),
        Input::Completion { prompts, .. } if prompts.len() == 1 => "prompt".into(),
        Input::Completion { .. } => format!("prompt[{index}]").into(),
    }
}

/// The ids as the model's tables have them.
pub(crate) fn check_ids<Id: Copy + Display>(
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

/// Each once, in the client's order.
fn scored_ids(
    model: &ModelText,
    request: &GenerateRequest,
    numbers: &Numbers,
) -> Result<Tokens, RequestError> {
    let mut ids = Vec::new();
    if numbers.logprobs.is_some() {
        let asked = &request.logits.logprob_token_ids;
        for &id in check_ids(model, "logprob_token_ids", asked)?.iter() {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
    }
    Ok(ids.into())
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
        RenderError::LastMessageLost => {
            let problem = "`continue_final_message` is true, and this model's chat template does not show the last message \
                           as it was sent; leave the field out, or continue a text with /v1/completions";
            RequestError::invalid("continue_final_message", problem)
        }
        RenderError::TooLong => limits::too_many_bytes("messages", max_bytes, max_model_len),
        RenderError::Failed(sentence) => {
            let problem =
                format!("the chat template rejects these messages: {sentence}; send others");
            RequestError::new("messages", "chat_template_error", problem)
        }
    }
}
